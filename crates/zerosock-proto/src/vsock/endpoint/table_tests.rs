//! Unit tests of `table`.

use super::*;
use crate::wire::vsock::SocketType;
use hashbrown::DefaultHashBuilder;
use proptest::prelude::*;
use std::collections::HashMap;

fn key(port: u32) -> Key {
    let peer = Address::new(Cid::new(3), Port::new(port));
    let local = Address::new(Cid::HOST, Port::new(1));
    Key { local, peer }
}

fn connection(port: u32) -> Connection {
    Connection::new(key(port), SocketType::Stream, State::ESTABLISHED, 0, 1, 1)
}

fn table() -> Table<DefaultHashBuilder> {
    Table::new(DefaultHashBuilder::default())
}

#[test]
fn a_large_empty_slab_releases_its_memory() {
    let mut table = table();
    let before = KEPT_SLOTS as u32 * 4;
    let all: Vec<FlowId> = (0..before)
        .map(|port| {
            let index = table.insert(connection(port));
            table.id(index)
        })
        .collect();
    for flow in &all[1..] {
        table.free(flow.index);
    }
    assert!(table.get(all[0]).is_some() && table.slots.len() == all.len());
    table.free(all[0].index);
    assert_eq!((table.slots.capacity(), table.free.capacity()), (0, 0));
    assert_eq!(table.map.capacity(), 0);
    assert_eq!(table.occupied(), 0);
    // Ids of the old slab are stale in the new one.
    let index = table.insert(connection(0));
    assert_eq!(index, all[0].index);
    assert!(all.iter().all(|&flow| table.get(flow).is_none()));
    assert!(table.at(before).is_none(), "a slot beyond the new slab");
}

proptest! {
    #[test]
    fn lookups_agree_with_a_hash_map(
        steps in prop::collection::vec((0u8..4, 0u32..8), 0..200)
    ) {
        let mut table = table();
        let mut oracle = HashMap::new();
        let mut loose = Vec::new();
        for (step, port) in steps {
            let key = key(port);
            match step {
                0 => {
                    oracle.entry(key).or_insert_with(|| table.insert(connection(port)));
                }
                1 => if let Some(index) = oracle.remove(&key) {
                    table.free(index);
                },
                // Another connection may have its addresses from now on.
                2 => if let Some(index) = oracle.remove(&key) {
                    table.detach(index);
                    loose.push(index);
                },
                _ => if let Some(index) = loose.pop() {
                    table.free(index);
                },
            }
            prop_assert_eq!(table.find(&key), oracle.get(&key).copied());
            prop_assert_eq!(table.occupied(), oracle.len() + loose.len());
        }
    }
}
