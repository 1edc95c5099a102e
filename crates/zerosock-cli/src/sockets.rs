//! Listening sockets: TCP, and Unix sockets with a path, whose errors name it; and the limit on
//! sockets.
//!
//! [`zerosock_sys::socket_file`] makes the sockets: it never replaces a path on which a live
//! process listens, removes nothing but sockets, and follows no symbolic link.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Gid, Mode};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use zerosock_sys::socket_file::{self, SocketFileOptions};

pub(crate) use zerosock_sys::socket_file::SocketFile;

/// Longest path of a socket address: sun_path has 108 bytes, one is for the closing NUL.
pub(crate) const MAX_PATH: usize = 107;

/// Backlog; the kernel lowers it to net.core.somaxconn.
const BACKLOG: i32 = 4096;

/// Longest wait for another process that makes a socket in the same directory.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// Why a path is not usable for a socket.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum PathError {
    #[error("the path is empty; name a file to be made")]
    Empty,
    #[error(
        "the path has {0} bytes, and a Unix socket address holds 108 with its closing NUL: \
         shorten it to {MAX_PATH}, or give it relative to the working directory"
    )]
    TooLong(usize),
    #[error("the path contains a NUL byte; remove it")]
    Nul,
    #[error(
        "a name that begins with `@` is an abstract socket, which has no owner or mode: give a path \
         (./@ for a file of this name)"
    )]
    Abstract,
}

/// Checks a path without accessing the file system.
pub(crate) fn check_path(path: &Path) -> Result<(), PathError> {
    let bytes = path.as_os_str().as_bytes();
    match bytes.len() {
        0 => Err(PathError::Empty),
        length if length > MAX_PATH => Err(PathError::TooLong(length)),
        _ if bytes.contains(&0) => Err(PathError::Nul),
        _ if bytes.starts_with(b"@") => Err(PathError::Abstract),
        _ => Ok(()),
    }
}

/// Permissions of a socket made here.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Access {
    /// Permission bits; `None`: 0600, or 0660 with a group.
    pub(crate) mode: Option<Mode>,
    /// The group; `None`: chosen by the kernel.
    pub(crate) gid: Option<Gid>,
}

/// Why no socket could be made at a path.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BindError {
    #[error("{0}: {1}")]
    Path(String, PathError),
    #[error("{0}: in use by a live process; stop that one, or choose another path")]
    InUse(String),
    #[error("{0}: exists and is not a socket; it was left alone, choose another path")]
    NotASocket(String),
    #[error("{path}: cannot find out whether the socket there is in use: {source}")]
    Unprobed { path: String, source: io::Error },
    #[error("{path}: cannot be made: {source}")]
    Bind { path: String, source: io::Error },
    #[error("{path}: --socket-group {gid}: {source}; run as a member of that group, or as root")]
    Group {
        path: String,
        gid: u32,
        source: io::Error,
    },
    #[error("{path}: --socket-mode: {source}")]
    Mode { path: String, source: io::Error },
}

/// Listens on a path for the host programs of a guest: refuses one in use, replaces a stale one. When the
/// socket appears at the path, its permissions are set and it accepts connections.
///
/// This and the next two are reserved: no guest reaches them by their path.
pub(crate) fn bind(path: &Path, access: Access) -> Result<(UnixListener, SocketFile), BindError> {
    let (socket, file) = bind_socket(path, access, SocketType::STREAM, Peers::PROGRAMS)?;
    Ok((UnixListener::from(socket), file))
}

/// As [`bind`], for vhost-user front-ends, which send descriptors.
pub(crate) fn bind_for_frontends(
    path: &Path,
    access: Access,
) -> Result<(UnixListener, SocketFile), BindError> {
    let (socket, file) = bind_socket(path, access, SocketType::STREAM, Peers::FRONTENDS)?;
    Ok((UnixListener::from(socket), file))
}

/// As [`bind`], a socket of type SOCK_SEQPACKET.
pub(crate) fn bind_packets(
    path: &Path,
    access: Access,
) -> Result<(OwnedFd, SocketFile), BindError> {
    bind_socket(path, access, SocketType::SEQPACKET, Peers::PROGRAMS)
}

/// As [`bind`], a socket of type `kind` for any clients.
pub(crate) fn bind_type(
    path: &Path,
    access: Access,
    kind: SocketType,
) -> Result<(OwnedFd, SocketFile), BindError> {
    bind_socket(path, access, kind, Peers::CLIENTS)
}

/// Listens on a TCP address.
pub(crate) fn bind_tcp(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    // Connections of an earlier process in TIME_WAIT do not keep the address.
    net::sockopt::set_socket_reuseaddr(&socket, true)?;
    net::bind(&socket, &address)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// What connects to a socket.
struct Peers {
    refuse_rights: bool,
    reserved: bool,
}

impl Peers {
    const FRONTENDS: Peers = Peers {
        refuse_rights: false,
        reserved: true,
    };
    const PROGRAMS: Peers = Peers {
        refuse_rights: true,
        reserved: true,
    };
    const CLIENTS: Peers = Peers {
        refuse_rights: true,
        reserved: false,
    };
}

fn bind_socket(
    path: &Path,
    access: Access,
    kind: SocketType,
    peers: Peers,
) -> Result<(OwnedFd, SocketFile), BindError> {
    let name = || path.display().to_string();
    check_path(path).map_err(|reason| BindError::Path(name(), reason))?;
    let options = SocketFileOptions {
        kind,
        mode: access.mode,
        gid: access.gid,
        backlog: BACKLOG,
        refuse_rights: peers.refuse_rights,
        reserved: peers.reserved,
        lock_wait: LOCK_WAIT,
    };
    socket_file::bind(path, options).map_err(|error| {
        let path = name();
        match error {
            socket_file::BindError::InUse => BindError::InUse(path),
            socket_file::BindError::NotASocket => BindError::NotASocket(path),
            socket_file::BindError::Unprobed(source) => BindError::Unprobed { path, source },
            socket_file::BindError::Mode(source) => BindError::Mode { path, source },
            socket_file::BindError::Make(source) => BindError::Bind { path, source },
            socket_file::BindError::Group(source) => BindError::Group {
                path,
                gid: access.gid.map_or(0, Gid::as_raw),
                source,
            },
        }
    })
}

/// Raises the soft limit of descriptors to the hard one: every connection uses one or two, and the
/// usual limit of 1024 exists for programs that use select(2).
///
/// # Errors
/// Why it stays, for the log.
pub(crate) fn raise_descriptor_limit() -> Result<(), String> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    setrlimit(Resource::Nofile, raised).map_err(|errno| {
        let now = limit.current;
        format!("cannot raise the limit of open files (RLIMIT_NOFILE) above {now:?}: {errno}")
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn dir() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
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
        assert!(matches!(error, BindError::InUse(_)), "{error}");
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
        assert!(matches!(error, BindError::InUse(_)), "{error}");
        drop(socket);
        std::mem::forget(file);
        let (_socket, file) = bind_packets(&path, Access::default()).unwrap();
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced() {
        let dir = dir();
        let path = dir.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let (_listener, _file) = bind(&path, Access::default()).unwrap();
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
            assert!(matches!(error, BindError::NotASocket(_)), "{error}");
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
}
