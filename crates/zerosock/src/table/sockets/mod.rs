//! The connections of an endpoint as its user sees them, whichever half of the queues they come
//! through: what was received and not read, what is out on lease, what there is to tell.
//!
//! Received bytes lie where the peer's side wrote them, in buffers of a [`Pool`] (a device's
//! transmit queue, a driver's receive queue), each known here by a token of the engine's. A
//! connection is a list of [`Part`]s in order: buffers held in place, and copies. What each file
//! does: `parts` reads them, `messages` those of connections that carry messages, `lent` lends them
//! out and takes them back, `bounds` keeps the number and the time of what is held within limits,
//! `ready_flags` says what has happened, `room` who waits to send; here they come and go.
//!
//! What must hold: every token that came in goes back to the engine exactly once
//! ([`Store::release`]), whatever happens to the connection (but for buffers of a peer that is
//! gone and was trusted: see [`Sockets::recall`]); every byte is reported as consumed
//! once, and only when its reader is done with it, because that is what gives the sender credit;
//! bytes keep their order.

mod bounds;
mod lent;
mod messages;
mod moving;
mod parts;
mod ready_flags;
mod room;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::vsock::{FlowId, RefuseReason};
use zerosock_proto::{Address, Instant};
use zerosock_ring::{Memory, Piece};

use super::engine::RecvFault;
use super::leases::Leases;
use bounds::Pool;
use lent::Lent;
pub(crate) use lent::{Copied, LeaseParts, NoLease, PIECES, Place};
pub(crate) use messages::{Ends, Message, Messages};
pub(crate) use parts::{Held, Part};
pub(crate) use ready_flags::ReadyFlags;
pub(crate) use room::Waiters;

/// No place.
const NONE: u32 = u32::MAX;

/// What an engine does for its connections.
pub(crate) trait Store {
    /// What the engine knows a held buffer by.
    type Token;

    /// The memory in which a buffer lies; `None` if it is gone.
    fn memory(&self, token: &Self::Token) -> Option<&Arc<Memory>>;

    /// The buffer's pieces in that memory. A [`Held`]'s offset counts from their beginning.
    fn pieces<'a>(&'a self, token: &'a Self::Token) -> &'a [Piece];

    /// Gives a buffer back to the peer's side.
    fn release(&mut self, token: Self::Token);

    /// `bytes` of a connection were read, or never will be: the sender gets credit for them.
    fn consumed(&mut self, pool: u32, flow: FlowId, bytes: u32);

    /// `messages` without a byte of a connection were read.
    fn consumed_empty(&mut self, pool: u32, flow: FlowId, messages: u16);
}

/// A connection of one endpoint. Valid until the connection is closed by its owner.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub struct StreamId {
    index: u32,
    generation: u32,
}

/// Where a connection stands.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// use zerosock::vsock::StreamState;
///
/// assert_eq!(process.state(), StreamState::Connected);
/// host.reset();
/// process.recv().unwrap_err();
/// assert_eq!(process.state(), StreamState::Reset);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum StreamState {
    /// The request is out, no answer yet.
    Connecting,
    /// Both sides agreed; each may have shut down one way.
    Connected,
    /// The peer had already said that it would send no more, or we closed it: the end came in
    /// good order.
    Finished,
    /// Refused, timed out, reset by the peer or by a protocol error, or lost with the transport.
    Reset,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Conn<T> {
    generation: u32,
    used: bool,
    /// A bit for each [`ReadyFlags`] not told yet.
    ready_flags: u8,
    /// This place is in the list of those with ready_flags. Outlives the connection, so that a place is
    /// never listed twice.
    listed: bool,
    /// The buffers that its bytes come in.
    pub(crate) pool: u32,
    /// The protocol core's connection; `None` when that has ended.
    pub(crate) flow: Option<FlowId>,
    pub(crate) state: StreamState,
    /// Why it did not come about, if it did not.
    pub(crate) refused: Option<RefuseReason>,
    pub(crate) local: Address,
    pub(crate) peer: Address,
    /// The peer will send no more.
    pub(crate) peer_finished: bool,
    /// The peer will read no more.
    pub(crate) peer_recv_shutdown: bool,
    /// We will send no more.
    pub(crate) send_shutdown: bool,
    /// We read no more (SHUT_RD): nothing is unread, and what still comes is thrown away. Set by
    /// [`Sockets::read_no_more`].
    recv_shutdown: bool,
    /// A send found no room: tell when there is some.
    pub(crate) wants_room: bool,
    /// It carries messages.
    messages: Option<Box<Messages>>,
    parts: VecDeque<Part<T>>,
    /// Bytes received and not read, wherever they lie; leased ones are counted as read.
    unread: usize,
    /// Bytes read since the beginning; leased ones are counted as read.
    taken: u64,
    /// Fewer unread bytes than this are no ready_flags of themselves; at least 1.
    low_water: u32,
    /// Buffers held: parts in place and leases in place.
    held: u32,
    /// Leases in place.
    leased: u32,
    /// Unread bytes that lie in copies.
    copied: usize,
    /// The first of its leases, in no order.
    leases: u32,
    /// How many there are, copies as well.
    lent: u32,
    /// It held buffers for too long and has not caught up since: what comes is copied.
    stalled: bool,
    /// Its parts are not to be joined: each is a datagram.
    whole: bool,
    /// Its place among those who hold buffers of the pool.
    holder: u32,
}

