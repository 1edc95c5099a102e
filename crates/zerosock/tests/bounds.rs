//! Bounds on held chains, copied bytes, work in a turn, and connections, whatever guests do.
//!
//! Where a time limit would hide a missing bound on a number, the time limit is infinite.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::raw::{RawGuest, SIZE, TX};
use crate::common::{self, TestDaemon, bytes, deadline, eventually, host, host_listener, hybrid};
use zerosock::daemon::HostSide;
use zerosock::driver::{Address, Cid, Port};
use zerosock_proto::wire::vsock::{Op, Repr, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

/// A time limit longer than any test.
const ENDLESS: Duration = Duration::from_secs(3600);

/// From `guest` (its `port`) to the sibling `cid`.
fn to(guest: &RawGuest, cid: u32, port: u32, dst: u32, op: Op) -> Repr {
    Repr {
        dst: Address::new(Cid::new(cid), Port::new(dst)),
        ..guest.header(port, dst, op)
    }
}

/// A connection from guest 3's `port` to guest 4's 77. Guest 4 grants no credit.
fn joined(one: &mut RawGuest, two: &mut RawGuest, port: u32) {
    one.send(to(one, 4, port, 77, Op::Request), &[]);
    two.recv_where(|r| r.op.known() == Some(Op::Request) && r.src.port.get() == port);
    let mut response = to(two, 3, 77, port, Op::Response);
    response.buf_alloc = 0;
    two.send(response, &[]);
    one.recv_op(port, Op::Response);
}

fn within(guest: &mut RawGuest, span: Duration, wanted: impl Fn(&Repr) -> bool) -> bool {
    let until = Instant::now() + span;
    while Instant::now() < until {
        match guest.try_recv() {
            Some((header, _)) if wanted(&header) => return true,
            Some(_) => {}
            None => std::thread::sleep(Duration::from_micros(200)),
        }
    }
    false
}

/// Chains that are held when the guest breaks its ring.
#[test]
fn a_broken_ring_with_chains_held_is_still_stopped() {
    let daemon = TestDaemon::with(1, |config| config.hold = ENDLESS);
    let listener = daemon.host_listener(2000);
    let mut guest = RawGuest::attach(&daemon.vms[0].socket);
    guest.connect(5000, 2000);
    let (_stalled, _) = listener.accept().unwrap();
    let rw = guest.header(5000, 2000, Op::Rw);
    for _ in 0..40 {
        guest.send(rw, &[1u8; 4096]);
    }
    guest.wait_tx_done();
    for _ in 0..20 {
        guest.send(rw, &[1u8; 4096]);
    }
    eventually("all taken", || {
        daemon
            .stats()
            .is_none_or(|stats| stats.rx_bytes == 60 * 4096)
    });
    let kept = guest.avail_index(TX).wrapping_sub(guest.used_index(TX));
    assert!(kept > 0, "none is held");
    let index = guest.avail_index(TX).wrapping_add(SIZE + 1);
    guest.set_avail(TX, index);
    let kicks = daemon.stats().unwrap().kicks;
    guest.kick(TX);
    eventually("seen", || daemon.stats().unwrap().kicks > kicks);
    let base = guest.frontend.get_vring_base(TX as u32);
    assert!(base.is_ok(), "GET_VRING_BASE: {base:?}");
}

/// Chains that a sibling holds return after the lender has closed the connection in order.
#[test]
fn chains_lent_to_a_stalled_sibling_are_returned_after_the_connection_ended() {
    let daemon = TestDaemon::with(2, |_| {});
    let mut one = RawGuest::attach(&daemon.vms[0].socket);
    let mut two = RawGuest::attach(&daemon.vms[1].socket);
    joined(&mut one, &mut two, 5000);
    for _ in 0..4 {
        one.send(to(&one, 4, 5000, 77, Op::Rw), &[7u8; 100]);
    }
    let mut bye = to(&one, 4, 5000, 77, Op::Shutdown);
    bye.flags = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
    one.send(bye, &[]);
    one.send(to(&one, 4, 5000, 77, Op::Rst), &[]);
    one.wait_tx_done();
    let base = one.frontend.get_vring_base(TX as u32);
    assert!(base.is_ok(), "GET_VRING_BASE: {base:?}");
}

/// The cap on copied bytes covers packets for siblings.
#[test]
fn the_overflow_cap_holds_for_siblings() {
    let daemon = TestDaemon::with(2, |config| config.max_overflow = 1 << 20);
    let mut one = RawGuest::attach(&daemon.vms[0].socket);
    let mut two = RawGuest::attach(&daemon.vms[1].socket);
    for port in 5000..5020 {
        joined(&mut one, &mut two, port);
        for _ in 0..50 {
            one.send(to(&one, 4, port, 77, Op::Rw), &[7u8; 4096]);
        }
    }
    // 4 MB wait, the cap is 1 MB.
    eventually("a reset", || daemon.stats().unwrap().overflow_resets > 0);
}

/// A close does not wait for bytes that the sibling will never read.
#[test]
fn a_sibling_that_shuts_its_receiving_half_lets_the_sender_close() {
    let daemon = TestDaemon::with(2, |_| {});
    let mut one = RawGuest::attach(&daemon.vms[0].socket);
    let mut two = RawGuest::attach(&daemon.vms[1].socket);
    joined(&mut one, &mut two, 5000);
    one.send(to(&one, 4, 5000, 77, Op::Rw), &[7u8; 100]);
    let mut deaf = to(&two, 3, 77, 5000, Op::Shutdown);
    deaf.flags = SHUTDOWN_RECEIVE;
    deaf.buf_alloc = 0;
    two.send(deaf, &[]);
    one.recv_op(5000, Op::Shutdown);
    let mut bye = to(&one, 4, 5000, 77, Op::Shutdown);
    bye.flags = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
    one.send(bye, &[]);
    let closed = within(&mut one, Duration::from_secs(6), |r| {
        r.dst.port.get() == 5000 && r.op.known() == Some(Op::Rst)
    });
    assert!(closed, "no RST before the sender's own timer of 8 s");
}

/// A read of a Unix socket stops short behind a descriptor although there is more. A program that
/// has connected before the daemon started can pass some: its listener does not refuse them yet.
#[test]
fn bytes_behind_a_passed_descriptor_arrive() {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    static EARLY: Mutex<Option<UnixStream>> = Mutex::new(None);
    let daemon = TestDaemon::with(1, |config| {
        let HostSide::Hybrid { path, .. } = &config.vms[0].host else {
            panic!("no hybrid socket")
        };
        *EARLY.lock().unwrap() = Some(hybrid(path));
    });
    let mut guest = RawGuest::attach(&daemon.vms[0].socket);
    let mut program = EARLY.lock().unwrap().take().unwrap();
    program.write_all(b"CONNECT 1000\n").unwrap();
    let (request, _) = guest.recv_where(|r| r.op.known() == Some(Op::Request));
    let fds = [program.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let data = [std::io::IoSlice::new(b"a")];
    sendmsg(&program, &data, &mut control, SendFlags::empty()).unwrap();
    (&program).write_all(b"bcde").unwrap();
    let response = guest.header(1000, request.src.port.get(), Op::Response);
    guest.send(response, &[]);
    let mut got = Vec::new();
    let until = deadline();
    while got.len() < 5 && Instant::now() < until {
        match guest.try_recv() {
            Some((header, payload)) if header.op.known() == Some(Op::Rw) => got.extend(payload),
            _ => std::thread::sleep(Duration::from_micros(200)),
        }
    }
    assert_eq!(got, b"abcde");
}

/// Useless chains are skipped without a budget; their return shows in the used ring at once,
/// so a guest can post as fast as they are skipped.
#[test]
fn a_guest_that_posts_useless_chains_without_end_does_not_keep_the_worker() {
    let daemon = TestDaemon::with(2, |_| {});
    let listener = host_listener(&daemon.vms[1].uds_path, 2000);
    let mut neighbour = daemon.guest_of(1, |_| {});
    let stream = neighbour.wait_connect(host(2000), deadline()).unwrap();
    let (program, _) = listener.accept().unwrap();
    std::thread::spawn(move || {
        let (mut from, mut to) = (program.try_clone().unwrap(), program);
        let _ = std::io::copy(&mut from, &mut to);
    });
    let guest = RawGuest::attach(&daemon.vms[0].socket);
    // Buffers of length 0.
    for head in 0..SIZE {
        guest.desc(TX, head, guest.buffer(TX, 0), 0, 0, 0);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let flood = {
        let (stop, ring) = (stop.clone(), guest.rings[TX]);
        let memory = guest.memory.clone();
        let at = |addr, len| {
            let mut pieces = Vec::new();
            memory.translate(addr, len, &mut pieces).unwrap();
            pieces[0]
        };
        let index_at = at(ring.avail + 2, 2);
        let used_index = at(ring.used + 2, 2);
        let heads: Vec<_> = (0..u64::from(SIZE))
            .map(|n| at(ring.avail + 4 + 2 * n, 2))
            .collect();
        let used: Vec<_> = (0..u64::from(SIZE))
            .map(|n| at(ring.used + 4 + 8 * n, 4))
            .collect();
        let memory = guest.memory.clone();
        std::thread::spawn(move || {
            // Round r posts head r % 2 + 1 at every place: what place n of the used ring says
            // tells which round the device has reached there.
            let head = |position: u16| 1 + (position / SIZE) % 2;
            let write = |position: u16| {
                let bytes = head(position).to_le_bytes();
                memory.write(&heads[usize::from(position % SIZE)..][..1], 0, &bytes);
            };
            let (mut done, mut posted) = (0u16, 0u16);
            let mut total = 0u64;
            // Chains taken since the used index last moved: within one turn.
            let (mut run, mut longest, mut shown) = (0u64, 0u64, [0u8; 2]);
            while !stop.load(Ordering::Relaxed) {
                while posted.wrapping_sub(done) < SIZE {
                    write(posted);
                    posted = posted.wrapping_add(1);
                }
                memory.write(&[index_at], 0, &posted.to_le_bytes());
                let mut seen = [0u8; 4];
                loop {
                    memory.read(
                        &used[usize::from(done.wrapping_add(7) % SIZE)..][..1],
                        0,
                        &mut seen,
                    );
                    if u32::from_le_bytes(seen) == u32::from(head(done.wrapping_add(7)))
                        || stop.load(Ordering::Relaxed)
                    {
                        break;
                    }
                }
                done = done.wrapping_add(8);
                total += 8;
                let mut index = [0u8; 2];
                memory.read(&[used_index], 0, &mut index);
                run = if index == shown { run + 8 } else { 0 };
                longest = longest.max(run);
                shown = index;
            }
            (total, longest)
        })
    };
    guest.kick(TX);
    let mut worst = Duration::ZERO;
    let mut beats = 0;
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        let from = Instant::now();
        let want = bytes(1, 100);
        neighbour.wait_send(stream, &want, deadline()).unwrap();
        let mut got = vec![0u8; 100];
        neighbour
            .wait_recv_exact(stream, &mut got, deadline())
            .unwrap();
        worst = worst.max(from.elapsed());
        beats += 1;
        guest.kick(TX);
    }
    stop.store(true, Ordering::Relaxed);
    let (total, longest) = flood.join().unwrap();
    println!("{beats} beats, worst {worst:?}, {total} useless chains, {longest} in one turn");
    assert!(
        longest <= 1024,
        "{longest} useless chains skipped in one turn"
    );
}

/// Requests that their guest has given up free the sibling's places.
#[test]
fn abandoned_requests_free_the_connection_slots_of_the_sibling() {
    let daemon = TestDaemon::with(2, |config| {
        config.max_connections = Some(16);
        config.connect_timeout = ENDLESS;
    });
    let mut one = RawGuest::attach(&daemon.vms[0].socket);
    // Never answers.
    let mut two = RawGuest::attach(&daemon.vms[1].socket);
    for port in 5000..5016 {
        one.send(to(&one, 4, port, 77, Op::Request), &[]);
        one.send(to(&one, 4, port, 77, Op::Rst), &[]);
    }
    one.wait_tx_done();
    // The sibling's device may not have processed it yet: try again, as a program would.
    let give_up = deadline();
    loop {
        let mut program = hybrid(&daemon.vms[1].uds_path);
        program.write_all(b"CONNECT 1000\n").unwrap();
        if within(&mut two, Duration::from_secs(1), |r| {
            r.op.known() == Some(Op::Request) && r.dst.port.get() == 1000
        }) {
            break;
        }
        let stats = daemon.stats();
        assert!(Instant::now() < give_up, "cannot connect: {stats:?}");
    }
}

/// Chains that siblings hold count in the bound on the whole queue.
#[test]
fn stalled_siblings_together_hold_at_most_half_of_the_queue() {
    let daemon = TestDaemon::with(2, |config| config.hold = ENDLESS);
    let mut one = RawGuest::attach(&daemon.vms[0].socket);
    let mut two = RawGuest::attach(&daemon.vms[1].socket);
    for port in 5000..5008 {
        joined(&mut one, &mut two, port);
    }
    one.wait_tx_done();
    // One descriptor each: header and a byte of payload.
    for n in 0..SIZE {
        let mut header = to(&one, 4, 5000 + u32::from(n % 8), 77, Op::Rw);
        header.len = 1;
        let at = one.buffer(TX, n);
        one.write(at, &common::raw::emit(&header));
        one.desc(TX, n, at, 45, 0, 0);
        one.make_available(TX, n);
    }
    one.kick(TX);
    eventually("no more than half is out", || {
        one.avail_index(TX).wrapping_sub(one.used_index(TX)) <= SIZE / 2
    });
}

/// Chains that a sibling holds return before their queue is stopped, and their bytes still arrive.
#[test]
fn a_queue_is_stopped_while_a_sibling_has_its_chains() {
    let daemon = TestDaemon::with(2, |config| config.hold = ENDLESS);
    let mut one = RawGuest::attach(&daemon.vms[0].socket);
    let mut two = RawGuest::attach(&daemon.vms[1].socket);
    joined(&mut one, &mut two, 5000);
    one.wait_tx_done();
    for n in 0..4u8 {
        one.send(to(&one, 4, 5000, 77, Op::Rw), &[n; 100]);
    }
    eventually("all taken", || daemon.stats().unwrap().rx_bytes == 400);
    let out = one.avail_index(TX).wrapping_sub(one.used_index(TX));
    assert_eq!(out, 4, "lent for ever, but for the stop");
    one.frontend.get_vring_base(TX as u32).unwrap();
    assert_eq!(one.used_index(TX), one.avail_index(TX));
    let mut update = to(&two, 3, 77, 5000, Op::CreditUpdate);
    update.buf_alloc = 1 << 16;
    two.send(update, &[]);
    let mut got = Vec::new();
    while got.len() < 400 {
        let (_, payload) = two.recv_where(|r| r.op.known() == Some(Op::Rw));
        got.extend(payload);
    }
    let want: Vec<u8> = (0..4u8).flat_map(|n| [n; 100]).collect();
    assert_eq!(got, want);
    assert_eq!(daemon.stats().unwrap().copied_bytes, 400);
}

/// Programs that send part of a CONNECT line and leave hold no place of others.
#[test]
fn programs_that_leave_behind_part_of_a_connect_line_free_their_places_at_once() {
    const PROGRAMS: usize = 2000;
    let daemon = TestDaemon::with(1, |config| config.connect_timeout = ENDLESS);
    let mut guest = RawGuest::attach(&daemon.vms[0].socket);
    for n in 0..PROGRAMS {
        let mut program = hybrid(&daemon.uds_path());
        program.write_all(&b"CONNECT 10"[..1 + n % 10]).unwrap();
    }
    eventually("all places free", || {
        let stats = daemon.stats();
        // Some may have come faster than others were noticed to leave.
        stats.is_none_or(|stats| stats.bad_handshakes + stats.conns_refused == PROGRAMS as u64)
    });
    let mut program = hybrid(&daemon.uds_path());
    program.write_all(b"CONNECT 1000\n").unwrap();
    guest.recv_where(|r| r.op.known() == Some(Op::Request));
}
