//! Unit tests of `posted`.

use super::*;

#[test]
fn private_chunks_come_back_in_any_order() {
    let mut posted = Posted::new(8);
    (0..8).for_each(|number| posted.push_private(number));
    for number in [3, 0, 7, 1, 2] {
        assert_eq!(posted.take(number as u64, Some(number)), Ok(()));
    }
    posted.push_private(3);
    for number in [3, 6, 4, 5] {
        assert_eq!(posted.take(number as u64, Some(number)), Ok(()));
    }
    assert_eq!(posted.len(), 0);
}

#[test]
fn chunk_comes_back_once_for_each_time_it_was_posted() {
    let mut posted = Posted::new(4);
    assert_eq!(posted.take(0, Some(0)), Err(ChunkError::NotPosted));
    posted.push_private(0);
    posted.push_private(1);
    assert_eq!(posted.take(0, Some(0)), Ok(()));
    assert_eq!(posted.take(0, Some(0)), Err(ChunkError::NotPosted));
    assert_eq!(posted.take(2, Some(2)), Err(ChunkError::NotPosted));
    assert_eq!(posted.take(9, Some(9)), Err(ChunkError::NotPosted));
    assert_eq!(posted.take(0, None), Err(ChunkError::NotPosted));
    assert_eq!(posted.len(), 1);
    // The guest has posted the same buffer twice.
    let mut posted = Posted::new(0);
    posted.push_own(512);
    posted.push_own(512);
    assert_eq!(posted.take(512, None), Ok(()));
    assert_eq!(posted.take(512, None), Ok(()));
    assert_eq!(posted.take(512, None), Err(ChunkError::NotPosted));
}

#[test]
fn chunks_of_the_guest_come_back_in_their_order() {
    let mut posted = Posted::new(4);
    posted.push_private(0);
    posted.push_own(100);
    posted.push_own(200);
    posted.push_private(1);
    assert_eq!(posted.take(100, None), Err(ChunkError::OutOfOrder));
    assert_eq!(posted.take(1, Some(1)), Ok(()));
    // The chain of 100 can only be filled by the kernel now.
    assert_eq!(posted.take(0, Some(0)), Err(ChunkError::OutOfOrder));
    assert_eq!(posted.take(200, None), Err(ChunkError::OutOfOrder));
    assert_eq!(posted.take(300, None), Err(ChunkError::NotPosted));
    assert_eq!(posted.take(100, None), Ok(()));
    assert_eq!(posted.take(200, None), Ok(()));
    assert_eq!(posted.take(0, Some(0)), Ok(()));
}
