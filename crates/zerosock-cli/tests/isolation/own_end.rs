//! A front-end that sends its own end of the connection and dies: the connection must end, and the
//! device accept the next one.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use zerosock_sys::fd_passing;

use super::daemon::{ATTACKER, Daemon};
use super::neighbour::Neighbour;
use super::raw::WAYS;

#[test]
fn a_front_end_that_sent_its_own_socket_over_it_is_disconnected() {
    let daemon = Daemon::start(&[]);
    let mut neighbour = Neighbour::new(&daemon);
    for way in WAYS {
        let frontend = daemon.frontend(ATTACKER);
        let own = OwnedFd::from(frontend.0.try_clone().unwrap());
        eprintln!("{way:?}");
        drop(frontend.pass(way, vec![own]));
        let next = daemon.frontend(ATTACKER);
        assert!(next.ask_features().is_some());
        neighbour.round_trip(0);
    }
}

#[test]
fn a_front_end_that_queued_its_own_socket_in_another_one_is_disconnected() {
    let daemon = Daemon::start(&[]);
    for way in WAYS {
        let frontend = daemon.frontend(ATTACKER);
        let (outer, sender) = UnixStream::pair().unwrap();
        fd_passing::send(&sender, &[IoSlice::new(b"x")], &[frontend.0.as_fd()]).unwrap();
        eprintln!("{way:?}");
        drop(frontend.pass(way, vec![outer.into()]));
        // Keeps the queued messages alive while the daemon has the other end.
        let next = daemon.frontend(ATTACKER);
        assert!(next.ask_features().is_some());
        drop(sender);
    }
}
