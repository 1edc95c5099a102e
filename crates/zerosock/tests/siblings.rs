//! Connections between two guests of one daemon.

use std::time::{Duration, Instant};

use crate::common::driver::{
    Address, Cid, Directions, Driver, Port, RecvError, SendError, StreamId, WaitError,
};
use crate::common::{self, TestDaemon, assert_bytes, bytes, deadline};
use zerosock::daemon::DaemonConfig;

const PORT: Port = Port::new(77);

fn there(cid: u32) -> Address {
    Address::new(Cid::new(cid), PORT)
}

/// Lets both work until `done`.
#[track_caller]
fn both(
    one: &mut Driver,
    two: &mut Driver,
    what: &str,
    mut done: impl FnMut(&mut Driver, &mut Driver) -> bool,
) {
    let give_up = deadline();
    while !done(one, two) {
        assert!(Instant::now() < give_up, "never: {what}");
        for guest in [&mut *one, &mut *two] {
            if !guest.drive().unwrap() {
                guest
                    .poll(Some(Instant::now() + Duration::from_micros(300)))
                    .unwrap();
            }
        }
    }
}

fn connected(one: &mut Driver, two: &mut Driver) -> (StreamId, StreamId) {
    two.listen(PORT, 8).unwrap();
    let stream = one.connect(there(4)).unwrap();
    let mut accepted = None;
    both(one, two, "connected", |one, two| {
        accepted = accepted.or_else(|| two.accept(PORT));
        accepted.is_some()
            && one.state(stream) == Some(crate::common::driver::StreamState::Connected)
    });
    (stream, accepted.unwrap())
}

fn transfer(tune: fn(&mut DaemonConfig), rx_buffer: u32) {
    const LEN: usize = 4 << 20;
    let daemon = TestDaemon::with(2, tune);
    let mut one = daemon.guest_of(0, |_| {});
    let mut two = daemon.guest_of(1, |config| config.rx_buffer_size = rx_buffer);
    let (from, to) = connected(&mut one, &mut two);
    assert_eq!(
        two.addresses(to).unwrap().1.cid,
        Cid::new(3),
        "the sibling's own CID"
    );
    let (ours, theirs) = (bytes(1, LEN), bytes(2, LEN));
    let (mut sent_one, mut sent_two) = (0, 0);
    let (mut got_one, mut got_two) = (Vec::new(), Vec::new());
    let (mut end_one, mut end_two) = (false, false);
    both(&mut one, &mut two, "both ways done", |one, two| {
        push(one, from, &ours, &mut sent_one);
        push(two, to, &theirs, &mut sent_two);
        pull(one, from, &mut got_one, &mut end_one);
        pull(two, to, &mut got_two, &mut end_two);
        end_one && end_two
    });
    assert_bytes(&got_two, &ours);
    assert_bytes(&got_one, &theirs);
}

fn push(guest: &mut Driver, stream: StreamId, bytes: &[u8], sent: &mut usize) {
    while *sent < bytes.len() {
        match guest.send(stream, &bytes[*sent..]) {
            Ok(more) => *sent += more,
            Err(SendError::WouldBlock) => return,
            Err(error) => panic!("after {sent} bytes: {error}"),
        }
        if *sent == bytes.len() {
            guest.shutdown(stream, Directions::SEND);
        }
    }
}

fn pull(guest: &mut Driver, stream: StreamId, got: &mut Vec<u8>, ended: &mut bool) {
    let mut part = [0u8; 8192];
    while !*ended {
        match guest.recv(stream, &mut part) {
            Ok(0) => *ended = true,
            Ok(more) => got.extend_from_slice(&part[..more]),
            Err(RecvError::WouldBlock) => return,
            Err(error) => panic!("after {} bytes: {error}", got.len()),
        }
    }
}

#[test]
fn bytes_both_ways_on_one_worker() {
    transfer(|_| {}, 4096);
}

#[test]
fn bytes_both_ways_across_two_workers() {
    transfer(|config| config.workers = 2, 4096);
}

#[test]
fn bytes_both_ways_into_large_buffers() {
    transfer(|config| config.workers = 2, 65536);
}

#[test]
fn a_sibling_that_does_not_listen_refuses_at_once() {
    let daemon = TestDaemon::with(2, |_| {});
    let mut one = daemon.guest_of(0, |_| {});
    let mut two = daemon.guest_of(1, |_| {});
    let stream = one.connect(there(4)).unwrap();
    both(&mut one, &mut two, "refused", |one, _| {
        one.state(stream) == Some(crate::common::driver::StreamState::Reset)
    });
}

#[test]
fn a_sibling_of_no_common_group_is_not_there() {
    let daemon = TestDaemon::with(2, |config| config.vms[1].groups = vec!["other".to_owned()]);
    let mut one = daemon.guest_of(0, |_| {});
    let mut two = daemon.guest_of(1, |_| {});
    two.listen(PORT, 8).unwrap();
    let refused = one.wait_connect(there(4), deadline());
    assert!(matches!(refused, Err(WaitError::Refused)), "{refused:?}");
}

#[test]
fn a_sibling_that_vanishes_resets_the_connection() {
    for workers in [1, 2] {
        let daemon = match workers {
            1 => TestDaemon::with(2, |_| {}),
            _ => TestDaemon::with(2, |config| config.workers = 2),
        };
        let mut one = daemon.guest_of(0, |_| {});
        let mut two = daemon.guest_of(1, |_| {});
        let (stream, _) = connected(&mut one, &mut two);
        // Under way, and not read.
        for _ in 0..50 {
            let _ = one.send(stream, &[1u8; 30_000]);
            one.drive().unwrap();
        }
        drop(two);
        common::eventually_with(&mut one, "reset", |one| {
            one.state(stream) == Some(crate::common::driver::StreamState::Reset)
        });
        // All transmit buffers came back: another guest is served as before.
        let mut two = daemon.guest_of(1, |_| {});
        let _ = connected(&mut one, &mut two);
    }
}
