//! Unit tests of `sockets`.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::*;

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn is(error: &BindError, what: &str) -> bool {
    matches!(error, BindError::Make { .. }) && error.to_string().contains(what)
}

/// Binds where a socket was closed. A process that another test starts may hold it for a moment, and then it is
/// alive.
fn bind_again<T>(bind: impl Fn() -> Result<T, BindError>) -> T {
    let end = Instant::now() + Duration::from_secs(300);
    loop {
        match bind() {
            Err(error) if is(&error, "in use by a live process") && Instant::now() < end => {
                std::thread::yield_now();
            }
            bound => return bound.unwrap(),
        }
    }
}

#[test]
fn a_socket_is_created_at_a_free_path_and_removed_on_drop() {
    let dir = dir();
    let path = dir.path().join("s");
    let (listener, file) = bind(&path, Access::default()).unwrap();
    UnixStream::connect(&path).unwrap();
    drop(listener);
    assert!(path.exists());
    drop(file);
    assert!(!path.exists());
}

#[test]
fn a_live_socket_is_refused_and_not_disturbed() {
    let dir = dir();
    let path = dir.path().join("s");
    let live = UnixListener::bind(&path).unwrap();
    live.set_nonblocking(true).unwrap();
    let error = bind(&path, Access::default()).unwrap_err();
    assert!(
        is(&error, "in use by a live process; stop that one"),
        "{error}"
    );
    assert!(path.exists());
    // Not even a connection that is accepted and closed.
    assert_eq!(live.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    drop(UnixStream::connect(&path).unwrap());
    live.accept().unwrap();
}

#[test]
fn packet_sockets_are_claimed_in_the_same_way() {
    let dir = dir();
    let path = dir.path().join("s");
    let (socket, file) = bind_packets(&path, Access::default()).unwrap();
    let kind = rustix::net::sockopt::socket_type(&socket).unwrap();
    assert_eq!(kind, SocketType::SEQPACKET);
    let error = bind_packets(&path, Access::default()).unwrap_err();
    assert!(
        is(&error, "in use by a live process; stop that one"),
        "{error}"
    );
    drop(socket);
    std::mem::forget(file);
    let (_socket, file) = bind_again(|| bind_packets(&path, Access::default()));
    drop(file);
    assert!(!path.exists());
}

#[test]
fn a_stale_socket_is_replaced() {
    let dir = dir();
    let path = dir.path().join("s");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let (_listener, _file) = bind_again(|| bind(&path, Access::default()));
    UnixStream::connect(&path).unwrap();
}

#[test]
fn a_file_that_is_not_a_socket_is_kept() {
    let dir = dir();
    let file = dir.path().join("file");
    fs::write(&file, "precious").unwrap();
    let link = dir.path().join("link");
    let socket = dir.path().join("socket");
    drop(UnixListener::bind(&socket).unwrap());
    std::os::unix::fs::symlink(&socket, &link).unwrap();
    for path in [&file, &link, &dir.path().to_path_buf()] {
        let error = bind(path, Access::default()).unwrap_err();
        assert!(
            is(&error, "exists and is not a socket; it was left alone"),
            "{error}"
        );
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    assert!(
        fs::symlink_metadata(&link)
            .unwrap()
            .file_type()
            .is_symlink()
    );
}

#[test]
fn a_socket_of_another_process_at_the_path_is_not_removed() {
    let dir = dir();
    let path = dir.path().join("s");
    let (listener, file) = bind(&path, Access::default()).unwrap();
    drop(listener);
    // Keeps the inode number in use, so that the next socket cannot get it.
    fs::hard_link(&path, dir.path().join("kept")).unwrap();
    let (_other, _other_file) = bind(&path, Access::default()).unwrap();
    drop(file);
    UnixStream::connect(&path).unwrap();
}

#[test]
fn mode_and_group_are_set() {
    let dir = dir();
    let path = dir.path().join("s");
    let gid = rustix::process::getegid();
    let access = Access {
        mode: Some(Mode::from_raw_mode(0o621)),
        gid: Some(gid),
    };
    let (_listener, _file) = bind(&path, access).unwrap();
    let made = fs::metadata(&path).unwrap();
    assert_eq!(made.permissions().mode() & 0o7777, 0o621);
    assert_eq!(made.gid(), gid.as_raw());
}

#[test]
fn a_path_is_judged_by_its_length() {
    let dir = dir();
    let room = MAX_PATH - dir.path().as_os_str().len() - 1;
    let longest = dir.path().join("x".repeat(room));
    assert_eq!(check_path(&longest), Ok(()));
    bind(&longest, Access::default()).unwrap();
    let longer = dir.path().join("x".repeat(room + 1));
    assert_eq!(check_path(&longer), Err(PathError::TooLong(MAX_PATH + 1)));
    let said = bind(&longer, Access::default()).unwrap_err().to_string();
    assert!(
        said.contains("108 bytes") && said.contains("holds 108"),
        "{said}"
    );
    assert_eq!(check_path(Path::new("")), Err(PathError::Empty));
    assert_eq!(check_path(Path::new("@a")), Err(PathError::Abstract));
    assert_eq!(check_path(Path::new("./@a")), Ok(()));
}

#[test]
fn a_missing_directory_is_named() {
    let error = bind(Path::new("/nonexistent/s"), Access::default()).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("/nonexistent/s: cannot be made: "),
        "{error}"
    );
}

#[test]
fn of_many_claims_on_a_stale_socket_one_wins() {
    let dir = dir();
    let path = dir.path().join("s");
    for _ in 0..20 {
        drop(UnixListener::bind(&path).unwrap());
        let start = std::sync::Barrier::new(4);
        let won = std::thread::scope(|scope| {
            let tries: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        bind(&path, Access::default()).ok()
                    })
                })
                .collect();
            let won: Vec<_> = tries
                .into_iter()
                .filter_map(|t| t.join().unwrap())
                .collect();
            assert!(UnixStream::connect(&path).is_ok());
            won.len()
        });
        assert_eq!(won, 1);
    }
}
