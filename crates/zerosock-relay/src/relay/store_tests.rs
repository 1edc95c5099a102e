//! Unit tests of `store`.

use super::*;

const SIZE: usize = 256 << 10;

#[test]
fn a_short_rest_is_copied_and_a_long_one_keeps_the_buffer() {
    let mut store = Store::new(SIZE, 0);
    store.buffer()[10..20].copy_from_slice(b"0123456789");
    let short = store.keep(10, 20);
    assert_eq!(short.unsent(), b"0123456789");
    assert_eq!(store.lent(), 10);
    let mut long = store.keep(5, SIZE);
    assert_eq!(long.unsent().len(), SIZE - 5);
    assert_eq!(&long.unsent()[5..15], b"0123456789");
    long.advance(15);
    assert_eq!(long.unsent().len(), SIZE - 20);
    assert_eq!(store.lent(), SIZE + 10);
    store.release(short);
    store.release(long);
    assert_eq!(store.lent(), 0);
    assert_eq!(store.spare.len(), 1);
}

#[test]
fn beyond_the_limit_reads_are_small() {
    let mut store = Store::new(SIZE, 0);
    let held: Vec<Chunk> = std::iter::from_fn(|| {
        let more = store.read_size() == SIZE;
        more.then(|| store.keep(0, SIZE))
    })
    .collect();
    assert_eq!(held.len(), LENT_LIMIT / SIZE);
    assert_eq!(store.buffer().len(), SMALL_READ);
    held.into_iter().for_each(|chunk| store.release(chunk));
    assert_eq!(store.read_size(), SIZE);
    assert_eq!(store.spare.len(), SPARE_BUFFERS, "the rest is freed");
}

#[test]
fn pipes_are_bounded_and_reused() {
    let mut store = Store::new(SIZE, 2);
    let one = store.take_pipe().unwrap();
    let two = store.take_pipe().unwrap();
    assert!(store.take_pipe().is_none());
    store.release_pipe(one);
    assert_eq!(store.pipes_in_use(), 1);
    store.discard_pipe(two);
    let reused = store.take_pipe().unwrap();
    let made = store.take_pipe().unwrap();
    assert!(store.take_pipe().is_none());
    assert_eq!(fcntl_getpipe_size(&made.write).unwrap(), SIZE);
    drop((reused, made));
}
