//! Descriptors of a zero-copy send (MSG_ZEROCOPY) return as soon as the host has read the bytes.
//!
//! The call that reads the last byte returns the descriptors and notifies the guest. Bytes that the
//! host does not read would be copied after a time; here that time is infinite, only the test calls
//! the host, and descriptors are counted, not waited for.

use std::io::Read;
use std::thread;
use std::time::Duration;

use crate::common::raw::{RawGuest, TX};
use crate::common::{PATIENCE, TestDaemon, eventually};
use crate::hosting::{Hosted, raw_send};
use zerosock::driver::{Address, Cid, Port};
use zerosock::vsock::Stream;
use zerosock_proto::wire::vsock::{Op, Repr};

const PORT: Port = Port::new(700);
/// Longer than any test.
const ENDLESS: Duration = Duration::from_secs(3600);

/// Packets that the device has of the guest's.
fn out(guest: &RawGuest) -> u16 {
    guest.avail_index(TX).wrapping_sub(guest.used_index(TX))
}

/// A connection of a guest, and a host with no thread that calls its `drive`.
fn still() -> (Hosted, RawGuest, Stream) {
    let mut hosted = Hosted::with_hold(1, ENDLESS);
    let listener = hosted.listen(PORT, 4).unwrap();
    let mut guest = hosted.raw_guest();
    guest.connect(5000, PORT.get());
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    stream.set_nonblocking(true).unwrap();
    guest.wait_tx_done();
    hosted.stop();
    guest.was_called(TX);
    (hosted, guest, stream)
}

fn send(guest: &mut RawGuest, payload: &[u8]) {
    raw_send(guest, 5000, PORT.get(), payload);
}

/// So many packets are out, and the guest has been told if these are fewer than before.
#[track_caller]
fn now_out(guest: &RawGuest, before: u16, now: u16) {
    assert_eq!(out(guest), now);
    assert_eq!(guest.was_called(TX), now < before, "{before} to {now}");
}

#[test]
fn a_read_gives_back_what_it_has_taken() {
    let (hosted, mut guest, mut stream) = still();
    for n in 0..4 {
        send(&mut guest, &[n; 100]);
    }
    hosted.drive().unwrap();
    assert_eq!(stream.unread(), 400);
    now_out(&guest, 4, 4);
    let mut bytes = [0; 150];
    // While there is more to be read, buffers are gathered: up to an eighth of the queue.
    for _ in 0..7 {
        stream.read_exact(&mut bytes[..50]).unwrap();
    }
    now_out(&guest, 4, 4);
    stream.read_exact(&mut bytes[..50]).unwrap();
    now_out(&guest, 4, 0);
    // Also what comes while it reads, before anything held it.
    send(&mut guest, &bytes);
    stream.read_exact(&mut bytes).unwrap();
    now_out(&guest, 1, 0);
    // And an eighth is given back whatever there is.
    for n in 0..20 {
        send(&mut guest, &[n; 100]);
    }
    for _ in 0..10 {
        stream.read_exact(&mut bytes[..100]).unwrap();
    }
    now_out(&guest, 20, 12);
}

#[test]
fn a_look_at_packets_gives_them_back() {
    let (_hosted, mut guest, stream) = still();
    for n in 0..4 {
        send(&mut guest, &[n; 100]);
    }
    assert_eq!(stream.recv_each(3, |_| {}).unwrap(), 3);
    now_out(&guest, 4, 4);
    assert_eq!(stream.recv_each(3, |_| {}).unwrap(), 1);
    now_out(&guest, 4, 0);
}

/// One that asks for no calls, as a driver that polls does, costs none; it is told at the next
/// turn.
#[test]
fn a_guest_with_notifications_disabled_is_not_notified() {
    let (hosted, mut guest, mut stream) = still();
    guest.write(guest.rings[TX].avail, &1u16.to_le_bytes());
    send(&mut guest, &[1; 100]);
    stream.read_exact(&mut [0; 100]).unwrap();
    now_out(&guest, 1, 1);
    hosted.drive().unwrap();
    assert_eq!(out(&guest), 0);
    assert!(!guest.was_called(TX));
}

