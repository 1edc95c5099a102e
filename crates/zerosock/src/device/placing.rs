//! The queue pair and local port of a connection that the device opens (docs/queue-pairs.md).
//!
//! # Invariants
//! - The ports decide the pair: a port in use is replaced by one of the same pair.
//! - The number of ports tried is bounded: a guest may have connections to any of them.

use zerosock_proto::vsock::QueuePairs;
use zerosock_proto::{Address, Cid, Port};

use super::Device;
use zerosock_virtio::outbox::DeviceAddr;

/// Ports tried before the search gives up: several for each of at most sixteen pairs.
pub(crate) const SPARE_PORTS: usize = 256;

impl Device {
    /// The queue pair of a connection to the guest's port `guest`; `None`: this one.
    pub(super) fn queue_pair_for(&self, guest: Address, peer: Address) -> Option<DeviceAddr> {
        self.queue_pairs
            .other(u32::from(self.queue_pairs.used.of_flow(guest.port, peer)))
    }

    /// The queue pair and local port of a connection that the program opens. The port is chosen
    /// here only if there are several pairs, because it decides the pair.
    pub(crate) fn queue_pair_of_app(&self, from: Port, to: Address) -> (DeviceAddr, Port) {
        if self.queue_pairs.used == QueuePairs::ONE {
            return (self.addr, from);
        }
        let from = match from {
            Port::ANY => self.shard.spare_port(),
            from => from,
        };
        let queue_pair = self.queue_pair_for(to, Address::new(Cid::HOST, from));
        (queue_pair.unwrap_or(self.addr), from)
    }

    /// Whether a connection between these addresses exists at this queue pair.
    pub(crate) fn is_connected(&self, from: Port, to: Address) -> bool {
        self.shard.is_connected(Address::new(Cid::HOST, from), to)
    }

    /// The local port of a connection to `guest`: `first` if it is free, else a free port of the
    /// same pair. Connections of other pairs are not visible here; the program checks those on its
    /// worker.
    pub(super) fn port_here(&self, first: Port, guest: Address) -> Port {
        if self.queue_pairs.used == QueuePairs::ONE || !self.is_connected(first, guest) {
            return first;
        }
        let mut spare = std::iter::repeat_with(|| self.shard.spare_port()).take(SPARE_PORTS);
        let fits = |port: &Port| {
            let begins_here = self
                .queue_pair_for(guest, Address::new(Cid::HOST, *port))
                .is_none();
            begins_here && !self.is_connected(*port, guest)
        };
        // No free port was found: connecting from `first` fails.
        spare.find(fits).unwrap_or(first)
    }
}
