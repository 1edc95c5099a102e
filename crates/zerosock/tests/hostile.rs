//! A guest that breaks the rules does not affect others, and every fault is counted.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::driver::{Address, Cid, Driver, StreamId};
use crate::common::raw::{INDIRECT, NEXT, RX, RawGuest, SIZE, TX, WRITE, desc, emit};
use crate::common::{
    self, TestDaemon, assert_bytes, bytes, deadline, eventually, host, host_listener,
};
use zerosock_proto::wire::vsock::{Op, Repr, WireOp, WireType};

/// The good neighbour in the other VM of the same daemon.
struct Neighbour {
    guest: Driver,
    stream: StreamId,
    seed: u64,
}

impl Neighbour {
    fn new(daemon: &TestDaemon) -> Neighbour {
        let listener = host_listener(&daemon.vms[1].uds_path, 2000);
        let mut guest = daemon.guest_of(1, |_| {});
        let stream = guest.wait_connect(host(2000), deadline()).unwrap();
        let (program, _) = listener.accept().unwrap();
        thread::spawn(move || {
            let (mut from, mut to) = (program.try_clone().unwrap(), program);
            // Ends with the connection.
            let _ = std::io::copy(&mut from, &mut to);
        });
        Neighbour {
            guest,
            stream,
            seed: 0,
        }
    }

    #[track_caller]
    fn beat(&mut self) {
        self.seed += 1;
        let want = bytes(self.seed, 10_000);
        self.guest
            .wait_send(self.stream, &want, deadline())
            .unwrap();
        let mut got = vec![0u8; want.len()];
        self.guest
            .wait_recv_exact(self.stream, &mut got, deadline())
            .unwrap();
        assert_bytes(&got, &want);
    }
}

/// A raw guest with one good connection of its own.
struct Bad {
    guest: RawGuest,
    program: UnixStream,
}

impl Bad {
    fn new(daemon: &TestDaemon) -> Bad {
        let listener = daemon.host_listener(2000);
        let mut guest = RawGuest::attach(&daemon.vms[0].socket);
        guest.connect(5000, 2000);
        let (program, _) = listener.accept().unwrap();
        program.set_read_timeout(Some(common::PATIENCE)).unwrap();
        Bad { guest, program }
    }

    /// The good connection still carries bytes to the host.
    #[track_caller]
    fn still_good(&mut self) {
        let header = self.guest.header(5000, 2000, Op::Rw);
        self.guest.send(header, b"still good");
        let mut got = [0u8; 10];
        self.program.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"still good");
    }
}

fn skip() -> bool {
    std::env::var_os("ZEROSOCK_TEST_DEVICE").is_some()
}

#[test]
fn malformed_packets_are_dropped_and_counted_without_effect_on_others() {
    if skip() {
        return;
    }
    let daemon = TestDaemon::with(2, |_| {});
    let mut neighbour = Neighbour::new(&daemon);
    let mut bad = Bad::new(&daemon);
    let rw = bad.guest.header(5000, 2000, Op::Rw);
    let bad_packets = |daemon: &TestDaemon| {
        let stats = daemon.stats().unwrap();
        stats.bad_packets + stats.bad_chains
    };
    let with = |change: fn(&mut [u8; 44])| {
        let mut bytes = emit(&rw);
        change(&mut bytes);
        bytes.to_vec()
    };
    let cases: Vec<(&str, Vec<u8>, Vec<u8>)> = vec![
        ("a header of 43 bytes", emit(&rw)[..43].to_vec(), vec![]),
        ("a header of 1 byte", vec![0], vec![]),
        (
            "more length than payload",
            with(|h| h[24] = 200),
            vec![1; 100],
        ),
        (
            "a length above 64 KiB",
            with(|h| h[26] = 0x10),
            vec![1; 100],
        ),
        (
            "a length of 4 GiB",
            with(|h| h[24..28].fill(0xff)),
            vec![1; 100],
        ),
        ("another's source CID", with(|h| h[0] = 4), vec![]),
        ("the host's source CID", with(|h| h[0] = 2), vec![]),
        ("a source CID above 32 bits", with(|h| h[5] = 1), vec![]),
        (
            "a destination CID above 32 bits",
            with(|h| h[13] = 1),
            vec![],
        ),
    ];
    for (what, header, payload) in cases {
        let before = bad_packets(&daemon);
        bad.guest.send_bytes(&header, &payload);
        bad.guest.wait_tx_done();
        eventually(&format!("{what} counted"), || bad_packets(&daemon) > before);
        bad.still_good();
        neighbour.beat();
    }
}

