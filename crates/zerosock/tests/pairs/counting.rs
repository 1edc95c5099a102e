//! The counters of a device with several queue pairs are those of one device.

use std::os::unix::net::UnixStream;
use std::thread;

use zerosock::daemon::DaemonConfig;
use zerosock_proto::vsock::pairs::tx_queue;
use zerosock_proto::vsock::{Directions, QueuePairs};

use super::guest::{PairsGuest, until};
use crate::common::raw::{RawGuest, connect};
use crate::common::{TestDaemon, connect_guest, eventually};

const PORT: u32 = 7000;
const PAIRS: u16 = 3;

fn tune(config: &mut DaemonConfig) {
    config.workers = 2;
    config.queue_pairs = PAIRS;
}

fn ports_now(daemon: &TestDaemon) -> u64 {
    daemon.stats().map_or(u64::MAX, |stats| stats.ports_now)
}

#[test]
fn each_port_counts_once_and_is_gone_with_its_connection() {
    const CONNECTIONS: usize = 24;
    let daemon = TestDaemon::with(1, tune);
    let mut guest = PairsGuest::attach(&daemon.vms[0].socket, PAIRS, PORT);
    let mut programs: Vec<UnixStream> = Vec::new();
    for count in 1..=CONNECTIONS {
        let path = daemon.uds_path();
        let program = thread::spawn(move || connect_guest(&path, PORT).unwrap());
        until(&mut [&mut guest], |guests| {
            guests[0].conns.len() == count && program.is_finished()
        });
        programs.push(program.join().unwrap());
    }
    until(&mut [&mut guest], |_| {
        ports_now(&daemon) == CONNECTIONS as u64
    });
    // Either side closes them, in another order than they were opened.
    for (conn, program) in programs.into_iter().enumerate().rev() {
        match conn % 2 {
            0 => drop(program),
            _ => guest.shutdown(conn, Directions::BOTH),
        }
    }
    until(&mut [&mut guest], |_| ports_now(&daemon) == 0);
}

/// All queue pairs detect that the memory has vanished; the lost device is counted once.
#[test]
fn a_lost_device_counts_once() {
    let three = QueuePairs::new(PAIRS).unwrap();
    let daemon = TestDaemon::with(1, tune);
    if daemon.stats().is_none() {
        return;
    }
    for lost in 1..=10 {
        let mut guest = RawGuest::with_pairs(connect(&daemon.vms[0].socket), false, three);
        rustix::fs::ftruncate(&guest.fd, 0).unwrap();
        for pair in 0..PAIRS {
            guest.kick(tx_queue(pair).into());
        }
        // The device is free for the next front-end when all of its queue pairs have answered.
        let answered = |guest: &mut RawGuest| guest.frontend.get_features().is_ok();
        eventually("disconnected", || !answered(&mut guest));
        drop(guest);
        drop(RawGuest::with_pairs(
            connect(&daemon.vms[0].socket),
            true,
            three,
        ));
        assert_eq!(daemon.stats().unwrap().devices_lost, lost);
    }
}
