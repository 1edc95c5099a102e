//! What connects by a rule: attached processes, by name and by any, and guests with several queue pairs.

use std::io::{ErrorKind, Read, Write};
use std::thread;
use std::time::Duration;

use zerosock::access::{AccessList, Party, Ports, Rule, Verdict};
use zerosock::vsock::Endpoint;

use super::common::{PATIENCE, assert_bytes, bytes, eventually, host};
use super::{Lab, accept, rule, tcp_server};

#[test]
fn only_the_named_process_is_forwarded() {
    let (listener, target) = tcp_server();
    let mut named = rule(1, &target);
    named.from = vec![Party::Name("web".parse().unwrap())];
    let lab = Lab::with(0, |config| config.forward = vec![named]);
    let web = lab.process(|process| process.name("web"));
    let other = lab.process(|process| process);
    let stream = web.connect(host(1)).unwrap();
    (&stream).write_all(b"hello").unwrap();
    let mut got = [0; 5];
    accept(&listener).read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
    let error = other.connect(host(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn the_access_list_goes_before_rules_in_both_directions() {
    let (_listener, target) = tcp_server();
    let (socket, on) = super::inward::tcp_listener();
    let deny = |from, to| Rule {
        name: None,
        verdict: Verdict::Deny,
        from: vec![from],
        to: vec![to],
        ports: Ports::all(),
    };
    let lab = Lab::with(1, |config| {
        config.forward = vec![rule(1, target)];
        config.listen = vec![super::inward::listening(on, socket, "3:22")];
        config.access =
            AccessList::new([deny(Party::Any, Party::Host), deny(Party::Host, Party::Any)]);
    });
    let mut guest = lab.guest();
    guest.listen(zerosock::Port::new(22), 8).unwrap();
    super::refused(&mut guest, 1);
    assert_eq!((lab.rule(0).opened, lab.rule(0).refused), (0, 0));
    let mut client = std::net::TcpStream::connect(on).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let error = client.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

/// A connection keeps its rule, its counters and its idle time-out when it moves to another queue pair,
/// whose worker has a clock of its own.
#[test]
fn a_forwarded_connection_moves_between_queue_pairs() {
    const LEN: usize = 500_000;
    let (listener, target) = tcp_server();
    let mut idle = rule(1, target);
    idle.idle_timeout = Some(Duration::from_secs(2));
    let lab = Lab::with(1, |config| {
        (config.workers, config.queue_pairs) = (2, 2);
        config.forward = vec![idle];
    });
    let guest = Endpoint::builder()
        .queue_pairs(2)
        .attach_device(&lab.vms[0].socket)
        .unwrap();
    let stream = guest.connect(host(1)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut server = accept(&listener);
    let echo = thread::spawn(move || {
        let mut got = vec![0; LEN];
        for _ in 0..6 {
            server.read_exact(&mut got).unwrap();
            server.write_all(&got).unwrap();
        }
        server
    });
    for round in 0..6 {
        let sent = bytes(round, LEN);
        thread::scope(|scope| {
            scope.spawn(|| (&stream).write_all(&sent).unwrap());
            let mut got = vec![0; LEN];
            (&stream).read_exact(&mut got).unwrap();
            assert_bytes(&got, &sent);
        });
        let other = 1 - stream.queue_pair();
        stream.move_to_queue_pair(other).unwrap();
        assert_eq!(stream.queue_pair(), other);
    }
    let mut server = echo.join().unwrap();
    assert_eq!((lab.rule(0).active, lab.rule(0).opened), (1, 1));
    // Idle from now on.
    let error = server.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    eventually("the connection counted out", || lab.rule(0).active == 0);
    let moved = 6 * LEN as u64;
    assert_eq!(
        (lab.rule(0).bytes_sent, lab.rule(0).bytes_received),
        (moved, moved)
    );
}
