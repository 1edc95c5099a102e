//! The chain at the front of a queue: which chains there are, and that completing or popping it there
//! is the same as popping it first.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::*;
use crate::split::layout::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

const N: u16 = DESC_F_NEXT;
const W: u16 = DESC_F_WRITE;
const I: u16 = DESC_F_INDIRECT;
const SIZE: u16 = 4;
/// Bytes of the first part.
const AT: usize = 16;

/// A queue that has popped a chain of two buffers in the region of `DATA`.
fn device() -> (Arc<Memory>, DeviceQueue) {
    let (driver, mut device) = queues(SIZE, 0, false);
    let mem = Arc::clone(driver.memory());
    post(&mem, SIZE, &[(DATA, 1, N, 1), (DATA, 1, 0, 0)]);
    let chain = device.pop().expect("a sound queue").expect("a chain");
    device.complete(chain, 0);
    (mem, device)
}

/// The parts of the chain at the front.
fn parts(queue: &mut DeviceQueue, writable: bool) -> Option<(Vec<u8>, Vec<u8>)> {
    let front = queue.front(AT, writable)?;
    Some([front.header, front.body].map(|part| {
        let mut bytes = vec![0; part.len()];
        part.read(0, &mut bytes);
        bytes
    }))
    .map(|[header, body]| (header, body))
}

#[test]
fn the_front_chain_is_divided_behind_the_header_in_one_buffer_and_in_two() {
    for kind in [0, W] {
        let (mem, mut queue) = device();
        let bytes: Vec<u8> = (0..40).collect();
        poke(&mem, DATA, &bytes);
        post(&mem, SIZE, &[(DATA, 40, kind, 0)]);
        let expected = Some((bytes[..AT].to_vec(), bytes[AT..].to_vec()));
        assert_eq!(parts(&mut queue, kind == W), expected);
        assert_eq!(parts(&mut queue, kind != W), None, "of the other kind");
        let table = [
            (DATA, AT as u32, kind | N, 1),
            (DATA + AT as u64, 24, kind, 0),
        ];
        write_table(&mem, layout(SIZE).desc, &table);
        assert_eq!(parts(&mut queue, kind == W), expected, "it stays posted");
    }
}

#[test]
fn a_chain_of_another_form_is_popped_but_never_at_the_front() {
    let (at, end) = (AT as u32, BORDER - 4);
    let tables: &[&[(u64, u32, u16, u16)]] = &[
        &[(DATA, at - 1, 0, 0)],
        &[(DATA, at + 1, N, 1), (DATA, 8, 0, 0)],
        &[(DATA, at, N, 1), (DATA, 8, W, 0)],
        &[(DATA, at, N, 1), (DATA, 8, N, 2), (DATA, 8, 0, 0)],
        &[(DATA, at, N, 1), (DATA, 8, I, 0)],
        &[(DATA, at, N, 1), (DATA, 8, 0, 0)], // with a popped chain of the other descriptors
        &[(DATA, at, N, SIZE), (DATA, 8, 0, 0)],
        &[(DATA, at, N, 1), (DATA, 0, 0, 0)],
        &[(DATA, at, N, 1), (DATA, u32::MAX, 0, 0)],
        &[(DATA, at, I, 0)],
        &[(end, at, 0, 0)],
        &[(0, at, 0, 0)],
    ];
    for (case, table) in tables.iter().enumerate() {
        let (mem, mut queue) = device();
        if case == 5 {
            let three = [(DATA, 1, N, 1), (DATA, 1, N, 2), (DATA, 1, 0, 0)];
            post(&mem, SIZE, &three);
            let _held = queue.pop().expect("a sound queue").expect("a chain");
        }
        post(&mem, SIZE, table);
        assert_eq!(parts(&mut queue, false), None, "case {case}");
        assert_eq!(queue.posted(), 1, "case {case}");
    }
    let (mem, mut queue) = device();
    assert_eq!(parts(&mut queue, false), None, "no chain");
    post_head(&mem, SIZE, SIZE);
    assert_eq!(parts(&mut queue, false), None, "a head outside the table");
    assert!(queue.pop().is_err());
    let head = layout(SIZE).avail + 4 + 2;
    poke(&mem, head, &[0, 0]);
    assert_eq!(parts(&mut queue, false), None, "a broken queue has none");
}

#[test]
fn a_chain_is_completed_at_the_front_as_a_popped_one_is() {
    let used = |pop: bool| {
        let (mem, mut queue) = device();
        post(&mem, SIZE, &[(DATA, 40, W, 0)]);
        if pop {
            let chain = queue.pop().expect("a sound queue").expect("a chain");
            queue.complete(chain, 30);
        } else {
            let token = queue.front(AT, true).expect("a chain").token;
            queue.complete_front(token, 30);
        }
        assert_eq!((queue.outstanding(), queue.posted()), (0, 0));
        assert!(queue.publish());
        peek(&mem, layout(SIZE).used, 4 + 8 * usize::from(SIZE))
    };
    assert_eq!(used(false), used(true));
}

#[test]
fn a_chain_that_is_popped_from_the_front_is_the_one_that_was_read_there() {
    let (mem, mut queue) = device();
    let table = [(DATA, AT as u32, N, 1), (DATA + 64, 24, 0, 0)];
    post(&mem, SIZE, &table);
    let token = queue.front(AT, false).expect("a chain").token;
    write_table(&mem, layout(SIZE).desc, &[(BORDER, 1, W, 0)]);
    let chain = queue.pop_front(token);
    assert_eq!((chain.readable_len(), chain.writable_len()), (40, 0));
    assert_eq!((chain.descriptors(), queue.outstanding()), (2, 1));
    queue.unpop(chain);
    assert_eq!((queue.outstanding(), queue.posted()), (0, 1));
}

#[test]
fn the_token_of_a_chain_that_was_popped_is_refused() {
    let (mem, mut queue) = device();
    post(&mem, SIZE, &[(DATA, 40, 0, 0)]);
    let token = queue.front(AT, false).expect("a chain").token;
    let chain = queue.pop().expect("a sound queue").expect("a chain");
    queue.complete(chain, 0);
    let again = catch_unwind(AssertUnwindSafe(|| queue.complete_front(token, 0)));
    assert!(again.is_err());
}
