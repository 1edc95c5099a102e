//! Connection attempts: success, refusal, timeout, and the ports they use.

use super::*;

#[test]
fn a_request_without_listener_is_refused_at_once() {
    for kind in [SocketType::Stream, SocketType::SeqPacket] {
        let (mut guest, mut host) = (guest(), host());
        guest.set_seqpacket(true);
        host.set_seqpacket(true);
        let nobody = Address::new(Cid::HOST, Port::new(9));
        let flow = guest.connect(NOW, ANY, nobody, kind).unwrap();
        assert_eq!(
            step(&mut guest, &mut host).1,
            Disposition::Dropped(DropReason::NoSocket)
        );
        let (rst, _) = step(&mut host, &mut guest);
        // Addresses swapped, the type kept, no credit.
        assert!(is(&rst, Op::Rst) && rst.src == nobody && rst.buf_alloc == 0 && rst.fwd_cnt == 0);
        assert_eq!(rst.socket_type, kind.into());
        assert_eq!(
            guest.poll_event(),
            Some(Event::Refused {
                flow,
                reason: RefuseReason::Reset
            })
        );
        assert!(guest.poll_event().is_none() && guest.flow(flow).is_none());
        assert!(!guest.has_transmit(), "an RST is not answered");
    }
}

/// An endpoint that does not support datagrams.
#[test]
fn a_datagram_is_reset_with_and_without_a_listener() {
    for port in [SERVER.port, Port::new(9)] {
        let (mut guest, mut host) = (guest(), host());
        let to = Address::new(Cid::HOST, port);
        let flow = guest.connect(NOW, ANY, to, SocketType::Datagram);
        assert_eq!(flow, Err(ConnectError::SocketType));
        let stream = guest.connect(NOW, ANY, to, SocketType::Stream).unwrap();
        let request = header(&mut guest);
        for op in [Op::Request, Op::Rw] {
            let packet = Repr {
                op: op.into(),
                socket_type: SocketType::Datagram.into(),
                ..request
            };
            let dropped = Disposition::Dropped(DropReason::UnknownType);
            assert_eq!(host.handle_packet(NOW, &packet), dropped);
            let rst = header(&mut host);
            assert!(is(&rst, Op::Rst) && (rst.src, rst.dst) == (to, request.src));
            assert_eq!(rst.socket_type, SocketType::Datagram.into(), "type kept");
        }
        assert!(host.poll_event().is_none() && !host.has_transmit());
        assert!(guest.flow(stream).is_some());
    }
}

#[test]
fn a_rejected_request_is_refused_at_once() {
    let (mut guest, mut host) = (guest(), host());
    let ours = guest.connect(NOW, ANY, SERVER, SocketType::Stream).unwrap();
    pump(&mut guest, &mut host);
    let Some(Event::Incoming { flow, .. }) = host.poll_event() else {
        panic!()
    };
    host.reject(flow).unwrap();
    assert_eq!(host.reject(flow), Err(FlowError::Stale));
    assert_eq!(
        host.poll_event(),
        Some(Event::Closed {
            flow,
            reason: CloseReason::Rejected
        })
    );
    pump(&mut host, &mut guest);
    assert_eq!(
        guest.poll_event(),
        Some(Event::Refused {
            flow: ours,
            reason: RefuseReason::Reset
        })
    );
    assert_eq!(guest.occupied() + host.occupied(), 0);
}

#[test]
fn connecting_times_out_after_two_seconds() {
    let mut guest = guest();
    let flow = guest.connect(NOW, ANY, SERVER, SocketType::Stream).unwrap();
    assert!(is(&header(&mut guest), Op::Request));
    let at = guest.poll_timeout().unwrap();
    assert_eq!(at, NOW + Duration::from_secs(2));
    guest.handle_timeout(Instant::from_nanos(at.as_nanos() - 1));
    assert!(guest.poll_event().is_none());
    guest.handle_timeout(at);
    assert_eq!(
        guest.poll_event(),
        Some(Event::Refused {
            flow,
            reason: RefuseReason::TimedOut
        })
    );
    assert!(is(&header(&mut guest), Op::Rst));
    assert_eq!((guest.occupied(), guest.poll_timeout()), (0, None));
}

#[test]
fn the_same_port_is_reusable_at_once() {
    let (mut guest, mut host) = (guest(), host());
    let local = Address::new(GUEST, Port::new(5000));
    for round in 0..3 {
        let flow = guest
            .connect(NOW, local, SERVER, SocketType::Stream)
            .unwrap();
        let again = guest.connect(NOW, local, SERVER, SocketType::Stream);
        assert_eq!(again, Err(ConnectError::InUse));
        let sent = pump(&mut guest, &mut host);
        // The RST of the previous round is sent before the REQUEST.
        let ops: Vec<_> = sent
            .iter()
            .map(|packet| packet.op.known().unwrap())
            .collect();
        assert_eq!(ops, [Op::Rst, Op::Request][usize::from(round == 0)..]);
        while host.poll_event().is_some() {}
        guest.reset(flow).unwrap();
    }
}

