//! Plain slices of peer memory, for callers that declare that the peer does not write them.
//!
//! # Invariants
//! A Rust reference to shared memory exists only while no party writes the bytes behind it. No
//! check can establish that, since the peer is another process. The caller promises it once, with
//! `unsafe`, by [`Trust::declare`]; everything else here is safe to call with the token, and the
//! obligations of the token's holder are listed there only. This is for processes that attach, by
//! the convention of memory-mapped files; never for a VM, because a guest kernel reuses its memory
//! when it reboots.

use crate::memory::Memory;
use crate::slice::{GuestSlice, Piece};

/// A promise that a peer does not write leased buffers. Pass the token only to code that keeps the
/// promises made in [`declare`](Self::declare); do not make it reachable for other callers.
///
/// ```
/// use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
/// use zerosock_ring::{Memory, RegionConfig, Trust};
///
/// let file = memfd_create("private", MemfdFlags::CLOEXEC)?;
/// ftruncate(&file, 4096)?;
/// let region = RegionConfig { guest_addr: 0, user_addr: 0, len: 4096, fd_offset: 0 };
/// let memory = Memory::map(vec![(file, region)])?;
/// let mut pieces = Vec::new();
/// memory.translate(16, 5, &mut pieces)?;
/// memory.write(&pieces, 0, b"hello");
/// // SAFETY: no other process has the file, and nothing is written from here on.
/// let trust = unsafe { Trust::declare() };
/// assert_eq!(memory.trusted_slice(pieces[0], trust), Some(&b"hello"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug)]
pub struct Trust(());

impl Trust {
    /// Declares that the peers of all memories used with the token respect leases.
    ///
    /// # Safety
    /// For every memory with which the token, or a copy of it, is used:
    /// - **The peer** does not write a buffer while it is leased: from the moment it made the
    ///   buffer available (or returned it with bytes in it) until it gets it back. It does not read
    ///   or write a buffer that it lends for writing, and lends no byte twice at a time. It gets a
    ///   buffer back through the ring, or by the answer to a message that stops the queue or
    ///   replaces the memory; an end of the control connection returns no buffer.
    /// - **The file** behind the memory cannot shrink (it has a shrink seal), since bytes that
    ///   vanish under a reference change; and no other process has it.
    /// - **This process**, in all code that has the token, makes a slice only of a leased buffer,
    ///   and drops it before it returns the buffer. Meanwhile nothing writes its bytes: not
    ///   [`Memory::write`], [`Memory::copy`], a [`GuestSlice`], a system call, or another mapping
    ///   of the file; no ring lies in it. A [`Claim`] is made only of a buffer that no other code
    ///   can reach: no other claim and no slice has a byte of it, and nothing reads or writes it in
    ///   another way while a slice of the claim lives.
    #[inline]
    pub const unsafe fn declare() -> Trust {
        Trust(())
    }
}

/// Exclusive access to a piece, through which a loan is filled. A `Claim` is not `Copy`, and its
/// slices borrow it, so one claim cannot give two mutable slices at a time.
///
/// A [`Piece`] cannot ensure that: it is only numbers, and [`translate`](Memory::translate) returns
/// equal ones any number of times. So the caller must keep the terms of [`Trust::declare`] by hand
/// only when it makes the claim.
///
/// ```compile_fail,E0499
/// # use zerosock_ring::{Claim, Memory};
/// fn two_to_write(claim: &mut Claim, memory: &Memory) {
///     let first = claim.slice_mut(memory);
///     let second = claim.slice_mut(memory);
///     drop((first, second));
/// }
/// ```
#[derive(Debug)]
pub struct Claim {
    piece: Piece,
    /// The [`Memory::id`] of the memory it lies in.
    memory: u64,
}

impl Claim {
    /// Claims a piece of that memory; None if it does not lie in it. By the terms of
    /// [`Trust::declare`], no other code reaches a byte of it while the claim lives.
    #[inline]
    pub fn new(memory: &Memory, piece: Piece, _: Trust) -> Option<Claim> {
        memory.slice(piece)?;
        let memory = memory.id();
        Some(Claim { piece, memory })
    }

    /// The piece claimed.
    #[inline]
    pub fn piece(&self) -> Piece {
        self.piece
    }

    /// The bytes, for reading; None if this is not the memory of the claim.
    #[inline]
    pub fn slice<'c>(&'c self, memory: &'c Memory) -> Option<&'c [u8]> {
        let slice = memory
            .slice(self.piece)
            .filter(|_| memory.id() == self.memory)?;
        // SAFETY: the declaration of trust promises that no other code reaches the bytes of a
        // claim. The slice borrows the claim, so the claim gives no mutable slice meanwhile.
        Some(unsafe { slice.as_slice() })
    }

    /// The bytes, for writing; None if this is not the memory of the claim. They contain what the
    /// last user of the buffer left there.
    #[inline]
    pub fn slice_mut<'c>(&'c mut self, memory: &'c Memory) -> Option<&'c mut [u8]> {
        let slice = memory
            .slice(self.piece)
            .filter(|_| memory.id() == self.memory)?;
        // SAFETY: as in `slice`; the claim is borrowed mutably, so this is its only slice.
        Some(unsafe { slice.as_mut_slice() })
    }
}

impl<'m> GuestSlice<'m> {
    /// The bytes in place, for reading: as [`Memory::trusted_slice`], for a slice that was resolved
    /// before.
    #[inline]
    pub fn trusted(self, _: Trust) -> &'m [u8] {
        // SAFETY: as in `Memory::trusted_slice`.
        unsafe { self.as_slice() }
    }
}

