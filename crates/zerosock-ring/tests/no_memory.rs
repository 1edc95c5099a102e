//! A chain with more pieces than there is memory for breaks its queue, and does not end the process.
//!
//! A test program of its own, because the allocator serves the whole process: on demand it refuses
//! all allocations above 64 KiB. An infallible allocation of that size would end the process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zerosock_ring::{
    BrokenReason, ChainFault, DeviceQueue, DriverLayout, Memory, PopError, QueueConfig,
    RegionConfig,
};

struct Refusing;

static REFUSES: AtomicBool = AtomicBool::new(false);

fn refuses(size: usize) -> bool {
    // A test that fails says where.
    size > 64 << 10 && REFUSES.load(Ordering::Relaxed) && !std::thread::panicking()
}

// SAFETY: what is not refused is passed on to `System` unchanged, and null is how an allocator
// refuses.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if refuses(layout.size()) {
            return null_mut();
        }
        // SAFETY: the caller keeps `System`'s contract, which is ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System` by way of `alloc` above.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if refuses(size) {
            return null_mut();
        }
        // SAFETY: `ptr` came from `System` by way of `alloc` above.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static REFUSING: Refusing = Refusing;

const SIZE: u16 = 16_384;
const LEN: u64 = 1 << 20;
const NEXT: u16 = 1;

#[test]
fn chain_without_memory_for_its_pieces_breaks_its_queue() {
    let fd = memfd_create("no_memory", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, LEN).unwrap();
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len: LEN,
        fd_offset: 0,
    };
    let memory = Arc::new(Memory::map(vec![(fd, region)]).unwrap());
    let write = |addr: u64, bytes: &[u8]| {
        let mut pieces = Vec::new();
        memory
            .translate(addr, bytes.len() as u32, &mut pieces)
            .unwrap();
        assert_eq!(memory.write(&pieces, 0, bytes), bytes.len());
    };
    // All descriptors are one chain, which the driver has posted twice.
    let layout = DriverLayout::at(0, SIZE);
    for n in 0..SIZE {
        let (flags, next) = if n + 1 < SIZE { (NEXT, n + 1) } else { (0, 0) };
        let at = layout.desc + 16 * u64::from(n);
        write(at + 8, &1u32.to_le_bytes());
        write(at + 12, &flags.to_le_bytes());
        write(at + 14, &next.to_le_bytes());
    }
    write(layout.avail + 2, &2u16.to_le_bytes());
    let config = QueueConfig {
        size: SIZE,
        desc: layout.desc,
        avail: layout.avail,
        used: layout.used,
        base: 0,
        event_idx: false,
        indirect: false,
    };
    let mut queue = DeviceQueue::new(memory, &config).unwrap();
    REFUSES.store(true, Ordering::Relaxed);
    let Err(PopError::Malformed(chain)) = queue.pop() else {
        panic!("there was memory");
    };
    assert_eq!(chain.fault(), Some(ChainFault::NoMemory));
    queue.complete(chain, 0);
    let next = queue.pop();
    REFUSES.store(false, Ordering::Relaxed);
    assert!(
        matches!(next, Err(PopError::Broken(BrokenReason::NoMemory))),
        "{next:?}"
    );
}
