//! Receive maps: the document's own example and error cases, the native form, polling, bounds.
//!
//! Packets that wait for 20 ms are copied aside and then are one stretch of bytes. Where a test is
//! about single packets, it tries again when that has happened on a machine that was busy.

mod common;

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

use common::{PATIENCE, TestDaemon, assert_bytes, bytes};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use zerosock::vsock::rxmap::{
    CLOSED, DATA, EMPTY, PAGE, PagedHeader, Protection, RxMapConfig, SPILLED,
};
use zerosock::vsock::{
    Endpoint, EndpointBuilder, Host, PagedRxMap, RxMap, RxMapError, Stream, Trust, Wait,
};
use zerosock::{Address, Cid, Port};

const PORT: Port = Port::new(77);

/// Runs `send` with one end of a connection and `receive` with the other, which may have maps.
fn pair(
    tune: impl Fn(EndpointBuilder) -> EndpointBuilder,
    send: impl FnOnce(Stream) + Send,
    receive: impl FnOnce(Stream, &Endpoint),
) {
    let daemon = TestDaemon::with(2, |config| {
        config.vms.iter_mut().for_each(|vm| vm.queue_size = 16384);
    });
    let attach = |index: usize, builder: EndpointBuilder| {
        let endpoint = builder.attach_device(&daemon.vms[index].socket);
        endpoint.unwrap()
    };
    let server = attach(0, Endpoint::builder());
    let client = attach(1, tune(Endpoint::builder().receive_buffers(16 << 10)));
    client.set_rx_map(true);
    let listener = server.listen(PORT, 4).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
            send(stream);
        });
        let stream = client.connect(Address::new(Cid::new(3), PORT)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        receive(stream, &client);
    });
}

/// Calls `attempt` until no packet was copied aside meanwhile, as `true` says.
fn undisturbed(mut attempt: impl FnMut() -> bool) {
    let give_up = Instant::now() + PATIENCE;
    while !attempt() {
        assert!(Instant::now() < give_up, "packets always wait too long");
    }
}

/// Sends packets of these lengths in one go.
fn send_packets(stream: &Stream, lens: &[usize]) {
    let mut batch = stream.batch();
    for (seed, len) in lens.iter().enumerate() {
        batch.write(&bytes(seed as u64, *len)).unwrap();
    }
}

fn wait_for_word(mut stream: &Stream) {
    let mut word = [0];
    stream.read_exact(&mut word).unwrap();
}

/// Waits until `len` bytes are there.
fn wait_for(stream: &Stream, len: usize) {
    stream.set_low_water(len as u32);
    stream.wait_readable().unwrap();
    stream.set_low_water(1);
}

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
                        assert!(packet.is_in_place() && !packet.is_torn());
                        assert_eq!(packet.to_vec(), bytes(index as u64, LENS[index]));
                        assert_eq!(packet.as_slice().is_some(), trust);
                        bases.push(packet.as_ptr().addr() as u64 - header.offset);
                    }
                    bases.dedup();
                    assert_eq!(bases.len(), 1, "one region, at one address: {bases:?}");
                    // As it lies in memory.
                    let raw = map.header_pages();
                    assert_eq!(raw[4..8], 4_u32.to_ne_bytes());
                    assert_eq!(raw[8 + 2 * 16..][..4], 8200_u32.to_ne_bytes());
                    assert_eq!(raw[8 + 4 * 16..][..16], [0; 16]);

                    // They stay, however long, and nobody copies them.
                    let place = map.packet(2).unwrap().as_ptr();
                    let until = Instant::now() + Duration::from_millis(60);
                    while Instant::now() < until {
                        endpoint.turn().unwrap();
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
                // Behind the border of the pages of headers.
                assert_eq!(paged.header(511).map(|header| header.length), Some(4));
                assert_eq!(paged.header(COUNT).map(|header| header.length), Some(0));
                let numbers = native.packets().map(|packet| packet.to_vec());
                assert!(numbers.eq((0..COUNT as u32).map(|number| number.to_le_bytes().to_vec())));
            },
        );
        proved
    });
}

