//! The limit of messages that a worker handles before its devices have their turns.
//!
//! # Invariants
//!
//! - The number of messages, and the bytes that receivers copy of them, are bounded.
//! - Messages beyond the limit stay queued in order.
//! - At least one message is handled.

use crate::device::Message;

/// Messages handled before devices have their turns.
const MESSAGES: usize = 1024;

/// Bytes copied before devices have their turns: about a millisecond of work.
const BYTES: usize = 2 << 20;

/// The messages taken so far in this step.
#[derive(Debug, Default)]
pub(super) struct Intake {
    messages: usize,
    bytes: usize,
}

impl Intake {
    /// Whether another message may be taken.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.messages < MESSAGES && self.bytes < BYTES
    }

    /// Counts a message.
    #[inline]
    pub(super) fn add(&mut self) {
        self.messages += 1;
    }

    /// Counts a message between devices.
    #[inline]
    pub(super) fn add_of_device(&mut self, message: &impl Message) {
        self.add();
        self.bytes = self.bytes.saturating_add(message.copied_bytes());
    }
}
