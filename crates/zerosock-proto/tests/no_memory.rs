//! A peer requests more and more connections when there is no memory for a larger table: they are
//! refused, and the process continues.
//!
//! This is a test program of its own because the allocator serves the whole process: on demand it
//! refuses every allocation above 64 KiB. An allocation that may not fail would end the process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use zerosock_proto::vsock::{ConnectError, Event, PortTable, Shard, ShardConfig};
use zerosock_proto::wire::vsock::{Repr, SocketType};
use zerosock_proto::{Address, Cid, Instant, Port};

struct Refusing;

static REFUSES: AtomicBool = AtomicBool::new(false);

fn refuses(size: usize) -> bool {
    // A failing test must be able to print.
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

const NOW: Instant = Instant::ZERO;
const GUEST: Cid = Cid::new(3);
const MANY: usize = 20_000;

fn connect(driver: &mut Shard) -> Result<(), ConnectError> {
    let server = Address::new(Cid::HOST, Port::new(1));
    let any = Address::new(Cid::ANY, Port::ANY);
    driver
        .connect(NOW, any, server, SocketType::Stream)
        .map(|_| ())
}

/// Returns how many of the requests are accepted.
fn offer(device: &mut Shard, requests: &[Repr]) -> usize {
    let mut taken = 0;
    for request in requests {
        let _ = device.handle_packet(NOW, request);
        while let Some(event) = device.poll_event() {
            if let Event::Incoming { flow, .. } = event {
                device.accept(NOW, flow).unwrap();
                taken += 1;
            }
        }
        while device.poll_transmit(NOW, 0).is_some() {}
    }
    taken
}

#[test]
fn connections_without_memory_are_refused_in_both_directions() {
    let config = |config: ShardConfig| ShardConfig {
        max_connections: 1 << 20,
        ..config
    };
    let shard = |config| Shard::new(config, Arc::new(PortTable::new()));
    let mut driver = shard(config(ShardConfig::driver(GUEST)));
    let mut device = shard(ShardConfig {
        accept_all: true,
        ..config(ShardConfig::device(GUEST))
    });
    let mut requests = Vec::new();
    for _ in 0..MANY {
        connect(&mut driver).unwrap();
        let packet = driver.poll_transmit(NOW, 0).unwrap();
        requests.push(packet.header);
    }
    let mut other = shard(config(ShardConfig::driver(GUEST)));
    REFUSES.store(true, Ordering::Relaxed);
    let taken = offer(&mut device, &requests);
    let mut made = 0;
    let refusal = loop {
        match connect(&mut other) {
            Ok(()) => made += 1,
            Err(error) => break error,
        }
        assert!(made < MANY, "never refused");
    };
    REFUSES.store(false, Ordering::Relaxed);
    assert!(taken > 0 && taken < MANY, "{taken}");
    assert!(made > 0, "{made}");
    assert!(
        matches!(refusal, ConnectError::TooManyConnections),
        "{refusal}"
    );
    // With memory, connections are accepted again.
    assert!(offer(&mut device, &requests[taken..]) > 0);
    connect(&mut other).unwrap();
}
