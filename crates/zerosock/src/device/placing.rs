//! At which queue pair a connection begins that the device asks for, and from which port
//! (docs/queue-pairs.md).
//!
//! What must hold: a port decides the pair, so a port that turns out to be taken is replaced by one
//! of the same pair, and what the caller does not see does not fail; how many are looked at is
//! bounded, because a guest may have connections to whichever ports it likes.

use zerosock_proto::vsock::QueuePairs;
use zerosock_proto::{Address, Cid, Port};

use super::Device;
use crate::routing::DeviceAddr;

/// Ports that are looked at before it is said that there is none: enough for several of each pair,
/// of which there are sixteen at most.
pub(crate) const SPARE_PORTS: usize = 256;

impl Device {
    /// The queue_pair where a connection begins whose guest has port `guest`; `None`: here.
    pub(super) fn lane_for(&self, guest: Address, peer: Address) -> Option<DeviceAddr> {
        self.queue_pairs
            .other(u32::from(self.queue_pairs.used.of_flow(guest.port, peer)))
    }

    /// The queue_pair of a connection that the program asks for, and the port that it is from: that matters
    /// to which queue_pair it is only if there are several.
    pub(crate) fn lane_of_app(&self, from: Port, to: Address) -> (DeviceAddr, Port) {
        if self.queue_pairs.used == QueuePairs::ONE {
            return (self.addr, from);
        }
        let from = match from {
            Port::ANY => self.shard.spare_port(),
            from => from,
        };
        let queue_pair = self.lane_for(to, Address::new(Cid::HOST, from));
        (queue_pair.unwrap_or(self.addr), from)
    }

    /// Whether the host's port has a connection with the guest's here.
    pub(crate) fn is_connected(&self, from: Port, to: Address) -> bool {
        self.shard.is_connected(Address::new(Cid::HOST, from), to)
    }

    /// The port from which a connection to `guest` is asked for here, where that is the first choice.
    /// A queue_pair does not see what others have: those who share a worker see to it themselves.
    pub(super) fn port_here(&self, first: Port, guest: Address) -> Port {
        if self.queue_pairs.used == QueuePairs::ONE || !self.is_connected(first, guest) {
            return first;
        }
        let mut spare = std::iter::repeat_with(|| self.shard.spare_port()).take(SPARE_PORTS);
        let fits = |port: &Port| {
            let begins_here = self
                .lane_for(guest, Address::new(Cid::HOST, *port))
                .is_none();
            begins_here && !self.is_connected(*port, guest)
        };
        // The first one is refused, as nothing else is left to be tried.
        spare.find(fits).unwrap_or(first)
    }
}
