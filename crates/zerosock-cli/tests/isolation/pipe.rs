//! A pipe as call descriptor with its lock held by the attacker: writing to it or closing it
//! blocks.

use std::os::fd::OwnedFd;

use super::attack::{Attack, expect_isolation, hand_over_pipe, replace_pipe};
use super::daemon::Daemon;
use super::pipe_lock::PipeLock;

fn attack_with_pipe<A>(
    test: &str,
    start: impl FnOnce(&Daemon, (OwnedFd, PipeLock)) -> Attack<A, PipeLock>,
) {
    match PipeLock::hold() {
        Ok(pipe) => expect_isolation(|daemon| {
            let attack = start(daemon, pipe);
            // The state of a wait for a lock. In a full pipe it would be 'S'.
            assert_eq!(attack.held.state(), Some('D'));
            attack
        }),
        Err(error) => println!("SKIPPED {test}: userfaultfd: {error}"),
    }
}

#[test]
fn call_pipe_with_its_lock_held_holds_only_the_call_thread_of_its_vm() {
    attack_with_pipe("call_pipe_with_its_lock_held", hand_over_pipe);
}

#[test]
fn replaced_call_pipe_with_its_lock_held_holds_only_the_reaper() {
    attack_with_pipe("replaced_call_pipe_with_its_lock_held", replace_pipe);
}
