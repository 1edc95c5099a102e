//! Headers in shared memory: where they point, and that every byte occurs once.

use std::io::Write;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use zerosock::vsock::rxmap::{CLOSED, EMPTY, PAGE, Protection, RxMapConfig, SPILLED};
use zerosock::vsock::{EndpointBuilder, PagedRxMap, RxMap, RxMapError, Trust};

use super::{pair, send_packets, undisturbed, wait_for, wait_for_word};
use crate::common::{assert_bytes, bytes};

#[test]
fn native_headers_point_to_where_the_packets_lie() {
    const LENS: [usize; 4] = [56, 4096, 8200, 3];
    for trust in [false, true] {
        undisturbed(|| {
            let mut proved = false;
            let tune = |builder: EndpointBuilder| {
                if trust {
                    // SAFETY: the device is ours, in this process, and keeps to leases.
                    builder.trust_host(unsafe { Trust::declare() })
                } else {
                    builder
                }
            };
            pair(
                tune,
                |stream| {
                    send_packets(&stream, &LENS);
                    wait_for_word(&stream);
                },
                |stream, endpoint| {
                    let mut map = RxMap::new(&stream, RxMapConfig::default()).unwrap();
                    wait_for(&stream, LENS.iter().sum());
                    let filled = map.fill().unwrap();
                    if endpoint.stats().copied_aside > 0 {
                        (&stream).write_all(b"!").unwrap();
                        return;
                    }
                    proved = true;
                    assert_eq!(filled, 4);
                    assert_eq!((map.last_poll_value(), map.hdr_num()), (EMPTY, 4));
                    let mut bases = Vec::new();
                    for (index, packet) in map.packets().enumerate() {
                        let header = map.header(index).unwrap();
                        assert_eq!(header, packet.header());
                        assert_eq!((header.length as usize, header.flags), (LENS[index], 0));
                        assert!(packet.is_in_place() && !packet.is_revoked());
                        assert_eq!(packet.to_vec(), bytes(index as u64, LENS[index]));
                        assert_eq!(packet.as_slice().is_some(), trust);
                        bases.push(packet.as_ptr().addr() as u64 - header.offset);
                    }
                    bases.dedup();
                    assert_eq!(bases.len(), 1, "one region, at one address: {bases:?}");
                    // The bytes of the header in memory.
                    let raw = map.header_pages();
                    assert_eq!(raw[4..8], 4_u32.to_ne_bytes());
                    assert_eq!(raw[8 + 2 * 16..][..4], 8200_u32.to_ne_bytes());
                    assert_eq!(raw[8 + 4 * 16..][..16], [0; 16]);

                    // They stay in place however long, and are not copied.
                    let place = map.packet(2).unwrap().as_ptr();
                    let until = Instant::now() + Duration::from_millis(60);
                    while Instant::now() < until {
                        endpoint.drive().unwrap();
                    }
                    let packet = map.packet(2).unwrap();
                    assert_eq!((packet.as_ptr(), packet.to_vec()), (place, bytes(2, 8200)));
                    assert_eq!(endpoint.stats().copied_aside, 0);

                    map.release(1..3).unwrap();
                    assert!(map.packet(1).is_none());
                    assert_eq!(map.packets().count(), 2);
                    assert!(matches!(map.fill(), Err(RxMapError::NotReleased)));
                    assert!(matches!(map.release(0..5), Err(RxMapError::Range)));
                    map.release(0..4).unwrap();
                    assert_eq!(map.fill().unwrap(), 0);
                    let stats = endpoint.stats();
                    assert_eq!(stats.received_in_place, LENS.iter().sum::<usize>() as u64);
                    assert_eq!(stats.copied_out, 0);
                    (&stream).write_all(b"!").unwrap();
                    assert_eq!(map.wait().unwrap(), CLOSED);
                },
            );
            proved
        });
    }
}

