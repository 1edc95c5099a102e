//! The memory of one peer: an immutable set of mapped regions, and translation into it.
#![allow(unsafe_code)]

use rustix::fd::OwnedFd;
use rustix::io::Errno;

use crate::slice::{GuestSlice, Piece, SliceBuf};

/// Most regions one [`Memory`] takes; vhost-user's memory-slot extension allows 509.
pub const MAX_REGIONS: usize = 512;

/// One region of a vhost-user memory table.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct RegionConfig {
    /// First guest physical address.
    pub guest_addr: u64,
    /// First address in the front-end's own address space; ring addresses are given in it.
    pub user_addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Where the region starts in its file, in bytes; need not be page-aligned.
    pub fd_offset: u64,
}

/// Why a memory table was refused. All but `Map` and `Stat` are the peer's fault.
#[derive(Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// More than [`MAX_REGIONS`] regions.
    #[error("{count} memory regions, at most {MAX_REGIONS} are taken")]
    TooMany {
        /// How many were given.
        count: usize,
    },
    /// A region of no bytes.
    #[error("memory region {index} has no length")]
    ZeroLength {
        /// Position in the table.
        index: usize,
    },
    /// A region whose end lies past the end of the address space.
    #[error("memory region {index} wraps around the address space")]
    Wraps {
        /// Position in the table.
        index: usize,
    },
    /// Two regions share guest or user addresses.
    #[error("memory regions {first} and {second} overlap")]
    Overlap {
        /// Position of one.
        first: usize,
        /// Position of the other.
        second: usize,
    },
    /// The file ends before the region does.
    #[error("memory region {index} ends past its file, which has {file_len} bytes")]
    ShortFile {
        /// Position in the table.
        index: usize,
        /// Length of the file in bytes.
        file_len: u64,
    },
    /// fstat failed.
    #[error("cannot examine the file of memory region {index}: {errno}")]
    Stat {
        /// Position in the table.
        index: usize,
        /// The system's reason.
        errno: Errno,
    },
    /// mmap failed.
    #[error("cannot map memory region {index}: {errno}")]
    Map {
        /// Position in the table.
        index: usize,
        /// The system's reason.
        errno: Errno,
    },
}

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

/// The mapped memory of one peer.
#[derive(Debug)]
pub struct Memory {
    id: u64,
}

impl Memory {
    /// Maps the regions shared.
    pub fn map(regions: Vec<(OwnedFd, RegionConfig)>) -> Result<Memory, MapError> {
        let _ = regions;
        Ok(Memory { id: 0 })
    }
    /// Translates a guest buffer and appends its pieces.
    pub fn translate(
        &self,
        guest_addr: u64,
        len: u32,
        out: &mut Vec<Piece>,
    ) -> Result<(), TranslateError> {
        let _ = (guest_addr, len, out);
        todo!()
    }
    /// The addresses behind a piece, if it is one of this memory.
    pub fn slice(&self, piece: Piece) -> Option<GuestSlice<'_>> {
        let _ = piece;
        todo!()
    }
    /// Copies out of the pieces from `offset` on; returns the bytes copied.
    pub fn read(&self, pieces: &[Piece], offset: usize, out: &mut [u8]) -> usize {
        let _ = (pieces, offset, out);
        todo!()
    }
    /// Copies into the pieces from `offset` on; returns the bytes copied.
    pub fn write(&self, pieces: &[Piece], offset: usize, data: &[u8]) -> usize {
        let _ = (pieces, offset, data);
        todo!()
    }
    /// Appends to `out` the slices of `len` bytes from `offset` on; returns the bytes covered,
    /// less than asked when `out` is full or the pieces end.
    pub fn slices<'m, const N: usize>(
        &'m self,
        pieces: &[Piece],
        offset: usize,
        len: usize,
        out: &mut SliceBuf<'m, N>,
    ) -> usize {
        let _ = (pieces, offset, len, out);
        todo!()
    }
    /// Copies straight from one memory to another; returns the bytes copied.
    pub fn copy(
        src: (&Memory, &[Piece], usize),
        dst: (&Memory, &[Piece], usize),
        len: usize,
    ) -> usize {
        let _ = (src, dst, len);
        todo!()
    }
    /// Whether part of the memory vanished and was replaced by zeros.
    pub fn is_lost(&self) -> bool {
        false
    }
    /// A number no other memory of this process has or had.
    pub fn id(&self) -> u64 {
        self.id
    }
}
