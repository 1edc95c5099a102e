//! The driver half with mistaken callers and a malicious device.

use super::*;
use crate::split::{AddError, Buffer, DriverError, Used};

const READ: Buffer = Buffer {
    addr: DATA,
    len: 8,
    writable: false,
};
const WRITE: Buffer = Buffer {
    addr: DATA,
    len: 8,
    writable: true,
};

fn used(token: u64, len: u32) -> Used {
    Used {
        token,
        len,
        claimed: len,
    }
}

fn driver(size: u16) -> (std::sync::Arc<Memory>, DriverQueue) {
    let (driver, _) = queues(size, 0, false);
    (std::sync::Arc::clone(driver.memory()), driver)
}

/// Writes a used element, and the index that announces it, as a device does.
fn answer(mem: &Memory, size: u16, id: u32, len: u32) {
    let used = layout(size).used;
    let index = peek_u16(mem, used + 2);
    let element = used + 4 + 8 * u64::from(index % size);
    poke(mem, element, &id.to_le_bytes());
    poke(mem, element + 4, &len.to_le_bytes());
    poke(mem, used + 2, &index.wrapping_add(1).to_le_bytes());
}

#[test]
fn invalid_chains_are_not_added() {
    let (_, mut queue) = driver(4);
    let empty = Buffer { len: 0, ..READ };
    let huge = Buffer {
        len: u32::MAX,
        ..READ
    };
    assert_eq!(queue.add(&[], 0), Err(AddError::Empty));
    assert_eq!(queue.add(&[READ, empty], 0), Err(AddError::Empty));
    assert_eq!(queue.add(&[WRITE, READ], 0), Err(AddError::Order));
    assert_eq!(queue.add(&[huge, READ], 0), Err(AddError::TotalLength));
    assert_eq!(queue.add(&[READ; 5], 0), Err(AddError::TooLong));
    assert_eq!(queue.free(), 4);
    assert!(!queue.publish(), "nothing was added");
    queue.add(&[READ, READ, WRITE], 0).unwrap();
    assert_eq!(queue.add(&[READ, WRITE], 1), Err(AddError::Full));
    queue.add(&[WRITE], 1).unwrap();
    assert_eq!(
        (queue.free(), queue.add(&[READ], 2)),
        (0, Err(AddError::Full))
    );
}

#[test]
fn returned_descriptors_are_reused() {
    let (mem, mut queue) = driver(4);
    for round in 0..40_000u64 {
        let count = 1 + (round % 4) as usize;
        let head = queue
            .add(&[WRITE, WRITE, WRITE, WRITE][..count], round)
            .unwrap();
        assert_eq!(usize::from(queue.free()), 4 - count);
        let _ = queue.publish();
        answer(&mem, 4, u32::from(head), 1);
        assert_eq!(queue.poll(), Ok(Some(used(round, 1))));
        assert_eq!(queue.poll(), Ok(None));
        assert_eq!(queue.free(), 4);
        if cfg!(miri) && round > 50 {
            break;
        }
    }
}

#[test]
fn the_used_length_is_limited_to_the_writable_length() {
    let (mem, mut queue) = driver(4);
    let head = queue.add(&[READ, WRITE], 7).unwrap();
    let _ = queue.publish();
    answer(&mem, 4, u32::from(head), u32::MAX);
    let claimed = u32::MAX;
    assert_eq!(
        queue.poll(),
        Ok(Some(Used {
            claimed,
            ..used(7, 8)
        }))
    );
}

#[test]
fn a_used_index_jump_breaks_the_queue() {
    let (mem, mut queue) = driver(4);
    let head = queue.add(&[WRITE], 0).unwrap();
    let _ = queue.publish();
    queue.add(&[WRITE], 0).unwrap(); // added, but not published: does not count
    answer(&mem, 4, u32::from(head), 0);
    answer(&mem, 4, u32::from(head), 0);
    assert_eq!(queue.poll(), Err(DriverError::IndexJump));
    poke(&mem, layout(4).used + 2, &1u16.to_le_bytes());
    assert_eq!(queue.poll(), Err(DriverError::IndexJump), "it stays dead");
    assert!(!queue.enable_notifications());
}

