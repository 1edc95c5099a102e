//! Unit tests of `ranges`.

use super::*;
use proptest::prelude::*;

fn all(ranges: &mut Ranges) -> Vec<(u32, u32, bool)> {
    let mut room = [Completion::default(); 64];
    let count = ranges.take(&mut room);
    room[..count]
        .iter()
        .map(|range| (range.lo, range.hi, range.copied))
        .collect()
}

fn ranges(numbers: &[u32]) -> Vec<(u32, u32, bool)> {
    let mut ranges = Ranges::default();
    numbers.iter().for_each(|&number| ranges.add(number, false));
    all(&mut ranges)
}

#[test]
fn adjacent_numbers_form_one_range() {
    assert_eq!(ranges(&[0, 1, 2, 3]), [(0, 3, false)]);
    assert_eq!(ranges(&[3, 2, 1, 0]), [(0, 3, false)]);
    assert_eq!(ranges(&[0, 2, 1]), [(0, 2, false)]);
    assert_eq!(ranges(&[2, 0, 1]), [(0, 2, false)]);
    assert_eq!(ranges(&[5, 9]), [(5, 5, false), (9, 9, false)]);
    assert_eq!(ranges(&[u32::MAX, 0, 1]), [(u32::MAX, 1, false)]);
}

#[test]
fn copied_and_not_copied_stay_apart() {
    let mut ranges = Ranges::default();
    for (number, copied) in [(0, false), (1, true), (2, true), (3, false)] {
        ranges.add(number, copied);
    }
    assert_eq!(
        all(&mut ranges),
        [(0, 0, false), (1, 2, true), (3, 3, false)]
    );
}

#[test]
fn ranges_that_find_no_room_are_taken_later() {
    let mut ranges = Ranges::default();
    [1, 3, 5]
        .iter()
        .for_each(|&number| ranges.add(number, false));
    let mut room = [Completion::default(); 2];
    assert_eq!(ranges.take(&mut room), 2);
    assert_eq!(all(&mut ranges), [(5, 5, false)]);
}

proptest! {
    /// Every number is in one range, with the kind it was added with, in any order of adding.
    #[test]
    fn every_number_is_in_one_range(
        start in any::<u32>(),
        order in Just((0..100u32).collect::<Vec<_>>()).prop_shuffle(),
        copied in any::<u128>(),
        room in 1..8usize,
    ) {
        let mut ranges = Ranges::default();
        let mut told = [0; 100];
        let mut buffer = vec![Completion::default(); room];
        let mut tell = |ranges: &mut Ranges| {
            let count = ranges.take(&mut buffer);
            for range in &buffer[..count] {
                for step in 0..range.count() {
                    let index = range.lo.wrapping_add(step).wrapping_sub(start);
                    told[index as usize] += 1;
                    assert_eq!(copied >> index & 1 == 1, range.copied);
                }
            }
            count
        };
        for (turn, index) in order.iter().enumerate() {
            ranges.add(start.wrapping_add(*index), copied >> index & 1 == 1);
            if turn % 16 == 15 {
                tell(&mut ranges);
            }
        }
        while tell(&mut ranges) > 0 {}
        prop_assert!(told.iter().all(|&count| count == 1));
    }
}
