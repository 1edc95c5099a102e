//! One turn of an embedding host takes a bounded number of packets from each guest, whatever it
//! posts. Only the test calls `drive`, and it counts packets.

use std::io::Read;

use crate::common::driver::{Driver, DriverConfig, StreamId};
use crate::common::{PATIENCE, deadline, host};
use crate::hosting::Hosted;
use zerosock::vsock::{Host, Stream};
use zerosock::{Cid, Port};

const PORT: Port = Port::new(700);
/// Packets that a turn takes from a device.
const TURN: u64 = 256;

/// A guest with long queues, and a connection of its.
fn join(hosted: &Hosted, socket: &std::path::Path) -> (Driver, StreamId, Stream) {
    let listener = hosted.listen(PORT, 4).unwrap();
    let mut config = DriverConfig::new(socket);
    (config.queue_size, config.queue_pairs) = (1024, 1);
    let mut guest = Driver::attach(config).unwrap();
    let id = guest.wait_connect(host(PORT.get()), deadline()).unwrap();
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    stream.set_nonblocking(true).unwrap();
    (guest, id, stream)
}

/// A host with two guests; only the test calls `drive`.
fn two() -> (tempfile::TempDir, Hosted, [(Driver, StreamId, Stream); 2]) {
    let dir = tempfile::tempdir().unwrap();
    let sockets = [3, 4].map(|cid| dir.path().join(format!("vm{cid}")));
    let builder = Host::builder()
        .vm(Cid::new(3), sockets[0].clone())
        .vm(Cid::new(4), sockets[1].clone());
    let mut hosted = Hosted::of(builder);
    let joined = [join(&hosted, &sockets[0]), join(&hosted, &sockets[1])];
    hosted.stop();
    let mut before = None;
    while before.replace(hosted.stats()) != Some(hosted.stats()) {
        hosted.drive().unwrap();
    }
    (dir, hosted, joined)
}

fn post_all(guest: &mut Driver, id: StreamId) -> u64 {
    let mut sent = 0;
    while guest.send(id, b"x").is_ok() {
        sent += 1;
    }
    guest.flush();
    sent
}

#[test]
fn a_turn_takes_a_bounded_number_of_packets_from_a_flooding_guest_and_serves_the_other() {
    let (_dir, hosted, [mut bulk, mut small]) = two();
    let mut bytes = [0; 4096];
    let (mut posted, mut read) = (0, 0);
    for round in 0..30u8 {
        posted += post_all(&mut bulk.0, bulk.1);
        small.0.send(small.1, &[round]).unwrap();
        small.0.flush();
        let before = hosted.stats().packets_received;
        hosted.drive().unwrap();
        let taken = hosted.stats().packets_received - before;
        assert!(taken > TURN / 2, "nothing to be bounded: {taken}");
        // Beside its packet the other guest may send a credit update.
        assert!(taken <= TURN + 2, "{taken} packets in a turn");
        assert_eq!(small.2.unread(), 1, "in the same turn");
        assert_eq!(small.2.read(&mut bytes).unwrap(), 1);
        assert_eq!(bytes[0], round);
        read += bulk.2.read(&mut bytes).unwrap() as u64;
        hosted.drive().unwrap();
        for (guest, ..) in [&mut bulk, &mut small] {
            guest.drive().unwrap();
        }
    }
    assert!(posted >= 10 * TURN && read >= 10 * TURN, "{posted}, {read}");
}

/// The short way: packets are shown to a reader as they are taken in.
#[test]
fn a_read_takes_so_many_packets_at_most() {
    let (_dir, hosted, [mut bulk, mut small]) = two();
    let mut bytes = [0; 4096];
    let mut all = 0;
    for _ in 0..30 {
        all += post_all(&mut bulk.0, bulk.1);
        let before = hosted.stats().packets_received;
        match bulk.2.read(&mut bytes) {
            Ok(got) => {
                let taken = hosted.stats().packets_received - before;
                assert!(got as u64 <= TURN && taken <= TURN, "{got}, {taken}");
                all -= got as u64;
            }
            Err(error) => panic!("{error}"),
        }
        small.0.send(small.1, b"y").unwrap();
        small.0.flush();
        hosted.drive().unwrap();
        assert_eq!(small.2.read(&mut bytes).unwrap(), 1);
        bulk.0.drive().unwrap();
        small.0.drive().unwrap();
    }
    while all > 0 {
        all -= bulk.2.read(&mut bytes).unwrap() as u64;
    }
}