#[test]
fn a_used_element_without_posted_chain_breaks_the_queue() {
    for (name, pick) in [
        ("past the table", 4u32),
        ("wrapping to a head", 0x1_0000),
        ("a descriptor inside a chain", 1),
        ("a free descriptor", 3),
        ("a chain not yet published", 2),
    ] {
        let (mem, mut queue) = driver(4);
        let head = queue.add(&[READ, WRITE], 0).unwrap();
        let _ = queue.publish();
        assert_eq!(head, 0);
        assert_eq!(queue.add(&[WRITE], 1), Ok(2));
        answer(&mem, 4, pick, 0);
        assert_eq!(queue.poll(), Err(DriverError::Id(pick)), "{name}");
    }
}

#[test]
fn a_chain_is_returned_once() {
    let (mem, mut queue) = driver(4);
    let head = queue.add(&[WRITE], 0).unwrap();
    queue.add(&[WRITE], 1).unwrap();
    let _ = queue.publish();
    answer(&mem, 4, u32::from(head), 0);
    answer(&mem, 4, u32::from(head), 0);
    assert_eq!(queue.poll(), Ok(Some(used(0, 0))));
    assert_eq!(queue.poll(), Err(DriverError::Id(u32::from(head))));
}

#[test]
fn a_table_overwritten_by_the_device_has_no_effect() {
    let (mem, mut queue) = driver(4);
    let head = queue.add(&[READ, WRITE], 3).unwrap();
    let _ = queue.publish();
    poke(&mem, layout(4).desc, &[0xff; 64]);
    answer(&mem, 4, u32::from(head), 8);
    assert_eq!(queue.poll(), Ok(Some(used(3, 8))));
    assert_eq!(queue.free(), 4);
    queue.add(&[READ; 4], 4).unwrap();
}

#[test]
fn a_new_queue_is_zeroed() {
    let size = 8;
    let mem = memory(size);
    poke(
        &mem,
        RINGS,
        &vec![0xa5; DriverLayout::bytes_needed(size) as usize],
    );
    let queue = DriverQueue::new(std::sync::Arc::clone(&mem), layout(size), true).unwrap();
    // Except the two bytes of padding in front of the used ring.
    for (start, end) in [
        (RINGS, layout(size).avail + 22),
        (layout(size).used, layout(size).used + 70),
    ] {
        assert!(
            peek(&mem, start, (end - start) as usize)
                .iter()
                .all(|byte| *byte == 0)
        );
    }
    assert_eq!(queue.free(), size);
}

#[test]
fn a_fixed_chain_is_written_once_and_reposted() {
    let (mem, mut queue) = driver(4);
    let fixed = queue.set_chain(&[READ, WRITE], 9).unwrap();
    assert_eq!(queue.free(), 2);
    assert!(!queue.publish(), "a fixed chain is not posted yet");
    let table = peek(&mem, layout(4).desc, 64);
    for round in 0..20u16 {
        queue.add_fixed(fixed).unwrap();
        assert_eq!(queue.add_fixed(fixed), Err(AddError::NotFixed));
        let _ = queue.publish();
        assert_eq!(peek_u16(&mem, layout(4).avail + 2), round + 1);
        assert!(!queue.has_used());
        answer(&mem, 4, 0, 8);
        assert!(queue.has_used());
        assert_eq!(queue.poll(), Ok(Some(used(9, 8))));
        assert_eq!((queue.poll(), queue.free()), (Ok(None), 2));
    }
    assert_eq!(peek(&mem, layout(4).desc, 64), table);
}

