//! The memory of a driver in a guest, whose huge pages lie anywhere for the device.

use zerosock_proto::wire::vsock::Op;
use zerosock_ring::Extent;

use super::*;
use crate::driver::test_device::{connect, guest_pair, map_scattered};
use crate::table::backend::Backend;
use crate::table::calls::ConnectionCalls;
use crate::table::sending::SendingCalls;
use crate::table::transfers::Publish;

const HUGE: u64 = Extent::HUGE_PAGE;

fn config(queue_size: u16, rx_buffer_size: u32, tx_buffer_size: u32) -> DriverConfig {
    DriverConfig {
        queue_size,
        rx_buffer_size,
        tx_buffer_size,
        huge_pages: false,
        ..DriverConfig::default()
    }
}

/// First address and length of each ring and slot.
fn ranges(arena: &Arena, pairs: &[PairSlots]) -> Vec<(u64, u64)> {
    let ring = |ring: &DriverLayout| (ring.desc, DriverLayout::bytes_needed(ring.size));
    let mut ranges: Vec<_> = arena.rings.iter().map(ring).collect();
    let whole = pairs.iter().flat_map(|it| [&it.rx_packets, &it.tx_packets]);
    for slots in whole.chain([&arena.events]) {
        let count = slots.pieces.len() as u16;
        ranges.extend((0..count).map(|slot| (slots.addr(slot), u64::from(slots.len()))));
    }
    ranges
}

#[test]
fn every_ring_and_slot_is_one_piece_for_the_device() {
    for (queue_size, rx, tx) in [
        (8, 1, 1),
        (8, 1 << 20, 65536),
        (64, 1 << 20, 65536),
        (256, 4096, 65536),
        (256, 65472, 65472),
        (1024, 4096, 65536),
        (32768, 64, 64),
    ] {
        let config = config(queue_size, rx, tx);
        let plan = Plan::of_huge_pages();
        let (arena, pairs) = Arena::new(&config, QueuePairs::ONE, plan).unwrap();
        let device = map_scattered(&arena.shared);
        let mut ranges = ranges(&arena, &pairs);
        for &(addr, len) in &ranges {
            let mut pieces = Vec::new();
            device.translate(addr, len as u32, &mut pieces).unwrap();
            assert_eq!(pieces.len(), 1, "{len} bytes at {addr:#x} of {config:?}");
            // The last line of the page is the device's.
            assert!(addr % HUGE + len <= HUGE - 64, "{len} bytes at {addr:#x}");
        }
        ranges.sort_unstable();
        let apart = |pair: &[(u64, u64)]| pair[0].0 + pair[0].1 <= pair[1].0;
        assert!(ranges.windows(2).all(apart), "{config:?}");
        // Payload lies directly behind the line of its header, at the start of a line.
        for slot in 0..config.slots() {
            let PairSlots {
                rx_packets,
                rx_data,
                tx_packets,
                tx_data,
                ..
            } = &pairs[0];
            for (packets, data) in [(rx_packets, rx_data), (tx_packets, tx_data)] {
                assert_eq!(data.addr(slot), packets.addr(slot) + 64);
                assert_eq!(data.addr(slot) % 64, 0);
            }
        }
    }
}

/// Each slot is used some times in each direction, and the device sees what the driver wrote.
#[test]
fn bytes_pass_through_pages_that_lie_anywhere() {
    let (mut driver, mut peer) = guest_pair(|config| config.queue_size = 256);
    let pages = driver.store.arena.shared.region.len / HUGE;
    assert!(pages > 4, "{pages} huge pages");
    let id = connect(&mut driver, &mut peer);
    let bytes = |round: u32, len: u32| -> Vec<u8> {
        let bytes = (0..len).map(|n| (n ^ round.wrapping_mul(37)) as u8);
        bytes.collect()
    };
    for round in 0..400 {
        let sent = bytes(round, 4096);
        peer.send(Op::Rw, &sent);
        Backend::drive(&mut driver).unwrap();
        let mut out = vec![0; 5000];
        assert_eq!(driver.read(id, &mut out, false), Ok(4096));
        Backend::flush_after_read(&mut driver);
        assert!(out[..4096] == sent, "received bytes of round {round}");

        let written = bytes(round, 65536);
        let taken = driver.write(id, &written, Publish::Now).unwrap();
        Backend::flush(&mut driver);
        let mut seen = Vec::new();
        while let Some((header, bytes)) = peer.take() {
            if header.op.known() == Some(Op::Rw) {
                seen.extend(bytes);
            }
        }
        assert!(seen == written[..taken], "sent bytes of round {round}");
        assert_ne!(taken, 0);
        // Credit for what was sent.
        peer.send(Op::CreditUpdate, &[]);
        Backend::drive(&mut driver).unwrap();
    }
    let memory = Arc::clone(&driver.store.arena.memory);
    for page in 1..=pages {
        let mut line = Vec::new();
        memory.translate(page * HUGE - 64, 64, &mut line).unwrap();
        assert_eq!(memory.read_array(&line, 0), Some([0; 64]));
    }
}
