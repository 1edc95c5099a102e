//! Live migration: the log of written pages while the kernel writes to the guest's memory, and announcements.

use zerosock_proto::wire::net::{F_MRG_RXBUF, F_MTU};
use zerosock_sys::xdp::{AttachMode, InterfaceOptions, MAX_FRAME};
use zerosock_vhost_user::frontend::FrontendError;

use super::super::announcements::rarp;
use super::super::driver::Driver;
use super::super::frames::{MARK, plain};
use super::super::migration::{begin, compare, marks, snapshot};
use super::super::network::wait_until;
use super::link::{BUFFER, CONFIG, Link, isolated, name};

/// Each page that the kernel has written in place is marked, and no other.
#[test]
fn pages_of_frames_that_are_received_in_place_are_marked() {
    for attach in [AttachMode::Driver, AttachMode::Generic] {
        isolated("pages_of_frames_that_are_received_in_place", move || {
            let options = InterfaceOptions {
                attach: Some(attach),
                ..InterfaceOptions::default()
            };
            let link = Link::new(options, CONFIG);
            let mut driver = link.attach_in_place(F_MRG_RXBUF);
            let first = driver.begin_page();
            link.post_many(&mut driver, 150, BUFFER);
            let received = first..driver.begin_page();
            let before = snapshot(&driver);
            let log = begin(&mut driver, 2);
            let copied = link.settled(&mut driver).rx_copied;
            for round in 0..40_u8 {
                let len = 60 + usize::from(round) * (MAX_FRAME as usize - 60) / 39;
                let frame = plain(len, round);
                link.send(&frame);
                assert_eq!(driver.receive(0).1, frame);
                link.check_sent(&mut driver, &frame, &[]);
            }
            assert_eq!(link.settled(&mut driver).rx_copied, copied, "in place");
            driver.frontend.get_vring_base(0).unwrap();
            driver.frontend.get_vring_base(1).unwrap();
            compare(&driver, &before, &marks(&log), received, 2);
            driver.check_guards();
        });
    }
}

/// The front-end asks for it as soon as the guest runs, when the socket is not bound yet.
#[test]
fn announcement_waits_until_the_socket_is_bound() {
    for is_down in [false, true] {
        isolated("announcement_waits_until_the_socket_is_bound", move || {
            if is_down {
                name("near").bring_down().unwrap();
            }
            let link = Link::new(InterfaceOptions::default(), CONFIG);
            let mut driver = Driver::attach(&link.socket, F_MRG_RXBUF, 2);
            driver.frontend.send_rarp(MARK).unwrap();
            if is_down {
                name("near").bring_up().unwrap();
            }
            assert_eq!(link.receive(), rarp(MARK));
            wait_until("counted", || link.stats().announcements == 1);
            // Once, and frames of the guest follow.
            link.wait_for_link(&mut driver);
            link.check_sent(&mut driver, &plain(60, 1), &[]);
        });
    }
}

/// A guest that has gone is not announced when the socket is bound for the next one.
#[test]
fn announcement_of_a_guest_that_has_gone_is_not_sent() {
    isolated("announcement_of_a_guest_that_has_gone", || {
        name("near").bring_down().unwrap();
        let link = Link::new(InterfaceOptions::default(), CONFIG);
        let mut driver = Driver::attach(&link.socket, F_MRG_RXBUF, 2);
        driver.frontend.send_rarp(MARK).unwrap();
        drop(driver);
        let mut driver = Driver::attach(&link.socket, F_MRG_RXBUF, 2);
        name("near").bring_up().unwrap();
        link.wait_for_link(&mut driver);
        link.check_sent(&mut driver, &plain(60, 1), &[]);
    });
}

#[test]
fn mtu_of_the_front_end_is_bounded_by_what_a_frame_may_be() {
    for (mtu, most) in [(1600, 1510), (1400, 1400)] {
        isolated("mtu_of_the_front_end_is_bounded", move || {
            name("near").set_mtu(mtu).unwrap();
            let link = Link::new(InterfaceOptions::default(), CONFIG);
            let mut driver = Driver::attach(&link.socket, F_MTU | F_MRG_RXBUF, 2);
            for refused in [most + 1, 9000, 65535] {
                let result = driver.frontend.set_mtu(refused);
                let is_refused = matches!(result, Err(FrontendError::Refused { .. }));
                assert!(is_refused, "{refused}: {result:?}");
            }
            driver.frontend.set_mtu(most).unwrap();
        });
    }
}
