//! How a client frees the pages of its own file.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr;

use rustix::fs::{FallocateFlags, fallocate, fstat, ftruncate};
use rustix::mm::{Advice, madvise};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use super::terms::{How, PAGES};

/// The only file of the agent that this process has open.
fn own_file() -> io::Result<(i32, String)> {
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        // The descriptor of the directory itself is closed meanwhile.
        let target = fs::read_link(entry.path()).unwrap_or_default();
        if target.starts_with(PAGES)
            && let Some(fd) = entry.file_name().to_str().and_then(|it| it.parse().ok())
        {
            return Ok((fd, target.to_string_lossy().into_owned()));
        }
    }
    Err(io::Error::other("no file of huge pages is open"))
}

/// Frees all pages of the memory of the endpoint of this process.
pub(super) fn free_own_pages(how: How) -> io::Result<()> {
    let (fd, path) = own_file()?;
    if how == How::Remove {
        return remove_mapping(&path);
    }
    // The endpoint owns the descriptor; this is a copy.
    let own = pidfd_open(getpid(), PidfdFlags::empty())?;
    let file: OwnedFd = pidfd_getfd(own, fd, PidfdGetfdFlags::empty())?;
    match how {
        How::Truncate => ftruncate(&file, 0)?,
        _ => {
            let len = fstat(&file)?.st_size as u64;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&file, flags, 0, len)?;
        }
    }
    Ok(())
}

/// MADV_REMOVE on the mapping of this file.
fn remove_mapping(path: &str) -> io::Result<()> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let mut mappings = maps.lines().filter(|line| line.ends_with(path));
    let range = mappings.next().and_then(|line| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let [start, end] = [start, end].map(|it| usize::from_str_radix(it, 16).ok());
        Some((start?, end?))
    });
    let (start, end) = range.ok_or_else(|| io::Error::other("the file is not mapped"))?;
    let address = ptr::with_exposed_provenance_mut(start);
    // SAFETY: the mapping is that of memory which the daemon on the host writes as well, so all of this process's
    // accesses to it are volatile. Later ones find zeroes.
    unsafe { madvise(address, end - start, Advice::LinuxRemove)? };
    Ok(())
}
