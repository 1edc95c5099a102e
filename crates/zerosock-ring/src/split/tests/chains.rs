//! Chains in the device half: every shape, every fault, each descriptor read once.

use std::sync::Arc;

use super::*;
use crate::memory::TranslateError;
use crate::split::layout::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};
use crate::split::{Chain, ChainFault, PopError};

const N: u16 = DESC_F_NEXT;
pub(super) const W: u16 = DESC_F_WRITE;
const I: u16 = DESC_F_INDIRECT;

pub(super) fn device(size: u16) -> (Arc<Memory>, DeviceQueue) {
    let (driver, device) = queues(size, 0, false);
    (Arc::clone(driver.memory()), device)
}

pub(super) fn popped(queue: &mut DeviceQueue) -> Chain {
    queue.pop().expect("a sound queue").expect("a posted chain")
}

fn fault(queue: &mut DeviceQueue) -> ChainFault {
    match queue.pop() {
        Err(PopError::Malformed(chain)) => {
            let fault = chain.fault().expect("a reason");
            assert!(chain.readable().is_empty() && chain.writable().is_empty());
            assert_eq!((chain.readable_len(), chain.writable_len()), (0, 0));
            queue.complete(chain, 0);
            fault
        }
        other => panic!("not malformed: {other:?}"),
    }
}

#[test]
fn every_malformed_chain_is_reported_and_the_queue_continues() {
    use ChainFault::*;
    let d = DATA;
    let end = DATA + 2 * DATA_LEN;
    let indirect = DATA + 0x1000;
    type Table<'a> = &'a [(u64, u32, u16, u16)];
    let cases: &[(&str, Table<'_>, Table<'_>, ChainFault)] = &[
        ("loop to itself", &[(d, 8, N, 0)], &[], TooLong),
        ("loop of two", &[(d, 8, N, 1), (d, 8, N, 0)], &[], TooLong),
        ("next past the table", &[(d, 8, N, 8)], &[], Next(8)),
        (
            "next far past the table",
            &[(d, 8, N, 65535)],
            &[],
            Next(65535),
        ),
        ("no length", &[(d, 0, 0, 0)], &[], ZeroLength),
        (
            "no length, writable, second",
            &[(d, 4, N, 1), (d, 0, W, 0)],
            &[],
            ZeroLength,
        ),
        (
            "readable after writable",
            &[(d, 4, W | N, 1), (d, 4, 0, 0)],
            &[],
            Order,
        ),
        (
            "more than 2^32 - 1 bytes",
            &[(d, 1, N, 1), (d, u32::MAX, 0, 0)],
            &[],
            TotalLength,
        ),
        (
            "one byte past the end",
            &[(end - 8, 9, 0, 0)],
            &[],
            Address(TranslateError::Unmapped { addr: end }),
        ),
        (
            "wraps",
            &[(u64::MAX - 3, 5, 0, 0)],
            &[],
            Address(TranslateError::Wraps),
        ),
        (
            "in a hole",
            &[(0, 4, 0, 0)],
            &[],
            Address(TranslateError::Unmapped { addr: 0 }),
        ),
        (
            "table and next",
            &[(indirect, 16, I | N, 1), (d, 1, 0, 0)],
            &[],
            IndirectNext,
        ),
        (
            "table of no bytes",
            &[(indirect, 0, I, 0)],
            &[],
            IndirectLength(0),
        ),
        (
            "table of 24 bytes",
            &[(indirect, 24, I, 0)],
            &[],
            IndirectLength(24),
        ),
        (
            "table of 2^32 - 16 bytes",
            &[(indirect, 0xffff_fff0, I, 0)],
            &[],
            TooLong,
        ),
        (
            "table of 1025 entries",
            &[(indirect, 1025 * 16, I, 0)],
            &[],
            TooLong,
        ),
        (
            "1024 entries and one in front",
            &[(d, 1, N, 1), (indirect, 1024 * 16, I, 0)],
            &[],
            TooLong,
        ),
        (
            "table outside memory",
            &[(end, 16, I, 0)],
            &[],
            Address(TranslateError::Unmapped { addr: end }),
        ),
        (
            "table in a table",
            &[(indirect, 16, I, 0)],
            &[(indirect, 16, I, 0)],
            IndirectNested,
        ),
        (
            "table that loops",
            &[(indirect, 32, I, 0)],
            &[(d, 1, N, 1), (d, 1, N, 0)],
            TooLong,
        ),
        (
            "table left",
            &[(indirect, 32, I, 0)],
            &[(d, 1, N, 2)],
            Next(2),
        ),
        (
            "empty entry",
            &[(indirect, 16, I, 0)],
            &[(d, 0, 0, 0)],
            ZeroLength,
        ),
        (
            "order across the table",
            &[(d, 1, W | N, 1), (indirect, 16, I, 0)],
            &[(d, 1, 0, 0)],
            Order,
        ),
    ];
    let (mem, mut queue) = device(8);
    for (seen, (name, table, indirect_table, expected)) in cases.iter().enumerate() {
        write_table(&mem, indirect, indirect_table);
        post(&mem, 8, table);
        assert_eq!(fault(&mut queue), *expected, "{name}");
        assert_eq!(queue.malformed(), seen as u64 + 1);
        assert_eq!(queue.outstanding(), 0);
        // The queue continues.
        post(&mem, 8, &[(d, 8, 0, 0)]);
        let chain = popped(&mut queue);
        assert_eq!(chain.readable_len(), 8, "{name}");
        queue.complete(chain, 0);
        let _ = queue.publish();
    }
}

