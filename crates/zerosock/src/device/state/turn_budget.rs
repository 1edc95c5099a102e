//! After how many payload bytes in one direction a turn of a device ends.
//!
//! The buffers of a turn are published at its end. After a small turn the guest fills and reads them while
//! the worker continues, if they run on different cores. If they share a core, each small turn costs system
//! calls, a notification and a wake-up more for the same bytes. The device observes which of the two holds: a
//! guest that works at the same time posts buffers while a turn runs.
//!
//! A large turn can take the whole window of a connection. Then no guest can post during it, so that large turns
//! say nothing about the guest: they end after a while, and small turns observe it again.
//!
//! # Invariants
//! - The budget is [`TURN_BYTES`], or [`MAX_TURN_BYTES`] after [`OBSERVED_TURNS`] small turns in a row during
//!   which the guest posted nothing, for at most [`LARGE_TURNS`] turns.

/// Payload bytes of a turn beside a guest that works at the same time.
pub(crate) const TURN_BYTES: usize = 64 << 10;

/// The large budget. A turn ends once it has moved its budget: a last read from a host socket can add as much
/// again.
pub(crate) const MAX_TURN_BYTES: usize = 4 * TURN_BYTES;

/// Turns in a row during which the guest posted nothing, before the budget is large.
///
/// With 8 of them `zerosock-bench device` had 0.51 to 0.85 of the throughput of small turns where the guest runs on
/// another core, since the budget remained large; with 256 it has 0.93 and more.
pub(crate) const OBSERVED_TURNS: u32 = 256;

/// Turns with the large budget before the guest is observed again.
const LARGE_TURNS: u32 = 2048;

/// The budget of one direction: see the module.
#[derive(Debug, Default)]
pub(crate) struct TurnBudget {
    /// Turns in a row during which the guest posted nothing: the budget is large from [`OBSERVED_TURNS`] on.
    quiet_turns: u32,
}

impl TurnBudget {
    /// Bytes after which a turn ends.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        match self.quiet_turns < OBSERVED_TURNS {
            true => TURN_BYTES,
            false => MAX_TURN_BYTES,
        }
    }

    /// Adapts the budget after a turn that has `moved` bytes. `posted`: whether the guest has posted buffers
    /// meanwhile. `left`: whether the turn could have continued.
    #[inline]
    pub(crate) fn turn_ended(
        &mut self,
        moved: usize,
        posted: impl FnOnce() -> bool,
        left: impl FnOnce() -> bool,
    ) {
        // The guest seldom posts buffers during a shorter turn, whether it works meanwhile or not.
        if moved < TURN_BYTES {
            return;
        }
        if posted() || self.quiet_turns == OBSERVED_TURNS + LARGE_TURNS {
            self.quiet_turns = 0;
        } else if self.bytes() > TURN_BYTES || left() {
            // A guest whose last buffer was taken posts when the worker sleeps.
            self.quiet_turns += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(budget: &mut TurnBudget, count: u32, posted: bool) {
        for _ in 0..count {
            budget.turn_ended(budget.bytes(), || posted, || true);
        }
    }

    #[test]
    fn the_budget_is_large_while_the_guest_posts_nothing() {
        let mut budget = TurnBudget::default();
        turns(&mut budget, OBSERVED_TURNS - 1, false);
        assert_eq!(budget.bytes(), TURN_BYTES);
        turns(&mut budget, 1, false);
        assert_eq!(budget.bytes(), MAX_TURN_BYTES);
        turns(&mut budget, LARGE_TURNS, false);
        assert_eq!(budget.bytes(), MAX_TURN_BYTES);
    }

    #[test]
    fn the_guest_is_observed_again_after_many_large_turns() {
        let mut budget = TurnBudget::default();
        for _ in 0..3 {
            turns(&mut budget, OBSERVED_TURNS + LARGE_TURNS + 1, false);
            assert_eq!(budget.bytes(), TURN_BYTES);
            turns(&mut budget, OBSERVED_TURNS - 1, false);
            assert_eq!(budget.bytes(), TURN_BYTES);
            turns(&mut budget, 1, true);
        }
    }

    #[test]
    fn the_budget_is_small_at_once_when_the_guest_posts_during_a_turn() {
        let mut budget = TurnBudget::default();
        for _ in 0..100 {
            turns(&mut budget, OBSERVED_TURNS - 1, false);
            turns(&mut budget, 1, true);
            assert_eq!(budget.bytes(), TURN_BYTES);
        }
        turns(&mut budget, OBSERVED_TURNS, false);
        assert!(budget.bytes() > TURN_BYTES);
        turns(&mut budget, 1, true);
        assert_eq!(budget.bytes(), TURN_BYTES);
    }

    #[test]
    fn small_turns_that_leave_nothing_do_not_enlarge_the_budget() {
        let mut budget = TurnBudget::default();
        for _ in 0..2 * OBSERVED_TURNS {
            budget.turn_ended(TURN_BYTES, || false, || false);
        }
        assert_eq!(budget.bytes(), TURN_BYTES);
    }

    #[test]
    fn turns_that_move_less_change_nothing() {
        let mut budget = TurnBudget::default();
        turns(&mut budget, OBSERVED_TURNS, false);
        let large = budget.bytes();
        for _ in 0..2 * LARGE_TURNS {
            budget.turn_ended(TURN_BYTES - 1, || panic!("not asked"), || true);
            assert_eq!(budget.bytes(), large);
        }
    }
}