impl Memory {
    /// The bytes of a leased piece in place, for reading; None if it does not lie in this memory.
    /// Safe because the declaration of trust promises what
    /// [`GuestSlice::as_slice`](crate::GuestSlice::as_slice) requires.
    #[inline]
    pub fn trusted_slice(&self, piece: Piece, _: Trust) -> Option<&[u8]> {
        // SAFETY: a Trust exists only because its maker promised, in `declare`, that peer and
        // process do not write leased bytes, that their file cannot shrink, and that this is called
        // for leased pieces only.
        Some(unsafe { self.slice(piece)?.as_slice() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::RegionConfig;
    use crate::slice::PieceBuf;

    /// Two regions that meet at 0x2000.
    fn memory() -> Memory {
        let region = |guest_addr, user_addr| RegionConfig {
            guest_addr,
            user_addr,
            len: 0x1000,
            fd_offset: 0,
        };
        Memory::from_heap(&[region(0x1000, 0x1_0000), region(0x2000, 0x9_0000)])
    }

    fn pieces(mem: &Memory, addr: u64, len: u32) -> Vec<Piece> {
        let mut pieces = Vec::new();
        mem.translate(addr, len, &mut pieces).unwrap();
        pieces
    }

    fn trust() -> Trust {
        // SAFETY: the memories of these tests lie on the heap and have no peer; each test keeps
        // its claims and slices apart.
        unsafe { Trust::declare() }
    }

    #[test]
    fn a_trusted_slice_shows_the_bytes_in_place() {
        let mem = memory();
        let pieces = pieces(&mem, 0x1ffc, 8);
        assert_eq!(mem.write(&pieces, 0, b"abcdefgh"), 8);
        let parts: Vec<&[u8]> = pieces
            .iter()
            .map(|piece| mem.trusted_slice(*piece, trust()).unwrap())
            .collect();
        assert_eq!(parts, [b"abcd", b"efgh"]);
        let [first, _] = pieces[..] else {
            panic!("two regions, two pieces")
        };
        assert_eq!(
            parts[0].as_ptr(),
            mem.slice(first).unwrap().as_ptr().cast_const()
        );
    }

    #[test]
    fn bytes_written_through_a_claim_are_in_memory() {
        let mem = memory();
        let piece = pieces(&mem, 0x1100, 4)[0];
        let mut claim = Claim::new(&mem, piece, trust()).unwrap();
        claim.slice_mut(&mem).unwrap().copy_from_slice(b"loan");
        assert_eq!(claim.slice(&mem).unwrap(), b"loan");
        assert_eq!(claim.piece(), piece);
        let mut out = [0; 4];
        assert_eq!(mem.read(&[piece], 0, &mut out), 4);
        assert_eq!(&out, b"loan");
    }

    #[test]
    fn pieces_outside_a_memory_give_no_slice() {
        let (mem, other) = (memory(), memory());
        let inside = pieces(&mem, 0x1000, 0x1000)[0];
        let outside = Piece {
            offset: 1,
            ..inside
        };
        assert_eq!(mem.trusted_slice(outside, trust()), None);
        assert_eq!(
            mem.trusted_slice(
                Piece {
                    region: 2,
                    ..inside
                },
                trust()
            ),
            None
        );
        assert!(Claim::new(&mem, outside, trust()).is_none());
        let mut claim = Claim::new(&mem, inside, trust()).unwrap();
        assert_eq!(claim.slice(&other), None);
        assert_eq!(claim.slice_mut(&other), None);
    }

    #[test]
    fn a_piece_buf_holds_at_most_four_pieces() {
        let mem = memory();
        let five: Vec<Piece> = (0..5)
            .map(|i| pieces(&mem, 0x1000 + 16 * i, 16)[0])
            .collect();
        assert_eq!(PieceBuf::from_pieces(&five), None);
        assert_eq!(*PieceBuf::from_pieces(&five[1..]).unwrap(), five[1..]);
        assert_eq!(*PieceBuf::from_pieces(&[]).unwrap(), []);
        assert_eq!(PieceBuf::default().bytes(), 0);
    }

    #[test]
    fn a_part_of_pieces_leaves_out_what_lies_in_front_and_behind() {
        let mem = memory();
        let all = [pieces(&mem, 0x1000, 44), pieces(&mem, 0x1ff0, 0x20)].concat();
        for (offset, len, expected) in [
            (44, 0x20, vec![(0, 0xff0, 16), (1, 0, 16)]),
            (44, 16, vec![(0, 0xff0, 16)]),
            (44, 17, vec![(0, 0xff0, 16), (1, 0, 1)]),
            (43, 2, vec![(0, 43, 1), (0, 0xff0, 1)]),
            (61, usize::MAX, vec![(1, 1, 15)]),
            (76, 1, vec![]),
            (usize::MAX, usize::MAX, vec![]),
            (10, 0, vec![]),
        ] {
            let part = PieceBuf::from_part(&all, offset, len).unwrap();
            let expected: Vec<Piece> = expected
                .into_iter()
                .map(|(region, offset, len)| Piece {
                    region,
                    len,
                    offset,
                })
                .collect();
            assert_eq!(*part, expected[..], "{len} bytes from {offset}");
            assert_eq!(part.bytes(), expected.iter().map(|piece| piece.len()).sum());
        }
        let six = [all.clone(), all].concat();
        assert_eq!(PieceBuf::from_part(&six, 0, usize::MAX), None);
        assert!(PieceBuf::from_part(&six, 44, usize::MAX).is_none());
        assert!(PieceBuf::from_part(&six, 44, 80).is_some());
    }
}
