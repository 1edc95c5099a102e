//! Associations without a worker: what waits for a target, and which one is replaced.

use std::net::UdpSocket;

use super::*;
use crate::relay::socket::SocketKind;

/// A target whose name is being resolved.
struct Resolving;

impl Opener for Resolving {
    fn open(
        &mut self,
        _: AssociationId,
        _: &KernelAddress,
    ) -> Result<AssociationSocket, OpenError> {
        Ok((Socket::absent(SocketKind::Udp), SocketStage::Absent, None))
    }

    fn end(&mut self, _association: SenderAssociation, _reason: Ended, _now: Instant) {}

    fn join(&mut self, sockets: [OwnedFd; 2], _key: u32) -> Result<Joined, [OwnedFd; 2]> {
        Err(sockets)
    }

    fn watch(&mut self, _joined: &mut Joined, _key: u32) {}
}

/// Has room for two associations, of those that exist.
#[derive(Default)]
struct Two {
    open: usize,
    ended: Vec<(KernelAddress, Ended, u64)>,
    asked: u32,
}

impl Opener for Two {
    fn open(
        &mut self,
        _: AssociationId,
        _: &KernelAddress,
    ) -> Result<AssociationSocket, OpenError> {
        self.asked += 1;
        if self.open == 2 {
            return Err(OpenError::Full);
        }
        self.open += 1;
        Ok((Socket::absent(SocketKind::Udp), SocketStage::Absent, None))
    }

    fn end(&mut self, association: SenderAssociation, reason: Ended, _: Instant) {
        self.open -= 1;
        let unsent = association.unsent();
        self.ended.push((association.source, reason, unsent));
    }

    fn join(&mut self, sockets: [OwnedFd; 2], _key: u32) -> Result<Joined, [OwnedFd; 2]> {
        Err(sockets)
    }

    fn watch(&mut self, _joined: &mut Joined, _key: u32) {}
}

#[test]
fn the_longest_idle_sender_is_replaced_and_each_ends_at_its_time_out() {
    const TIMEOUT: Duration = Duration::from_secs(60);
    let listener = UdpSocket::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let listener = Socket::new(listener.into(), SocketKind::Udp, true);
    let mut all = Associations::new(listener, TIMEOUT, None);
    let mut store = Store::new(256 << 10, 0);
    let mut opener = Two::default();
    let senders = [(); 3].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
    let names = senders.each_ref().map(|it| it.local_addr().unwrap());
    let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
    let mut send = |sender: &UdpSocket, opener: &mut Two, now| {
        sender.send_to(b"x", address).unwrap();
        all.set_readable();
        all.run(&mut store, opener, now)
    };
    let [a, b, c] = &senders;
    for (sender, second) in [(a, 1), (b, 2), (a, 3), (c, 4)] {
        assert_eq!(send(sender, &mut opener, at(second)).refused, 0);
    }
    let name = |(address, reason, unsent): &(KernelAddress, Ended, u64)| {
        (address.ip().unwrap(), *reason, *unsent)
    };
    assert_eq!(opener.ended.len(), 1);
    assert_eq!(name(&opener.ended[0]), (names[1], Ended::Replaced, 1));
    assert_eq!((all.table.count(), opener.asked), (2, 4));
    // The time-out counts from the last datagram.
    for (second, ended) in [(62, 1), (63, 2), (63, 2), (64, 3)] {
        all.run(&mut store, &mut opener, at(second));
        assert_eq!(opener.ended.len(), ended, "at {second} s");
    }
    assert_eq!(name(&opener.ended[1]), (names[0], Ended::Idle, 2));
    assert_eq!(name(&opener.ended[2]), (names[2], Ended::Idle, 1));
    // Without an association that could be replaced.
    opener.open = 2;
    a.send_to(b"x", address).unwrap();
    all.set_readable();
    let done = all.run(&mut store, &mut opener, at(65));
    assert_eq!((done.refused, done.dropped), (1, 1));
}

#[test]
fn datagrams_of_many_senders_wait_for_a_target_in_bounded_memory() {
    const LENGTH: usize = 60_000;
    let listener = UdpSocket::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let listener = Socket::new(listener.into(), SocketKind::Udp, true);
    let mut all = Associations::new(listener, Duration::from_secs(60), None);
    let mut store = Store::new(256 << 10, 0);
    let now = Instant::ZERO;
    let mut dropped = 0;
    // 20 MB more than the limit.
    for _ in 0..24 {
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        for _ in 0..BATCH {
            sender.send_to(&[1; LENGTH], address).unwrap();
            all.set_readable();
            dropped += all.run(&mut store, &mut Resolving, now).dropped;
        }
    }
    let keys = all.table.keys();
    let held: usize = keys
        .iter()
        .map(|key| all.table.get(*key).unwrap().held.memory())
        .sum();
    assert!(held <= HELD_LIMIT + LENGTH, "{held} bytes");
    assert_eq!(held, all.table.held);
    assert!(dropped > 0);
    all.drain(&mut TurnCounts::default());
    assert_eq!(all.table.held, 0);
}