#[test]
fn headers_over_more_than_one_page() {
    const COUNT: usize = 600;
    // A sender counts 640 bytes of the window for each packet, however small.
    let tune = |builder: EndpointBuilder| {
        builder
            .queue_size(16384)
            .receive_buffers(256)
            .window(1 << 20)
    };
    undisturbed(|| {
        let mut proved = false;
        pair(
            tune,
            |stream| {
                for _ in 0..2 {
                    let mut batch = stream.batch();
                    for number in 0..COUNT as u32 {
                        batch.write(&number.to_le_bytes()).unwrap();
                    }
                    drop(batch);
                    wait_for_word(&stream);
                }
            },
            |stream, endpoint| {
                let pages = COUNT + 2;
                let mut paged =
                    PagedRxMap::with_header_pages(&stream, pages * PAGE, Protection::READ, 2)
                        .unwrap();
                let config = RxMapConfig::default().headers(COUNT);
                let mut native = RxMap::new(&stream, config).unwrap();
                assert_eq!(native.header_pages().len(), 3 * PAGE);
                wait_for(&stream, COUNT * 4);
                let filled = paged.fill().unwrap();
                (&stream).write_all(b"!").unwrap();
                wait_for(&stream, COUNT * 4);
                let headers = native.fill().unwrap();
                (&stream).write_all(b"!").unwrap();
                if endpoint.stats().copied_aside > 0 {
                    return;
                }
                proved = true;
                assert_eq!((filled, headers), (COUNT, COUNT));
                for (number, (_, data)) in paged.packets().enumerate() {
                    assert_eq!(data.unwrap(), (number as u32).to_le_bytes());
                }
                assert_eq!(paged.packets().count(), COUNT);
                // After the end of the header pages.
                assert_eq!(paged.header(511).map(|header| header.length), Some(4));
                assert_eq!(paged.header(COUNT).map(|header| header.length), Some(0));
                let numbers = native.packets().map(|packet| packet.to_vec());
                assert!(numbers.eq((0..COUNT as u32).map(|number| number.to_le_bytes().to_vec())));
            },
        );
        proved
    });
}

/// Every byte arrives once, with any sizes of packets and maps, and with a slow reader.
#[test]
fn several_maps_of_one_stream_lose_and_repeat_nothing() {
    const LEN: usize = 2 << 20;
    pair(
        |builder| builder.queue_size(64),
        |mut stream| {
            let all = bytes(9, LEN);
            let mut rest = &all[..];
            for size in (0..).map(|round: usize| 1 + round * 7919 % 20_000) {
                let (now, later) = rest.split_at(size.min(rest.len()));
                stream.write_all(now).unwrap();
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            stream.shutdown(Shutdown::Write).unwrap();
            wait_for_word(&stream);
        },
        |stream, endpoint| {
            let config = RxMapConfig::default()
                .spill_pages(1)
                .headers(3)
                .bytes(30_000);
            let mut natives = [
                RxMap::new(&stream, config).unwrap(),
                RxMap::new(&stream, config).unwrap(),
            ];
            let mut small = PagedRxMap::new(&stream, 2 * PAGE, Protection::READ).unwrap();
            let mut large = PagedRxMap::new(&stream, 20 * PAGE, Protection::READ).unwrap();
            let mut got = Vec::new();
            let (mut spilled, mut in_place) = (0, 0);
            for round in 0.. {
                let mut closed = small.wait().unwrap() == CLOSED;
                let before = got.len();
                if round % 50 == 20 {
                    // Longer than packets may wait in place.
                    let until = Instant::now() + Duration::from_millis(25);
                    while Instant::now() < until {
                        endpoint.drive().unwrap();
                    }
                }
                for native in &mut natives {
                    // Two fills are unreleased at the same time.
                    native.release_all();
                    native.fill().unwrap();
                    for packet in native.packets() {
                        got.extend_from_slice(&packet.to_vec());
                        let apart = packet.header().flags & SPILLED != 0;
                        assert_eq!(apart, !packet.is_in_place());
                        if apart {
                            let start = packet.header().offset as usize;
                            let bytes = &native.spill_pages()[start..start + packet.len()];
                            assert_eq!(bytes, packet.as_slice().unwrap());
                            spilled += 1;
                        } else {
                            in_place += 1;
                        }
                    }
                }
                for paged in [&mut small, &mut large] {
                    let pages = paged.fill().unwrap();
                    for (_, data) in paged.packets() {
                        got.extend_from_slice(data.unwrap());
                    }
                    paged.release(1..1 + pages).unwrap();
                }
                closed &= got.len() == before;
                if closed {
                    break;
                }
            }
            assert_bytes(&got, &bytes(9, LEN));
            assert!(spilled > 0 && in_place > 0, "{spilled} and {in_place}");
            (&stream).write_all(b"!").unwrap();
        },
    );
}
