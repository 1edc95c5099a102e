//! Bytes between guests and TCP sockets are not copied by us.

use std::io::{Read, Write};

use zerosock::forward::ForwardRule;
use zerosock_proto::wire::vsock::Op;

use super::{ForwardingDaemon, accept, rule, tcp_server};
use crate::common::raw::{RawGuest, TX};
use crate::common::{PATIENCE, assert_bytes, bytes, deadline, eventually, host};

/// Fits into the buffers of sockets without a stall.
const LEN: usize = 60_000;

/// A VM that may leave chains with the device as long as a busy machine takes.
fn lab(rules: Vec<ForwardRule>) -> ForwardingDaemon {
    ForwardingDaemon::with(1, |config| {
        config.forward = rules;
        config.hold = PATIENCE;
    })
}

#[track_caller]
fn in_place(lab: &ForwardingDaemon) {
    eventually("all counted", || lab.stats().in_place_bytes == LEN as u64);
    assert_eq!(lab.stats().copied_bytes, 0);
}

#[test]
fn guest_to_tcp_is_not_copied() {
    let (listener, target) = tcp_server();
    let lab = lab(vec![rule(1, target)]);
    let mut guest = lab.guest();
    let stream = guest.wait_connect(host(1), deadline()).unwrap();
    let mut server = accept(&listener);
    guest.wait_send(stream, &bytes(1, LEN), deadline()).unwrap();
    let mut got = vec![0; LEN];
    server.read_exact(&mut got).unwrap();
    assert_bytes(&got, &bytes(1, LEN));
    in_place(&lab);
}

#[test]
fn tcp_to_guest_is_not_copied() {
    let (listener, target) = tcp_server();
    let lab = lab(vec![rule(1, target)]);
    let mut guest = lab.guest();
    let stream = guest.wait_connect(host(1), deadline()).unwrap();
    let mut server = accept(&listener);
    server.write_all(&bytes(2, LEN)).unwrap();
    let mut got = vec![0; LEN];
    guest.wait_recv_exact(stream, &mut got, deadline()).unwrap();
    assert_bytes(&got, &bytes(2, LEN));
    in_place(&lab);
}

/// The kernel reads the bytes of a packet from guest memory when the socket has room: a byte that the
/// guest changes while the socket is full is changed at the target.
#[test]
fn a_byte_changed_while_the_socket_is_full_is_changed_at_the_target() {
    const PART: usize = 4096;
    let (listener, target) = tcp_server();
    let lab = ForwardingDaemon::with(1, |config| {
        config.forward = vec![rule(1, target)];
        // No chain is copied out for its age.
        config.hold = PATIENCE;
        config.vms[0].buf_alloc = 64 << 20;
    });
    let mut guest = RawGuest::attach(&lab.vms[0].socket);
    guest.connect(1000, 1);
    let mut server = accept(&listener);
    // Until a chain stays with the device, because the socket is full.
    let part = [7; PART];
    let mut sent = 0;
    let held = loop {
        let header = guest.header(1000, 1, Op::Rw);
        guest.send(header, &part);
        let last = guest.last_available(TX);
        sent += PART;
        let wait = std::time::Instant::now();
        while !guest.is_idle_on(0) && wait.elapsed() < std::time::Duration::from_secs(1) {
            std::thread::yield_now();
        }
        if !guest.is_idle_on(0) {
            break last;
        }
    };
    // The last byte cannot have left: the kernel takes a packet in order.
    guest.write(guest.buffer(TX, held + 1) + PART as u64 - 1, &[8]);
    let mut got = vec![0; sent];
    server.read_exact(&mut got).unwrap();
    assert!(got[..sent - 1].iter().all(|&byte| byte == 7));
    assert_eq!(got[sent - 1], 8, "the byte was copied before it was sent");
    eventually("all counted", || lab.stats().in_place_bytes == sent as u64);
    assert_eq!(lab.stats().copied_bytes, 0);
}
