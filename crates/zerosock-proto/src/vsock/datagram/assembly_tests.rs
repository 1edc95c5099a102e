//! Unit tests of `assembly`.

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
fn a_datagram_in_one_packet_needs_no_clock() {
    let mut set = Assembler::new();
    let piece = set.handle(&data(from(1), HOST, 5, true), || {
        panic!("the clock was read")
    });
    assert_eq!(piece, PayloadPart::Whole);
    assert!(!set.is_open() && set.poll_timeout().is_none());
}

#[test]
fn fragments_are_reassembled() {
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
fn an_incomplete_datagram_is_lost_when_another_begins() {
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
    assert_eq!(set.take_lost(), INCOMPLETE, "the destination of the first");
}

#[test]
fn a_datagram_that_is_too_long_is_dropped_to_its_last_fragment() {
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
fn a_discarded_datagram_is_dropped_to_its_last_fragment() {
    let mut set = Assembler::new();
    assert_eq!(put(&mut set, 1, 10, false), PayloadPart::First);
    set.discard();
    assert_eq!(set.take_lost(), INCOMPLETE);
    assert_eq!(set.poll_timeout(), None);
    assert_eq!(put(&mut set, 1, 10, false), PayloadPart::Lost);
    assert_eq!(put(&mut set, 1, 10, true), PayloadPart::Lost);
    assert_eq!(set.take_lost(), None, "once");
    assert_eq!(put(&mut set, 1, 10, true), PayloadPart::Whole);
    set.discard();
    assert_eq!(set.take_lost(), None, "nothing is kept");
}

#[test]
fn an_incomplete_datagram_expires() {
    let mut set = Assembler::new();
    assert_eq!(put(&mut set, 1, 1, false), PayloadPart::First);
    let late = Instant::ZERO + ASSEMBLY_TIMEOUT;
    assert_eq!(set.poll_timeout(), Some(late));
    assert!(!set.handle_timeout(Instant::ZERO) && set.handle_timeout(late));
    assert_eq!(set.take_lost(), INCOMPLETE);
    // The following fragments belong to the discarded datagram.
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
        "expired without a call of handle_timeout"
    );
    assert_eq!(set.take_lost(), INCOMPLETE);
    // A fragment from another address begins a new datagram.
    assert_eq!(put(&mut set, 1, 1, false), PayloadPart::First);
    assert!(set.handle_timeout(late + ASSEMBLY_TIMEOUT));
    assert_eq!(set.take_lost(), INCOMPLETE);
    assert_eq!(put(&mut set, 2, 1, true), PayloadPart::Whole);
    assert_eq!(set.take_lost(), None);
}
