//! Unit tests of `numbers`.

use super::*;

#[test]
fn a_number_repeats_only_after_all_generations_of_its_slot() {
    let mut numbers = Numbers::default();
    let first: Vec<u32> = (0..3).map(|_| numbers.take().unwrap()).collect();
    assert_eq!(first, [0, 1, 2]);
    let mut seen = std::collections::HashSet::from([1]);
    numbers.release(1);
    for _ in 1..GENERATIONS {
        let number = numbers.take().unwrap();
        assert!(number < 1 << NUMBER_BITS);
        assert_eq!(slot(number), 1);
        assert!(seen.insert(number), "{number} came twice");
        numbers.release(number);
    }
    assert_eq!(numbers.take(), Some(1));
    assert_eq!(numbers.taken(), 3);
}

#[test]
fn at_most_max_devices_numbers_are_allocated() {
    let mut numbers = Numbers::default();
    for n in 0..MAX_DEVICES as u32 {
        assert_eq!(numbers.take(), Some(n));
    }
    assert_eq!(numbers.take(), None);
    numbers.release(7);
    assert_eq!(numbers.take(), Some(1 << SLOT_BITS | 7));
}

#[test]
fn a_number_of_an_earlier_generation_finds_nothing() {
    let mut table = Table::default();
    let mut numbers = Numbers::default();
    let old = numbers.take().unwrap();
    assert!(table.insert(old, "old").is_none());
    assert_eq!(table.remove(old), Some("old"));
    numbers.release(old);
    let new = numbers.take().unwrap();
    assert!(table.insert(new, "new").is_none());
    assert_eq!(table.get_mut(old), None);
    assert_eq!(table.remove(old), None);
    assert_eq!(table.get_mut(new), Some(&mut "new"));
    assert_eq!(table.numbers(), [new]);
    assert_eq!(table.get_mut(9), None);
}
