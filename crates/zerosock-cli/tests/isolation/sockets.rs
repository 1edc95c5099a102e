//! A TCP socket that lingers, handed over in every way that there is.

use std::io::IoSlice;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use zerosock_sys::fd_passing;

use super::attack::attack;
use super::lingering::lingering_socket;
use super::raw::{
    GET_FEATURES, SET_BACKEND_REQ_FD, SET_VRING_CALL, SET_VRING_ERR, SET_VRING_KICK, Way,
};

fn attack_with_socket(way: Way) {
    attack(way, |_| lingering_socket());
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
    attack(Way::With(SET_VRING_CALL), |_| {
        let (socket, receiver) = lingering_socket();
        let (outer, sender) = UnixStream::pair().unwrap();
        fd_passing::send(&sender, &[IoSlice::new(b"x")], &[socket.as_fd()]).unwrap();
        (outer.into(), (receiver, sender))
    });
}
