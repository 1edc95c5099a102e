//! Connects to the endpoint of `nc`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, sockopt};

use super::attached;
use super::connection::{Connection, Kind, Transport};
use super::deadline::{Deadline, timespec};
use super::endpoint::Endpoint;
use super::error::ConnectError;
use super::listen::Acceptor;
use zerosock_relay::connector::NO_PERMISSION;
use zerosock_relay::relay::CLOSED_WITHOUT_OK;

/// What a reset in the place of an answer can mean: it carries no reason.
pub(crate) const REFUSED_BY_PEER: &str = "no listener, its backlog is full, a target that does not accept, \
    or access is denied; `serve --log-level debug` logs which";

/// Binds a listening endpoint; `None` if `endpoint` connects.
pub(super) fn bind(
    endpoint: &Endpoint,
    kind: Kind,
    backlog: i32,
    deadline: Deadline,
    retry: bool,
) -> Result<Option<Acceptor>, ConnectError> {
    repeat(deadline, retry, || {
        Acceptor::bind(endpoint, kind, backlog, deadline)
    })
}

/// Connects, or waits for a datagram. Calls `listening` when peers can send one.
pub(super) fn establish(
    endpoint: &Endpoint,
    transport: Transport,
    deadline: Deadline,
    retry: bool,
    listening: impl Fn(),
) -> Result<Connection, ConnectError> {
    repeat(deadline, retry, || match (endpoint, transport) {
        (
            Endpoint::Attach {
                role,
                path,
                to,
                port,
            },
            _,
        ) => attached::connect(*role, path, to, *port, transport, deadline.left()),
        (Endpoint::AttachListen { role, path, port }, Transport::Datagrams) => {
            attached::receive_datagrams(*role, path, *port, deadline.left(), &listening)
        }
        (_, Transport::Datagrams) => Err(ConnectError::NoDatagrams),
        (Endpoint::Vsock { cid, port }, Transport::Connection(kind)) => {
            vsock(*cid, *port, kind, deadline).map(|socket| kind.of(socket))
        }
        (Endpoint::Unix(path), Transport::Connection(kind)) => {
            unix(path, kind, deadline).map(|socket| kind.of(socket))
        }
        (Endpoint::Hybrid { path, port }, Transport::Connection(kind)) => {
            hybrid(path, *port, kind, deadline).map(|socket| kind.of(socket))
        }
        (
            Endpoint::VsockListen { .. } | Endpoint::UnixListen(_) | Endpoint::AttachListen { .. },
            Transport::Connection(_),
        ) => Err(ConnectError::Listens),
    })
}

