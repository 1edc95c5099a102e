//! The receiver's side of the flow control: which sources were told to stop, and what is to be said
//! to them.
//!
//! What must hold: there are at most [`Stops::MAX`] of them, and of one endpoint at most
//! [`Stops::MAX_PER_ENDPOINT`], so that one that sends from many ports does not keep others from being
//! told; who is not told may lose datagrams, which they may anyway. A START that was due is said
//! once, a STOP until it is needed no more.

use core::time::Duration;

use hashbrown::HashMap;

use super::quota::EndpointQuota;
use super::{Control, PauseSource, STOP_DURATION, STOP_REPEAT_INTERVAL, STOP_RESEND_DELAY};
use crate::addr::Address;
use crate::time::Instant;
use crate::wire::vsock::Repr;

/// After how long a packet that found no buffer is tried again: at first, and at most. Each time it
/// is twice as long, since whoever takes nothing may never do.
const RETRY: Duration = Duration::from_millis(1);
const RETRY_MAX: Duration = Duration::from_millis(32);

/// See the module.
#[derive(Debug)]
pub struct PausedSenders {
    /// What it is about.
    queue: PauseSource,
    states: HashMap<Pair, PauseState>,
    quota: EndpointQuota,
    /// Not later than the first that is due.
    next: Option<Instant>,
    /// Something is due at once.
    due_now: bool,
    /// What was polled last, as it was before.
    polled: Option<(Pair, PauseState)>,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
struct Pair {
    /// The source.
    source: Address,
    /// The receiver.
    receiver: Address,
}

#[derive(Copy, Clone, Debug)]
struct PauseState {
    message: Control,
    due_at: Instant,
    /// When it was told to stop last.
    stop_sent_at: Option<Instant>,
    /// How long it was put off last, because there was no buffer.
    retry_delay: Duration,
}

impl PausedSenders {
    /// Most sources that are told to stop at once.
    pub const MAX: usize = 256;
    /// Most of them that are of one endpoint.
    pub const MAX_PER_ENDPOINT: usize = 64;

    /// Nobody was told.
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

