//! Ends the sends of a queue that exceed the limit of the sender (see `limit`).
//!
//! The oldest send that counts is looked up when the application submits, polls or waits, and a
//! wait ends when that send is late. There is no timer and no thread.
//!
//! # Invariants
//! A late send is cancelled or reset as far as possible, and then no longer counts: otherwise every
//! later wait would return at once.

use std::time::{Duration, Instant};

use super::in_flight::TIMED_OUT;
use super::limit::LimitedSend;
use super::send_queue::SendQueue;
use crate::sys::{self, Key, Stable};

impl<B: Stable> SendQueue<B> {
    /// Starts the time of a send that has just been accepted.
    pub(super) fn start_limit(&mut self, key: Key, ordinal: u64) {
        if self.limit.time.is_none() {
            return;
        }
        if self.limit.accepted.len() >= 2 * self.sends.len() {
            // An old send that still counts prevents the removal of later ones from the front.
            let mut kept = std::mem::take(&mut self.limit.accepted);
            kept.retain(|accepted| self.is_awaited(accepted));
            self.limit.accepted = kept;
        }
        let at = *self.limit.now.get_or_insert_with(Instant::now);
        self.limit
            .accepted
            .push_back(LimitedSend { at, key, ordinal });
    }

    /// Whether the limit applies to a send: on a stream until its buffer is free, because a reset
    /// can free it; otherwise until the kernel has taken it.
    fn is_awaited(&self, accepted: &LimitedSend) -> bool {
        let send = self.sends.get(accepted.key.index());
        send.filter(|send| send.ordinal == accepted.ordinal)
            .is_some_and(|send| !send.finished || self.stream && !self.zc_socket.idle(accepted.key))
    }

    /// When the oldest send is late; none if there is none, or no limit.
    pub(super) fn due(&self) -> Option<Instant> {
        let time = self.limit.time?;
        let oldest = self
            .limit
            .accepted
            .iter()
            .find(|accepted| self.is_awaited(accepted))?;
        oldest.at.checked_add(time)
    }

    /// The time until [`due`](Self::due).
    pub(super) fn time_left(&self) -> Option<Duration> {
        let due = self.due()?;
        Some(due.saturating_duration_since(Instant::now()))
    }

    fn is_late(&mut self, now: Instant) -> bool {
        while let Some(accepted) = self.limit.accepted.front()
            && !self.is_awaited(accepted)
        {
            self.limit.accepted.pop_front();
        }
        self.due().is_some_and(|due| due <= now)
    }

    /// If a send is late, cancels every send that the kernel has not taken, and resets a stream.
    pub(super) fn enforce_limit(&mut self) {
        self.limit.now = None;
        if self.limit.accepted.is_empty() {
            return;
        }
        let now = Instant::now();
        // It may have finished in time: its events may not have been read.
        while self.is_late(now) {
            let before = (self.stats.over, self.stats.notified);
            self.zc_socket.reap_all();
            self.process_events();
            if before == (self.stats.over, self.stats.notified) {
                break;
            }
        }
        if self.is_late(now) {
            self.time_out();
        }
    }

    /// Ends the late sends. An error of one step does not prevent the next ones.
    fn time_out(&mut self) {
        let late = std::mem::take(&mut self.limit.accepted);
        if self.stream {
            self.broken = self.broken.or(Some(TIMED_OUT));
        }
        let _ = self.fail_pending(TIMED_OUT);
        if !self.stream {
            return;
        }
        // The kernel has taken all of these. It is unknown how much of them reached the peer.
        for accepted in &late {
            if !self.is_awaited(accepted) {
                continue;
            }
            if let Some(send) = self.sends.get_mut(accepted.key.index())
                && send.finished
                && send.failure.is_none()
            {
                send.failure = Some(TIMED_OUT);
                self.stats.failed += 1;
                self.stats.timed_out += 1;
            }
        }
        if sys::reset(self.zc_socket.socket()).unwrap_or(false) {
            self.shut_down = true;
            // A reset frees buffers before it returns.
            let _ = self.zc_socket.reap();
            self.process_events();
        }
    }
}
