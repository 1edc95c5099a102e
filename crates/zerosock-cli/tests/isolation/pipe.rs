//! A pipe as call descriptor whose lock the attacker holds: whatever writes to it sleeps.

use super::attack::{expect_isolation, hand_over_pipe};
use super::pipe_lock::PipeLock;

#[test]
fn call_pipe_with_its_lock_held_holds_only_the_call_thread_of_its_vm() {
    let test = "call_pipe_with_its_lock_held";
    match PipeLock::hold() {
        Ok(pipe) => expect_isolation(|daemon| {
            let attack = hand_over_pipe(daemon, pipe);
            // As one that waits for a lock. In a pipe that is full it would be 'S'.
            assert_eq!(attack.held.state(), Some('D'));
            attack
        }),
        Err(error) => println!("SKIPPED {test}: userfaultfd: {error}"),
    }
}
