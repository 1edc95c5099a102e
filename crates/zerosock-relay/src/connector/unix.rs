//! Connecting to a Unix socket.
//!
//! # Invariants
//! - The socket refuses descriptors before it is connected, if the kernel can do that (Linux 6.16).
//!   Elsewhere closing it may wait for an object of the server: the reaper does that.
//! - The connector's thread waits for no file system: a path that may lead into one with a server is
//!   resolved by the [`reaper`]'s threads, at most [`LOOKUPS_AT_ONCE`] for each of [`Lookups`]. Links and file
//!   systems of other users are refused ([`socket_path`]).

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with,
};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout_at};
use zerosock_sys::PeerFd;
use zerosock_sys::account::{Account, Budget};
use zerosock_sys::{fd_passing, reaper, socket_path};

use super::dial::refused_or;
use super::error::{ConnectError, ConnectStage};

/// The first and the longest pause while the backlog of the listener is full. The kernel reports room
/// in it to blocked callers only, not by epoll.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// The account of descriptors that peers of relays and servers of targets have sent, and of sockets into
/// which they can send some. They are closed as soon as they are received.
pub(crate) static RIGHTS: LazyLock<Account> = LazyLock::new(|| Budget::unlimited().account());

/// What EACCES means for the path of a Unix socket.
pub const NO_PERMISSION: &str = "this user may not write to the socket, or not enter its directory; \
    --socket-group and --socket-mode of the program that made it permit it";

/// Connects a socket of some type to a path. While the backlog of the listener is full it tries again,
/// until `deadline`.
pub(super) async fn dial(
    path: &Path,
    kind: SocketType,
    deadline: Instant,
) -> Result<(PeerFd, Option<SocketAddr>), ConnectError> {
    let failed = |error: Errno| refused_or(error.into(), None);
    // A path that is too long for an address is an error of its own.
    SocketAddrUnix::new(path).map_err(failed)?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None).map_err(failed)?;
    let mut socket = PeerFd::from(socket).owned_by(&RIGHTS);
    fd_passing::refuse_rights(&socket)?;
    if kind == SocketType::DGRAM {
        // An address that the kernel chooses, so that the other end can answer.
        bind(&socket, &SocketAddrUnix::new_unnamed()).map_err(failed)?;
    }
    let (mut pause, longest) = PAUSES;
    loop {
        let result = match socket_path::find_cached(path) {
            Ok(Some(found)) => connect(&socket, found.address()).map_err(io::Error::from),
            Ok(None) => {
                let answer = connect_elsewhere(path, socket);
                let Ok(answer) = timeout_at(deadline, answer).await else {
                    return Err(ConnectError::TimedOut(ConnectStage::LookingUp));
                };
                let (again, result) = answer?;
                socket = again;
                result
            }
            Err(error) => Err(error),
        };
        match result {
            Ok(()) => return Ok((socket, None)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(refused_or(error, None)),
        }
        let now = Instant::now();
        if now >= deadline {
            return Err(ConnectError::TimedOut(ConnectStage::Connecting));
        }
        sleep_until(deadline.min(now + pause)).await;
        pause = longest.min(pause * 2);
    }
}

/// Paths that are resolved at once, or wait for it, of those that share an account.
const LOOKUPS_AT_ONCE: usize = 256;

/// Accounts of the threads that resolve paths: a path whose file system does not answer keeps only those
/// waiting that share its account.
static LOOKUPS: LazyLock<[Lookups; 8]> = LazyLock::new(Default::default);

struct Lookups {
    account: Account,
    /// Each clone is a lookup.
    pending: Arc<()>,
}

impl Default for Lookups {
    fn default() -> Lookups {
        Lookups {
            account: Budget::unlimited().account(),
            pending: Arc::default(),
        }
    }
}

/// The place of a path's account in [`LOOKUPS`].
fn group(path: &Path) -> usize {
    let mut hasher = DefaultHasher::new();
    path.hash(&mut hasher);
    hasher.finish() as usize % LOOKUPS.len()
}

/// Resolves a path and connects to it, on a thread that may wait. The outer error: it was not tried.
async fn connect_elsewhere(
    path: &Path,
    socket: PeerFd,
) -> Result<(PeerFd, io::Result<()>), ConnectError> {
    let lookups = &LOOKUPS[group(path)];
    if Arc::strong_count(&lookups.pending) > LOOKUPS_AT_ONCE {
        return Err(ConnectError::Busy);
    }
    let (pending, path) = (Arc::clone(&lookups.pending), path.to_path_buf());
    let (answer, answered) = oneshot::channel();
    let work = move || {
        let _pending = pending;
        // The request may be over.
        if answer.is_closed() {
            return;
        }
        let found = socket_path::find(&path);
        let result = found.and_then(|found| Ok(connect(&socket, found.address())?));
        let _ = answer.send((socket, result));
    };
    reaper::run(work, Some(&lookups.account));
    answered.await.map_err(|_| ConnectError::Stopped)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// As if a file system did not answer.
    #[tokio::test]
    async fn paths_that_do_not_answer_leave_those_of_other_groups() {
        let socket = || {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
            PeerFd::from(socket.unwrap()).owned_by(&RIGHTS)
        };
        let dir = tempfile::tempdir().unwrap();
        let mut paths = (0..1000).map(|number| dir.path().join(number.to_string()));
        let stuck: PathBuf = paths.next().unwrap();
        let other = paths.find(|path| group(path) != group(&stuck)).unwrap();
        let waiting = vec![Arc::clone(&LOOKUPS[group(&stuck)].pending); LOOKUPS_AT_ONCE];
        let refused = connect_elsewhere(&stuck, socket()).await;
        assert!(matches!(refused, Err(ConnectError::Busy)), "{refused:?}");
        let missing = |answer: Result<(PeerFd, io::Result<()>), ConnectError>| {
            let (_, result) = answer.expect("it was tried");
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::NotFound);
        };
        missing(connect_elsewhere(&other, socket()).await);
        drop(waiting);
        missing(connect_elsewhere(&stuck, socket()).await);
    }
}
