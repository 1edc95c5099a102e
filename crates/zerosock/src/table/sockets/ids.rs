//! The names of connections, and the states they are in.

/// Identifies a connection of one endpoint until its owner closes it.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub struct StreamId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

/// The state of a connection.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// use zerosock::vsock::StreamState;
///
/// assert_eq!(process.state(), StreamState::Connected);
/// host.reset();
/// process.recv().unwrap_err();
/// assert_eq!(process.state(), StreamState::Reset);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum StreamState {
    /// The request was sent and not answered yet.
    Connecting,
    /// Established; each side may have shut down one direction.
    Connected,
    /// Ended in order: the peer had shut down sending before, or this side closed it.
    Finished,
    /// Refused, timed out, reset by the peer or by a protocol error, or lost with the transport.
    Reset,
}

#[cfg(test)]
impl StreamId {
    /// The id of the first connection of an endpoint.
    pub(crate) const FIRST: StreamId = StreamId {
        index: 0,
        generation: 0,
    };

    /// A small number, unique among the endpoint's current connections.
    pub(crate) fn index(self) -> u32 {
        self.index
    }
}
