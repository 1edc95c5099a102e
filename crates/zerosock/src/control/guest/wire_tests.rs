//! The messages of a guest's agent and the daemon: valid, in parts, forged, replayed, and wrong in each field.

use proptest::prelude::*;
use zerosock_proto::Port;

use zerosock_ring::ExtentError;

use super::*;
use crate::control::guest::key::{KeyError, MIN_KEY};
use crate::routing::name::MAX_NAME;

/// Tags of an `End` as the first and as the second request of a stream.
const END_TAGS: [&str; 2] = [
    "769f398677adddd34f59706b81568323bc7b98113aae06c6ff2c8fe082b4b774",
    "eb22edf6707d316307817ca24b2d72b923ca5b55545c3dc2893e78056b7c3bee",
];
/// As the first one, without a key.
const END_TAG_WITHOUT_KEY: &str =
    "dd1bc4fd10cece4db6d89def6c6d62981358cd1d061516dd47722ba68f59bcf8";

fn key() -> GuestKey {
    GuestKey::new(b"0123456789abcdef0123456789abcdef").unwrap()
}

fn nonce() -> Nonce {
    let mut bytes = [0; 32];
    for (n, byte) in (0..).zip(&mut bytes) {
        *byte = n;
    }
    Nonce(bytes)
}

fn writer() -> RequestWriter {
    RequestWriter::new(&key(), &nonce())
}

fn reader() -> RequestReader {
    RequestReader::new(&key(), &nonce())
}

fn register() -> Register {
    Register {
        attachment: AttachmentId(*b"an attachment id"),
        endpoint: AttachRequest {
            cid: None,
            name: Some("db".parse().unwrap()),
            ports: vec![Port::new(80)],
        },
        extents: vec![
            Extent {
                addr: 0x4000_0000,
                len: 0x40_0000,
            },
            Extent {
                addr: 0x20_0000,
                len: 0x20_0000,
            },
        ],
    }
}

fn start() -> Start {
    Start {
        features: 0x1_2000_0003,
        queue_size: 256,
        rings: [0, 0x4000, 0x8000],
    }
}

fn requests() -> Vec<Request> {
    vec![
        Request::Register(register()),
        Request::Start(start()),
        Request::End,
        Request::Query(AttachmentId([9; 16])),
    ]
}

fn answers() -> Vec<Answer> {
    let mut answers = vec![
        Answer::Hello(nonce()),
        Answer::Accepted {
            cid: Cid::new(0x4000_0001),
            token: Token([5; 16]),
        },
        Answer::Started { features: 3 },
        Answer::Known(true),
        Answer::Known(false),
    ];
    // Those that have a name, and those of a later version.
    for reason in (0..40).chain([0x1700, u16::MAX]).map(Reason) {
        answers.push(Answer::Refused(Refusal { reason, index: 7 }));
        answers.push(Answer::Ended(reason));
    }
    answers
}

/// The first request of a stream, with its tag.
fn first(request: &Request) -> Vec<u8> {
    writer().encode(request).expect("a request in bounds")
}

/// A message of this body with the tag of the first request.
fn signed(operation: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = message(operation, body);
    bytes.extend(StreamTags::new(&key(), &nonce()).next(&bytes));
    bytes
}

fn refused(bytes: &[u8]) -> WireError {
    reader().decode(bytes).expect_err("an error")
}

