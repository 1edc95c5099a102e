//! Frames both ways, and how many bytes of them are copied.

use zerosock_net::stats::NetStats;
use zerosock_net::xdp::XdpConfig;
use zerosock_proto::wire::net::{F_MRG_RXBUF, Header};
use zerosock_sys::xdp::{AttachMode, InterfaceOptions, LongFrames, MAX_FRAME};

use super::super::frames::plain;
use super::super::network::wait_until;
use super::link::{BUFFER, CONFIG, Link, isolated, isolated_with, name};

fn copied(stats: NetStats) -> (u64, u64) {
    (stats.rx_copied, stats.tx_copied)
}

#[test]
fn frames_pass_both_ways_in_place() {
    for attach in [AttachMode::Driver, AttachMode::Generic] {
        isolated("frames_pass_both_ways_in_place", move || {
            let attach = Some(attach);
            let options = InterfaceOptions {
                attach,
                ..InterfaceOptions::default()
            };
            let link = Link::new(options, CONFIG);
            for features in [0, F_MRG_RXBUF] {
                let mut driver = link.attach_in_place(features);
                let before = link.settled(&mut driver);
                let lens = [14, 15, 60, 61, 1024, 1513, 1514, MAX_FRAME as usize];
                for (seed, len) in (1..).zip(lens) {
                    let frame = plain(len, seed);
                    for lens in [&[BUFFER][..], &[12, MAX_FRAME], &[5, 7, 2048]] {
                        link.post(&mut driver, lens);
                        link.send(&frame);
                        let (header, received) = driver.receive(0);
                        assert_eq!(received, frame);
                        assert_eq!((header.flags(), header.num_buffers()), (0, 1));
                    }
                    // The header alone, with the frame, and cut in odd places.
                    for lens in [&[12][..], &[], &[5, 9, 1000, 100]] {
                        link.check_sent(&mut driver, &frame, lens);
                    }
                }
                let after = link.settled(&mut driver);
                // Of the third way to cut a frame, those that have a part of less than 14 bytes first are copied.
                assert_eq!(after.rx_copied, before.rx_copied, "received in place");
                let short: usize = lens.iter().sum();
                assert_eq!(after.tx_copied - before.tx_copied, short as u64);
                assert_eq!(after.rx_no_room, 0);
                driver.check_guards();
            }
        });
    }
}

/// What the guest writes after it has handed a frame over is sent: the kernel reads the guest's memory.
#[test]
fn frame_of_the_guest_is_not_copied_before_the_kernel_reads_it() {
    isolated("frame_of_the_guest_is_not_copied", || {
        let link = Link::new(InterfaceOptions::default(), CONFIG);
        let mut driver = link.attach_in_place(F_MRG_RXBUF);
        name("near").bring_down().unwrap();
        let mut frame = plain(1000, 1);
        // The kernel has this one in its ring, and does not read it.
        driver.send(0, &Header::default(), &frame, &[]);
        wait_until("sent", || link.stats().tx_frames > 0);
        assert!(driver.next_used(1).is_none());
        let last = driver.last_buffer() + 12 + 999;
        frame[999] ^= 0xff;
        driver.write(last, &frame[999..]);
        name("near").bring_up().unwrap();
        driver.wait_sent(0);
        assert!(link.receive() == frame);
        assert_eq!(link.settled(&mut driver).tx_copied, 0);
    });
}

#[test]
fn frames_in_many_buffers_arrive_whole() {
    isolated("frames_in_many_buffers_arrive_whole", || {
        let link = Link::new(InterfaceOptions::default(), CONFIG);
        let mut driver = link.attach_in_place(F_MRG_RXBUF);
        for (seed, parts) in (1..).zip([2, 17, 18, 19, 40]) {
            let frame = plain(1514, seed);
            let before = link.settled(&mut driver).tx_copied;
            let mut lens = vec![12];
            lens.resize(parts, 1514 / parts);
            link.check_sent(&mut driver, &frame, &lens);
            let is_copied = link.settled(&mut driver).tx_copied > before;
            assert_eq!(is_copied, parts > 18, "{parts} parts");
        }
    });
}

