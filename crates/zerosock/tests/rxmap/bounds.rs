//! A map holds at most its share of the guest's buffers, and returns them when it is released.

use std::io::{Read, Write};
use std::thread;

use zerosock::vsock::rxmap::RxMapConfig;
use zerosock::vsock::{Endpoint, Host, RxMap};
use zerosock::{Address, Cid};

use super::{PORT, pair, send_packets, undisturbed, wait_for, wait_for_word};
use crate::common::{PATIENCE, TestDaemon, assert_bytes, bytes};

/// A map that is never released costs its own connection in-place packets, and no other connection.
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
        hoarded.set_low_water(100_000).unwrap();
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

/// The bytes that a host maps are in its guest's memory: none are copied.
#[test]
fn a_host_maps_what_its_guest_wrote() {
    const LENS: [usize; 3] = [56, 4096, 8200];
    undisturbed(|| {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("vm");
        let host = Host::builder().vm(Cid::new(3), &socket);
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
            // The guest disconnects only after the device's answer.
            while !guest.is_finished() {
                host.drive().unwrap();
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

#[test]
fn a_map_may_be_dropped_while_its_thread_has_a_batch() {
    pair(
        |builder| builder,
        |stream| {
            send_packets(&stream, &[1000; 4]);
            wait_for_word(&stream);
            send_packets(&stream, &[1000; 4]);
            wait_for_word(&stream);
        },
        |stream, _| {
            for _ in 0..2 {
                let mut map = RxMap::new(&stream, RxMapConfig::default()).unwrap();
                wait_for(&stream, 4000);
                assert!(map.fill().unwrap() > 0);
                let mut batch = stream.batch();
                batch.write(b"x").unwrap();
                drop(map);
                drop(batch);
            }
        },
    );
}
