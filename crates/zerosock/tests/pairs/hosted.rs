//! Connections of a program that embeds the device, moved by their guest.

use std::io::{Read, Write};
use std::thread;

use zerosock::driver::{Address, Cid, Port};
use zerosock_proto::vsock::How;

use super::common::PATIENCE;
use super::guest::{PairsGuest, until};
use super::hosting::Hosted;
use super::moves::{LEN, pattern, stream_and_move};

const PORT: u32 = 7000;

#[test]
fn a_program_s_connections_move_under_it() {
    let hosted = Hosted::tuned(|builder| builder.queue_pairs(3));
    let listener = hosted.listen(Port::new(PORT), 16).unwrap();
    let mut guest = PairsGuest::attach(hosted.socket_path(0), 3, PORT);
    let (mut conns, mut programs) = (Vec::new(), Vec::new());
    for n in 0..4u8 {
        let conn = guest.connect(
            6000 + u32::from(n),
            Address::new(Cid::HOST, Port::new(PORT)),
        );
        until(&mut [&mut guest], |guests| guests[0].conns[conn].connected);
        let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let stream = std::sync::Arc::new(stream);
        let writer = stream.clone();
        let writer = thread::spawn(move || {
            for chunk in pattern(LEN, 100 + n).chunks(10_000) {
                (&*writer).write_all(chunk).unwrap();
            }
            writer.shutdown(std::net::Shutdown::Write).unwrap();
        });
        // Half of the streams are read in place, and keep a lease during the next read.
        let reader = thread::spawn(move || {
            let mut bytes = Vec::new();
            if n % 2 == 0 {
                (&*stream).read_to_end(&mut bytes).unwrap();
                return bytes;
            }
            let mut kept = None;
            while let Some(lease) = stream.recv().unwrap() {
                bytes.extend(lease.to_vec());
                kept = Some(lease);
            }
            drop(kept);
            bytes
        });
        programs.push((writer, reader));
        conns.push((0, conn, n));
    }
    stream_and_move(&mut [&mut guest], &conns);
    for &(_, conn, seed) in &conns {
        assert!(
            guest.conns[conn].moves > 3,
            "{} moves",
            guest.conns[conn].moves
        );
        assert!(guest.conns[conn].received == pattern(LEN, 100 + seed));
        guest.shutdown(conn, How::SEND);
    }
    until(&mut [&mut guest], |_| {
        let finished =
            |(writer, reader): &(thread::JoinHandle<()>, thread::JoinHandle<Vec<u8>>)| {
                writer.is_finished() && reader.is_finished()
            };
        programs.iter().all(finished)
    });
    for ((writer, reader), (_, _, seed)) in programs.into_iter().zip(conns) {
        writer.join().unwrap();
        assert!(reader.join().unwrap() == pattern(LEN, seed));
    }
    until(&mut [&mut guest], |guests| {
        (0..3).all(|pair| guests[0].raw.is_idle_on(pair))
    });
}

#[test]
fn a_lease_and_a_loan_outlive_the_move() {
    let hosted = Hosted::tuned(|builder| builder.queue_pairs(2));
    let listener = hosted.listen(Port::new(PORT), 16).unwrap();
    let mut guest = PairsGuest::attach(hosted.socket_path(0), 2, PORT);
    let conn = guest.connect(6000, Address::new(Cid::HOST, Port::new(PORT)));
    until(&mut [&mut guest], |guests| guests[0].conns[conn].connected);
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    guest.send(conn, b"on lease");
    until(&mut [&mut guest], |guests| guests[0].unsent(conn) == 0);
    let lease = stream.recv().unwrap().unwrap();
    let (at, _) = guest.conns[conn].at.unwrap();

    // A connection with a loan cannot move.
    let mut loan = stream.loan(64).unwrap();
    assert!(guest.ask_move(conn, 1 - at));
    until(&mut [&mut guest], |guests| guests[0].ask_move(conn, 1 - at));
    assert_eq!(
        guest.conns[conn].moves, 0,
        "it was refused, and asked for again"
    );
    loan.write_all(b"from a loan").unwrap();
    loan.send().unwrap();
    until(&mut [&mut guest], |guests| {
        let guest = &mut *guests[0];
        guest.ask_move(conn, 1 - at);
        guest.conns[conn].moves == 1 && guest.conns[conn].received == b"from a loan"
    });
    assert_eq!(lease.to_vec(), b"on lease", "moved out of the way");
    drop(lease);
    guest.send(conn, b"and on");
    until(&mut [&mut guest], |guests| guests[0].unsent(conn) == 0);
    assert_eq!(stream.recv().unwrap().unwrap().to_vec(), b"and on");
    until(&mut [&mut guest], |guests| {
        (0..2).all(|pair| guests[0].raw.is_idle_on(pair))
    });
}

