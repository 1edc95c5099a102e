//! Connecting: allowed addresses, refusals and limits.

use std::time::{Duration, Instant};

use zerosock_testkit::calls::{Call, Number, Setting};

use super::side::{BEFORE_CLOSING_TIMES_OUT, End, Expect, Pair, STEP, Verdict, port};

pub(crate) fn connection_reset_to_no_listener(pair: &Pair) -> Verdict {
    pair.client_socket()
        .connect(pair.server.cid(), port())
        .refused();
    Ok(())
}

pub(crate) fn connection_reset_to_a_port_that_is_only_bound(pair: &Pair) -> Verdict {
    let port = port();
    let bound = pair.server_socket();
    bound.bind(Some(port)).ok();
    pair.client_socket()
        .connect(pair.server.cid(), port)
        .refused();
    Ok(())
}

pub(crate) fn hundred_connections_at_once(pair: &Pair) -> Verdict {
    const MANY: usize = 100;
    let port = port();
    let listener = pair.listener(port, MANY as u32);
    let clients: Vec<End> = (0..MANY).map(|_| pair.client_socket()).collect();
    let asking: Vec<_> = clients
        .iter()
        .map(|client| {
            client
                .side
                .start(zerosock_testkit::protocol::Command::Call(Call::Connect {
                    socket: client.id(),
                    cid: pair.server.cid(),
                    port,
                }))
        })
        .collect();
    let served: Vec<End> = (0..MANY).map(|_| listener.accept()).collect();
    asking.into_iter().for_each(|one| one.wait().ok());
    // Each sends its number; all are open at the same time.
    for (seed, client) in clients.iter().enumerate() {
        client.send(seed as u64, 8).ok();
    }
    let mut said: Vec<_> = served.iter().map(|one| one.receive(8).sha256).collect();
    let mut expected: Vec<_> = (0..MANY as u64)
        .map(|seed| {
            let bytes = zerosock_cli::vm::pattern::Pattern::bytes(seed, 8);
            Some(zerosock_cli::vm::pattern::sha256(&bytes))
        })
        .collect();
    said.sort();
    expected.sort();
    assert_eq!(said, expected);
    Ok(())
}

pub(crate) fn retry_after_a_failed_connect(pair: &Pair) -> Verdict {
    let port = port();
    let client = pair.client_socket();
    client.connect(pair.server.cid(), port).refused();
    let listener = pair.listener(port, 1);
    let served = pair.join(&client, &listener, port);
    client.send(1, 100).ok();
    served.receive_all(100).is_pattern(1, 100);
    Ok(())
}

pub(crate) fn chosen_source_port(pair: &Pair) -> Verdict {
    let (from, to) = (port(), port());
    let listener = pair.listener(to, 1);
    let client = pair.client_socket();
    client.bind(Some(from)).ok();
    client.connect(pair.server.cid(), to).ok();
    let (_served, peer) = listener.accept_from();
    assert_eq!(peer, (pair.client.cid(), from));
    assert_eq!(client.name().1, from);
    Ok(())
}

pub(crate) fn same_source_port_after_close(pair: &Pair) -> Verdict {
    let (from, to) = (port(), port());
    let listener = pair.listener(to, 4);
    for seed in 0..3 {
        let give_up = Instant::now() + BEFORE_CLOSING_TIMES_OUT;
        // The earlier connection lasts until its end is confirmed, without notice to the program;
        // and a Linux server resets it again when it closes, which may meet the next request.
        let refused = pair
            .server
            .kernel()
            .map_or("EADDRINUSE", |_| "ECONNREFUSED");
        let client = loop {
            let client = pair.client_socket();
            let bound = client.bind(Some(from));
            let tried = match bound.errno {
                None => client.connect(pair.server.cid(), to),
                Some(_) => bound,
            };
            match tried.errno.as_deref() {
                None => break client,
                Some(errno) if errno == "EADDRINUSE" || errno == refused => {
                    assert!(Instant::now() < give_up, "still in use: {tried:?}");
                    // A request that met such a reset may have become a connection there, which
                    // Linux knows, and answers with resets, until it is accepted and closed.
                    if let Ok((refused, _)) = listener.accept_for(0) {
                        refused.close().ok();
                    }
                }
                other => panic!("{other:?}"),
            }
        };
        let (served, peer) = listener.accept_from();
        assert_eq!(peer, (pair.client.cid(), from));
        client.send(seed, 10).ok();
        served.receive_all(10).is_pattern(seed, 10);
        client.close().ok();
        served.receive(1).is(&[]);
        served.close().ok();
    }
    Ok(())
}

pub(crate) fn a_taken_port_cannot_be_bound(pair: &Pair) -> Verdict {
    let port = port();
    let first = pair.server_socket();
    first.bind(Some(port)).ok();
    let second = pair.server_socket();
    second.bind(Some(port)).fails("EADDRINUSE");
    first.listen(1).ok();
    second.bind(Some(port)).fails("EADDRINUSE");
    first.close().ok();
    second.bind(Some(port)).ok();
    Ok(())
}

pub(crate) fn a_port_that_is_free_to_listen_on(pair: &Pair) -> Verdict {
    let listener = pair.server_socket();
    listener.bind(None).ok();
    listener.listen(1).ok();
    let other = pair.server_socket();
    other.bind(None).ok();
    let port = listener.name().1;
    assert!(port >= 1024, "{port} is for those who ask for it");
    assert_ne!(port, other.name().1);
    let client = pair.client_socket();
    let served = pair.join(&client, &listener, port);
    assert_eq!(served.name().1, port);
    Ok(())
}

