//! A file shrinks after it was mapped: the fault is handled, the process continues, and only that
//! memory is lost. Uses a real signal; the handler here does what that of the program does.
#![cfg(not(any(loom, miri)))]

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zerosock_ring::{
    Buffer, DeviceQueue, DriverLayout, DriverQueue, Extent, Memory, Piece, PopError, QueueConfig,
    RegionConfig,
};

const PAGE: u64 = 4096;

extern "C" fn on_sigbus(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo_t to a SA_SIGINFO handler; si_addr is set for
    // SIGBUS.
    let addr = unsafe { (*info).si_addr() }.addr();
    // SAFETY: we are in the handler, on the thread that faulted, with the fault's address.
    if !unsafe { zerosock_ring::handle_fault(addr) } {
        // SAFETY: abort may be called in a handler.
        unsafe { libc::abort() };
    }
}

fn install() {
    // SAFETY: a zeroed sigaction is a valid one; the handler has the SA_SIGINFO signature and is
    // async-signal-safe: handle_fault is so by its contract, abort by POSIX.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()),
            0
        );
    }
}

fn memfd(len: u64) -> OwnedFd {
    let fd = memfd_create("ring-sigbus", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&fd, len).expect("its length");
    fd
}

fn map(fd: &OwnedFd, regions: &[RegionConfig]) -> Memory {
    let regions = regions
        .iter()
        .map(|config| (fd.try_clone().expect("a descriptor"), *config));
    Memory::map(regions.collect()).expect("a mapping")
}

fn region(guest_addr: u64, len: u64, fd_offset: u64) -> RegionConfig {
    RegionConfig {
        guest_addr,
        user_addr: guest_addr,
        len,
        fd_offset,
    }
}

fn pieces(mem: &Memory, addr: u64, len: u32) -> Vec<Piece> {
    let mut pieces = Vec::new();
    mem.translate(addr, len, &mut pieces)
        .expect("an address in memory");
    pieces
}

fn get(mem: &Memory, addr: u64) -> u8 {
    let mut byte = [0xee];
    assert_eq!(mem.read(&pieces(mem, addr, 1), 0, &mut byte), 1);
    byte[0]
}

#[test]
fn a_truncated_file_loses_only_its_own_memory() {
    install();
    let fd = memfd(16 * PAGE);
    // Two regions, so that the loss of the second shows on the memory.
    let victim = map(
        &fd,
        &[
            region(0, 8 * PAGE, 0),
            region(0x10_0000, 8 * PAGE, 8 * PAGE),
        ],
    );
    let same_file = map(&fd, &[region(0, 8 * PAGE, 0)]);
    let other = map(&memfd(4 * PAGE), &[region(0, 4 * PAGE, 0)]);
    for (mem, addr) in [(&victim, PAGE), (&victim, 0x10_0000 + PAGE), (&other, PAGE)] {
        mem.write(&pieces(mem, addr, 1), 0, &[7]);
    }
    ftruncate(&fd, 9 * PAGE).expect("a shorter file");
    assert!(!victim.is_lost(), "not before an access");
    assert_eq!(get(&victim, 0x10_0000 + 4 * PAGE), 0);
    assert!(victim.is_lost());
    // From the fault to the end the mapping is anonymous now; the page before, which vanished too,
    // is the next fault; the remaining pages keep their contents.
    assert_eq!(get(&victim, 0x10_0000 + 8 * PAGE - 1), 0);
    assert_eq!(get(&victim, 0x10_0000 + PAGE), 0);
    assert_eq!(get(&victim, PAGE), 7);
    // Writes are handled too, and do not reach the file.
    let at = 0x10_0000 + 6 * PAGE;
    assert_eq!(victim.write(&pieces(&victim, at, 8), 0, &[9; 8]), 8);
    assert_eq!(get(&victim, at + 7), 9);
    assert_eq!(get(&other, PAGE), 7);
    assert!(!other.is_lost() && !same_file.is_lost());
    // A new memory in the same slots is not lost.
    drop(victim);
    let next = map(
        &memfd(16 * PAGE),
        &[region(0, 8 * PAGE, 0), region(0x10_0000, PAGE, 0)],
    );
    assert!(!next.is_lost());
}

