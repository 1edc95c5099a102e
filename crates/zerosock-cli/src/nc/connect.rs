//! From an endpoint to a connected, blocking stream socket.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::attached::{self, Role};
use super::endpoint::Endpoint;
use super::wire::Wire;
use crate::sockets;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("connection refused: {0}")]
    Refused(String),
    #[error("timed out {0}")]
    TimedOut(String),
    #[error(transparent)]
    Bind(#[from] sockets::BindError),
    #[error("{0} (not a hybrid vsock socket?)")]
    Handshake(String),
    #[error("{doing}: {source}")]
    Attached { doing: String, source: io::Error },
    #[error("{doing}: {source}")]
    System { doing: String, source: io::Error },
}

impl ConnectError {
    /// Whether the peer may simply not be up yet.
    fn may_pass(&self) -> bool {
        match self {
            ConnectError::Refused(_) => true,
            ConnectError::System { source, .. } => matches!(
                Errno::from_io_error(source),
                Some(
                    Errno::NOENT
                        | Errno::NODEV
                        | Errno::NETUNREACH
                        | Errno::HOSTUNREACH
                        | Errno::TIMEDOUT
                        | Errno::ADDRNOTAVAIL
                        | Errno::AGAIN
                )
            ),
            ConnectError::Attached { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::ConnectionRefused
                    | io::ErrorKind::ConnectionReset
                    | io::ErrorKind::HostUnreachable
                    | io::ErrorKind::TimedOut
            ),
            _ => false,
        }
    }
}

/// When to give up; `None` never.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) fn after(limit: Option<Duration>) -> Deadline {
        Deadline(limit.map(|limit| Instant::now() + limit))
    }

    fn left(self) -> Option<Duration> {
        self.0
            .map(|at| at.saturating_duration_since(Instant::now()))
    }

    fn is_over(self) -> bool {
        self.left() == Some(Duration::ZERO)
    }
}

/// Connects, or waits for one connection. `listening` is called when others may connect.
pub(crate) fn establish(
    endpoint: &Endpoint,
    deadline: Deadline,
    retry: bool,
    listening: impl Fn(),
) -> Result<Wire, ConnectError> {
    // Short at first, because a guest's service is often a moment away; then patient.
    let mut pause = Duration::from_millis(20);
    loop {
        let result = match endpoint {
            Endpoint::Vsock { cid, port } => vsock(*cid, *port, deadline).map(Wire::from),
            Endpoint::VsockListen { port } => {
                vsock_listen(*port, deadline, &listening).map(Wire::from)
            }
            Endpoint::Unix(path) => unix(path, deadline).map(OwnedFd::from).map(Wire::from),
            Endpoint::UnixListen(path) => unix_listen(path, deadline, &listening).map(Wire::from),
            Endpoint::Hybrid { path, port } => hybrid(path, *port, deadline).map(Wire::from),
            Endpoint::Attach { path, to, port } => {
                attached::connect(Role::Process, path, to, *port, deadline.left())
            }
            Endpoint::AttachListen { path, port } => {
                attached::listen(Role::Process, path, *port, deadline.left(), &listening)
            }
            Endpoint::Service { path, to, port } => {
                attached::connect(Role::Service, path, to, *port, deadline.left())
            }
            Endpoint::ServiceListen { path, port } => {
                attached::listen(Role::Service, path, *port, deadline.left(), &listening)
            }
        };
        match result {
            Err(error) if retry && error.may_pass() => {
                if deadline.left().is_some_and(|left| left <= pause) {
                    return Err(error);
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(500));
            }
            result => return result,
        }
    }
}

