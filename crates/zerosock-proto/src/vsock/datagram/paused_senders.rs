//! The receiving side of the flow control: the sources that were sent STOP, and the packets to send
//! to them.
//!
//! # Invariants
//! - There are at most [`PausedSenders::MAX`] entries, and at most
//!   [`PausedSenders::MAX_PER_ENDPOINT`] of one endpoint, so that an endpoint that sends from many
//!   ports takes entries from no other. A source without an entry gets no STOP and may lose
//!   datagrams, which it may anyway.
//! - START is sent once; STOP is repeated while the receiver is full.

use core::time::Duration;

use hashbrown::HashMap;

use super::quota::EndpointQuota;
use super::{Control, PauseSource, STOP_DURATION, STOP_REPEAT_INTERVAL, STOP_RESEND_DELAY};
use crate::addr::Address;
use crate::time::Instant;
use crate::wire::vsock::Repr;

/// Delay before a packet that found no buffer is retried: the first, and the longest. It doubles
/// each time: polling of a stalled source backs off exponentially.
const RETRY: Duration = Duration::from_millis(1);
const RETRY_MAX: Duration = Duration::from_millis(32);

/// The sources that a receiver, or a switch in front of it, has paused.
#[derive(Debug)]
pub struct PausedSenders {
    /// The queue that is full.
    queue: PauseSource,
    states: HashMap<Pair, PauseState>,
    quota: EndpointQuota,
    /// At or before the first `due_at`.
    next: Option<Instant>,
    /// An entry may be due at this moment.
    due_now: bool,
    /// The entry that `poll` returned last, in its state before that call.
    polled: Option<(Pair, PauseState)>,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
struct Pair {
    source: Address,
    receiver: Address,
}

#[derive(Copy, Clone, Debug)]
struct PauseState {
    /// The packet to send next.
    message: Control,
    /// When to send it.
    due_at: Instant,
    /// When STOP was last sent; `None`: not yet.
    stop_sent_at: Option<Instant>,
    /// The last delay of a retry, zero if the last packet found a buffer.
    retry_delay: Duration,
}

impl PausedSenders {
    /// Most paused sources at once.
    pub const MAX: usize = 256;
    /// Most of them of one endpoint.
    pub const MAX_PER_ENDPOINT: usize = 64;

    /// No source is paused.
    pub fn new(queue: PauseSource) -> PausedSenders {
        PausedSenders {
            queue,
            states: HashMap::new(),
            quota: EndpointQuota::default(),
            next: None,
            due_now: false,
            polled: None,
        }
    }

    /// A datagram from `source` has arrived at a full queue of `receiver`.
    pub fn pause(&mut self, now: Instant, receiver: Address, source: Address) {
        let message = Control::Stop(self.queue);
        let pair = Pair { source, receiver };
        if let Some(state) = self.states.get_mut(&pair) {
            // A START that was not sent yet becomes STOP; or the source has ignored the last STOP.
            let unheard = state
                .stop_sent_at
                .is_some_and(|said| now >= said + STOP_RESEND_DELAY);
            if state.message != message || (unheard && state.retry_delay.is_zero()) {
                state.due_at = now;
            }
            state.message = message;
            let due = state.due_at;
            self.due_now |= due <= now;
            return self.schedule(due);
        }
        if self.states.len() >= PausedSenders::MAX
            || !self.quota.take(source.cid, PausedSenders::MAX_PER_ENDPOINT)
        {
            return;
        }
        let state = PauseState {
            message,
            due_at: now,
            stop_sent_at: None,
            retry_delay: Duration::ZERO,
        };
        self.states.insert(pair, state);
        self.due_now = true;
        self.schedule(now);
    }

    /// `receiver` has space again or is closed: its sources may send.
    pub fn resume(&mut self, receiver: Address) {
        self.resume_where(|other| other == receiver);
    }

    /// All receivers have space again.
    pub fn resume_all(&mut self) {
        self.resume_where(|_| true);
    }