/// Whatever the sizes of packets and maps, and however long the reader takes: every byte once.
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
                        endpoint.turn().unwrap();
                    }
                }
                for native in &mut natives {
                    // Two fills are out at the same time.
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

#[test]
fn polling_makes_no_system_call_while_nothing_comes() {
    const LOOKS: usize = 100_000;
    // Whatever an engine could call to learn or to tell something, or to wait.
    let calls = [
        libc::SYS_read,
        libc::SYS_write,
        libc::SYS_readv,
        libc::SYS_writev,
        libc::SYS_poll,
        libc::SYS_ppoll,
        libc::SYS_epoll_wait,
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2,
        libc::SYS_epoll_ctl,
        libc::SYS_recvmsg,
        libc::SYS_recvfrom,
        libc::SYS_sendmsg,
        libc::SYS_sendto,
        libc::SYS_ioctl,
        libc::SYS_fcntl,
        libc::SYS_futex,
        libc::SYS_nanosleep,
        libc::SYS_clock_nanosleep,
        libc::SYS_sched_yield,
        libc::SYS_mmap,
        libc::SYS_madvise,
    ];
    let rules: BTreeMap<i64, Vec<_>> = calls.into_iter().map(|call| (call, vec![])).collect();
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::KillProcess,
        TargetArch::try_from(std::env::consts::ARCH).unwrap(),
    );
    let filter: BpfProgram = filter.unwrap().try_into().unwrap();
    // In a process of its own: the filter ends it at the first call, and cannot be taken off.
    const UNDER_FILTER: &str = "ZEROSOCK_TEST_UNDER_FILTER";
    const PROVED: i32 = 7;
    if std::env::var_os(UNDER_FILTER).is_none() {
        let ended = std::process::Command::new(std::env::current_exe().unwrap())
            .arg("polling_makes_no_system_call_while_nothing_comes")
            .env(UNDER_FILTER, "1")
            .output()
            .unwrap();
        assert_eq!(ended.status.code(), Some(PROVED), "{ended:?}");
        return;
    }
    pair(
        |builder| builder,
        |stream| {
            send_packets(&stream, &[10]);
            wait_for_word(&stream);
        },
        |stream, _| {
            let mut map = RxMap::new(&stream, RxMapConfig::default()).unwrap();
            let mut paged = PagedRxMap::new(&stream, 2 * PAGE, Protection::READ).unwrap();
            map.wait().unwrap();
            assert_eq!(map.fill().unwrap(), 1);
            map.release(0..1).unwrap();
            // What is due a while after something came is over.
            let until = Instant::now() + Duration::from_millis(50);
            while Instant::now() < until {
                assert_eq!(map.poll_value().unwrap(), EMPTY);
            }
            thread::scope(|scope| {
                scope.spawn(|| {
                    seccompiler::apply_filter(&filter).unwrap();
                    for _ in 0..LOOKS {
                        assert_eq!(map.poll_value().unwrap(), EMPTY);
                        assert_eq!(paged.poll_value().unwrap(), EMPTY);
                    }
                    // Even the end of a thread is a call.
                    std::process::exit(PROVED);
                });
            });
        },
    );
}

#[test]
fn polling_sees_what_comes_and_heeds_the_low_water_mark() {
    pair(
        |builder| builder,
        |stream| {
            (&stream).write_all(&bytes(1, 10)).unwrap();
            wait_for_word(&stream);
            (&stream).write_all(&bytes(2, 90)).unwrap();
            wait_for_word(&stream);
        },
        |stream, _| {
            let mut map = RxMap::new(&stream, RxMapConfig::default()).unwrap();
            let give_up = Instant::now() + PATIENCE;
            let spin = |map: &mut RxMap<_>| {
                loop {
                    let value = map.poll_value().unwrap();
                    if value != EMPTY {
                        return value;
                    }
                    assert!(Instant::now() < give_up);
                }
            };
            assert_eq!(spin(&mut map), DATA);
            stream.set_low_water(100);
            assert_eq!(map.poll_value().unwrap(), EMPTY, "10 bytes are not 100");
            stream
                .set_read_timeout(Some(Duration::from_millis(20)))
                .unwrap();
            let error = std::io::Error::from(map.wait().unwrap_err());
            assert_eq!(error.kind(), ErrorKind::TimedOut);
            stream.set_wait(Wait::Spin);
            (&stream).write_all(b"!").unwrap();
            assert_eq!(spin(&mut map), DATA);
            map.fill().unwrap();
            let got: Vec<u8> = map.packets().flat_map(|packet| packet.to_vec()).collect();
            assert_eq!(got, [bytes(1, 10), bytes(2, 90)].concat());
            (&stream).write_all(b"!").unwrap();
            map.release_all();
            assert_eq!(spin(&mut map), CLOSED);
            assert_eq!(map.fill().unwrap(), 0);
        },
    );
}

#[test]
fn a_reset_is_told_behind_what_had_come() {
    pair(
        |builder| builder,
        |stream| {
            send_packets(&stream, &[300]);
            wait_for_word(&stream);
            stream.reset();
        },
        |stream, _| {
            let mut map = PagedRxMap::new(&stream, 2 * PAGE, Protection::READ).unwrap();
            let mut native = RxMap::new(&stream, RxMapConfig::default()).unwrap();
            map.wait().unwrap();
            (&stream).write_all(b"!").unwrap();
            stream.set_low_water(301);
            assert_eq!(map.wait().unwrap(), CLOSED);
            assert_eq!(map.fill().unwrap(), 1);
            assert_eq!(map.packets().next().unwrap().1.unwrap(), bytes(0, 300));
            map.release(1..2).unwrap();
            for refused in [map.fill().unwrap_err(), native.fill().unwrap_err()] {
                let error = std::io::Error::from(refused);
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            }
            assert_eq!(map.poll_value().unwrap(), CLOSED);
        },
    );
}