/// Linux removes a socket from its table when the peer has closed, though its reader is slow.
#[test]
fn a_port_is_reusable_while_the_old_reader_is_slow() {
    let (mut guest, mut host) = (guest(), host());
    let local = Address::new(GUEST, Port::new(5000));
    let old = guest
        .connect(NOW, local, SERVER, SocketType::Stream)
        .unwrap();
    pump(&mut guest, &mut host);
    let Some(Event::Incoming { flow: theirs, .. }) = host.poll_event() else {
        panic!()
    };
    host.accept(NOW, theirs).unwrap();
    pump(&mut host, &mut guest);
    guest.send(old, 10, 0).unwrap();
    guest.shutdown(NOW, old, Directions::BOTH).unwrap();
    pump(&mut guest, &mut host);
    guest.reset(old).unwrap();
    let _lost = header(&mut guest);
    guest
        .connect(NOW, local, SERVER, SocketType::Stream)
        .unwrap();
    pump(&mut guest, &mut host);
    let events: Vec<_> = core::iter::from_fn(|| host.poll_event()).collect();
    assert!(events.contains(&Event::Closed {
        flow: theirs,
        reason: CloseReason::Superseded
    }));
    assert!(matches!(
        events[..],
        [.., Event::Incoming { .. }] | [Event::Incoming { .. }, ..]
    ));
    assert!(
        !host.has_transmit(),
        "no RST that would hit the new connection"
    );
}

/// An RST of ours that crosses the peer's must not hit the next connection.
#[test]
fn a_queued_rst_is_cancelled_by_the_peers_rst() {
    let (mut guest, mut host, ours, theirs) = opened();
    host.reset(theirs).unwrap();
    guest.reset(ours).unwrap();
    let (_, got) = step(&mut guest, &mut host);
    assert_eq!(got, Disposition::Dropped(DropReason::StrayReset));
    assert!(!host.has_transmit());
}

#[test]
fn the_backlog_is_limited_and_decisions_free_it() {
    let ports = Arc::new(PortTable::new());
    let mut host = Shard::new(ShardConfig::device(GUEST), ports.clone());
    host.listen(SERVER.port, 1).unwrap();
    let mut guest = guest();
    for round in 0..5 {
        for _ in 0..3 {
            guest.connect(NOW, ANY, SERVER, SocketType::Stream).unwrap();
        }
        pump(&mut guest, &mut host);
        assert_eq!(
            (ports.waiting(SERVER), host.stats().over_cap),
            (Some(2), round + 1)
        );
        while let Some(event) = host.poll_event() {
            match event {
                Event::Incoming { flow, .. } if round % 2 == 0 => host.reject(flow).unwrap(),
                Event::Incoming { flow, .. } => host.accept(NOW, flow).unwrap(),
                _ => {}
            }
        }
        assert_eq!(ports.waiting(SERVER), Some(0));
        guest.handle_transport_reset(NOW);
        while guest.poll_event().is_some() || host.poll_event().is_some() {}
        pump(&mut host, &mut guest);
    }
    host.unlisten(SERVER.port).unwrap();
    assert!(ports.is_empty());
}

/// Without listeners the shard's own limit applies, and an undecided connection frees it however it
/// ends.
#[test]
fn undecided_connections_are_bounded_without_a_listener() {
    let mut config = ShardConfig::device(GUEST);
    (config.accept_all, config.backlog) = (true, 2);
    let mut host = Shard::new(config, Arc::new(PortTable::new()));
    for round in 0..4 {
        let mut guest = guest();
        let flows: Vec<FlowId> = (0..3)
            .map(|_| guest.connect(NOW, ANY, SERVER, SocketType::Stream).unwrap())
            .collect();
        pump(&mut guest, &mut host);
        assert_eq!((host.connections(), host.stats().over_cap), (2, round + 1));
        if round == 0 {
            for flow in flows {
                let _ = guest.reset(flow);
            }
            pump(&mut guest, &mut host);
        }
        while let Some(event) = host.poll_event() {
            if let Event::Incoming { flow, .. } = event {
                if round == 1 {
                    host.reject(flow).unwrap()
                } else {
                    host.accept(NOW, flow).unwrap()
                }
            }
        }
        host.handle_transport_reset(NOW);
        while host.poll_event().is_some() {}
        assert_eq!(host.occupied(), 0);
    }
}

#[test]
fn a_dropped_shard_releases_its_ports() {
    let ports = Arc::new(PortTable::new());
    let mut shard = Shard::new(ShardConfig::driver(GUEST), ports.clone());
    shard.connect(NOW, ANY, SERVER, SocketType::Stream).unwrap();
    assert_eq!(ports.len(), 1);
    drop(shard);
    assert!(ports.is_empty());
}

#[test]
fn addresses_are_connected_while_their_connection_is_live() {
    let mut guest = guest();
    let spare = guest.spare_port();
    assert_ne!(spare, guest.spare_port(), "the next one each time");
    let local = Address::new(GUEST, spare);
    assert!(!guest.is_connected(local, SERVER));
    let stream = SocketType::Stream;
    let flow = guest.connect(NOW, local, SERVER, stream).unwrap();
    assert!(guest.is_connected(local, SERVER));
    assert!(!guest.is_connected(SERVER, local));
    assert!(!guest.is_connected(Address::new(Cid::ANY, spare), SERVER));
    guest.reset(flow).unwrap();
    // Its queued RST does not keep the addresses in use.
    assert!(!guest.is_connected(local, SERVER));
    guest.connect(NOW, local, SERVER, stream).unwrap();
}
