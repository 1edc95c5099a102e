//! The codec with valid, invalid and truncated messages.

use super::*;
use crate::routing::name::MAX_NAME;
use proptest::prelude::*;

fn full() -> AttachRequest {
    AttachRequest {
        cid: Some(Cid::new(0x0102_0304)),
        name: Some("db-1".parse().unwrap()),
        ports: vec![Port::new(5), Port::new(0xaabb_ccdd)],
    }
}

/// The layout of docs/attach.md, written by hand.
fn full_bytes() -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(b"zsat");
    bytes.extend([1, 0, 2, 0]); // version 1.2
    bytes.extend([1, 0, 0, 0]); // attach, no flags
    bytes.extend([4, 3, 2, 1]); // CID
    bytes.extend([4, 0, 2, 0]); // length of the name, number of ports
    bytes.extend([0; 4]); // reserved
    bytes.extend(b"db-1");
    bytes.extend([0; 60]);
    bytes.extend([5, 0, 0, 0]);
    bytes.extend([0xdd, 0xcc, 0xbb, 0xaa]);
    bytes
}

fn refused(bytes: &[u8]) -> Status {
    decode_request(bytes).unwrap_err().status
}

#[test]
fn a_request_has_the_documented_layout() {
    let request = Request::Attach(full());
    assert_eq!(encode_request(&request).unwrap(), full_bytes());
    assert_eq!(decode_request(&full_bytes()), Ok(request));
    let resolve = Request::Resolve("x".parse().unwrap());
    let bytes = encode_request(&resolve).unwrap();
    assert_eq!(bytes.len(), REQUEST_LEN);
    assert_eq!(bytes[8..10], [2, 0]);
    assert_eq!(decode_request(&bytes), Ok(resolve));
}

#[test]
fn requests_of_a_service_have_the_documented_layout() {
    let ports = vec![Port::new(5), Port::new(0xaabb_ccdd)];
    let mut wanted = full_bytes();
    wanted[8] = 3;
    wanted[12..16].fill(0);
    let serve = Request::Serve(ServiceRequest {
        name: full().name,
        ports: ports.clone(),
    });
    assert_eq!(encode_request(&serve).unwrap(), wanted);
    assert_eq!(decode_request(&wanted), Ok(serve));
    // A service always has CID 2, and may leave the field zero.
    wanted[12] = 2;
    assert_eq!(refused(&wanted), Status::BadRequest);
    wanted[12] = 3;
    assert_eq!(refused(&wanted), Status::BadRequest);
    wanted[12] = 0;
    for (op, request) in [
        (4, Request::Claim(ports.clone())),
        (5, Request::Release(ports)),
    ] {
        let mut wanted = wanted.clone();
        wanted[8] = op;
        assert_eq!(refused(&wanted), Status::BadRequest, "a name");
        wanted[16] = 0;
        wanted[24..88].fill(0);
        assert_eq!(encode_request(&request).unwrap(), wanted);
        assert_eq!(decode_request(&wanted), Ok(request));
        wanted.truncate(REQUEST_LEN);
        wanted[18] = 0;
        assert_eq!(refused(&wanted), Status::BadRequest, "no ports");
    }
}

#[test]
fn requests_of_a_process_that_takes_memory_have_the_documented_layout() {
    let mut wanted = full_bytes();
    wanted[10] = 1;
    wanted[20] = 9;
    let request = Request::AttachMemory(full(), 9 << 21);
    assert_eq!(encode_request(&request).unwrap(), wanted);
    assert_eq!(decode_request(&wanted), Ok(request));
    for len in [0, 1, (9 << 21) + 1, 1 << 53] {
        assert_eq!(
            encode_request(&Request::AttachMemory(full(), len)),
            None,
            "{len}"
        );
    }
    // Memory without the flag, the flag without memory, another flag, another operation.
    for (at, byte) in [(10, 0), (20, 0), (10, 3), (8, 3)] {
        let mut bad = wanted.clone();
        bad[at] = byte;
        assert_eq!(refused(&bad), Status::BadRequest, "byte {at}");
    }
    let start = Request::Start(Start {
        features: 0x1_2000_0003,
        queue_size: 256,
        rings: [0, 0x4000, 0x8000],
    });
    let mut wanted = b"zsat\x01\0\x02\0\x06\0".to_vec();
    wanted.resize(24, 0);
    wanted.extend([3, 0, 0, 0x20, 1, 0, 0, 0]);
    wanted.extend([0, 1, 0, 0, 0, 0, 0, 0]);
    wanted.extend([0; 8]);
    wanted.extend([0, 0x40, 0, 0, 0, 0, 0, 0]);
    wanted.extend([0, 0x80, 0, 0, 0, 0, 0, 0]);
    wanted.resize(REQUEST_LEN, 0);
    assert_eq!(encode_request(&start).unwrap(), wanted);
    assert_eq!(decode_request(&wanted), Ok(start));
    for at in (10..24).chain(34..40).chain(64..REQUEST_LEN) {
        let mut bad = wanted.clone();
        bad[at] = 1;
        assert_eq!(refused(&bad), Status::BadRequest, "byte {at}");
    }
    wanted.extend([0; 4]);
    assert_eq!(refused(&wanted), Status::BadRequest);
}

