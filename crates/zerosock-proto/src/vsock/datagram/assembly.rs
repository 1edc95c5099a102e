//! Datagrams of several packets.
//!
//! The packets of one queue come in order, and those of one datagram are not interleaved with those
//! of another: so one set at a time is all that a queue can have, and the first packet that does
//! not belong to it says that the rest will not come.

use super::{ASSEMBLY_TIMEOUT, DGRAM_EOM, MAX_DATAGRAM};
use crate::addr::Address;
use crate::time::Instant;
use crate::wire::vsock::Repr;

/// What the payload of a packet is.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
#[must_use]
pub enum PayloadPart {
    /// A datagram.
    Whole,
    /// The beginning of one: to be kept, and what was kept before is to be thrown away.
    First,
    /// More of it: to be appended.
    More,
    /// The end: with it what was kept is a datagram of `len` bytes.
    Last {
        /// All of them.
        len: u32,
    },
    /// Part of a datagram that is lost, because it is too long or was not complete in time: what was
    /// kept is to be thrown away.
    Lost,
}

/// A datagram that was thrown away before it was whole.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum Lost {
    /// Some of its fragments have not come.
    Incomplete {
        /// Whom it was for.
        to: Address,
    },
    /// It was longer than any may be.
    TooLong {
        /// Whom it was for.
        to: Address,
    },
}

impl Lost {
    /// Whom it was for.
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
    /// `None`: it is lost, and the rest is dropped as well.
    len: Option<u32>,
    since: Instant,
}

/// The fragments of one queue.
#[derive(Debug, Default)]
pub struct Assembler {
    set: Option<Set>,
    lost: Option<Lost>,
}

impl Assembler {
    /// An assembler that has seen nothing.
    pub fn new() -> Assembler {
        Assembler::default()
    }

    /// Takes the header of a packet with payload (type DGRAM, operation RW). `now` is asked for
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
                // Its rest is no datagram: it would be one without a beginning.
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

    /// The set that is not complete will not be: the queue has ended.
    pub fn forget(&mut self) {
        if let Some(set) = self.set.take() {
            // One that is lost already was told of when it became so.
            let incomplete = Lost::Incomplete { to: set.dst };
            self.lost = set.len.map(|_| incomplete);
        }
    }

    /// The datagram that the last call has thrown away; once.
    #[inline]
    pub fn take_lost(&mut self) -> Option<Lost> {
        self.lost.take()
    }

    /// Whether a part is kept, or being skipped.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.set.is_some()
    }

    /// When what is kept is to be thrown away.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let set = self.set.filter(|set| set.len.is_some())?;
        Some(set.since + ASSEMBLY_TIMEOUT)
    }

    /// True: what is kept is to be thrown away. Its rest may still come, and is no datagram.
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
mod tests {
    use super::super::data;
    use super::*;
    use crate::addr::{Cid, Port};
    use core::time::Duration;

    const HOST: Address = Address::new(Cid::HOST, Port::new(9));
    const INCOMPLETE: Option<Lost> = Some(Lost::Incomplete { to: HOST });

    fn from(port: u32) -> Address {
        Address::new(Cid::new(3), Port::new(port))
    }

    fn put(set: &mut Assembler, port: u32, len: u32, last: bool) -> PayloadPart {
        set.handle(&data(from(port), HOST, len, last), || Instant::ZERO)
    }

    #[test]
    fn a_datagram_of_one_packet_needs_no_clock() {
        let mut set = Assembler::new();
        let piece = set.handle(&data(from(1), HOST, 5, true), || panic!("the time"));
        assert_eq!(piece, PayloadPart::Whole);
        assert!(!set.is_open() && set.poll_timeout().is_none());
    }

