//! Bounds on held messages, in number and in time; and peers that exceed bounds.

use std::io::ErrorKind;
use std::time::Duration;

use zerosock::vsock::StreamError;

use super::paths::{Hub, TestDaemon, siblings};
use crate::common::bytes;

/// A message above the peer's window or the own buffer gets EMSGSIZE, and no part of it is sent.
#[test]
fn a_message_that_could_never_arrive_is_refused() {
    let hub = Hub::with(|builder| builder.window(10_000));
    let process = hub.process();
    let (ours, theirs) = hub.joined(&process);
    let error = theirs.send(&[0; 10_001]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    assert_eq!(inner, Some(&StreamError::TooLong));
    theirs.send(&[1; 10_000]).unwrap();
    assert_eq!(ours.recv_leases().unwrap().unwrap().to_vec(), [1; 10_000]);
    // The host's window is the limit; that of the process is larger.
    ours.send(&[2; 262_144]).unwrap();
    assert!(ours.send(&[2; 262_145]).is_err());
    assert_eq!(theirs.recv_leases().unwrap().unwrap().len(), 262_144);
}

/// Through a device: its window is large enough for the message, that of the other process is not.
#[test]
fn a_sibling_that_cannot_take_a_message_costs_that_connection() {
    let daemon = TestDaemon::new(1);
    let narrow = |builder: zerosock::vsock::EndpointBuilder| builder.window(5000);
    let ((one, ours), (two, theirs)) = siblings(&daemon.path(), [narrow, |builder| builder]);
    theirs.send(&[1; 5000]).unwrap();
    assert_eq!(ours.recv_leases().unwrap().unwrap().len(), 5000);
    theirs.send(&[2; 5001]).unwrap();
    let error = theirs.recv(&mut []).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(
        ours.recv(&mut []).unwrap_err().kind(),
        ErrorKind::ConnectionReset
    );
    assert_eq!(daemon.stats().message_resets, 1);
    // Another connection of the same endpoints continues.
    drop((ours, theirs));
    let listener = one.listen_seqpacket(super::PORT, 1).unwrap();
    let to = zerosock::Address::new(one.cid(), super::PORT);
    let theirs = two.begin_connect_seqpacket(to).unwrap();
    let (ours, _) = listener.accept_timeout(crate::common::PATIENCE).unwrap();
    theirs.send(b"on").unwrap();
    assert_eq!(
        super::with_time_outs(ours)
            .recv_leases()
            .unwrap()
            .unwrap()
            .to_vec(),
        b"on"
    );
}

/// A message longer than an eighth of the queue arrives; the part beyond is copied.
#[test]
fn a_message_longer_than_may_be_held_arrives() {
    let hub = Hub::new();
    // 16 transmit buffers of 8 KiB: two of one message may be held.
    let process = hub.process_with(|builder| builder.queue_size(32).transmit_buffers(8192));
    let (ours, theirs) = hub.joined(&process);
    let long = bytes(3, 250_000);
    theirs.send(&long).unwrap();
    assert_eq!(ours.recv_leases().unwrap().unwrap().to_vec(), long);
    let copied = hub.host.stats().copied_aside;
    assert!(copied >= 250_000 - 3 * 8192, "{copied}");
    // The other way.
    let process = hub.process_with(|builder| builder.queue_size(32).receive_buffers(8192));
    let (ours, theirs) = hub.joined(&process);
    std::thread::scope(|scope| {
        scope.spawn(|| ours.send(&long).unwrap());
        let message = theirs.recv_leases().unwrap().unwrap();
        assert!(!message.is_in_place());
        assert_eq!(message.to_vec(), long);
    });
}

/// Unread messages are copied after the hold time, and keep their boundaries.
#[test]
fn messages_held_beyond_the_time_limit_are_copied_and_keep_their_boundaries() {
    let hub = Hub::with(|builder| builder.hold(Duration::from_millis(5)));
    let process = hub.process();
    let (ours, theirs) = hub.joined(&process);
    let sizes = [1, 0, 5000, 70_000, 3, 0, 9];
    for (at, &len) in sizes.iter().enumerate() {
        theirs.send(&bytes(at as u64, len)).unwrap();
    }
    let give_up = crate::common::deadline();
    while hub.host.stats().copied_aside < 75_013 {
        assert!(std::time::Instant::now() < give_up, "it was never copied");
        std::thread::yield_now();
    }
    for (at, &len) in sizes.iter().enumerate() {
        let message = ours.recv_leases().unwrap().unwrap();
        assert_eq!(message.to_vec(), bytes(at as u64, len));
    }
}

/// A sender of empty messages waits for their reader, and other senders do not.
#[test]
fn a_flood_of_empty_messages_waits_while_others_run_on() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = hub.joined(&process);
    let (ours_too, theirs_too) = hub.joined(&process);
    theirs.set_nonblocking(true).unwrap();
    let mut sent = 0;
    let error = loop {
        match theirs.send(b"") {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 1000, "there is no bound");
    };
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    theirs_too.send(b"runs on").unwrap();
    assert_eq!(
        ours_too.recv_leases().unwrap().unwrap().to_vec(),
        b"runs on"
    );
    for _ in 0..sent {
        assert_eq!(ours.recv(&mut []).unwrap().unwrap().len, 0);
    }
    theirs.set_nonblocking(false).unwrap();
    theirs.send(b"").unwrap();
    assert_eq!(ours.recv(&mut []).unwrap().unwrap().len, 0);
}
