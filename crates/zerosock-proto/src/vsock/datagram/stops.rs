//! The receiver's side of the flow control: which sources were told to stop, and what is to be said
//! to them.
//!
//! What must hold: there are at most [`Stops::MOST`] of them, and of one endpoint at most
//! [`Stops::MOST_OF_ONE`], so that one that sends from many ports does not keep others from being
//! told; who is not told may lose datagrams, which they may anyway. A START that was due is said
//! once, a STOP until it is needed no more.

use super::{Control, Place, STOP_AGAIN, STOP_UNHEARD};
use crate::addr::Address;
use crate::time::Instant;
use crate::wire::vsock::Repr;
use core::time::Duration;

/// After how long a packet that found no buffer is tried again.
const RETRY: Duration = Duration::from_millis(1);

/// See the module.
#[derive(Debug)]
pub struct Stops {
    /// What it is about.
    place: Place,
    told: Vec<Told>,
    /// Not later than the first that is due.
    next: Option<Instant>,
    /// Something is due at once.
    fresh: bool,
}

#[derive(Debug)]
struct Told {
    /// The receiver.
    about: Address,
    /// The source.
    to: Address,
    word: Control,
    due: Instant,
    /// When it was said last.
    said: Option<Instant>,
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
            told: Vec::new(),
            next: None,
            fresh: false,
        }
    }

    /// A datagram has come from `source` for `about`, which has enough.
    pub fn stop(&mut self, now: Instant, about: Address, source: Address) {
        let word = Control::Stop(self.place);
        let known = self
            .told
            .iter_mut()
            .find(|told| told.to == source && told.about == about);
        if let Some(told) = known {
            if told.word != word {
                // It was not said yet.
                told.due = now;
            } else if told.said.is_some_and(|said| now >= said + STOP_UNHEARD) {
                told.due = now;
            }
            told.word = word;
            let due = told.due;
            self.fresh |= due <= now;
            return self.due(due);
        }
        let of_one = self.told.iter().filter(|told| told.to.cid == source.cid);
        if self.told.len() >= Stops::MOST || of_one.count() >= Stops::MOST_OF_ONE {
            return;
        }
        self.told.push(Told {
            about,
            to: source,
            word,
            due: now,
            said: None,
        });
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
        self.told.retain_mut(|told| {
            if !has_room(told.about) {
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
        self.told.retain(|told| !gone(told.about) && !gone(told.to));
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
        let due = |told: &Told| told.due <= now;
        let Some(at) = self.told.iter().position(|told| due(told) && of(told.to)) else {
            self.next = self.told.iter().map(|told| told.due).min();
            self.fresh = self.told.iter().any(due);
            return None;
        };
        let told = self.told.get_mut(at)?;
        let packet = told.word.emit(told.about, told.to);
        match told.word {
            Control::Stop(_) => {
                told.said = Some(now);
                told.due = now + STOP_AGAIN;
            }
            Control::Start(_) | Control::Deaf => {
                self.told.swap_remove(at);
            }
        }
        Some(packet)
    }

    /// A packet of [`poll`](Stops::poll) found no buffer: it comes again soon.
    pub fn again(&mut self, now: Instant, packet: &Repr) {
        let Some(word) = Control::parse(packet) else {
            return;
        };
        let due = now + RETRY;
        let room = self.told.len() < Stops::MOST;
        let known = self
            .told
            .iter_mut()
            .find(|told| told.to == packet.dst && told.about == packet.src);
        match known {
            Some(told) => told.due = due,
            None if room => self.told.push(Told {
                about: packet.src,
                to: packet.dst,
                word,
                due,
                said: Some(now),
            }),
            None => {}
        }
        self.due(due);
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
        stops.again(ms(0), &stop);
        assert_eq!(
            (poll(&mut stops, ms(0)), poll(&mut stops, ms(1))),
            (None, Some(stop))
        );
        stops.start(ME);
        let start = poll(&mut stops, ms(2)).unwrap();
        stops.again(ms(2), &start);
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
}
