//! How many payload bytes one turn of a device may move in one direction.
//!
//! The buffers of a turn are published at its end. After a small turn the guest fills and reads them while
//! the worker continues, if they run on different cores. If they share a core, each small turn costs system
//! calls, a notification and a wake-up more for the same bytes. The device observes which of the two holds: a
//! guest that works at the same time posts buffers while a turn runs.
//!
//! # Invariants
//! - The budget is [`TURN_BYTES`], or twice or four times as much ([`MAX_TURN_BYTES`]).
//! - It is more than [`TURN_BYTES`] only while the guest posts nothing during turns that move as much.

/// Payload bytes of a turn beside a guest that works at the same time.
pub(crate) const TURN_BYTES: usize = 64 << 10;

/// Most payload bytes of a turn.
pub(crate) const MAX_TURN_BYTES: usize = 4 * TURN_BYTES;

/// Turns of at least [`TURN_BYTES`] in a row, during which the guest posted nothing, before one with a larger
/// budget.
const WAITING_TURNS: u32 = 8;

/// The budget of one direction: see the module.
#[derive(Debug)]
pub(crate) struct TurnBudget {
    /// Payload bytes after which a turn ends: [`TURN_BYTES`] to [`MAX_TURN_BYTES`].
    bytes: usize,
    /// Turns in a row of at least [`TURN_BYTES`] during which the guest posted nothing, up to
    /// [`WAITING_TURNS`].
    waiting_turns: u32,
}

impl Default for TurnBudget {
    fn default() -> TurnBudget {
        TurnBudget {
            bytes: TURN_BYTES,
            waiting_turns: 0,
        }
    }
}

impl TurnBudget {
    /// Bytes after which a turn ends.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adapts the budget after a turn that has `moved` bytes. `posted`: whether the guest has posted buffers
    /// meanwhile.
    #[inline]
    pub(crate) fn turn_ended(&mut self, moved: usize, posted: impl FnOnce() -> bool) {
        // Small turns are too short for the guest to do anything meanwhile.
        if moved < TURN_BYTES {
            return;
        }
        if posted() {
            *self = TurnBudget::default();
        } else if self.waiting_turns < WAITING_TURNS {
            self.waiting_turns += 1;
        }
        if self.waiting_turns == WAITING_TURNS {
            self.bytes = (2 * self.bytes).min(MAX_TURN_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(budget: &mut TurnBudget, count: u32, posted: bool) {
        for _ in 0..count {
            budget.turn_ended(budget.bytes(), || posted);
        }
    }

    #[test]
    fn the_budget_doubles_up_to_four_times_while_the_guest_posts_nothing() {
        let mut budget = TurnBudget::default();
        turns(&mut budget, WAITING_TURNS - 1, false);
        assert_eq!(budget.bytes(), TURN_BYTES);
        turns(&mut budget, 1, false);
        assert_eq!(budget.bytes(), 2 * TURN_BYTES);
        turns(&mut budget, 100, false);
        assert_eq!(budget.bytes(), MAX_TURN_BYTES);
    }

    #[test]
    fn the_budget_is_small_at_once_when_the_guest_posts_during_a_turn() {
        let mut budget = TurnBudget::default();
        for _ in 0..100 {
            turns(&mut budget, WAITING_TURNS - 1, false);
            turns(&mut budget, 1, true);
            assert_eq!(budget.bytes(), TURN_BYTES);
        }
        turns(&mut budget, WAITING_TURNS, false);
        assert!(budget.bytes() > TURN_BYTES);
        turns(&mut budget, 1, true);
        assert_eq!(budget.bytes(), TURN_BYTES);
    }

    #[test]
    fn turns_that_move_less_change_nothing() {
        let mut budget = TurnBudget::default();
        turns(&mut budget, WAITING_TURNS, false);
        let large = budget.bytes();
        for _ in 0..1000 {
            budget.turn_ended(TURN_BYTES - 1, || panic!("not asked"));
            assert_eq!(budget.bytes(), large);
        }
    }
}