#[test]
fn a_request_has_the_documented_layout() {
    let mut body = b"an attachment id".to_vec();
    body.extend([92, 0, 2, 0, 0, 0, 0, 0]);
    let endpoint = attach::Request::Attach(register().endpoint);
    body.extend(attach::encode_request(&endpoint).unwrap());
    body.extend([0, 0, 0, 0x40, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 0]);
    body.extend([0, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0]);
    assert_eq!(body.len(), 148);
    let mut bytes = b"zsge\x01\0\0\0\x01\0\0\0\x94\0\0\0".to_vec();
    bytes.extend(body);
    let encoded = first(&Request::Register(register()));
    assert_eq!(encoded[..164], bytes);
    assert_eq!(encoded.len(), 164 + TAG_LEN);

    let bytes = first(&Request::Start(start()));
    assert_eq!(bytes[8..16], [2, 0, 0, 0, 40, 0, 0, 0]);
    let fields = [
        [3, 0, 0, 0x20, 1, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0],
        [0; 8],
        [0, 0x40, 0, 0, 0, 0, 0, 0],
        [0, 0x80, 0, 0, 0, 0, 0, 0],
    ];
    assert_eq!(bytes[16..56], fields.concat());
    let bytes = first(&Request::Query(AttachmentId([9; 16])));
    assert_eq!(
        bytes[8..32],
        [&[4, 0, 0, 0, 16, 0, 0, 0][..], &[9; 16]].concat()
    );
}

/// As `openssl dgst -mac HMAC` gives it over the label, the bytes 0 to 31, the number, and the message.
#[test]
fn a_tag_is_that_of_the_vector() {
    let tags = |request: &[u8]| {
        let tag = &request[request.len() - TAG_LEN..];
        tag.iter().map(|b| format!("{b:02x}")).collect::<String>()
    };
    let mut writer = writer();
    for expected in END_TAGS {
        assert_eq!(tags(&writer.encode(&Request::End).unwrap()), expected);
    }
    let mut open = RequestWriter::new(&GuestKey::none(), &nonce());
    assert_eq!(
        tags(&open.encode(&Request::End).unwrap()),
        END_TAG_WITHOUT_KEY
    );
}

#[test]
fn an_answer_has_the_documented_layout() {
    let layouts: [(Answer, u16, Vec<u8>); 6] = [
        (Answer::Hello(nonce()), 0x101, (0..32).collect()),
        (
            Answer::Accepted {
                cid: Cid::new(0x4000_0001),
                token: Token([5; 16]),
            },
            0x102,
            [&[1, 0, 0, 0x40, 0, 0, 0, 0][..], &[5; 16]].concat(),
        ),
        (
            Answer::Refused(Refusal {
                reason: Reason::OUTSIDE,
                index: 258,
            }),
            0x103,
            vec![10, 0, 0, 0, 2, 1, 0, 0],
        ),
        (
            Answer::Started { features: 3 },
            0x104,
            vec![3, 0, 0, 0, 0, 0, 0, 0],
        ),
        (Answer::Ended(Reason::FRONTEND_GONE), 0x105, vec![17, 0]),
        (Answer::Known(true), 0x106, vec![1]),
    ];
    for (answer, operation, body) in layouts {
        assert_eq!(
            encode_answer(&answer),
            message(operation, &body),
            "{answer:?}"
        );
    }
}

#[test]
fn messages_decode_to_what_was_encoded_and_leave_the_next() {
    let (mut writer, mut reader) = (writer(), reader());
    let mut stream = Vec::new();
    for request in requests() {
        stream.extend(writer.encode(&request).unwrap());
    }
    for request in requests() {
        let (decoded, len) = reader.decode(&stream).unwrap().expect("a request");
        assert_eq!(decoded, request);
        stream.drain(..len);
    }
    assert!(stream.is_empty());
    for answer in answers() {
        stream.extend(encode_answer(&answer));
    }
    for answer in answers() {
        let (decoded, len) = decode_answer(&stream).unwrap().expect("an answer");
        assert_eq!(decoded, answer);
        stream.drain(..len);
    }
}

#[test]
fn part_of_a_message_is_neither_a_message_nor_an_error() {
    for request in requests() {
        let bytes = first(&request);
        let mut reader = reader();
        for len in 0..bytes.len() {
            assert_eq!(
                reader.decode(&bytes[..len]),
                Ok(None),
                "{len} bytes of {request:?}"
            );
        }
        let whole = Some((request, bytes.len()));
        assert_eq!(reader.decode(&bytes), Ok(whole));
    }
    for answer in answers() {
        let bytes = encode_answer(&answer);
        for len in 0..bytes.len() {
            assert_eq!(
                decode_answer(&bytes[..len]),
                Ok(None),
                "{len} bytes of {answer:?}"
            );
        }
    }
}

