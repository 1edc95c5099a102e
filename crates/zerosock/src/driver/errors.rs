//! The error of a driver's turns.

use std::io;

use zerosock_ring::{AddError, DriverError as RingError};

use crate::fault::Fault;

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