fn vsock(cid: u32, port: u32, deadline: Deadline) -> Result<OwnedFd, ConnectError> {
    let failed = |error: io::Error| match Errno::from_io_error(&error) {
        Some(Errno::CONNRESET | Errno::CONNREFUSED) => {
            ConnectError::Refused(format!("nobody listens on port {port} of CID {cid}"))
        }
        Some(Errno::AFNOSUPPORT) => ConnectError::System {
            doing: "this kernel has no AF_VSOCK (modprobe vsock; on a host use hybrid:PATH:PORT)"
                .into(),
            source: error,
        },
        _ => ConnectError::System {
            doing: format!("connecting to vsock:{cid}:{port}"),
            source: error,
        },
    };
    let socket = zerosock_sys::vsock::connect(cid, port).map_err(failed)?;
    if !wait_for(&socket, PollFlags::OUT, deadline).map_err(failed)? {
        return Err(ConnectError::TimedOut(format!(
            "connecting to vsock:{cid}:{port}"
        )));
    }
    zerosock_sys::vsock::connect_result(&socket).map_err(failed)?;
    rustix::io::ioctl_fionbio(&socket, false).map_err(|errno| failed(errno.into()))?;
    Ok(socket)
}

fn vsock_listen(
    port: u32,
    deadline: Deadline,
    listening: &impl Fn(),
) -> Result<OwnedFd, ConnectError> {
    let failed = |source: io::Error| ConnectError::System {
        doing: format!("listening on vsock port {port}"),
        source,
    };
    let any = zerosock_sys::vsock::CID_ANY;
    let listener = zerosock_sys::vsock::listen(any, port, 1).map_err(failed)?;
    listening();
    if !wait_for(&listener, PollFlags::IN, deadline).map_err(failed)? {
        return Err(ConnectError::TimedOut(format!(
            "waiting for a connection to port {port}"
        )));
    }
    let (socket, _, _) = zerosock_sys::vsock::accept_blocking(&listener).map_err(failed)?;
    Ok(socket)
}

fn unix(path: &Path, deadline: Deadline) -> Result<UnixStream, ConnectError> {
    let failed = |errno: Errno| match errno {
        Errno::CONNREFUSED => ConnectError::Refused(format!(
            "nobody listens on {} (a stale socket)",
            path.display()
        )),
        // With a time to send in, connect() answers so when the listener's backlog stays full.
        Errno::AGAIN if deadline.is_over() => ConnectError::TimedOut(format!(
            "connecting to {}: its backlog is full",
            path.display()
        )),
        errno => ConnectError::System {
            doing: format!("connecting to {}", path.display()),
            source: errno.into(),
        },
    };
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(failed)?;
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    set_time_to_send(&socket, deadline.left()).map_err(failed)?;
    rustix::net::connect(&socket, &address).map_err(failed)?;
    set_time_to_send(&socket, None).map_err(failed)?;
    Ok(UnixStream::from(socket))
}

fn set_time_to_send(socket: &OwnedFd, limit: Option<Duration>) -> rustix::io::Result<()> {
    // Zero would mean for ever.
    let limit = limit.map(|limit| limit.max(Duration::from_millis(1)));
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Send, limit)
}

fn unix_listen(
    path: &Path,
    deadline: Deadline,
    listening: &impl Fn(),
) -> Result<OwnedFd, ConnectError> {
    let failed = |source: io::Error| ConnectError::System {
        doing: format!("listening on {}", path.display()),
        source,
    };
    // While the socket file exists, a signal must not leave it behind: the wait below is then
    // interrupted. Once a connection is there, the signals do again what they always did.
    let asked = Asked::catch().map_err(failed)?;
    let (listener, file) = sockets::bind(path, sockets::Access::default())?;
    listening();
    let accepted = asked.wait_for_connection(&listener, deadline);
    drop(file);
    asked.restore_default();
    match accepted.map_err(failed)? {
        Some(stream) => Ok(stream.into()),
        None => {
            let waiting = format!("waiting for a connection at {}", path.display());
            Err(ConnectError::TimedOut(waiting))
        }
    }
}

/// SIGINT and SIGTERM while a socket file of ours exists.
struct Asked {
    restored: Arc<AtomicBool>,
    by: [(i32, UnixStream); 2],
}

