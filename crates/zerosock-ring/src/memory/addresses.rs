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

    /// The address by which a log of written pages counts the piece's first byte: the guest address, for a
    /// memory of extents that in the parent. None if it does not lie in this memory.
    pub(crate) fn log_addr(&self, piece: Piece) -> Option<u64> {
        let number = piece.region as usize;
        let region = self.regions.get(number)?;
        region.host(piece.offset, u64::from(piece.len))?;
        Some(self.log_base(number)? + piece.offset)
    }

    /// The address by which a log of written pages counts a used ring at `addr`, for a memory of extents. None
    /// for a memory with a mapping of its own: its front-end says where the ring is logged.
    pub(crate) fn used_log_addr(&self, addr: u64) -> Option<u64> {
        self.parent.as_ref()?;
        let (number, inside) = self.locate(addr)?;
        Some(self.log_base(number)? + inside)
    }

    /// As `log_addr`, for the first byte of the region with this number.
    pub(super) fn log_base(&self, number: usize) -> Option<u64> {
        match &self.parent {
            Some(parent) => parent.log_addrs.get(number).copied(),
            None => self.regions.get(number).map(|region| region.guest_addr),
        }
    }

    /// The address of the first byte of each region in a log of written pages, and the region's length.
    pub(crate) fn log_ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        let regions = self.regions.iter().enumerate();
        regions.filter_map(|(number, region)| Some((self.log_base(number)?, region.len)))
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
