//! Half-closed connections: SHUT_WR gives the other side the rest and then the end of the
//! stream, SHUT_RD gives it EPIPE; the other direction goes on.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use zerosock_testkit::protocol::{Command, ShutdownDirection, Socket};

use crate::lab::{Lab, STEP, Vm, expected, port, read_exact, read_to_end, write};

const LEN: u64 = 700_001;
/// Fits the buffers between the two, so that it is sent without a reader.
const UNREAD: u64 = 150_001;
/// More than all buffers between the two.
const PLENTY: u64 = 32 << 20;

/// The same for connections that the guest made and that the host made.
fn both_kinds(lab: &Lab, scenario: fn(&Vm, Socket, UnixStream)) {
    let (socket, stream) = lab.a.to_host();
    scenario(&lab.a, socket, stream);
    let (socket, stream) = lab.a.to_guest();
    scenario(&lab.a, socket, stream);
}

pub(crate) fn guest_shuts_sending(lab: &Lab) {
    both_kinds(lab, |vm, socket, stream| {
        let sent = vm
            .send(socket, 10, UNREAD, &[65536])
            .wait(STEP)
            .expect("sent");
        assert_eq!((sent.errno, sent.bytes), (None, UNREAD));
        vm.run(Command::Shutdown {
            socket,
            how: ShutdownDirection::Send,
        });
        let rest = read_to_end(&stream);
        assert_eq!(
            rest,
            (expected(10, UNREAD), UNREAD),
            "the rest, then the end"
        );

        let receiving = vm.receive(socket, None);
        let digest = write(&stream, 11, LEN, &[10_000]);
        drop(stream);
        let received = receiving.wait(STEP).expect("received");
        assert_eq!(received.sha256, Some(digest), "the other direction goes on");
        assert!(received.end);

        let sent = vm.send(socket, 12, 1, &[1]).wait(STEP).expect("tried");
        assert_eq!(sent.errno.as_deref(), Some("EPIPE"));
        vm.close(socket);
    });
}

pub(crate) fn host_shuts_sending(lab: &Lab) {
    both_kinds(lab, |vm, socket, stream| {
        let digest = write(&stream, 20, UNREAD, &[9_000]);
        stream.shutdown(Shutdown::Write).expect("shut down");
        let received = vm.receive(socket, None).wait(STEP).expect("received");
        assert!(received.end, "the rest, then the end");
        assert_eq!(received.sha256, Some(digest));
        let sending = vm.send(socket, 21, LEN, &[50_000]);
        assert_eq!(
            read_exact(&stream, LEN),
            expected(21, LEN),
            "the other direction goes on"
        );
        assert_eq!(sending.wait(STEP).expect("sent").errno, None);
        vm.close(socket);
        assert_eq!(read_to_end(&stream).1, 0);
    });
}

pub(crate) fn guest_shuts_receiving(lab: &Lab) {
    both_kinds(lab, |vm, socket, mut stream| {
        vm.run(Command::Shutdown {
            socket,
            how: ShutdownDirection::Receive,
        });
        let chunk = [7; 65536];
        let mut written = 0;
        let error = loop {
            match stream.write(&chunk) {
                Ok(count) => written += count as u64,
                Err(error) => break error,
            }
            assert!(written < PLENTY, "the host can still write");
        };
        assert!(
            matches!(
                error.kind(),
                ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
            ),
            "{error}"
        );
        let sending = vm.send(socket, 30, LEN, &[65536]);
        assert_eq!(
            read_exact(&stream, LEN),
            expected(30, LEN),
            "the other direction goes on"
        );
        assert_eq!(sending.wait(STEP).expect("sent").errno, None);
        vm.close(socket);
        assert!(matches!(stream.read(&mut [0]), Ok(0)));
    });
}

pub(crate) fn host_shuts_receiving(lab: &Lab) {
    both_kinds(lab, |vm, socket, stream| {
        stream.shutdown(Shutdown::Read).expect("shut down");
        let sent = vm
            .send(socket, 40, PLENTY, &[65536])
            .wait(STEP)
            .expect("tried");
        assert_eq!(sent.errno.as_deref(), Some("EPIPE"));
        let receiving = vm.receive(socket, None);
        let digest = write(&stream, 41, LEN, &[65536]);
        drop(stream);
        let received = receiving.wait(STEP).expect("received");
        assert_eq!(received.sha256, Some(digest), "the other direction goes on");
        vm.close(socket);
    });
}

/// Bytes sent right before a close all arrive.
pub(crate) fn nothing_is_lost(lab: &Lab) {
    let vm = &lab.a;
    for (seed, len) in [
        (50, 1),
        (51, 4096),
        (52, 65_537),
        (53, 200_000),
        (54, 3_000_000),
    ] {
        let (socket, stream) = vm.to_host();
        let sending = vm.send(socket, seed, len, &[65536]);
        let reading = std::thread::spawn(move || read_to_end(&stream));
        assert_eq!(sending.wait(STEP).expect("sent").bytes, len);
        vm.close(socket);
        assert_eq!(reading.join().expect("read"), (expected(seed, len), len));

        let port = port();
        let listener = vm.listen(port);
        let accepting = vm.start(Command::Accept { socket: listener });
        let stream = vm.connect(port).expect("connected");
        let socket = accepting.socket(STEP).expect("accepted");
        let receiving = vm.receive(socket, None);
        let digest = write(&stream, seed, len, &[30_000]);
        drop(stream);
        let received = receiving.wait(STEP).expect("received");
        assert_eq!((received.sha256, received.bytes), (Some(digest), len));
        vm.close(socket);
        vm.close(listener);
    }
}
