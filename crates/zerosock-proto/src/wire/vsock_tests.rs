//! Unit tests of `vsock`.

use super::*;
use proptest::prelude::*;

/// Written by hand from the table in the specification.
const BYTES: [u8; HEADER_LEN] = [
    3, 0, 0, 0, 0, 0, 0, 0, // src_cid
    2, 0, 0, 0, 0, 0, 0, 0, // dst_cid
    0x00, 0x04, 0, 0, // src_port 1024
    0x39, 0x30, 0, 0, // dst_port 12345
    0, 0, 1, 0, // len 65536
    1, 0, // type
    5, 0, // op
    2, 0, 0, 0, // flags
    0, 0, 4, 0, // buf_alloc 262144
    0xff, 0xff, 0xff, 0xff, // fwd_cnt
];

const REPR: Repr = Repr {
    src: Address::new(Cid::new(3), Port::new(1024)),
    dst: Address::new(Cid::HOST, Port::new(12345)),
    len: 65536,
    socket_type: WireType(1),
    op: WireOp(5),
    flags: 2,
    buf_alloc: 262144,
    fwd_cnt: u32::MAX,
};

/// Both ways to parse, which must agree.
fn parse(bytes: &[u8; HEADER_LEN]) -> Result<Repr, ParseError> {
    let repr = Repr::parse(bytes);
    let word = |i: usize| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().unwrap());
    let last = u32::from_le_bytes(bytes[40..44].try_into().unwrap());
    assert_eq!(Repr::from_words(core::array::from_fn(word), last), repr);
    repr
}

/// Both ways to emit, which must agree.
fn emit(repr: &Repr) -> [u8; HEADER_LEN] {
    let mut out = [0xaa; HEADER_LEN];
    repr.emit(&mut out);
    let (words, last) = repr.to_words();
    let mut written = Vec::new();
    words
        .iter()
        .for_each(|word| written.extend(word.to_le_bytes()));
    written.extend(last.to_le_bytes());
    assert_eq!(written, out);
    out
}

#[test]
fn fields_are_at_their_specified_offsets() {
    assert_eq!(parse(&BYTES), Ok(REPR));
    assert_eq!(emit(&REPR), BYTES);
}

#[test]
fn wide_cids_and_long_payloads_are_refused() {
    let mut bytes = BYTES;
    bytes[4] = 1;
    assert_eq!(parse(&bytes), Err(ParseError::Cid(0x1_0000_0003)));
    let mut bytes = BYTES;
    bytes[15] = 0x80;
    assert_eq!(parse(&bytes), Err(ParseError::Cid(0x8000_0000_0000_0002)));
    let mut bytes = BYTES;
    bytes[24] = 1;
    assert_eq!(parse(&bytes), Err(ParseError::Len(65537)));
}

#[test]
fn unknown_types_and_operations_survive_parsing() {
    let mut bytes = BYTES;
    bytes[28] = 9;
    bytes[31] = 1;
    let repr = parse(&bytes).unwrap();
    assert_eq!(
        (repr.socket_type.known(), repr.socket_type.get()),
        (None, 9)
    );
    assert_eq!((repr.op.known(), repr.op.get()), (None, 261));
    assert_eq!(
        repr.to_string(),
        "type 9 op 261 3:1024 -> 2:12345 len 65536 flags 0x2 buf_alloc 262144 fwd_cnt 4294967295"
    );
}

proptest! {
    #[test]
    fn parsed_headers_are_emitted_unchanged(bytes in any::<[[u8; 22]; 2]>(), tame in any::<bool>()) {
        let mut bytes: [u8; HEADER_LEN] =
            core::array::from_fn(|i| bytes[i / 22][i % 22]);
        if tame {
            bytes[4..8].fill(0);
            bytes[12..16].fill(0);
            bytes[26..28].fill(0);
        }
        match parse(&bytes) {
            Ok(repr) => {
                prop_assert_eq!(emit(&repr), bytes);
            }
            Err(_) => prop_assert!(!tame),
        }
    }
}
