//! The memory of a socket: that of a guest, and private chunks.

use std::sync::Arc;

use zerosock_ring::{FlatMapping, GuestSlice, Memory, Piece};

use super::error::XdpError;
use super::{CHUNK, FRAME_OFFSET, MAX_FRAME};

/// Bytes of a page, as far as chunks go. The part of the guest is a multiple of it, and a larger page
/// contains several.
pub(super) const PAGE: u64 = 4096;
/// Private chunks with free bytes around them: the first ones that [`Umem::take_chunk`] gives. They are for
/// received frames only.
pub const PROBES: usize = 16;
/// Bytes in front of such a chunk, and behind it.
pub(super) const MARGIN: u64 = (PAGE - CHUNK as u64) / 2;

/// Memory for a socket, not registered yet: the regions of a guest's memory, if there is one, and private
/// chunks of [`CHUNK`] bytes.
#[derive(Debug)]
pub struct Umem {
    flat: FlatMapping,
    /// Addresses of the private chunks that are not in use, without the probes. The last ones are used first.
    free: Vec<u64>,
    /// Those with free bytes around them, likewise.
    free_probes: Vec<u64>,
}

impl Umem {
    /// Maps the memory, and at least `chunks` private chunks.
    ///
    /// The first [`PROBES`] of those that are used have free bytes around them.
    ///
    /// # Errors
    /// [`XdpError::Flat`], if the regions cannot be mapped as one range.
    pub fn map(memory: Option<Arc<Memory>>, chunks: u32) -> Result<Umem, XdpError> {
        let probes = PROBES as u64;
        let pairs = u64::from(chunks).saturating_sub(probes).div_ceil(2);
        let private = usize::try_from((probes + pairs) * PAGE).unwrap_or(usize::MAX);
        let flat = FlatMapping::new(memory, private)?;
        let pages = |range: std::ops::Range<u64>| {
            let start = flat.private_start();
            range.map(move |page| start + page * PAGE)
        };
        let halves = pages(probes..probes + pairs).flat_map(|page| [page, page + u64::from(CHUNK)]);
        // In the middle of a page.
        let probes = pages(0..probes).map(|page| page + MARGIN);
        let (free, free_probes) = (halves.rev().collect(), probes.rev().collect());
        Ok(Umem {
            flat,
            free,
            free_probes,
        })
    }

    /// Bytes that [`Registered::create`](super::Registered::create) locks: all of it.
    pub fn locked(&self) -> u64 {
        self.flat.size()
    }

    /// The guest's memory.
    pub fn memory(&self) -> Option<&Arc<Memory>> {
        self.flat.memory()
    }

    /// Whether the address is that of a private chunk.
    pub fn is_private(&self, addr: u64) -> bool {
        addr >= self.flat.private_start()
    }

    /// A private chunk that is not in use, for a frame to come.
    pub fn take_chunk(&mut self) -> Option<u64> {
        self.free_probes.pop().or_else(|| self.free.pop())
    }

    /// A private chunk that is not in use, for a frame to send. It is none of the [`PROBES`]: what a
    /// [`Probe`](super::Probe) has written there stays.
    pub fn take_send_chunk(&mut self) -> Option<u64> {
        self.free.pop()
    }

    /// Returns a chunk that [`take_chunk`](Self::take_chunk) or [`take_send_chunk`](Self::take_send_chunk) gave,
    /// once the kernel does not use it.
    pub fn return_chunk(&mut self, addr: u64) {
        match addr < self.probes_end() {
            true => self.free_probes.push(addr),
            false => self.free.push(addr),
        }
    }

    /// The number of the private chunk at this address, counted from 0; None if no private chunk begins there.
    /// Not every number below [`chunk_numbers`](Self::chunk_numbers) is that of a chunk.
    #[inline]
    pub fn chunk_number(&self, addr: u64) -> Option<usize> {
        let inside = addr.checked_sub(self.flat.private_start())?;
        let begins = match addr < self.probes_end() {
            true => inside % PAGE == MARGIN,
            false => inside.is_multiple_of(CHUNK.into()) && self.contains(addr, CHUNK),
        };
        let number = usize::try_from(inside / u64::from(CHUNK)).ok();
        number.filter(|_| begins)
    }

