//! Owned buffers over a stock guest's AF_VSOCK, and over its TCP with and without kernel TLS, by
//! the library's zero-copy sender.

use std::thread;

use zerosock::Port;
use zerosock::vsock::Endpoint;
use zerosock_testkit::calls::{Call, Kind};
use zerosock_testkit::protocol::{Command, Keys};
use zerosock_testkit::remote::Pending;

use crate::lab::{Lab, STEP, expected, port, read_exact};

const LEN: u64 = 8 << 20;
/// No multiple of a page: the last page of each buffer is shared with the next.
const CHUNK: usize = 100_000;
/// So short that one request carries many.
const SMALL: usize = 3000;

/// Over every back-end of the guest's kernel: the bytes arrive while buffers are reused as soon as
/// they are free, and each buffer is returned.
pub(crate) fn to_host(lab: &Lab) {
    // MSG_ZEROCOPY on AF_VSOCK came with Linux 6.7.
    let has_zero_copy = !lab.release.starts_with("6.1.");
    for (seed, backend) in ["uring", "error queue", "copy"].into_iter().enumerate() {
        let (socket, stream) = lab.a.to_host();
        let sending = lab.a.start(Command::SendOwned {
            socket,
            seed: seed as u64,
            len: LEN,
            chunk: CHUNK,
            backend: backend.to_owned(),
        });
        if backend != "copy" && !has_zero_copy {
            let refused = sending.wait(STEP).expect_err("no zero copy").to_string();
            assert!(refused.contains("cannot be sent from"), "{refused}");
            lab.a.close(socket);
            continue;
        }
        let received = thread::spawn(move || read_exact(&stream, LEN));
        let sent = sending.wait(STEP).expect("sent");
        assert_eq!((sent.errno, sent.bytes), (None, LEN), "{backend}");
        let digest = received.join().expect("the bytes");
        assert_eq!(digest, expected(seed as u64, LEN), "{backend}");
        let told = sent.text.expect("counts");
        if backend == "copy" {
            assert!(told.contains(" 0 in place, 0 notified"), "{told}");
        } else {
            // The guest's kernel copies only when the peer's credit is short.
            assert!(!told.contains(" 0 in place"), "{told}");
            assert!(!told.contains(" 0 notified"), "{told}");
        }
        lab.a.close(socket);
    }
}

/// Waiting buffers form one request, resumed where the socket takes no more; the bytes arrive while
/// buffers are reused as soon as they are free, and each buffer is returned. Also over io_uring in
/// a guest of 6.1: its stable releases have IORING_SEND_ZC_REPORT_USAGE, which came with Linux 6.2.
pub(crate) fn over_tcp(lab: &Lab) {
    const LEN: u64 = 2 << 20;
    loopback(lab);
    let names = [
        ("uring", "Uring:"),
        ("error queue", "ErrorQueue:"),
        ("copy", "Copy:"),
    ];
    for (seed, (backend, name)) in (0..).zip(names) {
        let sending = lab.a.start(Command::SendOwnedTcp {
            seed,
            len: LEN,
            chunk: SMALL,
            backend: backend.to_owned(),
            keys: Keys::Never,
        });
        let told = arrived(sending, seed, LEN, SMALL);
        assert!(told.starts_with(name), "{told}");
        let (requests, sends) = (count(&told, "requests"), count(&told, "sends"));
        assert!(requests <= sends / 4, "{told}");
        // Loopback traffic is copied on the way, and the kernel reports it.
        assert!(told.contains(" 0 in place"), "{told}");
        let notified = count(&told, "notified");
        match backend {
            "copy" => assert_eq!(notified, 0, "{told}"),
            _ => assert!(notified >= sends, "{told}"),
        }
    }
}

