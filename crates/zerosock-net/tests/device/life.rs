//! Queues that stop, front-ends that go, and interfaces that go down or vanish.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerosock_proto::wire::net::{F_MRG_RXBUF, Header};
use zerosock_sys::network::remove_interface;

use super::frames::plain;
use super::network::{DEADLINE, Network, Setup, isolated, wait_until};

#[test]
fn a_stopped_receive_queue_keeps_its_buffers_and_continues() {
    isolated(
        "a_stopped_receive_queue_keeps_its_buffers_and_continues",
        || {
            let network = Network::new(&Setup::default());
            for features in [0, F_MRG_RXBUF] {
                let mut driver = network.attach(features);
                driver.post_many(0, 10, 1536);
                network.send(&Header::default(), &plain(60, 1));
                assert_eq!(driver.receive(0).1, plain(60, 1));
                // All chains that are not used are as if they had not been taken.
                let base = driver.frontend.get_vring_base(0).unwrap();
                assert_eq!(base, driver.used_index(0));
                assert!(base < driver.avail_index(0));
                let used = driver.used_index(0);
                // The transmit queue runs on.
                driver.send(0, &Header::default(), &plain(60, 2), &[]);
                assert_eq!(network.receive().1, plain(60, 2));
                assert_eq!(driver.used_index(0), used);
                driver.start(0, base);
                network.wait_for_link(&mut driver);
                network.send(&Header::default(), &plain(60, 3));
                assert_eq!(driver.receive(0).1, plain(60, 3));
                driver.check_guards();
            }
        },
    );
}

#[test]
fn a_disabled_queue_is_left_alone() {
    isolated("a_disabled_queue_is_left_alone", || {
        let network = Network::new(&Setup::default());
        let mut driver = network.attach(F_MRG_RXBUF);
        driver.post_many(0, 4, 1536);
        driver.frontend.set_vring_enable(0, false).unwrap();
        driver.frontend.set_vring_enable(1, false).unwrap();
        driver.frontend.sync().unwrap();
        let used = (driver.used_index(0), driver.used_index(1));
        driver.send(0, &Header::default(), &plain(60, 1), &[]);
        let _ = network.try_send(&Header::default(), &plain(60, 2));
        // The device has had a turn for each message.
        driver.frontend.sync().unwrap();
        assert_eq!((driver.used_index(0), driver.used_index(1)), used);
        driver.frontend.set_vring_enable(1, true).unwrap();
        driver.frontend.sync().unwrap();
        assert_eq!(network.receive().1, plain(60, 1));
        driver.frontend.set_vring_enable(0, true).unwrap();
        network.wait_for_link(&mut driver);
    });
}

#[test]
fn a_reset_device_starts_again_from_nothing() {
    isolated("a_reset_device_starts_again_from_nothing", || {
        let network = Network::new(&Setup::default());
        let mut driver = network.attach(F_MRG_RXBUF);
        driver.post_many(0, 10, 1536);
        driver.frontend.reset_device().unwrap();
        driver.frontend.sync().unwrap();
        driver.forget();
        driver.start_all();
        network.wait_for_link(&mut driver);
        driver.send(0, &Header::default(), &plain(60, 2), &[]);
        assert_eq!(network.receive().1, plain(60, 2));
        driver.check_guards();
    });
}

#[test]
fn another_memory_table_takes_over_while_queues_run() {
    isolated("another_memory_table_takes_over_while_queues_run", || {
        let network = Network::new(&Setup::default());
        let mut driver = network.attach(F_MRG_RXBUF);
        driver.post_many(0, 10, 1536);
        for seed in 0..5 {
            driver.send_memory();
            driver.frontend.sync().unwrap();
            network.send(&Header::default(), &plain(200, seed));
            assert_eq!(driver.receive(0).1, plain(200, seed));
        }
        driver.check_guards();
    });
}

#[test]
fn the_next_front_end_gets_no_frame_of_the_last_one() {
    isolated("the_next_front_end_gets_no_frame_of_the_last_one", || {
        let network = Network::new(&Setup::default());
        for seed in 0..3 {
            let mut driver = network.attach(F_MRG_RXBUF);
            // Nothing is posted: the frame stays in the interface.
            network.send(&Header::default(), &plain(60, 0x40 + seed));
            network.send(&Header::default(), &plain(60, 0x40 + seed));
            drop(driver);
            driver = network.attach(F_MRG_RXBUF);
            driver.post_many(0, 4, 1536);
            network.send(&Header::default(), &plain(60, seed));
            assert_eq!(driver.receive(0).1, plain(60, seed));
        }
    });
}

#[test]
fn an_interface_that_is_down_costs_frames_only() {
    isolated("an_interface_that_is_down_costs_frames_only", || {
        let network = Network::new(&Setup::default());
        let mut driver = network.attach(F_MRG_RXBUF);
        network.tap.bring_down().unwrap();
        driver.send(0, &Header::default(), &plain(60, 1), &[]);
        driver.wait_sent(0);
        wait_until("counted", || network.stats().tx_link_down == 1);
        network.tap.bring_up().unwrap();
        network.wait_for_link(&mut driver);
        driver.send(0, &Header::default(), &plain(60, 2), &[]);
        assert_eq!(network.receive().1, plain(60, 2));
    });
}

#[test]
fn an_interface_that_vanishes_ends_the_service() {
    isolated("an_interface_that_vanishes_ends_the_service", || {
        let network = Network::new(&Setup::default());
        let driver = network.attach(F_MRG_RXBUF);
        let server = network.server.as_ref().unwrap();
        let over = |limit: Duration| {
            let mut fds = [PollFd::from_borrowed_fd(server.over(), PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::try_from(limit).unwrap())).unwrap() == 1
        };
        assert!(!over(Duration::ZERO));
        remove_interface(&network.tap).unwrap();
        assert!(over(DEADLINE), "the device has not noticed");
        wait_until("disconnected", || driver.frontend.is_closed());
    });
}
