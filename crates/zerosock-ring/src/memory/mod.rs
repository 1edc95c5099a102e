//! The memory of one peer: an immutable set of mapped regions, and translation of guest addresses.
//!
//! # Invariants
//! Every address returned was checked against one region, and the region stays mapped while
//! anything can reach it. Addresses, lengths and files come from a hostile peer.
//! [`handle_fault`](crate::handle_fault) handles a file that shrinks after it was mapped.

mod addresses;
mod extents;
mod flat;
mod map;

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

use rustix::fd::AsFd;

use crate::fault::Registration;
use crate::slice::{GuestSlice, Piece, SliceBuf};
use map::{Mapping, check, map_region};

pub use extents::{Extent, ExtentError};
pub use flat::{FlatError, FlatMapping};
pub use map::{MAX_REGIONS, MapError, RegionConfig, RetiredRegion, Unmapper};

/// Why a guest address was refused: always the peer's fault.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TranslateError {
    /// A buffer of no bytes.
    #[error("buffer without length")]
    ZeroLength,
    /// The buffer runs past 2^64.
    #[error("buffer wraps around the address space")]
    Wraps,
    /// Some byte of the buffer lies in no region.
    #[error("guest address {addr:#x} lies in no memory region")]
    Unmapped {
        /// The first such byte.
        addr: u64,
    },
}

/// One region in our own address space.
#[derive(Debug)]
struct Region {
    guest_addr: u64,
    user_addr: u64,
    /// At most `isize::MAX`; `guest_addr + len` and `user_addr + len` do not wrap.
    len: u64,
    host: *mut u8,
}

/// The owner of the addresses of one region.
#[derive(Debug)]
enum Backing {
    Mapping(Mapping),
    #[cfg(test)]
    Heap {
        ptr: *mut u8,
        layout: std::alloc::Layout,
    },
}

/// The mapped memory of one peer: an immutable set of regions, shared as `Arc<Memory>` by the
/// queues that lie in it and by every holder of a piece of it.
///
/// A [`Piece`] is a pair of numbers that any memory bounds-checks; a [`GuestSlice`] borrows the
/// memory. So nothing outlives the mapping, and a changed memory table is a new `Memory`.
#[derive(Debug)]
pub struct Memory {
    id: u64,
    /// Sorted by guest address.
    regions: Vec<Region>,
    /// Empty for a memory of extents, whose parent has it.
    backing: Vec<Backing>,
    /// The memory that this one is a part of; `None` for a memory with a mapping of its own.
    parent: Option<Arc<Memory>>,
}

