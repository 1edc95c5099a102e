//! What all peers of a daemon may use together of what this process has once.

use rustix::process::{Resource, getrlimit};
use zerosock_sys::account::{Budget, Limits};
use zerosock_sys::fd_passing;

/// Bytes of memory that peers may have mapped here.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct MemoryLimits {
    /// One VM, or all processes of one user.
    pub(crate) each: u64,
    /// All together.
    pub(crate) total: u64,
}

impl Default for MemoryLimits {
    fn default() -> MemoryLimits {
        MemoryLimits {
            each: 1 << 40,
            total: 64 << 40,
        }
    }
}

/// Descriptors of the process itself: what a message may bring before it is counted, and event
/// loops, logs, metrics.
const OWN: u64 = fd_passing::RESERVE + 66;
/// Descriptors of each VM that are not counted: listeners, and connections of front-ends.
const EACH_VM: u64 = 5;

/// The budget for so many VMs and users whose processes attach.
///
/// RLIMIT_NOFILE, less [`OWN`] and [`EACH_VM`], but a quarter of it at least, is for the peers.
pub(crate) fn budget(memory: MemoryLimits, vms: usize, users: usize) -> Budget {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let reserve = OWN + EACH_VM * vms as u64;
    let limits = Limits {
        descriptors: limit.saturating_sub(reserve).max(limit / 4),
        mapped: memory.total,
        mapped_each: memory.each,
    };
    Budget::new(limits, vms + users)
}
