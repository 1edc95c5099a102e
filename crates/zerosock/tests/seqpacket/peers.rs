//! Whole messages in both directions at once, over each path.

use std::io::{ErrorKind, IoSlice};
use std::thread;

use zerosock::vsock::{ConnectError, ConnectReason, EndpointBuilder, SeqPacket};
use zerosock::{Address, Cid};

use super::paths::{Hub, TestDaemon, siblings};
use super::{PORT, receive_all, send_all, with_time_outs};
use crate::common::PATIENCE;

/// The default queues and buffers.
const PLAIN: fn(EndpointBuilder) -> EndpointBuilder = |builder| builder;
/// Small buffers split messages into many packets, and short queues make these wait.
const SMALL: fn(EndpointBuilder) -> EndpointBuilder = |builder| {
    builder
        .queue_size(32)
        .receive_buffers(4096)
        .transmit_buffers(5000)
};

/// Sends 200 messages each way at once, and checks what arrives.
fn both_ways(one: &SeqPacket, two: &SeqPacket) {
    thread::scope(|scope| {
        scope.spawn(|| send_all(one, 0..200));
        scope.spawn(|| send_all(two, 1000..1200));
        scope.spawn(|| receive_all(two, 0..200));
        receive_all(one, 1000..1200);
    });
}

#[test]
fn process_and_host() {
    let hub = Hub::with(|builder| builder);
    for tune in [PLAIN, SMALL] {
        let process = hub.process_with(tune);
        let (ours, theirs) = hub.joined(&process);
        both_ways(&ours, &theirs);
    }
}

#[test]
fn the_host_may_connect() {
    let hub = Hub::new();
    let process = hub.process();
    let listener = process.listen_seqpacket(PORT, 4).unwrap();
    let to = Address::new(process.cid(), PORT);
    let ours = with_time_outs(hub.host.begin_connect_seqpacket(to).unwrap());
    let (theirs, peer) = listener.accept_timeout(PATIENCE).unwrap();
    assert_eq!(peer.cid, Cid::HOST);
    ours.wait_connected().unwrap();
    ours.send(b"question").unwrap();
    let theirs = with_time_outs(theirs);
    assert_eq!(theirs.recv_leases().unwrap().unwrap().to_vec(), b"question");
    theirs
        .send_vectored(&[IoSlice::new(b"an "), IoSlice::new(b"answer")])
        .unwrap();
    assert_eq!(ours.recv_leases().unwrap().unwrap().to_vec(), b"an answer");
}

#[test]
fn two_processes_through_a_host() {
    let hub = Hub::with(|builder| builder);
    for tune in [[PLAIN, PLAIN], [SMALL, PLAIN], [PLAIN, SMALL]] {
        let ((_one, ours), (_two, theirs)) = siblings(&hub.path(), tune);
        both_ways(&ours, &theirs);
    }
}

#[test]
fn two_processes_through_a_daemon() {
    for workers in [1, 2] {
        let daemon = TestDaemon::new(workers);
        for tune in [[PLAIN, PLAIN], [SMALL, PLAIN], [PLAIN, SMALL]] {
            let ((_one, ours), (_two, theirs)) = siblings(&daemon.path(), tune);
            both_ways(&ours, &theirs);
        }
        assert_eq!(daemon.stats().message_resets, 0);
    }
}

/// A port has a listener of one socket type; connects of the other type are refused at once.
#[test]
fn streams_and_messages_do_not_mix() {
    let hub = Hub::new();
    let process = hub.process();
    let _messages = hub.host.listen_seqpacket(PORT, 4).unwrap();
    let there = Address::new(Cid::HOST, PORT);
    let error = process.connect(there).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    assert_eq!(
        inner.map(ConnectError::reason),
        Some(ConnectReason::Refused)
    );
    let _streams = process.listen(PORT, 4).unwrap();
    let here = Address::new(process.cid(), PORT);
    let theirs = hub.host.begin_connect_seqpacket(here).unwrap();
    theirs.set_nonblocking(true).unwrap();
    let deadline = crate::common::deadline();
    let error = loop {
        process.drive().unwrap();
        match theirs.wait_connected() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            answer => break answer.unwrap_err(),
        }
        assert!(std::time::Instant::now() < deadline, "no answer");
    };
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    assert!(process.connect_seqpacket(there).is_ok());
}

/// Threads that send on one connection do not split each other's messages.
#[test]
fn messages_of_several_senders_stay_whole() {
    const EACH: usize = 60;
    let daemon = TestDaemon::new(1);
    let ((_one, ours), (_two, theirs)) = siblings(&daemon.path(), [PLAIN, SMALL]);
    thread::scope(|scope| {
        for sender in 1..=3u8 {
            let theirs = &theirs;
            scope.spawn(move || {
                for round in 0..EACH {
                    theirs.send(&vec![sender; 1 + round * 2000]).unwrap();
                }
            });
        }
        let mut next = [0; 4];
        for _ in 0..3 * EACH {
            let message = ours.recv_leases().unwrap().unwrap().to_vec();
            let sender = message[0];
            assert!(message.iter().all(|&byte| byte == sender));
            let round = &mut next[usize::from(sender)];
            assert_eq!(message.len(), 1 + *round * 2000, "in order");
            *round += 1;
        }
    });
}
