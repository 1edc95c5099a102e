//! How many messages a worker takes in before its devices have their turn.
//!
//! What must hold: there is a bound on their number, and on the bytes of datagrams that their
//! receivers copy; what is over it waits where it is, in its order; one at least is taken.

use crate::device::TURN_BYTES;
use crate::device::sibling_message::SiblingMessage;

/// Messages taken before devices have their turn.
const MESSAGES: usize = 1024;

/// What was taken so far.
#[derive(Debug, Default)]
pub(super) struct Intake {
    messages: usize,
    /// Of datagrams.
    bytes: usize,
}

impl Intake {
    /// Whether one more may be taken.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.messages < MESSAGES && self.bytes < TURN_BYTES
    }

    /// One was taken.
    #[inline]
    pub(super) fn add(&mut self) {
        self.messages += 1;
    }

    /// One of a sibling was taken.
    #[inline]
    pub(super) fn add_from_sibling(&mut self, message: &SiblingMessage) {
        self.add();
        if let SiblingMessage::Datagram(datagram) = message {
            self.bytes = self.bytes.saturating_add(datagram.header.len as usize);
        }
    }
}
