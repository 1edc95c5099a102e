//! A file on FUSE with a server that never answers: close(2) blocks forever, as would fstat(2) and
//! a page fault.

use super::driver::{Driver, DriverConfig};

use super::attack::{expect_isolation, hand_over};
use super::daemon::{ATTACKER, Daemon, NEIGHBOUR, alone, command};
use super::fuse::{FuseServer, not_asked_for};
use super::process::{Running, wait_until};
use super::raw::{GET_FEATURES, SET_MEM_TABLE, SET_VRING_CALL, SET_VRING_KICK, Way};
use super::threads::{Held, REAPER};

/// Why there is no file on FUSE.
fn no_fuse() -> Option<String> {
    let _alone = alone();
    let probe = || FuseServer::start(0).err();
    not_asked_for().or_else(|| Some(format!("no FUSE: {}", probe()?)))
}

fn attack_with_file(test: &str, way: Way) {
    match no_fuse() {
        None => expect_isolation(|daemon| {
            hand_over(daemon, way, FuseServer::start(daemon.pid()).unwrap())
        }),
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

/// SIGTERM, and what `systemctl restart` does after the unit's timeout.
#[test]
fn successor_serves_at_the_same_paths_while_the_old_process_cannot_end() {
    if let Some(reason) = no_fuse() {
        return println!("SKIPPED successor_serves_at_the_same_paths: {reason}");
    }
    let daemon = Daemon::start(&[]);
    let (file, server) = FuseServer::start(daemon.pid()).unwrap();
    let frontend = daemon.frontend(ATTACKER);
    let attacker = daemon.pass(frontend, Way::With(SET_VRING_CALL), vec![file]);
    let held = Held::wait(daemon.pid(), REAPER);
    daemon.running.signal("TERM");
    let paths = [ATTACKER, NEIGHBOUR].map(|cid| [daemon.socket(cid), daemon.hybrid(cid)]);
    let paths = paths.as_flattened();
    wait_until("the socket files to go", || {
        !paths.iter().any(|path| path.exists())
    });
    held.check();
    let successor = Running::start(&mut command(daemon.dir.path()));
    wait_until("the successor", || paths.iter().all(|path| path.exists()));
    Driver::attach(DriverConfig::new(daemon.socket(NEIGHBOUR))).unwrap();
    // Even this does not end the old one.
    daemon.running.signal("KILL");
    Driver::attach(DriverConfig::new(daemon.socket(ATTACKER))).unwrap();
    held.check();
    drop((attacker, server));
    let Daemon { mut running, .. } = daemon;
    wait_until("the old process to end", || {
        running.child.try_wait().unwrap().is_some()
    });
    successor.signal("TERM");
    assert_eq!(successor.finish().code, Some(0));
}
