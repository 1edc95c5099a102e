//! The receiver's side of the flow control: which sources were told to stop, and what is to be said
//! to them.
//!
//! What must hold: there are at most [`Stops::MOST`] of them, and of one endpoint at most
//! [`Stops::MOST_OF_ONE`], so that one that sends from many ports does not keep others from being
//! told; who is not told may lose datagrams, which they may anyway. A START that was due is said
//! once, a STOP until it is needed no more.

use core::time::Duration;

use hashbrown::HashMap;

use super::shares::Shares;
use super::{Control, Place, STOP_AGAIN, STOP_HOLDS, STOP_UNHEARD};
use crate::addr::Address;
use crate::time::Instant;
use crate::wire::vsock::Repr;

/// After how long a packet that found no buffer is tried again: at first, and at most. Each time it
/// is twice as long, since whoever takes nothing may never do.
const RETRY: Duration = Duration::from_millis(1);
const RETRY_MOST: Duration = Duration::from_millis(32);

/// See the module.
#[derive(Debug)]
pub struct Stops {
    /// What it is about.
    place: Place,
    told: HashMap<Pair, Told>,
    shares: Shares,
    /// Not later than the first that is due.
    next: Option<Instant>,
    /// Something is due at once.
    fresh: bool,
    /// What was polled last, as it was before.
    polled: Option<(Pair, Told)>,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
struct Pair {
    /// The source.
    to: Address,
    /// The receiver.
    about: Address,
}

#[derive(Copy, Clone, Debug)]
struct Told {
    word: Control,
    due: Instant,
    /// When it was told to stop last.
    said: Option<Instant>,
    /// How long it was put off last, because there was no buffer.
    put_off: Duration,
}

impl Stops {
    /// Most sources that are told to stop at once.
    pub const MOST: usize = 256;
    /// Most of them that are of one endpoint.
    pub const MOST_OF_ONE: usize = 64;

    /// Nobody was told.
    pub fn new(place: Place) -> Stops {
        Stops {
            place,
            told: HashMap::new(),
            shares: Shares::default(),
            next: None,
            fresh: false,
            polled: None,
        }
    }

    /// A datagram has come from `source` for `about`, which has enough.
    pub fn stop(&mut self, now: Instant, about: Address, source: Address) {
        let word = Control::Stop(self.place);
        let pair = Pair { to: source, about };
        if let Some(told) = self.told.get_mut(&pair) {
            // A START that was not said yet; or a STOP that was not heard.
            let unheard = told.said.is_some_and(|said| now >= said + STOP_UNHEARD);
            if told.word != word || (unheard && told.put_off.is_zero()) {
                told.due = now;
            }
            told.word = word;
            let due = told.due;
            self.fresh |= due <= now;
            return self.due(due);
        }
        if self.told.len() >= Stops::MOST || !self.shares.take(source.cid, Stops::MOST_OF_ONE) {
            return;
        }
        let told = Told {
            word,
            due: now,
            said: None,
            put_off: Duration::ZERO,
        };
        self.told.insert(pair, told);
        self.fresh = true;
        self.due(now);
    }

    /// `about` has room again, or is gone: nobody need wait for it.
    pub fn start(&mut self, about: Address) {
        self.start_where(|receiver| receiver == about);
    }

    /// There is room again for everybody.
    pub fn start_all(&mut self) {
        self.start_where(|_| true);
    }

    fn start_where(&mut self, has_room: impl Fn(Address) -> bool) {
        // At once: it takes no clock to know that.
        let now = Instant::ZERO;
        let word = Control::Start(self.place);
        self.retain(|pair, told| {
            if !has_room(pair.about) {
                return true;
            }
            told.word = word;
            told.due = now;
            // Who was never told to stop need not be told to start.
            told.said.is_some()
        });
        self.fresh |= !self.told.is_empty();
        self.due(now);
    }

    /// Nobody has to be told of `about` or by it any more: an endpoint is gone.
    pub fn forget(&mut self, gone: impl Fn(Address) -> bool) {
        self.retain(|pair, _| !gone(pair.about) && !gone(pair.to));
    }

    /// Ends all that `keep` does not want.
    fn retain(&mut self, mut keep: impl FnMut(&Pair, &mut Told) -> bool) {
        let shares = &mut self.shares;
        self.told.retain(|pair, told| {
            let keeps = keep(pair, told);
            if !keeps {
                shares.give_back(pair.to.cid);
            }
            keeps
        });
    }

