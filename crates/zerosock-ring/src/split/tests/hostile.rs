//! Rings with random contents, unchanged and changing: no panic, no endless loop, and no piece
//! outside memory.

use proptest::prelude::*;

use super::*;
use crate::split::{Chain, PopError};

/// The range of data memory used here, on both sides of the border.
const WINDOW_LEN: u64 = 0x2000;
const WINDOW: u64 = BORDER - WINDOW_LEN / 2;
const END: u64 = DATA + 2 * DATA_LEN;

fn check(mem: &Memory, chain: &Chain) {
    let mut total = 0u64;
    for piece in chain.readable().iter().chain(chain.writable()) {
        assert!(!piece.is_empty());
        assert!(mem.slice(*piece).is_some(), "{piece:?} lies outside memory");
        total += piece.len() as u64;
    }
    assert_eq!(
        total,
        u64::from(chain.readable_len()) + u64::from(chain.writable_len())
    );
}

/// Pops all posted chains and holds some of them; returns how many chains came.
fn pop_all(queue: &mut DeviceQueue, held: &mut Vec<Chain>) -> usize {
    let mut count = 0;
    loop {
        let chain = match queue.pop() {
            Ok(None) => return count,
            Ok(Some(chain)) => chain,
            Err(PopError::Malformed(chain)) => {
                assert!(chain.fault().is_some());
                chain
            }
            Err(PopError::Broken(_)) => return count,
        };
        count += 1;
        assert!(queue.outstanding() <= queue.size());
        check(queue.memory(), &chain);
        held.push(chain);
    }
}

/// A descriptor with a likely fault.
fn descriptor() -> impl Strategy<Value = (u64, u32, u16, u16)> {
    let addr = prop_oneof![
        6 => WINDOW..WINDOW + WINDOW_LEN,
        1 => END - 64..END,
        2 => RINGS..RINGS + 0x1000,
        1 => (0u64..64).prop_map(|back| u64::MAX - back),
        1 => any::<u64>(),
    ];
    let len = prop_oneof![6 => 1u32..300, 2 => (1u32..9).prop_map(|n| 16 * n), 1 => any::<u32>()];
    let flags = prop_oneof![8 => 0u16..8, 1 => any::<u16>()];
    let next = prop_oneof![8 => 0u16..16, 1 => any::<u16>()];
    (addr, len, flags, next)
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 500 })
    })]

    #[test]
    fn random_rings_give_no_piece_outside_memory(
        bits in 0u32..=4,
        table in prop::collection::vec(descriptor(), 16),
        tables in prop::collection::vec(descriptor(), 64),
        heads in prop::collection::vec(prop_oneof![8 => 0u16..16, 1 => any::<u16>()], 16),
        posted in prop_oneof![8 => 0u16..=16, 1 => any::<u16>()],
        used_index: u16,
        base in prop_oneof![Just(0u16), any::<u16>()],
        event_idx: bool,
    ) {
        let size = 1u16 << bits;
        let mem = memory(size);
        let layout = layout(size);
        write_table(&mem, layout.desc, &table[..usize::from(size)]);
        // A table every 1 KiB, for descriptors that refer to one.
        for at in (0..WINDOW_LEN).step_by(1024) {
            write_table(&mem, WINDOW + at, &tables);
        }
        for (slot, head) in heads.iter().take(usize::from(size)).enumerate() {
            poke(&mem, layout.avail + 4 + 2 * slot as u64, &head.to_le_bytes());
        }
        poke(&mem, layout.avail + 2, &base.wrapping_add(posted).to_le_bytes());
        poke(&mem, layout.used + 2, &used_index.to_le_bytes());
        let mut queue = DeviceQueue::new(mem, &config(size, base, event_idx)).unwrap();
        let mut held = Vec::new();
        prop_assert!(pop_all(&mut queue, &mut held) <= usize::from(size));
        for chain in held {
            let written = chain.writable_len();
            queue.complete(chain, written);
        }
        let _ = queue.publish();
        let _ = queue.enable_notifications();
    }

    #[test]
    fn random_used_rings_return_each_chain_at_most_once(
        bytes in prop::collection::vec(prop_oneof![3 => 0u8..4, 1 => any::<u8>()], 6 + 8 * 8),
        index in prop_oneof![8 => 0u16..9, 1 => any::<u16>()],
    ) {
        let (mut driver, _) = queues(8, 0, true);
        let mem = std::sync::Arc::clone(driver.memory());
        let buffer = crate::Buffer { addr: DATA, len: 8, writable: true };
        for token in 0..4 {
            driver.add(&[buffer, buffer], token).unwrap();
        }
        let _ = driver.publish();
        poke(&mem, layout(8).used, &bytes);
        poke(&mem, layout(8).used + 2, &index.to_le_bytes());
        let mut seen = Vec::new();
        while let Ok(Some(used)) = driver.poll() {
            prop_assert!(used.token < 4 && used.len <= 16);
            prop_assert!(!seen.contains(&used.token), "a chain came back twice");
            seen.push(used.token);
        }
        prop_assert_eq!(usize::from(driver.free()), 2 * seen.len());
    }
}

/// A peer rewrites the rings while the device pops. The writing thread uses raw copies, as another
/// process would through its own mapping; Miri correctly reports that as a race.
#[test]
#[cfg(not(miri))]
fn rings_rewritten_while_popped_give_no_piece_outside_memory() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    const SIZE: u16 = 16;
    let (driver, mut queue) = queues(SIZE, 0, true);
    let mem = Arc::clone(driver.memory());
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (mem, stop) = (Arc::clone(&mem), Arc::clone(&stop));
        std::thread::spawn(move || {
            let mut state = 0x9e37_79b9_7f4a_7c15u64;
            let mut random = move || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state
            };
            while !stop.load(Ordering::Relaxed) {
                let r = random();
                let addr = match r % 8 {
                    0 => random(),
                    1 => END - 8,
                    _ => WINDOW + (r >> 8) % WINDOW_LEN,
                };
                let len = if r % 5 == 0 {
                    random() as u32
                } else {
                    16 * (1 + (r >> 16) as u32 % 8)
                };
                let entry = (addr, len, (r >> 24) as u16 % 8, (r >> 40) as u16 % 18);
                write_table(
                    &mem,
                    layout(SIZE).desc + 16 * (r >> 56) % 256 / 16 * 16,
                    &[entry],
                );
                write_table(&mem, WINDOW + (r >> 20) % WINDOW_LEN / 16 * 16, &[entry]);
                let head = (r >> 32) as u16 % SIZE;
                poke(
                    &mem,
                    layout(SIZE).avail + 4 + 2 * ((r >> 48) % 16),
                    &head.to_le_bytes(),
                );
            }
        })
    };
    let mut held = Vec::new();
    let mut popped = 0;
    let mut malformed = 0;
    let mut posted = 0u16;
    let target = 200_000;
    while popped < target {
        // The index itself is valid, so that the queue does not break.
        posted = posted.wrapping_add(SIZE - queue.outstanding());
        poke(&mem, layout(SIZE).avail + 2, &posted.to_le_bytes());
        popped += pop_all(&mut queue, &mut held);
        assert_eq!(queue.broken(), None);
        for chain in held.drain(..) {
            malformed += usize::from(chain.fault().is_some());
            let mut bytes = [0; 64];
            let _ = queue.memory().read(chain.readable(), 0, &mut bytes);
            queue.complete(chain, 0);
        }
        let _ = queue.publish();
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().expect("the writer");
    // Both kinds of results must have occurred.
    assert!(
        malformed > target / 100 && popped - malformed > target / 100,
        "{malformed} of {popped}"
    );
}