#[test]
fn the_longest_request_fits_its_bound() {
    let extent = Extent {
        addr: u64::MAX,
        len: u64::MAX,
    };
    let mut most = Register {
        endpoint: AttachRequest {
            cid: Some(Cid::new(3)),
            name: Some("x".repeat(MAX_NAME).parse().unwrap()),
            ports: vec![Port::new(1); attach::MAX_PORTS],
        },
        extents: vec![extent; MAX_EXTENTS],
        ..register()
    };
    let bytes = first(&Request::Register(most.clone()));
    assert_eq!(bytes.len(), MAX_REQUEST);
    let whole = Some((Request::Register(most.clone()), MAX_REQUEST));
    assert_eq!(reader().decode(&bytes), Ok(whole));
    most.extents.push(extent);
    assert_eq!(writer().encode(&Request::Register(most.clone())), None);
    most.extents.pop();
    most.endpoint.ports.push(Port::new(1));
    assert_eq!(writer().encode(&Request::Register(most)), None);
    let longest = answers().iter().map(|a| encode_answer(a).len()).max();
    assert!(longest.unwrap() <= MAX_ANSWER);
}

#[test]
fn bad_headers_are_refused_before_their_body() {
    let header = |magic: &[u8], major: u16, operation: u16, zero: u16, len: u32| {
        let mut bytes = magic.to_vec();
        for word in [major, 0, operation, zero] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(len.to_le_bytes());
        bytes
    };
    let version = |major| WireError::Version(Version { major, minor: 0 });
    let cases = [
        (header(b"zsat", 1, 1, 0, 24), WireError::NotThisProtocol),
        (header(b"Zsge", 1, 1, 0, 24), WireError::NotThisProtocol),
        (b"GET / HTTP/1.1\r\n".to_vec(), WireError::NotThisProtocol),
        (b"x".to_vec(), WireError::NotThisProtocol),
        (b"zsgf".to_vec(), WireError::NotThisProtocol),
        (header(b"zsge", 0, 1, 0, 24), version(0)),
        (header(b"zsge", 2, 1, 0, 24), version(2)),
        (header(b"zsge", u16::MAX, 0, 1, u32::MAX), version(u16::MAX)),
        (header(b"zsge", 2, 1, 0, 24)[..8].to_vec(), version(2)),
        (header(b"zsge", 1, 0, 0, 0), WireError::Malformed(0)),
        (header(b"zsge", 1, 5, 0, 0), WireError::Malformed(5)),
        (
            header(b"zsge", 1, 0x101, 0, 32),
            WireError::Malformed(0x101),
        ),
        (
            header(b"zsge", 1, u16::MAX, 0, 0),
            WireError::Malformed(u16::MAX),
        ),
        (header(b"zsge", 1, 3, 1, 0), WireError::Malformed(3)),
        (header(b"zsge", 1, 3, 0, 1), WireError::Malformed(3)),
        (header(b"zsge", 1, 2, 0, 41), WireError::Malformed(2)),
        (header(b"zsge", 1, 4, 0, 17), WireError::Malformed(4)),
        // 2^20 extents, and as much as a length can say.
        (
            header(b"zsge", 1, 1, 0, 24 + 88 + (16 << 20)),
            WireError::Malformed(1),
        ),
        (header(b"zsge", 1, 1, 0, u32::MAX), WireError::Malformed(1)),
    ];
    for (bytes, error) in cases {
        assert_eq!(refused(&bytes), error, "{bytes:x?}");
        if let WireError::NotThisProtocol | WireError::Version(_) = error {
            assert_eq!(decode_answer(&bytes), Err(error), "{bytes:x?}");
        }
    }
    let bytes = header(b"zsge", 1, 0x104, 1, 8);
    assert_eq!(decode_answer(&bytes), Err(WireError::Malformed(0x104)));
    for operation in [0, 1, 4, 0x100, 0x107] {
        let error = WireError::Malformed(operation);
        assert_eq!(
            decode_answer(&header(b"zsge", 1, operation, 0, 0)),
            Err(error)
        );
    }
    let long = MAX_ANSWER_BODY as u32 + 1;
    let error = WireError::Malformed(0x101);
    assert_eq!(
        decode_answer(&header(b"zsge", 1, 0x101, 0, long)),
        Err(error)
    );
    // A later minor version is taken.
    let mut minor = message(OP_END, &[]);
    minor[6] = 9;
    minor.extend(StreamTags::new(&key(), &nonce()).next(&minor));
    let whole = Some((Request::End, minor.len()));
    assert_eq!(reader().decode(&minor), Ok(whole));
}

