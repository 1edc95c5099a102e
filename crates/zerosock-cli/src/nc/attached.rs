//! Connecting as a process that attaches to `zerosock serve`, with a CID of its own or as the host.

use std::io;
use std::time::Duration;

use zerosock::Port;
use zerosock::vsock::Endpoint;

use super::connection::{Connection, Kind, Transport};
use super::datagrams::Datagrams;
use super::error::{EstablishError, failed};
use crate::endpoint::{AttachRole, Attached, CidOrName};

/// Attaches, and connects or waits for a datagram.
pub(super) fn establish(
    end: &Attached,
    transport: Transport,
    left: Option<Duration>,
    listening: &impl Fn(),
) -> Result<Connection, EstablishError> {
    match (&end.to, transport) {
        (Some(to), _) => connect(end, to, transport, left),
        (None, Transport::Datagrams) => receive_datagrams(end, left, listening),
        (None, Transport::Connection(_)) => Err(EstablishError::Listens),
    }
}

fn connect(
    end: &Attached,
    to: &CidOrName,
    transport: Transport,
    left: Option<Duration>,
) -> Result<Connection, EstablishError> {
    // A service sends datagrams from a port that it has claimed: use the same number.
    let (from, claimed) = match (end.role, transport) {
        (AttachRole::Service, Transport::Datagrams) => (end.port, &[end.port][..]),
        _ => (Port::ANY, &[][..]),
    };
    let endpoint = attach(end, claimed, left)?;
    let failed = failed(format!("connecting to {to}:{}", end.port));
    let to = to.port(&endpoint, end.port).map_err(&failed)?;
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

/// Attaches, calls `listening`, and waits for the first datagram.
fn receive_datagrams(
    end: &Attached,
    left: Option<Duration>,
    listening: &impl Fn(),
) -> Result<Connection, EstablishError> {
    let port = end.port;
    let endpoint = attach(end, &[port], left)?;
    let waiting = format!("waiting for a datagram to port {port}");
    // Duration::MAX is no limit in practice.
    let left = left.unwrap_or(Duration::MAX);
    match Datagrams::listen(&endpoint, port, left, listening) {
        Ok(datagrams) => Ok(Connection::Datagrams(datagrams)),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            Err(EstablishError::TimedOut(waiting))
        }
        Err(error) => Err(failed(waiting)(error)),
    }
}

/// Attaches, and claims or names `ports`.
pub(super) fn attach(
    end: &Attached,
    ports: &[Port],
    left: Option<Duration>,
) -> Result<Endpoint, EstablishError> {
    let failed = failed(format!("attaching at {}", end.path.display()));
    let attached = end.attach(ports, left);
    attached.map_err(|error| failed(error.into()))
}
