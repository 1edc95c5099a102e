//! Reassembles datagrams of several packets.
//!
//! The packets of one queue keep their order, and the fragments of two datagrams are not
//! interleaved. So a queue has at most one incomplete datagram, and the first packet that does not
//! belong to it ends it.

use super::{ASSEMBLY_TIMEOUT, DGRAM_EOM, MAX_DATAGRAM};
use crate::addr::Address;
use crate::time::Instant;
use crate::wire::vsock::Repr;

/// What to do with the payload of a packet.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
#[must_use]
pub enum PayloadPart {
    /// A complete datagram.
    Whole,
    /// The first fragment: keep it, and discard what was kept before.
    First,
    /// A further fragment: append it.
    More,
    /// The last fragment: with it, the kept bytes are a datagram.
    Last {
        /// Length of the datagram, in bytes.
        len: u32,
    },
    /// Part of a datagram that is too long or was not complete in time: discard what was kept.
    Lost,
}

/// A datagram that was discarded before it was complete.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum Lost {
    /// Fragments are missing.
    Incomplete {
        /// Its destination.
        to: Address,
    },
    /// It is longer than [`MAX_DATAGRAM`].
    TooLong {
        /// Its destination.
        to: Address,
    },
}

impl Lost {
    /// Its destination.
    pub const fn to(self) -> Address {
        match self {
            Lost::Incomplete { to } | Lost::TooLong { to } => to,
        }
    }
}

#[derive(Copy, Clone, Debug)]
struct Set {
    src: Address,
    dst: Address,
    /// Bytes received; `None`: the datagram is lost and its remaining fragments are dropped.
    len: Option<u32>,
    since: Instant,
}

/// Reassembly state of one queue.
#[derive(Debug, Default)]
pub struct Assembler {
    set: Option<Set>,
    lost: Option<Lost>,
}

impl Assembler {
    /// An assembler without fragments.
    pub fn new() -> Assembler {
        Assembler::default()
    }

    /// Handles the header of a packet with payload (type DGRAM, operation RW). `now` is called for
    /// fragments only.
    #[inline]
    pub fn handle(&mut self, header: &Repr, now: impl FnOnce() -> Instant) -> PayloadPart {
        if self.set.is_none() && header.flags & DGRAM_EOM != 0 {
            return PayloadPart::Whole;
        }
        self.fragment(header, now())
    }

    #[cold]
    fn fragment(&mut self, header: &Repr, now: Instant) -> PayloadPart {
        let last = header.flags & DGRAM_EOM != 0;
        let fits = |set: &mut Set| set.src == header.src && set.dst == header.dst;
        let Some(mut set) = self.set.take_if(fits) else {
            self.forget();
            if last {
                return PayloadPart::Whole;
            }
            self.set = Some(Set {
                src: header.src,
                dst: header.dst,
                len: Some(header.len),
                since: now,
            });
            return PayloadPart::First;
        };
        if let Some(before) = set.len {
            let len = before.saturating_add(header.len);
            let lost = if now.saturating_duration_since(set.since) > ASSEMBLY_TIMEOUT {
                // The remaining fragments would be a datagram without its beginning.
                Some(Lost::Incomplete { to: set.dst })
            } else {
                (len > MAX_DATAGRAM).then_some(Lost::TooLong { to: set.dst })
            };
            set.len = lost.is_none().then_some(len);
            self.lost = lost;
        }
        if !last {
            self.set = Some(set);
        }
        match set.len {
            None => PayloadPart::Lost,
            Some(len) if last => PayloadPart::Last { len },
            Some(_) => PayloadPart::More,
        }
    }

    /// The queue has ended: an incomplete datagram is lost.
    pub fn forget(&mut self) {
        if let Some(set) = self.set.take() {
            // A datagram that is lost already was reported then.
            let incomplete = Lost::Incomplete { to: set.dst };
            self.lost = set.len.map(|_| incomplete);
        }
    }

    /// Discards the datagram to which the last fragment belongs: it cannot be kept. Its further
    /// fragments are dropped, if that one was not the last.
    pub fn discard(&mut self) {
        if let Some(set) = &mut self.set {
            set.len = None;
            self.lost = Some(Lost::Incomplete { to: set.dst });
        }
    }

    /// The datagram that the last call discarded; reported once.
    #[inline]
    pub fn take_lost(&mut self) -> Option<Lost> {
        self.lost.take()
    }

    /// Whether fragments are kept or being dropped.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.set.is_some()
    }

    /// When the kept fragments expire.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let set = self.set.filter(|set| set.len.is_some())?;
        Some(set.since + ASSEMBLY_TIMEOUT)
    }

    /// True: the kept fragments have expired; discard them. Further fragments of that datagram are
    /// dropped.
    pub fn handle_timeout(&mut self, now: Instant) -> bool {
        let over = self.poll_timeout().is_some_and(|at| at <= now);
        if let (Some(set), true) = (&mut self.set, over) {
            set.len = None;
            self.lost = Some(Lost::Incomplete { to: set.dst });
        }
        over
    }
}

#[cfg(test)]
#[path = "assembly_tests.rs"]
mod tests;
