//! The three parts of a split virtqueue in mapped memory, with addresses resolved once.
//!
//! # Invariants
//! - The pointers stay valid because the struct holds the `Arc<Memory>` they were resolved in.
//! - Every access is an atomic within the bounds checked in [`Rings::resolve`].
//! - Positions are masked here, so that a caller cannot leave the ring.
//! - No two parts of a queue share bytes, so each byte is accessed by atomics of one width.

use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

use super::index::IndexWords;
use super::layout::{
    Descriptor, QueueError, avail_len, check_overlap, check_size, desc_len, used_len,
};
use super::stored;
use crate::memory::Memory;

/// Addresses of the three parts, in the address space of the resolver.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Addresses {
    pub(crate) desc: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
}

#[derive(Debug)]
pub(crate) struct Rings {
    mem: Arc<Memory>,
    size: u16,
    /// `2 * size` words: per descriptor the address, then length, flags and next.
    desc: *const AtomicU64,
    /// flags, index, `size` heads, used_event.
    avail: *const AtomicU16,
    /// flags, index.
    used: *const AtomicU16,
    /// Per element the id, then the length.
    elements: *const AtomicU32,
    avail_event: *const AtomicU16,
}

// SAFETY: the pointers lead into memory that `mem` keeps mapped, on every thread, and all access
// through them is atomic.
unsafe impl Send for Rings {}
// SAFETY: as for Send: shared access is atomic as well.
unsafe impl Sync for Rings {}