    #[test]
    fn fragments_become_one_datagram() {
        let mut set = Assembler::new();
        assert_eq!(put(&mut set, 1, 30000, false), PayloadPart::First);
        assert_eq!(put(&mut set, 1, 0, false), PayloadPart::More);
        assert_eq!(
            put(&mut set, 1, 35536, true),
            PayloadPart::Last { len: 65536 }
        );
        assert_eq!(put(&mut set, 1, 1, true), PayloadPart::Whole);
        assert_eq!(set.take_lost(), None);
    }

    #[test]
    fn another_datagram_ends_a_set_without_its_end() {
        let mut set = Assembler::new();
        assert_eq!(put(&mut set, 1, 10, false), PayloadPart::First);
        assert_eq!(set.take_lost(), None);
        assert_eq!(put(&mut set, 2, 10, false), PayloadPart::First);
        assert_eq!(set.take_lost(), INCOMPLETE);
        assert_eq!(put(&mut set, 1, 10, true), PayloadPart::Whole, "a new one");
        assert_eq!(set.take_lost(), INCOMPLETE);
        assert_eq!(set.take_lost(), None, "once");
        assert!(!set.is_open());
        assert_eq!(put(&mut set, 1, 10, false), PayloadPart::First);
        assert_eq!(put(&mut set, 2, 10, true), PayloadPart::Whole);
        assert_eq!(set.take_lost(), INCOMPLETE);
        let mut other = data(from(1), from(7), 10, true);
        assert_eq!(put(&mut set, 1, 10, false), PayloadPart::First);
        other.dst.cid = Cid::HOST;
        assert_eq!(set.handle(&other, || Instant::ZERO), PayloadPart::Whole);
        assert_eq!(set.take_lost(), INCOMPLETE, "for whom the first was");
    }

    #[test]
    fn what_is_too_long_is_dropped_to_its_end() {
        let mut set = Assembler::new();
        assert_eq!(put(&mut set, 1, 65536, false), PayloadPart::First);
        assert_eq!(put(&mut set, 1, 1, false), PayloadPart::Lost);
        assert_eq!(set.take_lost(), Some(Lost::TooLong { to: HOST }));
        assert_eq!(put(&mut set, 1, u32::MAX, false), PayloadPart::Lost);
        assert_eq!(put(&mut set, 1, 1, true), PayloadPart::Lost);
        assert_eq!(put(&mut set, 1, 1, true), PayloadPart::Whole);
        assert_eq!(set.take_lost(), None, "once");
    }

    #[test]
    fn a_set_has_its_time() {
        let mut set = Assembler::new();
        assert_eq!(put(&mut set, 1, 1, false), PayloadPart::First);
        let late = Instant::ZERO + ASSEMBLY_TIMEOUT;
        assert_eq!(set.poll_timeout(), Some(late));
        assert!(!set.handle_timeout(Instant::ZERO) && set.handle_timeout(late));
        assert_eq!(set.take_lost(), INCOMPLETE);
        // What comes behind is the end of what was thrown away.
        assert_eq!(set.poll_timeout(), None);
        assert_eq!(put(&mut set, 1, 1, false), PayloadPart::Lost);
        assert_eq!(put(&mut set, 1, 1, true), PayloadPart::Lost);
        assert_eq!(set.take_lost(), None, "once");
        assert_eq!(put(&mut set, 1, 1, true), PayloadPart::Whole);
        assert_eq!(put(&mut set, 1, 1, false), PayloadPart::First);
        let late = late + Duration::from_nanos(1);
        let piece = set.handle(&data(from(1), HOST, 1, true), || late);
        assert_eq!(
            piece,
            PayloadPart::Lost,
            "also when nobody looked at the time"
        );
        assert_eq!(set.take_lost(), INCOMPLETE);
        // Another address begins a datagram of its own all the same.
        assert_eq!(put(&mut set, 1, 1, false), PayloadPart::First);
        assert!(set.handle_timeout(late + ASSEMBLY_TIMEOUT));
        assert_eq!(set.take_lost(), INCOMPLETE);
        assert_eq!(put(&mut set, 2, 1, true), PayloadPart::Whole);
        assert_eq!(set.take_lost(), None);
    }
}
