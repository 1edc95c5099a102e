//! Unit tests of `pool`.

use super::*;

#[test]
fn blocks_do_not_overlap_and_are_free_after_a_drop() {
    let pool = Pool::new(4, 5000).expect("memory");
    let mut blocks: Vec<_> = std::iter::from_fn(|| pool.loan()).collect();
    assert_eq!(blocks.len(), 4);
    for (fill, block) in (1..).zip(&mut blocks) {
        block.fill(fill);
    }
    for (fill, block) in (1..).zip(&blocks) {
        assert!(block.len() == 5000 && block.iter().all(|&byte| byte == fill));
    }
    blocks.truncate(1);
    assert_eq!(pool.free(), 3);
    drop(pool);
    assert_eq!(blocks[0][4999], 1);
}

#[test]
fn a_range_stays_within_its_block() {
    let pool = Pool::new(2, 4096).expect("memory");
    let mut block = pool.loan().expect("a block");
    assert_eq!(block.set_range(4096, 1), Err(4096));
    assert_eq!(block.set_range(1, usize::MAX), Err(4096));
    block.set_range(4000, 96).expect("within");
    assert_eq!(block.len(), 96);
}

#[test]
fn only_the_pages_that_contain_blocks_are_registered() {
    let page = page_size();
    for (blocks, block) in [(1, 1), (3, page / 2), (8, page), (5, 1 << 20)] {
        let pool = Pool::new(blocks, block).expect("memory");
        let used: usize = pool.arenas.iter().map(|arena| arena.vector().iov_len).sum();
        let unit = if pool.huge() { HUGE } else { page };
        assert_eq!(used, (blocks * block).next_multiple_of(unit));
        assert!(pool.arenas.iter().all(|arena| arena.len >= arena.used));
    }
}

#[test]
fn a_pool_of_nothing_is_refused() {
    for (blocks, block) in [(0, 4096), (1, 0), (1, ARENA + 1), (usize::MAX, ARENA)] {
        assert!(Pool::new(blocks, block).is_err(), "{blocks} of {block}");
    }
}