    fn resume_where(&mut self, has_space: impl Fn(Address) -> bool) {
        // Due at once, which needs no clock.
        let now = Instant::ZERO;
        let message = Control::Start(self.queue);
        self.retain(|pair, state| {
            if !has_space(pair.receiver) {
                return true;
            }
            state.message = message;
            state.due_at = now;
            // A source that was sent no STOP needs no START.
            state.stop_sent_at.is_some()
        });
        self.due_now |= !self.states.is_empty();
        self.schedule(now);
    }

    /// Removes every entry whose receiver or source is `gone`.
    pub fn forget(&mut self, gone: impl Fn(Address) -> bool) {
        self.retain(|pair, _| !gone(pair.receiver) && !gone(pair.source));
    }

    /// Removes the entries for which `keep` is false.
    fn retain(&mut self, mut keep: impl FnMut(&Pair, &mut PauseState) -> bool) {
        let quota = &mut self.quota;
        self.states.retain(|pair, state| {
            let keeps = keep(pair, state);
            if !keeps {
                quota.release(pair.source.cid);
            }
            keeps
        });
    }

    /// Whether an entry is known to be due. Ask this first: it needs no clock.
    #[inline]
    pub fn is_due(&self) -> bool {
        self.due_now
    }

    /// The next packet to send, to a source for which `of` is true.
    pub fn poll(&mut self, now: Instant, of: impl Fn(Address) -> bool) -> Option<Repr> {
        if self.next.is_none_or(|at| at > now) {
            return None;
        }
        let mut states = self.states.iter_mut();
        let Some((pair, state)) =
            states.find(|(pair, state)| state.due_at <= now && of(pair.source))
        else {
            self.update_next(now);
            return None;
        };
        let pair = *pair;
        let packet = state.message.emit(pair.receiver, pair.source);
        self.polled = Some((pair, *state));
        match state.message {
            Control::Stop(_) => {
                state.stop_sent_at = Some(now);
                state.due_at = now + STOP_REPEAT_INTERVAL;
                state.retry_delay = Duration::ZERO;
            }
            Control::Start(_) | Control::Unsupported => {
                self.states.remove(&pair);
                self.quota.release(pair.source.cid);
            }
        }
        Some(packet)
    }

    /// The packet of the last [`poll`](PausedSenders::poll) found no buffer. It is retried after a
    /// delay, and so are the packets that are due to other sources for which `same` is true: they
    /// would find no buffer either.
    pub fn retry_later(&mut self, now: Instant, same: impl Fn(Address) -> bool) {
        let Some((pair, mut before)) = self.polled.take() else {
            return;
        };
        before.retry_delay = (before.retry_delay * 2).clamp(RETRY, RETRY_MAX);
        before.due_at = now + before.retry_delay;
        // When the last STOP has expired, the source needs no START.
        let over = before
            .stop_sent_at
            .is_some_and(|said| now >= said + STOP_DURATION);
        if let Some(state) = self.states.get_mut(&pair) {
            *state = before;
        } else if !over
            && self
                .quota
                .take(pair.source.cid, PausedSenders::MAX_PER_ENDPOINT)
        {
            self.states.insert(pair, before);
        }
        for (pair, state) in &mut self.states {
            if state.due_at <= now && same(pair.source) {
                state.due_at = before.due_at;
                state.retry_delay = before.retry_delay;
            }
        }
        self.update_next(now);
    }

    /// The time of the next call of [`poll`](PausedSenders::poll), which may return nothing.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.next.filter(|_| !self.states.is_empty())
    }

    /// Whether no source is paused.
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// Paused sources.
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Finds the first entry that is due.
    fn update_next(&mut self, now: Instant) {
        self.next = self.states.values().map(|state| state.due_at).min();
        self.due_now = self.next.is_some_and(|at| at <= now);
    }

    fn schedule(&mut self, at: Instant) {
        if self.next.is_none_or(|next| at < next) {
            self.next = Some(at);
        }
    }
}

#[cfg(test)]
#[path = "paused_senders_tests.rs"]
mod tests;