// SAFETY: the pointers in it are addresses of shared mappings (or, in tests, of heap blocks), valid on
// every thread until their owner is dropped. The owner is this object, or for a memory of extents the
// memory at the end of its chain of parents, which it keeps by an `Arc`. Either `drop` has its object to
// itself.
unsafe impl Send for Memory {}
// SAFETY: through shared references, to this memory or to another one with the same bytes, these are
// accessed only by the copies of `copy`, which race with nothing, and by atomics; they are valid until the
// `drop` named above. The other fields never change.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps the regions, shared, readable and writable. The descriptors are closed; the mappings
    /// keep the files.
    ///
    /// A table without regions is allowed: it translates nothing.
    ///
    /// # Errors
    /// [`MapError`]; nothing stays mapped.
    pub fn map(regions: Vec<(impl AsFd, RegionConfig)>) -> Result<Memory, MapError> {
        Memory::map_with(regions, None)
    }

    /// Maps the first `len` bytes of a file, which have the addresses from 0.
    ///
    /// # Errors
    /// [`MapError`]; nothing stays mapped.
    pub fn of_file(file: impl AsFd, len: u64) -> Result<Memory, MapError> {
        let region = RegionConfig {
            guest_addr: 0,
            user_addr: 0,
            len,
            fd_offset: 0,
        };
        Memory::map(vec![(file, region)])
    }

    /// As [`map`](Memory::map); `unmapper` gets the regions when nothing uses them any more.
    ///
    /// # Errors
    /// [`MapError`]; nothing stays mapped.
    pub fn map_with(
        regions: Vec<(impl AsFd, RegionConfig)>,
        unmapper: Option<Arc<dyn Unmapper>>,
    ) -> Result<Memory, MapError> {
        let configs: Vec<RegionConfig> = regions.iter().map(|(_, config)| *config).collect();
        check(&configs)?;
        let id = next_id();
        let mut mapped = Vec::with_capacity(regions.len());
        let mut backing: Vec<Backing> = Vec::with_capacity(regions.len());
        for (index, (fd, config)) in regions.iter().enumerate() {
            let leader = backing.first().and_then(Backing::registration);
            let (mapping, host) =
                map_region(index, fd.as_fd(), config, id, leader, unmapper.as_ref())?;
            mapped.push(Region::new(config, host));
            backing.push(Backing::Mapping(mapping));
        }
        mapped.sort_unstable_by_key(|region| region.guest_addr);
        Ok(Memory {
            id,
            regions: mapped,
            backing,
            parent: None,
        })
    }

    /// Translates the guest buffer of `len` bytes at `guest_addr` and appends its pieces to `out`:
    /// one, or one per region where it runs over the border of regions that are contiguous in
    /// guest addresses.
    ///
    /// # Errors
    /// [`TranslateError`]; `out` is as it was.
    #[inline]
    pub fn translate(
        &self,
        guest_addr: u64,
        len: u32,
        out: &mut Vec<Piece>,
    ) -> Result<(), TranslateError> {
        let old_len = out.len();
        let result = self.translate_near(&mut 0, guest_addr, len, |piece| out.push(piece));
        if result.is_err() {
            out.truncate(old_len);
        }
        result
    }

    /// As `translate`, but tries region `hint` first and stores the region that matched there. Each
    /// caller has its own hint, so that queues on several cores do not share a cache line for it.
    /// On an error, pieces in front of the bad byte may have been passed to `out` already.
    #[inline]
    pub(crate) fn translate_near(
        &self,
        hint: &mut u32,
        guest_addr: u64,
        len: u32,
        mut out: impl FnMut(Piece),
    ) -> Result<(), TranslateError> {
        if let Some(piece) = self.piece_in(*hint, guest_addr, len) {
            out(piece);
            return Ok(());
        }
        self.translate_search(hint, guest_addr, len, &mut out)
    }

    /// The buffer as one piece of that region, if it lies there and is not empty.
    #[inline]
    pub(crate) fn piece_in(&self, index: u32, guest_addr: u64, len: u32) -> Option<Piece> {
        let region = self.regions.get(index as usize)?;
        // An address below the region wraps to at least 2^64 - guest_addr, which is above
        // region.len because guest_addr + len does not wrap: it is refused like one past the end.
        let offset = guest_addr.wrapping_sub(region.guest_addr);
        let inside = offset < region.len && u64::from(len) <= region.len - offset && len != 0;
        inside.then_some(Piece {
            region: index,
            len,
            offset,
        })
    }

    #[inline(never)]
    fn translate_search(
        &self,
        hint: &mut u32,
        guest_addr: u64,
        len: u32,
        out: &mut dyn FnMut(Piece),
    ) -> Result<(), TranslateError> {
        let Some(last) = len.checked_sub(1) else {
            return Err(TranslateError::ZeroLength);
        };
        if guest_addr.checked_add(u64::from(last)).is_none() {
            return Err(TranslateError::Wraps);
        }
        // The last region that starts at or below the address.
        let behind = self
            .regions
            .partition_point(|region| region.guest_addr <= guest_addr);
        let mut index = behind.wrapping_sub(1);
        let mut addr = guest_addr;
        let mut rest = u64::from(len);
        while rest > 0 {
            let offset = self
                .regions
                .get(index)
                .map(|region| (region, addr.wrapping_sub(region.guest_addr)));
            let Some((region, offset)) = offset.filter(|(region, offset)| *offset < region.len)
            else {
                return Err(TranslateError::Unmapped { addr });
            };
            let take = rest.min(region.len - offset);
            // Both fit: `take` is at most `len`, and there are at most MAX_REGIONS regions.
            out(Piece {
                region: index as u32,
                len: take as u32,
                offset,
            });
            *hint = index as u32;
            rest -= take;
            // Cannot wrap: the region's end does not.
            addr += take;
            index += 1;
        }
        Ok(())
    }

    /// Prefetches the cache line at a guest address, for reading or writing, if it lies in that
    /// region; a hint only.
    #[inline]
    pub(crate) fn prefetch(&self, index: u32, guest_addr: u64, write: bool) {
        let Some(region) = self.regions.get(index as usize) else {
            return;
        };
        if let Some(host) = region.host(guest_addr.wrapping_sub(region.guest_addr), 1) {
            // SAFETY: `host` checked the byte against the region, as in `slice`.
            let slice: GuestSlice<'_> = unsafe { GuestSlice::new(host, 1) };
            if write {
                slice.prefetch_write();
            } else {
                slice.prefetch();
            }
        }
    }

    /// The addresses behind a piece; None if it does not lie in this memory.
    #[inline]
    pub fn slice(&self, piece: Piece) -> Option<GuestSlice<'_>> {
        let host = self
            .regions
            .get(piece.region as usize)?
            .host(piece.offset, u64::from(piece.len))?;
        // SAFETY: `host` checked the range against the region; `backing`, or that of `parent`, keeps its
        // addresses valid as long as `self` is borrowed; lengths are at most isize::MAX; references into
        // mapped memory are never made, but for atomics, which allow for this.
        Some(unsafe { GuestSlice::new(host, piece.len()) })
    }

    /// The slices of `len` bytes of the pieces from `offset` on; fewer where the pieces end or one
    /// does not lie in this memory.
    #[inline]
    fn parts<'m>(
        &'m self,
        pieces: &[Piece],
        mut offset: usize,
        mut len: usize,
    ) -> impl Iterator<Item = GuestSlice<'m>> {
        let mut pieces = pieces.iter();
        core::iter::from_fn(move || {
            while len > 0 {
                let piece = *pieces.next()?;
                if offset >= piece.len() {
                    offset -= piece.len();
                    continue;
                }
                let part = self.slice(piece)?.part(offset, len);
                offset = 0;
                len -= part.len();
                return Some(part);
            }
            None
        })
    }

    /// Copies bytes of the pieces, from `offset` on, into `out`; returns the number of bytes
    /// copied, fewer where the pieces end.
    #[inline]
    pub fn read(&self, pieces: &[Piece], offset: usize, out: &mut [u8]) -> usize {
        if let Some((piece, inside)) = find_piece(pieces, offset)
            && let Some(slice) = self.slice(piece)
            && slice.read_all(inside, out)
        {
            return out.len();
        }
        self.read_parts(pieces, offset, out)
    }

    #[inline(never)]
    fn read_parts(&self, pieces: &[Piece], offset: usize, out: &mut [u8]) -> usize {
        let mut done = 0;
        for part in self.parts(pieces, offset, out.len()) {
            let Some(rest) = out.get_mut(done..) else {
                break;
            };
            done += part.read(0, rest);
        }
        done
    }

    /// Copies `N` bytes of the pieces from `offset` on; None if they end before. For headers:
    /// nearly always they lie in one piece and are copied at once.
    #[inline]
    pub fn read_array<const N: usize>(&self, pieces: &[Piece], offset: usize) -> Option<[u8; N]> {
        if let Some((piece, inside)) = find_piece(pieces, offset)
            && let Some(bytes) = self.slice(piece)?.read_array(inside)
        {
            return Some(bytes);
        }
        let mut bytes = [0; N];
        (self.read_parts(pieces, offset, &mut bytes) == N).then_some(bytes)
    }

    /// The `len` bytes of the pieces from `offset` on as one slice; None if they do not lie in one
    /// piece. For callers that access the same bytes several times.
    #[inline]
    pub fn contiguous(
        &self,
        pieces: &[Piece],
        offset: usize,
        len: usize,
    ) -> Option<GuestSlice<'_>> {
        let (piece, inside) = find_piece(pieces, offset)?;
        let part = self.slice(piece)?.part(inside, len);
        (part.len() == len).then_some(part)
    }

    /// Reads `N` little-endian words of the pieces from `offset` on; None if they end before. As
    /// [`GuestSlice::read_words`], also across pieces.
    #[inline]
    pub fn read_words<const N: usize>(&self, pieces: &[Piece], offset: usize) -> Option<[u64; N]> {
        if let Some((piece, inside)) = find_piece(pieces, offset)
            && let Some(words) = self.slice(piece)?.read_words(inside)
        {
            return Some(words);
        }
        let mut words = [0; N];
        for (index, word) in words.iter_mut().enumerate() {
            let mut bytes = [0; 8];
            if self.read_parts(pieces, offset.checked_add(8 * index)?, &mut bytes) < 8 {
                return None;
            }
            *word = u64::from_le_bytes(bytes);
        }
        Some(words)
    }

    /// Writes the words, little-endian, to the pieces from `offset` on; false, with some perhaps
    /// written, if they end before. As [`GuestSlice::write_words`], also across pieces.
    #[inline]
    pub fn write_words<const N: usize>(
        &self,
        pieces: &[Piece],
        offset: usize,
        words: [u64; N],
    ) -> bool {
        if let Some((piece, inside)) = find_piece(pieces, offset)
            && let Some(slice) = self.slice(piece)
            && slice.write_words(inside, words)
        {
            return true;
        }
        words.into_iter().enumerate().all(|(index, word)| {
            let bytes = word.to_le_bytes();
            offset
                .checked_add(8 * index)
                .is_some_and(|offset| self.write_parts(pieces, offset, &bytes) == bytes.len())
        })
    }

    /// Copies `data` into the pieces, from `offset` on; returns the number of bytes copied, fewer
    /// where the pieces end.
    #[inline]
    pub fn write(&self, pieces: &[Piece], offset: usize, data: &[u8]) -> usize {
        if let Some((piece, inside)) = find_piece(pieces, offset)
            && let Some(slice) = self.slice(piece)
            && slice.write_all(inside, data)
        {
            return data.len();
        }
        self.write_parts(pieces, offset, data)
    }

    #[inline(never)]
    fn write_parts(&self, pieces: &[Piece], offset: usize, data: &[u8]) -> usize {
        let mut done = 0;
        for part in self.parts(pieces, offset, data.len()) {
            let Some(rest) = data.get(done..) else { break };
            done += part.write(0, rest);
        }
        done
    }

    /// Appends the slices of `len` bytes of the pieces from `offset` on to `out`; returns the
    /// number of bytes covered, fewer when `out` is full or the pieces end.
    #[inline]
    pub fn slices<'m, const N: usize>(
        &'m self,
        pieces: &[Piece],
        offset: usize,
        len: usize,
        out: &mut SliceBuf<'m, N>,
    ) -> usize {
        if len > 0
            && let Some(whole) = self.contiguous(pieces, offset, len)
        {
            return if out.push(whole) { len } else { 0 };
        }
        self.slices_of_parts(pieces, offset, len, out)
    }

    #[inline(never)]
    fn slices_of_parts<'m, const N: usize>(
        &'m self,
        pieces: &[Piece],
        offset: usize,
        len: usize,
        out: &mut SliceBuf<'m, N>,
    ) -> usize {
        let mut done = 0;
        for part in self.parts(pieces, offset, len) {
            if !out.push(part) {
                break;
            }
            done += part.len();
        }
        done
    }

    /// Copies `len` bytes directly from the pieces of one memory to those of another (or the same),
    /// each from its offset on; returns the number of bytes copied, fewer where either ends.
    pub fn copy(
        (src, src_pieces, src_offset): (&Memory, &[Piece], usize),
        (dst, dst_pieces, dst_offset): (&Memory, &[Piece], usize),
        len: usize,
    ) -> usize {
        let mut done = 0;
        let mut targets = dst.parts(dst_pieces, dst_offset, len);
        let mut target = targets.next();
        for mut source in src.parts(src_pieces, src_offset, len) {
            while !source.is_empty() {
                let Some(current) = target else { return done };
                let copied = source.copy_to(current);
                done += copied;
                source = source.part(copied, usize::MAX);
                let rest = current.part(copied, usize::MAX);
                target = if rest.is_empty() {
                    targets.next()
                } else {
                    Some(rest)
                };
            }
        }
        done
    }

    /// Whether part of the memory vanished (its file shrank) and was replaced by zeros: bytes read
    /// since are invalid, and the peer must be dropped. Never becomes false again.
    #[inline]
    pub fn is_lost(&self) -> bool {
        match self.backing.first().and_then(Backing::registration) {
            Some(leader) => leader.is_lost(self.id),
            // The mapping is that of another memory.
            None => self.parent.as_ref().is_some_and(|it| it.is_lost()),
        }
    }

    /// The memory whose mapping this one keeps: itself, or for a memory of extents that at the end of its chain of parents.
    pub fn mapping(&self) -> &Memory {
        self.parent.as_ref().map_or(self, |parent| parent.mapping())
    }

    /// Bytes of all regions together.
    pub fn size(&self) -> u64 {
        let sum = |sum: u64, region: &Region| sum.saturating_add(region.len);
        self.regions.iter().fold(0, sum)
    }

    /// A number that no other memory of this process has or had.
    #[inline]
    pub fn id(&self) -> u64 {
        self.id
    }
}

