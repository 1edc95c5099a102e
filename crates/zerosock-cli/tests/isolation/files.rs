//! A file on FUSE, whose server never answers: close(2) waits for ever, and so would fstat(2) and a
//! page fault.

use super::attack::attack;
use super::fuse::FuseServer;
use super::raw::{GET_FEATURES, SET_MEM_TABLE, SET_VRING_CALL, SET_VRING_KICK, Way};

fn attack_with_file(test: &str, way: Way) {
    match FuseServer::start() {
        Ok(file) => attack(way, || file),
        Err(error) => println!("SKIPPED {test}: no FUSE: {error}"),
    }
}

#[test]
fn fuse_file_as_call_descriptor_holds_only_the_reaper() {
    attack_with_file("fuse_file_as_call", Way::With(SET_VRING_CALL));
}

#[test]
fn fuse_file_as_kick_descriptor_holds_only_the_reaper() {
    attack_with_file("fuse_file_as_kick", Way::With(SET_VRING_KICK));
}

#[test]
fn fuse_file_as_memory_holds_only_the_reaper() {
    attack_with_file("fuse_file_as_memory", Way::With(SET_MEM_TABLE));
}

#[test]
fn fuse_file_beside_get_features_holds_only_the_reaper() {
    attack_with_file("fuse_file_beside_get_features", Way::With(GET_FEATURES));
}

#[test]
fn fuse_file_in_half_a_message_holds_only_the_reaper() {
    attack_with_file("fuse_file_in_half_a_message", Way::InHalfMessage);
}