    /// Above all numbers of private chunks.
    pub fn chunk_numbers(&self) -> usize {
        let private = self.flat.size() - self.flat.private_start();
        usize::try_from(private / u64::from(CHUNK)).unwrap_or(usize::MAX)
    }

    fn probes_end(&self) -> u64 {
        self.flat.private_start() + PROBES as u64 * PAGE
    }

    /// The chunks with free bytes around them, lowest address first.
    pub(super) fn probes(&self) -> Vec<u64> {
        let pages = 0..PROBES as u64;
        let start = self.flat.private_start();
        pages.map(|page| start + page * PAGE + MARGIN).collect()
    }

    /// Private chunks that are not in use.
    pub fn free_chunks(&self) -> usize {
        self.free.len() + self.free_probes.len()
    }

    /// Bytes of private memory. The kernel may write them at any time while the chunk is in a ring.
    pub fn private(&self, addr: u64, len: usize) -> Option<GuestSlice<'_>> {
        self.flat.private(addr, len)
    }

    /// The chunk by which the kernel writes a frame to the bytes behind the first `skip` of the pieces; None
    /// if they do not have room for every frame in one place.
    pub fn chunk_for(&self, pieces: &[Piece], skip: usize) -> Option<u64> {
        let mut skip = skip;
        let piece = pieces.iter().find(|piece| {
            let inside = skip < piece.len();
            skip -= if inside { 0 } else { piece.len() };
            inside
        })?;
        let room = piece.part(skip, MAX_FRAME as usize);
        if room.len() < MAX_FRAME as usize {
            return None;
        }
        let addr = self.flat.offset(room)?.checked_sub(FRAME_OFFSET.into())?;
        self.contains(addr, CHUNK).then_some(addr)
    }

    /// The address of a piece of the guest's memory.
    pub fn addr_of(&self, piece: Piece) -> Option<u64> {
        self.flat.offset(piece)
    }

    /// See [`FlatMapping::populate`].
    pub(super) fn populate(&self) {
        self.flat.populate();
    }

    /// Address of the memory in this process, for the kernel.
    pub(super) fn start(&self) -> u64 {
        self.flat.addr() as u64
    }

    /// Whether the range lies in the memory.
    pub(super) fn contains(&self, addr: u64, len: u32) -> bool {
        let end = addr.checked_add(len.into());
        end.is_some_and(|end| end <= self.flat.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn chunks_have_numbers_of_their_own() {
        let mut umem = Umem::map(None, 64).unwrap();
        let addrs: Vec<u64> = std::iter::from_fn(|| umem.take_chunk()).collect();
        assert!(addrs.len() >= 64);
        let numbers = addrs.iter().map(|addr| umem.chunk_number(*addr).unwrap());
        let numbers: BTreeSet<usize> = numbers.collect();
        assert_eq!(numbers.len(), addrs.len());
        assert!(numbers.iter().all(|number| *number < umem.chunk_numbers()));
        let known: BTreeSet<u64> = addrs.into_iter().collect();
        for addr in (0..umem.locked() + 4 * PAGE).filter(|addr| !known.contains(addr)) {
            assert_eq!(umem.chunk_number(addr), None, "{addr}");
        }
        assert_eq!(umem.chunk_number(u64::MAX), None);
    }

    #[test]
    fn frames_to_send_get_no_chunk_of_the_probe() {
        let mut umem = Umem::map(None, 64).unwrap();
        let probes = umem.probes();
        let all = umem.free_chunks();
        let sent: Vec<u64> = std::iter::from_fn(|| umem.take_send_chunk()).collect();
        assert_eq!(sent.len(), all - PROBES);
        assert!(sent.iter().all(|addr| !probes.contains(addr)));
        let received: Vec<u64> = std::iter::from_fn(|| umem.take_chunk()).collect();
        assert_eq!(received, probes);
        for addr in received.into_iter().chain(sent) {
            umem.return_chunk(addr);
        }
        assert_eq!(umem.free_chunks(), all);
        assert!(!probes.contains(&umem.take_send_chunk().unwrap()));
    }
}
