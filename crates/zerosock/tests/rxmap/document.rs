//! The example of the patch set, and its errors for misuse (docs/rxmap.md).

use std::io::{ErrorKind, Write};

use zerosock::vsock::rxmap::{CLOSED, DATA, EMPTY, PAGE, PagedHeader, Protection, RxMapConfig};
use zerosock::vsock::{PagedRxMap, RxMap, RxMapError};

use super::{pair, send_packets, undisturbed, wait_for, wait_for_word};
use crate::common::bytes;

#[test]
fn the_documents_example() {
    const LENS: [usize; 4] = [56, 4096, 8200, 700];
    undisturbed(|| {
        let mut proved = false;
        pair(
            |builder| builder,
            |stream| {
                send_packets(&stream, &LENS);
                wait_for_word(&stream);
            },
            |stream, endpoint| {
                let mut map = PagedRxMap::new(&stream, 6 * PAGE, Protection::READ).unwrap();
                assert!(map.addr().is_multiple_of(PAGE));
                assert_eq!(map.len(), 6 * PAGE);
                wait_for(&stream, LENS.iter().sum());
                assert_eq!(map.poll_value().unwrap(), DATA);
                let filled = map.fill_at(map.addr()).unwrap();
                if endpoint.stats().copied_aside > 0 {
                    (&stream).write_all(b"!").unwrap();
                    return;
                }
                proved = true;
                // "pref will be the following: poll_value = 1, hdr_num = 5": the fourth packet of
                // this test is what there is to poll for.
                assert_eq!(filled, 5);
                assert_eq!((map.last_poll_value(), map.hdr_num()), (1, 5));
                let header = |length| Some(PagedHeader { length, flags: 0 });
                let headers = [56, 4096, 8200, 0].map(header);
                assert_eq!([0, 1, 2, 3].map(|index| map.header(index)), headers);
                let page0 = map.page(0).unwrap();
                let words: Vec<u32> = page0[..40]
                    .chunks(4)
                    .map(|word| u32::from_ne_bytes(word.try_into().unwrap()))
                    .collect();
                assert_eq!(words, [1, 5, 56, 0, 4096, 0, 8200, 0, 0, 0]);
                assert_eq!(map.page(1).unwrap()[..56], bytes(0, 56));
                assert_eq!(map.page(2).unwrap(), bytes(1, 4096));
                let long = bytes(2, 8200);
                assert_eq!(map.page(3).unwrap(), &long[..4096]);
                assert_eq!(map.page(4).unwrap(), &long[4096..8192]);
                assert_eq!(map.page(5).unwrap()[..8], long[8192..]);
                for (index, (header, data)) in map.packets().enumerate() {
                    assert_eq!(header.length as usize, LENS[index]);
                    assert_eq!(data.unwrap(), bytes(index as u64, LENS[index]));
                }

                let refused = |map: &mut PagedRxMap<_>| {
                    assert!(matches!(map.fill(), Err(RxMapError::NotReleased)));
                };
                refused(&mut map);
                map.release(0..3).unwrap();
                refused(&mut map);
                assert!(map.page(2).is_none() && map.page(3).is_some());
                assert_eq!(map.packets().filter(|(_, data)| data.is_none()).count(), 2);
                map.release_at(map.addr() + 4 * PAGE, PAGE + 1).unwrap();
                refused(&mut map);
                map.release(3..4).unwrap();
                map.release(0..6).unwrap();
                assert_eq!(map.fill().unwrap(), 1);
                assert_eq!(map.page(1).unwrap()[..700], bytes(3, 700));
                assert_eq!((map.last_poll_value(), map.hdr_num()), (EMPTY, 1));
                map.release(1..2).unwrap();
                assert_eq!(map.fill().unwrap(), 0, "nothing there");
                (&stream).write_all(b"!").unwrap();
                assert_eq!(map.wait().unwrap(), CLOSED);
                assert_eq!(map.fill().unwrap(), 0);
                assert_eq!((map.last_poll_value(), map.hdr_num()), (CLOSED, 0));
            },
        );
        proved
    });
}

#[test]
fn the_documents_error_cases() {
    pair(
        |builder| builder,
        |stream| {
            assert!(!stream.rx_map(), "the other endpoint enabled nothing");
            let refused = PagedRxMap::new(&stream, 2 * PAGE, Protection::READ);
            assert!(matches!(refused, Err(RxMapError::NotEnabled)));
            let refused = RxMap::new(&stream, RxMapConfig::default());
            assert!(matches!(refused, Err(RxMapError::NotEnabled)));
            // Too late.
            let refused = stream.set_rx_map(true);
            assert!(matches!(refused, Err(RxMapError::Connected)));
            send_packets(&stream, &[100]);
            wait_for_word(&stream);
        },
        |stream, endpoint| {
            assert!(matches!(
                stream.set_rx_map(false),
                Err(RxMapError::Connected)
            ));
            endpoint.set_rx_map(false);
            assert!(stream.rx_map(), "it was connected before");
            for writable in [
                Protection::READ | Protection::WRITE,
                Protection::WRITE,
                Protection::READ | Protection::EXEC,
                Protection::NONE,
            ] {
                let refused = PagedRxMap::new(&stream, 2 * PAGE, writable);
                assert!(matches!(refused, Err(RxMapError::Protection)));
            }
            for length in [0, PAGE, 2 * PAGE + 1] {
                let refused = PagedRxMap::new(&stream, length, Protection::READ);
                assert!(matches!(refused, Err(RxMapError::Length(_))), "{length}");
            }
            let mut map = PagedRxMap::new(&stream, 2 * PAGE, Protection::READ).unwrap();
            let other = PagedRxMap::new(&stream, 2 * PAGE, Protection::READ).unwrap();
            map.wait().unwrap();
            for wrong in [0, map.addr() + PAGE, map.addr() - 1, other.addr()] {
                let refused = map.fill_at(wrong);
                assert!(matches!(refused, Err(RxMapError::Address(_))));
            }
            for (addr, len) in [
                (map.addr() + 1, PAGE),
                (map.addr() - PAGE, PAGE),
                (map.addr(), 2 * PAGE + 1),
                (map.addr(), usize::MAX),
            ] {
                assert!(matches!(map.release_at(addr, len), Err(RxMapError::Range)));
            }
            assert_eq!(map.fill().unwrap(), 1, "nothing was lost by mistakes");
            let error = std::io::Error::from(map.fill().unwrap_err());
            assert_eq!(error.kind(), ErrorKind::ResourceBusy);
            (&stream).write_all(b"!").unwrap();
        },
    );
}
