//! Very many connections on one device: each can be used, none delays others, and nothing remains
//! of them after they close. `zerosock-cli/tests/scale.rs` measures their memory, with the daemon
//! in its own process.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::common::driver::{Address, Cid, Driver, Port, RecvError, StreamId, StreamState};
use crate::common::{self, TestDaemon, connect_guest, deadline, eventually_with, host};
use zerosock::daemon::Stats;

const PORT: Port = Port::new(77);
/// Requests under way at a time: fewer than a device lets be undecided.
const AT_A_TIME: usize = 512;

/// How many connections: those that the design speaks of take long where nothing is optimised.
fn many() -> usize {
    match std::env::var("ZEROSOCK_TEST_CONNECTIONS") {
        Ok(number) => number.parse().unwrap(),
        Err(_) => 20_000,
    }
}

fn turn(guests: &mut [Driver; 2]) {
    for guest in guests {
        if !guest.drive().unwrap() {
            guest
                .poll(Some(Instant::now() + Duration::from_micros(200)))
                .unwrap();
        }
    }
}

/// Lets both guests work until `done`.
#[track_caller]
fn until(guests: &mut [Driver; 2], what: &str, mut done: impl FnMut(&mut [Driver; 2]) -> bool) {
    let give_up = deadline();
    while !done(guests) {
        assert!(Instant::now() < give_up, "never: {what}");
        turn(guests);
    }
}

/// Connections from the first guest to the second, with both their ends. They are told by their
/// ports: over several queue pairs they arrive in another order than they left.
fn connect(guests: &mut [Driver; 2], count: usize) -> Vec<(StreamId, StreamId)> {
    let to = Address::new(Cid::new(4), PORT);
    let mut all = Vec::with_capacity(count);
    while all.len() < count {
        let now = AT_A_TIME.min(count - all.len());
        let begun: Vec<StreamId> = (0..now).map(|_| guests[0].connect(to).unwrap()).collect();
        let mut accepted = Vec::new();
        until(guests, "connected", |[one, two]| {
            accepted.extend(std::iter::from_fn(|| two.accept(PORT)));
            let connected = |&stream: &StreamId| one.state(stream) == Some(StreamState::Connected);
            accepted.len() == now && begun.iter().all(connected)
        });
        let [one, two] = &*guests;
        let mut by_port: HashMap<Port, StreamId> = accepted
            .into_iter()
            .map(|stream| (two.addresses(stream).unwrap().1.port, stream))
            .collect();
        for stream in begun {
            let (local, _) = one.addresses(stream).unwrap();
            all.push((stream, by_port.remove(&local.port).unwrap()));
        }
    }
    all
}

/// A byte that tells the connection, from each end of each to the other.
fn greet(guests: &mut [Driver; 2], all: &[(StreamId, StreamId)]) {
    for (some, part) in all.chunks(64).enumerate() {
        let byte = |n: usize| [(some * 7 + n) as u8];
        for (n, &(one, _)) in part.iter().enumerate() {
            let sent = guests[0].send(one, &byte(n));
            assert_eq!(sent.unwrap(), 1);
        }
        let mut echoed = 0;
        until(guests, "the bytes", |[_, two]| {
            while let Some(&(_, stream)) = part.get(echoed) {
                let mut got = [0];
                match two.recv(stream, &mut got) {
                    Ok(1) => assert_eq!(two.send(stream, &got).unwrap(), 1),
                    Err(RecvError::WouldBlock) => return false,
                    other => panic!("{other:?}"),
                }
                echoed += 1;
            }
            true
        });
        let mut back = 0;
        until(guests, "the echoes", |[one, _]| {
            while let Some(&(stream, _)) = part.get(back) {
                let mut got = [0];
                match one.recv(stream, &mut got) {
                    Ok(1) => assert_eq!(got, byte(back), "another connection's"),
                    Err(RecvError::WouldBlock) => return false,
                    other => panic!("{other:?}"),
                }
                back += 1;
            }
            true
        });
    }
}

/// What there is now.
fn now(daemon: &TestDaemon) -> [u64; 4] {
    let Stats {
        connections_now,
        bridges_now,
        timers_now,
        ports_now,
        ..
    } = daemon.stats().unwrap();
    [connections_now, bridges_now, timers_now, ports_now]
}

