//! A lingering TCP socket, sent in every possible way.

use super::attack::{expect_isolation, hand_over};
use super::lingering::{lingering_socket, queued_lingering_socket};
use super::raw::{
    GET_FEATURES, SET_BACKEND_REQ_FD, SET_VRING_CALL, SET_VRING_ERR, SET_VRING_KICK, Way,
};

fn attack_with_socket(way: Way) {
    expect_isolation(|daemon| hand_over(daemon, way, lingering_socket()));
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

/// An ordinary receive call skips an out-of-band byte, and the kernel closes its descriptors there.
#[test]
fn lingering_socket_with_an_out_of_band_byte_holds_only_the_reaper() {
    attack_with_socket(Way::WithUrgentByte);
}

#[test]
fn lingering_socket_queued_in_a_passed_socket_holds_only_the_reaper() {
    let way = Way::With(SET_VRING_CALL);
    expect_isolation(|daemon| hand_over(daemon, way, queued_lingering_socket()));
}
