//! Waiting for send buffers: each connection is woken once, in rotating order, and removed ones are
//! forgotten.

use super::super::room::Waiters;
use super::*;

fn told(table: &mut Table, waiters: &mut Waiters) -> Vec<StreamId> {
    table.sockets.wake_waiters(waiters);
    assert!(waiters.is_empty());
    std::iter::from_fn(|| table.sockets.next_ready()).collect()
}

#[test]
fn waiting_connections_are_woken_once_in_rotating_order() {
    let mut table = Table::new();
    let mut waiters = Waiters::default();
    let ids: Vec<_> = (0..5).map(|_| table.conn()).collect();
    while table.sockets.next_ready().is_some() {}
    let mut first = Vec::new();
    for _ in 0..5 {
        // The same order each time, as tasks of one thread that are woken in order.
        for &id in ids.iter().chain(&ids) {
            table.sockets.wait_for_room(id, &mut waiters);
        }
        let mut all = told(&mut table, &mut waiters);
        first.push(all[0]);
        all.sort_unstable_by_key(|id| id.index);
        assert_eq!(all, ids);
    }
    first.sort_unstable_by_key(|id| id.index);
    assert_eq!(first, ids, "each was first once");
}

/// A peer that returns no buffers and resets its connections as soon as they have sends waiting.
#[test]
fn removed_connections_leave_the_waiting_list() {
    let mut table = Table::new();
    let mut waiters = Waiters::default();
    let stay: Vec<_> = (0..10).map(|_| table.conn()).collect();
    for &id in &stay {
        table.sockets.wait_for_room(id, &mut waiters);
    }
    for _ in 0..10_000 {
        let id = table.conn();
        table.sockets.wait_for_room(id, &mut waiters);
        let flow = table.sockets.get(id).unwrap().flow.unwrap();
        table.sockets.remove(id, &mut table.slots);
        let _ = table.shard.reset(flow);
        assert!(waiters.len() <= 100, "{} for 10", waiters.len());
    }
    // Credit made them ready meanwhile; they wait again.
    for _ in 0..10_000 {
        for &id in &stay {
            table.sockets.get_mut(id).unwrap().wants_room = false;
            table.sockets.wait_for_room(id, &mut waiters);
            assert!(waiters.len() <= 100, "{} for 10", waiters.len());
        }
    }
    while table.sockets.next_ready().is_some() {}
    let mut all = told(&mut table, &mut waiters);
    all.sort_unstable_by_key(|id| id.index);
    assert_eq!(all, stay, "each waiting connection is woken");
}
