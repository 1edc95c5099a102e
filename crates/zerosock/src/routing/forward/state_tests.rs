//! Unit tests of `state`.

use super::*;

#[test]
fn no_more_connections_than_the_limit_exist_at_once() {
    let state = RuleState::new("rule".into(), Some(2), None);
    let (one, two) = (state.admit().unwrap(), state.admit().unwrap());
    assert!(state.admit().is_err());
    drop(one);
    let three = state.admit().unwrap();
    assert!(state.admit().is_err());
    drop((two, three));
    assert_eq!(state.active(), 0);
}

#[test]
fn one_guest_leaves_places_of_a_rule_to_others() {
    let state = RuleState::new("rule".into(), Some(100), None);
    let [greedy, second, third] = [3, 4, 5].map(Cid::new);
    let admit = |guest, most: usize| -> Vec<Admitted> {
        let all = std::iter::repeat_with(|| state.admit_guest(guest).ok());
        all.take(most).map_while(|one| one).collect()
    };
    let first = admit(greedy, 1000);
    assert_eq!(first.len(), 75, "alone it has three quarters");
    assert!(state.admit_guest(greedy).unwrap_err().contains("its share"));
    // Each other one has its share, as far as there are places, and two together do not use up the rule.
    let others = [admit(second, 1000), admit(third, 1000)];
    assert_eq!(others.each_ref().map(Vec::len), [13, 1]);
    // With fewer than three quarters in use, no guest is bounded.
    drop(first);
    assert_eq!(admit(third, 1000).len(), 61);
}

#[test]
fn guests_with_few_connections_find_places_beside_a_greedy_one() {
    let state = RuleState::new("rule".into(), Some(8), None);
    let greedy = Cid::new(3);
    let taken: Vec<_> = std::iter::from_fn(|| state.admit_guest(greedy).ok()).collect();
    assert_eq!(taken.len(), 6);
    let _one = state.admit_guest(Cid::new(4)).unwrap();
    let _two = state.admit_guest(Cid::new(5)).unwrap();
    let full = state.admit_guest(Cid::new(6)).unwrap_err();
    assert!(full.contains("as many connections"), "{full}");
    drop((taken, _one, _two));
    assert_eq!(state.taken().by_guest.len(), 0);
}

#[test]
fn connections_of_a_replaced_rule_count_against_its_successor() {
    let old = RuleState::new("old".into(), None, None);
    let (one, two) = (old.admit().unwrap(), old.admit().unwrap());
    let new = RuleState::new("new".into(), Some(2), Some(&old));
    assert!(new.admit().is_err());
    drop(one);
    let three = new.admit().unwrap();
    assert!(new.admit().is_err());
    // Each shows its own.
    assert_eq!((old.active(), new.active()), (1, 1));
    drop((two, three));
    assert!(new.admit().is_ok());
}

#[test]
fn a_removed_rule_is_shown_while_it_has_connections() {
    let board = RuleBoard::default();
    let (old, idle) = (
        RuleState::new("old".into(), None, None),
        RuleState::new("idle".into(), None, None),
    );
    board.set([old.clone(), idle]);
    let connection = old.admit().unwrap();
    board.set([RuleState::new("new".into(), None, None)]);
    let shown = |board: &RuleBoard| {
        let stats = board.stats();
        let shown = stats.into_iter().map(|stats| (stats.rule, stats.removed));
        shown.collect::<Vec<_>>()
    };
    let (new, removed) = (("new".to_owned(), false), ("old".to_owned(), true));
    assert_eq!(shown(&board), [new.clone(), removed]);
    drop(connection);
    assert_eq!(shown(&board), [new]);
}
