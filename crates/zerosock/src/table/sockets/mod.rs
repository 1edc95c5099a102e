//! The connections of an endpoint, independent of the half of the virtqueues: unread bytes, leases,
//! readiness.
//!
//! Received bytes lie in the buffers of a [`Pool`] (a device's transmit queue, a driver's receive
//! queue), each identified by a token of the backend. A connection is an ordered list of
//! [`ReceivedPart`]s: held buffers and copies. `parts` stores and reads them, `messages` adds
//! message boundaries, `lent` manages leases, `bounds` limits the number and age of held buffers,
//! `readiness` reports changed connections, `room` tracks connections that wait to send. This file adds
//! and removes connections. The types of which the table consists are in `ids`, `received`, `lent_entry`
//! and `pool`; `store` is what it asks of the backend.
//!
//! # Invariants
//! - Every token is returned to the backend exactly once ([`Store::release`]), except for buffers
//!   of a trusted peer that is gone (see [`Sockets::recall`]).
//! - Every byte is reported as consumed once, when its reader is done with it, because that gives
//!   the sender credit.
//! - Bytes keep their order.

mod arrival;
mod bounds;
mod events;
mod ids;
mod lent;
mod lent_entry;
mod message_end;
mod messages;
mod parts;
mod pool;
mod readiness;
mod received;
mod room;
mod store;

use std::collections::{TryReserveError, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::Address;
use zerosock_proto::vsock::{FlowId, RefuseReason};
use zerosock_proto::wire::vsock::SocketType;

use super::leases::{Leases, NONE};
pub(crate) use super::places::{BufferPlace, Copied, LeaseParts, NoLease, PIECES};
use crate::table::transfers::RecvFault;
pub(crate) use arrival::{Arrival, Shown};
pub use ids::{StreamId, StreamState};
use lent_entry::LentEntry;
pub(crate) use message_end::MessageEnd;
pub use messages::Received;
use pool::Pool;
pub(crate) use received::{HeldBuffer, Messages, ReceivedPart};
pub(crate) use room::Waiters;
pub(crate) use store::Store;

/// One connection.
#[derive(Debug)]
pub(crate) struct Conn<T> {
    generation: u32,
    used: bool,
    /// Its readiness has changed and was not reported.
    ready: bool,
    /// The index is in the ready list. Outlives the connection, so that an index is never listed
    /// twice.
    listed: bool,
    /// The pool of its receive buffers.
    pub(crate) pool: u32,
    /// The flow of the protocol core; `None` when it has ended.
    pub(crate) flow: Option<FlowId>,
    pub(crate) state: StreamState,
    /// Why the connect failed, if it did.
    pub(crate) refused: Option<RefuseReason>,
    pub(crate) local: Address,
    pub(crate) peer: Address,
    /// The peer shut down sending.
    pub(crate) peer_send_shutdown: bool,
    /// The peer shut down receiving.
    pub(crate) peer_recv_shutdown: bool,
    /// This side shut down sending.
    pub(crate) send_shutdown: bool,
    /// This side shut down receiving (SHUT_RD): nothing is unread, and arriving bytes are
    /// discarded. Set by [`Sockets::shutdown_recv`].
    recv_shutdown: bool,
    /// A send found no room; the connection becomes writable when there is some.
    pub(crate) wants_room: bool,
    /// Message boundaries, if the connection carries messages.
    messages: Option<Box<Messages>>,
    parts: VecDeque<ReceivedPart<T>>,
    /// Received bytes not read yet; leased bytes count as read.
    unread: usize,
    /// Bytes read since the connection was established; leased bytes count as read.
    taken: u64,
    /// Fewer unread bytes do not make the connection readable; at least 1.
    low_water: u32,
    /// Unread buffers held.
    held: u32,
    /// Leases in place.
    leased: u32,
    /// Unread bytes in copies.
    copied: usize,
    /// Leases, including copies.
    lent: u32,
    /// Its unread buffers were copied because they were held too long; arriving bytes are copied
    /// until it has read all.
    stalled: bool,
    /// Its parts must not be joined: each is a datagram.
    whole: bool,
    /// Its position in the pool's list of holders.
    holder: u32,
}

/// All connections of an endpoint.
#[derive(Debug)]
pub(crate) struct Sockets<T> {
    conns: Vec<Conn<T>>,
    free: Vec<u32>,
    /// Indices of connections whose readiness has changed, oldest first; at most one entry for each.
    ready_list: VecDeque<u32>,
    pools: Vec<Pool>,
    hold: Duration,
    /// Limit on the copied bytes of all connections of a pool.
    max_copied: usize,
    /// A pool exceeds that limit.
    over_copy_limit: bool,
    lease_table: Arc<Leases>,
    lent: Vec<LentEntry<T>>,
    free_lent: Vec<u32>,
    counted: Counted,
}

/// Byte counters over all connections.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Counted {
    /// Bytes received, in place or copied.
    pub(crate) received: u64,
    /// Received bytes copied because of the limits on held buffers.
    pub(crate) copied_aside: u64,
    /// Bytes passed out on leases in place.
    pub(crate) leased: u64,
    /// Bytes copied to the caller by copying calls.
    pub(crate) copied_out: u64,
}

