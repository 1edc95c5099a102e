//! The layout of a split virtqueue (virtio 1.2, section 2.7).

/// Largest queue size (virtio 1.2, 2.7).
pub const MAX_QUEUE_SIZE: u16 = 32768;

/// The configuration of a device half.
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

impl QueueConfig {
    /// Whether a part of this queue and a part of the other one share bytes. Configured queues must
    /// not: their owners would access the same bytes by atomics of different widths.
    pub fn overlaps(&self, other: &QueueConfig) -> bool {
        let parts =
            |config: &QueueConfig| parts(config.size, config.desc, config.avail, config.used);
        let [ours, theirs] = [parts(self), parts(other)];
        ours.iter()
            .any(|ours| theirs.iter().any(|theirs| ours.overlaps(theirs)))
    }
}

/// The guest addresses of a driver half's queue.
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
    /// Bytes of the three parts laid out one after the other, padding included.
    pub const fn bytes_needed(size: u16) -> u64 {
        used_offset(size) + used_len(size)
    }
    /// The three parts one after the other from `base_guest_addr`, which is aligned to 16.
    pub const fn at(base_guest_addr: u64, size: u16) -> DriverLayout {
        DriverLayout {
            size,
            desc: base_guest_addr,
            avail: base_guest_addr + desc_len(size),
            used: base_guest_addr + used_offset(size),
        }
    }
}

/// Why a queue cannot be set up: the fault of the configuration.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// No memory for the state of each descriptor.
    #[error("no memory for a queue of {0} descriptors")]
    NoMemory(u16),
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
    /// Two parts share bytes, which would be accessed as atomics of different widths.
    #[error("{first} and {second} of the queue overlap")]
    Overlap {
        /// The part that begins first.
        first: &'static str,
        /// The other one.
        second: &'static str,
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

/// One part of a queue.
#[derive(Copy, Clone, Debug)]
struct QueuePart {
    name: &'static str,
    addr: u64,
    len: u64,
}

impl QueuePart {
    fn overlaps(&self, other: &QueuePart) -> bool {
        // No sum, which might wrap: an address at or above the other one lies in it if the distance
        // is less than the other one's length.
        match self.addr >= other.addr {
            true => self.addr - other.addr < other.len,
            false => other.addr - self.addr < self.len,
        }
    }
}

fn parts(size: u16, desc: u64, avail: u64, used: u64) -> [QueuePart; 3] {
    let part = |name, addr, len| QueuePart { name, addr, len };
    [
        part("descriptor table", desc, desc_len(size)),
        part("available ring", avail, avail_len(size)),
        part("used ring", used, used_len(size)),
    ]
}

/// Refuses parts of one queue that share bytes.
pub(crate) fn check_overlap(size: u16, desc: u64, avail: u64, used: u64) -> Result<(), QueueError> {
    let mut parts = parts(size, desc, avail, used);
    parts.sort_unstable_by_key(|part| part.addr);
    for pair in parts.windows(2) {
        if let [first, second] = pair
            && first.overlaps(second)
        {
            return Err(QueueError::Overlap {
                first: first.name,
                second: second.name,
            });
        }
    }
    Ok(())
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

pub(crate) fn check_size(size: u16) -> Result<(), QueueError> {
    // A u16 power of two is at most 32768.
    if size.is_power_of_two() {
        Ok(())
    } else {
        Err(QueueError::Size(size))
    }
}

/// The chain continues in the descriptor `next`.
pub(crate) const DESC_F_NEXT: u16 = 1;
/// The device writes the buffer (else it reads it).
pub(crate) const DESC_F_WRITE: u16 = 2;
/// The buffer holds a table of descriptors.
pub(crate) const DESC_F_INDIRECT: u16 = 4;

/// Bytes of a descriptor in memory.
pub(crate) const DESC_LEN: usize = 16;

/// A private copy of a descriptor (virtio 1.2, 2.7.5).
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(crate) struct Descriptor {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl Descriptor {
    /// From two words as they lie in memory (little-endian).
    #[inline]
    pub(crate) fn from_words(words: [u64; 2]) -> Descriptor {
        let rest = u64::from_le(words[1]);
        Descriptor {
            addr: u64::from_le(words[0]),
            len: rest as u32,
            flags: (rest >> 32) as u16,
            next: (rest >> 48) as u16,
        }
    }

    /// As two words to be put into memory.
    #[inline]
    pub(crate) fn to_words(self) -> [u64; 2] {
        let rest = u64::from(self.len) | u64::from(self.flags) << 32 | u64::from(self.next) << 48;
        [self.addr.to_le(), rest.to_le()]
    }

    #[inline]
    pub(crate) fn from_bytes(bytes: [u8; DESC_LEN]) -> Descriptor {
        let value = u128::from_le_bytes(bytes);
        Descriptor::from_words([(value as u64).to_le(), ((value >> 64) as u64).to_le()])
    }

    #[inline]
    pub(crate) fn has(self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