    /// A datagram has come from `source` for `receiver`, which has enough.
    pub fn pause(&mut self, now: Instant, receiver: Address, source: Address) {
        let message = Control::Stop(self.queue);
        let pair = Pair { source, receiver };
        if let Some(state) = self.states.get_mut(&pair) {
            // A START that was not said yet; or a STOP that was not heard.
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

    /// `receiver` has room again, or is gone: nobody need wait for it.
    pub fn resume(&mut self, receiver: Address) {
        self.resume_where(|other| other == receiver);
    }

    /// There is room again for everybody.
    pub fn resume_all(&mut self) {
        self.resume_where(|_| true);
    }

    fn resume_where(&mut self, has_space: impl Fn(Address) -> bool) {
        // At once: it takes no clock to know that.
        let now = Instant::ZERO;
        let message = Control::Start(self.queue);
        self.retain(|pair, state| {
            if !has_space(pair.receiver) {
                return true;
            }
            state.message = message;
            state.due_at = now;
            // Who was never told to stop need not be told to start.
            state.stop_sent_at.is_some()
        });
        self.due_now |= !self.states.is_empty();
        self.schedule(now);
    }

    /// Nobody has to be told of `receiver` or by it any more: an endpoint is gone.
    pub fn forget(&mut self, gone: impl Fn(Address) -> bool) {
        self.retain(|pair, _| !gone(pair.receiver) && !gone(pair.source));
    }

    /// Ends all that `decline_move` does not want.
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

    /// Whether something is known to be due: to be asked first, as it needs no clock.
    #[inline]
    pub fn is_due(&self) -> bool {
        self.due_now
    }

    /// The next packet to be sent, of those to a source of which `consume` says so.
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

    /// The packet of the last [`poll`](Stops::poll) found no buffer: it comes again, and so do those
    /// that are due to others of whom `same` says that they would not find any either.
    pub fn retry_later(&mut self, now: Instant, same: impl Fn(Address) -> bool) {
        let Some((pair, mut before)) = self.polled.take() else {
            return;
        };
        before.retry_delay = (before.retry_delay * 2).clamp(RETRY, RETRY_MAX);
        before.due_at = now + before.retry_delay;
        // Nobody waits for a START any more when the last STOP is over.
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

    /// When [`poll`](Stops::poll) has something to say; perhaps nothing.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.next.filter(|_| !self.states.is_empty())
    }

    /// Whether anybody was told.
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// How many were.
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Looks when the first is due.
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
mod tests {
    use super::*;
    use crate::addr::{Cid, Port};

    const fn at(cid: u32, port: u32) -> Address {
        Address::new(Cid::new(cid), Port::new(port))
    }

    const ME: Address = at(2, 9);
    const STOP: Control = Control::Stop(PauseSource::Receiver);

    fn poll(paused: &mut PausedSenders, now: Instant) -> Option<Repr> {
        paused.poll(now, |_| true)
    }

    fn ms(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn a_source_is_told_once_and_again_while_it_is_needed() {
        let mut paused = PausedSenders::new(PauseSource::Receiver);
        paused.pause(ms(0), ME, at(3, 1));
        assert_eq!(poll(&mut paused, ms(0)), Some(STOP.emit(ME, at(3, 1))));
        paused.pause(ms(9), ME, at(3, 1));
        assert_eq!(
            poll(&mut paused, ms(9)),
            None,
            "what is under way is let be"
        );
        paused.pause(ms(10), ME, at(3, 1));
        assert!(poll(&mut paused, ms(10)).is_some(), "it has not heard");
        assert_eq!(poll(&mut paused, ms(209)), None);
        assert_eq!(paused.poll_timeout(), Some(ms(210)));
        assert!(poll(&mut paused, ms(210)).is_some(), "lest it try");
        paused.resume(ME);
        assert_eq!(
            poll(&mut paused, ms(220)),
            Some(Control::Start(PauseSource::Receiver).emit(ME, at(3, 1)))
        );
        assert_eq!(poll(&mut paused, ms(900)), None);
        assert!(paused.is_empty() && paused.poll_timeout().is_none());
    }

    #[test]
    fn who_was_never_told_to_stop_is_not_told_to_start() {
        let mut paused = PausedSenders::new(PauseSource::Receiver);
        paused.pause(ms(0), ME, at(3, 1));
        paused.resume(ME);
        assert_eq!(poll(&mut paused, ms(0)), None);
        assert!(paused.is_empty());
    }

    #[test]
    fn a_start_that_was_not_said_becomes_a_stop_again() {
        let mut paused = PausedSenders::new(PauseSource::Receiver);
        paused.pause(ms(0), ME, at(3, 1));
        assert!(poll(&mut paused, ms(0)).is_some());
        paused.resume(ME);
        paused.pause(ms(5), ME, at(3, 1));
        assert_eq!(poll(&mut paused, ms(5)), Some(STOP.emit(ME, at(3, 1))));
    }

    #[test]
    fn a_packet_without_a_buffer_comes_again() {
        let mut paused = PausedSenders::new(PauseSource::Receiver);
        paused.pause(ms(0), ME, at(3, 1));
        let stop = poll(&mut paused, ms(0)).unwrap();
        paused.retry_later(ms(0), |_| true);
        assert_eq!(
            (poll(&mut paused, ms(0)), poll(&mut paused, ms(1))),
            (None, Some(stop))
        );
        paused.resume(ME);
        let start = poll(&mut paused, ms(2)).unwrap();
        paused.retry_later(ms(2), |_| true);
        assert_eq!(
            (poll(&mut paused, ms(2)), poll(&mut paused, ms(3))),
            (None, Some(start))
        );
        assert!(paused.is_empty());
    }

    #[test]
    fn some_are_told_before_others() {
        let mut paused = PausedSenders::new(PauseSource::Receiver);
        paused.pause(ms(0), ME, at(3, 1));
        paused.pause(ms(0), ME, at(4, 1));
        let of = |cid: u32| move |to: Address| to.cid.get() == cid;
        assert_eq!(paused.poll(ms(0), of(5)), None);
        assert!(paused.is_due());
        assert_eq!(paused.poll(ms(0), of(4)), Some(STOP.emit(ME, at(4, 1))));
        assert_eq!(paused.poll(ms(0), of(4)), None);
        assert!(paused.is_due());
        assert_eq!(paused.poll(ms(0), of(3)), Some(STOP.emit(ME, at(3, 1))));
        assert_eq!(paused.poll(ms(0), of(3)), None);
        assert!(!paused.is_due());
    }

    #[test]
    fn one_endpoint_with_many_ports_leaves_queues_to_others() {
        let mut paused = PausedSenders::new(PauseSource::Receiver);
        for port in 0..1000 {
            paused.pause(ms(0), ME, at(3, port));
        }
        assert_eq!(paused.len(), PausedSenders::MAX_PER_ENDPOINT);
        paused.pause(ms(0), ME, at(4, 1));
        assert_eq!(paused.len(), PausedSenders::MAX_PER_ENDPOINT + 1);
        for cid in 5..100 {
            (0..100).for_each(|port| paused.pause(ms(0), ME, at(cid, port)));
        }
        assert_eq!(paused.len(), PausedSenders::MAX);
        paused.forget(|address| address.cid.get() == 3);
        assert_eq!(
            paused.len(),
            PausedSenders::MAX - PausedSenders::MAX_PER_ENDPOINT
        );
    }
    #[test]
    fn who_takes_nothing_is_asked_ever_more_seldom_and_nobody_else_is() {
        let mut paused = PausedSenders::new(PauseSource::Receiver);
        for port in 0..50 {
            paused.pause(ms(0), ME, at(3, port));
        }
        paused.pause(ms(0), ME, at(4, 1));
        let mut others = 0;
        let mut tries = Vec::new();
        for now in 0..1000 {
            while let Some(message) = poll(&mut paused, ms(now)) {
                if message.dst.cid.get() == 4 {
                    others += 1;
                    continue;
                }
                tries.push(now);
                paused.retry_later(ms(now), |to| to.cid.get() == 3);
            }
            assert!(!paused.is_due() && paused.poll_timeout() > Some(ms(now)));
        }
        // One for all of them: at once, and after 1, 2, 4, 8, 16 ms, and 32 ms from then on.
        assert_eq!(tries[..7], [0, 1, 3, 7, 15, 31, 63]);
        assert_eq!(tries.len(), 5 + 31);
        assert_eq!(others, 5, "200 ms after each other");
        // None of them has heard it: there is nothing to undo.
        paused.resume(ME);
        assert_eq!(paused.len(), 1);
    }

    #[test]
    fn a_start_that_finds_no_buffer_ends_with_what_it_would_undo() {
        let mut paused = PausedSenders::new(PauseSource::Receiver);
        paused.pause(ms(0), ME, at(3, 1));
        assert!(poll(&mut paused, ms(0)).is_some());
        paused.resume(ME);
        let mut tries = 0;
        for now in 1..600 {
            if poll(&mut paused, ms(now)).is_some() {
                tries += 1;
                paused.retry_later(ms(now), |_| true);
            }
        }
        // After 1, 2, 4, 8 and 16 ms, and all 32 ms, until the STOP would have ended.
        assert_eq!(tries, 6 + (500 - 32) / 32 + 1);
        assert!(paused.is_empty());
        assert_eq!(paused.quota.len(), 0);
    }

    #[test]
    fn a_stop_that_finds_no_buffer_is_not_hurried_by_more_datagrams() {
        let mut paused = PausedSenders::new(PauseSource::Receiver);
        paused.pause(ms(0), ME, at(3, 1));
        let mut tries = 0;
        for now in 0..100 {
            (0..10).for_each(|_| paused.pause(ms(now), ME, at(3, 1)));
            while poll(&mut paused, ms(now)).is_some() {
                tries += 1;
                paused.retry_later(ms(now), |_| true);
            }
        }
        assert_eq!(tries, 8, "after 1, 2, 4, 8, 16, 32 and 32 ms");
    }
}
