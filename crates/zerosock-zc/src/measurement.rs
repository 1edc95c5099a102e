//! The requests of one submission, as a measurement of the cost of a send.

use std::time::Duration;

use super::calibration::{self, Class};
use super::policy::Policy;
use crate::sys::SendMode;

#[derive(Default)]
pub(super) struct Measurement {
    pub(super) number: u64,
    sends: u32,
    /// Of these, the number that succeeded before the submission ended.
    whole: u32,
    /// The class and mode of all sends; none if there are no sends, or they differ.
    uniform: Option<(Class, SendMode)>,
}

impl Measurement {
    pub(super) fn next(&self) -> Self {
        Self {
            number: self.number + 1,
            ..Self::default()
        }
    }

    /// Takes note that a request of a send was started.
    pub(super) fn started(&mut self, one: Option<(Class, SendMode)>) {
        if self.sends == 0 {
            self.uniform = one;
        } else if self.uniform != one {
            self.uniform = None;
        }
        self.sends += 1;
    }

    /// Takes note that a send succeeded, with its last request made in submission `number`.
    pub(super) fn ended(&mut self, number: u64) {
        self.whole += u32::from(number == self.number);
    }

    /// Records how long the submission took, if the kernel took everything in it: a request that
    /// waits, or is refused, costs next to nothing and sends nothing. Records nothing on a socket
    /// on which the kernel copies: its class also contains sockets over devices that read pages in
    /// place, at other costs.
    pub(super) fn record(&self, took: Duration, policy: &Policy) {
        if let Some((class, mode)) = self.class_and_mode(policy.sends_in_place()) {
            calibration::record_measurement(class, mode, self.sends, took);
        }
    }

    fn class_and_mode(&self, in_place: bool) -> Option<(Class, SendMode)> {
        let taken = self.sends > 0 && self.whole == self.sends;
        self.uniform.filter(|_| taken && in_place)
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::SocketKind;

    use super::super::SendBackend;
    use super::*;

    fn one(mode: SendMode) -> Option<(Class, SendMode)> {
        let class = Class::of(SocketKind::OtherStream, SendBackend::Uring, false, 5000);
        Some((class, mode))
    }

    #[test]
    fn a_submission_is_measured_only_if_all_of_it_was_taken() {
        let mut turn = Measurement::default().next();
        turn.started(one(SendMode::Copy));
        turn.started(one(SendMode::Copy));
        assert_eq!(turn.class_and_mode(true), None);
        turn.ended(1);
        // A send of an earlier submission does not count.
        turn.ended(0);
        assert_eq!(turn.class_and_mode(true), None);
        turn.ended(1);
        assert_eq!(turn.class_and_mode(true), one(SendMode::Copy));
        assert_eq!(turn.next().class_and_mode(true), None);
    }

    #[test]
    fn a_socket_on_which_the_kernel_copies_is_not_measured() {
        for mode in [SendMode::Copy, SendMode::ZeroCopy] {
            let mut turn = Measurement::default().next();
            turn.started(one(mode));
            turn.ended(1);
            assert_eq!(turn.class_and_mode(false), None);
            assert_eq!(turn.class_and_mode(true), one(mode));
        }
    }

    #[test]
    fn a_submission_of_different_sends_is_not_measured() {
        let mut turn = Measurement::default().next();
        turn.started(one(SendMode::Copy));
        turn.started(one(SendMode::ZeroCopy));
        turn.ended(1);
        turn.ended(1);
        assert_eq!(turn.class_and_mode(true), None);
    }
}
