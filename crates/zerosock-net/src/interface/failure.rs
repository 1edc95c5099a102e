//! Why an interface cannot be used any more.

use std::io;

use zerosock_ring::DriverError;

/// Why an interface cannot be used any more. It receives and sends nothing from then on; frames on
/// lease stay readable.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum InterfaceFailure {
    /// The device closed its control socket.
    #[error("the device has disconnected")]
    Disconnected,
    /// The device broke the protocol of a ring.
    #[error("the device broke the protocol: {0}")]
    Ring(#[from] DriverError),
    /// The device claims to have written so many bytes, more than the buffer has.
    #[error("the device broke the protocol: it claims {0} bytes in a shorter buffer")]
    Length(u32),
    /// The device claims that a frame takes this number of buffers: none, or more than there are.
    #[error("the device broke the protocol: a frame in {0} buffers")]
    Buffers(u16),
    /// A frame longer than any packet of IP.
    #[error("the device broke the protocol: a frame of more than 64 KiB")]
    FrameLength,
    /// The system refuses to wait.
    #[error("cannot wait for the device: {0}")]
    Wait(io::ErrorKind),
}

impl InterfaceFailure {
    /// Whether the device has broken the protocol, so that nothing more is taken from it.
    pub(super) fn is_lie(self) -> bool {
        !matches!(
            self,
            InterfaceFailure::Disconnected | InterfaceFailure::Wait(_)
        )
    }
}
