//! The option `guest-endpoints`: each way to write it, and key files that are refused.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use clap::Parser;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

use super::*;
use crate::args::{Cli, Command};
use crate::serve::settings::Settings;

const KEY: &[u8] = b"a key of 24 random bytes";

/// A directory with a key file of this mode, and its path.
fn file_with_key(bytes: &[u8], mode: u32) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    std::fs::write(&path, bytes).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    (dir, path)
}

fn settings(words: &[&str]) -> Result<Settings, String> {
    let words = ["zerosock", "serve"].iter().chain(words);
    match Cli::try_parse_from(words).unwrap().command {
        Command::Serve(args) => Settings::new(*args).map_err(|error| error.to_string()),
        other => panic!("{other:?}"),
    }
}

/// The options of the only VM in a file with these lines.
fn in_file(lines: &str) -> Result<Option<GuestEndpoints>, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vms.yaml");
    let text = format!("vms:\n  - socket: /a\n    uds_path: /b\n{lines}");
    std::fs::write(&path, text).unwrap();
    let mut settings = settings(&["--config", path.to_str().unwrap()])?;
    Ok(settings.vms.remove(0).guest_endpoints)
}

#[test]
fn each_way_to_write_it_is_read() {
    let (_dir, path) = file_with_key(KEY, 0o600);
    let path = path.to_str().unwrap();
    let of = |words: &[&str]| settings(words).unwrap().vms.remove(0).guest_endpoints;
    let vm = ["--socket", "/a", "--uds-path", "/b"];
    assert_eq!(of(&vm), None, "off by default");
    let option = ["--guest-endpoints", path];
    let by_flag = of(&[&vm[..], &option].concat()).unwrap();
    assert_eq!(by_flag.key, GuestKey::new(KEY).unwrap());
    assert_eq!((by_flag.most, by_flag.memory), (16, 1 << 30));
    assert_eq!(by_flag.names, []);
    let pairs = format!("socket=/a,uds-path=/b,guest-endpoints={path}");
    assert_eq!(of(&["--vm", &pairs]).as_ref(), Some(&by_flag));
    let scalar = format!("    guest_endpoints: {path}\n");
    assert_eq!(in_file(&scalar).unwrap().as_ref(), Some(&by_flag));
    let port_only = in_file("    guest-endpoints: port-only\n")
        .unwrap()
        .unwrap();
    assert_eq!(port_only.key, GuestKey::none());
    assert_ne!(port_only, by_flag);
    let table = format!(
        "    guest_endpoints: {{key: {path}, number: 4, memory: 256M, names: [web, db]}}\n"
    );
    let table = in_file(&table).unwrap().unwrap();
    assert_eq!((table.most, table.memory), (4, 256 << 20));
    let names: Vec<_> = table.names.iter().map(Name::as_str).collect();
    assert_eq!(names, ["web", "db"]);
    let shown = format!("{table:?}");
    assert!(
        !shown.contains("random") && shown.contains("GuestKey"),
        "{shown}"
    );
}

#[test]
fn wrong_values_are_named() {
    let (_dir, path) = file_with_key(KEY, 0o600);
    let path = path.display();
    for (lines, wanted) in [
        (
            format!("{{key: {path}, number: 0}}"),
            "guest_endpoints 0: give a number of endpoints from 1 to 64",
        ),
        (
            format!("{{key: {path}, number: 65}}"),
            "guest_endpoints 65: give a number",
        ),
        (
            format!("{{key: {path}, memory: 1M}}"),
            "guest_endpoints 1048576: an endpoint has at least one",
        ),
        (
            format!("{{key: {path}, names: 'a/b'}}"),
            "guest_endpoints a/b: ",
        ),
        (
            format!("{{key: {path}, most: 1}}"),
            "expected the path of a key file, or `port-only`",
        ),
        (
            "{number: 1}".into(),
            "expected the path of a key file, or `port-only`",
        ),
        (
            "true".into(),
            "expected the path of a key file, or `port-only`",
        ),
    ] {
        let said = in_file(&format!("    guest_endpoints: {lines}\n")).unwrap_err();
        assert!(said.contains(wanted), "{lines}: {said}");
    }
}

#[test]
fn a_key_file_is_private_and_has_a_key() {
    let fix = |path: &Path| key_file::read(path, "port-only").unwrap_err();
    for mode in [0o640, 0o604, 0o660, 0o601, 0o777] {
        let (_dir, path) = file_with_key(KEY, mode);
        assert_eq!(
            fix(&path),
            format!("other users may use the file, mode {mode:04o}: change it to 0600")
        );
    }
    for mode in [0o600, 0o400] {
        let (_dir, path) = file_with_key(KEY, mode);
        assert!(key_file::read(&path, "port-only").is_ok(), "{mode:o}");
    }
    for (bytes, wanted) in [
        (
            &b""[..],
            "a key of 0 bytes, at least 16 are needed; give the path",
        ),
        (b"15 bytes, short", "a key of 15 bytes"),
        (&[0; 32], "a key of zeroes only is no secret; give the path"),
        (&[7; 4097], "longer than 4096 bytes; give the path"),
    ] {
        let (_dir, path) = file_with_key(bytes, 0o600);
        let said = fix(&path);
        assert!(said.starts_with(wanted), "{said}");
    }
    let (dir, path) = file_with_key(KEY, 0o600);
    // A link to a key is as good as the key.
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert!(key_file::read(&link, "port-only").is_ok());
    if std::os::unix::fs::chown(&path, Some(1234), None).is_ok() {
        assert!(fix(&link).starts_with("user 1234 owns the file"));
    } else {
        println!("SKIPPED: only root gives a file to another user");
    }
    assert!(fix(dir.path()).starts_with("not a regular file; give the path"));
    // Opening it would wait for a writer.
    let fifo = dir.path().join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR, 0).unwrap();
    assert!(fix(&fifo).starts_with("not a regular file; give the path"));
    let missing = fix(&dir.path().join("missing"));
    assert!(
        missing.starts_with("No such file or directory"),
        "{missing}"
    );
}
