//! Many bytes, many connections.

use std::thread;

use zerosock_cli::vm::hybrid;
use zerosock_testkit::protocol::{Command, ShutdownDirection};

use crate::lab::{Lab, STEP, deadlines, expected, port, read_exact, read_to_end, write};

const LEN: u64 = 24 << 20;

pub(crate) fn to_host(lab: &Lab) {
    let (socket, stream) = lab.a.to_host();
    let sending = lab.a.send(socket, 1, LEN, &[65536]);
    let digest = read_exact(&stream, LEN);
    let sent = sending.wait(STEP).expect("sent");
    assert_eq!((sent.errno, sent.bytes), (None, LEN));
    assert_eq!(sent.sha256, Some(digest));
    lab.a.close(socket);
    assert_eq!(read_to_end(&stream).1, 0, "an end of file, nothing else");
}

pub(crate) fn to_guest(lab: &Lab) {
    let (socket, stream) = lab.a.to_guest();
    let receiving = lab.a.receive(socket, None);
    let digest = write(&stream, 2, LEN, &[65536]);
    drop(stream);
    let received = receiving.wait(STEP).expect("received");
    assert_eq!(
        (received.errno, received.bytes, received.end),
        (None, LEN, true)
    );
    assert_eq!(received.sha256, Some(digest));
    lab.a.close(socket);
}

pub(crate) fn both(lab: &Lab) {
    const LEN: u64 = 8 << 20;
    let (socket, stream) = lab.a.to_host();
    let receiving = lab.a.receive(socket, Some(LEN));
    let sending = lab.a.send(socket, 3, LEN, &[40_000, 65_536, 1]);
    thread::scope(|scope| {
        let writing = scope.spawn(|| write(&stream, 4, LEN, &[100_000, 4096, 1]));
        assert_eq!(read_exact(&stream, LEN), expected(3, LEN));
        let digest = writing.join().expect("written");
        assert_eq!(receiving.wait(STEP).expect("received").sha256, Some(digest));
    });
    assert_eq!(sending.wait(STEP).expect("sent").bytes, LEN);
    lab.a.close(socket);
}

/// A hundred connections each way, all open at the same time, each with different bytes.
pub(crate) fn hundred(lab: &Lab) {
    const EACH: u64 = 96 << 10;
    let vm = &lab.a;
    let out = port();
    let listener = vm.host_listener(out);
    let connecting: Vec<_> = (0..100)
        .map(|_| vm.start(Command::Connect { cid: 2, port: out }))
        .collect();
    let streams: Vec<_> = (0..100)
        .map(|_| hybrid::accept(&listener, STEP).expect("a connection of the guest"))
        .collect();
    let sockets: Vec<_> = connecting
        .into_iter()
        .map(|each| each.socket(STEP).expect("connected"))
        .collect();
    // The digest tells which stream belongs to which socket.
    let mut sending = Vec::new();
    for (seed, socket) in sockets.iter().enumerate() {
        sending.push(vm.send(*socket, seed as u64, EACH, &[10_000]));
    }
    let mut seen: Vec<String> = streams
        .iter()
        .map(|stream| {
            deadlines(stream);
            read_exact(stream, EACH)
        })
        .collect();
    let mut wanted: Vec<String> = (0..100).map(|seed| expected(seed, EACH)).collect();
    seen.sort();
    wanted.sort();
    assert_eq!(seen, wanted);
    sending
        .into_iter()
        .for_each(|each| assert_eq!(each.wait(STEP).expect("sent").errno, None));

    let into = port();
    let listener = vm.listen(into);
    let accepting: Vec<_> = (0..100)
        .map(|_| vm.start(Command::Accept { socket: listener }))
        .collect();
    let host: Vec<_> = (0..100)
        .map(|_| vm.connect(into).expect("connected"))
        .collect();
    let guest: Vec<_> = accepting
        .into_iter()
        .map(|each| each.socket(STEP).expect("accepted"))
        .collect();
    let receiving: Vec<_> = guest
        .iter()
        .map(|socket| vm.receive(*socket, Some(EACH)))
        .collect();
    thread::scope(|scope| {
        for (seed, stream) in host.iter().enumerate() {
            scope.spawn(move || write(stream, seed as u64, EACH, &[5_000]));
        }
    });
    let mut seen: Vec<String> = receiving
        .into_iter()
        .map(|each| each.wait(STEP).expect("received").sha256.expect("a digest"))
        .collect();
    seen.sort();
    assert_eq!(seen, wanted);
    for socket in sockets.iter().chain(&guest) {
        vm.run(Command::Shutdown {
            socket: *socket,
            how: ShutdownDirection::Both,
        });
        vm.close(*socket);
    }
    vm.close(listener);
    for stream in streams.iter().chain(&host) {
        assert_eq!(read_to_end(stream).1, 0);
    }
}