impl Rings {
    /// Checks size, alignment, bounds, and that no two parts share bytes; `find` resolves an
    /// address and a length within one region.
    pub(crate) fn resolve(
        mem: Arc<Memory>,
        size: u16,
        addresses: Addresses,
        find: impl Fn(&Memory, u64, u64) -> Option<*mut u8>,
    ) -> Result<Rings, QueueError> {
        check_size(size)?;
        let part = |part: &'static str, addr: u64, len: u64, align: usize| {
            let host = find(&mem, addr, len).ok_or(QueueError::Unmapped { part, addr })?;
            // virtio requires alignment of the peer's address, atomics require it of ours; an odd
            // offset in the file makes them differ.
            if !addr.is_multiple_of(align as u64) || !host.addr().is_multiple_of(align) {
                return Err(QueueError::Misaligned { part, addr, align });
            }
            Ok(host)
        };
        let desc = part("descriptor table", addresses.desc, desc_len(size), 16)?;
        let avail = part("available ring", addresses.avail, avail_len(size), 2)?;
        let used = part("used ring", addresses.used, used_len(size), 4)?;
        // Regions do not overlap in any address space, so parts that do not overlap in these
        // addresses do not overlap in ours.
        check_overlap(size, addresses.desc, addresses.avail, addresses.used)?;
        // SAFETY: `find` vouched for `used_len` bytes from `used` on: 4 bytes of flags and index,
        // 8 per element, 2 of event index. Both sums lie within.
        let (elements, avail_event) = unsafe { (used.add(4), used.add(4 + 8 * usize::from(size))) };
        Ok(Rings {
            size,
            desc: desc.cast(),
            avail: avail.cast(),
            used: used.cast(),
            elements: elements.cast(),
            avail_event: avail_event.cast(),
            mem,
        })
    }

    #[inline]
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.mem
    }

    #[inline]
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    #[inline]
    fn masked(&self, position: u16) -> usize {
        // The size is a power of two.
        usize::from(position & (self.size - 1))
    }

    #[inline]
    fn avail_word(&self, index: usize) -> &AtomicU16 {
        debug_assert!(index < usize::from(self.size) + 3);
        // SAFETY: callers pass 0, 1, 2 + a masked position, or 2 + size: all within the
        // 3 + size words that `resolve` checked, aligned to 2, mapped while `mem` lives.
        unsafe { &*self.avail.add(index) }
    }

    /// The words of the available ring's protocol: the driver produces, the device consumes.
    #[inline]
    pub(crate) fn avail_words(&self) -> IndexWords<'_> {
        // SAFETY: `used` points to flags and index, `avail_event` to the last word of the used
        // ring; `resolve` checked their bounds. They are 2-aligned: used is so to 4, and
        // 4 + 8 * size is even.
        let (flags, event) = unsafe { (&*self.used, &*self.avail_event) };
        IndexWords {
            index: self.avail_word(1),
            flags,
            event,
        }
    }

    /// The words of the used ring's protocol: the device produces, the driver consumes.
    #[inline]
    pub(crate) fn used_words(&self) -> IndexWords<'_> {
        // SAFETY: the second word of the used ring, within the bounds that `resolve` checked.
        let index = unsafe { &*self.used.add(1) };
        IndexWords {
            index,
            flags: self.avail_word(0),
            event: self.avail_word(2 + usize::from(self.size)),
        }
    }

    /// One copy of the head at a free-running position of the available ring.
    #[inline]
    pub(crate) fn avail_head(&self, position: u16) -> u16 {
        u16::from_le(self.avail_word(2 + self.masked(position)).load(Relaxed))
    }

    #[inline]
    pub(crate) fn set_avail_head(&self, position: u16, head: u16) {
        self.avail_word(2 + self.masked(position))
            .store(head.to_le(), Relaxed);
    }

    #[inline]
    fn element_words(&self, position: u16) -> (&AtomicU32, &AtomicU32) {
        let index = 2 * self.masked(position);
        // SAFETY: index + 1 < 2 * size, the number of words that `resolve` checked, aligned to 4.
        unsafe { (&*self.elements.add(index), &*self.elements.add(index + 1)) }
    }

    /// One copy of the used element (id, length) at a free-running position.
    #[inline]
    pub(crate) fn used_element(&self, position: u16) -> (u32, u32) {
        let (id, len) = self.element_words(position);
        (
            u32::from_le(id.load(Relaxed)),
            u32::from_le(len.load(Relaxed)),
        )
    }

    #[inline]
    pub(crate) fn set_used_element(&self, position: u16, id: u32, len: u32) {
        let (id_word, len_word) = self.element_words(position);
        id_word.store(id.to_le(), Relaxed);
        stored();
        len_word.store(len.to_le(), Relaxed);
        stored();
    }

    #[inline]
    fn descriptor_words(&self, index: u16) -> Option<(&AtomicU64, &AtomicU64)> {
        if index >= self.size {
            return None;
        }
        let index = 2 * usize::from(index);
        // SAFETY: just checked: index + 1 < 2 * size, the number of words that `resolve` checked,
        // aligned to 16.
        Some(unsafe { (&*self.desc.add(index), &*self.desc.add(index + 1)) })
    }

    /// One copy of a descriptor; None if the table has no such descriptor. Relaxed atomics, so that
    /// the compiler does not read twice.
    #[inline]
    pub(crate) fn descriptor(&self, index: u16) -> Option<Descriptor> {
        let (addr, rest) = self.descriptor_words(index)?;
        Some(Descriptor::from_words([
            addr.load(Relaxed),
            rest.load(Relaxed),
        ]))
    }

    /// Writes a descriptor; an index outside the table is ignored.
    #[inline]
    pub(crate) fn set_descriptor(&self, index: u16, descriptor: Descriptor) {
        if let Some((addr, rest)) = self.descriptor_words(index) {
            let words = descriptor.to_words();
            addr.store(words[0], Relaxed);
            rest.store(words[1], Relaxed);
        }
    }
    /// Writes the length of a descriptor that is readable and the last of its chain.
    #[inline]
    pub(crate) fn set_readable_len(&self, index: u16, len: u32) {
        if let Some((_, rest)) = self.descriptor_words(index) {
            let [_, word] = Descriptor {
                addr: 0,
                len,
                flags: 0,
                next: 0,
            }
            .to_words();
            rest.store(word, Relaxed);
        }
    }
}
