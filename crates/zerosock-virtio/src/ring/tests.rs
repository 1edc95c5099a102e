//! Chains that take long to pop: how many a ring pops from one publish to the next. And a publish that is
//! put off.

use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use zerosock_proto::Instant;
use zerosock_ring::{DeviceQueue, DriverLayout, Memory, QueueConfig, RegionConfig};
use zerosock_sys::notify::{CallFd, CallThread, Notifier, ThreadCount};

use super::{MAX_UNUSABLE, MAX_UNUSABLE_PER_PUBLISH, MAX_WALKED, PUBLISH_DELAY, Ring};

const NEXT: u16 = 1;
/// Address of the bytes that all descriptors share.
const BYTES: u64 = 1 << 20;
const LEN: u64 = BYTES + 4096;
/// Pops of a turn: more than those of any device.
const POPS: usize = 2048;

/// A ring of `size` entries, all of which the driver has posted with head 0. Descriptor `n` has
/// flags and a successor by `link`.
fn ring(size: u16, link: impl Fn(u16) -> (u16, u16)) -> Ring {
    let fd = zerosock_sys::memfd::create("ring", LEN, true).unwrap();
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len: LEN,
        fd_offset: 0,
    };
    let memory = Arc::new(Memory::map(vec![(fd, region)]).unwrap());
    let write = |addr: u64, bytes: &[u8]| {
        let mut pieces = Vec::new();
        memory
            .translate(addr, bytes.len() as u32, &mut pieces)
            .unwrap();
        assert_eq!(memory.write(&pieces, 0, bytes), bytes.len());
    };
    let layout = DriverLayout::at(0, size);
    for n in 0..size {
        let (flags, next) = link(n);
        let at = layout.desc + 16 * u64::from(n);
        write(at, &BYTES.to_le_bytes());
        write(at + 8, &1u32.to_le_bytes());
        write(at + 12, &flags.to_le_bytes());
        write(at + 14, &next.to_le_bytes());
    }
    // The heads are 0 already.
    write(layout.avail + 2, &size.to_le_bytes());
    let config = QueueConfig {
        size,
        desc: layout.desc,
        avail: layout.avail,
        used: layout.used,
        base: 0,
        event_idx: false,
        indirect: false,
    };
    let queue = DeviceQueue::new(memory, &config).unwrap();
    let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    Ring::new(queue, kick.into(), None, None, true, 1)
}

/// Pops and completes for a turn. Returns how many chains the ring has taken from the driver.
fn turn(ring: &mut Ring, room: usize) -> u32 {
    let before = ring.queue.base();
    for _ in 0..POPS {
        if let Some(chain) = ring.pop_if(room, true) {
            ring.complete(chain, 0);
        }
    }
    let taken = ring.queue.base().wrapping_sub(before);
    ring.publish(&Notifier::without_aio());
    taken.into()
}

/// Takes turns until all chains are taken. Returns how many the longest turn has taken.
fn longest_turn(mut ring: Ring, room: usize) -> u32 {
    let (mut left, mut longest) = (u32::from(ring.queue.size()), 0);
    while left > 0 {
        let taken = turn(&mut ring, room);
        assert!(taken > 0, "{left} chains are never taken");
        longest = longest.max(taken);
        left -= taken;
    }
    longest
}

#[test]
fn loops_popped_from_one_publish_to_the_next_are_bounded() {
    let size = 1024;
    let longest = longest_turn(ring(size, |n| (NEXT, n)), 0);
    // Descriptors and pieces count.
    assert!(
        longest <= MAX_WALKED / (2 * u32::from(size)) + 1,
        "{longest}"
    );
}

#[test]
fn long_chains_popped_from_one_publish_to_the_next_are_bounded() {
    let size = 1024;
    let last = size - 1;
    let link = |n| if n < last { (NEXT, n + 1) } else { (0, 0) };
    let longest = longest_turn(ring(size, link), 0);
    assert!(
        longest <= MAX_WALKED / (2 * u32::from(size)) + 1,
        "{longest}"
    );
}

#[test]
fn chains_without_room_popped_from_one_publish_to_the_next_are_bounded() {
    let longest = longest_turn(ring(32_768, |_| (0, 0)), 1);
    assert!(longest >= MAX_UNUSABLE as u32);
    assert!(
        longest < MAX_UNUSABLE_PER_PUBLISH + POPS as u32,
        "{longest}"
    );
}

#[test]
fn few_chains_are_published_late_with_one_notification() {
    let nonblocking = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let call = eventfd(0, nonblocking).unwrap();
    let notified = || {
        let mut count = [0; 8];
        match rustix::io::read(&call, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    };
    let mut ring = ring(256, |_| (0, 0));
    let thread = CallThread::new(&ThreadCount::default());
    ring.call = Some(CallFd::new(call.try_clone().unwrap().into(), thread).unwrap());
    let notifier = Notifier::new();
    let start = Instant::ZERO;
    let publish = |ring: &mut Ring, now| ring.publish_late(now, &notifier);
    let complete = |ring: &mut Ring, chains| {
        for _ in 0..chains {
            let chain = ring.pop().unwrap();
            ring.complete(chain, 0);
        }
    };

    complete(&mut ring, 1);
    assert!(!publish(&mut ring, start));
    complete(&mut ring, 1);
    let due = start + PUBLISH_DELAY;
    assert_eq!(ring.publish_at(), Some(due));
    assert!(!publish(
        &mut ring,
        start + (PUBLISH_DELAY - Duration::from_nanos(1))
    ));
    assert_eq!((notified(), ring.unpublished), (0, 2));
    assert!(publish(&mut ring, due));
    assert_eq!((notified(), ring.publish_at()), (1, None));

    // The driver may wait for the chains if many are completed, or others are in use.
    complete(&mut ring, 9);
    assert!(publish(&mut ring, due));
    let used = ring.pop().unwrap();
    complete(&mut ring, 1);
    assert!(publish(&mut ring, due));
    assert_eq!((notified(), ring.publish_at()), (2, None));
    ring.complete(used, 0);
    assert!(!publish(&mut ring, due));
    // A queue that stops publishes at once.
    assert!(ring.publish(&notifier));
    assert_eq!(ring.publish_at(), None);
}
