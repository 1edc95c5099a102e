//! Messages of a stock guest and the program that embeds its device: received in the guest kernel's
//! memory, and written into the buffers that the guest has posted.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use zerosock::vsock::{Host, SeqPacket, StreamError};
use zerosock::{Address, Cid, Port};
use zerosock_cli::vm::pattern::{Pattern, sha256};
use zerosock_testkit::calls::{Call, Kind, RecvFlags};
use zerosock_testkit::protocol::{Command, Outcome, Socket};
use zerosock_testkit::remote::Remote;

use crate::lab::{Lab, STEP, port, short_dir};

/// Lengths around those of the guest's buffers (4 KiB with their header) and packets, and the
/// longest.
const LENS: [usize; 9] = [
    1, 4052, 4053, 5000, 30_000, 65_536, 65_537, 200_000, 262_144,
];

/// Signals when it is dropped, also by a panic.
struct Stopping<'a>(&'a AtomicBool);

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn call(guest: &Remote, call: Call) -> Outcome {
    let outcome = guest.run(Command::Call(call), STEP).expect("an outcome");
    assert_eq!(outcome.errno, None);
    outcome
}

fn receive(guest: &Remote, socket: Socket) -> Outcome {
    let flags = RecvFlags {
        trunc: true,
        ..RecvFlags::default()
    };
    let len = 300_000;
    call(guest, Call::Receive { socket, len, flags })
}

/// Runs the messages; see the module.
pub(crate) fn with_the_embedding_program(lab: &Lab) {
    let dir = short_dir();
    let path = dir.path().join("vhost");
    let cid = Cid::new(6);
    // QEMU does not seal the guest's memory.
    let builder = Host::builder().vm(cid, &path).allow_unsealed_memory();
    let host = Arc::new(builder.start().expect("a host"));
    let over = Arc::new(AtomicBool::new(false));
    let going = thread::spawn({
        let (host, over) = (host.clone(), over.clone());
        move || {
            while !over.load(Ordering::Relaxed) {
                host.drive().expect("the host goes on");
                thread::sleep(Duration::from_millis(1));
            }
        }
    });
    let stopping = Stopping(&over);
    let (guest, _dir) = lab.boot_at(&path);
    let port = port();
    let listener = host.listen_seqpacket(Port::new(port), 4).expect("a port");
    let kind = Kind::SeqPacket;
    let socket = call(guest.remote(), Call::Socket { kind }).socket;
    let socket = socket.expect("a socket");
    let cid = 2;
    let connecting = Command::Call(Call::Connect { socket, cid, port });
    let connecting = guest.remote().start(connecting);
    let (ours, peer) = listener.accept_timeout(STEP).expect("the guest");
    assert_eq!(peer.cid, Cid::new(6));
    assert_eq!(connecting.wait(STEP).expect("connected").errno, None);
    ours.set_read_timeout(Some(STEP)).unwrap();
    ours.set_write_timeout(Some(STEP)).unwrap();
    from_the_guest(guest.remote(), socket, &ours);
    let before = host.stats();
    to_the_guest(guest.remote(), socket, &ours);
    let after = host.stats();
    let total: usize = LENS.iter().sum();
    assert_eq!(after.sent - before.sent, total as u64);
    let in_place = after.sent_in_place - before.sent_in_place;
    assert!(
        in_place >= LENS[..5].iter().sum::<usize>() as u64,
        "{after:?}"
    );

    // The guest closes; its buffers are returned: the next connection can use them all.
    let mut loan = ours.loan(30_000).expect("a loan");
    loan.write_all(&[1; 30_000]).unwrap();
    let close = Command::Close { socket };
    guest.remote().run(close, STEP).expect("closed");
    assert!(matches!(ours.recv(&mut []), Ok(None)), "its end");
    assert!(loan.send().is_err());
    drop(ours);
    let bind = |socket| Call::Bind {
        socket,
        cid: None,
        port: Some(port),
    };
    let listening = call(guest.remote(), Call::Socket { kind })
        .socket
        .expect("one");
    call(guest.remote(), bind(listening));
    let (socket, backlog) = (listening, 4);
    call(guest.remote(), Call::Listen { socket, backlog });
    let there = Address::new(Cid::new(6), Port::new(port));
    let ours = host.connect_seqpacket(there).expect("the guest listens");
    let timeout_ms = STEP.as_millis() as u32;
    let socket = listening;
    let accepted = call(guest.remote(), Call::Accept { socket, timeout_ms });
    let socket = accepted.socket.expect("a connection");
    ours.set_read_timeout(Some(STEP)).unwrap();
    ours.set_write_timeout(Some(STEP)).unwrap();
    to_the_guest(guest.remote(), socket, &ours);
    drop((ours, stopping));
    going.join().expect("the host went on to the end");
}

/// A message has as many leases as the guest has sent packets.
fn from_the_guest(guest: &Remote, socket: Socket, ours: &SeqPacket) {
    for (seed, len) in (1..).zip(LENS) {
        let record = seed % 2 == 0;
        let now = false;
        let sending = match record {
            true => Call::SendRecord { socket, seed, len },
            false => Call::Send {
                socket,
                seed,
                len,
                now,
            },
        };
        let sending = guest.start(Command::Call(sending));
        let message = ours.recv_leases().unwrap().expect("a message");
        assert_eq!((message.len(), message.end_of_record()), (len, record));
        assert!(message.iter().len() >= len.div_ceil(65_536), "{message:?}");
        let leases: Vec<Vec<u8>> = message.iter().map(|lease| lease.to_vec()).collect();
        assert_eq!(sha256(&leases.concat()), sha256(&Pattern::bytes(seed, len)));
        drop(message);
        let sent = sending.wait(STEP).expect("sent");
        assert_eq!((sent.errno, sent.bytes), (None, len as u64));
    }
}

/// A loan covers as many of the guest's buffers as the message takes, or as may be lent.
fn to_the_guest(guest: &Remote, socket: Socket, ours: &SeqPacket) {
    for (seed, len) in (101..).zip(LENS) {
        let bytes = Pattern::bytes(seed, len);
        let mut loan = ours.loan(len).expect("a loan");
        assert_eq!(loan.capacity(), len);
        assert!(loan.is_in_place() || len > 30_000, "{loan:?}");
        let (first, rest) = bytes.split_at(len / 3);
        loan.write_all(first).unwrap();
        loan.write_all(rest).unwrap();
        // A message longer than all buffers waits for the guest to read.
        thread::scope(|scope| {
            scope.spawn(move || match seed % 2 {
                0 => assert_eq!(loan.send_eor().unwrap(), len),
                _ => assert_eq!(loan.send().unwrap(), len),
            });
            let got = receive(guest, socket);
            assert_eq!(got.bytes, len as u64);
            assert_eq!(got.sha256, Some(sha256(&bytes)));
        });
    }
    // A dropped loan sends nothing, an empty one sends a message.
    let mut dropped = ours.loan(10_000).expect("a loan");
    dropped.write_all(b"never sent").unwrap();
    drop(dropped);
    let none = ours.loan(10_000).expect("a loan");
    assert_eq!(none.send().unwrap(), 0);
    assert_eq!(receive(guest, socket).bytes, 0);
    let error = ours.loan(262_145).expect_err("longer than the guest takes");
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    assert_eq!(inner, Some(&StreamError::TooLong));
}
