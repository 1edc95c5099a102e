//! Limits: connections of a rule, idle time, targets that stop reading, and neighbours meanwhile.

use std::io::{Read, Write};
use std::thread;
use std::time::Duration;

use crate::common::driver::{RecvError, SendError};

use super::{ForwardingDaemon, accept, refused, rule, tcp_server};
use crate::common::{assert_bytes, bytes, deadline, eventually_with, host};

#[test]
fn connections_over_the_limit_of_a_rule_are_refused() {
    let (listener, target) = tcp_server();
    let mut limited = rule(1, target);
    limited.max_connections = Some(2);
    let lab = ForwardingDaemon::with(2, |config| config.forward = vec![limited]);
    let (mut one, mut two) = (lab.guest_of(0), lab.guest_of(1));
    let first = one.wait_connect(host(1), deadline()).unwrap();
    let _a = accept(&listener);
    two.wait_connect(host(1), deadline()).unwrap();
    let _b = accept(&listener);
    refused(&mut one, 1);
    assert_eq!((lab.rule(0).active, lab.rule(0).refused), (2, 1));
    one.abort(first);
    eventually_with(&mut one, "a free place", |_| lab.rule(0).active == 1);
    one.wait_connect(host(1), deadline()).unwrap();
}

#[test]
fn an_idle_connection_is_reset_and_a_busy_one_is_not() {
    let (listener, target) = tcp_server();
    let mut idle = rule(1, target);
    idle.idle_timeout = Some(Duration::from_millis(400));
    let lab = ForwardingDaemon::new(vec![idle]);
    let mut guest = lab.guest();
    let busy = guest.wait_connect(host(1), deadline()).unwrap();
    let mut at_busy = accept(&listener);
    let quiet = guest.wait_connect(host(1), deadline()).unwrap();
    let mut at_quiet = accept(&listener);
    let mut received = 0;
    eventually_with(&mut guest, "the idle connection reset", |guest| {
        at_busy.write_all(b"x").unwrap();
        let mut part = [0; 100];
        received += guest.recv(busy, &mut part).unwrap_or(0);
        matches!(guest.recv(quiet, &mut part), Err(RecvError::Reset))
    });
    assert!(received > 0);
    let error = at_quiet.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    // The busy one still works.
    guest.wait_send(busy, b"still here", deadline()).unwrap();
    let mut got = [0; 10];
    at_busy.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"still here");
    assert_eq!(lab.rule(0).active, 1);
}

#[test]
fn a_target_that_stops_reading_stalls_only_its_own_connection() {
    const LEN: usize = 4 << 20;
    let (listener, target) = tcp_server();
    let lab = ForwardingDaemon::new(vec![rule(1, target)]);
    let mut guest = lab.guest();
    let stalled = guest.wait_connect(host(1), deadline()).unwrap();
    let mut at_stalled = accept(&listener);
    let mut sent = 0;
    let all = bytes(1, 32 << 20);
    // Until the socket, its peer and the credit of the connection are full.
    let mut quiet_since = std::time::Instant::now();
    eventually_with(&mut guest, "back-pressure", |guest| {
        match guest.send(stalled, &all[sent..]) {
            Ok(more) => {
                sent += more;
                quiet_since = std::time::Instant::now();
            }
            Err(SendError::WouldBlock) => {}
            Err(error) => panic!("{error}"),
        }
        assert!(sent < all.len(), "no back-pressure");
        quiet_since.elapsed() > Duration::from_millis(300)
    });
    // The device holds at most the credit. The sum of all copies can be a few times that, because
    // buffers of sockets grow while they fill.
    let copied = lab.stats().copied_bytes;
    assert!(copied <= 8 * 262_144, "{copied} bytes copied");
    // A neighbour of the same guest moves on.
    let other = guest.wait_connect(host(1), deadline()).unwrap();
    let mut at_other = accept(&listener);
    let reader = thread::spawn(move || {
        let mut got = vec![0; LEN];
        at_other.read_exact(&mut got).unwrap();
        got
    });
    let expected = bytes(2, LEN);
    guest.wait_send(other, &expected, deadline()).unwrap();
    eventually_with(&mut guest, "the neighbour's bytes", |_| {
        reader.is_finished()
    });
    assert_bytes(&reader.join().unwrap(), &expected);
    // When the target reads again, everything arrives.
    let reader = thread::spawn(move || {
        let mut got = vec![0; sent];
        at_stalled.read_exact(&mut got).unwrap();
        got
    });
    eventually_with(&mut guest, "all read", |_| reader.is_finished());
    assert_bytes(&reader.join().unwrap(), &all[..sent]);
}

#[test]
fn a_guest_that_stops_reading_stalls_the_target() {
    let (listener, target) = tcp_server();
    let lab = ForwardingDaemon::new(vec![rule(1, target)]);
    let mut guest = lab.guest();
    let stream = guest.wait_connect(host(1), deadline()).unwrap();
    let mut server = accept(&listener);
    server
        .set_write_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    let all = bytes(4, 32 << 20);
    let writer = thread::spawn(move || {
        let mut sent = 0;
        while sent < all.len() {
            match server.write(&all[sent..]) {
                Ok(more) => sent += more,
                Err(_) => break,
            }
        }
        assert!(sent < all.len(), "no back-pressure");
        (server, all, sent)
    });
    eventually_with(&mut guest, "a stalled target", |_| writer.is_finished());
    let (server, all, sent) = writer.join().unwrap();
    drop(server);
    let mut got = Vec::new();
    guest
        .wait_recv_to_end(stream, &mut got, deadline())
        .unwrap();
    assert_bytes(&got, &all[..sent]);
    assert_eq!(lab.stats().copied_bytes, 0);
}

#[test]
fn connects_and_ends_leave_nothing_behind() {
    let (listener, target) = tcp_server();
    let lab = ForwardingDaemon::new(vec![rule(1, target)]);
    let mut guest = lab.guest();
    let accepting = thread::spawn(move || {
        for _ in 0..300 {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.write_all(b"x");
        }
    });
    for round in 0..300 {
        let stream = guest.wait_connect(host(1), deadline()).unwrap();
        match round % 3 {
            0 => guest.abort(stream),
            1 => guest.close(stream),
            _ => {
                let mut got = Vec::new();
                guest
                    .wait_recv_to_end(stream, &mut got, deadline())
                    .unwrap();
                guest.close(stream);
            }
        }
    }
    accepting.join().unwrap();
    eventually_with(&mut guest, "all counted out", |guest| {
        let stats = lab.stats();
        guest.connections() == 0
            && lab.rule(0).active == 0
            && (stats.bridges_now, stats.timers_now) == (0, 0)
    });
    assert_eq!(lab.rule(0).opened, 300);
}
