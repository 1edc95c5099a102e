//! What goes into a driver's queue and what comes out.

use crate::split::layout::{DESC_F_WRITE, Descriptor};

/// A buffer to post.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Buffer {
    /// Guest address. Not checked here: the device does.
    pub addr: u64,
    /// Length in bytes, not 0.
    pub len: u32,
    /// The device writes it (else it reads it).
    pub writable: bool,
}

/// A chain that the device has returned.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Used {
    /// The token given to [`add`](super::DriverQueue::add).
    pub token: u64,
    /// Bytes that the device says it wrote, cut down to the chain's writable length.
    pub len: u32,
    /// Bytes that the device says it wrote, unchecked: only for saying that it lies.
    pub claimed: u32,
}

/// Why a chain was not added: no free descriptors (`Full`), else the caller's fault. Nothing was
/// changed.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddError {
    /// Not enough free descriptors now.
    #[error("not enough free descriptors")]
    Full,
    /// More buffers than the queue has descriptors (virtio 1.2, 2.7.5.2 and 2.7.5.3.1).
    #[error("more buffers than the queue has descriptors")]
    TooLong,
    /// No buffers, or one without length.
    #[error("no buffers, or a buffer without length")]
    Empty,
    /// A readable buffer behind a writable one (2.7.4.2).
    #[error("readable buffer behind a writable one")]
    Order,
    /// More than 2^32 - 1 bytes (2.7.5.2).
    #[error("chain of more than 2^32 - 1 bytes")]
    TotalLength,
    /// A part of a fixed chain that is longer than its buffer.
    #[error("part of a fixed chain is longer than its buffer")]
    TooMuch,
    /// The fixed chain is posted already, or is not one of this queue's.
    #[error("not a fixed chain of this queue, or already posted")]
    NotFixed,
}

/// A protocol error of the device. The queue cannot be used any more.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The used index is ahead of us by more chains than the device holds.
    #[error("used index announces more chains than the device holds")]
    IndexJump,
    /// A used element names no chain that the device holds.
    #[error("used element names {0}, which is not a posted chain")]
    Id(u32),
}

/// A chain that [`set_chain`](super::DriverQueue::set_chain) laid out.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct FixedChain {
    pub(in crate::split) head: u16,
    /// Bytes of its buffers.
    pub(in crate::split) len: u32,
}

impl Buffer {
    pub(super) fn descriptor(self) -> Descriptor {
        let flags = if self.writable { DESC_F_WRITE } else { 0 };
        Descriptor {
            addr: self.addr,
            len: self.len,
            flags,
            next: 0,
        }
    }
}
