//! Chains of one descriptor that are read ahead: which they are, that they stay posted until they are
//! completed, and that they return to the driver as popped chains do.

use super::*;
use crate::split::layout::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};
use crate::split::{Buffer, Chain, Singles};

const SIZE: u16 = 8;

fn buffer(index: u64, writable: bool) -> Buffer {
    Buffer {
        addr: DATA + 0x1000 * index,
        len: 100 + index as u32,
        writable,
    }
}

/// Queues that have passed one chain, so that the device knows the region of the buffers.
fn warm_queues() -> (DriverQueue, DeviceQueue) {
    let (mut driver, mut device) = queues(SIZE, 0, true);
    driver.add(&[buffer(0, true)], 99).unwrap();
    let _ = driver.publish();
    let chain = popped(&mut device);
    device.complete(chain, 0);
    let _ = device.publish();
    assert_eq!(driver.poll().unwrap().unwrap().token, 99);
    (driver, device)
}

fn popped(device: &mut DeviceQueue) -> Chain {
    device.pop().unwrap().expect("a posted chain")
}

/// The lengths of the chains that are read ahead, without use of them.
fn lengths(device: &mut DeviceQueue, most: usize, writable: bool) -> Vec<usize> {
    let mut singles = Singles::default();
    device.read_singles(&mut singles, most, writable, 64);
    let mut lengths = Vec::new();
    while let Some(single) = singles.front() {
        lengths.push(single.len());
        let chain = device.pop_single(&mut singles).expect("the front");
        device.complete(chain, 0);
    }
    lengths
}

fn post_all(driver: &mut DriverQueue, chains: &[&[Buffer]]) {
    for (token, buffers) in chains.iter().enumerate() {
        driver.add(buffers, token as u64).unwrap();
    }
    let _ = driver.publish();
}

#[test]
fn chains_return_in_order_with_what_was_written() {
    let (mut driver, mut device) = warm_queues();
    let mem = Arc::clone(device.memory());
    let buffers = [1, 2, 3].map(|index| [buffer(index, true)]);
    post_all(&mut driver, &buffers.each_ref().map(|one| &one[..]));
    let mut singles = Singles::default();
    device.read_singles(&mut singles, 32, true, usize::MAX);
    for written in [1, 2, u32::MAX] {
        let piece = *singles.front().unwrap().piece();
        assert_eq!(mem.write(&[piece], 0, &[written as u8]), 1);
        device.complete_single(&mut singles, written);
    }
    assert!(singles.front().is_none());
    assert_eq!(device.outstanding(), 0);
    assert!(driver.poll().unwrap().is_none(), "not published");
    device.publish_without_notify();
    for (token, len) in [(0, 1), (1, 2), (2, 103)] {
        let used = driver.poll().unwrap().expect("a returned chain");
        assert_eq!((used.token, used.len, used.claimed), (token, len, len));
        assert_eq!(
            peek(&mem, DATA + 0x1000 * (token + 1), 1),
            [[1], [2], [255]][token as usize]
        );
    }
}

#[test]
fn a_chain_that_was_only_read_stays_posted() {
    let (mut driver, mut device) = warm_queues();
    post_all(&mut driver, &[&[buffer(1, false)], &[buffer(2, false)]]);
    let mut singles = Singles::default();
    device.read_singles(&mut singles, 32, false, 0);
    assert_eq!(singles.front().unwrap().len(), 101);
    assert_eq!(device.base(), 1);
    let first = popped(&mut device);
    assert_eq!(first.readable_len(), 101);
    device.unpop(first);
    device.read_singles(&mut singles, 1, false, 0);
    device.complete_single(&mut singles, 7);
    assert!(singles.front().is_none(), "one was wanted");
    device.publish_without_notify();
    let used = driver.poll().unwrap().unwrap();
    assert_eq!(
        (used.token, used.claimed),
        (0, 0),
        "a device writes no readable buffer"
    );
    assert_eq!(popped(&mut device).readable_len(), 102);
}

