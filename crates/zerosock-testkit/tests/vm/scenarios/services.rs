//! Host services: processes of this machine with CID 2 for a guest, each at a port of its own.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::thread;

use zerosock::vsock::{Endpoint, Stream};
use zerosock::{Address, Cid, Port};
use zerosock_cli::vm::pattern::{Pattern, sha256};
use zerosock_testkit::protocol::Command;

use crate::lab::{AT_ONCE, Lab, STEP, expected, port, read_exact, write};

const LEN: u64 = 4 << 20;

fn attach(lab: &Lab, claims: &[u32]) -> Endpoint {
    let ports = claims.iter().copied().map(Port::new);
    let builder = Endpoint::builder().ports(ports);
    builder.attach_as_host(&lab.attach).expect("a service")
}

/// Sends to the end while it receives the given number of bytes; returns their digest.
fn exchange(stream: &Stream, seed: u64) -> String {
    thread::scope(|scope| {
        scope.spawn(|| {
            let data = Pattern::bytes(seed, LEN as usize);
            (&mut &*stream).write_all(&data).expect("written");
            stream.shutdown(Shutdown::Write).expect("shut");
        });
        let mut all = vec![0; LEN as usize];
        (&mut &*stream).read_exact(&mut all).expect("all bytes");
        sha256(&all)
    })
}

/// A stock guest uses two services and the hybrid socket at CID 2, at once and in both directions;
/// a service connects to it; a service that dies is noticed, and its port belongs to the hybrid
/// socket again.
pub(crate) fn two_and_the_hybrid_socket(lab: &Lab) {
    if std::env::var_os("ZEROSOCK_DEVICE").is_some() {
        println!("  the other device has no services");
        return;
    }
    let guest = &lab.a;
    let ports = [port(), port()];
    let services = ports.map(|port| attach(lab, &[port]));
    let (by_socket, mut stream) = guest.to_host();
    let mut open = Vec::new();
    for (service, port) in services.iter().zip(ports) {
        let listener = service.listen(Port::new(port), 4).expect("listens");
        let connecting = guest.start(Command::Connect { cid: 2, port });
        let (accepted, peer) = listener.accept_timeout(STEP).expect("accepted");
        assert_eq!(peer.cid, Cid::new(guest.endpoint.cid));
        assert_eq!(
            accepted.local_addr(),
            Address::new(Cid::HOST, Port::new(port))
        );
        open.push((connecting.socket(STEP).expect("connected"), accepted));
    }
    let mut under_way = Vec::new();
    for (n, &(socket, _)) in (0..).zip(&open) {
        let receiving = guest.receive(socket, Some(LEN));
        under_way.push((receiving, guest.send(socket, 300 + n, LEN, &[65536])));
    }
    let by_socket_in = guest.receive(by_socket, Some(LEN));
    let by_socket_out = guest.send(by_socket, 302, LEN, &[65536]);
    thread::scope(|scope| {
        let exchanging: Vec<_> = (0..)
            .zip(&open)
            .map(|(n, (_, stream))| scope.spawn(move || exchange(stream, 310 + n)))
            .collect();
        let writing = scope.spawn(|| write(&stream, 312, LEN, &[65536]));
        assert_eq!(read_exact(&stream, LEN), expected(302, LEN));
        writing.join().expect("written");
        for (n, exchanged) in (0..).zip(exchanging) {
            assert_eq!(exchanged.join().expect("exchanged"), expected(300 + n, LEN));
        }
    });
    for (n, (receiving, sending)) in (0..).zip(under_way) {
        let received = receiving.wait(STEP).expect("received").sha256;
        assert_eq!(received, Some(expected(310 + n, LEN)));
        assert_eq!(sending.wait(STEP).expect("sent").errno, None);
    }
    let received = by_socket_in.wait(STEP).expect("received").sha256;
    assert_eq!(received, Some(expected(312, LEN)));
    assert_eq!(by_socket_out.wait(STEP).expect("sent").errno, None);

    // A service connects to the guest, from the host's address.
    let called = port();
    let listener = guest.listen(called);
    let accepting = guest.start(Command::Accept { socket: listener });
    let there = Address::new(Cid::new(guest.endpoint.cid), Port::new(called));
    let calling = services[0].connect(there).expect("connected to the guest");
    let accepted = accepting.wait(STEP).expect("accepted");
    assert_eq!(accepted.peer.map(|(cid, _)| cid), Some(2));
    let socket = accepted.socket.expect("a socket");
    let receiving = guest.receive(socket, Some(LEN));
    let sending = guest.send(socket, 320, LEN, &[65536]);
    assert_eq!(exchange(&calling, 321), expected(320, LEN));
    let received = receiving.wait(STEP).expect("received").sha256;
    assert_eq!(received, Some(expected(321, LEN)));
    assert_eq!(sending.wait(STEP).expect("sent").errno, None);
    guest.close(socket);
    guest.close(listener);

    // One service ends: its port is unclaimed, then the hybrid socket's; the other one stays.
    let [first, second] = services;
    let [(at_first, _), (at_second, stays)] = <[_; 2]>::try_from(open).expect("two");
    guest.close(at_first);
    drop((first, calling));
    let refused = guest.start(Command::Connect {
        cid: 2,
        port: ports[0],
    });
    let refused = refused.wait(AT_ONCE * 5).expect("an answer");
    assert_eq!(refused.errno.as_deref(), Some("ECONNRESET"));
    let taken_over = guest.host_listener(ports[0]);
    let connecting = guest.start(Command::Connect {
        cid: 2,
        port: ports[0],
    });
    zerosock_cli::vm::hybrid::accept(&taken_over, STEP).expect("by the hybrid socket");
    guest.close(connecting.socket(STEP).expect("connected"));
    guest.close(at_second);
    drop((stays, second));
    guest.close(by_socket);
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).expect("the end");
    assert!(rest.is_empty());
}
