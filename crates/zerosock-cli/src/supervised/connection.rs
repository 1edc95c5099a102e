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

/// Sends a batch, which changes this entry or those below it, to the supervisor, if there is one. Returns
/// whether it will be executed.
pub(super) fn send(entry: &str, batch: &Batch<'_>) -> bool {
    let Some(client) = supervisor() else {
        return false;
    };
    let sent = client.send(batch);
    if let Err(error) = &sent {
        warn!(entry, %error, "not kept by the supervisor: after a crash this does not go on");
    }
    sent.is_ok()
}
