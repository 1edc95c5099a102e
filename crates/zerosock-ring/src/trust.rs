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
    /// - **A file given by the agent of a guest**, instead: it lies on hugetlbfs, where no seal keeps it from shrinking. So
    ///   no process truncates it, punches a hole into it, removes its pages, or writes it: besides this process only the
    ///   agent and its keeper have it, and they do neither. The peer is the daemon on the host, which writes the same
    ///   pages as memory of the VM, and which keeps the terms of the first item also while the VM is stopped.
    /// - **This process**, in all code that has the token, makes a slice only of a leased buffer,
    ///   and drops it before it returns the buffer. Meanwhile nothing writes its bytes: not
    ///   [`Memory::write`], [`Memory::copy`], a [`GuestSlice`], a system call, another mapping of the
    ///   file, or a memory of extents of it, or its parent; no ring lies in it. A [`Claim`] is made
    ///   only of a buffer that no other code can reach: no other claim and no slice has a byte of it,
    ///   and nothing reads or writes it in another way while a slice of the claim lives.
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
#[path = "trust_tests.rs"]
mod tests;
