//! The device half with hand-made rings: indices, notifications, start; for chains see `chains`.

use std::sync::Arc;

use super::chains::{W, device, popped};
use super::*;
use crate::split::layout::{QueueError, used_len};
use crate::split::{BrokenReason, Buffer, PopError};

#[test]
fn an_index_jump_breaks_the_queue_but_outstanding_chains_complete() {
    let (mem, mut queue) = device(8);
    post(&mem, 8, &[(DATA, 4, W, 0)]);
    let chain = popped(&mut queue);
    // Eight more would be nine out of eight descriptors.
    poke(&mem, layout(8).avail + 2, &9u16.to_le_bytes());
    let broken = |queue: &mut DeviceQueue, reason| match queue.pop() {
        Err(PopError::Broken(got)) => assert_eq!(got, reason),
        other => panic!("{other:?}"),
    };
    broken(&mut queue, BrokenReason::IndexJump);
    // A corrected index does not repair the queue.
    poke(&mem, layout(8).avail + 2, &2u16.to_le_bytes());
    broken(&mut queue, BrokenReason::IndexJump);
    assert_eq!(queue.available(), 0);
    assert!(!queue.enable_notifications());
    assert_eq!(queue.broken(), Some(BrokenReason::IndexJump));
    queue.complete(chain, 4);
    assert!(queue.publish());
    assert_eq!(peek_u16(&mem, layout(8).used + 2), 1);
}

#[test]
fn an_index_that_goes_back_breaks_the_queue() {
    let (mem, mut queue) = device(8);
    poke(&mem, layout(8).avail + 2, &65535u16.to_le_bytes());
    assert!(matches!(
        queue.pop(),
        Err(PopError::Broken(BrokenReason::IndexJump))
    ));
}

#[test]
fn a_head_outside_the_table_breaks_the_queue() {
    let (mem, mut queue) = device(8);
    post_head(&mem, 8, 8);
    assert!(matches!(
        queue.pop(),
        Err(PopError::Broken(BrokenReason::Head(8)))
    ));
    assert_eq!(queue.outstanding(), 0);
}

#[test]
fn unpopped_chains_are_popped_again_in_order() {
    let (mut driver, mut queue) = queues(8, 65534, true);
    for token in 0..4 {
        driver
            .add(
                &[Buffer {
                    addr: DATA + token,
                    len: 1,
                    writable: false,
                }],
                token,
            )
            .unwrap();
    }
    let _ = driver.publish();
    let [a, b, c] = [popped(&mut queue), popped(&mut queue), popped(&mut queue)];
    let heads = [a.head(), b.head(), c.head()];
    queue.complete(a, 0);
    queue.unpop(c);
    queue.unpop(b);
    assert_eq!(
        (queue.outstanding(), queue.base(), queue.available()),
        (0, 65535, 3)
    );
    assert!(
        queue.enable_notifications(),
        "unpopped chains are available"
    );
    let [b, c] = [popped(&mut queue), popped(&mut queue)];
    assert_eq!([b.head(), c.head()], heads[1..]);
    queue.complete(c, 0);
    queue.complete(b, 0);
    assert!(queue.publish());
    let tokens: Vec<_> = std::iter::from_fn(|| driver.poll().unwrap())
        .map(|u| u.token)
        .collect();
    assert_eq!(tokens, [0, 2, 1]);
}

#[test]
#[should_panic(expected = "popped last")]
fn unpopping_an_older_chain_panics() {
    let (mem, mut queue) = device(8);
    post(&mem, 8, &[(DATA, 1, 0, 0)]);
    post_head(&mem, 8, 1);
    write_table(&mem, layout(8).desc, &[(DATA, 1, 0, 0), (DATA, 1, 0, 0)]);
    let first = popped(&mut queue);
    let _second = popped(&mut queue);
    queue.unpop(first);
}

