//! Streams at several pairs, also of older drivers, which ask for their connections to be moved.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;

use zerosock::daemon::DaemonConfig;
use zerosock::driver::{Address, Cid, Port};
use zerosock_proto::vsock::{Directions, QueuePairs};

use super::guest::{PairsGuest, until};
use crate::common::{TestDaemon, connect_guest};

const PORT: u32 = 7000;
pub(crate) const LEN: usize = 300_000;

fn tune(config: &mut DaemonConfig) {
    config.workers = 2;
    config.queue_pairs = 3;
}

/// Bytes that depend on their offset and on `seed`.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ seed)
        .collect()
}

/// A host program that sends a pattern, reads to the end, and returns the bytes.
fn host_program(mut socket: UnixStream, seed: u8) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut reader = socket.try_clone().unwrap();
        let read = thread::spawn(move || {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).unwrap();
            bytes
        });
        for chunk in pattern(LEN, seed).chunks(10_000) {
            socket.write_all(chunk).unwrap();
        }
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        read.join().unwrap()
    })
}

/// Sends `LEN` bytes on each of `conns`, asking for each to be moved repeatedly, until all bytes have
/// arrived in both directions.
pub(crate) fn stream_and_ask(guests: &mut [&mut PairsGuest], conns: &[(usize, usize, u8)]) {
    let mut given = vec![0; conns.len()];
    let mut turn = 0u16;
    until(guests, |guests| {
        turn = turn.wrapping_add(1);
        let mut all = true;
        for (&(guest, conn, seed), given) in conns.iter().zip(&mut given) {
            let guest = &mut *guests[guest];
            assert!(guest.conns[conn].at.is_some(), "the connection has ended");
            if guest.unsent(conn) < 20_000 && *given < LEN {
                let more = (LEN - *given).min(10_000);
                guest.send(conn, &pattern(LEN, seed)[*given..*given + more]);
                *given += more;
            }
            guest.ask_move(conn, turn % 3);
            all &=
                *given == LEN && guest.unsent(conn) == 0 && guest.conns[conn].received.len() >= LEN;
        }
        all
    });
}

#[test]
fn moves_asked_for_while_both_sides_send_lose_no_bytes_of_the_host() {
    let daemon = TestDaemon::with(1, tune);
    let listener = daemon.host_listener(PORT);
    let mut guest = PairsGuest::attach(&daemon.vms[0].socket, 3, PORT);
    let mut programs = Vec::new();
    let mut conns = Vec::new();
    // From the guest: source ports such that each pair has some connections.
    for n in 0..6u8 {
        let conn = guest.connect(
            6000 + u32::from(n),
            Address::new(Cid::HOST, Port::new(PORT)),
        );
        until(&mut [&mut guest], |guests| guests[0].conns[conn].connected);
        programs.push(host_program(listener.accept().unwrap().0, 100 + n));
        conns.push((0, conn, n));
    }
    let at: std::collections::HashSet<u16> =
        guest.conns.iter().map(|conn| conn.at.unwrap().0).collect();
    assert_eq!(at.len(), 3, "the hash has spread them");
    // To the guest.
    for n in 6..8u8 {
        let path = daemon.uds_path();
        let program = thread::spawn(move || connect_guest(&path, PORT).unwrap());
        let before = guest.conns.len();
        until(&mut [&mut guest], |guests| guests[0].conns.len() > before);
        until(&mut [&mut guest], |_| program.is_finished());
        programs.push(host_program(program.join().unwrap(), 100 + n));
        conns.push((0, before, n));
    }
    stream_and_ask(&mut [&mut guest], &conns);
    for &(_, conn, seed) in &conns {
        assert!(guest.conns[conn].declined > 3);
        assert!(guest.conns[conn].received == pattern(LEN, 100 + seed));
        guest.shutdown(conn, Directions::SEND);
    }
    until(&mut [&mut guest], |guests| {
        guests[0].conns.iter().all(|conn| conn.finished)
            && programs.iter().all(|program| program.is_finished())
    });
    for (program, (_, _, seed)) in programs.into_iter().zip(conns) {
        assert!(program.join().unwrap() == pattern(LEN, seed));
    }
}

#[test]
fn a_connection_that_the_host_asks_for_begins_at_the_pair_of_its_hash() {
    let daemon = TestDaemon::with(1, tune);
    let mut guest = PairsGuest::attach(&daemon.vms[0].socket, 3, PORT);
    let mut pairs = std::collections::HashSet::new();
    for _ in 0..48 {
        let path = daemon.uds_path();
        let program = thread::spawn(move || connect_guest(&path, PORT).unwrap());
        let before = guest.conns.len();
        until(&mut [&mut guest], |guests| {
            guests[0].conns.len() > before && program.is_finished()
        });
        let (pair, flow) = guest.conns[before].at.unwrap();
        let info = guest.shards[usize::from(pair)].flow(flow).unwrap();
        let hashed = QueuePairs::new(3)
            .unwrap()
            .of_flow(info.local.port, info.peer);
        assert_eq!(pair, hashed, "{info:?}");
        pairs.insert(pair);
    }
    assert_eq!(pairs.len(), 3);
}

#[test]
fn moves_asked_for_at_both_ends_lose_no_bytes_of_siblings() {
    let daemon = TestDaemon::with(2, tune);
    let mut one = PairsGuest::attach(&daemon.vms[0].socket, 3, PORT);
    let mut two = PairsGuest::attach(&daemon.vms[1].socket, 3, PORT);
    let mut conns = Vec::new();
    for n in 0..5u8 {
        let conn = one.connect(
            6000 + u32::from(n),
            Address::new(two.raw.cid, Port::new(PORT)),
        );
        until(&mut [&mut one, &mut two], |guests| {
            guests[0].conns[conn].connected && guests[1].conns.len() > usize::from(n)
        });
        conns.push((0, conn, n));
        conns.push((1, usize::from(n), 100 + n));
    }
    stream_and_ask(&mut [&mut one, &mut two], &conns);
    for n in 0..5u8 {
        let (here, there) = (&one.conns[usize::from(n)], &two.conns[usize::from(n)]);
        assert!(here.declined > 3 && there.declined > 3);
        assert!(here.received == pattern(LEN, 100 + n));
        assert!(there.received == pattern(LEN, n));
    }
    for n in 0..5 {
        one.shutdown(n, Directions::BOTH);
    }
    until(&mut [&mut one, &mut two], |guests| {
        let ended = |guest: &PairsGuest| guest.conns.iter().all(|conn| conn.at.is_none());
        ended(guests[0]) && ended(guests[1])
    });
    // Every chain has returned to its guest.
    until(&mut [&mut one, &mut two], |guests| {
        guests
            .iter()
            .all(|guest| (0..3).all(|pair| guest.raw.is_idle_on(pair)))
    });
}

#[test]
fn one_pair_of_several_is_the_standard_s_device() {
    let daemon = TestDaemon::with(1, tune);
    let mut driver = daemon.guest();
    let listener = daemon.host_listener(PORT);
    let end = crate::common::deadline();
    let to = Address::new(Cid::HOST, Port::new(PORT));
    let stream = driver.wait_connect(to, end).unwrap();
    let mut program = listener.accept().unwrap().0;
    program.write_all(b"plain").unwrap();
    let mut bytes = [0; 5];
    driver.wait_recv_exact(stream, &mut bytes, end).unwrap();
    assert_eq!(&bytes, b"plain");
}
