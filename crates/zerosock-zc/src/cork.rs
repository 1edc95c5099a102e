//! A datagram that is sent in pieces, each but the last with MSG_MORE.
//!
//! The socket keeps what it was given until the last piece comes, and gives up all of it when it
//! refuses one. Whatever is sent next begins a datagram: a piece that was sent again alone, or behind
//! one that failed, would arrive as a datagram that nobody sent. Where a piece fails that the socket
//! never saw, because it was cancelled or there was no memory to lock, it has to be told to forget
//! those before: they would arrive in front of the next datagram. A raw socket cannot be told, and is
//! sent nothing more. So the pieces of one datagram, and nothing else, are under way together; they
//! are asked again together, or not at all.
//!
//! Those that the socket has taken are *kept* for that: over, but neither told of nor given back until
//! the last piece is taken, too. When there is no memory to send one without a copy, all are copied.
//! They are let go earlier, and cannot be asked again then, when the rest finds no place; and when
//! somebody polls or waits while nothing more of the datagram was accepted: what would come could be
//! his own next send.
//!
//! What must hold: nobody waits for a piece that is kept.

use std::collections::VecDeque;
use std::mem;

use super::flight::{Flight, Part};
use super::flights::Flights;
use crate::sys::{Key, Stable, Way};

#[derive(Default)]
pub(super) struct Cork {
    /// The last send that was accepted is to be continued.
    pub(super) accepting: bool,
    /// Pieces are under way.
    pub(super) under_way: bool,
    /// How many pieces of it the socket has taken.
    pub(super) taken: usize,
    /// Whether they are kept.
    keeps: bool,
    /// Of them, those that are, in their order.
    kept: VecDeque<Key>,
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
    /// Pieces are kept where datagrams may be sent `in_place`. Others need no memory for that, and
    /// there it is UDP, which can be made to forget.
    pub(super) fn new(in_place: bool) -> Self {
        Self {
            keeps: in_place,
            ..Self::default()
        }
    }

    /// What a send is that is accepted next.
    pub(super) fn accept(&mut self, more: bool) -> Part {
        let before = mem::replace(&mut self.accepting, more);
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
            if part == Part::First {
                self.taken = 0;
            }
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

    /// Whether there are pieces that are kept.
    pub(super) fn is_keeping(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Whether every piece that the socket has taken can be asked again.
    pub(super) fn is_all_kept(&self) -> bool {
        self.is_keeping() && self.kept.len() == self.taken
    }
}

impl<B: Stable> Flights<B> {
    /// The socket takes this piece of a datagram, or what is a whole one.
    pub(super) fn takes(&mut self, key: Key) {
        let Some(flight) = self.flights.get_mut(key.index()) else {
            return;
        };
        let piece = flight.part != Part::Whole;
        let goes_on = piece && flight.more;
        self.cork.taken += usize::from(piece);
        self.cork.gathered = goes_on;
        if !goes_on {
            return self.let_go();
        }
        if self.cork.keeps {
            flight.kept = true;
            self.cork.kept.push_back(key);
        }
    }

    /// The pieces that are kept will not be asked again.
    pub(super) fn let_go(&mut self) {
        while let Some(key) = self.cork.kept.pop_front() {
            if let Some(flight) = self.flights.get_mut(key.index()) {
                flight.kept = false;
            }
            self.conclude(key);
        }
    }

    /// Whether pieces are kept whose rest was not accepted yet.
    pub(super) fn awaits_pieces(&self) -> bool {
        self.cork.is_keeping() && self.is_handed_over()
    }

    /// Somebody waits for buffers. Those of a datagram that nobody can send the rest of any more are
    /// free when the socket has forgotten it.
    pub(super) fn let_go_if_asked(&mut self) {
        if !self.is_handed_over() {
            return;
        }
        match self.closed && self.cork.keeps {
            true => self.forget_pieces(),
            false => self.let_go(),
        }
    }

    /// A piece finds no memory to go without a copy: all of its datagram is copied, what the socket
    /// has, what has `failed` now, and what is to follow.
    pub(super) fn copy_pieces(&mut self, failed: Vec<(Key, i32)>) {
        let kept = mem::take(&mut self.cork.kept);
        self.forget_pieces();
        for key in kept {
            if let Some(flight) = self.flights.get_mut(key.index()) {
                (flight.kept, flight.over) = (false, false);
                self.stats.over -= 1;
                self.stats.bytes -= mem::take(&mut flight.sent) as u64;
            }
            self.ask_again(key);
        }
        for (key, _) in failed {
            self.ask_again(key);
        }
        // They are the oldest that are not over.
        for key in self.again.iter().chain(&self.queue) {
            let Some(flight) = self.flights.get_mut(key.index()) else {
                break;
            };
            if mem::replace(&mut flight.way, Way::Copy) == Way::ZeroCopy {
                self.stats.copied_for_memory += 1;
            }
            if !flight.more {
                break;
            }
        }
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
        cork.taken = 1;
        cork.started(Part::Later);
        assert_eq!(cork.taken, 1);
        cork.started(Part::Whole);
        assert_eq!(cork.taken, 1, "another is none of it");
        cork.started(Part::First);
        assert_eq!(cork.taken, 0);
    }
}