#[test]
fn nothing_is_visible_before_publish() {
    let (mut driver, mut queue) = queues(8, 0, false);
    driver
        .add(
            &[Buffer {
                addr: DATA,
                len: 8,
                writable: true,
            }],
            5,
        )
        .unwrap();
    assert!(queue.pop().unwrap().is_none());
    assert!(driver.publish());
    let chain = popped(&mut queue);
    queue.complete(chain, 3);
    assert_eq!(driver.poll(), Ok(None));
    assert!(queue.publish());
    assert!(!queue.publish(), "nothing new");
    let used = driver.poll().unwrap().unwrap();
    assert_eq!((used.token, used.len), (5, 3));
}

#[test]
fn flags_suppress_kicks_and_calls() {
    let (mut driver, mut queue) = queues(8, 0, false);
    let buffer = [Buffer {
        addr: DATA,
        len: 8,
        writable: true,
    }];
    queue.disable_notifications();
    driver.add(&buffer, 0).unwrap();
    assert!(!driver.publish());
    assert!(queue.enable_notifications(), "one is there");
    driver.add(&buffer, 1).unwrap();
    assert!(driver.publish());
    driver.disable_notifications();
    let chain = popped(&mut queue);
    queue.complete(chain, 0);
    assert!(!queue.would_notify(0));
    assert!(!queue.publish());
    assert!(driver.enable_notifications(), "one is back");
    assert!(!queue.would_notify(0), "nothing new");
    let chain = popped(&mut queue);
    queue.complete(chain, 0);
    assert!(queue.would_notify(0));
    assert!(queue.publish());
    assert!(!queue.enable_notifications());
}

#[test]
fn event_index_suppresses_until_the_requested_entry() {
    let (mut driver, mut queue) = queues(8, 65535, true);
    let buffer = [Buffer {
        addr: DATA,
        len: 8,
        writable: true,
    }];
    driver.add(&buffer, 0).unwrap();
    assert!(driver.publish(), "the first batch always");
    driver.add(&buffer, 1).unwrap();
    assert!(!driver.publish(), "the request is for the one before");
    let chains = [popped(&mut queue), popped(&mut queue)];
    assert!(!queue.enable_notifications());
    // A batch that contains the requested entry, across the wrap.
    driver.add(&buffer, 2).unwrap();
    driver.add(&buffer, 3).unwrap();
    assert!(driver.publish());
    for chain in chains {
        queue.complete(chain, 0);
    }
    assert!(queue.would_notify(0), "the first batch always");
    assert!(queue.publish());
    assert!(driver.enable_notifications());
    while driver.poll().unwrap().is_some() {}
    assert!(!driver.enable_notifications());
    for wanted in [true, false] {
        let chain = popped(&mut queue);
        queue.complete(chain, 0);
        assert_eq!(queue.would_notify(0), wanted);
        assert_eq!(queue.publish(), wanted);
    }
}

#[test]
fn a_notification_requested_after_several_chains_follows_the_last() {
    for (event_idx, called) in [(true, [false, false, true, false]), (false, [true; 4])] {
        let (mut driver, mut queue) = queues(8, 65533, event_idx);
        let buffer = [Buffer {
            addr: DATA,
            len: 8,
            writable: true,
        }];
        for token in 0..6 {
            driver.add(&buffer, token).unwrap();
        }
        assert!(driver.publish());
        let mut complete = || {
            let chain = popped(&mut queue);
            queue.complete(chain, 0);
            queue.publish()
        };
        complete();
        while driver.poll().unwrap().is_some() {}
        assert!(!driver.enable_notifications_after(2));
        // Across the wrap.
        assert_eq!([complete(), complete(), complete(), complete()], called);
        assert!(driver.enable_notifications_after(2), "four are there");
        assert!(driver.enable_notifications_after(3), "four are there");
        if event_idx {
            assert!(!driver.enable_notifications_after(4));
            assert!(complete());
        }
    }
}

