//! Connecting as a process that attaches to `zerosock serve`, with a CID of its own or as the host.

use std::io;
use std::path::Path;
use std::time::Duration;

use zerosock::vsock::Endpoint;
use zerosock::{Address, Cid, Port};

use super::datagrams::Datagrams;
use super::endpoint::Peer;
use super::error::ConnectError;
use super::wire::{Kind, Wanted, Wire};

/// Kind of client on the attach socket.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Role {
    Process,
    Service,
}

/// Attaches, and connects to `port` of `to`.
pub(super) fn connect(
    role: Role,
    path: &Path,
    to: &Peer,
    port: u32,
    wanted: Wanted,
    left: Option<Duration>,
) -> Result<Wire, ConnectError> {
    // A service sends datagrams from a port that it has claimed: use the same number.
    let (from, claimed) = match (role, wanted) {
        (Role::Service, Wanted::Datagrams) => (Port::new(port), &[Port::new(port)][..]),
        _ => (Port::ANY, &[][..]),
    };
    let endpoint = attach(role, path, claimed, left)?;
    let failed = failed(format!("connecting to {to}:{port}"));
    let cid = match to {
        Peer::Cid(cid) => Cid::new(*cid),
        Peer::Name(name) => endpoint.resolve(name.as_str()).map_err(&failed)?,
    };
    let to = Address::new(cid, Port::new(port));
    // The connection keeps the attachment open after `endpoint` is dropped.
    let connected = match wanted {
        Wanted::Connection(Kind::Bytes) => endpoint.connect(to).map(Wire::Stream),
        Wanted::Connection(Kind::Messages) => endpoint.connect_seqpacket(to).map(Wire::Messages),
        Wanted::Datagrams => Datagrams::to(&endpoint, from, to).map(Wire::Datagrams),
    };
    connected.map_err(failed)
}

/// Attaches, calls `listening`, and waits for one connection to `port` or for the first datagram.
/// Further connections are refused.
pub(super) fn listen(
    role: Role,
    path: &Path,
    port: u32,
    wanted: Wanted,
    left: Option<Duration>,
    listening: &impl Fn(),
) -> Result<Wire, ConnectError> {
    let port = Port::new(port);
    let endpoint = attach(role, path, &[port], left)?;
    let what = match wanted {
        Wanted::Connection(_) => "a connection",
        Wanted::Datagrams => "a datagram",
    };
    let waiting = format!("waiting for {what} to port {port}");
    let failed = failed(waiting.clone());
    // Duration::MAX is no limit in practice.
    let left = left.unwrap_or(Duration::MAX);
    let accepted = match wanted {
        Wanted::Connection(Kind::Bytes) => {
            let listener = endpoint.listen(port, 1).map_err(&failed)?;
            listening();
            let accepted = listener.accept_timeout(left);
            accepted.map(|(stream, _)| Wire::Stream(stream))
        }
        Wanted::Connection(Kind::Messages) => {
            let listener = endpoint.listen_seqpacket(port, 1).map_err(&failed)?;
            listening();
            let accepted = listener.accept_timeout(left);
            accepted.map(|(connection, _)| Wire::Messages(connection))
        }
        Wanted::Datagrams => {
            Datagrams::listen(&endpoint, port, left, listening).map(Wire::Datagrams)
        }
    };
    match accepted {
        Ok(wire) => Ok(wire),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            Err(ConnectError::TimedOut(waiting))
        }
        Err(error) => Err(failed(error)),
    }
}

fn attach(
    role: Role,
    path: &Path,
    ports: &[Port],
    left: Option<Duration>,
) -> Result<Endpoint, ConnectError> {
    let mut builder = Endpoint::builder().ports(ports.iter().copied());
    if let Some(left) = left {
        builder = builder.connect_timeout(left);
    }
    let endpoint = match role {
        Role::Process => builder.attach(path),
        Role::Service => builder.attach_as_host(path),
    };
    let failed = failed(format!("attaching at {}", path.display()));
    endpoint.map_err(|error| failed(error.into()))
}

fn failed(doing: String) -> impl Fn(io::Error) -> ConnectError {
    move |source| ConnectError::Attached {
        doing: doing.clone(),
        source,
    }
}