#[test]
fn a_tag_is_good_for_its_bytes_its_place_its_stream_and_its_key() {
    let request = Request::Register(register());
    let bytes = first(&request);
    // Each bit of the message behind the length, and of the tag.
    for at in 16..bytes.len() {
        for bit in [0, 3, 7] {
            let mut forged = bytes.clone();
            forged[at] ^= 1 << bit;
            assert_eq!(refused(&forged), WireError::Tag, "bit {bit} of byte {at}");
        }
    }
    // The right extents in another order.
    let mut swapped = bytes.clone();
    let extents = swapped.len() - TAG_LEN - 32;
    let (one, two) = swapped[extents..].split_at_mut(16);
    one.swap_with_slice(&mut two[..16]);
    assert_eq!(refused(&swapped), WireError::Tag);
    // A replay to a stream with another nonce, to another VM, and to one without a key.
    let refuse = |key: &GuestKey, nonce: Nonce| {
        let mut reader = RequestReader::new(key, &nonce);
        assert_eq!(reader.decode(&bytes), Err(WireError::Tag));
    };
    let mut other = nonce();
    other.0[31] ^= 1;
    refuse(&key(), other);
    refuse(&GuestKey::new(b"another key of 16 bytes").unwrap(), nonce());
    refuse(&GuestKey::none(), nonce());
    let mut unsigned = RequestWriter::new(&GuestKey::none(), &nonce());
    let unsigned = unsigned.encode(&request).unwrap();
    assert_eq!(refused(&unsigned), WireError::Tag);
    let mut open = RequestReader::new(&GuestKey::none(), &nonce());
    let whole = Some((request, unsigned.len()));
    assert_eq!(open.decode(&unsigned), Ok(whole));
    // A replay in the same stream, and a request in front of another.
    let (mut writer, mut reader) = (writer(), reader());
    let query = writer
        .encode(&Request::Query(AttachmentId([1; 16])))
        .unwrap();
    let end = writer.encode(&Request::End).unwrap();
    assert_eq!(reader.decode(&end), Err(WireError::Tag));
    assert!(reader.decode(&query).is_ok());
    assert_eq!(reader.decode(&query), Err(WireError::Tag));
    let whole = Some((Request::End, end.len()));
    assert_eq!(reader.decode(&end), Ok(whole));
}