#[test]
fn a_restarted_device_continues_at_the_used_index() {
    let (mut driver, mut queue) = queues(8, 0, true);
    let buffer = [Buffer {
        addr: DATA,
        len: 8,
        writable: true,
    }];
    for token in 0..3 {
        driver.add(&buffer, token).unwrap();
    }
    let _ = driver.publish();
    let first = popped(&mut queue);
    let _lost = popped(&mut queue);
    queue.complete(first, 0);
    let _ = queue.publish();
    // Its predecessor popped two chains and completed one; the front-end passes on the base it
    // knows.
    let base = queue.base();
    let mem = Arc::clone(queue.memory());
    drop(queue);
    let mut queue = DeviceQueue::new(Arc::clone(&mem), &config(8, base, true)).unwrap();
    let third = popped(&mut queue);
    queue.complete(third, 0);
    assert!(queue.publish(), "its first batch always notifies");
    let tokens: Vec<_> = std::iter::from_fn(|| driver.poll().unwrap())
        .map(|u| u.token)
        .collect();
    assert_eq!(tokens, [0, 2]);
    // A used index that does not fit the base is not adopted.
    let mut queue = DeviceQueue::new(Arc::clone(&mem), &config(8, 100, true)).unwrap();
    poke(&mem, layout(8).avail + 2, &101u16.to_le_bytes());
    let chain = popped(&mut queue);
    queue.complete(chain, 0);
    let _ = queue.publish();
    assert_eq!(peek_u16(&mem, layout(8).used + 2), 101);
}

#[test]
fn a_new_memory_table_keeps_the_indices() {
    let (mut driver, mut queue) = queues(8, 65535, false);
    let buffer = [Buffer {
        addr: DATA,
        len: 8,
        writable: true,
    }];
    driver.add(&buffer, 0).unwrap();
    driver.add(&buffer, 1).unwrap();
    let _ = driver.publish();
    let chain = popped(&mut queue);
    // The front-end copies guest memory to its new place.
    let old = Arc::clone(queue.memory());
    let new = memory(8);
    let len = DriverLayout::bytes_needed(8) as usize;
    poke(&new, RINGS, &peek(&old, RINGS, len));
    queue.remap(Arc::clone(&new)).unwrap();
    assert_eq!((queue.base(), queue.outstanding()), (0, 1));
    queue.complete(chain, 1);
    let chain = popped(&mut queue);
    queue.complete(chain, 2);
    let _ = queue.publish();
    assert_eq!(peek_u16(&new, layout(8).used + 2), 1);
    assert_eq!(peek_u16(&old, layout(8).used + 2), 65535);
    // A memory without the rings is refused and changes nothing.
    let empty = Arc::new(Memory::from_heap(&[]));
    assert!(matches!(
        queue.remap(empty),
        Err(QueueError::Unmapped { .. })
    ));
    assert_eq!(queue.memory().id(), new.id());
}

#[test]
fn rings_must_be_aligned_and_lie_in_one_region() {
    let mem = memory(8);
    let good = config(8, 0, false);
    let refused = |config: QueueConfig| DeviceQueue::new(Arc::clone(&mem), &config).unwrap_err();
    for size in [0, 3, 24, 32769] {
        assert_eq!(
            refused(QueueConfig { size, ..good }),
            QueueError::Size(size)
        );
    }
    let misaligned = [
        (
            QueueConfig {
                desc: good.desc + 8,
                ..good
            },
            16,
        ),
        (
            QueueConfig {
                avail: good.avail + 1,
                ..good
            },
            2,
        ),
        (
            QueueConfig {
                used: good.used - 2,
                ..good
            },
            4,
        ),
    ];
    for (config, expected) in misaligned {
        match refused(config) {
            QueueError::Misaligned { align, .. } => assert_eq!(align, expected),
            other => panic!("{other}"),
        }
    }
    // The used ring ends with the region: four bytes on, it does not fit.
    assert!(matches!(
        refused(QueueConfig {
            used: good.used + 4,
            ..good
        }),
        QueueError::Unmapped {
            part: "used ring",
            ..
        }
    ));
    let wrapping = u64::MAX - used_len(8) + 2;
    for addr in [0, wrapping & !15, !15] {
        for config in [
            QueueConfig { desc: addr, ..good },
            QueueConfig {
                avail: addr,
                ..good
            },
            QueueConfig { used: addr, ..good },
        ] {
            assert!(matches!(refused(config), QueueError::Unmapped { .. }));
        }
    }
}

