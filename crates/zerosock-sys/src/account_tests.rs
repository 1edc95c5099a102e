//! Unit tests of `account`.

use super::*;

fn budget(descriptors: u64) -> Budget {
    let limits = Limits {
        descriptors,
        numbers: u64::MAX,
        mapped: 100,
        mapped_each: 60,
    };
    Budget::new(limits, 5)
}

#[test]
fn requests_are_limited_for_an_account_and_its_parts_together() {
    let account = Budget::unlimited().account();
    let (one, two) = (account.take_request(2), account.part().take_request(2));
    assert!(one.is_some() && two.is_some());
    assert!(account.take_request(2).is_none() && account.part().take_request(2).is_none());
    assert!(Budget::unlimited().account().take_request(2).is_some());
    drop(one);
    assert!(account.take_request(2).is_some());
}

#[test]
fn nobody_borrows_what_another_is_guaranteed() {
    let budget = budget(100);
    assert_eq!(budget.share(), 10);
    let [a, b] = [budget.account(), budget.account()];
    let others: Vec<_> = (0..3).map(|_| budget.account()).collect();
    // Its own ten, and all fifty that are common.
    let held: Vec<_> = (0..60).map(|_| a.take_descriptors(1).unwrap()).collect();
    let refused = a.take_descriptors(1).unwrap_err();
    let expected = Exceeded::Descriptors {
        used: 60,
        guaranteed: 10,
        common: 50,
    };
    assert_eq!(refused, expected);
    assert_eq!(budget.refused(), 1);
    let theirs = b.take_descriptors(10).unwrap();
    b.take_descriptors(1).unwrap_err();
    for other in &others {
        drop(other.take_descriptors(10).unwrap());
    }
    drop(held);
    assert_eq!(a.descriptors(), 0);
    let more = b.take_descriptors(50).unwrap();
    b.take_descriptors(1).unwrap_err();
    drop((theirs, more));
    drop(a.take_descriptors(60).unwrap());
    a.take_descriptors(61).unwrap_err();
}

#[test]
fn accounts_beyond_those_expected_are_guaranteed_what_is_left() {
    let budget = budget(100);
    let first: Vec<_> = (0..5).map(|_| budget.account()).collect();
    let greedy = first[0].take_descriptors(60).unwrap();
    let late = budget.account();
    late.take_descriptors(1).unwrap_err();
    drop(greedy);
    drop(late.take_descriptors(50).unwrap());
    drop(late);
    // What a closed account was guaranteed is common again.
    let another = budget.account();
    drop(another.take_descriptors(10).unwrap());
    drop((first, another));
    let all: Vec<_> = (0..5).map(|_| budget.account()).collect();
    drop(all[0].take_descriptors(60).unwrap());
}

#[test]
fn memory_is_limited_for_each_and_for_all() {
    let budget = budget(0);
    let [a, b] = [budget.account(), budget.account()];
    let mapped = a.take_mapped(50).unwrap();
    let error = a.take_mapped(11).unwrap_err();
    assert!(matches!(error, Exceeded::Mapped { limit: 60, .. }));
    let error = b.take_mapped(51).unwrap_err();
    assert!(matches!(error, Exceeded::MappedByAll { limit: 100, .. }));
    drop(mapped);
    drop(b.take_mapped(60).unwrap());
    let mapped = |account: &Account| account.0.share.lock().mapped;
    assert_eq!((mapped(&a), mapped(&b)), (0, 0));
}

#[test]
fn only_descriptors_outside_the_share_clog_an_account() {
    let account = Budget::unlimited().account();
    let _sockets: Vec<_> = (0..2 * MAX_UNCOUNTED)
        .map(|_| account.take_descriptors(1).unwrap())
        .collect();
    assert!(!account.is_clogged());
    let mut received: Vec<_> = (0..MAX_UNCOUNTED).map(|_| account.take_nothing()).collect();
    assert!(account.is_clogged());
    received.pop();
    assert!(!account.is_clogged());
}

#[test]
fn parts_use_one_share_and_do_not_clog_each_other() {
    let budget = budget(100);
    let others: Vec<_> = (0..4).map(|_| budget.account()).collect();
    let vm = budget.account();
    let programs = vm.part();
    let held = programs.take_descriptors(60).unwrap();
    assert_eq!((vm.descriptors(), programs.descriptors()), (60, 60));
    vm.take_descriptors(1).unwrap_err();
    let received: Vec<_> = (0..MAX_UNCOUNTED)
        .map(|_| programs.take_nothing())
        .collect();
    programs.set_deferred(MAX_DEFERRED);
    assert!(programs.is_clogged() && !vm.is_clogged());
    assert_ne!(vm.number(), programs.number());
    // The guarantee ends with the last part.
    drop((vm, held));
    assert_eq!(budget.0.lock().guaranteed, 50);
    drop((programs, received));
    assert_eq!(budget.0.lock().guaranteed, 40);
    drop(others);
}

#[test]
fn no_message_is_received_without_numbers_for_its_descriptors() {
    const MESSAGE: u64 = MAX_FDS as u64;
    let limits = Limits {
        descriptors: 10,
        numbers: 2 * MESSAGE + 12,
        mapped: 0,
        mapped_each: 0,
    };
    let budget = Budget::new(limits, 1);
    let none = Limits {
        descriptors: 2,
        ..limits
    };
    let (account, other) = (budget.account(), budget.beside(none, 1).account());
    let counted = (account.take_descriptors(10), other.take_descriptors(2));
    let first = account.reserve_message().expect("free numbers");
    let second = other.reserve_message().expect("free numbers");
    assert!(account.reserve_message().is_none());
    assert!(account.is_clogged() && other.is_clogged());
    drop(first);
    assert!(!account.is_clogged() && !other.is_clogged());
    // Received, and not closed yet.
    let received: Vec<_> = (0..MESSAGE).map(|_| account.take_nothing()).collect();
    assert!(account.reserve_message().is_none() && other.is_clogged());
    drop(second);
    // One may receive a message and the other has to leave numbers for it.
    assert!(account.is_clogged() && !other.is_clogged());
    let uncounted = other.take_nothing();
    assert!(other.reserve_message().is_none() && other.is_clogged());
    drop(uncounted);
    drop(other.reserve_message().expect("free numbers"));
    drop((counted, received));
    assert!(budget.0.numbers.has(limits.numbers));
}

#[test]
fn an_unlimited_budget_refuses_nothing() {
    let budget = Budget::unlimited();
    let account = budget.account();
    let one = account.take_descriptors(1 << 40).unwrap();
    let two = account.take_mapped(1 << 60).unwrap();
    drop((one, two));
}