/// The piece that contains byte `offset` of all pieces, and the offset within it.
#[inline]
fn find_piece(pieces: &[Piece], offset: usize) -> Option<(Piece, usize)> {
    // Unrolled: nearly always it is the first or second piece.
    if let [first, rest @ ..] = pieces {
        if offset < first.len() {
            return Some((*first, offset));
        }
        let offset = offset - first.len();
        if let [second, ..] = rest
            && offset < second.len()
        {
            return Some((*second, offset));
        }
    }
    None
}

impl Region {
    fn new(config: &RegionConfig, host: *mut u8) -> Region {
        Region {
            guest_addr: config.guest_addr,
            user_addr: config.user_addr,
            len: config.len,
            host,
        }
    }

    /// The address of `len` bytes from `offset` on, if they lie in the region.
    #[inline]
    fn host(&self, offset: u64, len: u64) -> Option<*mut u8> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        // SAFETY: offset <= self.len <= isize::MAX, and that many bytes from `host` on are one
        // mapping: the sum stays in it or one past it.
        Some(unsafe { self.host.add(offset as usize) })
    }
}

impl Backing {
    #[inline]
    fn registration(&self) -> Option<&Registration> {
        match self {
            Backing::Mapping(mapping) => mapping.registration(),
            #[cfg(test)]
            Backing::Heap { .. } => None,
        }
    }

