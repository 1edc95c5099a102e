//! The list against a plain queue, and the memory that it keeps.

use std::collections::VecDeque;

use proptest::prelude::*;
use zerosock_proto::wire::net::{Header, MAX_FRAME};

use super::copies::{CHUNK, Copies};

fn header(number: usize) -> Header {
    let mut header = Header::default();
    header.set_hdr_len(number as u16);
    header
}

#[test]
fn memory_follows_the_frames_and_goes_with_them() {
    let mut copies = Copies::default();
    assert_eq!(copies.capacity(), 0);
    for round in 0..3 {
        for number in 0..64 {
            copies.add(header(number), 64_000).unwrap()[0] = number as u8;
        }
        assert_eq!((copies.len(), copies.bytes()), (64, 64 * 64_000));
        assert_eq!(copies.capacity(), 32 * CHUNK, "two frames in each");
        for number in 0..64_usize {
            let (_, bytes) = copies.first().unwrap();
            assert_eq!((bytes.len(), bytes[0]), (64_000, number as u8));
            assert!(copies.pop());
            // The frames that are left, the finished chunk, and the one that was begun.
            assert!(copies.capacity() <= (64 - number).div_ceil(2) * CHUNK + CHUNK);
        }
        assert!(!copies.pop());
        assert_eq!(copies.capacity(), CHUNK, "one is kept");
        if round == 1 {
            copies.add(header(0), 100).unwrap();
            copies.clear();
            assert_eq!((copies.capacity(), copies.len(), copies.bytes()), (0, 0, 0));
        }
    }
    assert!(copies.add(header(0), CHUNK + 1).is_none());
    assert!(copies.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn frames_leave_as_they_came(
        steps in prop::collection::vec(prop::option::weighted(0.6, 1..MAX_FRAME), 1..80),
    ) {
        let mut copies = Copies::default();
        let mut oracle = VecDeque::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Some(len) => {
                    let bytes: Vec<u8> = (0..len).map(|at| (at * 31 + number) as u8).collect();
                    copies.add(header(number), len).unwrap().copy_from_slice(&bytes);
                    oracle.push_back((header(number), bytes));
                }
                None => prop_assert_eq!(copies.pop(), oracle.pop_front().is_some()),
            }
            let first = oracle.front().map(|(header, bytes)| (header, &bytes[..]));
            prop_assert!(copies.first() == first);
            let bytes: usize = oracle.iter().map(|(_, bytes)| bytes.len()).sum();
            prop_assert_eq!((copies.len(), copies.bytes()), (oracle.len(), bytes));
            prop_assert_eq!(copies.is_empty(), oracle.is_empty());
            // A chunk is more than half full when the next one begins.
            prop_assert!(copies.capacity() <= 2 * bytes + 3 * CHUNK);
        }
    }
}
