//! Why a call on a connection failed; one enum for each operation.

use std::io;

use zerosock_ring::{AddError, DriverError as RingError};

use crate::fault::Fault;

/// The driver cannot go on: the device broke a ring, or the system failed us.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The device wrote something impossible into a ring: the device's fault.
    #[error("the device broke a virtqueue: {0}")]
    Ring(#[from] RingError),
    /// A chain could not be added although its slot was free.
    #[error("a virtqueue is out of step with its buffers: {0}")]
    Add(#[from] AddError),
    /// Waiting for the eventfds failed.
    #[error("waiting for the device failed: {0}")]
    Wait(#[from] io::Error),
}

impl DriverError {
    /// Who is to blame.
    pub fn fault(&self) -> Fault {
        match self {
            DriverError::Ring(_) => Fault::Peer,
            DriverError::Add(_) | DriverError::Wait(_) => Fault::System,
        }
    }
}

/// Why nothing was sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// No credit or no free buffer now: a `Writable` event follows.
    #[error("no room now")]
    WouldBlock,
    /// The connection is not established yet.
    #[error("not connected yet")]
    NotConnected,
    /// We, or the peer for us, have closed this direction (EPIPE).
    #[error("this direction is shut down")]
    ShutDown,
    /// The connection was reset.
    #[error("connection reset")]
    Reset,
    /// A message that the peer's buffer can never take (EMSGSIZE).
    #[error("the message is larger than the peer's buffer")]
    TooLong,
    /// No such connection.
    #[error("no such connection")]
    Unknown,
    /// The driver cannot go on.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Why nothing was received.
#[derive(Debug, thiserror::Error)]
pub enum RecvError {
    /// Nothing has arrived: a `Readable` event follows.
    #[error("nothing there yet")]
    WouldBlock,
    /// The connection was reset, and all that came before was read.
    #[error("connection reset")]
    Reset,
    /// No such connection.
    #[error("no such connection")]
    Unknown,
    /// The driver cannot go on.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Why a call that waits gave up.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// The deadline passed.
    #[error("deadline passed")]
    TimedOut,
    /// A connect was refused, by the device or the peer behind it.
    #[error("connection refused")]
    Refused,
    /// Sending failed.
    #[error(transparent)]
    Send(SendError),
    /// Receiving failed.
    #[error(transparent)]
    Recv(RecvError),
    /// The end came before all that was asked for.
    #[error("end of file")]
    Eof,
    /// The connect could not even begin.
    #[error(transparent)]
    Connect(#[from] zerosock_proto::vsock::ConnectError),
    /// The driver cannot go on.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