    /// Whether something is known to be due: to be asked first, as it needs no clock.
    #[inline]
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// The next packet to be sent, of those to a source of which `of` says so.
    pub fn poll(&mut self, now: Instant, of: impl Fn(Address) -> bool) -> Option<Repr> {
        if self.next.is_none_or(|at| at > now) {
            return None;
        }
        let mut told = self.told.iter_mut();
        let Some((pair, told)) = told.find(|(pair, told)| told.due <= now && of(pair.to)) else {
            self.look(now);
            return None;
        };
        let pair = *pair;
        let packet = told.word.emit(pair.about, pair.to);
        self.polled = Some((pair, *told));
        match told.word {
            Control::Stop(_) => {
                told.said = Some(now);
                told.due = now + STOP_AGAIN;
                told.put_off = Duration::ZERO;
            }
            Control::Start(_) | Control::Deaf => {
                self.told.remove(&pair);
                self.shares.give_back(pair.to.cid);
            }
        }
        Some(packet)
    }

    /// The packet of the last [`poll`](Stops::poll) found no buffer: it comes again, and so do those
    /// that are due to others of whom `same` says that they would not find any either.
    pub fn again(&mut self, now: Instant, same: impl Fn(Address) -> bool) {
        let Some((pair, mut before)) = self.polled.take() else {
            return;
        };
        before.put_off = (before.put_off * 2).clamp(RETRY, RETRY_MOST);
        before.due = now + before.put_off;
        // Nobody waits for a START any more when the last STOP is over.
        let over = before.said.is_some_and(|said| now >= said + STOP_HOLDS);
        if let Some(told) = self.told.get_mut(&pair) {
            *told = before;
        } else if !over && self.shares.take(pair.to.cid, Stops::MOST_OF_ONE) {
            self.told.insert(pair, before);
        }
        for (pair, told) in &mut self.told {
            if told.due <= now && same(pair.to) {
                told.due = before.due;
                told.put_off = before.put_off;
            }
        }
        self.look(now);
    }

    /// When [`poll`](Stops::poll) has something to say; perhaps nothing.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.next.filter(|_| !self.told.is_empty())
    }

    /// Whether anybody was told.
    pub fn is_empty(&self) -> bool {
        self.told.is_empty()
    }

    /// How many were.
    pub fn len(&self) -> usize {
        self.told.len()
    }

    /// Looks when the first is due.
    fn look(&mut self, now: Instant) {
        self.next = self.told.values().map(|told| told.due).min();
        self.fresh = self.next.is_some_and(|at| at <= now);
    }