#[test]
fn packets_that_come_late_are_not_counted_as_bad() {
    if skip() {
        return;
    }
    let daemon = TestDaemon::with(1, |_| {});
    let mut bad = Bad::new(&daemon);
    let before = daemon.stats().unwrap().bad_packets;
    // As if their connection had just ended here.
    for op in [Op::Rst, Op::CreditUpdate, Op::Shutdown] {
        let late = bad.guest.header(6000, 2000, op);
        bad.guest.send(late, b"");
    }
    let mut forged = bad.guest.header(5000, 2000, Op::Rw);
    forged.src.cid = Cid::new(99);
    bad.guest.send(forged, b"");
    bad.guest.wait_tx_done();
    bad.still_good();
    let count = || daemon.stats().unwrap().bad_packets - before;
    eventually("the forged packet is counted", || count() > 0);
    assert_eq!(count(), 1);
}

#[test]
fn packets_without_a_connection_are_answered_with_reset() {
    if skip() {
        return;
    }
    let daemon = TestDaemon::with(2, |_| {});
    let mut neighbour = Neighbour::new(&daemon);
    let mut bad = Bad::new(&daemon);
    let stray = |guest: &RawGuest, port: u32, op: Op| guest.header(port, 4321, op);
    let mut port = 6000;
    let mut expect_reset = |bad: &mut Bad, change: &dyn Fn(&mut Repr), op: Op, payload: &[u8]| {
        port += 1;
        let mut header = stray(&bad.guest, port, op);
        change(&mut header);
        bad.guest.send(header, payload);
        let (reset, _) = bad.guest.recv_op(port, Op::Rst);
        // Linux: addresses swapped, type kept, no credit.
        assert_eq!((reset.src, reset.dst), (header.dst, header.src));
        assert_eq!(reset.socket_type, header.socket_type);
        assert_eq!((reset.buf_alloc, reset.fwd_cnt, reset.len), (0, 0, 0));
    };
    for op in [
        Op::Rw,
        Op::Response,
        Op::Shutdown,
        Op::CreditUpdate,
        Op::CreditRequest,
    ] {
        let payload: &[u8] = if op == Op::Rw { b"payload" } else { b"" };
        expect_reset(&mut bad, &|_| {}, op, payload);
    }
    expect_reset(
        &mut bad,
        &|header| header.op = WireOp::from(77),
        Op::Rw,
        &[],
    );
    expect_reset(
        &mut bad,
        &|header| header.socket_type = WireType::from(9),
        Op::Request,
        &[],
    );
    let nobody = |header: &mut Repr| header.dst = Address::new(Cid::new(99), header.dst.port);
    expect_reset(&mut bad, &nobody, Op::Request, &[]);
    // Never a reset for a reset.
    let header = stray(&bad.guest, 6666, Op::Rst);
    bad.guest.send(header, &[]);
    bad.still_good();
    while let Some((packet, _)) = bad.guest.try_recv() {
        assert_ne!(packet.dst.port.get(), 6666, "{packet:?}");
    }
    neighbour.beat();
}

#[test]
fn more_payload_than_credit_resets_that_connection_alone() {
    if skip() {
        return;
    }
    let daemon = TestDaemon::with(2, |_| {});
    let mut neighbour = Neighbour::new(&daemon);
    let listener = daemon.host_listener(2001);
    let mut bad = Bad::new(&daemon);
    bad.guest.connect(5001, 2001);
    // Accepted and never read.
    let (_stalled, _) = listener.accept().unwrap();
    let mut reset = false;
    for _ in 0..2000 {
        let header = bad.guest.header(5001, 2001, Op::Rw);
        bad.guest.send(header, &[1u8; 4096]);
        while let Some((packet, _)) = bad.guest.try_recv() {
            reset |= packet.dst.port.get() == 5001 && packet.op.known() == Some(Op::Rst);
        }
        if reset {
            break;
        }
    }
    assert!(reset, "8 MB without credit, and no reset");
    bad.still_good();
    neighbour.beat();
}

