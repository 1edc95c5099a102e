//! Shared pages of a process: huge pages where the system has some, ordinary ones otherwise.

use std::fs;
use std::io::Write;
use std::time::Instant;

use super::FOR_EVER;
use super::hub::Hub;
use crate::common;

/// Number of 2 MiB pages that the system reserves.
fn pool() -> u64 {
    let text = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages");
    text.map_or(0, |text| text.trim().parse().unwrap())
}

#[test]
fn huge_pages_are_had_where_there_are_some_and_done_without_where_not() {
    let hub = Hub::with(|builder| builder.hold(FOR_EVER));
    let works = |process| {
        let (ours, theirs) = hub.joined(process);
        (&theirs).write_all(b"through").unwrap();
        let lease = ours.recv().unwrap().unwrap();
        assert!(lease.is_in_place());
        assert_eq!(lease.to_vec(), b"through");
    };
    let ordinary = hub.process_with("ordinary", |builder| builder.huge_pages(false));
    assert!(!ordinary.has_huge_pages());
    works(&ordinary);
    // 17 GiB.
    let greedy = hub.process_with("greedy", |builder| {
        builder.queue_size(32768).receive_buffers(1 << 20)
    });
    assert!(!greedy.has_huge_pages() || pool() >= 8704);
    works(&greedy);
    // The default settings take 9, and other tests run.
    let mut usual = hub.process("usual");
    let pool = pool();
    if pool == 0 {
        assert!(!usual.has_huge_pages());
    }
    if pool >= 128 {
        let give_up = common::deadline();
        while !usual.has_huge_pages() {
            assert!(Instant::now() < give_up, "none of {pool}");
            drop(usual);
            usual = hub.process("usual");
        }
    } else {
        // Written directly, because the harness hides the output of a test that passes.
        let reason = format!("vm.nr_hugepages is {pool}, for half of this it should be 128");
        let _ = writeln!(std::io::stdout(), "\nSKIPPED hugepages: {reason}");
    }
    works(&usual);
}