/// All connections of an endpoint.
#[derive(Debug)]
pub(crate) struct Sockets<T> {
    conns: Vec<Conn<T>>,
    free: Vec<u32>,
    /// Places with ready_flags, oldest first; as long as the table at most.
    with_news: VecDeque<u32>,
    pools: Vec<Pool>,
    hold: Duration,
    /// Bytes that the connections of a pool together may have in copies.
    most_copied: usize,
    /// A pool has more.
    over: bool,
    words: Arc<Leases>,
    lent: Vec<Lent<T>>,
    free_lent: Vec<u32>,
    counted: Counted,
}

/// What was counted, over all connections.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Counted {
    /// Bytes received, wherever they were put.
    pub(crate) received: u64,
    /// Bytes of those that were copied aside, because of the bounds on what is held.
    pub(crate) copied_aside: u64,
    /// Bytes handed out on leases in place.
    pub(crate) leased: u64,
    /// Bytes copied out by calls that copy.
    pub(crate) copied_out: u64,
}

impl<T> Sockets<T> {
    /// A table without connections. Unread and leased buffers are copied out after `hold` at the
    /// latest; the unread copies of a pool are to be `most_copied` bytes at most.
    pub(crate) fn new(words: Arc<Leases>, hold: Duration, most_copied: usize) -> Sockets<T> {
        Sockets {
            conns: Vec::new(),
            free: Vec::new(),
            with_news: VecDeque::new(),
            pools: Vec::new(),
            hold,
            most_copied,
            over: false,
            free_lent: (0..words.capacity() as u32).rev().collect(),
            lent: (0..words.capacity()).map(|_| Lent::default()).collect(),
            words,
            counted: Counted::default(),
        }
    }

    pub(crate) fn counted(&self) -> Counted {
        self.counted
    }

    /// The words that leases share with this table.
    pub(crate) fn words(&self) -> &Arc<Leases> {
        &self.words
    }

    /// A new connection; its buffers come from `pool`.
    pub(crate) fn insert(
        &mut self,
        pool: u32,
        flow: FlowId,
        state: StreamState,
        local: Address,
        peer: Address,
    ) -> StreamId {
        self.add(pool, Some(flow), state, local, peer)
    }

    /// A connection that nobody else knows of, for the datagrams that come for one socket in
    /// buffers of `pool`: each delivery is one part, and none is ready_flags of itself.
    pub(crate) fn insert_datagrams(&mut self, pool: u32, local: Address) -> StreamId {
        let id = self.add(pool, None, StreamState::Connected, local, local);
        if let Some(conn) = self.get_mut(id) {
            conn.whole = true;
            conn.low_water = 0;
        }
        id
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
            ready_flags: 0,
            listed: false,
            pool,
            flow,
            state,
            refused: None,
            local,
            peer,
            peer_finished: false,
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
            leases: NONE,
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

    /// Frees a connection's place. What was not read goes back; leases stay with their holders.
    pub(crate) fn remove(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        self.drop_unread(id, store);
        self.orphan_leases(id, store);
        if let Some(conn) = self.get_mut(id) {
            debug_assert_eq!(conn.copied, 0, "copies that nobody can take off the pool");
            conn.used = false;
            conn.ready_flags = 0;
            conn.flow = None;
            // A connection at rest owns no memory, and one that is gone less so.
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

    /// The connection at a place, if there is one.
    pub(crate) fn at(&self, index: u32) -> Option<StreamId> {
        let conn = self.conns.get(index as usize).filter(|conn| conn.used)?;
        Some(StreamId {
            index,
            generation: conn.generation,
        })
    }

    /// Connections that exist.
    pub(crate) fn len(&self) -> usize {
        self.conns.len() - self.free.len()
    }

    /// Bytes that a read would give at once.
    pub(crate) fn unread(&self, id: StreamId) -> usize {
        self.get(id).map_or(0, |conn| conn.unread)
    }

    /// From how many unread bytes on there is something to read.
    pub(crate) fn set_low_water(&mut self, id: StreamId, bytes: u32) {
        if let Some(conn) = self.get_mut(id) {
            conn.low_water = bytes.max(1);
        }
    }
}

impl StreamId {
    /// What the first connection of an endpoint is known by.
    #[cfg(test)]
    pub(crate) const FIRST: StreamId = StreamId {
        index: 0,
        generation: 0,
    };

    /// A small number that no other connection of the endpoint has at the same time.
    pub(crate) fn index(self) -> u32 {
        self.index
    }
}

impl<T> Conn<T> {
    /// Bytes that a read would give at once.
    pub(crate) fn unread(&self) -> usize {
        self.unread
    }

    /// Bytes that were read since the beginning.
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    /// From how many unread bytes on there is something to read.
    pub(crate) fn low_water(&self) -> u32 {
        self.low_water
    }

    /// Whether there is nothing more to come: end of file behind what is unread.
    pub(crate) fn is_at_end(&self) -> bool {
        self.peer_finished || self.recv_shutdown || self.state == StreamState::Finished
    }

    /// What is said when nothing was received: end of file, or why not.
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

/// When something that began at `since` has lasted for `span`.
fn due(since: Instant, span: Duration) -> Instant {
    since + span
}

#[cfg(test)]
mod tests;
