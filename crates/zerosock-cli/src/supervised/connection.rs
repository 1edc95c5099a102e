//! The connection of this process to its supervisor.

use std::sync::OnceLock;

use tracing::warn;
use zerosock_supervisor::{Batch, Client};

/// The supervisor of this process.
static SUPERVISOR: OnceLock<Client> = OnceLock::new();

/// The supervisor of this process, if it has one.
pub(crate) fn supervisor() -> Option<&'static Client> {
    SUPERVISOR.get()
}

/// Sets the supervisor, once.
pub(super) fn set(client: Client) {
    let _ = SUPERVISOR.set(client);
}

/// Sends a batch to the supervisor, if there is one. Returns whether it will be executed.
pub(super) fn send(batch: &Batch<'_>) -> bool {
    let Some(client) = supervisor() else {
        return false;
    };
    let sent = client.send(batch);
    if let Err(error) = &sent {
        warn!(%error, "a successor of this process will not continue all connections");
    }
    sent.is_ok()
}