#[test]
fn malformed_chains_are_returned_and_counted_without_effect_on_others() {
    if skip() {
        return;
    }
    let daemon = TestDaemon::with(2, |_| {});
    let mut neighbour = Neighbour::new(&daemon);
    let mut bad = Bad::new(&daemon);
    const BASE: u64 = common::raw::GUEST;
    type Case = (&'static str, fn(&RawGuest, u16));
    let cases: &[Case] = &[
        ("a descriptor that follows itself", |guest, head| {
            guest.desc(TX, head, guest.buffer(TX, head), 44, NEXT, head);
        }),
        ("two descriptors in a ring", |guest, head| {
            guest.desc(TX, head, guest.buffer(TX, head), 44, NEXT, head + 1);
            guest.desc(TX, head + 1, guest.buffer(TX, head), 44, NEXT, head);
        }),
        ("a next out of range", |guest, head| {
            guest.desc(TX, head, guest.buffer(TX, head), 44, NEXT, SIZE);
        }),
        ("a buffer of no bytes", |guest, head| {
            guest.desc(TX, head, guest.buffer(TX, head), 0, 0, 0);
        }),
        ("a buffer outside all memory", |guest, head| {
            guest.desc(TX, head, 0x1000, 44, 0, 0)
        }),
        ("a buffer that ends outside", |guest, head| {
            guest.desc(TX, head, BASE + (4 << 20) - 43, 44, 0, 0);
        }),
        ("a buffer around 2^64", |guest, head| {
            guest.desc(TX, head, u64::MAX - 4, 44, 0, 0)
        }),
        ("a header to be written", |guest, head| {
            guest.desc(TX, head, guest.buffer(TX, head), 44, WRITE, 0);
        }),
        ("readable behind writable", |guest, head| {
            guest.desc(TX, head, guest.buffer(TX, head), 44, WRITE | NEXT, head + 1);
            guest.desc(TX, head + 1, guest.buffer(TX, head), 44, 0, 0);
        }),
        ("an indirect table of 15 bytes", |guest, head| {
            guest.desc(TX, head, guest.buffer(TX, head), 15, INDIRECT, 0);
        }),
        ("an indirect table of no bytes", |guest, head| {
            guest.desc(TX, head, guest.buffer(TX, head), 0, INDIRECT, 0);
        }),
        ("an indirect table outside all memory", |guest, head| {
            guest.desc(TX, head, 0x1000, 32, INDIRECT, 0);
        }),
        ("an indirect table in an indirect table", |guest, head| {
            let table = guest.buffer(TX, head);
            guest.write(table, &desc(table + 64, 16, INDIRECT, 0));
            guest.write(table + 64, &desc(table + 128, 44, 0, 0));
            guest.desc(TX, head, table, 16, INDIRECT, 0);
        }),
        ("an indirect table that loops", |guest, head| {
            let table = guest.buffer(TX, head);
            guest.write(table, &desc(table + 128, 44, NEXT, 1));
            guest.write(table + 16, &desc(table + 128, 44, NEXT, 0));
            guest.desc(TX, head, table, 32, INDIRECT, 0);
        }),
    ];
    for (what, write) in cases {
        let before = daemon.stats().unwrap();
        let head = bad.guest.tx_pair();
        write(&bad.guest, head);
        bad.guest.make_available(TX, head);
        bad.guest.kick(TX);
        bad.guest.wait_tx_done();
        eventually(&format!("{what} counted"), || {
            let now = daemon.stats().unwrap();
            now.bad_chains + now.bad_packets > before.bad_chains + before.bad_packets
        });
        bad.still_good();
        neighbour.beat();
    }
}

#[test]
fn malformed_receive_buffers_are_returned_without_effect_on_others() {
    if skip() {
        return;
    }
    let daemon = TestDaemon::with(2, |_| {});
    let mut neighbour = Neighbour::new(&daemon);
    let listener = daemon.host_listener(2000);
    let mut guest = RawGuest::attach(&daemon.vms[0].socket);
    // Everything posted so far is good; of what comes now every second buffer is bad.
    guest.connect(5000, 2000);
    let (mut program, _) = listener.accept().unwrap();
    let shapes: [fn(&RawGuest, u16); 4] = [
        |guest, at| guest.desc(RX, at, guest.buffer(RX, at), 20, WRITE, 0),
        |guest, at| guest.desc(RX, at, guest.buffer(RX, at), 4140, 0, 0),
        |guest, at| guest.desc(RX, at, 0x1000, 4140, WRITE, 0),
        |guest, at| guest.desc(RX, at, guest.buffer(RX, at), 4140, WRITE | NEXT, at),
    ];
    let want = bytes(3, 300_000);
    let sent = want.clone();
    let writer = thread::spawn(move || {
        program.write_all(&sent).unwrap();
        program
    });
    let mut got = Vec::new();
    let mut received = 0u32;
    let give_up = deadline();
    let mut round = 0;
    while got.len() < want.len() {
        assert!(
            Instant::now() < give_up,
            "{} bytes of {}",
            got.len(),
            want.len()
        );
        let Some((header, payload)) = guest.try_recv() else {
            // Not the device's turn: swap a posted descriptor's shape and see.
            thread::sleep(Duration::from_micros(200));
            continue;
        };
        if header.op.known() == Some(Op::Rw) {
            got.extend_from_slice(&payload);
            received += header.len;
            if received % 65536 < 4096 {
                let mut credit = guest.header(5000, 2000, Op::CreditUpdate);
                credit.fwd_cnt = received;
                guest.send(credit, &[]);
            }
        }
        // The buffer that `try_recv` has just posted again may have been seen already or not:
        // either is a guest's right.
        if round % 16 == 7 {
            let at = guest.last_available(RX);
            shapes[round / 16 % 4](&guest, at);
        }
        round += 1;
    }
    assert_bytes(&got, &want);
    writer.join().unwrap();
    assert!(
        daemon.stats().unwrap().bad_chains > 0,
        "no bad buffer was met"
    );
    neighbour.beat();
}

#[test]
fn an_invalid_index_affects_only_its_vm() {
    if skip() {
        return;
    }
    let daemon = TestDaemon::with(2, |_| {});
    let mut neighbour = Neighbour::new(&daemon);
    for (queue, jump) in [(TX, SIZE + 1), (RX, 40_000), (TX, 0x8000)] {
        let mut guest = RawGuest::attach(&daemon.vms[0].socket);
        let index = guest.avail_index(queue).wrapping_add(jump);
        guest.set_avail(queue, index);
        guest.kick(queue);
        neighbour.beat();
        drop(guest);
        neighbour.beat();
    }
    // And a head out of range.
    let mut guest = RawGuest::attach(&daemon.vms[0].socket);
    guest.make_available(TX, SIZE + 5);
    guest.kick(TX);
    neighbour.beat();
    drop(guest);
    let mut guest = daemon.guest();
    let listener = daemon.host_listener(2100);
    guest.wait_connect(host(2100), deadline()).unwrap();
    listener.accept().unwrap();
    neighbour.beat();
}

#[test]
fn a_thread_that_writes_random_bytes_into_the_rings_affects_only_its_vm() {
    if skip() {
        return;
    }
    let daemon = TestDaemon::with(2, |_| {});
    let mut neighbour = Neighbour::new(&daemon);
    for round in 0..6u64 {
        let listener = host_listener(&daemon.vms[0].uds_path, 3000 + round as u32);
        let mut guest = RawGuest::attach(&daemon.vms[0].socket);
        guest.connect(5000, 3000 + round as u32);
        let (program, _) = listener.accept().unwrap();
        program.set_nonblocking(true).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let scribbler = {
            let (stop, memory, rings) = (
                Arc::clone(&stop),
                Arc::clone(&guest.memory),
                guest.rings.clone(),
            );
            let buffers = guest.buffer(TX, 0);
            thread::spawn(move || {
                let mut x = 0x1234_5678_9abc_def1u64 + round;
                let mut random = move || {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    x
                };
                let mut pieces = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let ring = rings[(random() % 2) as usize];
                    // Descriptors, headers, and in later rounds indices as well.
                    let at = match random() % (2 + u64::from(round >= 3)) {
                        0 => ring.desc + random() % (u64::from(SIZE) * 16),
                        1 => buffers + random() % (u64::from(SIZE) * 8192),
                        _ => ring.avail + random() % 64,
                    };
                    pieces.clear();
                    memory.translate(at, 1, &mut pieces).unwrap();
                    memory.write(&pieces, 0, &[random() as u8]);
                }
            })
        };
        let until = Instant::now() + Duration::from_millis(400);
        let mut sink = vec![0u8; 65536];
        while Instant::now() < until {
            for _ in 0..8 {
                let header = guest.header(5000, 3000 + round as u32, Op::Rw);
                let at = guest.avail_index(TX) % SIZE / 2 * 2;
                guest.write(
                    guest.buffer(TX, at),
                    &emit(&Repr {
                        len: 4000,
                        ..header
                    }),
                );
                guest.desc(TX, at, guest.buffer(TX, at), 44, NEXT, at + 1);
                guest.desc(TX, at + 1, guest.buffer(TX, at + 1), 4000, 0, 0);
                guest.make_available(TX, at);
            }
            guest.kick(TX);
            guest.kick(RX);
            let _ = (&program).read(&mut sink);
            neighbour.beat();
        }
        stop.store(true, Ordering::Relaxed);
        scribbler.join().unwrap();
        drop(guest);
        neighbour.beat();
    }
    let mut guest = daemon.guest();
    let listener = daemon.host_listener(2100);
    guest.wait_connect(host(2100), deadline()).unwrap();
    listener.accept().unwrap();
    neighbour.beat();
}