#[test]
fn a_lease_gives_back_what_it_lay_in_when_it_is_dropped() {
    let (_hosted, mut guest, stream) = still();
    for n in 0..4 {
        send(&mut guest, &[n; 100]);
    }
    let leases: Vec<_> = (0..4)
        .map(|_| stream.recv().unwrap().unwrap().into_owned())
        .collect();
    assert!(leases.iter().all(|lease| lease.is_in_place()));
    now_out(&guest, 4, 4);
    // The last first: nothing waits for what was sent before it.
    for (before, lease) in (1..=4).zip(leases).rev() {
        assert_eq!(out(&guest), before);
        // Another thread drops it, and no other call is made.
        thread::scope(|scope| scope.spawn(|| drop(lease)).join().unwrap());
        now_out(&guest, before, before - 1);
    }
}

#[test]
fn dropping_a_stream_returns_its_unread_chains_at_once() {
    let (hosted, mut guest, stream) = still();
    for n in 0..4 {
        send(&mut guest, &[n; 100]);
    }
    hosted.drive().unwrap();
    let lease = stream.recv().unwrap().unwrap().into_owned();
    now_out(&guest, 4, 4);
    drop(stream);
    // Also what is on lease, which stays what it was.
    now_out(&guest, 4, 0);
    assert_eq!(lease.to_vec(), [0; 100]);
}

/// A daemon's worker, of which a socket takes the bytes: at once, read or not, as long as it has
/// room.
#[test]
fn chains_are_returned_when_the_socket_takes_their_bytes() {
    let daemon = TestDaemon::with(1, |config| config.hold = ENDLESS);
    let listener = daemon.host_listener(PORT.get());
    let mut guest = RawGuest::attach(&daemon.vms[0].socket);
    guest.connect(5000, PORT.get());
    let (mut socket, _) = listener.accept().unwrap();
    let mut sent = 0;
    for n in 0..20 {
        send(&mut guest, &[n; 100]);
        sent += 100;
        eventually("taken", || out(&guest) == 0);
    }
    // Within its credit, if the system gives sockets more room than that.
    while out(&guest) == 0 && sent < 250_000 {
        send(&mut guest, &[7; 8000]);
        sent += 8000;
        let taken = || daemon.stats().unwrap().rx_bytes as usize >= sent;
        eventually("seen", taken);
    }
    let mut all = vec![0; sent];
    socket.read_exact(&mut all).unwrap();
    eventually("all of it is back", || out(&guest) == 0);
    let copied = daemon.stats().unwrap().copied_bytes;
    assert_eq!(copied, 0, "that is how it could have come back as well");
}

/// Between guests of a daemon it is the other's buffers that take the bytes, read or not.
#[test]
fn what_a_sibling_has_room_for_is_given_back_when_it_is_there() {
    const LEN: usize = 4000;
    let daemon = TestDaemon::with(2, |config| config.hold = ENDLESS);
    let mut one = RawGuest::attach(&daemon.vms[0].socket);
    let mut two = RawGuest::attach(&daemon.vms[1].socket);
    one.send(to(&one, 4, 5000, 77, Op::Request), &[]);
    two.recv_where(|header| header.op.known() == Some(Op::Request));
    let mut response = to(&two, 3, 77, 5000, Op::Response);
    response.buf_alloc = 3 * LEN as u32;
    two.send(response, &[]);
    one.recv_op(5000, Op::Response);
    one.wait_tx_done();
    // It has room for three.
    for n in 0..5 {
        one.send(to(&one, 4, 5000, 77, Op::Rw), &[n; LEN]);
    }
    eventually("three are back", || out(&one) == 2);
    let (mut got, mut update) = (0, to(&two, 3, 77, 5000, Op::CreditUpdate));
    while got < 5 * LEN as u32 {
        let (_, payload) = two.recv_where(|header| header.op.known() == Some(Op::Rw));
        got += payload.len() as u32;
        if got == 3 * LEN as u32 {
            assert_eq!(out(&one), 2, "nothing else gives them back");
            update.buf_alloc = 1 << 16;
            update.fwd_cnt = got;
            two.send(update, &[]);
        }
    }
    eventually("all are back", || out(&one) == 0);
    assert_eq!(daemon.stats().unwrap().copied_bytes, 0);
}

/// From `guest` (its `port`) to the sibling `cid`.
fn to(guest: &RawGuest, cid: u32, port: u32, dst: u32, op: Op) -> Repr {
    Repr {
        dst: Address::new(Cid::new(cid), Port::new(dst)),
        ..guest.header(port, dst, op)
    }
}