#[test]
fn small_buffers_get_the_frames_that_fit() {
    isolated("small_buffers_get_the_frames_that_fit", || {
        let link = Link::new(InterfaceOptions::default(), CONFIG);
        let mut driver = link.attach_in_place(0);
        // Those of guests without mergeable buffers have no room for every frame behind 12 bytes.
        link.post(&mut driver, &[1530]);
        link.post(&mut driver, &[100]);
        link.post(&mut driver, &[100]);
        let before = link.settled(&mut driver);
        link.send(&plain(1514, 1));
        assert_eq!(driver.receive(0).1, plain(1514, 1));
        link.send(&plain(89, 2));
        link.send(&plain(88, 3));
        // The driver gets a buffer without bytes back, and the next frame.
        let (_, written) = driver
            .wait_used(0, super::super::network::DEADLINE)
            .unwrap();
        assert_eq!(written, 0);
        assert_eq!(driver.receive(0).1, plain(88, 3));
        let after = link.settled(&mut driver);
        assert_eq!(after.rx_no_room - before.rx_no_room, 1);
        assert_eq!(after.rx_copied - before.rx_copied, 1514 + 88);
        driver.check_guards();
    });
}

#[test]
fn received_frames_are_copied_by_choice() {
    isolated("received_frames_are_copied_by_choice", || {
        let config = XdpConfig {
            copies: true,
            ..CONFIG
        };
        let link = Link::new(InterfaceOptions::default(), config);
        let mut driver = link.attach(F_MRG_RXBUF);
        link.wait_for_memory(&mut driver);
        link.wait_for_link(&mut driver);
        let before = copied(link.settled(&mut driver));
        for seed in 0..20 {
            link.post(&mut driver, &[BUFFER]);
            link.send(&plain(1000, seed));
            assert_eq!(driver.receive(0).1, plain(1000, seed));
        }
        let after = copied(link.settled(&mut driver));
        assert_eq!((after.0 - before.0, after.1), (20_000, before.1));
        driver.check_guards();
    });
}

#[test]
fn long_frames_are_counted() {
    for long_frames in [LongFrames::Pass, LongFrames::Drop] {
        isolated("long_frames_are_counted", move || {
            let options = InterfaceOptions {
                long_frames,
                ..InterfaceOptions::default()
            };
            let link = Link::new(options, CONFIG);
            let mut driver = link.attach_in_place(F_MRG_RXBUF);
            link.post_many(&mut driver, 2, 2048);
            link.send(&plain(MAX_FRAME as usize + 1, 1));
            link.send(&plain(MAX_FRAME as usize, 2));
            assert_eq!(driver.receive(0).1, plain(MAX_FRAME as usize, 2));
            wait_until("counted", || link.stats().rx_long == 1);
            driver.check_guards();
        });
    }
}

/// Copies of sent frames are in other private chunks than those that show what the driver writes.
#[test]
fn sending_copies_does_not_end_receiving_in_place() {
    isolated("sending_copies_does_not_end_receiving_in_place", || {
        let link = Link::new(InterfaceOptions::default(), CONFIG);
        let mut driver = link.attach_in_place(F_MRG_RXBUF);
        let before = link.settled(&mut driver);
        let mut lens = vec![12];
        lens.resize(40, 1514 / 40);
        for seed in 0..40 {
            link.check_sent(&mut driver, &plain(1514, seed), &lens);
            // In a private chunk, which is looked at.
            link.post(&mut driver, &[1530]);
            link.send(&plain(100, seed));
            assert_eq!(driver.receive(0).1, plain(100, seed));
        }
        let after = link.settled(&mut driver);
        assert_eq!(after.tx_copied - before.tx_copied, 40 * 1514);
        assert_eq!(after.rx_copied - before.rx_copied, 40 * 100);
        link.check_in_place(&mut driver);
        driver.check_guards();
    });
}

