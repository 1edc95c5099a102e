//! Connects to the endpoint of `nc`.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, sockopt};

use super::attached;
use super::connection::{Connection, Kind, Transport};
use super::deadline::Deadline;
use super::error::{EstablishError, failed};
use super::listen::Acceptor;
use crate::endpoint::EndpointArg;
use zerosock_relay::Target;
use zerosock_relay::connector::NO_PERMISSION;
use zerosock_relay::relay::{CLOSED_WITHOUT_OK, HybridAnswer, KernelEndpoint, LONGEST_ANSWER};
use zerosock_sys::wait_ready;

/// What a reset in the place of an answer can mean: it carries no reason.
pub(crate) const REFUSED_BY_PEER: &str = "no listener, its backlog is full, a target that does not accept, \
    or access is denied; `serve --log-level debug` logs which";

/// Binds a listening endpoint; `None` if `endpoint` connects.
pub(super) fn bind(
    endpoint: &EndpointArg,
    kind: Kind,
    backlog: i32,
    deadline: Deadline,
    retry: bool,
) -> Result<Option<Acceptor>, EstablishError> {
    repeat(deadline, retry, || {
        Acceptor::bind(endpoint, kind, backlog, deadline)
    })
}

/// Connects, or waits for a datagram. Calls `listening` when peers can send one.
pub(super) fn establish(
    endpoint: &EndpointArg,
    transport: Transport,
    deadline: Deadline,
    retry: bool,
    listening: impl Fn(),
) -> Result<Connection, EstablishError> {
    repeat(deadline, retry, || {
        let (end, kind) = match (endpoint, transport) {
            (EndpointArg::Attached(end), _) => {
                return attached::establish(end, transport, deadline.left(), &listening);
            }
            (_, Transport::Datagrams) => return Err(EstablishError::NoDatagrams),
            (EndpointArg::Kernel(end), Transport::Connection(kind)) => (end, kind),
        };
        let socket = match end {
            KernelEndpoint::Vsock { cid, port } => vsock(*cid, *port, kind, deadline),
            KernelEndpoint::Connect(Target::Unix(path)) => unix(path, kind, deadline),
            KernelEndpoint::Hybrid { path, port } => hybrid(path, *port, kind, deadline),
            _ => Err(EstablishError::Listens),
        };
        socket.map(|socket| kind.of(socket))
    })
}

/// Repeats `attempt` until it succeeds, fails for good, or the deadline has come.
fn repeat<T>(
    deadline: Deadline,
    retry: bool,
    mut attempt: impl FnMut() -> Result<T, EstablishError>,
) -> Result<T, EstablishError> {
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

fn vsock(cid: u32, port: u32, kind: Kind, deadline: Deadline) -> Result<OwnedFd, EstablishError> {
    let failed = |error: io::Error| match Errno::from_io_error(&error) {
        Some(Errno::CONNRESET | Errno::CONNREFUSED) => {
            EstablishError::Refused(format!("port {port} of CID {cid} ({REFUSED_BY_PEER})"))
        }
        Some(Errno::AFNOSUPPORT) => EstablishError::System {
            operation:
                "this kernel has no AF_VSOCK (modprobe vsock; on a host use hybrid:PATH:PORT)"
                    .into(),
            source: error,
        },
        _ => EstablishError::System {
            operation: format!("connecting to vsock:{cid}:{port}"),
            source: error,
        },
    };
    let connecting = match kind {
        Kind::Bytes => zerosock_sys::vsock::connect(cid, port),
        Kind::Messages => zerosock_sys::vsock::connect_seqpacket(cid, port),
    };
    let socket = connecting.map_err(failed)?;
    let ready = wait_ready(&socket, PollFlags::OUT, deadline.left()).map_err(failed)?;
    if ready.is_empty() {
        return Err(EstablishError::TimedOut(format!(
            "connecting to vsock:{cid}:{port}"
        )));
    }
    zerosock_sys::vsock::connect_result(&socket).map_err(failed)?;
    rustix::io::ioctl_fionbio(&socket, false).map_err(|errno| failed(errno.into()))?;
    Ok(socket)
}

fn unix(path: &Path, kind: Kind, deadline: Deadline) -> Result<OwnedFd, EstablishError> {
    let failed = |errno: Errno| match errno {
        Errno::CONNREFUSED => EstablishError::Refused(format!(
            "no listener at {} (a stale socket)",
            path.display()
        )),
        // With a send timeout, connect(2) fails with EAGAIN when the listener's backlog stays full.
        Errno::AGAIN if deadline.is_over() => EstablishError::TimedOut(format!(
            "connecting to {}: its backlog is full",
            path.display()
        )),
        errno => EstablishError::System {
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
fn hybrid(
    path: &Path,
    port: u32,
    kind: Kind,
    deadline: Deadline,
) -> Result<OwnedFd, EstablishError> {
    let socket = unix(path, kind, deadline)?;
    let refused = || {
        EstablishError::Refused(format!(
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
            return Err(failed("sending CONNECT".into())(errno.into()));
        }
    }
    let failed = failed(format!("waiting for OK from {}", path.display()));
    let mut answer = Vec::with_capacity(LONGEST_ANSWER);
    loop {
        let ready = wait_ready(&socket, PollFlags::IN, deadline.left()).map_err(&failed)?;
        if ready.is_empty() {
            return Err(EstablishError::TimedOut(format!(
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
        if kind == Kind::Messages {
            answer.push(b'\n');
        }
        match HybridAnswer::read(&answer) {
            HybridAnswer::Ok(_) => return Ok(socket),
            HybridAnswer::Unfinished => {}
            HybridAnswer::Other(line) => {
                let answer = line.escape_debug();
                return Err(EstablishError::Handshake(format!(
                    "{} answered `{answer}` to CONNECT",
                    path.display()
                )));
            }
        }
    }
}
