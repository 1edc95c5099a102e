//! Tests of both halves: by hand, against an oracle, with random ring contents. All on heap memory,
//! so that they run under Miri too.

mod chains;
mod device;
mod driver;
mod front;
mod hostile;
#[cfg(not(miri))] // maps a file
pub(super) mod inflight;
#[cfg(not(miri))]
mod log;
mod oracle;
mod short;
mod single;

use std::sync::Arc;

use super::layout::{Descriptor, DriverLayout, QueueConfig};
use super::{DeviceQueue, DriverQueue};
use crate::memory::{Memory, RegionConfig};
use crate::slice::Piece;

/// Guest address of the region that holds the rings.
pub(super) const RINGS: u64 = 0x10_0000;
/// Guest address of the first of two contiguous data regions.
pub(super) const DATA: u64 = 0x8000_0000;
/// Length of each data region: enough for a run of the oracle without using an address twice.
pub(super) const DATA_LEN: u64 = 0x6_0000;
/// Guest address at which the two data regions meet.
pub(super) const BORDER: u64 = DATA + DATA_LEN;
/// Difference between user addresses and guest addresses.
const USER: u64 = 0x7f00_0000_0000;

pub(super) fn layout(size: u16) -> DriverLayout {
    DriverLayout::at(RINGS, size)
}

pub(super) fn memory(size: u16) -> Arc<Memory> {
    let region = |guest_addr, user_addr, len| RegionConfig {
        guest_addr,
        user_addr: USER + user_addr,
        len,
        fd_offset: 0,
    };
    // The data regions are contiguous in guest addresses only.
    Arc::new(Memory::from_heap(&[
        region(DATA + DATA_LEN, 0x100_0000, DATA_LEN),
        region(RINGS, RINGS, DriverLayout::bytes_needed(size)),
        region(DATA, 0x200_0000, DATA_LEN),
    ]))
}

pub(super) fn config(size: u16, base: u16, event_idx: bool) -> QueueConfig {
    let DriverLayout {
        size,
        desc,
        avail,
        used,
    } = layout(size);
    QueueConfig {
        size,
        desc: USER + desc,
        avail: USER + avail,
        used: USER + used,
        base,
        event_idx,
        indirect: true,
    }
}

pub(super) fn queues(size: u16, base: u16, event_idx: bool) -> (DriverQueue, DeviceQueue) {
    let mem = memory(size);
    let driver = DriverQueue::with_base(Arc::clone(&mem), layout(size), event_idx, base)
        .expect("a valid layout");
    let device = DeviceQueue::new(mem, &config(size, base, event_idx)).expect("a valid queue");
    (driver, device)
}

/// Writes at a guest address.
pub(super) fn poke(mem: &Memory, addr: u64, bytes: &[u8]) {
    let mut pieces = Vec::new();
    mem.translate(addr, bytes.len() as u32, &mut pieces)
        .expect("an address in memory");
    assert_eq!(mem.write(&pieces, 0, bytes), bytes.len());
}

/// Reads at a guest address.
pub(super) fn peek(mem: &Memory, addr: u64, len: usize) -> Vec<u8> {
    let mut pieces = Vec::new();
    mem.translate(addr, len as u32, &mut pieces)
        .expect("an address in memory");
    contents(mem, &pieces)
}

pub(super) fn peek_u16(mem: &Memory, addr: u64) -> u16 {
    let bytes = peek(mem, addr, 2);
    u16::from_le_bytes([bytes[0], bytes[1]])
}

pub(super) fn contents(mem: &Memory, pieces: &[Piece]) -> Vec<u8> {
    let mut bytes = vec![0; pieces.iter().map(|piece| piece.len()).sum()];
    assert_eq!(mem.read(pieces, 0, &mut bytes), bytes.len());
    bytes
}

/// Posts a hand-made chain: descriptors as (addr, len, flags, next) from index 0 on, head 0.
pub(super) fn post(mem: &Memory, size: u16, table: &[(u64, u32, u16, u16)]) {
    let layout = layout(size);
    write_table(mem, layout.desc, table);
    post_head(mem, size, 0);
}

pub(super) fn write_table(mem: &Memory, at: u64, table: &[(u64, u32, u16, u16)]) {
    for (index, &(addr, len, flags, next)) in table.iter().enumerate() {
        let bytes = Descriptor {
            addr,
            len,
            flags,
            next,
        }
        .to_bytes();
        poke(mem, at + 16 * index as u64, &bytes);
    }
}

pub(super) fn post_head(mem: &Memory, size: u16, head: u16) {
    let layout = layout(size);
    let index = peek_u16(mem, layout.avail + 2);
    let slot = u64::from(index % size);
    poke(mem, layout.avail + 4 + 2 * slot, &head.to_le_bytes());
    poke(mem, layout.avail + 2, &index.wrapping_add(1).to_le_bytes());
}
