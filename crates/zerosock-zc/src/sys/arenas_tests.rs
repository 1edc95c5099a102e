//! Unit tests of `arenas`.

use std::io::Write;

use super::super::{Pool, PoolBuf};
use super::*;

/// A ring, and a block of each of `pools` pools; none where io_uring is forbidden.
fn setting(name: &str, pools: usize) -> Option<(IoUring, Vec<PoolBuf>)> {
    let ring = match IoUring::new(2) {
        Ok(ring) => ring,
        Err(why) => {
            let _ = writeln!(std::io::stderr(), "\nSKIPPED io_uring: {name}: {why}");
            return None;
        }
    };
    let block = |_| Pool::new(1, 4096).expect("memory").loan().expect("a block");
    Some((ring, (0..pools).map(block).collect()))
}

#[test]
fn an_arena_that_a_request_names_is_not_replaced() {
    let name = "an_arena_that_a_request_names_is_not_replaced";
    let Some((ring, blocks)) = setting(name, ARENAS + 2) else {
        return;
    };
    let mut arenas = Arenas::default();
    for (number, block) in (0..).zip(&blocks[..ARENAS]) {
        assert_eq!(arenas.number(&ring, block.arena()), Some(number));
    }
    let [more, another] = [ARENAS, ARENAS + 1].map(|index| blocks[index].arena());
    assert_eq!(arenas.number(&ring, more), None);
    arenas.begun(0);
    arenas.begun(0);
    arenas.ended(0);
    for _ in 0..PAUSE {
        assert_eq!(arenas.number(&ring, blocks[1].arena()), Some(1));
    }
    // The first is the oldest, and the second in use.
    assert_eq!(arenas.number(&ring, more), Some(2));
    arenas.ended(0);
    assert_eq!(arenas.number(&ring, another), Some(0));
    assert_eq!(arenas.number(&ring, blocks[3].arena()), Some(3));
    assert_eq!(arenas.count(), ARENAS);
}

#[test]
fn a_dropped_arena_is_kept_only_while_a_request_names_it() {
    let name = "a_dropped_arena_is_kept_only_while_a_request_names_it";
    let Some((ring, mut blocks)) = setting(name, 4) else {
        return;
    };
    let mut arenas = Arenas::default();
    for block in &blocks[..3] {
        let number = arenas.number(&ring, block.arena());
        arenas.begun(number.expect("memory that may be locked"));
    }
    arenas.ended(1);
    blocks.drain(..2);
    assert_eq!(arenas.number(&ring, blocks[1].arena()), Some(1));
    assert_eq!(arenas.count(), 3);
    arenas.ended(0);
    let next = Pool::new(1, 4096).expect("memory").loan().expect("a block");
    assert_eq!(arenas.number(&ring, next.arena()), Some(0));
    assert_eq!(arenas.count(), 3);
}
