//! Connecting as a process that attaches to `zerosock serve`, with a CID of its own or as the host.

use std::io;
use std::path::Path;
use std::time::Duration;

use zerosock::vsock::Endpoint;
use zerosock::{Address, Cid, Port};

use super::connection::{Connection, Kind, Transport};
use super::datagrams::Datagrams;
use super::endpoint::{Peer, Role};
use super::error::ConnectError;

/// Attaches, and connects to `port` of `to`.
pub(super) fn connect(
    role: Role,
    path: &Path,
    to: &Peer,
    port: u32,
    transport: Transport,
    left: Option<Duration>,
) -> Result<Connection, ConnectError> {
    // A service sends datagrams from a port that it has claimed: use the same number.
    let (from, claimed) = match (role, transport) {
        (Role::Service, Transport::Datagrams) => (Port::new(port), &[Port::new(port)][..]),
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
    let connected = match transport {
        Transport::Connection(Kind::Bytes) => endpoint.connect(to).map(Connection::Stream),
        Transport::Connection(Kind::Messages) => {
            endpoint.connect_seqpacket(to).map(Connection::Messages)
        }
        Transport::Datagrams => Datagrams::to(&endpoint, from, to).map(Connection::Datagrams),
    };
    connected.map_err(failed)
}

/// Attaches, calls `listening`, and waits for the first datagram to `port`.
pub(super) fn receive_datagrams(
    role: Role,
    path: &Path,
    port: u32,
    left: Option<Duration>,
    listening: &impl Fn(),
) -> Result<Connection, ConnectError> {
    let port = Port::new(port);
    let endpoint = attach(role, path, &[port], left)?;
    let waiting = format!("waiting for a datagram to port {port}");
    // Duration::MAX is no limit in practice.
    let left = left.unwrap_or(Duration::MAX);
    match Datagrams::listen(&endpoint, port, left, listening) {
        Ok(datagrams) => Ok(Connection::Datagrams(datagrams)),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            Err(ConnectError::TimedOut(waiting))
        }
        Err(error) => Err(failed(waiting)(error)),
    }
}

/// Attaches, and claims or names `ports`.
pub(super) fn attach(
    role: Role,
    path: &Path,
    ports: &[Port],
    left: Option<Duration>,
) -> Result<Endpoint, ConnectError> {
    let mut builder = Endpoint::builder().ports(ports.iter().copied());
    if let Some(left) = left {
        builder = builder.connect_timeout(left);
    }
    let failed = failed(format!("attaching at {}", path.display()));
    role.attach(builder, path)
        .map_err(|error| failed(error.into()))
}

/// The error of an operation.
pub(super) fn failed(operation: String) -> impl Fn(io::Error) -> ConnectError {
    move |source| ConnectError::Attached {
        operation: operation.clone(),
        source,
    }
}
