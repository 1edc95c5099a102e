//! Ports that are bound to sockets.
//!
//! # Invariants
//! - A bound port is reserved for its socket, and for the connection or listener made of it, until
//!   the last of them is dropped.

use std::sync::Arc;

use zerosock_proto::Port;

use super::hub::{Core, DeferredClose};

/// A bound port, released on drop.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) core: Arc<Core>,
    pub(super) port: Port,
    /// False once a listener has taken the port over and releases it.
    pub(super) owns_port: bool,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.owns_port {
            self.core.close_deferred(DeferredClose::Port(self.port));
        }
    }
}
