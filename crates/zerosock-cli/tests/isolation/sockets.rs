//! A TCP socket that lingers, handed over in every way that there is.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use zerosock_sys::fd_passing;

use super::daemon::{ATTACKER, Daemon};
use super::lingering::lingering_socket;
use super::neighbour::Neighbour;
use super::raw::{
    GET_FEATURES, SET_BACKEND_REQ_FD, SET_VRING_CALL, SET_VRING_ERR, SET_VRING_KICK, Way,
};
use super::threads::{Held, REAPER};

/// A front-end hands `fd` over, of which nobody else has a copy; the neighbour goes on. `release`
/// ends the wait.
fn attack(way: Way, fd: OwnedFd, release: impl FnOnce()) {
    let daemon = Daemon::start(&[]);
    let mut neighbour = Neighbour::new(&daemon);
    neighbour.round_trip(1);
    let attacker = daemon.pass(daemon.frontend(ATTACKER), way, vec![fd]);
    let held = Held::wait(daemon.pid(), REAPER);
    neighbour.goes_on_while(&daemon, &held);
    drop(attacker);
    // The attacker's place is free as well.
    assert!(daemon.frontend(ATTACKER).ask_features().is_some());
    held.check();
    release();
    held.wait_for_end();
    neighbour.round_trip(2);
}

fn attack_with_socket(way: Way) {
    let (socket, receiver) = lingering_socket();
    attack(way, socket, || drop(receiver));
}

#[test]
fn lingering_socket_as_call_descriptor_holds_only_the_reaper() {
    attack_with_socket(Way::With(SET_VRING_CALL));
}

#[test]
fn lingering_socket_as_kick_descriptor_holds_only_the_reaper() {
    attack_with_socket(Way::With(SET_VRING_KICK));
}

#[test]
fn lingering_socket_as_err_descriptor_holds_only_the_reaper() {
    attack_with_socket(Way::With(SET_VRING_ERR));
}

#[test]
fn lingering_socket_as_backend_channel_holds_only_the_reaper() {
    attack_with_socket(Way::With(SET_BACKEND_REQ_FD));
}

#[test]
fn lingering_socket_beside_get_features_holds_only_the_reaper() {
    attack_with_socket(Way::With(GET_FEATURES));
}

#[test]
fn lingering_socket_in_half_a_message_holds_only_the_reaper() {
    attack_with_socket(Way::InHalfMessage);
}

/// The kernel closes it with the socket in whose queue it lies.
#[test]
fn lingering_socket_queued_in_a_passed_socket_holds_only_the_reaper() {
    let (socket, receiver) = lingering_socket();
    let (outer, sender) = UnixStream::pair().unwrap();
    fd_passing::send(&sender, &[IoSlice::new(b"x")], &[socket.as_fd()]).unwrap();
    drop(socket);
    attack(Way::With(SET_VRING_CALL), outer.into(), || drop(receiver));
    drop(sender);
}