impl<T> Sockets<T> {
    /// An empty table. Unread and leased buffers are copied after `hold`; connections are reset
    /// when a pool has more than `max_copied` bytes of unread copies.
    pub(crate) fn new(lease_table: Arc<Leases>, hold: Duration, max_copied: usize) -> Sockets<T> {
        Sockets {
            conns: Vec::new(),
            free: Vec::new(),
            ready_list: VecDeque::new(),
            pools: Vec::new(),
            hold,
            max_copied,
            over_copy_limit: false,
            free_lent: (0..lease_table.capacity() as u32).rev().collect(),
            lent: (0..lease_table.capacity())
                .map(|_| LentEntry::default())
                .collect(),
            lease_table,
            counted: Counted::default(),
        }
    }

    pub(crate) fn counted(&self) -> Counted {
        self.counted
    }

    /// The lease table shared with the holders.
    pub(crate) fn lease_table(&self) -> &Arc<Leases> {
        &self.lease_table
    }

    /// Adds a connection with buffers from `pool`.
    pub(crate) fn insert(
        &mut self,
        pool: u32,
        flow: FlowId,
        state: StreamState,
        local: Address,
        peer: Address,
        socket_type: SocketType,
    ) -> StreamId {
        let id = self.add(pool, Some(flow), state, local, peer);
        if socket_type == SocketType::SeqPacket {
            self.carry_messages(id);
        }
        id
    }

    /// Adds an internal connection for the datagrams that one socket receives in buffers of `pool`:
    /// each delivery is one part and does not make it ready.
    pub(crate) fn insert_datagrams(&mut self, pool: u32, local: Address) -> StreamId {
        let id = self.add(pool, None, StreamState::Connected, local, local);
        if let Some(conn) = self.get_mut(id) {
            conn.whole = true;
            conn.low_water = 0;
        }
        id
    }

    /// Makes room for one more connection.
    pub(crate) fn reserve(&mut self) -> Result<(), TryReserveError> {
        match self.free.is_empty() {
            true => self.conns.try_reserve(1),
            false => Ok(()),
        }
    }