#[test]
fn parts_that_overlap_are_refused_by_both_halves() {
    let mem = memory(8);
    let good = config(8, 0, false);
    let driver_layout = layout(8);
    let guest = |user: u64| user - good.desc + driver_layout.desc;
    for (desc, avail, used, expected) in [
        (
            good.desc,
            good.desc,
            good.used,
            ("descriptor table", "available ring"),
        ),
        (
            good.desc,
            good.desc + 126,
            good.used,
            ("descriptor table", "available ring"),
        ),
        (
            good.desc,
            good.avail,
            good.desc + 124,
            ("descriptor table", "used ring"),
        ),
        (
            good.desc,
            good.used + 68,
            good.used,
            ("used ring", "available ring"),
        ),
        (
            good.desc,
            good.used - 20,
            good.used,
            ("available ring", "used ring"),
        ),
        (
            good.desc + 16,
            good.desc,
            good.used,
            ("available ring", "descriptor table"),
        ),
    ] {
        // The available ring has 22 bytes, and would end past the region in one case.
        let mem = match avail > good.used {
            true => Arc::new(Memory::from_heap(&[RegionConfig {
                guest_addr: driver_layout.desc,
                user_addr: good.desc,
                len: 0x1000,
                fd_offset: 0,
            }])),
            false => Arc::clone(&mem),
        };
        let (first, second) = expected;
        let expected = QueueError::Overlap { first, second };
        let config = QueueConfig {
            desc,
            avail,
            used,
            ..good
        };
        let refused = DeviceQueue::new(Arc::clone(&mem), &config).unwrap_err();
        assert_eq!(refused, expected);
        let layout = DriverLayout {
            size: 8,
            desc: guest(desc),
            avail: guest(avail),
            used: guest(used),
        };
        assert_eq!(DriverQueue::new(mem, layout, false).unwrap_err(), expected);
    }
    // Parts may touch.
    let touching = QueueConfig {
        avail: good.desc + 128,
        used: good.desc + 128 + 24,
        ..good
    };
    assert!(DeviceQueue::new(mem, &touching).is_ok());
}

#[test]
fn rings_must_be_aligned_for_the_peer_and_for_us() {
    let good = config(8, 0, false);
    // A region with a user address that differs from our own by 8.
    let region = RegionConfig {
        guest_addr: RINGS,
        user_addr: good.desc + 8,
        len: 0x1000,
        fd_offset: 0,
    };
    let mem = Arc::new(Memory::from_heap(&[region]));
    for desc in [good.desc + 8, good.desc + 16] {
        // The first is aligned only for us, the second only for the peer.
        let config = QueueConfig {
            desc,
            avail: desc + 0x100,
            used: desc + 0x200,
            ..good
        };
        assert_eq!(
            DeviceQueue::new(Arc::clone(&mem), &config).unwrap_err(),
            QueueError::Misaligned {
                part: "descriptor table",
                addr: desc,
                align: 16
            }
        );
    }
}

#[test]
fn posted_counts_chains_since_the_last_read() {
    let (mem, mut queue) = device(8);
    write_table(&mem, layout(8).desc, &[(DATA, 8, 0, 0), (DATA, 8, 0, 0)]);
    assert_eq!(queue.posted(), 0);
    post_head(&mem, 8, 0);
    assert_eq!((queue.available(), queue.posted()), (1, 1));
    post_head(&mem, 8, 1);
    assert_eq!(queue.available(), 1, "not read while one is left");
    assert_eq!((queue.posted(), queue.available()), (2, 2));
    let chain = popped(&mut queue);
    assert_eq!(queue.posted(), 1);
    queue.unpop(chain);
    assert_eq!(queue.posted(), 2);
    // An index that goes back is ignored; one that jumps breaks the ring.
    poke(&mem, layout(8).avail + 2, &1u16.to_le_bytes());
    assert_eq!(queue.posted(), 2);
    poke(&mem, layout(8).avail + 2, &9u16.to_le_bytes());
    assert_eq!(queue.posted(), 0);
    assert_eq!(queue.broken(), Some(BrokenReason::IndexJump));
}