#[test]
fn gauges_return_to_their_start_after_many_connections() {
    let daemon = TestDaemon::with(2, |config| config.max_connections = Some(131_072));
    let mut guests = [daemon.guest_of(0, |_| {}), daemon.guest_of(1, |_| {})];
    guests[1].listen(PORT, AT_A_TIME).unwrap();
    for round in 0..2 {
        let mut all = connect(&mut guests, many());
        greet(&mut guests, &all);
        let count = many() as u64;
        // Each has an end in each device, and a port of one in the other's.
        let held = [2 * count, 2 * count, 0, count];
        until(&mut guests, "all are counted", |_| now(&daemon) == held);
        // Half of them in the order in which they came, half the other way round; by either side,
        // in order or not.
        let rest = all.split_off(all.len() / 2);
        for (n, (one, two)) in all.into_iter().chain(rest.into_iter().rev()).enumerate() {
            match n % 4 {
                0 => guests[0].close(one),
                1 => guests[1].close(two),
                2 => guests[0].abort(one),
                _ => guests[1].abort(two),
            }
            let other = [1, 0][n % 2];
            guests[other].close([one, two][other]);
            if n % 64 == 0 {
                turn(&mut guests);
            }
        }
        until(&mut guests, "gone", |_| now(&daemon) == [0; 4]);
        let stats = daemon.stats().unwrap();
        assert_eq!(stats.conns_added, stats.conns_removed, "round {round}");
        assert_eq!(stats.conns_refused, 0, "{stats:?}");
        assert_eq!(guests[0].connections() + guests[1].connections(), 0);
    }
}

/// The same for those with a socket behind them, made from either side.
#[test]
fn nothing_is_left_of_connections_with_host_programs() {
    let daemon = TestDaemon::new();
    let listener = daemon.host_listener(2000);
    let mut guest = daemon.guest();
    guest.listen(PORT, 128).unwrap();
    for _ in 0..2 {
        let mut ends: Vec<(StreamId, UnixStream)> = Vec::new();
        for _ in 0..100 {
            let stream = guest.wait_connect(host(2000), deadline()).unwrap();
            ends.push((stream, listener.accept().unwrap().0));
            let path = daemon.uds_path();
            let program = std::thread::spawn(move || connect_guest(&path, PORT.get()).unwrap());
            let stream = guest.wait_accept(PORT, deadline()).unwrap();
            eventually_with(&mut guest, "the OK", |_| program.is_finished());
            ends.push((stream, program.join().unwrap()));
        }
        // The other end of those that the host has made has a port.
        eventually_with(&mut guest, "all are counted", |_| {
            now(&daemon) == [200, 200, 0, 100]
        });
        for (n, (stream, program)) in ends.into_iter().enumerate() {
            if n % 2 == 0 {
                guest.close(stream);
            } else {
                drop(program);
                guest.abort(stream);
            }
        }
        eventually_with(&mut guest, "gone", |_| now(&daemon) == [0; 4]);
    }
}

/// A guest that asks for connections without end, beside one that has a single one.
#[test]
fn a_guest_that_keeps_connecting_is_capped_without_effect_on_its_neighbour() {
    const CAP: usize = 300;
    let daemon = TestDaemon::with(2, |config| config.max_connections = Some(CAP));
    let mut guests = [daemon.guest_of(0, |_| {}), daemon.guest_of(1, |_| {})];
    guests[1].listen(PORT, 4 * CAP).unwrap();
    let listener = common::host_listener(&daemon.vms[1].uds_path, 2000);
    let neighbour = guests[1].wait_connect(host(2000), deadline()).unwrap();
    let (mut program, _) = listener.accept().unwrap();
    program.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let to = Address::new(Cid::new(4), PORT);
    let (mut connected, mut refused) = (0, 0);
    for round in 0..20u8 {
        let begun: Vec<StreamId> = (0..100).map(|_| guests[0].connect(to).unwrap()).collect();
        until(&mut guests, "answers", |[one, _]| {
            let answered = |&stream: &StreamId| one.state(stream) != Some(StreamState::Connecting);
            begun.iter().all(answered)
        });
        for stream in begun {
            match guests[0].state(stream) {
                Some(StreamState::Connected) => connected += 1,
                _ => refused += 1,
            }
        }
        assert!(now(&daemon)[0] <= 2 * CAP as u64, "{:?}", now(&daemon));
        // Both ways, while the other goes on.
        assert_eq!(guests[1].send(neighbour, &[round]).unwrap(), 1);
        guests[1].flush();
        let mut got = [0];
        std::io::Read::read_exact(&mut program, &mut got).unwrap();
        std::io::Write::write_all(&mut program, &got).unwrap();
        guests[1]
            .wait_recv_exact(neighbour, &mut got, deadline())
            .unwrap();
        assert_eq!(got, [round]);
    }
    // The neighbour's own one counts as well, at its device.
    assert_eq!((connected, refused), (CAP - 1, 2000 - (CAP - 1)));
    assert_eq!(daemon.stats().unwrap().devices_lost, 0);
}