#[test]
fn indirect_tables_are_refused_unless_negotiated() {
    let mem = memory(8);
    let config = QueueConfig {
        indirect: false,
        ..config(8, 0, false)
    };
    let mut queue = DeviceQueue::new(Arc::clone(&mem), &config).unwrap();
    write_table(&mem, DATA, &[(DATA, 4, 0, 0)]);
    post(&mem, 8, &[(DATA, 16, I, 0)]);
    assert_eq!(fault(&mut queue), ChainFault::IndirectRefused);
}

#[test]
fn indirect_tables_may_be_longer_than_a_small_queue() {
    let (mem, mut queue) = device(8);
    let entries: Vec<_> = (0..1024u16)
        .map(|i| (DATA, 1, if i < 1023 { N } else { 0 }, i + 1))
        .collect();
    let table = BORDER - 512; // over the border of the regions
    write_table(&mem, table, &entries);
    // WRITE on the referring descriptor has no meaning.
    post(&mem, 8, &[(table, 1024 * 16, I | W, 0)]);
    let chain = popped(&mut queue);
    assert_eq!(chain.readable().len(), 1024);
    assert_eq!((chain.readable_len(), chain.writable_len()), (1024, 0));
    queue.complete(chain, 0);
    // A vector of this length is not kept.
    assert_eq!(queue.pool_capacity(), 0);
}

#[test]
fn a_table_may_be_longer_than_its_chain() {
    let (mem, mut queue) = device(8);
    write_table(
        &mem,
        DATA,
        &[(DATA, 4, N, 2), (0, 0, 0, 0), (DATA, 5, W, 0)],
    );
    post(&mem, 8, &[(DATA, 3 * 16, I, 0)]);
    let chain = popped(&mut queue);
    assert_eq!((chain.readable_len(), chain.writable_len()), (4, 5));
    queue.complete(chain, 0);
}

#[test]
fn a_buffer_over_the_border_of_two_regions_is_two_pieces() {
    let (mem, mut queue) = device(8);
    let bytes: Vec<u8> = (0..64).collect();
    poke(&mem, BORDER - 30, &bytes);
    post(&mem, 8, &[(BORDER - 30, 64, 0, 0)]);
    let chain = popped(&mut queue);
    let lens: Vec<_> = chain.readable().iter().map(|piece| piece.len()).collect();
    assert_eq!(lens, [30, 34]);
    assert_eq!(contents(&mem, chain.readable()), bytes);
    queue.complete(chain, 0);
}

#[test]
fn descriptors_shared_by_outstanding_chains_are_refused() {
    let (mem, mut queue) = device(4);
    // All four descriptors in a chain, and the same head posted twice.
    let d = DATA;
    post(
        &mem,
        4,
        &[(d, 1, N, 1), (d, 1, N, 2), (d, 1, N, 3), (d, 1, 0, 0)],
    );
    post_head(&mem, 4, 0);
    let first = popped(&mut queue);
    assert_eq!(fault(&mut queue), ChainFault::Shared);
    queue.complete(first, 0);
    post_head(&mem, 4, 0);
    let again = popped(&mut queue);
    assert_eq!(again.readable_len(), 4);
    queue.complete(again, 0);
}

#[test]
fn a_descriptor_is_read_once() {
    let (mem, mut queue) = device(8);
    post(&mem, 8, &[(DATA, 8, 0, 0)]);
    let chain = popped(&mut queue);
    // Later changes by the driver have no effect.
    write_table(&mem, layout(8).desc, &[(0, u32::MAX, W, 0)]);
    assert_eq!(
        (chain.head(), chain.readable_len(), chain.writable_len()),
        (0, 8, 0)
    );
    assert_eq!(contents(&mem, chain.readable()).len(), 8);
    queue.complete(chain, 0);
}