/// Bodies behind a valid tag: a faulty agent has the key.
#[test]
fn bad_bodies_are_refused() {
    let valid = |request: &Request| {
        let bytes = first(request);
        bytes[HEADER_LEN..bytes.len() - TAG_LEN].to_vec()
    };
    let (register, start) = (
        valid(&Request::Register(register())),
        valid(&Request::Start(start())),
    );
    let with = |body: &[u8], at: usize, bytes: &[u8]| {
        let mut body = body.to_vec();
        body[at..at + bytes.len()].copy_from_slice(bytes);
        body
    };
    let longer = |body: &[u8]| [body, &[0]].concat();
    let mut cases = vec![
        // More and fewer extents than there are bytes of.
        (1, with(&register, 18, &[3, 0])),
        (1, with(&register, 18, &[1, 0])),
        (1, with(&register, 18, &[0, 0])),
        (1, with(&register, 18, &[0xff, 0xff])),
        // Another length of the endpoint's request, and an endpoint's request that is none.
        (1, with(&register, 16, &[91, 0])),
        (1, with(&register, 16, &[0, 0])),
        (1, with(&register, 16, &[0xff, 0xff])),
        (1, with(&register, 24, b"Z")),
        (1, with(&register, 28, &[2])),
        (1, with(&register, 32, &[2])),
        (1, with(&register, 20, &[1])),
        (1, longer(&register)),
        (2, with(&start, 10, &[1])),
        (2, with(&start, 15, &[1])),
        (4, vec![]),
        (4, vec![0; 15]),
    ];
    for len in 0..register.len() {
        cases.push((1, register[..len].to_vec()));
    }
    for len in 0..start.len() {
        cases.push((2, start[..len].to_vec()));
    }
    // Two bytes count 513 extents, and the body has them all, in the place of the ports.
    let mut many = with(&register, 18, &513u16.to_le_bytes());
    many.resize(24 + 92 + 16 * 513, 0);
    assert!(many.len() <= MAX_REGISTER);
    cases.push((1, many));
    for (operation, body) in cases {
        let error = refused(&signed(operation, &body));
        let shown = &body[..body.len().min(200)];
        assert_eq!(error, WireError::Malformed(operation), "{shown:x?}");
    }
    assert!(reader().decode(&signed(1, &register)).is_ok());
}

#[test]
fn bad_answers_are_refused() {
    let cases: [(u16, &[u8]); 12] = [
        (0x101, &[0; 31]),
        (0x102, &[0; 24]),
        (
            0x102,
            &[
                2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            ],
        ),
        (
            0x102,
            &[
                3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            ],
        ),
        (
            0x102,
            &[
                3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            ],
        ),
        (0x103, &[0; 6]),
        (0x103, &[1, 0, 1, 0, 0, 0, 0, 0]),
        (0x103, &[1, 0, 0, 0, 0, 0, 0]),
        (0x104, &[0; 7]),
        (0x105, &[1]),
        (0x106, &[2]),
        (0x106, &[]),
    ];
    for (operation, body) in cases {
        let error = Err(WireError::Malformed(operation));
        assert_eq!(decode_answer(&message(operation, body)), error, "{body:?}");
    }
    // A later minor version has more fields.
    for answer in answers() {
        let mut bytes = encode_answer(&answer);
        bytes.extend([0xee; 8]);
        bytes[12] += 8;
        assert_eq!(decode_answer(&bytes), Ok(Some((answer, bytes.len()))));
    }
}

#[test]
fn errors_are_answered_by_name() {
    use ExtentError::*;
    let refusal = |reason, index| Refusal { reason, index };
    for (error, reason, index) in [
        (TooMany, Reason::TOO_MANY_EXTENTS, 0),
        (Unaligned(3), Reason::UNALIGNED, 3),
        (Outside(4), Reason::OUTSIDE, 4),
        (Overlap(5), Reason::OVERLAP, 5),
        (NoExtents, Reason::BAD_REQUEST, 0),
    ] {
        assert_eq!(Refusal::from(error), refusal(reason, index), "{error}");
    }
    for (error, reason) in [
        (WireError::Tag, Reason::FAILED),
        (
            WireError::Version(Version::default()),
            Reason::VERSION_MISMATCH,
        ),
        (WireError::NotThisProtocol, Reason::BAD_REQUEST),
        (WireError::Malformed(1), Reason::BAD_REQUEST),
    ] {
        assert_eq!(error.refusal(), refusal(reason, 0), "{error}");
    }
}