    fn unmapper(&self) -> Option<&Arc<dyn Unmapper>> {
        match self {
            Backing::Mapping(mapping) => mapping.unmapper(),
            #[cfg(test)]
            Backing::Heap { .. } => None,
        }
    }
}

fn next_id() -> u64 {
    // Starts at 1: 0 means "none" in the fault table.
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Relaxed)
}

#[cfg(test)]
impl Memory {
    /// A memory on the heap, for tests that need no file: those run under Miri.
    pub(crate) fn from_heap(configs: &[RegionConfig]) -> Memory {
        check(configs).expect("a valid table");
        let mut regions = Vec::new();
        let mut backing = Vec::new();
        for config in configs {
            let layout =
                std::alloc::Layout::from_size_align(config.len as usize, 4096).expect("a layout");
            // SAFETY: `check` refused lengths of 0.
            let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
            assert!(!ptr.is_null());
            regions.push(Region::new(config, ptr));
            backing.push(Backing::Heap { ptr, layout });
        }
        regions.sort_unstable_by_key(|region| region.guest_addr);
        Memory {
            id: next_id(),
            regions,
            backing,
            parent: None,
        }
    }
}

#[cfg(test)]
impl Drop for Backing {
    fn drop(&mut self) {
        if let Backing::Heap { ptr, layout } = *self {
            // SAFETY: allocated with this layout by `from_heap`, for this object alone.
            unsafe { std::alloc::dealloc(ptr, layout) };
        }
    }
}

#[cfg(test)]
mod tests;