#[test]
fn a_server_that_gives_only_memory_answers_each_version_with_a_status_that_it_knows() {
    for (minor, status) in [
        (0, Status::VersionMismatch),
        (1, Status::VersionMismatch),
        (2, Status::MemoryOnly),
        (3, Status::MemoryOnly),
    ] {
        let asked = Version { major: 1, minor };
        let answer = Answer::memory_only(asked);
        assert_eq!((answer.status, answer.asked), (status, asked));
        assert_eq!(answer.version, VERSION);
    }
}

#[test]
fn an_answer_has_the_documented_layout() {
    let answer = Answer {
        version: VERSION,
        status: Status::NameTaken,
        cid: Cid::new(0x4000_0000),
        host: Cid::HOST,
        asked: Version { major: 7, minor: 9 },
        port: Port::new(0x8001_0000),
        ports: 0x0001_0000,
        features: 0x1_2000_0003,
        memory: 0x40_0000,
    };
    let bytes = [
        b'z', b's', b'a', b't', 1, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0x40, 2, 0, 0, 0, 7, 0, 9, 0, 0,
        0, 1, 0x80, 0, 0, 1, 0, 3, 0, 0, 0x20, 1, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 0,
    ];
    assert_eq!(encode_answer(&answer), bytes);
    assert_eq!(decode_answer(&bytes), Ok(answer));
    // An answer of version 1.0 is shorter.
    let mut short = bytes;
    short[6] = 0;
    let short = decode_answer(&short[..SHORT_ANSWER_LEN]).unwrap();
    assert_eq!((short.status, short.asked), (answer.status, answer.asked));
    assert_eq!((short.port, short.ports), (Port::new(0), 0));
    // One of version 1.1 has the ports.
    let middle = decode_answer(&bytes[..32]).unwrap();
    assert_eq!(middle.ports, answer.ports);
    assert_eq!((middle.features, middle.memory), (0, 0));
    for (number, status) in Status::ALL.into_iter().enumerate() {
        assert_eq!(status as usize, number);
        let answer = Answer::refusal(status, Version::default());
        assert_eq!(decode_answer(&encode_answer(&answer)), Ok(answer));
    }
}

#[test]
fn every_truncation_is_refused() {
    let bytes = full_bytes();
    for len in 0..bytes.len() {
        assert_eq!(refused(&bytes[..len]), Status::BadRequest, "{len} bytes");
    }
    let mut longer = bytes;
    longer.push(0);
    assert_eq!(refused(&longer), Status::BadRequest);
    let answer = encode_answer(&Answer::refusal(Status::Full, VERSION));
    for len in 0..SHORT_ANSWER_LEN {
        let error = decode_answer(&answer[..len]).unwrap_err();
        assert_eq!(error, AnswerError::NotAnAnswer, "{len} bytes");
    }
}

#[test]
fn every_bit_of_lengths_and_zero_fields_is_checked() {
    // Flags, length of the name, number of ports, reserved, the bytes after the name.
    for at in (10..12).chain(16..24).chain(28..88) {
        for bit in 0..8 {
            let mut bytes = full_bytes();
            bytes[at] ^= 1 << bit;
            // A shorter name leaves bytes where zeroes belong; a longer one contains a zero.
            assert_eq!(
                refused(&bytes),
                Status::BadRequest,
                "bit {bit} of byte {at}"
            );
        }
    }
}

