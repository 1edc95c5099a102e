//! Peers that make the device allocate memory which it does not get lose their connections;
//! neighbours of the same worker continue.
//!
//! A test program of its own, because the allocator serves the whole process: on demand it refuses
//! all allocations above 64 KiB. An infallible allocation of that size would end the process.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::common::driver::{Address, Cid, Driver, Port, StreamId, StreamState};
use common::raw::RawGuest;
use common::{PATIENCE, TestDaemon, deadline, eventually, host};
use zerosock_proto::vsock::datagram::{F_DGRAM, data};
use zerosock_proto::wire::vsock::{Op, Repr, SEQ_EOM, SocketType};

struct Refusing;

/// The longest allocation that is given.
static MOST: AtomicUsize = AtomicUsize::new(usize::MAX);
static REFUSED: AtomicU64 = AtomicU64::new(0);
/// The longest payload of a packet.
const PACKET: usize = 64 << 10;

fn refuses(size: usize) -> bool {
    // A test that fails says where.
    let refuses = size > MOST.load(Ordering::Relaxed) && !std::thread::panicking();
    REFUSED.fetch_add(u64::from(refuses), Ordering::Relaxed);
    refuses
}

// SAFETY: what is not refused is passed on to `System` unchanged, and null is how an allocator
// refuses; counting is one atomic addition.
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

/// One test at a time: there is one allocator.
static ALONE: Mutex<()> = Mutex::new(());

/// While it is there, large allocations fail.
struct Shortage;

impl Shortage {
    fn begin() -> Shortage {
        Shortage::above(PACKET)
    }

    fn above(most: usize) -> Shortage {
        MOST.store(most, Ordering::Relaxed);
        Shortage
    }
}

impl Drop for Shortage {
    fn drop(&mut self) {
        MOST.store(usize::MAX, Ordering::Relaxed);
    }
}

fn refused() -> u64 {
    REFUSED.load(Ordering::Relaxed)
}

/// A guest that exchanges bytes with a program of the host.
struct Neighbour {
    guest: Driver,
    stream: StreamId,
    program: UnixStream,
}

impl Neighbour {
    fn new(daemon: &TestDaemon, vm: usize) -> Neighbour {
        let listener = common::host_listener(&daemon.vms[vm].uds_path, 700);
        let mut guest = daemon.guest_of(vm, |_| {});
        let stream = guest.wait_connect(host(700), deadline()).unwrap();
        let (program, _) = listener.accept().unwrap();
        program.set_read_timeout(Some(PATIENCE)).unwrap();
        Neighbour {
            guest,
            stream,
            program,
        }
    }

    fn goes_on(&mut self) {
        for round in 0..100 {
            let mut got = [0];
            self.guest
                .wait_send(self.stream, &[round], deadline())
                .unwrap();
            self.program.read_exact(&mut got).unwrap();
            self.program.write_all(&got).unwrap();
            self.guest
                .wait_recv_exact(self.stream, &mut got, deadline())
                .unwrap();
            assert_eq!(got, [round]);
        }
    }
}

/// Sends so many parts at a time until the connection is gone.
fn send_until_reset(guest: &mut Driver, stream: StreamId, parts: usize) {
    let part = [7; 4096];
    eventually("the reset", || {
        for _ in 0..parts {
            let _ = guest.send(stream, &part);
        }
        let _ = guest.drive();
        guest.state(stream) != Some(StreamState::Connected)
    });
}

