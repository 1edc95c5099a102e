//! Half-closes and resets, in both directions, for both kinds of rules.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::Duration;

use crate::common::driver::{Directions, Driver, RecvError, SendError, StreamId};
use zerosock::Port;

use super::inward::{listening, tcp_listener};
use super::{ForwardingDaemon, accept, rule, tcp_server, with_time_outs};
use crate::common::{deadline, eventually_with, host};

/// A connection: whether the guest has connected, the guest's end, and the other one.
struct Joined {
    lab: ForwardingDaemon,
    guest: Driver,
    stream: StreamId,
    outside: TcpStream,
}

fn outward() -> Joined {
    let (listener, target) = tcp_server();
    let lab = ForwardingDaemon::new(vec![rule(1, target)]);
    let mut guest = lab.guest();
    let stream = guest.wait_connect(host(1), deadline()).unwrap();
    let outside = accept(&listener);
    Joined {
        lab,
        guest,
        stream,
        outside,
    }
}

fn inward() -> Joined {
    let (socket, on) = tcp_listener();
    let to = on;
    let lab = ForwardingDaemon::with(1, |config| {
        config.listen = vec![listening(on, socket, "3:1")]
    });
    let mut guest = lab.guest();
    guest.listen(Port::new(1), 8).unwrap();
    let outside = with_time_outs(TcpStream::connect(to).unwrap());
    let stream = guest.wait_accept(Port::new(1), deadline()).unwrap();
    Joined {
        lab,
        guest,
        stream,
        outside,
    }
}

/// Makes the close of the socket a reset.
fn abort(stream: TcpStream) {
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
}

fn for_both(test: impl Fn(Joined)) {
    test(outward());
    test(inward());
}

#[test]
fn the_guests_half_close_leaves_the_other_direction_open() {
    for_both(|joined| {
        let Joined {
            mut guest,
            stream,
            mut outside,
            ..
        } = joined;
        guest.wait_send(stream, b"question", deadline()).unwrap();
        guest.shutdown(stream, Directions::SEND);
        let answer = thread::spawn(move || {
            let mut question = Vec::new();
            outside.read_to_end(&mut question).unwrap();
            assert_eq!(question, b"question");
            outside.write_all(b"answer").unwrap();
        });
        let mut got = Vec::new();
        guest
            .wait_recv_to_end(stream, &mut got, deadline())
            .unwrap();
        assert_eq!(got, b"answer");
        answer.join().unwrap();
    });
}

#[test]
fn the_other_half_close_leaves_the_guests_direction_open() {
    for_both(|joined| {
        let Joined {
            mut guest,
            stream,
            mut outside,
            ..
        } = joined;
        outside.write_all(b"question").unwrap();
        outside.shutdown(Shutdown::Write).unwrap();
        let mut got = Vec::new();
        guest
            .wait_recv_to_end(stream, &mut got, deadline())
            .unwrap();
        assert_eq!(got, b"question");
        guest.wait_send(stream, b"answer", deadline()).unwrap();
        guest.shutdown(stream, Directions::SEND);
        let reader = thread::spawn(move || {
            let mut answer = Vec::new();
            outside.read_to_end(&mut answer).unwrap();
            answer
        });
        eventually_with(&mut guest, "the answer read", |_| reader.is_finished());
        assert_eq!(reader.join().unwrap(), b"answer");
    });
}

#[test]
fn a_reset_from_outside_resets_the_guest() {
    for_both(|joined| {
        let Joined {
            lab,
            mut guest,
            stream,
            mut outside,
        } = joined;
        outside.write_all(b"last words").unwrap();
        let mut got = [0; 10];
        guest.wait_recv_exact(stream, &mut got, deadline()).unwrap();
        abort(outside);
        eventually_with(&mut guest, "a reset", |guest| {
            matches!(guest.recv(stream, &mut [0; 1]), Err(RecvError::Reset))
        });
        assert!(matches!(guest.send(stream, b"x"), Err(SendError::Reset)));
        lab.until_none_is_left();
    });
}

#[test]
fn a_reset_from_outside_while_the_guest_sends_follows_the_bytes_before_it() {
    for_both(|joined| {
        let Joined {
            lab,
            mut guest,
            stream,
            mut outside,
        } = joined;
        // Enough that the socket is full.
        let busy = vec![7; 8 << 20];
        let mut sent = 0;
        eventually_with(&mut guest, "a full socket", |guest| {
            match guest.send(stream, &busy[sent..]) {
                Ok(more) => sent += more,
                Err(SendError::WouldBlock) => return true,
                Err(error) => panic!("{error}"),
            }
            sent > 6 << 20
        });
        outside.write_all(b"no").unwrap();
        let mut got = [0; 2];
        guest.wait_recv_exact(stream, &mut got, deadline()).unwrap();
        assert_eq!(&got, b"no");
        abort(outside);
        eventually_with(&mut guest, "a reset", |guest| {
            matches!(guest.recv(stream, &mut [0; 1]), Err(RecvError::Reset))
        });
        lab.until_none_is_left();
    });
}

#[test]
fn a_reset_after_the_end_of_the_stream_resets_the_guest() {
    for_both(|joined| {
        let Joined {
            lab,
            mut guest,
            stream,
            outside,
        } = joined;
        outside.shutdown(Shutdown::Write).unwrap();
        let mut got = Vec::new();
        guest
            .wait_recv_to_end(stream, &mut got, deadline())
            .unwrap();
        abort(outside);
        eventually_with(&mut guest, "a failed send", |guest| {
            matches!(guest.send(stream, b"x"), Err(SendError::Reset))
        });
        lab.until_none_is_left();
    });
}

#[test]
fn a_reset_of_the_guest_resets_the_other_side() {
    for_both(|joined| {
        let Joined {
            lab,
            mut guest,
            stream,
            mut outside,
        } = joined;
        guest.abort(stream);
        guest.drive().unwrap();
        let error = outside.read(&mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        lab.until_none_is_left();
    });
}

#[test]
fn a_guest_that_vanishes_resets_the_other_side() {
    for_both(|joined| {
        let Joined {
            lab,
            guest,
            mut outside,
            ..
        } = joined;
        drop(guest);
        let error = outside.read(&mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        lab.until_none_is_left();
    });
}