#[test]
fn a_part_of_a_fixed_chain_has_its_own_length() {
    let (mem, mut queue) = driver(4);
    let fixed = queue.set_chain(&[READ], 9).unwrap();
    let writable = queue.set_chain(&[WRITE], 1).unwrap();
    let two = queue.set_chain(&[READ, READ], 2).unwrap();
    for (len, error) in [(0, AddError::Empty), (9, AddError::TooMuch)] {
        assert_eq!(queue.add_fixed_part(fixed, len), Err(error));
    }
    for other in [writable, two] {
        assert_eq!(queue.add_fixed_part(other, 1), Err(AddError::NotFixed));
    }
    assert!(!queue.publish(), "nothing was posted");
    for len in [8u32, 3, 3, 5, 8] {
        queue.add_fixed_part(fixed, len).unwrap();
        assert_eq!(queue.add_fixed_part(fixed, len), Err(AddError::NotFixed));
        let _ = queue.publish();
        let mut descriptor = DATA.to_le_bytes().to_vec();
        descriptor.extend(len.to_le_bytes());
        descriptor.extend([0; 4]);
        assert_eq!(peek(&mem, layout(4).desc, 16), descriptor);
        answer(&mem, 4, 0, 0);
        assert_eq!(queue.poll(), Ok(Some(used(9, 0))));
    }
}

#[test]
fn fixed_and_other_chains_do_not_share_descriptors() {
    let (mem, mut queue) = driver(4);
    let fixed = queue.set_chain(&[READ], 0).unwrap();
    assert_eq!(queue.add(&[READ; 3], 1), Ok(1));
    assert_eq!(queue.set_chain(&[READ], 2), Err(AddError::Full));
    assert_eq!(queue.set_chain(&[], 2), Err(AddError::Empty));
    queue.add_fixed(fixed).unwrap();
    let _ = queue.publish();
    answer(&mem, 4, 0, 0);
    answer(&mem, 4, 1, 0);
    assert_eq!(queue.poll(), Ok(Some(used(0, 0))));
    assert_eq!(queue.poll(), Ok(Some(used(1, 0))));
    assert_eq!(queue.free(), 3);
    // The head of the other chain is no fixed chain, and that of the fixed one is not free.
    assert_eq!(
        queue.add_fixed(crate::split::FixedChain { head: 1, len: 8 }),
        Err(AddError::NotFixed)
    );
    assert_eq!(queue.add(&[READ; 4], 3), Err(AddError::Full));
    queue.add(&[READ; 3], 3).unwrap();
}

#[test]
fn a_used_element_for_an_idle_fixed_chain_breaks_the_queue() {
    for published in [false, true] {
        let (mem, mut queue) = driver(4);
        let fixed = queue.set_chain(&[WRITE], 0).unwrap();
        let other = queue.set_chain(&[WRITE], 1).unwrap();
        queue.add_fixed(other).unwrap();
        let _ = queue.publish();
        // Added but not published, or not added.
        if !published {
            queue.add_fixed(fixed).unwrap();
        }
        answer(&mem, 4, 0, 0);
        assert_eq!(queue.poll(), Err(DriverError::Id(0)));
        assert!(queue.has_used(), "there is an error to be had");
    }
}

#[test]
fn publish_notifies_for_chains_published_without_notify() {
    let size = 4;
    for event_idx in [false, true] {
        let (mut driver, mut device) = queues(size, 0, event_idx);
        let fixed = driver.set_chain(&[READ], 0).unwrap();
        assert!(!device.enable_notifications());
        let mut round = |driver: &mut DriverQueue| {
            driver.add_fixed(fixed).unwrap();
            driver.publish_without_notify();
            assert!(device.has_available());
            let chain = device.pop().unwrap().unwrap();
            assert!(!device.has_available());
            device.complete(chain, 0);
            device.publish_without_notify();
            assert!(driver.poll().unwrap().is_some());
        };
        round(&mut driver);
        assert!(driver.publish(), "the device requested the first one");
        assert!(!driver.publish(), "nothing new");
        // More than the index can count: with event index the event was passed in any case.
        for _ in 0..if cfg!(miri) { 3 } else { 65_537 } {
            round(&mut driver);
        }
        assert!(driver.publish() || cfg!(miri));
    }
}
