//! Owned buffers over a stock guest's own AF_VSOCK, and over TCP that its kernel encrypts, by the
//! library's zero-copy sender.

use std::thread;

use zerosock::Port;
use zerosock::vsock::Endpoint;
use zerosock_cli::vm::calls::{Call, Kind};
use zerosock_cli::vm::protocol::Command;

use crate::lab::{Lab, STEP, expected, port, read_exact};

const LEN: u64 = 8 << 20;
/// No multiple of a page: the last page of each buffer is shared with the next.
const CHUNK: usize = 100_000;

/// Over every back-end that the guest's kernel has: the bytes arrive while buffers are used again
/// as soon as they are free, and each is given back.
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

/// Sockets that encrypt when a sender is opened over them, and those that do only afterwards: nothing
/// can be sent from in place, everything arrives, by copies, and each buffer is given back.
pub(crate) fn encrypted(lab: &Lab) {
    const LEN: u64 = 1 << 20;
    let argv = ["/bin/busybox", "ifconfig", "lo", "127.0.0.1", "up"];
    let argv = argv.map(str::to_owned).to_vec();
    let up = lab.a.run(Command::Run { argv });
    assert_eq!(up.bytes, 0, "{:?}", up.text);
    let ways = [
        (true, "uring"),
        (true, "error queue"),
        (true, "any"),
        (false, "uring"),
        (false, "error queue"),
        (false, "copy"),
    ];
    for (seed, (keys_first, backend)) in (0..).zip(ways) {
        let sending = lab.a.start(Command::SendOwnedEncrypted {
            seed,
            len: LEN,
            chunk: CHUNK,
            backend: backend.to_owned(),
            keys_first,
        });
        if keys_first && backend != "any" {
            let refused = sending.wait(STEP).expect_err("it encrypts").to_string();
            assert!(refused.contains("cannot be sent from"), "{refused}");
            continue;
        }
        let sent = sending.wait(STEP).expect("sent");
        let told = sent.text.expect("counts");
        assert_eq!((sent.errno, sent.bytes), (None, LEN), "{backend}: {told}");
        let (found, expected) = (sent.sha256.expect("a digest"), expected(seed, LEN));
        assert_eq!(found, expected, "{backend}: {told}");
        let buffers = LEN.div_ceil(CHUNK as u64);
        assert!(told.contains(" 0 in place"), "{told}");
        assert!(told.ends_with(&format!("{buffers} given back")), "{told}");
        if keys_first {
            assert!(told.starts_with("Copy:"), "{told}");
        }
    }
}

/// Messages (SOCK_SEQPACKET) are refused by every back-end. Asked not to block, the kernel sends what
/// the peer has room for of a message, and says that it took nothing: with room for one message and a
/// part of the next, all of them tore within a few messages, io_uring with IOSQE_ASYNC, too.
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
