//! The umask does not decide the mode of a socket. Alone in its process, because the umask is the process's.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use rustix::fs::Mode;
use rustix::net::SocketType;
use zerosock_sys::socket_file::{SocketFileOptions, bind};

#[test]
fn the_umask_has_no_effect() {
    let directory = tempfile::tempdir().unwrap();
    for (umask, mode, wanted) in [
        (0o077, Some(0o666), 0o666),
        (0o077, Some(0o660), 0o660),
        (0o077, None, 0o600),
        (0o000, None, 0o600),
    ] {
        rustix::process::umask(Mode::from_raw_mode(umask));
        let path = directory.path().join("s");
        let options = SocketFileOptions {
            kind: SocketType::SEQPACKET,
            mode: mode.map(Mode::from_raw_mode),
            gid: None,
            backlog: 1,
            refuse_rights: true,
            reserved: false,
            lock_wait: Duration::ZERO,
        };
        let (_socket, _file) = bind(&path, options).unwrap();
        let made = std::fs::symlink_metadata(&path).unwrap();
        assert_eq!(
            made.permissions().mode() & 0o7777,
            wanted,
            "{umask:o} {mode:?}"
        );
    }
}
