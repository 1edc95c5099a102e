//! Passing packets through the device allocates no memory.
//!
//! A test program of its own, because the counting allocator serves the whole process. The guest
//! (the library's driver), the host program and the worker all run here. Once their buffers have
//! grown, none of them may allocate.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use common::{TestDaemon, deadline};
use zerosock::vsock::{Endpoint, Host, Stream};
use zerosock::{Cid, Port};

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
    // Buffers grow to their final size.
    exchange(200);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    exchange(500);
    let allocated = ALLOCATIONS.load(Ordering::Relaxed) - before;
    assert_eq!(allocated, 0, "allocations in 2000 exchanges");
    guest.close(stream);
    guest.drive().unwrap();
    echo.join().unwrap();

    // The counter covers the process, so run in sequence and not as parallel tests.
    streams();
}

/// Between a host in this program and an attached endpoint (on a thread), after a warm-up.
fn streams() {
    const MESSAGES: usize = 200;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vm.sock");
    let host = Host::builder().vm(Cid::new(3), &path).start().unwrap();
    let listener = host.listen(Port::new(7), 1).unwrap();
    let connecting = std::thread::spawn(move || {
        let endpoint = Endpoint::builder().attach_device(path).unwrap();
        let stream = endpoint.connect(common::host(7)).unwrap();
        (endpoint, stream)
    });
    let (ours, _) = listener.accept_timeout(common::PATIENCE).unwrap();
    while !connecting.is_finished() {
        host.drive().unwrap();
    }
    let (endpoint, theirs) = connecting.join().unwrap();
    for stream in [&ours, &theirs] {
        stream.set_nonblocking(true).unwrap();
    }
    // Both sides take turns in one thread: nothing else is counted.
    let message = [7u8; 100];
    let exchange = |from: &Stream, to: &Stream, way: usize| {
        let send = |from: &Stream| match way {
            0 => (&*from).write(&message).map(drop),
            1 => from.batch().write(&message),
            _ => {
                let mut loan = from.loan(message.len())?;
                loan.write_all(&message)?;
                loan.send().map(drop)
            }
        };
        let receive = |to: &Stream, buffer: &mut [u8]| match way {
            0 => (&*to).read(buffer),
            1 => {
                let mut bytes = 0;
                to.recv_each(16, |message| bytes += message.copy_to(0, &mut *buffer))?;
                Ok(bytes)
            }
            _ => Ok(to
                .recv()?
                .map_or(0, |lease| lease.read().copy_to(0, buffer))),
        };
        let (mut sent, mut got) = (0, 0);
        let mut buffer = [0u8; 100];
        while got < MESSAGES * message.len() {
            if sent < MESSAGES && send(from).is_ok() {
                sent += 1;
            }
            match receive(to, &mut buffer) {
                Ok(bytes) => got += bytes,
                // Not reached, since sent bytes are available at once; an error would allocate.
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
            }
        }
    };
    for (name, from, to) in [
        ("to the process", &ours, &theirs),
        ("to the host", &theirs, &ours),
    ] {
        for way in 0..3 {
            exchange(from, to, way);
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            exchange(from, to, way);
            let allocated = ALLOCATIONS.load(Ordering::Relaxed) - before;
            assert_eq!(allocated, 0, "allocations {name}, way {way}");
        }
    }
    // The host answers the detach request while it is driven.
    let leaving = std::thread::spawn(move || drop((theirs, endpoint)));
    while !leaving.is_finished() {
        host.drive().unwrap();
    }
    leaving.join().unwrap();
}
