//! State of the embedding program that its devices share: its table of connections, listeners,
//! and counters.
//!
//! # Invariants
//! A pool of the table belongs to at most one device at a time.

use std::sync::Arc;

use zerosock_proto::vsock::PortTable;
use zerosock_proto::vsock::datagram::DatagramTable;
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Cid, Port};
use zerosock_ring::Chain;

use crate::table::inboxes::Inboxes;
use crate::table::leases::Leases;
use crate::table::listeners::Listeners;
use crate::table::loans::Loans;
use crate::table::sockets::Sockets;
use crate::table::tally::Tally;

/// A chain that the program holds.
#[derive(Debug)]
pub(crate) struct HostToken {
    pub(crate) chain: Chain,
    /// The number of the device.
    pub(crate) vm: u32,
    /// The epoch of the transmit queue that the chain belongs to.
    pub(in crate::device) epoch: u32,
}

fn of_host(port: Port) -> Address {
    Address::new(Cid::HOST, port)
}

/// The program's state for all devices of a worker.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) sockets: Sockets<HostToken>,
    pub(crate) inboxes: Inboxes,
    /// Readers may get plain slices of memory that processes share.
    pub(crate) trust_processes: bool,
    pub(crate) listeners: Listeners,
    /// Ports that sockets have bound without listening.
    bound: PortTable,
    /// The device number of each pool.
    pub(crate) pools: Vec<Option<u32>>,
    pub(crate) loans: Loans<Chain>,
    pub(crate) tally: Tally,
}

impl App {
    /// For each device, chains are held for at most `hold` and at most `most_copied` bytes are
    /// copied.
    pub(crate) fn new(
        leases: Arc<Leases>,
        hold: std::time::Duration,
        most_copied: usize,
        trust_processes: bool,
    ) -> App {
        App {
            sockets: Sockets::new(leases, hold, most_copied),
            inboxes: Inboxes::new(DatagramTable::new(Cid::HOST)),
            trust_processes,
            listeners: Listeners::default(),
            bound: PortTable::new(),
            pools: Vec::new(),
            loans: Loans::default(),
            tally: Tally::default(),
        }
    }

    /// The device with its buffers in `pool`.
    #[inline]
    pub(crate) fn device_of(&self, pool: u32) -> Option<u32> {
        *self.pools.get(pool as usize)?
    }

    pub(in crate::device) fn take_pool(&mut self, vm: u32) -> u32 {
        let free = self.pools.iter().position(Option::is_none);
        let pool = match free {
            Some(pool) => pool as u32,
            None => {
                self.pools.push(None);
                self.sockets.add_pool(1)
            }
        };
        if let Some(place) = self.pools.get_mut(pool as usize) {
            *place = Some(vm);
        }
        pool
    }

    pub(in crate::device) fn free_pool(&mut self, pool: u32) {
        if let Some(place) = self.pools.get_mut(pool as usize) {
            *place = None;
            self.sockets.lease_copies(pool, false);
            self.sockets.trust_pool(pool, false);
        }
    }

    /// Binds a port that is neither bound nor listened on, any if `port` is [`Port::ANY`]. Returns
    /// the port; `None` if it is in use.
    pub(crate) fn bind(&mut self, port: Port) -> Option<Port> {
        if self.listeners.contains(port) {
            return None;
        }
        if port != Port::ANY {
            return self.bound.bind(of_host(port));
        }
        loop {
            // Terminates: there are more ports than listeners.
            let port = self.bound.bind(of_host(Port::ANY))?;
            if !self.listeners.contains(port) {
                return Some(port);
            }
            self.bound.unbind(of_host(port));
        }
    }

    pub(crate) fn unbind(&mut self, port: Port) {
        self.bound.unbind(of_host(port));
    }

    /// Listens on `port`. Returns false if the port is in use.
    pub(crate) fn listen(&mut self, port: Port, backlog: usize, socket_type: SocketType) -> bool {
        // Binding succeeds only if the port is free.
        if self.bind(port).is_none() {
            return false;
        }
        self.unbind(port);
        self.listeners.add(port, backlog, socket_type);
        true
    }

    /// Removes a loan whose buffer and credit have gone with its device.
    pub(crate) fn forget_loan(&mut self, index: u32) {
        if self.loans.forget(index) {
            self.sockets.end_loan(index);
        }
    }
}