#[test]
fn every_bit_of_the_magic_and_the_version_is_checked() {
    for at in 0..4 {
        for bit in 0..8 {
            let mut bytes = full_bytes();
            bytes[at] ^= 1 << bit;
            assert_eq!(refused(&bytes), Status::BadRequest);
        }
    }
    for bit in 0..16 {
        let major = 1u16 ^ (1 << bit);
        let mut bytes = full_bytes();
        bytes[4..6].copy_from_slice(&major.to_le_bytes());
        bytes[6] = 3;
        let answer = decode_request(&bytes).unwrap_err();
        assert_eq!(answer.status, Status::VersionMismatch);
        assert_eq!(answer.asked, Version { major, minor: 3 });
        assert_eq!(answer.version, VERSION);
        // The rest of a message of another major version is not decoded.
        assert_eq!(refused(&bytes[..8]), Status::VersionMismatch);
    }
    // A higher minor version is accepted.
    let mut bytes = full_bytes();
    bytes[6] = 200;
    assert_eq!(decode_request(&bytes), Ok(Request::Attach(full())));
}

#[test]
fn requests_with_invalid_fields_are_refused() {
    let with = |at: usize, what: &[u8]| {
        let mut bytes = full_bytes();
        bytes[at..at + what.len()].copy_from_slice(what);
        bytes
    };
    // Operation 3 is refused because of the CID: serve needs another layout.
    for op in [0u16, 7, 3, 0x0100, u16::MAX] {
        assert_eq!(refused(&with(8, &op.to_le_bytes())), Status::BadRequest);
    }
    for cid in [1u32, 2, u32::MAX] {
        assert_eq!(refused(&with(12, &cid.to_le_bytes())), Status::BadRequest);
    }
    // 2^32 - 1 is "any port".
    assert_eq!(refused(&with(88, &[0xff; 4])), Status::BadRequest);
    for name in [
        b"db 1",
        b"db/1",
        b"d\xc3\xa9x",
        b"d\0b1",
        b"\xff\xff\xff\xff",
    ] {
        assert_eq!(refused(&with(24, name)), Status::BadRequest, "{name:?}");
    }
    // A resolve request must contain nothing but a name.
    assert_eq!(refused(&with(8, &[2, 0])), Status::BadRequest);
    let many = AttachRequest {
        ports: vec![Port::new(1); MAX_PORTS + 1],
        ..full()
    };
    assert_eq!(encode_request(&Request::Attach(many)), None);
    let most = AttachRequest {
        ports: vec![Port::new(1); MAX_PORTS],
        name: Some("x".repeat(MAX_NAME).parse().unwrap()),
        ..full()
    };
    let bytes = encode_request(&Request::Attach(most.clone())).unwrap();
    assert_eq!(bytes.len(), MAX_REQUEST);
    assert_eq!(decode_request(&bytes), Ok(Request::Attach(most)));
    assert!("x".repeat(MAX_NAME + 1).parse::<Name>().is_err());
    assert!("".parse::<Name>().is_err());
}

#[test]
fn an_answer_with_an_unknown_status_is_an_error() {
    let mut bytes = encode_answer(&Answer::refusal(Status::Full, VERSION));
    bytes[8] = 13;
    assert_eq!(decode_answer(&bytes), Err(AnswerError::UnknownStatus(13)));
    bytes[0] = b'Z';
    assert_eq!(decode_answer(&bytes), Err(AnswerError::NotAnAnswer));
}

proptest! {
    /// Random bytes after a valid beginning never cause a panic, and a decoded request encodes
    /// again.
    #[test]
    fn random_bytes_are_refused_or_decode_to_an_encodable_request(
        mut bytes in prop::collection::vec(any::<u8>(), 0..MAX_REQUEST + 9),
        start in 0usize..32,
        op in 0u8..8,
    ) {
        let mut good = full_bytes();
        good[8] = op;
        for (to, from) in bytes.iter_mut().zip(good).take(start) {
            *to = from;
        }
        if let Ok(request) = decode_request(&bytes) {
            let again = encode_request(&request).unwrap();
            prop_assert_eq!(decode_request(&again), Ok(request));
        }
        let _ = decode_answer(&bytes);
    }
}
