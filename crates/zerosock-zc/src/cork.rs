//! Datagrams in pieces: sends of which each but the last has MSG_MORE.
//!
//! The socket collects the pieces until the last one comes, and drops all of them when it refuses one.
//! The next send then begins a datagram: a piece that is requested again alone, or after one that
//! failed, would arrive as a datagram of its own. A piece can also fail without the socket: it is
//! cancelled, or the kernel has no memory to pin it. Then the socket must be made to forget the earlier
//! pieces, which would otherwise arrive in front of the next datagram. A raw socket cannot be made to,
//! and its sender accepts nothing more. So the pieces of one datagram, and nothing else, are under way
//! together, and they are requested again together or not at all.
//!
//! For that, pieces that the socket has taken are *kept*: they are over, but are neither reported nor
//! given back until the last piece is taken. If the kernel has no memory for a piece without a copy, all
//! pieces are copied. Kept pieces are given back early, and then cannot be requested again, when there is
//! no place for the next piece, and when the program polls or waits before it has sent the next piece:
//! it may need these buffers to send it.
//!
//! # Invariants
//! No call waits for a piece that is kept.

use std::collections::VecDeque;
use std::mem;

use super::in_flight::{InFlightSend, Part};
use super::send_queue::SendQueue;
use crate::sys::{Key, SendMode, Stable};

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
    pub(super) cancelled_chain: bool,
    /// What the pieces that are still to come end with.
    pub(super) failure: Option<i32>,
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
    pub(super) fn inherited_failure(&mut self, send: &InFlightSend) -> Option<i32> {
        match send.part {
            Part::Whole => return None,
            Part::First => self.failure = None,
            Part::Later => {}
        }
        let failure = self.failure;
        if !send.more {
            self.failure = None;
        }
        failure
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

impl<B: Stable> SendQueue<B> {
    /// The socket takes this piece of a datagram, or what is a whole one.
    pub(super) fn piece_taken(&mut self, key: Key) {
        let Some(send) = self.sends.get_mut(key.index()) else {
            return;
        };
        let piece = send.part != Part::Whole;
        let goes_on = piece && send.more;
        self.cork.taken += usize::from(piece);
        self.cork.gathered = goes_on;
        if !goes_on {
            return self.release_kept();
        }
        if self.cork.keeps {
            send.kept = true;
            self.cork.kept.push_back(key);
        }
    }

    /// The pieces that are kept will not be asked again.
    pub(super) fn release_kept(&mut self) {
        while let Some(key) = self.cork.kept.pop_front() {
            if let Some(send) = self.sends.get_mut(key.index()) {
                send.kept = false;
            }
            self.report_to_slot(key);
        }
    }

    /// Whether pieces are kept whose rest was not accepted yet.
    pub(super) fn awaits_pieces(&self) -> bool {
        self.cork.is_keeping() && self.is_handed_over()
    }

    /// Releases pieces for a program that waits for buffers. Those of a datagram that can have no more
    /// pieces, because the sender is closed, are free when the socket has forgotten it.
    pub(super) fn release_kept_for_caller(&mut self) {
        if !self.is_handed_over() {
            return;
        }
        match self.closed && self.cork.keeps {
            true => self.forget_pieces(),
            false => self.release_kept(),
        }
    }

    /// A piece finds no memory to go without a copy: all of its datagram is copied, what the socket
    /// has, what has `failed` now, and what is to follow.
    pub(super) fn copy_pieces(&mut self, failed: Vec<(Key, i32)>) {
        let kept = mem::take(&mut self.cork.kept);
        self.forget_pieces();
        for key in kept {
            if let Some(send) = self.sends.get_mut(key.index()) {
                (send.kept, send.finished) = (false, false);
                self.stats.over -= 1;
                self.stats.bytes -= mem::take(&mut send.sent) as u64;
            }
            self.queue_retry(key);
        }
        for (key, _) in failed {
            self.queue_retry(key);
        }
        // They are the oldest that are not over.
        for key in self.retries.iter().chain(&self.queued) {
            let Some(send) = self.sends.get_mut(key.index()) else {
                break;
            };
            if mem::replace(&mut send.mode, SendMode::Copy) == SendMode::ZeroCopy {
                self.stats.copied_for_memory += 1;
            }
            if !send.more {
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
