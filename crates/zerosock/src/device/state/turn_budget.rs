//! How many payload bytes one turn of a device may move in one direction.
//!
//! The buffers of a turn are published at its end. After a small turn the guest fills and reads them while
//! the worker continues, if they run on different cores. If they do not, or if the guest shares its core with
//! the host program, guest and worker wait for each other anyway, because credit (256 KiB for Linux) bounds
//! the bytes under way: then each small turn costs a system call, a notification and a wake-up more for the
//! same bytes. The device observes which of the two holds. A guest that works at the same time fills the
//! queue turn by turn; one that waits leaves a whole window at once, or less than a turn.
//!
//! # Invariants
//! - The budget is [`TURN_BYTES`], or twice or four times as much ([`MAX_TURN_BYTES`]).
//! - It grows only after the queue was found empty as a guest leaves it that waits.
//! - It is [`TURN_BYTES`] again after a bounded number of turns, to observe anew.

/// Payload bytes of a turn beside a guest that works at the same time.
pub(crate) const TURN_BYTES: usize = 64 << 10;

/// Most payload bytes of a turn.
pub(crate) const MAX_TURN_BYTES: usize = 4 * TURN_BYTES;

/// A queue that was empty after so many turns in a row of [`TURN_BYTES`] had a whole window before the first
/// of them.
const WINDOW_TURNS: u32 = 3;

/// Evidence of a guest that waits: by so much a queue that runs empty as such a guest leaves it adds to it. A
/// queue that runs empty in another way takes 1 from it.
const EVIDENCE_OF_WAITING: i32 = 4;

/// The evidence with which the budget grows: two such queues in a row are enough, one among many is not.
const ENOUGH_EVIDENCE: i32 = 2 * EVIDENCE_OF_WAITING;

/// Least evidence: the guest certainly works at the same time.
const LEAST_EVIDENCE: i32 = -32;

/// Turns with a larger budget until the first new observation.
const FIRST_INTERVAL: u32 = 64;

/// Most turns until a new observation.
const MAX_INTERVAL: u32 = 1024;

/// The budget of one direction: see the module.
#[derive(Debug)]
pub(crate) struct TurnBudget {
    /// Payload bytes after which a turn ends: [`TURN_BYTES`] to [`MAX_TURN_BYTES`].
    bytes: usize,
    /// Turns in a row that used up the budget; counted while it is [`TURN_BYTES`].
    full_turns: u32,
    /// Whether the guest waits for turns, by how the queue ran empty while the budget was [`TURN_BYTES`]:
    /// [`LEAST_EVIDENCE`] to [`ENOUGH_EVIDENCE`]. See [`EVIDENCE_OF_WAITING`].
    evidence: i32,
    /// Turns left until the larger budget ends, of those that move at least [`TURN_BYTES`]; 0 while there is
    /// none.
    large_turns_left: u32,
    /// Turns that the next larger budget lasts: [`FIRST_INTERVAL`] to [`MAX_INTERVAL`]. Doubled by each larger
    /// budget, and the first again once the guest certainly works at the same time.
    interval: u32,
}

impl Default for TurnBudget {
    fn default() -> TurnBudget {
        TurnBudget {
            bytes: TURN_BYTES,
            full_turns: 0,
            evidence: 0,
            large_turns_left: 0,
            interval: FIRST_INTERVAL,
        }
    }
}

impl TurnBudget {
    /// Bytes after which a turn ends.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adapts the budget after a turn that has `moved` bytes. `ran_out`: there was nothing more to move.
    pub(crate) fn turn_ended(&mut self, moved: usize, ran_out: bool) {
        if self.bytes > TURN_BYTES {
            self.large_turn_ended(moved);
        } else if moved >= TURN_BYTES {
            self.full_turns = self.full_turns.saturating_add(1);
        } else if ran_out && self.full_turns > 0 {
            // A guest that works at the same time leaves nothing after one or two whole turns.
            let waits = moved > 0 || self.full_turns >= WINDOW_TURNS;
            self.full_turns = 0;
            self.queue_ran_empty(waits);
        }
    }

    /// The queue ran empty after a turn that used up the budget, in the way of a guest that waits or not.
    fn queue_ran_empty(&mut self, waits: bool) {
        self.evidence = match waits {
            true => self.evidence + EVIDENCE_OF_WAITING,
            false => (self.evidence - 1).max(LEAST_EVIDENCE),
        };
        if self.evidence >= ENOUGH_EVIDENCE {
            self.evidence = 0;
            self.grow();
            self.large_turns_left = self.interval;
            self.interval = (2 * self.interval).min(MAX_INTERVAL);
        } else if self.evidence == LEAST_EVIDENCE {
            self.interval = FIRST_INTERVAL;
        }
    }