    fn due(&mut self, at: Instant) {
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
    const STOP: Control = Control::Stop(Place::Receiver);

    fn poll(stops: &mut Stops, now: Instant) -> Option<Repr> {
        stops.poll(now, |_| true)
    }

    fn ms(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn a_source_is_told_once_and_again_while_it_is_needed() {
        let mut stops = Stops::new(Place::Receiver);
        stops.stop(ms(0), ME, at(3, 1));
        assert_eq!(poll(&mut stops, ms(0)), Some(STOP.emit(ME, at(3, 1))));
        stops.stop(ms(9), ME, at(3, 1));
        assert_eq!(poll(&mut stops, ms(9)), None, "what is under way is let be");
        stops.stop(ms(10), ME, at(3, 1));
        assert!(poll(&mut stops, ms(10)).is_some(), "it has not heard");
        assert_eq!(poll(&mut stops, ms(209)), None);
        assert_eq!(stops.poll_timeout(), Some(ms(210)));
        assert!(poll(&mut stops, ms(210)).is_some(), "lest it try");
        stops.start(ME);
        assert_eq!(
            poll(&mut stops, ms(220)),
            Some(Control::Start(Place::Receiver).emit(ME, at(3, 1)))
        );
        assert_eq!(poll(&mut stops, ms(900)), None);
        assert!(stops.is_empty() && stops.poll_timeout().is_none());
    }

    #[test]
    fn who_was_never_told_to_stop_is_not_told_to_start() {
        let mut stops = Stops::new(Place::Receiver);
        stops.stop(ms(0), ME, at(3, 1));
        stops.start(ME);
        assert_eq!(poll(&mut stops, ms(0)), None);
        assert!(stops.is_empty());
    }

    #[test]
    fn a_start_that_was_not_said_becomes_a_stop_again() {
        let mut stops = Stops::new(Place::Receiver);
        stops.stop(ms(0), ME, at(3, 1));
        assert!(poll(&mut stops, ms(0)).is_some());
        stops.start(ME);
        stops.stop(ms(5), ME, at(3, 1));
        assert_eq!(poll(&mut stops, ms(5)), Some(STOP.emit(ME, at(3, 1))));
    }

    #[test]
    fn a_packet_without_a_buffer_comes_again() {
        let mut stops = Stops::new(Place::Receiver);
        stops.stop(ms(0), ME, at(3, 1));
        let stop = poll(&mut stops, ms(0)).unwrap();
        stops.again(ms(0), |_| true);
        assert_eq!(
            (poll(&mut stops, ms(0)), poll(&mut stops, ms(1))),
            (None, Some(stop))
        );
        stops.start(ME);
        let start = poll(&mut stops, ms(2)).unwrap();
        stops.again(ms(2), |_| true);
        assert_eq!(
            (poll(&mut stops, ms(2)), poll(&mut stops, ms(3))),
            (None, Some(start))
        );
        assert!(stops.is_empty());
    }

    #[test]
    fn some_are_told_before_others() {
        let mut stops = Stops::new(Place::Receiver);
        stops.stop(ms(0), ME, at(3, 1));
        stops.stop(ms(0), ME, at(4, 1));
        let of = |cid: u32| move |to: Address| to.cid.get() == cid;
        assert_eq!(stops.poll(ms(0), of(5)), None);
        assert!(stops.is_fresh());
        assert_eq!(stops.poll(ms(0), of(4)), Some(STOP.emit(ME, at(4, 1))));
        assert_eq!(stops.poll(ms(0), of(4)), None);
        assert!(stops.is_fresh());
        assert_eq!(stops.poll(ms(0), of(3)), Some(STOP.emit(ME, at(3, 1))));
        assert_eq!(stops.poll(ms(0), of(3)), None);
        assert!(!stops.is_fresh());
    }

    #[test]
    fn one_endpoint_with_many_ports_leaves_places_to_others() {
        let mut stops = Stops::new(Place::Receiver);
        for port in 0..1000 {
            stops.stop(ms(0), ME, at(3, port));
        }
        assert_eq!(stops.len(), Stops::MOST_OF_ONE);
        stops.stop(ms(0), ME, at(4, 1));
        assert_eq!(stops.len(), Stops::MOST_OF_ONE + 1);
        for cid in 5..100 {
            (0..100).for_each(|port| stops.stop(ms(0), ME, at(cid, port)));
        }
        assert_eq!(stops.len(), Stops::MOST);
        stops.forget(|address| address.cid.get() == 3);
        assert_eq!(stops.len(), Stops::MOST - Stops::MOST_OF_ONE);
    }
    #[test]
    fn who_takes_nothing_is_asked_ever_more_seldom_and_nobody_else_is() {
        let mut stops = Stops::new(Place::Receiver);
        for port in 0..50 {
            stops.stop(ms(0), ME, at(3, port));
        }
        stops.stop(ms(0), ME, at(4, 1));
        let mut others = 0;
        let mut tries = Vec::new();
        for now in 0..1000 {
            while let Some(word) = poll(&mut stops, ms(now)) {
                if word.dst.cid.get() == 4 {
                    others += 1;
                    continue;
                }
                tries.push(now);
                stops.again(ms(now), |to| to.cid.get() == 3);
            }
            assert!(!stops.is_fresh() && stops.poll_timeout() > Some(ms(now)));
        }
        // One for all of them: at once, and after 1, 2, 4, 8, 16 ms, and 32 ms from then on.
        assert_eq!(tries[..7], [0, 1, 3, 7, 15, 31, 63]);
        assert_eq!(tries.len(), 5 + 31);
        assert_eq!(others, 5, "200 ms after each other");
        // None of them has heard it: there is nothing to undo.
        stops.start(ME);
        assert_eq!(stops.len(), 1);
    }

    #[test]
    fn a_start_that_finds_no_buffer_ends_with_what_it_would_undo() {
        let mut stops = Stops::new(Place::Receiver);
        stops.stop(ms(0), ME, at(3, 1));
        assert!(poll(&mut stops, ms(0)).is_some());
        stops.start(ME);
        let mut tries = 0;
        for now in 1..600 {
            if poll(&mut stops, ms(now)).is_some() {
                tries += 1;
                stops.again(ms(now), |_| true);
            }
        }
        // After 1, 2, 4, 8 and 16 ms, and all 32 ms, until the STOP would have ended.
        assert_eq!(tries, 6 + (500 - 32) / 32 + 1);
        assert!(stops.is_empty());
        assert_eq!(stops.shares.len(), 0);
    }

    #[test]
    fn a_stop_that_finds_no_buffer_is_not_hurried_by_more_datagrams() {
        let mut stops = Stops::new(Place::Receiver);
        stops.stop(ms(0), ME, at(3, 1));
        let mut tries = 0;
        for now in 0..100 {
            (0..10).for_each(|_| stops.stop(ms(now), ME, at(3, 1)));
            while poll(&mut stops, ms(now)).is_some() {
                tries += 1;
                stops.again(ms(now), |_| true);
            }
        }
        assert_eq!(tries, 8, "after 1, 2, 4, 8, 16, 32 and 32 ms");
    }
}
