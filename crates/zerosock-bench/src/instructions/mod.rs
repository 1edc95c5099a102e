//! Sends and receives 64-byte packets between an embedding program and an attached process, and frames
//! between the two halves of a network device, all in one thread, so that `scripts/count-instructions` can
//! count the instructions of each side.
//!
//! # Invariants
//! - Only the steps of the side that [`run_scenario`] is told to count are counted, on their thread alone.
//! - No call waits or sleeps: a round sends as many packets as it receives.
//!
//! # Use
//! `zerosock-bench instructions`. A scenario is one way to send and receive, one direction and one side. Each ends in
//! [`end_scenario`], where the script takes the counts and starts from zero.

mod net;
mod scenario;

use std::array;
use std::io::{Read, Write};
use std::thread;
use std::time::Duration;

use zerosock::vsock::{Endpoint, Host, SeqPacket, Stream};
use zerosock::{Address, Cid, Port};

use self::scenario::{ROUND, Side, end_scenario, run_scenario};

/// Bytes of a packet.
const LEN: usize = 64;
/// Bytes in flight: enough for the packets of all scenarios of a connection, each of which takes
/// 640 bytes.
const WINDOW: u32 = 8 << 20;
const STREAM: Port = Port::new(1);
const MESSAGES: Port = Port::new(2);
const PATIENCE: Duration = Duration::from_secs(60);

/// The sides of a way to send that no other scenario has.
const BOTH: [Side; 2] = [Side::Sender, Side::Receiver];

/// Both ends of a connection.
struct Ends<T> {
    /// The end of the program that embeds the device.
    device: T,
    /// The end of the attached process.
    driver: T,
}

/// The first argument of the program that runs the scenarios.
pub(crate) const NAME: &str = "instructions";

/// Runs all scenarios.
pub(crate) fn run() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("attach.sock");
    let host = Host::builder().window(WINDOW).attach(&path);
    let host = host.start().expect("a host");
    let streams = host.listen(STREAM, 1).expect("a listener");
    let messages = host.listen_seqpacket(MESSAGES, 1).expect("a listener");
    let attaching = thread::spawn(move || {
        let endpoint = Endpoint::builder().window(WINDOW).attach(path);
        let endpoint = endpoint.expect("an endpoint");
        let to = |port| Address::new(Cid::HOST, port);
        let stream = || endpoint.connect(to(STREAM)).expect("a stream");
        let streams = [stream(), stream(), stream(), stream()];
        let socket = endpoint.connect_seqpacket(to(MESSAGES)).expect("a socket");
        (endpoint, streams, socket)
    });
    let accept = || streams.accept_timeout(PATIENCE).expect("a stream").0;
    let our_streams = [accept(), accept(), accept(), accept()];
    let (socket, _) = messages.accept_timeout(PATIENCE).expect("a socket");
    while !attaching.is_finished() {
        host.drive().expect("a running host");
        thread::yield_now();
    }
    let (endpoint, their_streams, their_socket) = attaching.join().expect("an endpoint");
    for stream in our_streams.iter().chain(&their_streams) {
        stream.set_nonblocking(true).expect("a non-blocking stream");
    }
    for socket in [&socket, &their_socket] {
        socket.set_nonblocking(true).expect("a non-blocking socket");
    }
    let [stream, batch, lease, loan] = our_streams;
    let [their_stream, their_batch, their_lease, their_loan] = their_streams;
    let ends = |device, driver| Ends { device, driver };
    let turns: Ends<&dyn Fn()> = Ends {
        device: &|| host.drive().expect("a running host"),
        driver: &|| endpoint.drive().expect("a running endpoint"),
    };
    both_ways(
        "stream",
        &ends(stream, their_stream),
        &turns,
        write_each,
        read_each,
        &BOTH,
    );
    both_ways(
        "batch",
        &ends(batch, their_batch),
        &turns,
        write_batch,
        show_each,
        &BOTH,
    );
    both_ways(
        "lease",
        &ends(lease, their_lease),
        &turns,
        write_each,
        lease_each,
        &[Side::Receiver],
    );
    both_ways(
        "loan",
        &ends(loan, their_loan),
        &turns,
        lend_each,
        read_each,
        &[Side::Sender],
    );
    let ends = Ends {
        device: socket,
        driver: their_socket,
    };
    both_ways("message", &ends, &turns, send_each, recv_each, &BOTH);
    net::run(dir.path());
}

/// Runs the scenarios of one way to send and receive: two directions, and these sides.
fn both_ways<T>(
    name: &str,
    ends: &Ends<T>,
    turns: &Ends<&dyn Fn()>,
    send: fn(&T),
    receive: fn(&T),
    sides: &[Side],
) {
    // The turn that a receiver takes when it has read all.
    let receive = |end: &T, turn: &dyn Fn()| {
        receive(end);
        turn();
    };
    for &side in sides {
        let (sends, receives) = (&ends.driver, &ends.device);
        run_scenario(side, || send(sends), || receive(receives, turns.device));
        end_scenario(name, "driver", "device", side);
    }
    for &side in sides {
        let (sends, receives) = (&ends.device, &ends.driver);
        run_scenario(side, || send(sends), || receive(receives, turns.driver));
        end_scenario(name, "device", "driver", side);
    }
}

/// A packet. Its number decides its bytes.
fn packet(number: usize) -> [u8; LEN] {
    array::from_fn(|at| (number + at) as u8)
}

fn write_each(stream: &Stream) {
    let packet = packet(0);
    for _ in 0..ROUND {
        assert_eq!((&*stream).write(&packet).expect("room"), LEN);
    }
}

fn read_each(stream: &Stream) {
    let mut bytes = [0; LEN];
    for _ in 0..ROUND {
        assert_eq!((&*stream).read(&mut bytes).expect("a packet"), LEN);
    }
    assert_eq!(bytes, packet(0));
}

/// Takes a lease of each packet, and drops it unread: what a lease costs beside the bytes.
fn lease_each(stream: &Stream) {
    for _ in 0..ROUND {
        let lease = stream.recv().expect("a packet").expect("a packet");
        assert_eq!(lease.len(), LEN);
    }
}

/// Writes each packet into a loan.
fn lend_each(stream: &Stream) {
    let packet = packet(0);
    for _ in 0..ROUND {
        let mut loan = stream.loan(LEN).expect("room");
        loan.write_all(&packet).expect("room");
        assert_eq!(loan.send().expect("a connection"), LEN);
    }
}

fn write_batch(stream: &Stream) {
    let packet = packet(1);
    let mut batch = stream.batch();
    for _ in 0..ROUND {
        batch.write(&packet).expect("room");
    }
}

fn show_each(stream: &Stream) {
    let mut bytes = [0; LEN];
    let mut seen = 0;
    while seen < ROUND {
        seen += stream
            .recv_each(ROUND - seen, |message| {
                message.copy_to(0, &mut bytes);
            })
            .expect("packets");
    }
    assert_eq!(bytes, packet(1));
}

fn send_each(socket: &SeqPacket) {
    let packet = packet(2);
    for _ in 0..ROUND {
        socket.send(&packet).expect("room");
    }
}

fn recv_each(socket: &SeqPacket) {
    let mut bytes = [0; LEN];
    for _ in 0..ROUND {
        let received = socket.recv(&mut bytes).expect("a message");
        assert_eq!(received.map(|message| message.len), Some(LEN));
    }
    assert_eq!(bytes, packet(2));
}
