//! Messages that were only partly sent for lack of buffers.
//!
//! A message is sent completely or not at all. Credit for the whole message is reserved first, but
//! buffers may run out; the rest is then copied here, and the backend sends it as buffers return. A
//! connection sends no other message before that, so each has at most one entry, no longer than the
//! peer's receive buffer.

use std::collections::VecDeque;
use std::io::IoSlice;

use zerosock_proto::vsock::{FlowId, MessageReservation};
use zerosock_proto::wire::vsock::{SEQ_EOM, SEQ_EOR};

/// The length of a message that lies in several slices.
#[inline]
pub(crate) fn len_of(slices: &[IoSlice<'_>]) -> usize {
    match slices {
        [slice] => slice.len(),
        _ => slices.iter().map(|slice| slice.len()).sum(),
    }
}

/// Passes each slice of a message to `put`, with its offset.
#[inline]
pub(crate) fn put_all(slices: &[IoSlice<'_>], mut put: impl FnMut(usize, &[u8])) {
    let mut at = 0;
    for slice in slices {
        put(at, slice);
        at += slice.len();
    }
}

/// A cursor over the bytes of a message that lies in several slices.
#[derive(Debug)]
pub(crate) struct Slices<'a> {
    slices: &'a [IoSlice<'a>],
    /// Bytes already taken of the first slice.
    taken: usize,
    left: usize,
}

impl<'a> Slices<'a> {
    pub(crate) fn new(slices: &'a [IoSlice<'a>]) -> Slices<'a> {
        Slices {
            slices,
            taken: 0,
            left: len_of(slices),
        }
    }

    /// Bytes not taken yet.
    pub(crate) fn left(&self) -> usize {
        self.left
    }

    /// Takes the next `len` bytes: passes each piece to `put` with its offset.
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

/// The unsent rest of a message. See the module documentation.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) reservation: MessageReservation,
    bytes: Vec<u8>,
    /// Bytes of `bytes` already sent.
    at: usize,
    ends_record: bool,
}

impl Outgoing {
    /// The rest of a message in `slices`, sent with the credit of `reservation`.
    pub(crate) fn from_slices(
        reservation: MessageReservation,
        mut slices: Slices<'_>,
        ends_record: bool,
    ) -> Outgoing {
        let mut bytes = Vec::with_capacity(slices.left());
        slices.take(slices.left(), |_, part| bytes.extend_from_slice(part));
        Outgoing::new(reservation, bytes, ends_record)
    }

    /// A message of `bytes`, sent with the credit of `reservation`.
    pub(crate) fn new(
        reservation: MessageReservation,
        bytes: Vec<u8>,
        ends_record: bool,
    ) -> Outgoing {
        Outgoing {
            reservation,
            bytes,
            at: 0,
            ends_record,
        }
    }

    /// A message of which `at` bytes were sent.
    pub(crate) fn resumed(reservation: MessageReservation, bytes: Vec<u8>, at: usize) -> Outgoing {
        Outgoing {
            reservation,
            bytes,
            at,
            ends_record: false,
        }
    }

    /// Bytes not sent yet.
    pub(crate) fn left(&self) -> &[u8] {
        self.bytes.get(self.at..).unwrap_or(&[])
    }

    /// Marks `len` more bytes as sent.
    pub(crate) fn advance(&mut self, len: usize) {
        self.at += len;
    }

    /// The header flags of a part of `len` bytes, if it ends the message.
    pub(crate) fn end(&self, len: usize) -> Option<u32> {
        end(self.left().len() - len, self.ends_record)
    }
}

/// Whether the rest of a message of this flow is kept.
pub(crate) fn is_kept(outgoing: &VecDeque<Outgoing>, flow: FlowId) -> bool {
    outgoing.iter().any(|kept| kept.reservation.flow() == flow)
}

/// The header flags of a message that one packet has.
pub(crate) fn whole(ends_record: bool) -> u32 {
    match ends_record {
        true => SEQ_EOM | SEQ_EOR,
        false => SEQ_EOM,
    }
}

/// The header flags of a part that `left` bytes follow, if it ends the message.
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