#[test]
fn a_connection_for_which_there_is_no_memory_is_reset_and_the_process_goes_on() {
    let _alone = ALONE.lock().unwrap();
    let daemon = TestDaemon::with(3, |config| {
        // More than fits into the buffers of a socket.
        config.vms.iter_mut().for_each(|vm| vm.buf_alloc = 8 << 20);
    });
    let mut neighbour = Neighbour::new(&daemon, 2);
    let listener = daemon.host_listener(7);
    let mut sibling = daemon.guest_of(1, |config| config.buf_alloc = 8 << 20);
    sibling.listen(Port::new(7), 16).unwrap();
    let mut guest = daemon.guest_of(0, |config| config.buf_alloc = 8 << 20);

    // To a program that reads nothing.
    let stream = guest.wait_connect(host(7), deadline()).unwrap();
    let (_deaf, _) = listener.accept().unwrap();
    let before = refused();
    let shortage = Shortage::begin();
    send_until_reset(&mut guest, stream, 64);
    neighbour.goes_on();
    assert!(refused() > before, "nothing was refused");
    drop(shortage);
    let of_program = refused();

    // To a sibling that gives no buffers.
    let to = Address::new(Cid::new(4), Port::new(7));
    let stream = guest.connect(to).unwrap();
    eventually("a connection to the sibling", || {
        guest.drive().unwrap();
        sibling.drive().unwrap();
        guest.state(stream) == Some(StreamState::Connected)
    });
    sibling.withhold_buffers(true).unwrap();
    let shortage = Shortage::begin();
    send_until_reset(&mut guest, stream, 64);
    neighbour.goes_on();
    assert!(refused() > of_program, "nothing was refused");
    drop(shortage);
    assert!(daemon.stats().is_some_and(|stats| stats.no_memory >= 2));

    // When there is memory again all is as ever.
    let stream = guest.wait_connect(host(7), deadline()).unwrap();
    let (mut program, _) = listener.accept().unwrap();
    guest.wait_send(stream, b"hello", deadline()).unwrap();
    program.read_exact(&mut [0; 5]).unwrap();
    neighbour.goes_on();
}

#[test]
fn a_datagram_for_which_there_is_no_memory_is_dropped_and_the_process_goes_on() {
    let _alone = ALONE.lock().unwrap();
    let daemon = TestDaemon::with(3, |_| {});
    let mut neighbour = Neighbour::new(&daemon, 2);
    let features = 1 << 32 | 1 << 28 | F_DGRAM;
    let frontend = common::raw::connect(&daemon.vms[0].socket);
    let mut guest = RawGuest::with_features(frontend, true, features);
    let from = Address::new(guest.cid, Port::new(40));
    let to = Address::new(Cid::new(4), Port::new(7));

    // The fragments are kept in a buffer that doubles: it exceeds 64 KiB before they do.
    let part = [7; 7000];
    let before = refused();
    let shortage = Shortage::begin();
    for last in [false; 8].into_iter().chain([true]) {
        guest.send(data(from, to, part.len() as u32, last), &part);
    }
    guest.wait_tx_done();
    neighbour.goes_on();
    assert!(refused() > before, "nothing was refused");
    drop(shortage);
    let dropped = |daemon: &TestDaemon| daemon.stats().map_or(0, |stats| stats.datagrams_dropped);
    eventually("the datagram to be counted", || dropped(&daemon) == 1);
}

#[test]
fn a_connection_without_memory_for_the_lengths_of_its_messages_is_reset() {
    let _alone = ALONE.lock().unwrap();
    let daemon = TestDaemon::with(3, |_| {});
    let mut neighbour = Neighbour::new(&daemon, 2);
    let (port, to) = (40, Address::new(Cid::new(4), Port::new(7)));
    let mut sibling = daemon.guest_of(1, |_| {});
    sibling
        .listen_for(to.port, 4, SocketType::SeqPacket)
        .unwrap();
    let features = 1 << 32 | 1 << 28 | 1 << 1;
    let frontend = common::raw::connect(&daemon.vms[0].socket);
    let mut guest = RawGuest::with_features(frontend, true, features);
    let header = |guest: &RawGuest, op| Repr {
        dst: to,
        socket_type: SocketType::SeqPacket.into(),
        ..guest.header(port, to.port.get(), op)
    };
    let answer = |guest: &mut RawGuest, op: Op| {
        let all = std::iter::from_fn(|| guest.try_recv());
        all.fold(false, |found, (header, _)| {
            found || header.op.known() == Some(op)
        })
    };
    guest.send(header(&guest, Op::Request), &[]);
    eventually("a connection to the sibling", || {
        sibling.drive().unwrap();
        answer(&mut guest, Op::Response)
    });
    sibling.withhold_buffers(true).unwrap();

    let before = refused();
    // The queues of messages between devices are longer than a packet.
    let shortage = Shortage::above(4 * PACKET);
    let message = Repr {
        flags: SEQ_EOM,
        ..header(&guest, Op::Rw)
    };
    eventually("the reset", || {
        for _ in 0..100 {
            guest.send(message, &[7]);
        }
        answer(&mut guest, Op::Rst)
    });
    neighbour.goes_on();
    assert!(refused() > before, "nothing was refused");
    drop(shortage);
    assert!(daemon.stats().is_some_and(|stats| stats.no_memory >= 1));
}
