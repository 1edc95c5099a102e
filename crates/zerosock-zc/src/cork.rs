//! Datagrams in pieces: each piece but the last is sent with MSG_MORE.
//!
//! The socket collects the pieces until the last one comes, and drops all of them when it refuses
//! one. The next send then begins a datagram: a piece that is requested again alone, or after one
//! that failed, would arrive as a datagram of its own. A piece can also fail without the socket: it
//! is cancelled, or the kernel has no memory to pin it. Then the socket must be made to forget the
//! earlier pieces, which would otherwise arrive in front of the next datagram. A raw socket cannot
//! forget them, and its sender accepts nothing more. So the pieces of one datagram, and nothing
//! else, are under way together, and they are requested again together or not at all.
//!
//! For that, pieces that the socket has taken are *kept*: they are finished, but are neither
//! reported nor returned until the last piece is taken. If the kernel has no memory for a piece
//! without a copy, all pieces are copied. Kept pieces are returned early, and then cannot be
//! requested again, when there is no place for the next piece, and when the application polls or
//! waits before it has sent the next one: it may need these buffers to send it.
//!
//! # Invariants
//! No call waits for a piece that is kept.

use std::collections::VecDeque;
use std::mem;

use super::in_flight::{DatagramPart, InFlightSend};
use crate::sys::Key;

#[derive(Default)]
pub(super) struct Cork {
    /// The last accepted send has MSG_MORE.
    pub(super) accepting: bool,
    /// Requests for pieces have their results to come.
    pub(super) under_way: bool,
    /// Number of pieces of the current datagram that the socket has taken.
    pub(super) taken: usize,
    /// Whether taken pieces are kept.
    pub(super) keeps: bool,
    /// Kept pieces of the current datagram, in order.
    pub(super) kept: VecDeque<Key>,
    /// The socket may have collected pieces of an incomplete datagram.
    pub(super) gathered: bool,
    /// Failed pieces of the chain under way, with their error numbers.
    pub(super) failed: Vec<(Key, i32)>,
    /// The chain under way, or a piece of its datagram, was cancelled.
    pub(super) cancelled_chain: bool,
    /// The error number with which later pieces of the current datagram fail.
    pub(super) failure: Option<i32>,
}

impl Cork {
    /// Keeps pieces where datagrams may be sent `in_place`: these are UDP sockets, which can forget
    /// collected pieces. Copies do not run out of that memory, so they need not be requested again.
    pub(super) fn new(in_place: bool) -> Self {
        Self {
            keeps: in_place,
            ..Self::default()
        }
    }

    /// The part of a datagram that the next accepted send is.
    pub(super) fn accept(&mut self, more: bool) -> DatagramPart {
        let before = mem::replace(&mut self.accepting, more);
        match (before, more) {
            (true, _) => DatagramPart::Later,
            (false, true) => DatagramPart::First,
            (false, false) => DatagramPart::Whole,
        }
    }

    /// Whether a send can be started while `open` requests are under way; `chained` if they are the
    /// chain that it would join.
    pub(super) fn admits(&self, part: DatagramPart, open: usize, chained: bool) -> bool {
        match part {
            _ if open == 0 => true,
            DatagramPart::Whole => !self.under_way,
            DatagramPart::First => false,
            DatagramPart::Later => self.under_way && chained,
        }
    }

    /// Takes note that a request was started.
    pub(super) fn started(&mut self, part: DatagramPart) {
        if part != DatagramPart::Whole {
            self.under_way = true;
            if part == DatagramPart::First {
                self.taken = 0;
            }
        }
    }

    /// The error number with which a piece fails because an earlier piece failed.
    pub(super) fn inherited_failure(&mut self, send: &InFlightSend) -> Option<i32> {
        match send.part {
            DatagramPart::Whole => return None,
            DatagramPart::First => self.failure = None,
            DatagramPart::Later => {}
        }
        let failure = self.failure;
        if !send.more {
            self.failure = None;
        }
        failure
    }

    /// Whether any pieces are kept.
    pub(super) fn is_keeping(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Whether every piece that the socket has taken can be requested again.
    pub(super) fn is_all_kept(&self) -> bool {
        self.is_keeping() && self.kept.len() == self.taken
    }
}

#[cfg(test)]
#[path = "cork_tests.rs"]
mod tests;
