//! The errors of calls on a driver's connections, one enum for each operation.

use std::io;

use zerosock_ring::{AddError, DriverError as RingError};

use crate::fault::Fault;
pub use crate::table::transfers::SendFault as SendError;

/// The driver cannot continue: the device broke a ring, or a system call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The device wrote an invalid entry into a ring: the device's fault.
    #[error("the device broke a virtqueue: {0}")]
    Ring(#[from] RingError),
    /// A chain could not be added although its slot was free.
    #[error("a free buffer could not be added to a virtqueue: {0}")]
    Add(#[from] AddError),
    /// Waiting for the eventfds failed.
    #[error("waiting for the device failed: {0}")]
    Wait(#[from] io::Error),
}

impl DriverError {
    /// Which side caused the error.
    pub fn fault(&self) -> Fault {
        match self {
            DriverError::Ring(_) => Fault::Peer,
            DriverError::Add(_) | DriverError::Wait(_) => Fault::System,
        }
    }
}

/// Why nothing was received.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecvError {
    /// No unread bytes: a `Readable` event follows.
    #[error("no received bytes are available")]
    WouldBlock,
    /// The connection was reset, and all received bytes were read.
    #[error("the connection was reset")]
    Reset,
    /// No such connection.
    #[error("no such connection")]
    Unknown,
    /// The driver cannot go on.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Why a blocking call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The deadline passed.
    #[error("the deadline passed")]
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
    /// The stream ended before all requested bytes arrived.
    #[error("the stream ended before all requested bytes arrived")]
    Eof,
    /// The connect could not be started.
    #[error(transparent)]
    Connect(#[from] zerosock_proto::vsock::ConnectError),
    /// The driver cannot go on.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
