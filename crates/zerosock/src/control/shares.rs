//! How descriptors and mapped memory of this process are divided among all peers.

use std::fmt;
use std::ops::RangeInclusive;

use rustix::process::{Resource, getrlimit};
use zerosock_sys::account::{Budget, Limits, MAX_DEFERRED};
use zerosock_sys::fd_passing;

use crate::attach::server::MAX_TURNED_AWAY;

/// Bytes of memory that peers may have mapped here.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct MemoryLimits {
    /// Limit of one VM, or of all processes of one user.
    pub(crate) each: u64,
    /// Limit of all peers together.
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

/// Descriptors for the process itself: event loops, logs and metrics.
const OWN: u64 = 66;
/// Descriptors of each VM that are not counted: listeners, front-end connections, and those of a
/// worker.
const EACH_VM: u64 = 8;
/// Fewest descriptors that are reserved for messages. One peer may send a message with descriptors
/// that cannot be closed when it has some already; then a message of another one can still be
/// received.
const LEAST_MESSAGES: u64 = 2 * (fd_passing::RESERVE + MAX_DEFERRED as u64);
/// Fewest descriptors that a peer is guaranteed: those of a front-end with one queue pair.
const LEAST_GUARANTEED: u64 = 16;

/// Bounds of the default limit of connections per peer.
const CONNECTIONS: RangeInclusive<u64> = 64..=131_072;

/// The configuration that determines the shares.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) memory: MemoryLimits,
    /// VMs, and users that may attach.
    pub(crate) vms: usize,
    pub(crate) users: usize,
    /// Whether guests or processes and host programs connect to each other by sockets of the host.
    pub(crate) host_sockets: bool,
    pub(crate) max_connections: Option<usize>,
}

/// How descriptors are shared out among the VMs and the users that attach.
///
/// Each connection between a guest and a program of the host needs one descriptor, as does each
/// memory region and eventfd that a front-end sends. Connections to other guests, to processes and
/// to the embedding program need none.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Shares {
    /// RLIMIT_NOFILE at the start.
    pub limit: u64,
    /// Lowest RLIMIT_NOFILE with which the reserve is complete and each peer is guaranteed the
    /// descriptors of a front-end. Below it, descriptors can run out, and closing those that the
    /// kernel then discards can block threads.
    pub minimum: u64,
    /// Descriptors for the process itself, including those received but not yet counted.
    pub reserved: u64,
    /// VMs, and users that may attach, at the start.
    pub peers: u64,
    /// Descriptors guaranteed to each peer: half of the rest, divided by the number of peers. VMs
    /// added later get the same guarantee as far as descriptors are free.
    pub guaranteed: u64,
    /// The other half, which any peer may use beyond its guarantee while some are free.
    pub common: u64,
    /// Limit of connections of each peer, of all kinds.
    pub max_connections: usize,
}

/// All counters, as `name=value`, on one line.
impl fmt::Display for Shares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "limit={} minimum={} reserved={} peers={} guaranteed={} common={} max_connections={}",
            self.limit,
            self.minimum,
            self.reserved,
            self.peers,
            self.guaranteed,
            self.common,
            self.max_connections,
        )
    }
}

/// The budget and the shares for this configuration.
///
/// Peers share RLIMIT_NOFILE less [`reserve`]; a quarter of it if it is below [`Shares::minimum`].
pub(crate) fn budget(wanted: Wanted) -> (Budget, Shares) {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let shares = shares(limit, &wanted);
    let limits = Limits {
        descriptors: limit - shares.reserved,
        numbers: limit.saturating_sub(OWN),
        mapped: wanted.memory.total,
        mapped_each: wanted.memory.each,
    };
    (Budget::new(limits, wanted.vms + wanted.users), shares)
}

/// Descriptors that are not shared: those of the process itself and of each VM, connections of
/// processes that are turned away, and descriptors that are received and not counted. There is room
/// for a message of each peer and one more, in an eighth of the limit, or [`LEAST_MESSAGES`].
fn reserve(limit: u64, vms: u64, peers: u64) -> u64 {
    let messages = (fd_passing::RESERVE * (peers + 1)).min(limit / 8);
    fixed(vms) + messages.max(LEAST_MESSAGES)
}

/// The part of the reserve that is not for messages.
fn fixed(vms: u64) -> u64 {
    OWN + MAX_TURNED_AWAY + EACH_VM * vms
}

/// See [`Shares::minimum`].
fn minimum(vms: u64, peers: u64) -> u64 {
    // Half of the descriptors of the peers is guaranteed.
    let others = fixed(vms) + 2 * LEAST_GUARANTEED * peers;
    // The reserve for messages is the larger of a number and of an eighth of the limit at most.
    (others + LEAST_MESSAGES).max(others + (others - 1) / 7)
}

fn shares(limit: u64, wanted: &Wanted) -> Shares {
    let (vms, users) = (wanted.vms as u64, wanted.users as u64);
    let peers = vms + users;
    let minimum = minimum(vms, peers);
    let descriptors = match limit >= minimum {
        true => limit - reserve(limit, vms, peers),
        false => limit / 4,
    };
    let guaranteed = descriptors / 2 / peers.max(1);
    let common = descriptors - guaranteed * peers;
    let by_descriptors = match wanted.host_sockets {
        true => (guaranteed + common).clamp(*CONNECTIONS.start(), *CONNECTIONS.end()),
        false => *CONNECTIONS.end(),
    };
    Shares {
        limit,
        minimum,
        reserved: limit - descriptors,
        peers,
        guaranteed,
        common,
        max_connections: wanted.max_connections.unwrap_or(by_descriptors as usize),
    }
}

#[cfg(test)]
#[path = "shares_tests.rs"]
mod tests;