/// Sockets with TLS keys set before a sender is opened over them, and after: nothing is sent in
/// place, everything arrives by copies, and each buffer is returned.
pub(crate) fn encrypted(lab: &Lab) {
    const LEN: u64 = 1 << 20;
    loopback(lab);
    let ways = [
        (Keys::First, "uring", CHUNK),
        (Keys::First, "error queue", CHUNK),
        (Keys::First, "any", CHUNK),
        (Keys::First, "any", SMALL),
        (Keys::Then, "uring", CHUNK),
        (Keys::Then, "uring", SMALL),
        (Keys::Then, "error queue", CHUNK),
        (Keys::Then, "error queue", SMALL),
        (Keys::Then, "copy", SMALL),
    ];
    for (seed, (keys, backend, chunk)) in (0..).zip(ways) {
        let sending = lab.a.start(Command::SendOwnedTcp {
            seed,
            len: LEN,
            chunk,
            backend: backend.to_owned(),
            keys,
        });
        if keys == Keys::First && backend != "any" {
            let refused = sending.wait(STEP).expect_err("it encrypts").to_string();
            assert!(refused.contains("cannot be sent from"), "{refused}");
            continue;
        }
        let told = arrived(sending, seed, LEN, chunk);
        assert!(told.contains(" 0 in place"), "{told}");
        if keys == Keys::First {
            assert!(told.starts_with("Copy:"), "{told}");
        }
        if chunk == SMALL {
            // Buffers that waited when the kernel refused are submitted again, and gathered after
            // that.
            let (requests, sends) = (count(&told, "requests"), count(&told, "sends"));
            assert!(4 * requests <= sends, "{told}");
        }
    }
}

/// The guest's loopback connection.
fn loopback(lab: &Lab) {
    let argv = ["/bin/busybox", "ifconfig", "lo", "127.0.0.1", "up"];
    let argv = argv.map(str::to_owned).to_vec();
    let up = lab.a.run(Command::Run { argv });
    assert_eq!(up.bytes, 0, "{:?}", up.text);
}

/// Everything has arrived, and each buffer was sent and returned; checks the counters.
fn arrived(sending: Pending, seed: u64, len: u64, chunk: usize) -> String {
    let sent = sending.wait(STEP).expect("sent");
    let told = sent.text.expect("counts");
    assert_eq!((sent.errno, sent.bytes), (None, len), "{told}");
    let found = sent.sha256.expect("a digest");
    assert_eq!(found, expected(seed, len), "{told}");
    let buffers = len.div_ceil(chunk as u64);
    assert_eq!(count(&told, "sends"), buffers, "{told}");
    assert_eq!(count(&told, "given back"), buffers, "{told}");
    told
}

/// The value of a counter in the text.
fn count(told: &str, what: &str) -> u64 {
    let mut counts = told.split([':', ',']).map(str::trim);
    let found = counts.find_map(|one| one.strip_suffix(what)?.trim().parse().ok());
    found.unwrap_or_else(|| panic!("no number of {what}: {told}"))
}

/// Messages (SOCK_SEQPACKET) are refused by every back-end. A non-blocking send of a message that
/// exceeds the peer's room sends a part of it and reports that nothing was sent: with room for one
/// message and a part of the next, all back-ends tore messages within a few, io_uring with
/// IOSQE_ASYNC too.
pub(crate) fn messages_are_refused(lab: &Lab) {
    let process = Endpoint::builder()
        .attach_device(lab.process.vhost.clone())
        .expect("a place at the device");
    let port = port();
    let listener = process.listen_seqpacket(Port::new(port), 1);
    let listener = listener.expect("a port");
    let kind = Kind::SeqPacket;
    let made = lab.a.run(Command::Call(Call::Socket { kind }));
    let socket = made.socket.expect("a socket");
    let cid = process.cid().get();
    let connecting = lab
        .a
        .start(Command::Call(Call::Connect { socket, cid, port }));
    let (ours, _) = listener.accept_timeout(STEP).expect("the guest");
    assert_eq!(connecting.wait(STEP).expect("connected").errno, None);
    ours.set_read_timeout(Some(STEP)).expect("a socket");
    for backend in ["uring", "error queue", "copy"] {
        let sending = lab.a.start(Command::SendOwned {
            socket,
            seed: 1,
            len: 100,
            chunk: 100,
            backend: backend.to_owned(),
        });
        let refused = sending.wait(STEP).expect_err("a refusal").to_string();
        assert!(refused.contains("cannot be sent from"), "{refused}");
    }
    lab.a.close(socket);
    assert_eq!(ours.recv(&mut [0; 100]).expect("the end"), None);
}
