//! vsock headers, and the fragments of datagrams.
//!
//! A header that is accepted is emitted with the same bytes. A datagram that the assembler reports as complete has
//! the length of the fragments since its first one, all from the same source to the same destination.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zerosock_proto::Instant;
use zerosock_proto::vsock::datagram::{Assembler, Control, MAX_DATAGRAM, PayloadPart};
use zerosock_proto::wire::vsock::{HEADER_LEN, Repr};

fuzz_target!(|bytes: &[u8]| {
    let mut assembler = Assembler::new();
    let (mut kept, mut now) = (None, Instant::ZERO);
    for chunk in bytes.chunks_exact(HEADER_LEN + 1) {
        let (header, time) = chunk.split_first_chunk::<HEADER_LEN>().unwrap();
        let Ok(repr) = Repr::parse(header) else {
            continue;
        };
        let mut again = [0; HEADER_LEN];
        repr.emit(&mut again);
        assert_eq!(again, *header);
        let (words, last) = repr.to_words();
        assert_eq!(Repr::from_words(words, last), Ok(repr));
        if let Some(control) = Control::parse(&repr) {
            let emitted = control.emit(repr.src, repr.dst);
            assert_eq!(Control::parse(&emitted), Some(control));
        }
        now += zerosock_proto::Duration::from_millis(u64::from(time[0]));
        let of = (repr.src, repr.dst);
        let part = assembler.handle(&repr, || now);
        let _ = assembler.take_lost();
        kept = match (part, kept) {
            (PayloadPart::Whole, _) => None,
            (PayloadPart::First, _) => Some((of, u64::from(repr.len))),
            (PayloadPart::More, Some((from, len))) if from == of => {
                Some((of, len + u64::from(repr.len)))
            }
            (PayloadPart::Last { len }, Some((from, before))) if from == of => {
                assert_eq!(u64::from(len), before + u64::from(repr.len));
                assert!(len <= MAX_DATAGRAM);
                None
            }
            (PayloadPart::Lost, _) => None,
            (part, kept) => panic!("{part:?} behind {kept:?}"),
        };
    }
});
