//! Unit tests of `socket_file`.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use super::*;

fn bind(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let (socket, file) = super::bind(path, SocketKind::Frontend, Some(0o600), None)?;
    Ok((UnixListener::from(socket), file))
}

#[test]
fn a_socket_file_is_replaced_only_if_no_process_listens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "left behind");
    let (listener, file) = bind(&path).unwrap();
    let error = bind(&path).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "only the owner may connect");
    listener.set_nonblocking(true).unwrap();
    let error = listener.accept().unwrap_err();
    assert_eq!(
        error.kind(),
        io::ErrorKind::WouldBlock,
        "the probe is not noticed"
    );
    drop(file);
    assert!(!path.exists());
}

#[test]
fn a_file_of_another_kind_or_owner_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, "mine").unwrap();
    assert!(bind(&path).is_err());
    assert!(path.exists());
    let path = dir.path().join("socket");
    let (_listener, file) = bind(&path).unwrap();
    // Created before the other is removed, so that it gets another inode.
    let other = dir.path().join("other");
    std::fs::write(&other, "another process's").unwrap();
    std::fs::rename(&other, &path).unwrap();
    drop(file);
    assert!(path.exists());
}