/// A side may bind to its own CID, and not to another one.
pub(crate) fn an_own_address_is_bound_and_no_other(pair: &Pair) -> Verdict {
    let port = port();
    let listener = pair.server_socket();
    // No endpoint of the device has this CID.
    listener
        .bind_to(Some(77), Some(port))
        .fails("EADDRNOTAVAIL");
    let own = pair.server.cid();
    listener.bind_to(Some(own), Some(port)).ok();
    let second = pair.server_socket();
    second.bind_to(None, Some(port)).fails("EADDRINUSE");
    listener.listen(1).ok();
    let client = pair.client_socket();
    let served = pair.join(&client, &listener, port);
    assert_eq!(served.name(), (own, port));
    Ok(())
}

/// Closing a listener keeps its connections, which keep the port.
pub(crate) fn a_port_is_listened_on_again_beside_its_connections(pair: &Pair) -> Verdict {
    let port = port();
    let mut connections = Vec::new();
    for seed in 0..3 {
        let listener = pair.listener(port, 1);
        let client = pair.client_socket();
        let served = pair.join(&client, &listener, port);
        listener.close().ok();
        client.send(seed, 10).ok();
        connections.push((client, served));
    }
    for (seed, (client, served)) in (0..).zip(&connections) {
        served.receive_all(10).is_pattern(seed, 10);
        served.send(seed, 20).ok();
        client.receive_all(20).is_pattern(seed, 20);
    }
    pair.client_socket()
        .connect(pair.server.cid(), port)
        .refused();
    Ok(())
}

/// Connections in the backlog of a closed listener are reset.
pub(crate) fn closing_a_listener_resets_the_connections_in_its_backlog(pair: &Pair) -> Verdict {
    let port = port();
    let listener = pair.listener(port, 4);
    let waiting: Vec<End> = (0..3).map(|_| pair.client_socket()).collect();
    for client in &waiting {
        client.connect(pair.server.cid(), port).ok();
    }
    listener.close().ok();
    for client in &waiting {
        assert!(client.poll(STEP), "nobody tells");
        let told = client.receive(1);
        // A kernel reports a reset after the connect as the end.
        assert!(
            matches!(told.errno.as_deref(), None | Some("ECONNRESET")),
            "{told:?}"
        );
        assert_eq!(told.bytes, 0);
    }
    Ok(())
}

/// Options set before the connect apply afterwards.
pub(crate) fn options_set_before_connecting_stay(pair: &Pair) -> Verdict {
    const MARK: usize = 16;
    let port = port();
    let listener = pair.listener(port, 1);
    let client = pair.client_socket();
    client.set(Setting::BufferBounds(200, 5000)).ok();
    client.set(Setting::BufferSize(100)).ok();
    client.set(Setting::LowWater(MARK as u32)).ok();
    client.set(Setting::ReceiveTimeout(400)).ok();
    client.set(Setting::ConnectTimeout(60_000)).ok();
    let served = pair.join(&client, &listener, port);
    assert_eq!(client.get(Number::BufferSize).bytes, 200);
    client.set(Setting::BufferSize(10_000)).ok();
    assert_eq!(client.get(Number::BufferSize).bytes, 5000);
    served.send(1, MARK - 1).ok();
    // Only waiting shows that nothing happens.
    assert!(!client.poll(Duration::from_millis(100)), "below the mark");
    served.send(2, 1).ok();
    assert!(client.poll(STEP), "not at the mark");
    client.receive_all(MARK as u64).ok();
    let outcome = client.receive(1);
    outcome.fails("EAGAIN");
    assert!(outcome.elapsed_us >= 300_000, "{outcome:?}");
    Ok(())
}

pub(crate) fn no_more_wait_than_the_backlog(pair: &Pair) -> Verdict {
    const BACKLOG: u32 = 2;
    let port = port();
    let listener = pair.listener(port, BACKLOG);
    let clients: Vec<End> = (0..8).map(|_| pair.client_socket()).collect();
    let outcomes: Vec<_> = clients
        .iter()
        .map(|client| client.connect(pair.server.cid(), port))
        .collect();
    let waiting = outcomes.iter().filter(|one| one.errno.is_none()).count() as u32;
    // Linux admits one more than the backlog, and so does zerosock.
    assert_eq!(waiting, BACKLOG + 1);
    outcomes[waiting as usize..]
        .iter()
        .for_each(Expect::refused);
    // Accepting a connection makes room.
    let _served = listener.accept();
    pair.client_socket().connect(pair.server.cid(), port).ok();
    Ok(())
}

/// A leak in the accept queue: a request and its end that reach the listener at about the same time
/// occupied a place in the backlog forever.
pub(crate) fn connects_closed_at_once_leave_the_backlog_free(pair: &Pair) -> Verdict {
    let port = port();
    let listener = pair.listener(port, 4);
    let (cid, times) = (pair.server.cid(), 64);
    pair.client
        .call(Call::ConnectAndClose { cid, port, times })
        .ok();
    // Some were accepted; they have ended.
    while let Ok((over, _)) = listener.accept_for(100) {
        assert!(over.poll(Duration::from_secs(10)), "it ends");
    }
    let client = pair.client_socket();
    let served = pair.join(&client, &listener, port);
    client.send(7, 5).ok();
    served.receive_all(5).is_pattern(7, 5);
    Ok(())
}
