//! Addresses of a memory in the guest, in the front-end and in this process, and the way from one to
//! another.

use super::Memory;
use crate::slice::Piece;

impl Memory {
    /// Offset of the piece in the memory, in bytes: the regions count one after the other in order
    /// of guest addresses, without the gaps. None if it does not lie in this memory.
    pub fn flat_offset(&self, piece: Piece) -> Option<u64> {
        let region = piece.region as usize;
        self.regions
            .get(region)?
            .host(piece.offset, u64::from(piece.len))?;
        let before = match &self.parent {
            // Its guest addresses have no gaps.
            Some(_) => self.regions.get(region)?.guest_addr,
            None => self.regions.iter().take(region).map(|r| r.len).sum(),
        };
        Some(before + piece.offset)
    }

    /// The region with this address, and the offset of the address in it.
    pub(super) fn locate(&self, addr: u64) -> Option<(usize, u64)> {
        let behind = self.regions.partition_point(|r| r.guest_addr <= addr);
        let number = behind.checked_sub(1)?;
        let region = self.regions.get(number)?;
        let inside = addr - region.guest_addr;
        (inside < region.len).then_some((number, inside))
    }

    /// The guest address of the piece's first byte; None if it does not lie in this memory.
    pub(crate) fn guest_addr(&self, piece: Piece) -> Option<u64> {
        let region = self.regions.get(piece.region as usize)?;
        region.host(piece.offset, u64::from(piece.len))?;
        Some(region.guest_addr + piece.offset)
    }

    /// First guest address and length of each region, in order.
    pub(crate) fn guest_ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        let regions = self.regions.iter();
        regions.map(|region| (region.guest_addr, region.len))
    }

    /// The guest address behind the last byte; 0 without regions.
    pub fn end(&self) -> u64 {
        let last = self.regions.last();
        last.map_or(0, |region| region.guest_addr + region.len)
    }

    /// The address of `len` bytes at the front-end's own address `user_addr`, if they lie in one
    /// region.
    pub(crate) fn at_user_addr(&self, user_addr: u64, len: u64) -> Option<*mut u8> {
        self.regions
            .iter()
            .find_map(|region| region.host(user_addr.checked_sub(region.user_addr)?, len))
    }

    /// The address of `len` bytes at `guest_addr`, if they lie in one region.
    pub(crate) fn at_guest_addr(&self, guest_addr: u64, len: u64) -> Option<*mut u8> {
        self.regions
            .iter()
            .find_map(|region| region.host(guest_addr.checked_sub(region.guest_addr)?, len))
    }
}