    fn add(
        &mut self,
        pool: u32,
        flow: Option<FlowId>,
        state: StreamState,
        local: Address,
        peer: Address,
    ) -> StreamId {
        let index = self.free.pop().unwrap_or(self.conns.len() as u32);
        let conn = Conn {
            generation: 0,
            used: true,
            ready: false,
            listed: false,
            pool,
            flow,
            state,
            refused: None,
            local,
            peer,
            peer_send_shutdown: false,
            peer_recv_shutdown: false,
            send_shutdown: false,
            recv_shutdown: false,
            wants_room: false,
            messages: None,
            parts: VecDeque::new(),
            unread: 0,
            taken: 0,
            low_water: 1,
            held: 0,
            leased: 0,
            lent: 0,
            copied: 0,
            stalled: false,
            whole: false,
            holder: NONE,
        };
        match self.conns.get_mut(index as usize) {
            Some(place) => {
                let generation = place.generation.wrapping_add(1);
                let listed = place.listed;
                *place = Conn {
                    generation,
                    listed,
                    ..conn
                };
            }
            None => self.conns.push(conn),
        }
        let generation = self
            .conns
            .get(index as usize)
            .map_or(0, |place| place.generation);
        StreamId { index, generation }
    }

    /// Removes a connection. Unread buffers are returned; leases remain valid.
    pub(crate) fn remove(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        self.drop_unread(id, store);
        self.detach_leases(id, store);
        if let Some(conn) = self.get_mut(id) {
            debug_assert_eq!(conn.copied, 0, "copies still counted in the pool");
            conn.used = false;
            conn.ready = false;
            conn.flow = None;
            // An idle connection owns no memory; a free entry must not either.
            conn.parts = VecDeque::new();
            self.free.push(id.index);
        }
    }

    #[inline]
    pub(crate) fn get(&self, id: StreamId) -> Option<&Conn<T>> {
        self.conns
            .get(id.index as usize)
            .filter(|conn| conn.used && conn.generation == id.generation)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: StreamId) -> Option<&mut Conn<T>> {
        self.conns
            .get_mut(id.index as usize)
            .filter(|conn| conn.used && conn.generation == id.generation)
    }

    /// The connection at an index, if there is one.
    pub(crate) fn at(&self, index: u32) -> Option<StreamId> {
        let conn = self.conns.get(index as usize).filter(|conn| conn.used)?;
        Some(StreamId {
            index,
            generation: conn.generation,
        })
    }

    /// The number of connections.
    pub(crate) fn len(&self) -> usize {
        self.conns.len() - self.free.len()
    }

    /// Bytes that a read would return now.
    pub(crate) fn unread(&self, id: StreamId) -> usize {
        self.get(id).map_or(0, |conn| conn.unread)
    }

    /// Sets the number of unread bytes from which the connection is readable.
    pub(crate) fn set_low_water(&mut self, id: StreamId, bytes: u32) {
        if let Some(conn) = self.get_mut(id) {
            conn.low_water = bytes.max(1);
        }
    }
}

impl<T> Conn<T> {
    /// Whether it may have one more of the `free` entries of the lease table. A connection may use at most
    /// half of the free entries, the next one half of the rest: a reader that never drops a lease leaves
    /// entries to other connections and to loans.
    #[inline]
    fn may_lend_one_of(&self, free: usize) -> bool {
        (self.lent as usize) < free
    }

    /// Bytes that a read would return now.
    pub(crate) fn unread(&self) -> usize {
        self.unread
    }

    /// Whether received parts are unread.
    #[inline]
    pub(crate) fn has_unread(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Bytes read since the connection was established.
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    /// The number of unread bytes from which the connection is readable.
    pub(crate) fn low_water(&self) -> u32 {
        self.low_water
    }

    /// Whether no more bytes will arrive: end of stream follows the unread bytes.
    pub(crate) fn is_at_end(&self) -> bool {
        self.peer_send_shutdown || self.recv_shutdown || self.state == StreamState::Finished
    }

    /// The result of a read that found nothing: `Ok` for end of stream, else the reason.
    #[cold]
    pub(crate) fn why_empty(&self) -> Result<(), RecvFault> {
        match self.state {
            _ if self.is_at_end() => Ok(()),
            StreamState::Connecting => Err(RecvFault::NotConnected),
            StreamState::Connected => Err(RecvFault::WouldBlock),
            StreamState::Finished | StreamState::Reset => Err(RecvFault::Reset),
        }
    }
}

#[cfg(test)]
mod tests;
