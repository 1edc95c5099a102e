//! The packet path of both halves allocates nothing once it is warm.
#![cfg(not(any(loom, miri)))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zerosock_ring::{
    Buffer, DeviceQueue, DriverLayout, DriverQueue, Memory, Piece, PopError, QueueConfig,
    RegionConfig, SliceBuf,
};

struct Counting;

thread_local! {
    // Per thread, since the test harness allocates on its own.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: passes everything on to the system's allocator; counting touches only a thread-local
// that needs neither allocation nor destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as in alloc.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const RINGS: u64 = 0;
const DATA: u64 = 0x10_0000;
const TABLES: u64 = 0x18_0000;
const LEN: u64 = 0x20_0000;

/// The descriptor holds the address of a table of descriptors.
const INDIRECT: u16 = 4;
/// Another descriptor follows.
const NEXT: u16 = 1;
/// The device writes the buffer.
const WRITE: u16 = 2;
/// Bytes of a descriptor.
const DESCRIPTOR: u64 = 16;

/// Writes `bytes` at a guest address.
fn poke(mem: &Memory, pieces: &mut Vec<Piece>, addr: u64, bytes: &[u8]) {
    pieces.clear();
    mem.translate(addr, bytes.len() as u32, pieces)
        .expect("the address is mapped");
    mem.write(pieces, 0, bytes);
}

/// Writes tables of 40 buffers of 512 bytes each, which the device writes.
fn write_tables(mem: &Memory) {
    let mut pieces = Vec::new();
    for table in 0..8 {
        for index in 0..40_u16 {
            let flags = if index < 39 { WRITE | NEXT } else { WRITE };
            let rest = 512 | u64::from(flags) << 32 | u64::from(index + 1) << 48;
            let at = TABLES + table * 1024 + DESCRIPTOR * u64::from(index);
            poke(mem, &mut pieces, at, &(DATA + 4096).to_le_bytes());
            poke(mem, &mut pieces, at + 8, &rest.to_le_bytes());
        }
    }
}

/// One round of all operations: direct, long, indirect and malformed chains; out of order; unpop.
fn round(
    driver: &mut DriverQueue,
    device: &mut DeviceQueue,
    (held, pieces): (&mut Vec<zerosock_ring::Chain>, &mut Vec<Piece>),
) {
    let read = Buffer {
        addr: DATA,
        len: 44,
        writable: false,
    };
    let write = Buffer {
        addr: DATA + 4096,
        len: 512,
        writable: true,
    };
    let outside = Buffer {
        addr: LEN,
        len: 1,
        writable: false,
    };
    for slot in 0..8 {
        driver.add(&[read, write], slot).expect("free descriptors");
        driver.add(&[read; 17], slot).expect("free descriptors");
        let table = Buffer {
            addr: TABLES + slot * 1024,
            len: 40 * DESCRIPTOR as u32,
            writable: false,
        };
        let head = driver.add(&[table], slot).expect("free descriptors");
        let flags = RINGS + DESCRIPTOR * u64::from(head) + 12;
        poke(device.memory(), pieces, flags, &INDIRECT.to_le_bytes());
        driver.add(&[outside], slot).expect("free descriptors");
    }
    let _ = driver.publish();
    device.disable_notifications();
    loop {
        match device.pop() {
            Ok(Some(chain)) => held.push(chain),
            Ok(None) => break,
            Err(PopError::Malformed(chain)) => device.complete(chain, 0),
            Err(PopError::Broken(reason)) => panic!("{reason}"),
        }
    }
    assert_eq!(held.len(), 24);
    if let Some(chain) = held.pop() {
        let mut slices = SliceBuf::<64>::new();
        let mem = Arc::clone(device.memory());
        assert_eq!(
            mem.slices(chain.writable(), 0, usize::MAX, &mut slices),
            40 * 512
        );
        assert_eq!(mem.write(chain.writable(), 100, &[1; 2000]), 2000);
        held.push(chain);
    }
    for chain in held.drain(..).rev() {
        device.complete(chain, 0);
    }
    let _ = device.publish();
    let _ = device.enable_notifications();
    while driver.poll().expect("a sound queue").is_some() {}
    let _ = driver.enable_notifications();
}

#[test]
fn a_warm_queue_allocates_nothing() {
    let fd = memfd_create("ring-allocation", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&fd, LEN).expect("its length");
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len: LEN,
        fd_offset: 0,
    };
    let mem = Arc::new(Memory::map(vec![(fd, region)]).expect("a mapping"));
    let layout = DriverLayout::at(RINGS, 256);
    let mut driver = DriverQueue::new(Arc::clone(&mem), layout, true).expect("a queue");
    let config = QueueConfig {
        size: 256,
        desc: layout.desc,
        avail: layout.avail,
        used: layout.used,
        base: 0,
        event_idx: true,
        indirect: true,
    };
    write_tables(&mem);
    let mut device = DeviceQueue::new(mem, &config).expect("a queue");
    let mut held = Vec::with_capacity(256);
    let mut pieces = Vec::new();
    // A vector grows when it gets the longest chain; it takes a while until all have.
    for _ in 0..100 {
        round(&mut driver, &mut device, (&mut held, &mut pieces));
    }
    let before = ALLOCATIONS.get();
    assert_ne!(before, 0, "the counter counts");
    for _ in 0..1000 {
        round(&mut driver, &mut device, (&mut held, &mut pieces));
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
}
