//! No allocation on the way of a packet through the device: counted, not believed.
//!
//! A test program of its own, because the counting allocator is the whole process's. The guest
//! (our driver half), the host program and the worker all run here; none of them may allocate
//! once their buffers have grown to their size.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use common::{TestDaemon, deadline};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to `System` unchanged; counting is one atomic addition.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps `System`'s contract, which is ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System` by way of `alloc` above.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: `ptr` came from `System` by way of `alloc` above.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn bytes_pass_both_ways_without_an_allocation() {
    const SIZES: [usize; 4] = [64, 1000, 4096, 50_000];
    let daemon = TestDaemon::new();
    let listener = daemon.host_listener(1000);
    let echo = std::thread::spawn(move || {
        let (mut program, _) = listener.accept().unwrap();
        let mut buffer = vec![0u8; 1 << 16];
        loop {
            match program.read(&mut buffer).unwrap() {
                0 => return,
                n => program.write_all(&buffer[..n]).unwrap(),
            }
        }
    });
    let mut guest = daemon.guest();
    let stream = guest.wait_connect(common::host(1000), deadline()).unwrap();
    let message: Vec<u8> = (0..50_000u32).map(|i| (i % 251) as u8).collect();
    let mut answer = vec![0u8; 50_000];
    let mut exchange = |rounds: usize| {
        for _ in 0..rounds {
            for size in SIZES {
                guest
                    .wait_send(stream, &message[..size], deadline())
                    .unwrap();
                guest
                    .wait_recv_exact(stream, &mut answer[..size], deadline())
                    .unwrap();
                assert_eq!(answer[..size], message[..size]);
            }
        }
    };
    // Buffers grow to their size.
    exchange(200);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    exchange(500);
    let allocated = ALLOCATIONS.load(Ordering::Relaxed) - before;
    assert_eq!(allocated, 0, "allocations in 2000 exchanges");
    guest.close(stream).unwrap();
    guest.turn().unwrap();
    echo.join().unwrap();
}
