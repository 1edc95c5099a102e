//! Where the three parts of a split virtqueue lie (virtio 1.2, section 2.7).

/// Largest queue size (virtio 1.2, 2.7).
pub const MAX_QUEUE_SIZE: u16 = 32768;

/// What a device half needs to know of its queue.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct QueueConfig {
    /// Number of descriptors: a power of two, 1 to 32768.
    pub size: u16,
    /// User address of the descriptor table, aligned to 16.
    pub desc: u64,
    /// User address of the available ring, aligned to 2.
    pub avail: u64,
    /// User address of the used ring, aligned to 4.
    pub used: u64,
    /// Next available index to take.
    pub base: u16,
    /// VIRTIO_F_EVENT_IDX is negotiated.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC is negotiated.
    pub indirect: bool,
}

/// Where a driver half puts its queue: guest addresses.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct DriverLayout {
    /// Number of descriptors: a power of two, 1 to 32768.
    pub size: u16,
    /// Guest address of the descriptor table, aligned to 16.
    pub desc: u64,
    /// Guest address of the available ring, aligned to 2.
    pub avail: u64,
    /// Guest address of the used ring, aligned to 4.
    pub used: u64,
}

impl DriverLayout {
    /// Bytes that the three parts take when laid one behind the other, padding included.
    pub const fn bytes_needed(size: u16) -> u64 {
        used_offset(size) + used_len(size)
    }
    /// The three parts one behind the other from `base_guest_addr`, which is aligned to 16.
    pub const fn at(base_guest_addr: u64, size: u16) -> DriverLayout {
        DriverLayout {
            size,
            desc: base_guest_addr,
            avail: base_guest_addr + desc_len(size),
            used: base_guest_addr + used_offset(size),
        }
    }
}

/// Why a queue cannot be set up as asked: the fault of whoever gave the addresses.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// Not a power of two from 1 to 32768.
    #[error("queue size {0} is not a power of two from 1 to 32768")]
    Size(u16),
    /// A part is not aligned as virtio 1.2, 2.7 demands.
    #[error("{part} at {addr:#x} is not aligned to {align}")]
    Misaligned {
        /// Which part.
        part: &'static str,
        /// Its address as given.
        addr: u64,
        /// The alignment in bytes.
        align: usize,
    },
    /// A part does not lie wholly in one memory region.
    #[error("{part} at {addr:#x} does not lie in one memory region")]
    Unmapped {
        /// Which part.
        part: &'static str,
        /// Its address as given.
        addr: u64,
    },
}

pub(crate) const fn desc_len(size: u16) -> u64 {
    16 * size as u64
}
pub(crate) const fn avail_len(size: u16) -> u64 {
    6 + 2 * size as u64
}
pub(crate) const fn used_len(size: u16) -> u64 {
    6 + 8 * size as u64
}
const fn used_offset(size: u16) -> u64 {
    (desc_len(size) + avail_len(size)).next_multiple_of(4)
}
