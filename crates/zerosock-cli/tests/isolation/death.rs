//! The death of a VM with a lot of memory.

use super::daemon::Daemon;
use super::large_vm::{LargeVm, MEMORY, no_memory};
use super::neighbour::Neighbour;
use super::process::wait_until;
use super::threads::{Held, REAPER};

/// The reaper is delayed before it unmaps, so that all memory is still mapped while the neighbour
/// makes progress.
#[test]
fn memory_of_a_vm_that_died_is_freed_by_the_reaper_only() {
    if let Some(reason) = no_memory() {
        return println!("SKIPPED memory_of_a_vm_that_died: {reason}");
    }
    let daemon = Daemon::start(&[]);
    let mut neighbour = Neighbour::new(&daemon);
    let (vm, receivers) = LargeVm::start(&daemon).use_up_reaper(&daemon);
    let held = Held::wait(daemon.pid(), REAPER);
    let mapping = vm.die(&daemon);
    neighbour.goes_on_while(&daemon, &held);
    assert!(
        mapping.size() >= MEMORY,
        "{mapping:?}: unmapped by another thread"
    );
    drop(receivers);
    wait_until("the memory to be unmapped", || {
        neighbour.round_trip(1);
        neighbour.ask_features();
        mapping.size() == 0
    });
}
