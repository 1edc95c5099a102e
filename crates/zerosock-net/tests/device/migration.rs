//! Live migration: the log of written pages against a comparison of the guest's memory, byte by byte.

use std::collections::BTreeSet;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::ftruncate;
use zerosock_net::model::ALL_OFFLOADS;
use zerosock_proto::wire::net::{F_CTRL_VQ, F_MRG_RXBUF, F_MTU, Header};
use zerosock_sys::memfd;
use zerosock_vhost_user::session::{F_EVENT_IDX, F_INDIRECT_DESC, F_LOG_ALL};

use super::driver::{Driver, GUEST, LEN, SIZE};
use super::frames::{plain, tcp, tso};
use super::network::{Network, Setup, isolated, wait_until};

const PAGE: u64 = 4096;
const LOG_LEN: u64 = (GUEST + LEN) / PAGE / 8;

/// Sends a new log.
fn send_log(driver: &mut Driver) -> OwnedFd {
    let log = memfd::create("log", LOG_LEN, false).unwrap();
    let frontend = &mut driver.frontend;
    frontend.set_log_base(log.as_fd(), 0, LOG_LEN).unwrap();
    log
}

/// Begins to log as QEMU does: the queues run.
pub(crate) fn begin(driver: &mut Driver, queues: usize) -> OwnedFd {
    let log = send_log(driver);
    let features = driver.features | F_LOG_ALL;
    driver.frontend.set_features(features).unwrap();
    for queue in 0..queues {
        let (addresses, used) = (Driver::addresses(queue), Driver::layout(queue).used);
        let frontend = &mut driver.frontend;
        frontend
            .set_vring_addr_logged(queue as u32, addresses, Some(used))
            .unwrap();
    }
    log
}

pub(crate) fn marks(log: &OwnedFd) -> BTreeSet<u64> {
    let mut bits = vec![0; LOG_LEN as usize];
    assert_eq!(
        rustix::io::pread(log, &mut bits[..], 0).unwrap(),
        bits.len()
    );
    let is_set = |page: &u64| bits[(page / 8) as usize] & 1 << (page % 8) != 0;
    (0..8 * LOG_LEN).filter(is_set).collect()
}

pub(crate) fn snapshot(driver: &Driver) -> Vec<u8> {
    driver.read(GUEST, LEN as usize)
}

/// Compares the memory with what it was, and with the pages that are marked. No queue runs. Only the
/// device writes to the pages `received`.
#[track_caller]
pub(crate) fn compare(
    driver: &Driver,
    before: &[u8],
    marks: &BTreeSet<u64>,
    received: Range<u64>,
    queues: usize,
) {
    let after = snapshot(driver);
    let pages = before
        .chunks(PAGE as usize)
        .zip(after.chunks(PAGE as usize));
    let pages = (GUEST / PAGE..).zip(pages);
    let changed = pages.filter(|(page, (a, b))| received.contains(page) && a != b);
    let changed: BTreeSet<u64> = changed.map(|(page, _)| page).collect();
    assert!(changed.len() > 5, "{}", changed.len());
    let of_buffers: BTreeSet<u64> = marks.range(received).copied().collect();
    assert_eq!(changed, of_buffers);
    let mut others = marks - &of_buffers;
    for queue in 0..queues {
        let used = Driver::layout(queue).used;
        let at = (used - GUEST) as usize;
        let ring = at..at + 6 + 8 * usize::from(SIZE);
        let is_marked = others.remove(&(used / PAGE));
        assert!(before[ring.clone()] == after[ring] || is_marked, "{queue}");
    }
    assert!(others.is_empty(), "marked and not written: {others:x?}");
}

