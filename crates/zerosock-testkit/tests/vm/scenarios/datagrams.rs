//! Datagrams to a stock guest, whose kernel has none: the sender gets an error, the guest nothing.

use std::io::{Error, ErrorKind, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use zerosock::vsock::{Datagram, DatagramError, Endpoint, Host, Stream};
use zerosock::{Address, Cid, Port};
use zerosock_cli::vm::pattern::Pattern;
use zerosock_testkit::protocol::{Command, Outcome};
use zerosock_testkit::remote::Remote;

use crate::lab::{AT_ONCE, Lab, STEP, port, short_dir};

/// VIRTIO_VSOCK_F_DGRAM and ZEROSOCK_F_DGRAM_FLOW (docs/datagrams.md).
const BITS: [usize; 2] = [3, 22];

/// The features acknowledged by the guest's vsock driver: a digit for each bit.
fn acknowledged(guest: &Remote) -> String {
    let script = "for at in /sys/bus/virtio/devices/*; do \
        if [ $(/bin/busybox cat $at/device) = 0x0013 ]; then /bin/busybox cat $at/features; fi; done";
    let argv = ["/bin/busybox", "sh", "-c", script].map(str::to_owned);
    let argv = argv.to_vec();
    let Outcome { text, bytes, .. } = guest.run(Command::Run { argv }, STEP).expect("features");
    let text = text.unwrap_or_default();
    assert_eq!(bytes, 0, "{text}");
    text.trim().to_owned()
}

fn has_no_datagrams(guest: &Remote) {
    let features = acknowledged(guest);
    let bit = |bit: usize| features.as_bytes().get(bit).copied();
    assert_eq!(bit(1), Some(b'1'), "messages: {features}");
    assert_eq!(bit(32), Some(b'1'), "VIRTIO_F_VERSION_1: {features}");
    for none in BITS {
        assert_eq!(bit(none), Some(b'0'), "bit {none}: {features}");
    }
}

fn reason(error: &Error) -> Option<&DatagramError> {
    error.get_ref()?.downcast_ref()
}

fn is_deaf(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert_eq!(reason(error), Some(&DatagramError::PeerUnsupported));
}

/// A guest that echoes on a port of its own.
fn echo(guest: &Remote) -> Port {
    let port = port();
    let socket = guest.socket(Command::Listen { port }, STEP);
    let socket = socket.expect("a listener in the guest");
    guest.start(Command::Echo { socket });
    Port::new(port)
}

/// Echoes bytes until `stop`, and once more; returns the number of rounds.
fn there_and_back(mut stream: &Stream, stop: &AtomicBool) -> u64 {
    let mut rounds = 0;
    loop {
        let last = stop.load(Ordering::Relaxed);
        let sent = Pattern::bytes(rounds, 3000);
        let mut got = vec![0; sent.len()];
        stream.write_all(&sent).expect("written");
        stream.read_exact(&mut got).expect("back");
        assert_eq!(got, sent);
        rounds += 1;
        if last {
            return rounds;
        }
    }
}

/// Runs `refused` while a stream echoes through the guest.
fn beside(stream: &Stream, refused: impl FnOnce()) {
    stream.set_read_timeout(Some(STEP)).expect("a deadline");
    stream.set_write_timeout(Some(STEP)).expect("a deadline");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let going = scope.spawn(|| there_and_back(stream, &stop));
        // Also after a panic of `refused`.
        let stopping = Stopping(&stop);
        refused();
        drop(stopping);
        assert!(going.join().expect("the stream went on") > 0);
    });
}

struct Stopping<'a>(&'a AtomicBool);

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The guest's device answers a datagram through the switch: the sender gets the error at once, or
/// with the next datagram.
fn refused_through_the_switch(socket: &Datagram, to: Address) {
    socket.set_write_timeout(Some(STEP)).expect("a deadline");
    let give_up = Instant::now() + AT_ONCE * 5;
    loop {
        match socket.send_to(b"anybody there?", to) {
            Err(error) => break is_deaf(&error),
            Ok(_) => assert!(Instant::now() < give_up, "nobody says that it is deaf"),
        }
        // The answer is in flight.
        thread::yield_now();
    }
    // From now on at once, for that address only.
    is_deaf(&socket.send_to(b"again", to).expect_err("still"));
    is_deaf(&socket.loan(to, 64).expect_err("nor by loan"));
    assert!(socket.stats().stopped > 0);
}

/// A stock guest at a daemon, with an attached process and a host service.
pub(crate) fn of_attached_processes(lab: &Lab) {
    if std::env::var_os("ZEROSOCK_DEVICE").is_some() {
        println!("  the other device has no processes");
        return;
    }
    let guest = lab.a.remote();
    has_no_datagrams(&guest);
    let to = Address::new(Cid::new(lab.a.endpoint.cid), echo(&guest));
    let process = Endpoint::builder().attach(&lab.attach).expect("a process");
    let claimed = [Port::new(port())];
    let service = Endpoint::builder().ports(claimed);
    let service = service.attach_as_host(&lab.attach).expect("a service");
    let ours = Datagram::bind(&process, Port::ANY).expect("a socket");
    let theirs = Datagram::bind(&service, claimed[0]).expect("a socket");
    for (sender, socket) in [(&process, &ours), (&service, &theirs)] {
        let stream = sender.connect(to).expect("a stream to the guest");
        beside(&stream, || refused_through_the_switch(socket, to));
    }
    // Both of them receive datagrams, independent of the guest.
    theirs.set_read_timeout(Some(STEP)).expect("a deadline");
    ours.send_to(b"you there", theirs.local_addr())
        .expect("sent");
    let mut got = [0; 16];
    let (len, from) = theirs.recv_from(&mut got).expect("received");
    assert_eq!((&got[..len], from), (&b"you there"[..], ours.local_addr()));
}

/// A stock guest of a program that embeds the device: the program gets the error at once.
pub(crate) fn of_the_embedding_program(lab: &Lab) {
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
    has_no_datagrams(guest.remote());
    let to = Address::new(cid, echo(guest.remote()));
    let socket = Datagram::bind(&*host, Port::ANY).expect("a socket");
    let stream = host.connect(to).expect("a stream to the guest");
    beside(&stream, || {
        for bytes in [&b""[..], &[1], &[2; 65536]] {
            is_deaf(
                &socket
                    .send_to(bytes, to)
                    .expect_err("the first one already"),
            );
        }
        is_deaf(&socket.loan(to, 64).expect_err("nor by loan"));
        is_deaf(&socket.send_many(&[(b"x", to)]).expect_err("nor many"));
        socket.connect(to);
        is_deaf(&socket.send(b"x").expect_err("nor connected"));
        assert_eq!(socket.stats().sent, 0);
    });
    drop(stopping);
    going.join().expect("the host went on to the end");
}