/// Repeats `attempt` until it succeeds, fails for good, or the deadline has come.
fn repeat<T>(
    deadline: Deadline,
    retry: bool,
    mut attempt: impl FnMut() -> Result<T, ConnectError>,
) -> Result<T, ConnectError> {
    // Short at first, because a guest's service often starts shortly after its VM.
    let mut pause = Duration::from_millis(20);
    loop {
        match attempt() {
            Err(error) if retry && error.is_transient() => {
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

fn vsock(cid: u32, port: u32, kind: Kind, deadline: Deadline) -> Result<OwnedFd, ConnectError> {
    let failed = |error: io::Error| match Errno::from_io_error(&error) {
        Some(Errno::CONNRESET | Errno::CONNREFUSED) => {
            ConnectError::Refused(format!("port {port} of CID {cid} ({REFUSED_BY_PEER})"))
        }
        Some(Errno::AFNOSUPPORT) => ConnectError::System {
            operation:
                "this kernel has no AF_VSOCK (modprobe vsock; on a host use hybrid:PATH:PORT)"
                    .into(),
            source: error,
        },
        _ => ConnectError::System {
            operation: format!("connecting to vsock:{cid}:{port}"),
            source: error,
        },
    };
    let connecting = match kind {
        Kind::Bytes => zerosock_sys::vsock::connect(cid, port),
        Kind::Messages => zerosock_sys::vsock::connect_seqpacket(cid, port),
    };
    let socket = connecting.map_err(failed)?;
    if !wait_for(&socket, PollFlags::OUT, deadline).map_err(failed)? {
        return Err(ConnectError::TimedOut(format!(
            "connecting to vsock:{cid}:{port}"
        )));
    }
    zerosock_sys::vsock::connect_result(&socket).map_err(failed)?;
    rustix::io::ioctl_fionbio(&socket, false).map_err(|errno| failed(errno.into()))?;
    Ok(socket)
}

fn unix(path: &Path, kind: Kind, deadline: Deadline) -> Result<OwnedFd, ConnectError> {
    let failed = |errno: Errno| match errno {
        Errno::CONNREFUSED => ConnectError::Refused(format!(
            "no listener at {} (a stale socket)",
            path.display()
        )),
        // With a send timeout, connect(2) fails with EAGAIN when the listener's backlog stays full.
        Errno::AGAIN if deadline.is_over() => ConnectError::TimedOut(format!(
            "connecting to {}: its backlog is full",
            path.display()
        )),
        errno => ConnectError::System {
            operation: match (errno, kind) {
                (Errno::PROTOTYPE, Kind::Bytes) => {
                    format!("{} is not a stream socket (--seqpacket?)", path.display())
                }
                (Errno::PROTOTYPE, Kind::Messages) => {
                    format!("{} is not a SOCK_SEQPACKET socket", path.display())
                }
                (Errno::ACCESS, _) => format!("connecting to {} ({NO_PERMISSION})", path.display()),
                _ => format!("connecting to {}", path.display()),
            },
            source: errno.into(),
        },
    };
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        kind.socket_type(),
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(failed)?;
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    set_send_timeout(&socket, deadline.left()).map_err(failed)?;
    rustix::net::connect(&socket, &address).map_err(failed)?;
    set_send_timeout(&socket, None).map_err(failed)?;
    Ok(socket)
}

fn set_send_timeout(socket: &OwnedFd, limit: Option<Duration>) -> rustix::io::Result<()> {
    // Zero would mean no limit.
    let limit = limit.map(|limit| limit.max(Duration::from_millis(1)));
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Send, limit)
}

/// Connects to the hybrid vsock socket at `path`: sends CONNECT and waits for OK. On a stream,
/// reads the answer byte by byte, because the bytes after its newline are the guest's. On a
/// SEQPACKET socket, each of the two is a packet.
fn hybrid(path: &Path, port: u32, kind: Kind, deadline: Deadline) -> Result<OwnedFd, ConnectError> {
    /// Longest answer, bytes. An answer of `serve` has at most 14: `OK `, ten digits and a newline;
    /// other programs may add blanks.
    const LONGEST_ANSWER: usize = 64;

    let socket = unix(path, kind, deadline)?;
    let refused = || {
        ConnectError::Refused(format!(
            "{} closed without OK for port {port} ({CLOSED_WITHOUT_OK})",
            path.display()
        ))
    };
    // These few bytes always fit into an empty send buffer.
    let line = format!("CONNECT {port}\n");
    match rustix::net::send(&socket, line.as_bytes(), SendFlags::NOSIGNAL) {
        Ok(_) => {}
        Err(Errno::PIPE) => return Err(refused()),
        Err(errno) => {
            return Err(ConnectError::System {
                operation: "sending CONNECT".into(),
                source: errno.into(),
            });
        }
    }
    let failed = |source| ConnectError::System {
        operation: format!("waiting for OK from {}", path.display()),
        source,
    };
    let mut answer = Vec::with_capacity(LONGEST_ANSWER);
    loop {
        if !wait_for(&socket, PollFlags::IN, deadline).map_err(failed)? {
            return Err(ConnectError::TimedOut(format!(
                "waiting for OK from {}",
                path.display()
            )));
        }
        let mut packet = [0; LONGEST_ANSWER];
        let most = match kind {
            Kind::Bytes => 1,
            Kind::Messages => LONGEST_ANSWER,
        };
        let (part, _) = packet.split_at_mut(most);
        let got = match rustix::net::recv(&socket, &mut *part, RecvFlags::empty()) {
            Err(Errno::INTR) => continue,
            Ok((0, _)) | Err(Errno::CONNRESET) => return Err(refused()),
            Err(errno) => return Err(failed(errno.into())),
            Ok((got, _)) => got,
        };
        answer.extend_from_slice(part.get(..got).unwrap_or_default());
        if kind == Kind::Messages || answer.ends_with(b"\n") || answer.len() == LONGEST_ANSWER {
            break;
        }
    }
    let text = String::from_utf8_lossy(&answer);
    match text.trim_end().strip_prefix("OK ").map(str::parse::<u32>) {
        Some(Ok(_)) => Ok(socket),
        _ => {
            let answer = text.trim_end_matches('\n').escape_debug();
            Err(ConnectError::Handshake(format!(
                "{} answered `{answer}` to CONNECT",
                path.display()
            )))
        }
    }
}

/// Waits until one of `events` or an error is pending. Returns false at the deadline.
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
