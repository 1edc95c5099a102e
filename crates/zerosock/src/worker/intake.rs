//! The limit of messages that a worker handles before its devices have their turns.
//!
//! # Invariants
//!
//! - The number of messages, and the bytes of datagrams that receivers copy, are bounded.
//! - Messages beyond the limit stay queued in order.
//! - At least one message is handled.

use crate::device::TURN_BYTES;
use crate::device::sibling_message::SiblingMessage;

/// Messages handled before devices have their turns.
const MESSAGES: usize = 1024;

/// The messages taken so far in this step.
#[derive(Debug, Default)]
pub(super) struct Intake {
    messages: usize,
    /// Bytes of datagrams.
    bytes: usize,
}

impl Intake {
    /// Whether another message may be taken.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.messages < MESSAGES && self.bytes < TURN_BYTES
    }

    /// Counts a message.
    #[inline]
    pub(super) fn add(&mut self) {
        self.messages += 1;
    }

    /// Counts a message of a sibling.
    #[inline]
    pub(super) fn add_from_sibling(&mut self, message: &SiblingMessage) {
        self.add();
        if let SiblingMessage::Datagram(datagram) = message {
            self.bytes = self.bytes.saturating_add(datagram.header.len as usize);
        }
    }
}
