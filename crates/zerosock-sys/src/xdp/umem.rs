//! The memory of a socket: that of a guest, and private chunks.

use std::sync::Arc;

use zerosock_ring::{FlatMapping, GuestSlice, Memory, Piece};

use super::error::XdpError;
use super::{CHUNK, FRAME_OFFSET, MAX_FRAME};

/// Bytes of a page, as far as chunks go. The part of the guest is a multiple of it, and a larger page
/// contains several.
pub(super) const PAGE: u64 = 4096;
/// Private chunks with free bytes around them: the first ones that [`Umem::take_chunk`] gives.
pub const PROBES: usize = 16;
/// Bytes in front of such a chunk, and behind it.
pub(super) const MARGIN: u64 = (PAGE - CHUNK as u64) / 2;

/// Memory for a socket, not registered yet: the regions of a guest's memory, if there is one, and private
/// chunks of [`CHUNK`] bytes.
#[derive(Debug)]
pub struct Umem {
    flat: FlatMapping,
    /// Addresses of the private chunks that are not in use. The last ones are used first.
    free: Vec<u64>,
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
        let mut free: Vec<u64> = probes.chain(halves).collect();
        free.reverse();
        Ok(Umem { flat, free })
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

    /// A private chunk that is not in use.
    pub fn take_chunk(&mut self) -> Option<u64> {
        self.free.pop()
    }

    /// Returns a chunk that [`take_chunk`](Self::take_chunk) gave, once the kernel does not use it.
    pub fn return_chunk(&mut self, addr: u64) {
        self.free.push(addr);
    }

    /// The chunks with free bytes around them, lowest address first.
    pub(super) fn probes(&self) -> Vec<u64> {
        let pages = 0..PROBES as u64;
        let start = self.flat.private_start();
        pages.map(|page| start + page * PAGE + MARGIN).collect()
    }

    /// Private chunks that are not in use.
    pub fn free_chunks(&self) -> usize {
        self.free.len()
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
