//! Unit tests of `sent`.

use super::*;

fn sent(frames: &[&[u64]]) -> Sent {
    let mut sent = Sent::default();
    for frame in frames {
        for (index, addr) in frame.iter().enumerate() {
            sent.push(*addr, index + 1 == frame.len());
        }
    }
    sent
}

#[test]
fn frames_complete_in_the_order_in_which_they_were_sent() {
    let mut sent = sent(&[&[10], &[20], &[30]]);
    assert_eq!(sent.complete(30), 0);
    assert_eq!(sent.complete(10), 1);
    assert_eq!(sent.complete(20), 2);
    assert_eq!(sent.len(), 0);
}

#[test]
fn frame_completes_with_the_last_of_its_descriptors() {
    let mut sent = sent(&[&[10, 20, 30], &[40]]);
    assert_eq!(sent.complete(30), 0);
    assert_eq!(sent.complete(40), 0);
    assert_eq!(sent.complete(10), 0);
    assert_eq!(sent.len(), 3);
    assert_eq!(sent.complete(20), 2);
}

#[test]
fn oldest_of_equal_addresses_completes_first() {
    let mut sent = sent(&[&[7], &[8], &[7]]);
    assert_eq!(sent.complete(7), 1);
    assert_eq!(sent.complete(7), 0);
    assert_eq!(sent.complete(8), 2);
}

#[test]
fn lowest_bit_of_an_address_may_be_lost() {
    let mut sent = sent(&[&[13], &[21]]);
    assert_eq!(sent.complete(12), 1);
    assert_eq!(sent.complete(21), 1);
}

#[test]
fn unknown_addresses_complete_nothing() {
    let mut sent = sent(&[&[7]]);
    assert_eq!(sent.complete(9), 0);
    assert_eq!(sent.complete(7), 1);
    assert_eq!(sent.complete(7), 0);
}
