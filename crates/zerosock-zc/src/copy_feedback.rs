//! Whether zero copy pays on one socket, by what the kernel reports about its sends.
//!
//! Where a packet is received on the same machine (loopback, veth) or leaves through a device that
//! cannot gather, the kernel copies a send after all. Zero copy then costs both, and pauses.
//!
//! # Invariants
//! - The first report after a pause decides whether another pause begins. Until then a caller that asks
//!   [`most_in_flight`](CopyFeedback::most_in_flight) has one send without a copy; [`Sender`](crate::Sender)
//!   asks only whether a pause lasts, and makes all sends of that time without a copy.
//! - After a bad report the next pause is twice as long, up to 1 GiB; after [`GOOD`] sends without a copy its length is
//!   halved, down to 1 MiB.

/// Consecutive sends that the kernel copied, after which zero copy pauses.
const MAX_COPIED: u32 = 16;
/// Bytes that are copied in the shortest pause and in the longest.
const FIRST_PAUSE: u64 = 1 << 20;
const LONGEST_PAUSE: u64 = 1 << 30;
/// Sends without a copy after which the next pause is halved.
const GOOD: u32 = 64;

/// When the sends of one socket go without a copy, as far as the kernel's reports decide it.
///
/// ```
/// use zerosock_zc::notifications::CopyFeedback;
///
/// let mut feedback = CopyFeedback::beginning_with_a_pause();
/// feedback.copied(1 << 20);
/// // One attempt, which the kernel copies after all.
/// assert_eq!(feedback.most_in_flight(64), 1);
/// feedback.reported(1, true);
/// assert!(feedback.is_paused());
/// ```
#[derive(Debug)]
pub struct CopyFeedback {
    phase: Phase,
    /// Bytes to copy in the next pause.
    pause: u64,
    /// Sends without a copy since `pause` changed.
    good: u32,
    /// Consecutive sends that the kernel copied.
    copied: u32,
}

#[derive(Debug, Eq, PartialEq)]
enum Phase {
    /// So many more bytes are copied.
    Paused(u64),
    /// The first bad report begins the next pause.
    Probing,
    /// Sends go without a copy.
    InPlace,
}

impl CopyFeedback {
    /// Sends go without a copy from the first one on.
    #[must_use]
    pub fn beginning_in_place() -> Self {
        Self {
            phase: Phase::InPlace,
            pause: FIRST_PAUSE,
            good: 0,
            copied: 0,
        }
    }

    /// The first MiB is copied, before the first attempt.
    #[must_use]
    pub fn beginning_with_a_pause() -> Self {
        let mut feedback = Self::beginning_in_place();
        feedback.back_off();
        feedback
    }

    /// Whether sends are copied for now.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        matches!(self.phase, Phase::Paused(_))
    }

    /// The number of sends without a copy that may be in flight: none in a pause, one after it, and
    /// `most` otherwise.
    #[must_use]
    pub fn most_in_flight(&self, most: usize) -> usize {
        match self.phase {
            Phase::Paused(_) => 0,
            Phase::Probing => most.min(1),
            Phase::InPlace => most,
        }
    }

    /// Counts bytes that were sent by copy.
    pub fn copied(&mut self, bytes: usize) {
        if let Phase::Paused(left) = &mut self.phase {
            *left = left.saturating_sub(bytes as u64);
            if *left == 0 {
                self.phase = Phase::Probing;
            }
        }
    }

    /// Handles a report of the kernel about one or more `sends`, which says whether it copied after all.
    pub fn reported(&mut self, sends: u32, copied: bool) {
        if copied {
            self.copied = self.copied.saturating_add(sends);
            if self.phase == Phase::Probing || self.copied >= MAX_COPIED {
                self.back_off();
            }
            return;
        }
        self.copied = 0;
        if self.phase == Phase::Probing {
            self.phase = Phase::InPlace;
        }
        self.good = self.good.saturating_add(sends);
        if self.good >= GOOD {
            self.good = 0;
            self.pause = (self.pause / 2).max(FIRST_PAUSE);
        }
    }

    /// Begins a pause, because zero copy does not pay now.
    pub fn back_off(&mut self) {
        self.copied = 0;
        // Otherwise the report is of a send before the one that began the pause.
        if !self.is_paused() {
            self.phase = Phase::Paused(self.pause);
            self.pause = (2 * self.pause).min(LONGEST_PAUSE);
            self.good = 0;
        }
    }

    /// Begins a pause of 1 MiB, because there was no memory for a send. That concerns all sockets,
    /// so that later pauses are not longer for it.
    pub fn refused(&mut self) {
        self.phase = Phase::Paused(FIRST_PAUSE);
    }
}

#[cfg(test)]
#[path = "copy_feedback_tests.rs"]
mod tests;
