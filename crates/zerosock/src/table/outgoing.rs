//! Messages on their way out: what of one has not left for want of buffers.
//!
//! A message is sent as a whole or not at all. Credit for all of it is there before it begins, but
//! buffers may not be; the rest is copied aside then, and its engine sends it as buffers come. Until
//! it has ended no other of its connection begins, so there is one at most for each, no longer than
//! what its peer's buffer takes.

use std::io::IoSlice;

use zerosock_proto::vsock::MessageReservation;
use zerosock_proto::wire::vsock::SEQ_EOR;

/// The bytes of a message, in slices, from which parts are taken one after the other.
#[derive(Debug)]
pub(crate) struct Slices<'a> {
    slices: &'a [IoSlice<'a>],
    /// Taken of the first of them.
    taken: usize,
    left: usize,
}

impl<'a> Slices<'a> {
    pub(crate) fn new(slices: &'a [IoSlice<'a>]) -> Slices<'a> {
        let left = slices.iter().map(|slice| slice.len()).sum();
        Slices {
            slices,
            taken: 0,
            left,
        }
    }

    /// Bytes that were not taken.
    pub(crate) fn left(&self) -> usize {
        self.left
    }

    /// Takes the next `len` bytes: gives them to `put`, with where each stretch of them begins.
    pub(crate) fn take(&mut self, len: usize, mut put: impl FnMut(usize, &[u8])) {
        let mut at = 0;
        while at < len
            && let Some(first) = self.slices.first()
        {
            let rest = first.get(self.taken..).unwrap_or(&[]);
            let part = rest.get(..len - at).unwrap_or(rest);
            put(at, part);
            at += part.len();
            self.taken += part.len();
            self.left -= part.len();
            if self.taken >= first.len() {
                self.slices = self.slices.get(1..).unwrap_or(&[]);
                self.taken = 0;
            }
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) room: MessageReservation,
    bytes: Vec<u8>,
    /// Those that have left.
    at: usize,
    ends_record: bool,
}

impl Outgoing {
    /// What is left in `slices`, of a message with that credit.
    pub(crate) fn rest(
        room: MessageReservation,
        mut slices: Slices<'_>,
        ends_record: bool,
    ) -> Outgoing {
        let mut bytes = Vec::with_capacity(slices.left());
        slices.take(slices.left(), |_, part| bytes.extend_from_slice(part));
        Outgoing::of(room, bytes, ends_record)
    }

    /// `bytes`, of a message with that credit.
    pub(crate) fn of(room: MessageReservation, bytes: Vec<u8>, ends_record: bool) -> Outgoing {
        Outgoing {
            room,
            bytes,
            at: 0,
            ends_record,
        }
    }

    /// A message of which the first `at` bytes have left.
    pub(crate) fn after(room: MessageReservation, bytes: Vec<u8>, at: usize) -> Outgoing {
        Outgoing {
            room,
            bytes,
            at,
            ends_record: false,
        }
    }

    /// Bytes that have not left.
    pub(crate) fn left(&self) -> &[u8] {
        self.bytes.get(self.at..).unwrap_or(&[])
    }

    /// So many of them have.
    pub(crate) fn advance(&mut self, len: usize) {
        self.at += len;
    }

    /// What `len` more bytes end.
    pub(crate) fn end(&self, len: usize) -> Option<u32> {
        end(self.left().len() - len, self.ends_record)
    }
}

/// What ends with a part behind which `left` bytes follow.
pub(crate) fn end(left: usize, ends_record: bool) -> Option<u32> {
    (left == 0).then_some(if ends_record { SEQ_EOR } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_taken_across_slices() {
        let slices = [&b"ab"[..], b"", b"cdefg", b"h"].map(IoSlice::new);
        let mut slices = Slices::new(&slices);
        let mut out = Vec::new();
        for len in [1, 3, 3, 1] {
            let mut part = vec![0; len];
            slices.take(len, |at, bytes| {
                part[at..at + bytes.len()].copy_from_slice(bytes)
            });
            out.push(String::from_utf8(part).unwrap());
        }
        assert_eq!(out, ["a", "bcd", "efg", "h"]);
        assert_eq!(slices.left(), 0);
    }
}
