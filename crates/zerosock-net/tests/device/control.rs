//! The control queue and several queue pairs.

use std::time::Duration;

use zerosock_proto::wire::net::{CONTROL_ERR, CONTROL_OK, F_CTRL_RX, F_CTRL_VQ, F_MQ, Header};

use super::driver::Driver;
use super::frames::plain;
use super::network::{Network, Setup, isolated, wait_until};

#[test]
fn known_commands_are_carried_out_and_others_refused() {
    isolated("known_commands_are_carried_out_and_others_refused", || {
        let network = Network::new(&Setup::default());
        let mut driver = Driver::attach(&network.socket, F_CTRL_VQ | F_CTRL_RX, 3);
        for accepted in [&[0, 0, 1][..], &[0, 1, 0], &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(driver.command(2, accepted), CONTROL_OK, "{accepted:?}");
        }
        // There is one queue pair.
        for refused in [&[4, 0, 1, 0][..], &[0, 9, 1], &[200, 1], &[0], &[3, 0]] {
            assert_eq!(driver.command(2, refused), CONTROL_ERR, "{refused:?}");
        }
        wait_until("counted", || network.stats().control_refused == 5);
        network.wait_for_link(&mut driver);
    });
}

/// The pairs on which frames with many source addresses arrive.
fn pairs_reached(network: &Network, driver: &mut Driver) -> [u32; 2] {
    let mut reached = [0; 2];
    for flow in 0..64_u8 {
        reached[pair_reached(network, driver, flow)] += 1;
    }
    reached
}

/// The pair that a frame of this flow arrives at.
fn pair_reached(network: &Network, driver: &mut Driver, flow: u8) -> usize {
    let (_, mut frame) = super::frames::tcp(100, 1);
    // Another flow for the kernel.
    frame[34] = flow + 1;
    frame[26] = flow;
    network.send(&Header::default(), &frame);
    // Within 24 seconds at least.
    let found = (0..40_000).find_map(|_| {
        (0..2).find(|&pair| {
            let frame = driver.try_receive(pair, Duration::from_micros(300));
            frame.is_some_and(|(_, frame)| !super::frames::is_probe(&frame))
        })
    });
    found.expect("the frame arrives on a pair")
}

#[test]
fn frames_are_spread_over_the_pairs_that_are_in_use() {
    isolated("frames_are_spread_over_the_pairs_that_are_in_use", || {
        let network = Network::new(&Setup {
            queues: 2,
            ..Setup::default()
        });
        // The front-end keeps the control queue: all pairs with enabled queues are in use.
        let mut driver = Driver::attach(&network.socket, F_MQ, 4);
        assert_eq!(driver.frontend.get_queue_num().unwrap(), 2);
        network.wait_for_link(&mut driver);
        // For all frames, whatever the kernel's hash makes of them.
        driver.post_many(0, 204, 1024);
        driver.post_many(1, 100, 1024);
        let [first, second] = pairs_reached(&network, &mut driver);
        assert!(first > 0 && second > 0, "{first} and {second}");
        driver.frontend.set_vring_enable(2, false).unwrap();
        driver.frontend.sync().unwrap();
        assert_eq!(pairs_reached(&network, &mut driver)[1], 0);
        // From the answer on, the kernel puts no frame into the queue of a disabled pair: it would be lost.
        for flow in 0..64 {
            for enabled in [true, false] {
                driver.frontend.set_vring_enable(2, enabled).unwrap();
            }
            driver.frontend.sync().unwrap();
            assert_eq!(pair_reached(&network, &mut driver, flow), 0);
        }
        // Both pairs send.
        for pair in 0..2 {
            driver.send(pair, &Header::default(), &plain(60, pair as u8), &[]);
            assert_eq!(network.receive().1, plain(60, pair as u8));
        }
        drop(driver);

        // The control queue is here: one pair is in use until the driver asks for two.
        let mut driver = Driver::attach(&network.socket, F_MQ | F_CTRL_VQ, 5);
        network.wait_for_link(&mut driver);
        driver.post_many(0, 140, 1024);
        driver.post_many(1, 100, 1024);
        assert_eq!(pairs_reached(&network, &mut driver)[1], 0);
        assert_eq!(driver.command(4, &[4, 0, 3, 0]), CONTROL_ERR);
        assert_eq!(driver.command(4, &[4, 0, 2, 0]), CONTROL_OK);
        assert!(pairs_reached(&network, &mut driver)[1] > 0);
        driver.check_guards();
    });
}

#[test]
fn a_driver_without_the_feature_uses_the_first_pair() {
    isolated("a_driver_without_the_feature_uses_the_first_pair", || {
        let network = Network::new(&Setup {
            queues: 2,
            ..Setup::default()
        });
        // Queue 2 is the control queue then.
        let mut driver = Driver::attach(&network.socket, F_CTRL_VQ | F_CTRL_RX, 3);
        assert_eq!(driver.features & F_MQ, 0);
        assert_eq!(driver.command(2, &[0, 0, 1]), CONTROL_OK);
        network.wait_for_link(&mut driver);
    });
}