impl Asked {
    fn catch() -> io::Result<Asked> {
        let restored = Arc::new(AtomicBool::new(false));
        let watch = |signal| {
            let (ours, handlers) = UnixStream::pair()?;
            signal_hook::flag::register_conditional_default(signal, restored.clone())?;
            signal_hook::low_level::pipe::register(signal, handlers)?;
            io::Result::Ok((signal, ours))
        };
        Ok(Asked {
            restored: restored.clone(),
            by: [watch(SIGTERM)?, watch(SIGINT)?],
        })
    }

    fn wait_for_connection(
        &self,
        listener: &UnixListener,
        deadline: Deadline,
    ) -> io::Result<Option<UnixStream>> {
        loop {
            let [(_, terminate), (_, interrupt)] = &self.by;
            let mut watched = [
                PollFd::new(listener, PollFlags::IN),
                PollFd::new(terminate, PollFlags::IN),
                PollFd::new(interrupt, PollFlags::IN),
            ];
            match rustix::event::poll(&mut watched, timespec(deadline.left()).as_ref()) {
                Ok(0) => return Ok(None),
                Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(errno) => return Err(errno.into()),
            }
            let [connection, rest @ ..] = watched.map(|fd| !fd.revents().is_empty());
            if rest.contains(&true) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            if connection {
                return listener.accept().map(|(stream, _)| Some(stream));
            }
        }
    }

    fn restore_default(&self) {
        self.restored.store(true, Ordering::SeqCst);
    }
}

/// CONNECT and OK, byte by byte: whatever follows the newline is the guest's.
fn hybrid(path: &Path, port: u32, deadline: Deadline) -> Result<OwnedFd, ConnectError> {
    /// `OK `, ten digits and a newline, and some patience for other programs' blanks.
    const LONGEST_ANSWER: usize = 64;

    let mut stream = unix(path, deadline)?;
    let refused = || {
        ConnectError::Refused(format!(
            "{} closed without OK: nobody listens on port {port} in the guest, or no guest is up",
            path.display()
        ))
    };
    match stream.write_all(format!("CONNECT {port}\n").as_bytes()) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(refused()),
        Err(source) => {
            return Err(ConnectError::System {
                doing: "sending CONNECT".into(),
                source,
            });
        }
    }
    let failed = |source| ConnectError::System {
        doing: format!("waiting for OK from {}", path.display()),
        source,
    };
    let mut answer = Vec::with_capacity(LONGEST_ANSWER);
    loop {
        if !wait_for(&stream, PollFlags::IN, deadline).map_err(failed)? {
            return Err(ConnectError::TimedOut(format!(
                "waiting for OK from {}",
                path.display()
            )));
        }
        let mut byte = [0];
        match rustix::net::recv(&stream, &mut byte, RecvFlags::empty()) {
            Err(Errno::INTR) => continue,
            Ok((0, _)) | Err(Errno::CONNRESET) => return Err(refused()),
            Err(errno) => return Err(failed(errno.into())),
            Ok(_) => {}
        }
        if byte == *b"\n" {
            break;
        }
        answer.extend(byte);
        if answer.len() == LONGEST_ANSWER {
            break;
        }
    }
    let text = String::from_utf8_lossy(&answer);
    match text.trim_end().strip_prefix("OK ").map(str::parse::<u32>) {
        Some(Ok(_)) => Ok(stream.into()),
        _ => {
            let said = text.escape_debug();
            Err(ConnectError::Handshake(format!(
                "{} answered `{said}` to CONNECT",
                path.display()
            )))
        }
    }
}

/// Waits until one of `events` (or an error) is there; false when the time is up.
fn wait_for(fd: impl AsFd, events: PollFlags, deadline: Deadline) -> io::Result<bool> {
    loop {
        let left = timespec(deadline.left());
        match rustix::event::poll(&mut [PollFd::new(&fd, events)], left.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn timespec(left: Option<Duration>) -> Option<Timespec> {
    // The limits of `--timeout` are far below what a timespec holds.
    left.and_then(|left| Timespec::try_from(left).ok())
}
