//! Programs that are copied into a guest: static ones alone, others with their libraries.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::error::ImageError;

const PT_INTERP: u32 = 3;

/// The loader that a program requests; `None` for a static program.
///
/// # Errors
/// When it cannot be read or is no 64-bit little-endian ELF file.
pub fn interpreter(path: &Path) -> Result<Option<String>, ImageError> {
    let bytes = fs::read(path).map_err(|error| ImageError::Read(path.to_owned(), error))?;
    parse(&bytes).ok_or_else(|| ImageError::Format(path.to_owned()))
}

fn parse(elf: &[u8]) -> Option<Option<String>> {
    let word = |at: usize| Some(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?));
    let long = |at: usize| -> Option<usize> {
        let bytes = elf.get(at..at.checked_add(8)?)?.try_into().ok()?;
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    };
    // Class 2: 64 bit; data 1: little-endian.
    if elf.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (table, size, count) = (long(32)?, usize::from(word(54)?), usize::from(word(56)?));
    for index in 0..count {
        let at = table.checked_add(index * size)?;
        let kind = u32::from_le_bytes(elf.get(at..at.checked_add(4)?)?.try_into().ok()?);
        if kind == PT_INTERP {
            let (offset, len) = (long(at.checked_add(8)?)?, long(at.checked_add(32)?)?);
            let text = elf.get(offset..offset.checked_add(len)?)?;
            return Some(Some(
                String::from_utf8_lossy(text)
                    .trim_end_matches('\0')
                    .to_owned(),
            ));
        }
    }
    Some(None)
}

/// The shared libraries and the loader that `path` needs, as (name in the guest, file here).
/// `extra` are directories searched before the system's. Empty for a static program.
///
/// # Errors
/// When the program is unreadable or a library is missing.
pub fn libraries(path: &Path, extra: &[PathBuf]) -> Result<Vec<(String, PathBuf)>, ImageError> {
    let Some(loader) = interpreter(path)? else {
        return Ok(Vec::new());
    };
    let failed = |what: String| ImageError::Libraries(path.to_owned(), what);
    let output = Command::new(&loader)
        .arg("--list")
        .arg(path)
        .env(
            "LD_LIBRARY_PATH",
            std::env::join_paths(extra).unwrap_or_default(),
        )
        .output()
        .map_err(|error| failed(format!("{loader}: {error}")))?;
    if !output.status.success() {
        return Err(failed(
            String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        ));
    }
    let mut libraries = vec![(loader.clone(), PathBuf::from(&loader))];
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        // "\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)"
        let Some((name, rest)) = line.trim().split_once(" => ") else {
            continue;
        };
        let file = rest.rsplit_once(" (").map_or(rest, |(file, _)| file);
        if !file.starts_with('/') {
            return Err(failed(format!("{name}: {file}")));
        }
        libraries.push((format!("/lib/{name}"), PathBuf::from(file)));
    }
    Ok(libraries)
}

/// The program to copy into the guest: the one that ZEROSOCK_GUEST names; else `own` if it is
/// static; else a static build beside it; else `own` with its libraries. `note` receives a text
/// about any choice but the first two.
pub fn for_guest(own: &Path, note: &dyn Fn(String)) -> PathBuf {
    if let Some(named) = std::env::var_os("ZEROSOCK_GUEST") {
        return named.into();
    }
    let is_static = |path: &Path| matches!(interpreter(path), Ok(None));
    if is_static(own) {
        return own.to_owned();
    }
    let name = own.file_name().unwrap_or_default();
    let sibling = own.ancestors().find_map(|dir| {
        let path = dir.join("x86_64-unknown-linux-gnu/release").join(name);
        is_static(&path).then_some(path)
    });
    match sibling {
        Some(path) => {
            note(format!(
                "this program is not static; in the guest runs {}",
                path.display()
            ));
            path
        }
        None => {
            note("this program is not static: its libraries go into the guest too".to_owned());
            own.to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_not_elf_are_refused_and_random_bytes_do_not_panic() {
        assert_eq!(parse(b"#!/bin/sh\n"), None);
        let mut elf = b"\x7fELF\x02\x01".to_vec();
        elf.resize(64, 0xff);
        assert_eq!(parse(&elf), None);
    }

    #[test]
    fn this_test_names_its_loader_or_is_static() {
        let own = std::env::current_exe().unwrap();
        let libraries = libraries(&own, &[]).unwrap();
        assert_eq!(libraries.is_empty(), interpreter(&own).unwrap().is_none());
    }
}
