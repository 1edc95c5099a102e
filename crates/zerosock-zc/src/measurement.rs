//! The requests of one submission, as a measurement of what a send costs.

use std::time::Duration;

use super::calibration::{self, Class};
use super::policy::Policy;
use crate::sys::SendMode;

#[derive(Default)]
pub(super) struct Measurement {
    pub(super) number: u64,
    sends: u32,
    /// Of those, how many were over, with success, when the submission was.
    whole: u32,
    /// None when nothing has been started, or things that differ.
    uniform: Option<(Class, SendMode)>,
}

impl Measurement {
    pub(super) fn next(&self) -> Self {
        Self {
            number: self.number + 1,
            ..Self::default()
        }
    }

    /// A request has been made of a send.
    pub(super) fn started(&mut self, one: Option<(Class, SendMode)>) {
        if self.sends == 0 {
            self.uniform = one;
        } else if self.uniform != one {
            self.uniform = None;
        }
        self.sends += 1;
    }

    /// A send is over with success, whose last request was made in the turn of this number.
    pub(super) fn ended(&mut self, number: u64) {
        self.whole += u32::from(number == self.number);
    }

    /// Learns from a turn that took this time, if the kernel has taken everything in it: a request that
    /// waits, or is refused, costs next to nothing and sends nothing. Learns nothing on a socket whose
    /// buffers the kernel copies: its costs are not those of the class, which it shares with sockets
    /// whose device reads pages in place.
    pub(super) fn record(&self, took: Duration, policy: &Policy) {
        if let Some((class, mode)) = self.class_and_mode(policy.sends_in_place()) {
            calibration::learn(class, mode, self.sends, took);
        }
    }

    fn class_and_mode(&self, in_place: bool) -> Option<(Class, SendMode)> {
        let taken = self.sends > 0 && self.whole == self.sends;
        self.uniform.filter(|_| taken && in_place)
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::Kind;

    use super::super::Backend;
    use super::*;

    fn one(mode: SendMode) -> Option<(Class, SendMode)> {
        let class = Class::of(Kind::OtherStream, Backend::Uring, false, 5000);
        Some((class, mode))
    }

    #[test]
    fn a_turn_teaches_only_when_all_of_it_was_taken() {
        let mut turn = Measurement::default().next();
        turn.started(one(SendMode::Copy));
        turn.started(one(SendMode::Copy));
        assert_eq!(turn.class_and_mode(true), None);
        turn.ended(1);
        // What an earlier turn began is none of its.
        turn.ended(0);
        assert_eq!(turn.class_and_mode(true), None);
        turn.ended(1);
        assert_eq!(turn.class_and_mode(true), one(SendMode::Copy));
        assert_eq!(turn.next().class_and_mode(true), None);
    }

    #[test]
    fn a_socket_whose_buffers_are_copied_all_the_same_teaches_nothing() {
        for mode in [SendMode::Copy, SendMode::ZeroCopy] {
            let mut turn = Measurement::default().next();
            turn.started(one(mode));
            turn.ended(1);
            assert_eq!(turn.class_and_mode(false), None);
            assert_eq!(turn.class_and_mode(true), one(mode));
        }
    }

    #[test]
    fn a_turn_of_different_sends_teaches_nothing() {
        let mut turn = Measurement::default().next();
        turn.started(one(SendMode::Copy));
        turn.started(one(SendMode::ZeroCopy));
        turn.ended(1);
        turn.ended(1);
        assert_eq!(turn.class_and_mode(true), None);
    }
}
