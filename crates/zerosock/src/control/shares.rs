//! What all peers of a daemon may use together of what this process has once.

use std::ops::RangeInclusive;

use rustix::process::{Resource, getrlimit};
use zerosock_sys::account::{Budget, Limits};
use zerosock_sys::fd_passing;

use crate::attach::server::MAX_TURNED_AWAY;

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

/// Descriptors of the process itself: what a message may bring before it is counted, processes that
/// are turned away, and event loops, logs, metrics.
const OWN: u64 = fd_passing::RESERVE + MAX_TURNED_AWAY + 66;
/// Descriptors of each VM that are not counted: listeners, and connections of front-ends.
const EACH_VM: u64 = 5;

/// Connections that one peer may have in any case, and at most unless another number is configured.
const CONNECTIONS: RangeInclusive<u64> = 64..=131_072;

/// What there is to share out.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) memory: MemoryLimits,
    /// VMs, and users that attach.
    pub(crate) vms: usize,
    pub(crate) users: usize,
    /// Host programs connect to peers, or peers to host programs: by sockets of the host.
    pub(crate) host_sockets: bool,
    pub(crate) max_connections: Option<usize>,
}

/// How descriptors are shared out among the VMs and the users that attach.
///
/// A connection between a guest and a program of the host is one descriptor. So are the memory and
/// the eventfds that a front-end sends. Connections to other guests, to processes and to the program
/// that embeds the device are none.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Shares {
    /// RLIMIT_NOFILE at the start.
    pub limit: u64,
    /// Those that the process itself needs, among them what a message may bring before it is counted.
    pub reserved: u64,
    /// VMs, and users that may attach, at the start.
    pub peers: u64,
    /// What each of them is guaranteed: half of the rest, divided by their number. VMs that are added
    /// later are guaranteed as many, as far as they are free.
    pub guaranteed: u64,
    /// The other half: what any of them gets beyond that, as long as there are some.
    pub common: u64,
    /// Connections that each of them may have, of all kinds.
    pub max_connections: usize,
}

/// The budget for so many VMs and users that attach.
///
/// RLIMIT_NOFILE, less [`OWN`] and [`EACH_VM`], but a quarter of it at least, is for the peers.
pub(crate) fn budget(wanted: Wanted) -> (Budget, Shares) {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let shares = shares(limit, &wanted);
    let limits = Limits {
        descriptors: limit - shares.reserved,
        mapped: wanted.memory.total,
        mapped_each: wanted.memory.each,
    };
    (Budget::new(limits, wanted.vms + wanted.users), shares)
}

fn shares(limit: u64, wanted: &Wanted) -> Shares {
    let reserve = OWN + EACH_VM * wanted.vms as u64;
    let descriptors = limit.saturating_sub(reserve).max(limit / 4);
    let peers = (wanted.vms + wanted.users) as u64;
    let guaranteed = descriptors / 2 / peers.max(1);
    let common = descriptors - guaranteed * peers;
    let by_descriptors = match wanted.host_sockets {
        true => (guaranteed + common).clamp(*CONNECTIONS.start(), *CONNECTIONS.end()),
        false => *CONNECTIONS.end(),
    };
    Shares {
        limit,
        reserved: limit - descriptors,
        peers,
        guaranteed,
        common,
        max_connections: wanted.max_connections.unwrap_or(by_descriptors as usize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(limit: u64, host_sockets: bool, max_connections: Option<usize>) -> Shares {
        let wanted = Wanted {
            memory: MemoryLimits::default(),
            vms: 3,
            users: 1,
            host_sockets,
            max_connections,
        };
        shares(limit, &wanted)
    }

    #[test]
    fn the_cap_on_connections_fits_the_descriptors_that_one_peer_can_have() {
        let shares = of(OWN + 3 * EACH_VM + 1000, true, None);
        assert_eq!(shares.reserved, OWN + 3 * EACH_VM);
        let Shares {
            peers,
            guaranteed,
            common,
            max_connections,
            ..
        } = shares;
        assert_eq!((peers, guaranteed, common), (4, 125, 500));
        assert_eq!(max_connections, 625);
        // They need no descriptors, or the number is configured.
        assert_eq!(of(1024, false, None).max_connections, 131_072);
        assert_eq!(of(1024, true, Some(7)).max_connections, 7);
        // Within bounds.
        assert_eq!(of(1 << 30, true, None).max_connections, 131_072);
        assert_eq!(of(64, true, None).max_connections, 64);
    }

    #[test]
    fn the_shares_are_those_of_the_budget() {
        let wanted = Wanted {
            memory: MemoryLimits::default(),
            vms: 5,
            users: 2,
            host_sockets: true,
            max_connections: None,
        };
        let (budget, shares) = budget(wanted);
        assert_eq!(budget.share(), shares.guaranteed);
        assert_eq!(
            budget.limits().descriptors,
            shares.guaranteed * shares.peers + shares.common
        );
    }
}
