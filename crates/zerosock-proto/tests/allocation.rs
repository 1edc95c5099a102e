//! Counts allocations on the packet path: there are none.
//!
//! This is a test crate of its own because the counting allocator serves the whole process, with
//! one test, so that no other test is counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use zerosock_proto::vsock::{Disposition, Event, FlowId, PortTable, Shard, ShardConfig};
use zerosock_proto::wire::vsock::{Repr, SocketType};
use zerosock_proto::{Address, Cid, Instant, Port};

struct Counting;

thread_local! {
    // Per thread: the test harness allocates on threads of its own.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to `System` unchanged; counting touches a
// thread-local cell without a destructor and without lazy initialisation, so
// it neither allocates nor fails at thread exit.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps `System`'s contract, which is ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System` by way of `alloc` above.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: `ptr` came from `System` by way of `alloc` above.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const NOW: Instant = Instant::ZERO;

/// Sends in place until there is no credit, and from the queue; the receiver
/// consumes and credit goes back.
fn exchange(from: &mut Shard, to: &mut Shard, flow: FlowId) -> u64 {
    let mut bytes = 0;
    let mut receive = |to: &mut Shard, header: &Repr| {
        if let Disposition::Deliver { flow, len, .. } = to.handle_packet(NOW, header) {
            bytes += u64::from(len);
            to.consume(flow, len).unwrap();
        }
    };
    for _ in 0..8 {
        let Ok(reservation) = from.reserve(flow, 40_000) else {
            break;
        };
        let len = reservation.len();
        let header = from.commit(reservation, len, 0).unwrap();
        receive(to, &header);
        if let Ok(header) = from.send_now(flow, 64, 0) {
            receive(to, &header);
        }
    }
    from.send(flow, 100_000, 0).unwrap();
    for _ in 0..16 {
        while let Some(packet) = from.poll_transmit(NOW, 65536) {
            receive(to, &packet.header);
            if let Some(span) = packet.span {
                from.handle_released(span);
            }
        }
        while let Some(packet) = to.poll_transmit(NOW, 65536) {
            let _ = from.handle_packet(NOW, &packet.header);
        }
        while from.poll_event().is_some() {}
    }
    bytes
}

#[test]
fn packets_of_connections_that_exist_allocate_nothing() {
    let guest = Cid::new(3);
    let mut driver = Shard::new(ShardConfig::driver(guest), Arc::new(PortTable::new()));
    let mut device = Shard::new(ShardConfig::device(guest), Arc::new(PortTable::new()));
    device.listen(Port::new(1), 64).unwrap();
    let mut flows = Vec::new();
    for _ in 0..16 {
        let server = Address::new(Cid::HOST, Port::new(1));
        let any = Address::new(Cid::ANY, Port::ANY);
        flows.push(
            driver
                .connect(NOW, any, server, SocketType::Stream)
                .unwrap(),
        );
    }
    let mut served = Vec::new();
    while let Some(packet) = driver.poll_transmit(NOW, 0) {
        let _ = device.handle_packet(NOW, &packet.header);
        let Some(Event::Incoming { flow, .. }) = device.poll_event() else {
            panic!()
        };
        device.accept(NOW, flow).unwrap();
        served.push(flow);
    }
    while let Some(packet) = device.poll_transmit(NOW, 0) {
        let _ = driver.handle_packet(NOW, &packet.header);
    }
    while driver.poll_event().is_some() {}

    // In the first round queues allocate their memory.
    let mut round = || {
        let mut bytes = 0;
        for (&flow, &other) in flows.iter().zip(&served) {
            bytes += exchange(&mut driver, &mut device, flow);
            bytes += exchange(&mut device, &mut driver, other);
        }
        bytes
    };
    let warm = round();
    let before = ALLOCATIONS.get();
    assert!(before > 0, "the counter counts");
    let bytes: u64 = (0..10).map(|_| round()).sum();
    let allocations = ALLOCATIONS.get() - before;
    assert!(
        bytes >= 10 * warm && warm > 16 * 2 * 100_000,
        "{bytes} bytes moved"
    );
    assert_eq!(allocations, 0);
    let stats = driver.stats();
    assert!(
        stats.packets > 0 && stats.credit_stalls > 0,
        "stalls were part of it"
    );
}