#[test]
fn frames_that_the_kernel_drops_are_counted() {
    isolated("frames_that_the_kernel_drops_are_counted", || {
        let link = Link::new(InterfaceOptions::default(), CONFIG);
        let mut driver = link.attach_in_place(F_MRG_RXBUF);
        let before = link.settled(&mut driver);
        // The guest has no buffers, and does nothing meanwhile.
        for round in 1..4 {
            for seed in 0..20 {
                link.send(&plain(60, seed));
            }
            wait_until("counted", || {
                let now = link.stats();
                now.rx_kernel_dropped - before.rx_kernel_dropped >= round * 20
                    && now.rx_fill_empty > before.rx_fill_empty
            });
        }
        let now = link.stats();
        assert_eq!((now.rx_ring_full, now.tx_invalid), (0, 0));
    });
}

#[test]
fn frames_beyond_the_mtu_are_refused() {
    isolated("frames_beyond_the_mtu_are_refused", || {
        let link = Link::new(InterfaceOptions::default(), CONFIG);
        let mut driver = link.attach_in_place(F_MRG_RXBUF);
        // The MTU is 1600; with a VLAN tag.
        link.check_sent(&mut driver, &plain(1618, 1), &[]);
        driver.send(0, &Header::default(), &plain(1619, 2), &[]);
        driver.wait_sent(0);
        wait_until("counted", || link.stats().tx_refused == 1);
        link.check_sent(&mut driver, &plain(60, 3), &[]);
    });
}

#[test]
fn bursts_are_neither_lost_nor_reordered() {
    isolated("bursts_are_neither_lost_nor_reordered", || {
        let link = Link::new(InterfaceOptions::default(), CONFIG);
        let mut driver = link.attach_in_place(F_MRG_RXBUF);
        for round in 0..8 {
            link.post_many(&mut driver, 200, BUFFER);
            for index in 0..200 {
                link.send(&plain(60 + index, round));
            }
            for index in 0..200 {
                assert_eq!(driver.receive(0).1, plain(60 + index, round));
            }
            for index in 0..200 {
                driver.send(0, &Header::default(), &plain(60 + index, round), &[]);
            }
            for index in 0..200 {
                assert!(link.receive() == plain(60 + index, round), "{index}");
            }
            for _ in 0..200 {
                driver.wait_sent(0);
            }
        }
        driver.check_guards();
    });
}

#[test]
fn queue_pairs_have_sockets_of_their_own() {
    isolated_with(2, "queue_pairs_have_sockets_of_their_own", || {
        use super::super::driver::Driver;
        use zerosock_proto::wire::net::F_MQ;
        let config = XdpConfig {
            queues: 2,
            ..CONFIG
        };
        let link = Link::new(InterfaceOptions::default(), config);
        let mut driver = Driver::attach(&link.socket, F_MQ | F_MRG_RXBUF, 4);
        link.post_many(&mut driver, 60, BUFFER);
        driver.post_many(1, 60, BUFFER);
        for pair in 0..2 {
            let frame = plain(200, pair as u8);
            driver.send(pair, &Header::default(), &frame, &[]);
            driver.wait_sent(pair);
            assert!(link.receive() == frame);
        }
        // The other end chooses a queue by the flow: IPv4, UDP.
        let mut packet = plain(60, 0);
        packet[12..14].copy_from_slice(&[8, 0]);
        packet[14..34].copy_from_slice(&[
            0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ]);
        let mut received = [0, 0];
        wait_until("frames on both pairs", || {
            for port in 0..20 {
                packet[34..42].copy_from_slice(&[40, port, 40, port, 0, 26, 0, 0]);
                link.send(&packet);
            }
            for (pair, count) in received.iter_mut().enumerate() {
                while driver.next_used(2 * pair).is_some() {
                    *count += 1;
                    driver.post(pair, &[BUFFER]);
                }
            }
            received[0] > 0 && received[1] > 0
        });
        driver.check_guards();
    });
}
