//! Messages that a receiver did not take yet.
//!
//! # Invariants
//! - After a push, the memory is at most twice that of the messages that are left.

use std::collections::VecDeque;

/// Messages in the order in which they are to be sent.
#[derive(Debug, Default)]
pub struct HeldMessages {
    bytes: Vec<u8>,
    /// Of the messages that are left.
    lengths: VecDeque<u32>,
    /// Where the first of them begins.
    at: usize,
}

impl HeldMessages {
    /// Adds a copy of a message. Returns false if there is no memory for it.
    pub fn push(&mut self, message: &[u8]) -> bool {
        // A receiver that is always behind never takes the last message.
        if self.at > self.bytes.len() / 2 {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
        if self.bytes.try_reserve(message.len()).is_err() || self.lengths.try_reserve(1).is_err() {
            return false;
        }
        self.bytes.extend_from_slice(message);
        self.lengths.push_back(message.len() as u32);
        true
    }

    /// Whether no message is left.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// The number of messages that are left.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Bytes of the messages that are left, and of sent ones whose memory is not used again yet.
    pub fn memory(&self) -> usize {
        self.bytes.len()
    }

    /// The first message; empty if there is none.
    pub fn first(&self) -> &[u8] {
        let length = self.lengths.front().copied().unwrap_or(0) as usize;
        &self.bytes[self.at..self.at + length]
    }

    /// Removes the first message.
    pub fn pop(&mut self) {
        self.at += self.lengths.pop_front().unwrap_or(0) as usize;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_in_order_with_their_bounds() {
        let mut held = HeldMessages::default();
        for message in [&b"one"[..], b"", b"three"] {
            held.push(message);
        }
        assert_eq!((held.len(), held.memory()), (3, 8));
        for message in [&b"one"[..], b"", b"three"] {
            assert_eq!(held.first(), message);
            held.pop();
        }
        assert_eq!((held.len(), held.first()), (0, &b""[..]));
    }

    #[test]
    fn a_receiver_that_is_always_behind_costs_bounded_memory() {
        let mut held = HeldMessages::default();
        held.push(&[0; 100]);
        for number in 0..1000u32 {
            held.push(&[number as u8; 100]);
            held.pop();
            assert_eq!(held.first(), [number as u8; 100]);
            assert!(held.memory() <= 400, "{}", held.memory());
        }
    }
}
