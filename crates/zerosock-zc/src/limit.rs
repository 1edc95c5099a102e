//! The limit of a sender: the longest time from the acceptance of a send until its buffer is free.
//!
//! Sends are accepted in the order of time, so that the oldest one that counts is the first to be late.
//! It is looked up when the program submits, polls or waits, and a wait ends when that send is late. This
//! module has no clock and no thread.
//!
//! # Invariants
//! When a send is late, everything is done that can be, and the send counts no more: a send that stayed
//! late would make every later wait return at once.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::send_queue::SendQueue;
use crate::sys::{self, Key, Stable};

/// What is not done in time ends with this.
pub(super) const TIMED_OUT: i32 = rustix::io::Errno::TIMEDOUT.raw_os_error();

/// Which sends there are, by age.
#[derive(Debug, Default)]
pub(super) struct Limit {
    /// None: they have all the time there is.
    pub(super) time: Option<Duration>,
    /// When the first of those was accepted that are not submitted yet: one look at the clock serves
    /// all of them.
    now: Option<Instant>,
    /// The oldest first, with some among them that do not count any more.
    pub(super) accepted: VecDeque<Accepted>,
}

#[derive(Copy, Clone, Debug)]
pub(super) struct Accepted {
    pub(super) at: Instant,
    key: Key,
    ordinal: u64,
}

impl<B: Stable> SendQueue<B> {
    /// The send in this place, with this ordinal, has been accepted.
    pub(super) fn start_limit(&mut self, key: Key, ordinal: u64) {
        if self.limit.time.is_none() {
            return;
        }
        if self.limit.accepted.len() >= 2 * self.sends.len() {
            // One that is old keeps those behind it from being forgotten one by one.
            let mut kept = std::mem::take(&mut self.limit.accepted);
            kept.retain(|accepted| self.is_awaited(accepted));
            self.limit.accepted = kept;
        }
        let at = *self.limit.now.get_or_insert_with(Instant::now);
        self.limit.accepted.push_back(Accepted { at, key, ordinal });
    }

    /// Whether it counts: its buffer can be had back before the kernel gives it by itself. On streams
    /// that is until it is free, else until the kernel has taken it.
    fn is_awaited(&self, accepted: &Accepted) -> bool {
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

    /// How long there is until then.
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

    /// If a send is late, ends what the kernel has not taken, and a stream with all of it.
    pub(super) fn enforce_limit(&mut self) {
        self.limit.now = None;
        if self.limit.accepted.is_empty() {
            return;
        }
        let now = Instant::now();
        // It may have been over in time, and not have been polled.
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

    /// Whatever the kernel answers meanwhile, the rest is done, too.
    fn time_out(&mut self) {
        let late = std::mem::take(&mut self.limit.accepted);
        if self.stream {
            self.broken = self.broken.or(Some(TIMED_OUT));
        }
        let _ = self.fail_pending(TIMED_OUT);
        if !self.stream {
            return;
        }
        // The kernel has taken all of these. Whether the peer has them cannot be found out.
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
            // It frees buffers within the call.
            let _ = self.zc_socket.reap();
            self.process_events();
        }
    }
}
