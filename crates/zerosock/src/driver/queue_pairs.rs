//! The driver's queue pairs (docs/queue-pairs.md), each with its two queues, its slots and a shard
//! of the protocol core.
//!
//! # Invariants
//! A connection belongs to one queue pair. Its received bytes lie in slots of the pool with the
//! same number.

use std::collections::VecDeque;
use std::ops::{Index, IndexMut};

use zerosock_proto::vsock::pairs::{rx_queue, tx_queue};
use zerosock_proto::vsock::{ConnectError, QueuePairs, Shard};
use zerosock_proto::wire::vsock::Repr;
use zerosock_proto::{Address, Cid, Port};
use zerosock_ring::AddError;

use super::arena::PairSlots;
use super::queues::{RxQueue, TxQueue};
use crate::device::placing::SPARE_PORTS;
use crate::header;
use crate::table::coalesced::CoalescedWrites;
use crate::table::flows::Flows;
use crate::table::outgoing::Outgoing;
use crate::table::sockets::Waiters;

/// Identifies a queue pair of a driver.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct QueuePairId(u16);

impl QueuePairId {
    /// The only pair, unless several were negotiated.
    pub(crate) const FIRST: QueuePairId = QueuePairId(0);

    /// The queue pair with the slots of `pool`.
    #[inline]
    pub(crate) fn of_pool(pool: u32) -> QueuePairId {
        // Pools and queue pairs have the same numbers.
        QueuePairId(pool as u16)
    }

    /// The pool of its slots in the table of connections.
    #[inline]
    pub(crate) fn pool(self) -> u32 {
        self.0.into()
    }

    /// Its number.
    pub(crate) fn pair(self) -> u16 {
        self.0
    }

    /// The index of its receive queue.
    pub(crate) fn rx(self) -> usize {
        rx_queue(self.0).into()
    }

    /// The index of its transmit queue.
    pub(crate) fn tx(self) -> usize {
        tx_queue(self.0).into()
    }
}

/// A receive slot of a queue pair that holds a packet.
#[derive(Copy, Clone, Debug)]
pub(crate) struct RxSlot {
    pub(crate) queue_pair: QueuePairId,
    pub(crate) slot: u16,
}

/// One queue pair. See the module documentation.
#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(super) rx: RxQueue,
    pub(super) tx: TxQueue,
    pub(super) slots: PairSlots,
    pub(super) shard: Shard,
    pub(super) flows: Flows,
    /// Connections that wait for a transmit slot.
    pub(super) waiters: Waiters,
    /// Partly sent messages that wait for slots.
    pub(super) outgoing: VecDeque<Outgoing>,
    /// Transmit slots on loan for connections.
    pub(super) lent: u16,
    /// Coalesced small writes.
    pub(super) coalesced: CoalescedWrites,
    /// Packets wait in the ring because of the limits on held buffers, and no notification was
    /// requested.
    pub(super) blocked: bool,
}

impl QueuePair {
    pub(super) fn new(rx: RxQueue, tx: TxQueue, slots: PairSlots, shard: Shard) -> QueuePair {
        QueuePair {
            rx,
            tx,
            slots,
            shard,
            flows: Flows::default(),
            waiters: Waiters::default(),
            outgoing: VecDeque::new(),
            lent: 0,
            coalesced: CoalescedWrites::default(),
            blocked: false,
        }
    }

    /// Writes the header into slot `slot`, which has the payload, and queues the packet.
    #[inline(always)] // keeps the header in registers
    pub(super) fn send(&mut self, slot: u16, repr: &Repr) -> Result<(), AddError> {
        let slots = &self.slots;
        if let Some(packet) = slots.tx_packets.slice(&slots.memory, slot) {
            header::store(packet, repr);
        }
        self.tx.push(slot)
    }

    /// Prefetches the slot that will be used a few packets later.
    #[inline]
    pub(super) fn prefetch_free(&self) {
        if let Some(later) = self.tx.next_free() {
            self.slots
                .tx_packets
                .prefetch_write(&self.slots.memory, later);
        }
    }

    /// Whether a sender waits for transmit slots.
    #[inline]
    pub(super) fn wants_slots(&self) -> bool {
        !self.waiters.is_empty() || !self.outgoing.is_empty() || self.shard.has_transmit()
    }
}

/// All queue pairs of a driver. The first is stored separately: most drivers have only one, and
/// access to it needs no bounds check.
#[derive(Debug)]
pub(crate) struct QueuePairSet {
    first: QueuePair,
    others: Vec<QueuePair>,
}

impl QueuePairSet {
    /// `others` are the second pair and so on.
    pub(super) fn new(first: QueuePair, others: Vec<QueuePair>) -> QueuePairSet {
        QueuePairSet { first, others }
    }

    /// The number of queue pairs.
    #[inline]
    pub(super) fn len(&self) -> usize {
        1 + self.others.len()
    }

    /// The ids of all pairs; borrows nothing, so the pairs may change meanwhile.
    #[inline]
    pub(super) fn ids(&self) -> impl Iterator<Item = QueuePairId> + use<> {
        (0..self.len() as u16).map(QueuePairId)
    }

    /// Chooses the queue pair and the local port of a connection from `cid` to `peer`. With several
    /// pairs, the queue pair depends on the port. No other connection on any pair has the same two
    /// addresses.
    pub(super) fn place(
        &self,
        cid: Cid,
        port: Port,
        peer: Address,
    ) -> Result<(QueuePairId, Port), ConnectError> {
        let pairs = QueuePairs::new(self.len() as u16).unwrap_or(QueuePairs::ONE);
        if pairs == QueuePairs::ONE {
            return Ok((QueuePairId::FIRST, port));
        }
        for _ in 0..SPARE_PORTS {
            let from = match port {
                Port::ANY => self.first.shard.spare_port(),
                port => port,
            };
            let local = Address::new(cid, from);
            if !self.iter().any(|pair| pair.shard.is_connected(local, peer)) {
                return Ok((QueuePairId(pairs.of_flow(from, peer)), from));
            }
            if port != Port::ANY {
                break;
            }
        }
        Err(ConnectError::InUse)
    }

    #[inline]
    pub(super) fn iter(&self) -> impl Iterator<Item = &QueuePair> {
        std::iter::once(&self.first).chain(&self.others)
    }

    #[inline]
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut QueuePair> {
        std::iter::once(&mut self.first).chain(&mut self.others)
    }
}

/// Ids exist only for existing pairs, which are never removed.
impl Index<QueuePairId> for QueuePairSet {
    type Output = QueuePair;

    #[inline(always)] // every packet
    fn index(&self, queue_pair: QueuePairId) -> &QueuePair {
        match queue_pair.0 {
            0 => &self.first,
            other => &self.others[usize::from(other) - 1],
        }
    }
}

impl IndexMut<QueuePairId> for QueuePairSet {
    #[inline(always)] // every packet
    fn index_mut(&mut self, queue_pair: QueuePairId) -> &mut QueuePair {
        match queue_pair.0 {
            0 => &mut self.first,
            other => &mut self.others[usize::from(other) - 1],
        }
    }
}
