//! Connections of a program that embeds a device with several pairs.

use std::io::{Read, Write};
use std::thread;

use zerosock::driver::{Address, Cid, Port};
use zerosock_proto::vsock::Directions;

use super::guest::{PairsGuest, until};
use super::streams::{LEN, pattern, stream_and_ask};
use crate::common::PATIENCE;
use crate::hosting::Hosted;

const PORT: u32 = 7000;

#[test]
fn moves_asked_for_lose_no_bytes_of_the_program() {
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
    stream_and_ask(&mut [&mut guest], &conns);
    for &(_, conn, seed) in &conns {
        assert!(guest.conns[conn].declined > 3);
        assert!(guest.conns[conn].received == pattern(LEN, 100 + seed));
        guest.shutdown(conn, Directions::SEND);
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