#[test]
fn reading_stops_at_another_form_of_chain() {
    for other in [
        &[buffer(2, true), buffer(3, true)][..],
        &[buffer(2, false)],
        &[Buffer {
            addr: BORDER + 16,
            len: 8,
            writable: true,
        }],
    ] {
        let (mut driver, mut device) = warm_queues();
        post_all(
            &mut driver,
            &[&[buffer(1, true)], other, &[buffer(4, true)]],
        );
        assert_eq!(lengths(&mut device, 32, true), [101]);
        let chain = popped(&mut device);
        assert_eq!(chain.descriptors() as usize, other.len());
        device.complete(chain, 0);
        let chain = popped(&mut device);
        assert_eq!(chain.writable_len(), 104);
        device.complete(chain, 0);
    }
}

#[test]
fn a_malformed_descriptor_is_left_to_the_general_path() {
    let write = DESC_F_WRITE;
    for descriptor in [
        (DATA, 0, write, 0),
        (DATA + 2 * DATA_LEN, 8, write, 0),
        (u64::MAX - 3, 8, write, 0),
        (DATA, 8, write | DESC_F_NEXT, SIZE),
        (DATA, 8, write | DESC_F_INDIRECT, 0),
    ] {
        let (_driver, mut device) = warm_queues();
        let mem = Arc::clone(device.memory());
        post(&mem, SIZE, &[descriptor]);
        assert_eq!(lengths(&mut device, 32, true), [0; 0], "{descriptor:?}");
        assert!(device.pop().is_err(), "{descriptor:?}");
    }
    let (_driver, mut device) = warm_queues();
    post_head(&Arc::clone(device.memory()), SIZE, SIZE);
    assert_eq!(lengths(&mut device, 32, true), [0; 0]);
    assert!(device.pop().is_err());
    assert_eq!(
        lengths(&mut device, 32, true),
        [0; 0],
        "a broken queue has none"
    );
}

/// A driver that puts one descriptor into many chains cannot have more of them held than the queue has
/// descriptors.
#[test]
fn held_chains_are_limited_by_the_descriptors_of_the_queue() {
    let (_driver, mut device) = warm_queues();
    let mem = Arc::clone(device.memory());
    write_table(
        &mem,
        layout(SIZE).desc,
        &[
            (DATA, 8, DESC_F_WRITE | DESC_F_NEXT, 1),
            (DATA, 8, DESC_F_WRITE, 0),
        ],
    );
    post_head(&mem, SIZE, 0);
    let pair = popped(&mut device);
    assert_eq!(pair.descriptors(), 2);
    for _ in 1..SIZE {
        post_head(&mem, SIZE, 1);
    }
    let mut singles = Singles::default();
    device.read_singles(&mut singles, 32, true, 0);
    let mut held = vec![pair];
    while let Some(chain) = device.pop_single(&mut singles) {
        held.push(chain);
    }
    assert_eq!(held.len(), usize::from(SIZE) - 1);
    device.read_singles(&mut singles, 32, true, 0);
    assert!(singles.front().is_none());
    assert!(
        device.pop().is_err(),
        "the descriptor is part of another chain"
    );
}

#[test]
fn indices_wrap() {
    let (mut driver, mut device) = queues(SIZE, u16::MAX - 2, true);
    driver.add(&[buffer(0, true)], 0).unwrap();
    let _ = driver.publish();
    let chain = popped(&mut device);
    device.complete(chain, 0);
    let _ = device.publish();
    driver.poll().unwrap().unwrap();
    let mut singles = Singles::default();
    for round in 0..4 {
        let buffers = [1, 2, 3].map(|index| [buffer(index, true)]);
        post_all(&mut driver, &buffers.each_ref().map(|one| &one[..]));
        device.read_singles(&mut singles, 32, true, 0);
        for _ in 0..3 {
            device.complete_single(&mut singles, 1);
        }
        device.publish_without_notify();
        for token in 0..3 {
            let used = driver.poll().unwrap().expect("a returned chain");
            assert_eq!((used.token, used.len), (token, 1), "round {round}");
        }
    }
}