#[test]
fn a_program_s_own_connections_begin_at_the_pair_of_their_hash() {
    let hosted = Hosted::tuned(|builder| builder.queue_pairs(3));
    let mut guest = PairsGuest::attach(hosted.socket_path(0), 3, PORT);
    let to = Address::new(guest.raw.cid, Port::new(PORT));
    let mut streams = Vec::new();
    for n in 0..48 {
        streams.push(hosted.begin_connect(to).unwrap());
        until(&mut [&mut guest], |guests| guests[0].conns.len() > n);
        let (pair, flow) = guest.conns[n].at.unwrap();
        let info = guest.shards[usize::from(pair)].flow(flow).unwrap();
        assert_eq!(pair, guest.pair_of(info.local.port, info.peer));
    }
    let pairs: std::collections::HashSet<u16> =
        guest.conns.iter().map(|conn| conn.at.unwrap().0).collect();
    assert_eq!(pairs.len(), 3);
}

#[test]
fn as_many_pairs_as_there_cannot_be_are_refused() {
    for wrong in [0, 17] {
        let error = zerosock::vsock::Host::builder().queue_pairs(wrong).start();
        assert!(error.is_err(), "{wrong}");
    }
}

/// Each pair has its own bound on unread bytes, which also covers bytes from another pair.
#[test]
fn moves_do_not_evade_the_limit_on_copies() {
    const MOST: usize = 100_000;
    const EACH: usize = 16_000;
    let hosted = Hosted::tuned(|builder| builder.queue_pairs(2).max_copied(MOST));
    let listener = hosted.listen(Port::new(PORT), 16).unwrap();
    let mut guest = PairsGuest::attach(hosted.socket_path(0), 2, PORT);
    let to = Address::new(Cid::HOST, Port::new(PORT));
    let mut conns = Vec::new();
    for pair in 0..2 {
        let mut from = (6000..).filter(|from| guest.pair_of(Port::new(*from), to) == pair);
        let from: Vec<u32> = from.by_ref().take(6).collect();
        conns.extend(from.into_iter().map(|from| guest.connect(from, to)));
    }
    until(&mut [&mut guest], |guests| {
        guests[0].conns.iter().all(|conn| conn.connected)
    });
    let streams: Vec<_> = conns
        .iter()
        .map(|_| listener.accept_timeout(PATIENCE).unwrap().0)
        .collect();
    let unread = || streams.iter().map(|stream| stream.unread()).sum::<usize>();
    for &conn in &conns {
        guest.send(conn, &pattern(EACH, 1));
    }
    // All bytes are unread, in copies, and within the bounds of both pairs.
    until(&mut [&mut guest], |guests| {
        unread() == conns.len() * EACH && (0..2).all(|pair| guests[0].raw.is_idle_on(pair))
    });
    until(&mut [&mut guest], |guests| {
        conns.iter().all(|&conn| match guests[0].conns[conn].at {
            Some((0, _)) => {
                guests[0].ask_move(conn, 1);
                false
            }
            _ => true,
        })
    });
    until(&mut [&mut guest], |_| unread() <= MOST);
    assert!(unread() > MOST / 2, "no more than has to be: {}", unread());
    let ended = |guest: &PairsGuest| {
        conns
            .iter()
            .filter(|&&c| guest.conns[c].at.is_none())
            .count()
    };
    until(&mut [&mut guest], |guests| ended(guests[0]) > 0);
    // The remaining connections have all their bytes.
    let mut whole = 0;
    for mut stream in &streams {
        let mut bytes = vec![0; EACH];
        if stream.unread() > 0 {
            stream.read_exact(&mut bytes).unwrap();
            assert!(bytes == pattern(EACH, 1));
            whole += 1;
        }
    }
    assert_eq!(whole + ended(&guest), conns.len());
}
