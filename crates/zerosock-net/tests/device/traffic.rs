//! Contents, checksums and TSO in both directions.

use std::time::Duration;

use zerosock_proto::wire::net::{
    F_CSUM, F_GUEST_CSUM, F_GUEST_TSO4, F_HOST_TSO4, F_MRG_RXBUF, Header, NEEDS_CSUM,
};

use super::driver::Driver;
use super::frames::{TCP_HEADERS, is_complete_udp, plain, tcp, tso, udp};
use super::network::{Network, Setup, isolated, wait_until};

const OFFLOADS: u64 = F_CSUM | F_GUEST_CSUM | F_GUEST_TSO4 | F_HOST_TSO4;

/// Waits for the end of a turn that began after the last frame was received: counters of earlier turns are
/// published then.
fn settle(network: &Network, driver: &mut Driver) {
    driver.send(0, &Header::default(), &plain(60, 0xee), &[]);
    driver.wait_sent(0);
    assert_eq!(network.receive().1, plain(60, 0xee));
}

#[test]
fn frames_pass_both_ways_unchanged() {
    isolated("frames_pass_both_ways_unchanged", || {
        let network = Network::new(&Setup::default());
        for features in [0, F_MRG_RXBUF, F_MRG_RXBUF | OFFLOADS, OFFLOADS] {
            let mut driver = network.attach(features);
            for (seed, len) in (1..).zip([14, 15, 60, 61, 1024, 1513, 1514]) {
                let frame = plain(len, seed);
                network.send(&Header::default(), &frame);
                driver.post(0, &[1536]);
                let (header, received) = driver.receive(0);
                assert_eq!(received, frame);
                assert_eq!((header.gso_type(), header.num_buffers()), (0, 1));

                // The header alone, with the frame, and cut in odd places.
                for lens in [&[12][..], &[], &[5, 9, 1, 7]] {
                    driver.send(0, &Header::default(), &frame, lens);
                    driver.wait_sent(0);
                    assert_eq!(network.receive(), (Header::default(), frame.clone()));
                }
            }
            assert!(driver.was_called(0) && driver.was_called(1));
            driver.check_guards();
        }
    });
}

#[test]
fn a_64_kib_tso_frame_crosses_as_one() {
    isolated("a_64_kib_tso_frame_crosses_as_one", || {
        let network = Network::new(&Setup::default());
        for features in [OFFLOADS, OFFLOADS | F_MRG_RXBUF] {
            let mut driver = network.attach(features);
            let (partial, frame) = tcp(65_000, 3);
            let header = tso(partial);
            driver.send(0, &header, &frame, &[12, 54, 4096, 10_000]);
            driver.wait_sent(0);
            assert_eq!(network.receive(), (header, frame.clone()));

            let mergeable = features & F_MRG_RXBUF != 0;
            // A long frame is expected after the first one, and copied if a late probe came in between.
            let mut is_copied = true;
            for _ in 0..10 {
                settle(&network, &mut driver);
                let copied = network.stats().rx_copied;
                match mergeable {
                    true => driver.post_many(0, 50, 1536),
                    false => driver.post(0, &[65_562]),
                }
                network.send(&header, &frame);
                let (received, bytes) = driver.receive(0);
                assert_eq!(bytes, frame);
                let buffers = if mergeable {
                    (12 + frame.len()).div_ceil(1536)
                } else {
                    1
                };
                assert_eq!(usize::from(received.num_buffers()), buffers);
                assert_eq!((received.flags(), received.gso_type()), (NEEDS_CSUM, 1));
                assert_eq!((received.gso_size(), received.csum_start()), (1448, 34));
                settle(&network, &mut driver);
                is_copied = network.stats().rx_copied != copied;
                if !is_copied {
                    break;
                }
                assert!(mergeable, "the buffer has room for all");
            }
            assert!(!is_copied, "long frames are copied each time");
            driver.check_guards();
        }
    });
}

#[test]
fn a_driver_without_tso_and_checksums_gets_complete_segments() {
    isolated(
        "a_driver_without_tso_and_checksums_gets_complete_segments",
        || {
            let network = Network::new(&Setup::default());
            let mut driver = network.attach(0);
            let (partial, frame) = tcp(14_480, 5);
            driver.post_many(0, 12, 2048);
            network.send(&tso(partial), &frame);
            let mut payload = Vec::new();
            for _ in 0..10 {
                let (header, segment) = driver.receive(0);
                assert_eq!((header.flags() & NEEDS_CSUM, header.gso_type()), (0, 0));
                assert_eq!(segment.len(), TCP_HEADERS + 1448);
                payload.extend_from_slice(&segment[TCP_HEADERS..]);
            }
            assert_eq!(payload, frame[TCP_HEADERS..]);
            driver.check_guards();
        },
    );
}

#[test]
fn partial_checksums_pass_both_ways() {
    isolated("partial_checksums_pass_both_ways", || {
        let network = Network::new(&Setup::default());
        let mut driver = network.attach(OFFLOADS);
        let (header, frame) = tcp(1000, 9);
        driver.send(0, &header, &frame, &[12]);
        driver.wait_sent(0);
        assert_eq!(network.receive(), (header, frame.clone()));
        driver.post(0, &[2048]);
        network.send(&header, &frame);
        let (received, bytes) = driver.receive(0);
        assert_eq!((received.flags(), received.csum_start()), (NEEDS_CSUM, 34));
        assert_eq!((received.csum_offset(), bytes), (16, frame));
    });
}

/// A client on a raw socket verifies them.
#[test]
fn replies_of_dhcp_servers_have_their_whole_checksum() {
    isolated("replies_of_dhcp_servers_have_their_whole_checksum", || {
        let network = Network::new(&Setup::default());
        for features in [OFFLOADS, OFFLOADS | F_MRG_RXBUF] {
            let mut driver = network.attach(features);
            for (port, completed) in [(67, true), (53, false)] {
                let (header, frame) = udp(port, 301);
                assert!(!is_complete_udp(&frame));
                // Late probes take some.
                match features & F_MRG_RXBUF {
                    0 => (0..4).for_each(|_| driver.post(0, &[30, 46, 3, 2048])),
                    _ => driver.post_many(0, 32, 64),
                }
                network.send(&header, &frame);
                let (received, bytes) = driver.receive(0);
                assert_eq!(is_complete_udp(&bytes), completed);
                let flags = if completed { 0 } else { NEEDS_CSUM };
                assert_eq!(received.flags() & NEEDS_CSUM, flags);
                assert_eq!((&bytes[..40], &bytes[42..]), (&frame[..40], &frame[42..]));
            }
            driver.check_guards();
        }
    });
}

#[test]
fn the_driver_is_notified_once_for_a_batch() {
    isolated("the_driver_is_notified_once_for_a_batch", || {
        const FRAMES: u64 = 200;
        let network = Network::new(&Setup::default());
        let mut driver = network.attach(F_MRG_RXBUF);
        let before = network.stats();
        // Without kicks until all are there.
        for _ in 0..FRAMES {
            network.send(&Header::default(), &plain(60, 1));
        }
        // More buffers than frames: late probes may be among them.
        driver.post_many(0, 250, 256);
        for _ in 0..FRAMES {
            driver.receive(0);
        }
        // Counters follow the frames.
        wait_until("all are counted", || {
            network.stats().rx_frames - before.rx_frames >= FRAMES
        });
        let notifications = network.stats().notifications - before.notifications;
        assert!(notifications <= FRAMES / 4, "{notifications}");
        assert!(driver.try_receive(0, Duration::ZERO).is_none());
    });
}
