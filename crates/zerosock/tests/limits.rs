//! Limits on mapped memory: a peer above its limit is refused, its neighbour continues, and the
//! share is released when the peer leaves.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use crate::common::raw::connect;
use crate::common::{TestDaemon, deadline, eventually, host};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use zerosock::driver::{Frontend, FrontendError};
use zerosock_ring::RegionConfig;
use zerosock_sys::{memfd, reaper};

const MIB: u64 = 1 << 20;

/// A front-end that is about to send its memory.
fn frontend(daemon: &TestDaemon, vm: usize) -> Frontend {
    let mut frontend = connect(&daemon.vms[vm].socket);
    let protocol = VhostUserProtocolFeatures::REPLY_ACK;
    frontend.negotiate(1 << 32, protocol).unwrap();
    frontend
}

/// Sends a table of equal regions that lie one behind the other in one file.
fn send_table(frontend: &mut Frontend, fd: &OwnedFd, regions: u64, len: u64) -> bool {
    let table: Vec<_> = (0..regions)
        .map(|n| RegionConfig {
            guest_addr: n * len,
            user_addr: n * len,
            len,
            fd_offset: n * len,
        })
        .map(|region| (fd.as_fd(), region))
        .collect();
    match frontend.set_mem_table(&table) {
        Ok(()) => true,
        Err(FrontendError::Refused { request, .. }) => {
            assert_eq!(request, "SET_MEM_TABLE");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

fn memory(len: u64) -> OwnedFd {
    memfd::create("limits", len, true).unwrap()
}

/// Half of the address space that a process has.
#[test]
fn a_sparse_file_as_large_as_the_address_space_is_refused_without_effect_on_the_neighbour() {
    const LEN: u64 = 1 << 46;
    let daemon = TestDaemon::with(2, |_| {});
    let _listener = daemon.host_listener(700);
    let file = memory(LEN);
    for regions in [8, 4, 2, 1] {
        let mut greedy = frontend(&daemon, 1);
        assert!(!send_table(&mut greedy, &file, regions, LEN / regions));
        // The whole way: its memory is mapped, its queues started, and a connection is made.
        let mut neighbour = daemon.guest();
        neighbour.wait_connect(host(700), deadline()).unwrap();
    }
    assert!(daemon.stats().unwrap().control_faults >= 4);
}

#[test]
fn memory_is_limited_for_each_vm_and_for_all_and_comes_back() {
    let daemon = TestDaemon::with(2, |config| {
        config.max_memory = 12 * MIB;
        config.max_memory_total = 16 * MIB;
    });
    let file = memory(16 * MIB);
    for _ in 0..3 {
        let mut first = frontend(&daemon, 0);
        assert!(!send_table(&mut first, &file, 2, 7 * MIB), "above its own");
        // It may ask for less.
        assert!(send_table(&mut first, &file, 2, 5 * MIB));
        let mut second = frontend(&daemon, 1);
        assert!(!send_table(&mut second, &file, 1, 7 * MIB), "above all");
        assert!(send_table(&mut second, &file, 1, 6 * MIB));
        drop(first);
        // The device gives its memory up when it sees that the front-end has gone, and the reaper
        // unmaps it.
        let mut third = None;
        eventually("the memory", || {
            assert!(reaper::drain(Duration::from_secs(60)));
            let mut frontend = frontend(&daemon, 0);
            let taken = send_table(&mut frontend, &file, 1, 10 * MIB);
            third = taken.then_some(frontend);
            taken
        });
    }
    // Nothing is left of any of them.
    eventually("all memory", || {
        assert!(reaper::drain(Duration::from_secs(60)));
        let mut frontend = frontend(&daemon, 1);
        send_table(&mut frontend, &file, 1, 12 * MIB)
    });
}

fn page() -> u64 {
    rustix::param::page_size() as u64
}

#[test]
fn a_region_counts_as_the_pages_that_it_takes() {
    let daemon = TestDaemon::with(1, |config| config.max_memory = 2 * page());
    let file = memory(page());
    let mut frontend = frontend(&daemon, 0);
    assert!(!send_table(&mut frontend, &file, 3, 1));
    assert!(send_table(&mut frontend, &file, 2, 1));
}
