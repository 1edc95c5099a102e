//! The fast paths of a packet: chains without a vector, and ring entries that are not rewritten
//! because they are unchanged.

use std::sync::Arc;

use super::*;
use crate::split::Chain;
use crate::split::layout::{DESC_F_NEXT, DESC_F_WRITE};

const N: u16 = DESC_F_NEXT;
const W: u16 = DESC_F_WRITE;

fn device(size: u16) -> (Arc<Memory>, DeviceQueue) {
    let (driver, device) = queues(size, 0, false);
    (Arc::clone(driver.memory()), device)
}

fn popped(queue: &mut DeviceQueue) -> Chain {
    queue.pop().expect("a sound queue").expect("a posted chain")
}

#[test]
fn an_unchanged_used_element_is_not_written() {
    let (mem, mut queue) = device(1);
    let element = layout(1).used + 4;
    let round = |queue: &mut DeviceQueue, len: u32, written: u32| {
        post(&mem, 1, &[(DATA, len, W, 0)]);
        let chain = popped(queue);
        queue.complete(chain, written);
        let _ = queue.publish();
        let lies = peek(&mem, element + 4, 4);
        // Overwritten, so that the test sees whether the next one is written.
        poke(&mem, element + 4, &[0xee; 4]);
        u32::from_le_bytes([lies[0], lies[1], lies[2], lies[3]])
    };
    assert_eq!(round(&mut queue, 8, 8), 8);
    assert_eq!(
        round(&mut queue, 8, 8),
        0xeeee_eeee,
        "written by another party"
    );
    assert_eq!(round(&mut queue, 8, 7), 7);
    let same = Arc::clone(queue.memory());
    queue.remap(same).unwrap();
    assert_eq!(round(&mut queue, 8, 7), 7, "new memory may hold anything");
}

#[test]
fn short_and_long_chains_have_all_their_pieces() {
    for count in [1usize, 2, 3, 4, 5, 8] {
        for readable in [0, count / 2, count.div_ceil(2), count] {
            let (mem, mut queue) = device(8);
            let table: Vec<_> = (0..count)
                .map(|index| {
                    let next = if index + 1 < count { N } else { 0 };
                    let write = if index < readable { 0 } else { W };
                    let addr = DATA + 256 * index as u64;
                    (addr, 10 + index as u32, next | write, index as u16 + 1)
                })
                .collect();
            post(&mem, 8, &table);
            let chain = popped(&mut queue);
            let lens = |pieces: &[crate::slice::Piece]| -> Vec<usize> {
                pieces.iter().map(|piece| piece.len()).collect()
            };
            let expected: Vec<usize> = (10..10 + count).collect();
            assert_eq!(lens(chain.readable()), expected[..readable]);
            assert_eq!(lens(chain.writable()), expected[readable..]);
            queue.complete(chain, 0);
        }
    }
}
