//! A pipe as call descriptor whose lock the attacker holds: whatever writes to it sleeps.

use std::os::fd::{AsFd, OwnedFd};

use zerosock::driver::Driver;

use super::daemon::{ATTACKER, Daemon};
use super::neighbour::Neighbour;
use super::pipe_lock::PipeLock;
use super::raw::{SET_VRING_CALL, send_by};
use super::threads::{CALL, Held};

/// A guest hands over the pipe. The daemon notifies it at once, since the queue is running.
pub(crate) fn attack(daemon: &Daemon, pipe: OwnedFd) -> (Driver, Held) {
    let mut attacker = daemon.attach(ATTACKER);
    let index = 0u64.to_ne_bytes();
    send_by(&mut attacker, SET_VRING_CALL, &index, &[pipe.as_fd()]);
    drop(pipe);
    let held = Held::wait(daemon.pid(), CALL);
    (attacker, held)
}

#[test]
fn call_pipe_with_its_lock_held_holds_only_the_call_thread_of_its_vm() {
    let test = "call_pipe_with_its_lock_held";
    let daemon = Daemon::start(&[]);
    let (pipe, lock) = match PipeLock::hold() {
        Ok(held) => held,
        Err(error) => return println!("SKIPPED {test}: userfaultfd: {error}"),
    };
    let mut neighbour = Neighbour::new(&daemon);
    let (attacker, held) = attack(&daemon, pipe);
    // As one that waits for a lock. In a pipe that is full it would be 'S'.
    assert_eq!(held.state(), Some('D'));
    neighbour.goes_on_while(&daemon, &held);
    drop(attacker);
    // The attacker's place is free as well.
    assert!(daemon.frontend(ATTACKER).ask_features().is_some());
    neighbour.round_trip(1);
    held.check();
    drop(lock);
    held.wait_for_end();
    neighbour.round_trip(2);
}
