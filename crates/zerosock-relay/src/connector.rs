//! A thread that resolves names and makes connections, for callers that must not wait.
//!
//! # Invariants
//! - Each request is answered exactly once, on the connector's thread.
//! - Every resolved address has passed the policy before a packet goes to it.

mod error;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;

use crate::networks::AddressPolicy;
use crate::target::Target;

pub use error::{ConnectError, Stage};

/// Receives the result of a request; runs on the connector's thread and must not block.
pub type Done = Box<dyn FnOnce(Result<Connected, ConnectError>) + Send>;

/// The handle of a connector thread. Dropping the last one ends the thread.
#[derive(Clone, Debug)]
pub struct Connector {}

/// Settings of a connector.
#[derive(Clone, Debug)]
pub struct ConnectorConfig {
    /// Name servers to ask instead of those of /etc/resolv.conf; empty for the latter.
    pub name_servers: Vec<SocketAddr>,
    /// Requests in flight; further ones are answered [`ConnectError::Busy`].
    pub max_requests: usize,
}

/// A connection to make.
#[derive(Clone, Debug)]
pub struct ConnectRequest {
    /// What to connect to.
    pub target: Target,
    /// Which addresses may be used.
    pub policy: Arc<AddressPolicy>,
    /// Time for all of it: resolving, connecting, and writing `first_bytes`.
    pub timeout: Duration,
    /// Interval of TCP keepalive probes, and the idle time before the first; None for no probes.
    pub keepalive: Option<Duration>,
    /// Written before the socket is handed over. One message on sockets that keep message bounds.
    pub first_bytes: Vec<u8>,
}

/// A connection that was made.
#[derive(Debug)]
pub struct Connected {
    /// Non-blocking, close-on-exec, with TCP_NODELAY if it is TCP.
    pub socket: OwnedFd,
    /// The address that it is connected to; None for Unix sockets.
    pub address: Option<SocketAddr>,
}

impl Default for ConnectorConfig {
    fn default() -> Self {
        ConnectorConfig {
            name_servers: Vec::new(),
            max_requests: 4096,
        }
    }
}

impl Connector {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread, epoll instance or eventfd can be created.
    pub fn start(_config: ConnectorConfig) -> io::Result<Connector> {
        unimplemented!()
    }

    /// Makes a connection and calls `done` with it or with the error, exactly once and on the
    /// connector's thread.
    pub fn connect(&self, _request: ConnectRequest, _done: Done) {
        unimplemented!()
    }

    /// Runs a future on the connector's thread, for example a task that accepts connections. The future
    /// is dropped when the thread ends; one that owns a `Connector` keeps the thread alive.
    pub fn spawn<F>(&self, _future: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        unimplemented!()
    }

    /// Ends the thread and waits for it. Requests in flight and later ones are answered
    /// [`ConnectError::Stopped`]. On the connector's own thread it does not wait.
    pub fn stop(&self) {
        unimplemented!()
    }
}