#[test]
fn each_written_page_is_marked_and_no_other() {
    isolated("each_written_page_is_marked_and_no_other", || {
        let network = Network::new(&Setup {
            mtu: Some(9000),
            ..Setup::default()
        });
        for features in [
            0,
            F_MRG_RXBUF | F_MTU,
            F_MRG_RXBUF | F_EVENT_IDX | F_INDIRECT_DESC | F_MTU | ALL_OFFLOADS,
        ] {
            let mut driver = network.attach(features);
            let first = driver.begin_page();
            driver.post_many(0, 150, 1536);
            let received = first..driver.begin_page();
            let before = snapshot(&driver);
            let log = begin(&mut driver, 2);
            for round in 0..20u8 {
                let longest = if features & F_MRG_RXBUF == 0 {
                    1500
                } else {
                    8000
                };
                let len = 60 + usize::from(round) * (longest - 60) / 20;
                let frame = plain(len, round);
                network.send(&Header::default(), &frame);
                assert_eq!(driver.receive(0).1, frame);
                driver.send(0, &Header::default(), &frame, &[]);
                assert_eq!(network.receive().1, frame);
            }
            if features & ALL_OFFLOADS != 0 {
                // A frame of a few buffers of which the last is filled in part.
                let (header, frame) = tcp(20_000, 7);
                network.send(&tso(header), &frame);
                assert_eq!(driver.receive(0).1.len(), frame.len());
            }
            driver.frontend.get_vring_base(0).unwrap();
            driver.frontend.get_vring_base(1).unwrap();
            compare(&driver, &before, &marks(&log), received, 2);
            driver.check_guards();
        }
    });
}

#[test]
fn answers_to_commands_are_marked() {
    isolated("answers_to_commands_are_marked", || {
        let network = Network::new(&Setup::default());
        let mut driver = Driver::attach(&network.socket, F_CTRL_VQ, 3);
        network.wait_for_link(&mut driver);
        let log = begin(&mut driver, 3);
        let first = driver.begin_page();
        driver.command(2, &[9, 9, 9]);
        let ring = Driver::layout(2).used / PAGE;
        let marks = marks(&log);
        assert!(
            marks.contains(&first) && marks.contains(&ring),
            "{marks:x?}"
        );
    });
}

#[test]
fn a_log_moves_and_is_switched_off_while_frames_arrive() {
    isolated(
        "a_log_moves_and_is_switched_off_while_frames_arrive",
        || {
            let network = Network::new(&Setup::default());
            let mut driver = network.attach(F_MRG_RXBUF | F_EVENT_IDX);
            let first = driver.begin_page();
            driver.post_many(0, 200, 1536);
            let received = first..driver.begin_page();
            let before = snapshot(&driver);
            let mut log = begin(&mut driver, 2);
            let mut all = BTreeSet::new();
            for round in 0..20u8 {
                // The second frame comes while the log moves.
                network.send(&Header::default(), &plain(1000, round));
                assert_eq!(driver.receive(0).1, plain(1000, round));
                network.send(&Header::default(), &plain(1200, round));
                let next = send_log(&mut driver);
                let old = marks(&log);
                assert_eq!(driver.receive(0).1, plain(1200, round));
                network.send(&Header::default(), &plain(100, round));
                assert_eq!(driver.receive(0).1, plain(100, round));
                assert_eq!(marks(&log), old, "marked in a log that was replaced");
                all.extend(old);
                log = next;
            }
            let base = driver.frontend.get_vring_base(0).unwrap();
            driver.frontend.get_vring_base(1).unwrap();
            all.extend(marks(&log));
            compare(&driver, &before, &all, received, 2);
            driver.start(0, base);
            driver.frontend.set_features(driver.features).unwrap();
            let old = marks(&log);
            network.wait_for_link(&mut driver);
            for round in 0..20 {
                network.send(&Header::default(), &plain(1000, round));
                assert_eq!(driver.receive(0).1, plain(1000, round));
            }
            assert_eq!(marks(&log), old, "marked in a log that was switched off");
        },
    );
}

#[test]
fn a_log_that_vanishes_ends_the_connection() {
    isolated("a_log_that_vanishes_ends_the_connection", || {
        let network = Network::new(&Setup::default());
        let mut driver = network.attach(F_MRG_RXBUF);
        driver.post_many(0, 4, 1536);
        let log = begin(&mut driver, 2);
        ftruncate(&log, 0).unwrap();
        let _ = network.try_send(&Header::default(), &plain(60, 1));
        wait_until("disconnected", || driver.frontend.is_closed());
        drop(driver);
        network.attach(F_MRG_RXBUF);
    });
}
