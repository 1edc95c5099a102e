//! The limit of a sender: the longest time from the acceptance of a send until its buffer is free.
//!
//! Sends are accepted in the order of time, so the oldest one that counts is the first to be late
//! (`late_sends`).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::sys::Key;

/// The limit, and the sends to which it applies.
#[derive(Debug, Default)]
pub(super) struct Limit {
    /// The longest time of a send; without, there is no limit.
    pub(super) time: Option<Duration>,
    /// When the first send since the last submission was accepted: the clock is read once per
    /// submission.
    pub(super) now: Option<Instant>,
    /// Accepted sends, the oldest first. Some of them no longer count.
    pub(super) accepted: VecDeque<LimitedSend>,
}

/// A send to which the limit applies.
#[derive(Copy, Clone, Debug)]
pub(super) struct LimitedSend {
    pub(super) at: Instant,
    pub(super) key: Key,
    /// Number of sends accepted before it: its place may belong to a later send by now.
    pub(super) ordinal: u64,
}