/// An agent that gives no page back before it can read this would keep them for ever.
#[test]
fn an_end_for_a_reason_of_a_later_version_is_an_end() {
    let reason = |number: u16| {
        let bytes = message(OP_ENDED, &number.to_le_bytes());
        match decode_answer(&bytes) {
            Ok(Some((Answer::Ended(reason), 18))) => reason,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(reason(0x1700), Reason(0x1700));
    let text = "reason 5888 of a later version";
    assert_eq!(reason(0x1700).to_string(), text);
    assert_eq!(reason(0), Reason::REQUESTED);
    let text = "another request has named this attachment, and its pages may be in use";
    assert_eq!(reason(23).to_string(), text);
}

#[test]
fn short_keys_and_zeroes_are_refused() {
    for len in 0..MIN_KEY {
        let refused = GuestKey::new(&vec![7; len]).err();
        assert_eq!(refused, Some(KeyError::TooShort(len)));
    }
    for len in [MIN_KEY, 17, 32, 63, 64, 65, 4096] {
        let mut bytes = vec![0; len];
        let refused = GuestKey::new(&bytes).err();
        assert_eq!(refused, Some(KeyError::Zeroes), "{len} bytes");
        bytes[len - 1] = 1;
        assert!(GuestKey::new(&bytes).is_ok(), "{len} bytes");
    }
}

#[test]
fn a_newline_is_a_byte_of_the_key() {
    let keys = [
        &b"a key of 24 random bytes"[..],
        b"a key of 24 random bytes\n",
    ];
    let [plain, with_newline] = keys.map(|bytes| {
        let key = GuestKey::new(bytes).unwrap();
        RequestWriter::new(&key, &nonce()).encode(&Request::End)
    });
    assert_ne!(plain, with_newline);
}

#[test]
fn debug_output_has_no_secret() {
    assert_eq!(format!("{:?}", key()), "GuestKey");
    assert_eq!(format!("{:?}", Token([5; 16])), "Token");
}

proptest! {
    /// Random bytes in any place of a stream never cause a panic, and are no request without the key.
    #[test]
    fn random_bytes_are_no_request(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
        which in 0usize..4,
    ) {
        let request = &requests()[which];
        let good = first(request);
        let mut bytes = good.clone();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(1 + cut.index(bytes.len()));
        match reader().decode(&bytes) {
            Ok(Some((decoded, _))) => {
                // Only the minor version, for which the tag is wrong, or nothing has changed.
                prop_assert_eq!(&bytes, &good);
                prop_assert_eq!(&decoded, request);
            }
            Ok(None) => prop_assert!(bytes.len() < MAX_REQUEST),
            Err(_) => {}
        }
        let _ = decode_answer(&bytes);
    }

    /// Random bodies behind a valid tag are refused, or decode to a request that encodes again.
    #[test]
    fn random_bodies_are_refused_or_decode_to_an_encodable_request(
        mut body in prop::collection::vec(any::<u8>(), 0..400),
        start in 0usize..160,
        operation in 1u16..5,
    ) {
        let good = first(&requests()[usize::from(operation) - 1]);
        for (to, from) in body.iter_mut().zip(&good[HEADER_LEN..]).take(start) {
            *to = *from;
        }
        let bytes = signed(operation, &body);
        if let Ok(Some((request, len))) = reader().decode(&bytes) {
            prop_assert_eq!(len, bytes.len());
            prop_assert_eq!(first(&request), bytes);
        }
        let mut answer = body;
        answer.truncate(MAX_ANSWER_BODY);
        let bytes = message(0x100 + operation, &answer);
        if let Ok(Some((answer, len))) = decode_answer(&bytes) {
            prop_assert_eq!(len, bytes.len());
            let again = encode_answer(&answer);
            prop_assert_eq!(decode_answer(&again), Ok(Some((answer, again.len()))));
        }
    }
}
