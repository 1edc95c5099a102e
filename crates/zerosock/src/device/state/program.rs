//! State of the embedding program that its devices share: its table of connections, listeners,
//! and counters.
//!
//! # Invariants
//! - A pool of the table belongs to at most one device at a time.
//! - A connection that waits to be accepted waits on one port.

use std::collections::VecDeque;
use std::sync::Arc;

use slab::Slab;
use zerosock_proto::vsock::datagram::DatagramTable;
use zerosock_proto::vsock::{PortTable, RefuseReason};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Cid, Port};
use zerosock_ring::Chain;

use super::loans::Loan;
use crate::table::inboxes::Inboxes;
use crate::table::leases::Leases;
use crate::table::sockets::{ReadyFlag, Sockets, StreamId, StreamState};

/// Marks an unused entry of `loan_keys`.
const NONE: u32 = u32::MAX;

/// A chain that the program holds.
#[derive(Debug)]
pub(crate) struct HostToken {
    pub(crate) chain: Chain,
    /// The number of the device.
    pub(crate) vm: u32,
    /// The epoch of the transmit queue that the chain belongs to.
    pub(in crate::device) epoch: u32,
}

/// Traffic counters; no atomics, because only the program's thread counts.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) packets_received: u64,
    pub(crate) packets_sent: u64,
    pub(crate) sent: u64,
    pub(crate) sent_in_place: u64,
    pub(crate) copied_in: u64,
    pub(crate) notifications: u64,
}

/// A port that the program listens on.
#[derive(Debug)]
pub(in crate::device) struct Listener {
    port: Port,
    pub(in crate::device) socket_type: SocketType,
    pub(in crate::device) backlog: usize,
    /// Receive buffer of accepted connections in bytes, if it differs from the device's default.
    pub(in crate::device) buffer: Option<u32>,
    pub(in crate::device) waiting: VecDeque<StreamId>,
    /// Listed in `App::ready_ports`.
    in_ready_ports: bool,
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
    listeners: Vec<Listener>,
    /// Ports that sockets have bound without listening.
    bound: PortTable,
    ready_ports: VecDeque<Port>,
    /// The device number of each pool.
    pub(crate) pools: Vec<Option<u32>>,
    pub(in crate::device) loans: Slab<Loan>,
    /// Key in `loans`, by index of the loan's slot in the lease table.
    pub(in crate::device) loan_keys: Box<[u32]>,
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
        let capacity = leases.capacity();
        App {
            sockets: Sockets::new(leases, hold, most_copied),
            inboxes: Inboxes::new(DatagramTable::new(Cid::HOST)),
            trust_processes,
            listeners: Vec::new(),
            bound: PortTable::new(),
            ready_ports: VecDeque::new(),
            pools: Vec::new(),
            loans: Slab::new(),
            loan_keys: vec![NONE; capacity].into_boxed_slice(),
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

    pub(in crate::device) fn listener(&mut self, port: Port) -> Option<&mut Listener> {
        self.listeners.iter_mut().find(|l| l.port == port)
    }

    pub(crate) fn listens(&self, port: Port) -> bool {
        self.listeners.iter().any(|l| l.port == port)
    }

    /// Binds a port that is neither bound nor listened on, any if `port` is [`Port::ANY`]. Returns
    /// the port; `None` if it is in use.
    pub(crate) fn bind(&mut self, port: Port) -> Option<Port> {
        if self.listens(port) {
            return None;
        }
        if port != Port::ANY {
            return self.bound.bind(of_host(port));
        }
        loop {
            // Terminates: there are more ports than listeners.
            let port = self.bound.bind(of_host(Port::ANY))?;
            if !self.listens(port) {
                return Some(port);
            }
            self.bound.unbind(of_host(port));
        }
    }

    pub(crate) fn unbind(&mut self, port: Port) {
        self.bound.unbind(of_host(port));
    }

    /// Sets the receive buffer of connections accepted on `port` from now on.
    pub(crate) fn set_accept_buffer(&mut self, port: Port, bytes: u32) {
        if let Some(listener) = self.listener(port) {
            listener.buffer = Some(bytes);
        }
    }

    /// Listens on `port`. Returns false if the port is in use.
    pub(crate) fn listen(&mut self, port: Port, backlog: usize, socket_type: SocketType) -> bool {
        // Binding succeeds only if the port is free.
        if self.bind(port).is_none() {
            return false;
        }
        self.unbind(port);
        self.listeners.push(Listener {
            port,
            socket_type,
            backlog,
            buffer: None,
            waiting: VecDeque::new(),
            in_ready_ports: false,
        });
        true
    }

    /// Closes a listener and returns the connections that wait there, which the caller resets.
    pub(crate) fn unlisten(&mut self, port: Port) -> VecDeque<StreamId> {
        match self.listeners.iter().position(|l| l.port == port) {
            Some(at) => self.listeners.swap_remove(at).waiting,
            None => VecDeque::new(),
        }
    }

    pub(crate) fn has_waiting(&self, port: Port) -> bool {
        let listener = self.listeners.iter().find(|l| l.port == port);
        listener.is_some_and(|l| !l.waiting.is_empty())
    }

    pub(crate) fn accept(&mut self, port: Port) -> Option<StreamId> {
        self.listener(port)?.waiting.pop_front()
    }

    /// The next port on which a new connection waits.
    pub(crate) fn next_port(&mut self) -> Option<Port> {
        loop {
            let port = self.ready_ports.pop_front()?;
            let Some(listener) = self.listener(port) else {
                continue;
            };
            listener.in_ready_ports = false;
            if !listener.waiting.is_empty() {
                return Some(port);
            }
        }
    }

    pub(in crate::device) fn queue_for_accept(&mut self, port: Port, id: StreamId) {
        let Some(listener) = self.listener(port) else {
            return;
        };
        listener.waiting.push_back(id);
        if !std::mem::replace(&mut listener.in_ready_ports, true) {
            self.ready_ports.push_back(port);
        }
    }

    /// Records how a connection has ended; received bytes can still be read.
    pub(in crate::device) fn ended(&mut self, id: StreamId, orderly: bool) {
        let Some(conn) = self.sockets.get_mut(id) else {
            return;
        };
        conn.flow = None;
        let flag = match conn.state {
            StreamState::Connecting => {
                // Without an RST: the device has lost its guest.
                conn.refused.get_or_insert(RefuseReason::TransportReset);
                ReadyFlag::Refused
            }
            _ => ReadyFlag::Closed,
        };
        conn.state = if orderly {
            StreamState::Finished
        } else {
            StreamState::Reset
        };
        self.sockets.set_ready(id, flag);
    }
}
