//! A file on FUSE, whose server never answers: close(2) waits for ever, and so would fstat(2) and a
//! page fault.

use super::attack::attack;
use super::daemon::alone;
use super::fuse::FuseServer;
use super::raw::{GET_FEATURES, SET_MEM_TABLE, SET_VRING_CALL, SET_VRING_KICK, Way};

/// Why there can be no file on FUSE. When such a test breaks, threads of the daemon sleep in a way that
/// not even SIGKILL ends, until `/sys/fs/fuse/connections` is used: so it has to be asked for.
fn no_fuse() -> Option<String> {
    if std::env::var_os("ZEROSOCK_TEST_FUSE").is_none() {
        return Some("set ZEROSOCK_TEST_FUSE=1 to hold threads in files on FUSE".into());
    }
    let _alone = alone();
    let error = FuseServer::start(0).err()?;
    Some(format!("no FUSE: {error}"))
}

fn attack_with_file(test: &str, way: Way) {
    match no_fuse() {
        None => attack(way, |daemon| FuseServer::start(daemon.pid()).unwrap()),
        Some(reason) => println!("SKIPPED {test}: {reason}"),
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