/// A map that is never released costs its own connection in-place packets, and nobody else theirs.
#[test]
fn what_a_map_holds_is_bounded() {
    const LEN: usize = 1 << 20;
    let daemon = TestDaemon::with(2, |_| {});
    let server = Endpoint::builder()
        .attach_device(&daemon.vms[0].socket)
        .unwrap();
    let client = Endpoint::builder()
        .queue_size(64)
        .attach_device(&daemon.vms[1].socket)
        .unwrap();
    client.set_rx_map(true);
    let listener = server.listen(PORT, 4).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (hoarded, _) = listener.accept_timeout(PATIENCE).unwrap();
            let (other, _) = listener.accept_timeout(PATIENCE).unwrap();
            for stream in [&hoarded, &other] {
                stream.set_write_timeout(Some(PATIENCE)).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
            }
            send_packets(&hoarded, &[1000; 100]);
            (&other).write_all(&bytes(5, LEN)).unwrap();
            wait_for_word(&other);
        });
        let connect = || {
            let stream = client.connect(Address::new(Cid::new(3), PORT)).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream
        };
        let (hoarded, other) = (connect(), connect());
        let mut maps: Vec<_> = (0..20)
            .map(|_| RxMap::new(&hoarded, RxMapConfig::default()).unwrap())
            .collect();
        hoarded.set_low_water(100_000);
        hoarded.wait_readable().unwrap();
        let mut seen = Vec::new();
        for map in &mut maps {
            map.fill().unwrap();
            seen.extend(map.packets().map(|packet| packet.is_in_place()));
        }
        // 32 buffers: an eighth of them for one connection.
        assert!(
            seen.iter().filter(|in_place| **in_place).count() <= 4,
            "{seen:?}"
        );
        let mut got = vec![0; LEN];
        (&other).read_exact(&mut got).unwrap();
        assert_bytes(&got, &bytes(5, LEN));
        let all = maps
            .iter()
            .flat_map(|map| map.packets().map(|p| p.to_vec()));
        let all: Vec<u8> = all.flatten().collect();
        let sent: Vec<u8> = (0..100).flat_map(|seed| bytes(seed, 1000)).collect();
        assert_bytes(&all, &sent);
        drop(maps);
        (&other).write_all(b"!").unwrap();
    });
}

/// What a host maps lies in its guest's memory: nothing is copied on the way.
#[test]
fn a_host_maps_what_its_guest_wrote() {
    const LENS: [usize; 3] = [56, 4096, 8200];
    undisturbed(|| {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("vm");
        let host = Host::builder().vm(Cid::guest(3).unwrap(), &socket);
        let host = host.start().unwrap();
        host.set_rx_map(true);
        let listener = host.listen(PORT, 1).unwrap();
        thread::scope(|scope| {
            let guest = scope.spawn(|| {
                let guest = Endpoint::builder().attach_device(&socket).unwrap();
                let stream = guest.connect(Address::new(Cid::HOST, PORT)).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                send_packets(&stream, &LENS);
                wait_for_word(&stream);
                assert!((&stream).read(&mut [0]).is_ok_and(|got| got == 0));
            });
            let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut map = RxMap::new(&stream, RxMapConfig::default()).unwrap();
            wait_for(&stream, LENS.iter().sum());
            let filled = map.fill().unwrap();
            let stats = host.stats();
            let got: Vec<Vec<u8>> = map.packets().map(|packet| packet.to_vec()).collect();
            let sent = LENS
                .iter()
                .enumerate()
                .map(|(i, len)| bytes(i as u64, *len));
            assert_eq!(got.concat(), sent.collect::<Vec<_>>().concat());
            let mut bases: Vec<u64> = map
                .packets()
                .filter(|packet| packet.is_in_place())
                .map(|packet| packet.as_ptr().addr() as u64 - packet.header().offset)
                .collect();
            bases.dedup();
            assert!(bases.len() <= 1, "a guest with one region");
            map.release(0..filled).unwrap();
            (&stream).write_all(b"!").unwrap();
            drop(map);
            drop(stream);
            // The guest goes only when the device answers.
            while !guest.is_finished() {
                host.turn().unwrap();
                thread::yield_now();
            }
            if stats.copied_aside > 0 {
                return false;
            }
            let lens: Vec<usize> = got.iter().map(Vec::len).collect();
            assert_eq!((lens.as_slice(), bases.len()), (LENS.as_slice(), 1));
            assert_eq!(stats.received_in_place, LENS.iter().sum::<usize>() as u64);
            assert_eq!(stats.copied_out, 0);
            true
        })
    });
}
