//! A datagram that is sent in pieces, each but the last with MSG_MORE.
//!
//! The socket keeps what it was given until the last piece comes, and gives up all of it when it
//! refuses one. Whatever is sent next begins a datagram: a piece that was sent again alone, or behind
//! one that failed, would arrive as a datagram that nobody sent. Where a piece fails that the socket
//! never saw, because it was cancelled or there was no memory to lock, it has to be told to forget
//! those before: they would arrive in front of the next datagram. A raw socket cannot be told, and is
//! sent nothing more. So the pieces of one datagram, and
//! nothing else, are under way together; they are asked again together, if none was taken, or not
//! at all.

use zerosock_sys::zc::Key;

use super::flight::{Flight, Part};

#[derive(Default)]
pub(super) struct Cork {
    /// The last send that was accepted is to be continued.
    pub(super) accepting: bool,
    /// Pieces are under way.
    pub(super) under_way: bool,
    /// The socket has taken a piece of it.
    pub(super) taken: bool,
    /// The socket may have pieces of a datagram that has not ended.
    pub(super) gathered: bool,
    /// Pieces that the kernel answered with an error, and which.
    pub(super) failed: Vec<(Key, i32)>,
    /// Those that are under way were cancelled, or some that belong to them.
    pub(super) torn: bool,
    /// What the pieces that are still to come end with.
    pub(super) ended: Option<i32>,
}

impl Cork {
    /// What a send is that is accepted next.
    pub(super) fn accept(&mut self, more: bool) -> Part {
        let before = std::mem::replace(&mut self.accepting, more);
        match (before, more) {
            (true, _) => Part::Later,
            (false, true) => Part::First,
            (false, false) => Part::Whole,
        }
    }

    /// Whether a send can be started while `open` requests are under way; `chained` if they are the
    /// chain that it would join.
    pub(super) fn admits(&self, part: Part, open: usize, chained: bool) -> bool {
        match part {
            _ if open == 0 => true,
            Part::Whole => !self.under_way,
            Part::First => false,
            Part::Later => self.under_way && chained,
        }
    }

    /// A request of it is under way.
    pub(super) fn started(&mut self, part: Part) {
        if part != Part::Whole {
            self.under_way = true;
            self.taken &= part == Part::Later;
        }
    }

    /// What a piece fails with because an earlier one did.
    pub(super) fn ends(&mut self, flight: &Flight) -> Option<i32> {
        match flight.part {
            Part::Whole => return None,
            Part::First => self.ended = None,
            Part::Later => {}
        }
        let ended = self.ended;
        if !flight.more {
            self.ended = None;
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_told_apart() {
        let mut cork = Cork::default();
        let parts = [false, true, true, false, true, false, false].map(|more| cork.accept(more));
        let (whole, first, later) = (Part::Whole, Part::First, Part::Later);
        assert_eq!(parts, [whole, first, later, later, first, later, whole]);
    }

    #[test]
    fn nothing_comes_between_pieces() {
        let mut cork = Cork::default();
        assert!(cork.admits(Part::Whole, 5, true));
        assert!(!cork.admits(Part::First, 5, true));
        assert!(cork.admits(Part::First, 0, false));
        cork.started(Part::First);
        assert!(cork.admits(Part::Later, 1, true));
        assert!(!cork.admits(Part::Later, 1, false), "of another chain");
        assert!(!cork.admits(Part::First, 1, true), "of another datagram");
        assert!(!cork.admits(Part::Whole, 1, true));
    }

    #[test]
    fn what_was_taken_of_one_datagram_says_nothing_of_the_next() {
        let mut cork = Cork::default();
        cork.started(Part::First);
        cork.taken = true;
        cork.started(Part::Later);
        assert!(cork.taken);
        cork.started(Part::Whole);
        assert!(cork.taken, "another is none of it");
        cork.started(Part::First);
        assert!(!cork.taken);
    }
}