#[test]
fn malformed_control_messages_end_only_their_session() {
    if skip() {
        return;
    }
    let daemon = TestDaemon::with(2, |_| {});
    let mut neighbour = Neighbour::new(&daemon);
    let message = |request: u32, flags: u32, size: u32, payload: &[u8]| {
        let mut bytes = Vec::new();
        for word in [request, flags, size] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(payload);
        bytes
    };
    let cases = [
        message(1, 1, 0xffff_ffff, &[]),
        message(1, 0, 0, &[]),
        message(0, 1, 0, &[]),
        message(999, 1, 8, &[0; 8]),
        message(5, 1, 4, &[0; 4]),
        message(5, 1, 8, &[9, 0, 0, 0, 0, 0, 0, 0]),
        message(8, 1, 8, &[200, 0, 0, 0, 1, 0, 0, 0]),
        message(8, 1, 8, &[0, 0, 0, 0, 3, 0, 0, 0]),
        message(9, 1, 40, &[0xff; 40]),
        message(11, 1, 8, &[7, 0, 0, 0, 0, 0, 0, 0]),
        message(12, 1, 8, &[77, 0, 0, 0, 0, 0, 0, 0]),
        message(24, 1, 12, &[0xff; 12]),
        vec![0xaa; 3000],
    ];
    let stray = std::fs::File::open("/dev/null").unwrap();
    for bad in &cases {
        for fds in [0, 1, 30] {
            let mut frontend = common::raw::connect(&daemon.vms[0].socket);
            let fds = vec![std::os::fd::AsFd::as_fd(&stray); fds];
            // The device may hang up before it has read everything.
            let _ = frontend.send_raw(bad, &fds);
            let _ = frontend.get_features();
            neighbour.beat();
        }
    }
    let mut guest = daemon.guest();
    let listener = daemon.host_listener(2100);
    guest.wait_connect(host(2100), deadline()).unwrap();
    listener.accept().unwrap();
}

/// The front-end shares the open file of what it wants to be called on, and its O_NONBLOCK flag.
#[test]
fn a_call_descriptor_that_blocks_holds_no_worker() {
    let daemon = TestDaemon::with(2, |config| config.workers = 1);
    let mut neighbour = Neighbour::new(&daemon);
    let mut bad = Bad::new(&daemon);
    bad.guest.jam_calls();
    for _ in 0..10 {
        bad.still_good();
        neighbour.beat();
    }
}