    fn large_turn_ended(&mut self, moved: usize) {
        if moved >= self.bytes {
            self.grow();
        }
        // Turns that the smaller budget would not have ended say nothing.
        if moved >= TURN_BYTES {
            self.large_turns_left -= 1;
            if self.large_turns_left == 0 {
                self.bytes = TURN_BYTES;
            }
        }
    }

    /// Doubles the budget, up to its limit.
    fn grow(&mut self) {
        self.bytes = (2 * self.bytes).min(MAX_TURN_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Turns of a guest that has `window` bytes at a time and continues only when all were taken.
    fn take_window(budget: &mut TurnBudget, window: usize) -> usize {
        let (mut left, mut turns) = (window, 0);
        while left > 0 {
            let moved = left.min(budget.bytes());
            left -= moved;
            budget.turn_ended(moved, moved < budget.bytes());
            turns += 1;
        }
        budget.turn_ended(0, true);
        turns
    }

    /// Turns of a guest that fills the queue while the worker sends.
    fn take_as_it_comes(budget: &mut TurnBudget) {
        budget.turn_ended(TURN_BYTES, false);
        budget.turn_ended(0, true);
    }

    #[test]
    fn the_budget_doubles_up_to_four_times_while_the_guest_waits_for_the_turns() {
        for window in [MAX_TURN_BYTES, MAX_TURN_BYTES - 1] {
            let mut budget = TurnBudget::default();
            let mut turns = || take_window(&mut budget, window);
            let turns: Vec<_> = (0..20).map(|_| turns()).collect();
            assert_eq!(turns[..3], [4, 4, 2], "{window}");
            assert!(turns[3..].iter().all(|&turns| turns == 1), "{turns:?}");
            assert_eq!(budget.bytes(), MAX_TURN_BYTES);
        }
    }

    #[test]
    fn the_budget_stays_small_while_the_guest_works_at_the_same_time() {
        let mut budget = TurnBudget::default();
        for round in 0..1000 {
            (0..10).for_each(|_| take_as_it_comes(&mut budget));
            // The scheduler makes one of them wait now and then, or the queue is never empty.
            match round % 2 {
                0 => drop(take_window(&mut budget, MAX_TURN_BYTES)),
                _ => budget.turn_ended(TURN_BYTES, false),
            }
            assert_eq!(budget.bytes(), TURN_BYTES, "round {round}");
        }
    }

    #[test]
    fn small_amounts_and_turns_that_another_bound_ends_change_nothing() {
        let mut budget = TurnBudget::default();
        for _ in 0..1000 {
            budget.turn_ended(TURN_BYTES - 1, true);
            budget.turn_ended(0, true);
            budget.turn_ended(256 * 64, false);
        }
        assert_eq!(budget.bytes(), TURN_BYTES);
    }

    #[test]
    fn the_budget_is_observed_anew_ever_more_seldom_and_follows_a_guest_that_no_longer_waits() {
        let mut budget = TurnBudget::default();
        let mut lengths = Vec::new();
        let mut large = 0;
        for _ in 0..10_000 {
            take_window(&mut budget, MAX_TURN_BYTES);
            match budget.bytes() > TURN_BYTES {
                _ if lengths.len() == 7 => break,
                true => large += 1,
                false if large > 0 => lengths.push(std::mem::take(&mut large)),
                false => {}
            }
        }
        assert!(lengths.is_sorted(), "{lengths:?}");
        assert!((50..=64).contains(&lengths[0]), "{lengths:?}");
        assert!((1000..=1024).contains(&lengths[6]), "{lengths:?}");
        for _ in 0..100 {
            take_as_it_comes(&mut budget);
            assert_eq!(budget.bytes(), TURN_BYTES);
        }
        // After that a guest that waits is observed soon again.
        let mut grows = (0..100).map(|_| take_window(&mut budget, MAX_TURN_BYTES));
        assert!(grows.any(|turns| turns == 2), "after a while");
        let mut windows = 0;
        while budget.bytes() > TURN_BYTES {
            take_window(&mut budget, MAX_TURN_BYTES);
            windows += 1;
        }
        assert!(windows <= 64, "{windows}");
    }
}
