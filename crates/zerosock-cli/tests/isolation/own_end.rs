//! A front-end that sends its own end of the connection and dies: the connection must end, and the
//! device accept the next one.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, recv};
use zerosock_sys::fd_passing;

use super::daemon::{ATTACKER, Daemon};
use super::neighbour::Neighbour;
use super::raw::{WAYS, send_urgent};

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

/// The descriptors of an out-of-band byte stay in the socket's queue when the byte is received. The
/// queue then has no bytes.
#[test]
fn place_of_a_front_end_that_left_its_own_end_behind_a_received_byte_is_free_again() {
    let daemon = Daemon::start(&[]);
    for way in WAYS {
        let frontend = daemon.frontend(ATTACKER);
        let (outer, sender) = UnixStream::pair().unwrap();
        send_urgent(&sender, &[frontend.0.as_fd()]).unwrap();
        if recv(&outer, &mut [0; 1], RecvFlags::OOB).is_err() {
            return println!("SKIPPED: no MSG_OOB for Unix sockets (CONFIG_AF_UNIX_OOB)");
        }
        eprintln!("{way:?}");
        drop(frontend.pass(way, vec![outer.into()]));
        // Keeps the queued message alive while the daemon has the other end.
        let next = daemon.frontend(ATTACKER);
        assert!(next.ask_features().is_some());
        drop(sender);
    }
}
