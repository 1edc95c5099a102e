//! Receive buffers that are missing, too small, or come late.

use std::thread;
use std::time::Duration;

use zerosock_proto::wire::net::{F_CSUM, F_GUEST_CSUM, F_GUEST_TSO4, F_MRG_RXBUF, Header};

use super::frames::{plain, tcp, tso};
use super::network::{Network, Setup, isolated, wait_until};

#[test]
fn frames_wait_in_the_tap_until_buffers_are_posted() {
    isolated("frames_wait_in_the_tap_until_buffers_are_posted", || {
        let network = Network::new(&Setup::default());
        for features in [0, F_MRG_RXBUF] {
            let mut driver = network.attach(features);
            for seed in 0..50 {
                network.send(&Header::default(), &plain(500, seed));
            }
            // The guest sends meanwhile.
            driver.send(0, &Header::default(), &plain(100, 77), &[]);
            assert_eq!(network.receive().1, plain(100, 77));
            for seed in 0..50 {
                driver.post(0, &[1536]);
                assert_eq!(driver.receive(0).1, plain(500, seed));
            }
            driver.check_guards();
        }
        assert_eq!(network.stats().rx_no_room, 0);
    });
}

#[test]
fn a_frame_that_does_not_fit_into_its_only_buffer_is_dropped_and_counted() {
    isolated(
        "a_frame_that_does_not_fit_into_its_only_buffer_is_dropped_and_counted",
        || {
            let network = Network::new(&Setup::default());
            let mut driver = network.attach(0);
            driver.lax = true;
            driver.post(0, &[12 + 999]);
            network.send(&Header::default(), &plain(1000, 1));
            wait_until("the frame is dropped", || network.stats().rx_no_room == 1);
            // The buffer is there for the next frame. Its first bytes may have been written.
            network.send(&Header::default(), &plain(999, 2));
            assert_eq!(driver.receive(0).1, plain(999, 2));
            driver.check_guards();
        },
    );
}

#[test]
fn a_frame_waits_for_the_rest_of_its_buffers() {
    isolated("a_frame_waits_for_the_rest_of_its_buffers", || {
        let features = F_MRG_RXBUF | F_CSUM | F_GUEST_CSUM | F_GUEST_TSO4;
        let network = Network::new(&Setup::default());
        let mut driver = network.attach(features);
        let (partial, frame) = tcp(20_000, 4);
        let header = tso(partial);
        let mut attempts = 0;
        // A machine that is busy may need longer than the frame waits: then it is sent again.
        let received = loop {
            let dropped = network.stats().rx_no_room;
            driver.post_many(0, 2, 1536);
            network.send(&header, &frame);
            thread::sleep(Duration::from_millis(10));
            driver.post_many(0, 20, 1536);
            if let Some(received) = driver.try_receive(0, Duration::from_secs(2)) {
                break received;
            }
            attempts += 1;
            assert!(attempts < 20 && network.stats().rx_no_room > dropped);
        };
        assert_eq!(received.1, frame);
        assert_eq!(received.0.num_buffers(), 14);
        driver.check_guards();
    });
}

#[test]
fn a_frame_without_enough_buffers_is_dropped_after_a_while() {
    isolated(
        "a_frame_without_enough_buffers_is_dropped_after_a_while",
        || {
            let features = F_MRG_RXBUF | F_CSUM | F_GUEST_CSUM | F_GUEST_TSO4;
            let network = Network::new(&Setup::default());
            let mut driver = network.attach(features);
            driver.lax = true;
            let (partial, frame) = tcp(60_000, 4);
            driver.post_many(0, 3, 1536);
            network.send(&tso(partial), &frame);
            network.send(&Header::default(), &plain(1000, 6));
            wait_until("the frame is dropped", || network.stats().rx_no_room == 1);
            let (header, received) = driver.receive(0);
            assert_eq!((header.num_buffers(), received.len()), (1, 1000));
            driver.check_guards();
        },
    );
}

#[test]
fn small_and_cut_buffers_are_filled_in_order() {
    isolated("small_and_cut_buffers_are_filled_in_order", || {
        let network = Network::new(&Setup::default());
        let mut driver = network.attach(F_MRG_RXBUF);
        let frame = plain(1500, 8);
        // The header alone fills the first one; the third consists of three pieces.
        driver.post(0, &[12]);
        driver.post(0, &[100]);
        driver.post(0, &[7, 1, 300]);
        driver.post_many(0, 3, 512);
        network.send(&Header::default(), &frame);
        let (header, received) = driver.receive(0);
        assert_eq!((header.num_buffers(), received), (6, frame));
        driver.check_guards();
    });
}

#[test]
fn a_buffer_without_room_for_a_header_is_returned_empty() {
    isolated(
        "a_buffer_without_room_for_a_header_is_returned_empty",
        || {
            let network = Network::new(&Setup::default());
            let mut driver = network.attach(F_MRG_RXBUF);
            driver.post(0, &[11]);
            driver.post(0, &[2048]);
            network.send(&Header::default(), &plain(60, 1));
            let (_, written) = driver.wait_used(0, super::network::DEADLINE).unwrap();
            assert_eq!(written, 0);
            assert_eq!(driver.receive(0).1, plain(60, 1));
            wait_until("counted", || network.stats().bad_chains == 1);
            driver.check_guards();
        },
    );
}