/// Copies of all lengths up to pages: the fault occurs in the middle of one.
#[test]
fn a_copy_into_vanished_pages_continues_with_zeros() {
    install();
    for len in [64, 65, 300, 3000, 3 * PAGE as usize] {
        // From `len / 2` bytes in front of the page that vanishes.
        let at = 4 * PAGE - len as u64 / 2;
        let vanished = len - len / 2;
        let lost = || {
            let fd = memfd(8 * PAGE);
            let mem = map(&fd, &[region(0, 8 * PAGE, 0)]);
            let whole = pieces(&mem, 0, 8 * PAGE as u32);
            mem.write(&whole, 0, &[7; 8 * PAGE as usize]);
            ftruncate(&fd, 4 * PAGE).expect("a shorter file");
            assert!(!mem.is_lost());
            mem
        };
        let seen = |mem: &Memory| {
            let mut out = vec![0xee; len];
            assert_eq!(mem.read(&pieces(mem, at, len as u32), 0, &mut out), len);
            out
        };
        let half = [vec![7; len / 2], vec![0; vanished]].concat();
        let read = lost();
        assert_eq!(seen(&read), half, "{len} bytes read");
        assert!(read.is_lost());
        let written = lost();
        let part = pieces(&written, at, len as u32);
        assert_eq!(written.write(&part, 0, &vec![9; len]), len);
        assert!(written.is_lost());
        assert_eq!(seen(&written), vec![9; len], "{len} bytes written");
        let (from, to) = (lost(), lost());
        let copied = Memory::copy((&from, &part, 0), (&to, &part, 0), len);
        assert_eq!(copied, len);
        assert!(from.is_lost() && to.is_lost());
        assert_eq!(seen(&to), half, "{len} bytes copied");
    }
}

#[test]
fn vanished_rings_break_their_queue() {
    install();
    let len = DriverLayout::bytes_needed(8).next_multiple_of(PAGE) + PAGE;
    let fd = memfd(len);
    let driver_side = Arc::new(map(&fd, &[region(0, len, 0)]));
    let layout = DriverLayout::at(0, 8);
    let mut driver = DriverQueue::new(driver_side, layout, true).expect("a queue");
    let config = QueueConfig {
        size: 8,
        desc: layout.desc,
        avail: layout.avail,
        used: layout.used,
        base: 0,
        event_idx: true,
        indirect: true,
    };
    let mem = Arc::new(map(&fd, &[region(0, len, 0)]));
    let mut device = DeviceQueue::new(Arc::clone(&mem), &config).expect("a queue");
    let buffer = Buffer {
        addr: len - PAGE,
        len: 16,
        writable: true,
    };
    driver.add(&[buffer], 1).expect("free descriptors");
    assert!(driver.publish());
    let chain = device.pop().expect("a sound queue").expect("a chain");
    ftruncate(&fd, 0).expect("an empty file");
    mem.write(chain.writable(), 0, &[1; 16]);
    device.complete(chain, 16);
    let _ = device.publish();
    // The available index is 0 again: it went back, which no honest driver does.
    assert!(matches!(device.pop(), Err(PopError::Broken(_))));
    assert!(mem.is_lost());
}

#[test]
fn concurrent_faults_lose_only_their_own_memories() {
    install();
    let lost = Arc::new(Mutex::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let lost = Arc::clone(&lost);
            scope.spawn(move || {
                for _ in 0..50 {
                    let fd = memfd(4 * PAGE);
                    let mem = map(&fd, &[region(0, 4 * PAGE, 0)]);
                    ftruncate(&fd, 0).expect("an empty file");
                    std::thread::scope(|scope| {
                        for page in 0..4 {
                            let mem = &mem;
                            scope.spawn(move || assert_eq!(get(mem, page * PAGE), 0));
                        }
                    });
                    assert!(mem.is_lost());
                    *lost.lock().expect("no panic") += 1;
                }
            });
        }
    });
    assert_eq!(*lost.lock().expect("no panic"), 200);
    // SAFETY: no mapping has this address, so nothing is put anywhere.
    assert!(!unsafe { zerosock_ring::handle_fault(0x1000) }, "not ours");
}

/// What a memory of extents loses, its parent has lost, and all memories of its extents.
#[test]
fn a_fault_in_an_extent_loses_its_parent() {
    install();
    const HUGE: u64 = Extent::HUGE_PAGE;
    let fd = memfd(8 * HUGE);
    let parent = Arc::new(map(&fd, &[region(0, 8 * HUGE, 0)]));
    let of = |addr| {
        let list = [Extent { addr, len: HUGE }];
        Memory::of_extents(&parent, &list).expect("an extent")
    };
    let (gone, kept) = (of(6 * HUGE), of(HUGE));
    let other = map(&memfd(PAGE), &[region(0, PAGE, 0)]);
    for mem in [&gone, &kept, &other] {
        mem.write(&pieces(mem, 5, 1), 0, &[7]);
    }
    ftruncate(&fd, 4 * HUGE).expect("a shorter file");
    assert_eq!(get(&kept, 5), 7);
    assert!(!gone.is_lost() && !kept.is_lost() && !parent.is_lost());
    assert_eq!(get(&gone, 5), 0);
    assert!(gone.is_lost() && kept.is_lost() && parent.is_lost() && of(0).is_lost());
    assert_eq!(get(&kept, 5), 7);
    assert!(!other.is_lost());
    // The fault of a memory that is the last to keep its parent is handled as well.
    let fd = memfd(2 * HUGE);
    let parent = Arc::new(map(&fd, &[region(0, 2 * HUGE, 0)]));
    let list = [Extent {
        addr: HUGE,
        len: HUGE,
    }];
    let last = Memory::of_extents(&parent, &list).expect("an extent");
    drop(parent);
    ftruncate(&fd, 0).expect("an empty file");
    assert_eq!(get(&last, 9), 0);
    assert!(last.is_lost());
}
