//! Connecting and listening, for all kinds of endpoints.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Port};

use super::connection::{Connected, Connection, outcome};
use super::errors::{ConnectError, ConnectReason, of_connect, of_listen};
use super::hub::{Core, Interest, WaitBudget, WaitFault, WaitMode};
use super::listener::Listener;
use super::waiting::Wait;
use zerosock_virtio::deadline::deadline_in;

/// Sends the request. The returned stream is connecting.
pub(super) fn begin_connect<S: Connected>(
    core: &Arc<Core>,
    peer: Address,
    wait: Wait,
) -> io::Result<S> {
    let mut locked = core.lock();
    let backend = locked.backend();
    let id = backend
        .connect(Port::ANY, peer, S::TYPE)
        .map_err(|error| of_connect(peer, error))?;
    backend.flush();
    let info = backend.info(id).ok_or(io::ErrorKind::NotConnected)?;
    Ok(S::new(core.clone(), id, &info, wait))
}

/// Connects and waits for the answer.
pub(super) fn connect<S: Connected>(
    core: &Arc<Core>,
    peer: Address,
    wait: Wait,
    timeout: Duration,
) -> io::Result<S> {
    let socket: S = begin_connect(core, peer, wait)?;
    match await_connected(socket.conn(), wait, timeout) {
        Ok(()) => Ok(socket),
        Err(error) => {
            socket.conn().reset();
            Err(error)
        }
    }
}

/// Waits for the answer to a request.
pub(super) fn await_connected(conn: &Connection, wait: Wait, timeout: Duration) -> io::Result<()> {
    // The protocol core times out first. This covers a device that is not driven at all.
    let budget = WaitBudget {
        mode: WaitMode::Block(wait),
        deadline: deadline_in(timeout.saturating_add(Duration::from_secs(1))),
    };
    let outcome = conn.core.wait(
        Interest::Conn(conn.id),
        || budget,
        |backend| outcome(&backend.info(conn.id)?),
    );
    match outcome {
        Ok(outcome) => Ok(outcome?),
        Err(WaitFault::TimedOut) => {
            Err(ConnectError::new(conn.peer, ConnectReason::TimedOut).into())
        }
        Err(fault) => Err(fault.into()),
    }
}

/// Listens at a local address.
pub(super) fn listen(
    core: &Arc<Core>,
    local: Address,
    backlog: usize,
    socket_type: SocketType,
    wait: Wait,
) -> io::Result<Listener> {
    core.lock()
        .backend()
        .listen(local.port, backlog, socket_type)
        .map_err(of_listen)?;
    Ok(Listener::new(core.clone(), local, wait))
}
