//! Unit tests of `associations`.

use super::*;

fn at(seconds: u64) -> Instant {
    Instant::ZERO + Duration::from_secs(seconds)
}

#[test]
fn each_ends_at_its_own_time_after_its_last_use_and_the_longest_idle_is_known() {
    let mut table = AssociationTable::new(16, 100);
    let [long, short, endless] = [1, 2, 3].map(|source| table.add(source, (), at(source)).key);
    table.limit_idle(long, Duration::from_secs(60));
    table.limit_idle(short, Duration::from_secs(10));
    assert_eq!(table.longest_idle(), Some(long));
    assert!(table.touch(long, at(4)) && !table.touch(long, at(4)));
    assert_eq!(table.longest_idle(), Some(short));
    assert!(table.touch(short, at(7)));
    assert_eq!(table.longest_idle(), Some(endless));
    assert_eq!(
        (table.pop_idle(at(16)), table.next_timeout()),
        (None, Some(at(17)))
    );
    assert_eq!(
        (table.pop_idle(at(17)), table.pop_idle(at(17))),
        (Some(short), None)
    );
    // Used after all: it gets its time again.
    assert!(table.touch(short, at(18)));
    assert_eq!(
        (table.pop_idle(at(27)), table.pop_idle(at(28))),
        (None, Some(short))
    );
    assert_eq!(table.pop_idle(at(63)), None);
    assert_eq!(table.pop_idle(at(64)), Some(long));
    assert_eq!((table.next_timeout(), table.count()), (None, 3));
}

#[test]
fn an_association_that_ends_leaves_no_entry() {
    let mut table = AssociationTable::new(2, 100);
    let id = table.add("a", (), at(0));
    let key = id.key;
    table.limit_idle(key, Duration::from_secs(1));
    for queued in 0..2 {
        assert_eq!(table.queued(), queued);
        table.enqueue(key);
    }
    assert_eq!((table.dequeue(), table.queued()), (Some(key), 0));
    table.requeue(key);
    for taken in [true, true, false] {
        let room = table.room();
        let association = table.get_mut(key).unwrap();
        assert_eq!(association.hold(&[0; 60], room), taken);
        table.recount(key);
    }
    assert_eq!((table.held, table.room()), (120, 0));
    assert_eq!(table.remove(key).unwrap().held.len(), 2);
    assert_eq!((table.held, table.queued(), table.deadlines()), (0, 0, 0));
    assert_eq!(
        (table.find(&"a"), table.key_of(id), table.longest_idle()),
        (None, None, None)
    );
    let next = table.add("a", (), at(0));
    assert_eq!(
        (next.key, table.key_of(id), table.key_of(next)),
        (key, None, Some(key))
    );
}
