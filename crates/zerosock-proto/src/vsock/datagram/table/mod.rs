//! The datagram sockets of an endpoint: ports, limits, drops, and when a socket may send.
//!
//! # Invariants
//! - A port has one socket.
//! - The bytes that a socket has received and not read exceed its limit by at most one datagram,
//!   and so do the bytes that it has in flight.
//! - After a refused send [`DatagramTable::poll_writable`] returns the socket when a retry can
//!   succeed.

mod counts;
mod flow_control;
mod sending;
#[cfg(test)]
mod tests;

use core::hash::BuildHasher;
use std::collections::VecDeque;

use hashbrown::{DefaultHashBuilder, HashMap};

use super::assembly::Lost;
use super::paused_destinations::PausedDestinations;
use super::paused_senders::PausedSenders;
use super::wire::PauseSource;
use super::{MAX_DATAGRAM, OVERHEAD};
use crate::addr::{Address, Cid, Port};
use crate::time::Instant;
pub use counts::{DatagramDrops, DatagramLimits, DatagramStats, DropCause};

/// First ephemeral port.
const EPHEMERAL_FIRST: u32 = 1 << 30;
/// Number of ephemeral ports.
const EPHEMERAL_COUNT: u32 = 1 << 30;
/// Most sockets of an endpoint.
const MAX_SOCKETS: usize = 65536;

/// A datagram socket of one endpoint. Valid until it is closed.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub struct DatagramId {
    index: u32,
    generation: u32,
}

impl DatagramId {
    /// A small number that no other socket of the table has at the same time.
    #[inline]
    pub const fn index(self) -> u32 {
        self.index
    }
}

/// Why there is no socket.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
pub enum BindError {
    /// Another socket has the port (EADDRINUSE).
    #[error("the port is in use")]
    InUse,
    /// The limit of sockets is reached.
    #[error("too many datagram sockets")]
    TooMany,
}

/// Why a datagram is not sent.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
pub enum DatagramRefusal {
    /// There is no such socket.
    #[error("no such socket")]
    Unknown,
    /// Longer than [`MAX_DATAGRAM`] (EMSGSIZE).
    #[error("a datagram of {0} bytes is above the limit of 65536")]
    TooLong(usize),
    /// The send buffer is full: wait until [`DatagramTable::poll_writable`] returns the socket.
    #[error("the send buffer is full")]
    Throttled,
    /// The destination has sent STOP: wait as above.
    #[error("the destination has paused this sender")]
    Stopped,
    /// The destination does not support datagrams.
    #[error("the destination does not support datagrams")]
    Unsupported,
}

#[derive(Debug)]
struct Socket {
    generation: u32,
    /// False: the entry is free.
    used: bool,
    local: Address,
    /// The peer that the socket is connected to.
    peer: Option<Address>,
    limits: DatagramLimits,
    /// Bytes received and not read, overhead included.
    queued: u32,
    /// Bytes in flight, overhead included.
    sending: u32,
    /// Largest datagram among those in flight, overhead included: an upper bound, reset when none
    /// is in flight.
    largest: u32,
    /// STOP was sent to sources of this socket.
    stopping: bool,
    /// A send was refused for now: `poll_writable` must return this socket.
    waiting: bool,
    /// Index in the table's `throttled`, while too many bytes are in flight.
    throttled: Option<u32>,
    /// A throttled socket is writable when at most so many bytes are in flight.
    writable_at: u32,
    /// In `writable`.
    listed: bool,
    stats: DatagramStats,
}

/// The datagram sockets of one endpoint.
#[derive(Debug)]
pub struct DatagramTable {
    cid: Cid,
    sockets: Vec<Socket>,
    /// Indices of free entries.
    free: Vec<u32>,
    by_port: HashMap<Port, u32>,
    /// The last port looked up and its index.
    last: Option<(Port, u32)>,
    /// Offset of the ephemeral port to try next.
    next_ephemeral: u32,
    paused_senders: PausedSenders,
    paused_destinations: PausedDestinations,
    drops: DatagramDrops,
    /// Indices of sockets for `poll_writable`.
    writable: VecDeque<u32>,
    /// Indices of the throttled sockets.
    throttled: Vec<u32>,
}

impl DatagramTable {
    /// A table without sockets for the endpoint `cid`. Ephemeral ports start at a random number.
    pub fn new(cid: Cid) -> DatagramTable {
        let start = DefaultHashBuilder::default().hash_one(0u32) as u32;
        DatagramTable {
            cid,
            sockets: Vec::new(),
            free: Vec::new(),
            by_port: HashMap::new(),
            last: None,
            next_ephemeral: start % EPHEMERAL_COUNT,
            paused_senders: PausedSenders::new(PauseSource::Receiver),
            paused_destinations: PausedDestinations::new(),
            drops: DatagramDrops::default(),
            writable: VecDeque::new(),
            throttled: Vec::new(),
        }
    }

    /// Our CID.
    pub fn cid(&self) -> Cid {
        self.cid
    }

    /// The transport was reset and may have given us another CID. All pauses end.
    pub fn reset(&mut self, cid: Cid) {
        self.cid = cid;
        for socket in &mut self.sockets {
            socket.local.cid = cid;
            socket.stopping = false;
        }
        self.paused_senders.forget(|_| true);
        self.paused_destinations.forget(|_, _| true);
        self.wake_all();
    }

    /// Sockets that exist.
    pub fn len(&self) -> usize {
        self.by_port.len()
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.by_port.is_empty()
    }

    /// Binds a socket to `port`; [`Port::ANY`] chooses an unused port.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn bind(&mut self, port: Port, limits: DatagramLimits) -> Result<DatagramId, BindError> {
        if self.len() >= MAX_SOCKETS {
            return Err(BindError::TooMany);
        }
        let port = match port {
            Port::ANY => self.ephemeral(),
            port if self.by_port.contains_key(&port) => return Err(BindError::InUse),
            port => port,
        };
        let index = self.free.pop().unwrap_or(self.sockets.len() as u32);
        let mut socket = Socket {
            generation: 0,
            used: true,
            local: Address::new(self.cid, port),
            peer: None,
            limits,
            queued: 0,
            sending: 0,
            largest: 0,
            stopping: false,
            waiting: false,
            throttled: None,
            writable_at: 0,
            listed: false,
            stats: DatagramStats::default(),
        };
        let generation = match self.sockets.get_mut(index as usize) {
            Some(place) => {
                socket.generation = place.generation.wrapping_add(1);
                socket.listed = place.listed;
                let generation = socket.generation;
                *place = socket;
                generation
            }
            None => {
                self.sockets.push(socket);
                0
            }
        };
        self.by_port.insert(port, index);
        Ok(DatagramId { index, generation })
    }

    fn ephemeral(&mut self) -> Port {
        loop {
            // Terminates: there are more ports than sockets.
            let port = Port::new(EPHEMERAL_FIRST + self.next_ephemeral);
            self.next_ephemeral = (self.next_ephemeral + 1) % EPHEMERAL_COUNT;
            if !self.by_port.contains_key(&port) {
                return port;
            }
        }
    }

    /// Closes a socket. Sources that were sent STOP get START; what they send is dropped.
    pub fn close(&mut self, id: DatagramId) {
        let Some(socket) = self.get_mut(id) else {
            return;
        };
        socket.used = false;
        let local = socket.local;
        self.wake(id.index);
        self.by_port.remove(&local.port);
        self.last = None;
        self.free.push(id.index);
        self.paused_senders.resume(local);
        self.paused_destinations
            .forget(|port, _| port == local.port);
    }

    /// From now on receives from `peer` only; `None`: from every source.
    pub fn connect(&mut self, id: DatagramId, peer: Option<Address>) {
        if let Some(socket) = self.get_mut(id) {
            socket.peer = peer;
        }
    }

    /// The socket's own address, and the peer it is connected to.
    pub fn addresses(&self, id: DatagramId) -> Option<(Address, Option<Address>)> {
        self.get(id).map(|socket| (socket.local, socket.peer))
    }

    /// The socket's limits.
    pub fn limits(&self, id: DatagramId) -> Option<DatagramLimits> {
        self.get(id).map(|socket| socket.limits)
    }

    /// Changes the limits; queued datagrams stay.
    pub fn set_limits(&mut self, id: DatagramId, limits: DatagramLimits) {
        if let Some(socket) = self.get_mut(id) {
            socket.limits = limits;
            self.wake(id.index);
        }
    }

    /// The socket's counters.
    pub fn stats(&self, id: DatagramId) -> Option<DatagramStats> {
        self.get(id).map(|socket| socket.stats)
    }

    /// What was dropped, over all sockets.
    pub fn drops(&self) -> DatagramDrops {
        self.drops
    }

    /// The socket at `port`.
    #[inline]
    pub fn find(&mut self, port: Port) -> Option<DatagramId> {
        let index = match self.last {
            Some((last, index)) if last == port => index,
            _ => {
                let index = *self.by_port.get(&port)?;
                self.last = Some((port, index));
                index
            }
        };
        let socket = self.sockets.get(index as usize).filter(|s| s.used)?;
        let generation = socket.generation;
        Some(DatagramId { index, generation })
    }

    /// A datagram of `len` bytes has arrived: returns its socket. It counts against the socket's
    /// limit until [`consume`](Self::consume). `flow`: the source supports flow control and gets
    /// STOP when the queue is a quarter full.
    ///
    /// # Errors
    /// The reason for dropping the datagram.
    #[inline]
    pub fn receive(
        &mut self,
        src: Address,
        dst: Address,
        len: u32,
        flow: bool,
        now: impl FnOnce() -> Instant,
    ) -> Result<DatagramId, DropCause> {
        let Some(id) = self.find(dst.port).filter(|_| dst.cid == self.cid) else {
            self.drops.no_socket += 1;
            return Err(DropCause::NoSocket);
        };
        let Some(socket) = self.sockets.get_mut(id.index as usize) else {
            return Err(DropCause::NoSocket);
        };
        if socket.peer.is_some_and(|peer| peer != src) {
            socket.stats.dropped_not_peer += 1;
            self.drops.not_peer += 1;
            return Err(DropCause::NotPeer);
        }
        let fits = socket.queued <= socket.limits.receive;
        if fits {
            socket.queued = socket
                .queued
                .saturating_add(len.min(MAX_DATAGRAM) + OVERHEAD);
            socket.stats.received += 1;
            socket.stats.received_bytes += u64::from(len);
        } else {
            socket.stats.dropped_full += 1;
            self.drops.full += 1;
        }
        if flow && socket.queued > socket.limits.receive / 4 {
            socket.stopping = true;
            self.paused_senders.pause(now(), dst, src);
        }
        if fits { Ok(id) } else { Err(DropCause::Full) }
    }

    /// Counts a datagram that an [`Assembler`](super::Assembler) discarded.
    pub fn handle_lost(&mut self, lost: Lost) {
        if lost.to().cid == self.cid {
            match lost {
                Lost::Incomplete { .. } => self.drops.incomplete += 1,
                Lost::TooLong { .. } => self.drops.too_long += 1,
            }
        }
    }

    /// The application has read or discarded a datagram of `len` bytes.
    #[inline]
    pub fn consume(&mut self, id: DatagramId, len: u32) {
        let Some(socket) = self.get_mut(id) else {
            return;
        };
        socket.queued = socket
            .queued
            .saturating_sub(len.min(MAX_DATAGRAM) + OVERHEAD);
        if socket.stopping && socket.queued <= socket.limits.receive / 8 {
            socket.stopping = false;
            let local = socket.local;
            self.paused_senders.resume(local);
        }
    }

    #[inline]
    fn get(&self, id: DatagramId) -> Option<&Socket> {
        self.sockets
            .get(id.index as usize)
            .filter(|socket| socket.used && socket.generation == id.generation)
    }

    #[inline]
    fn get_mut(&mut self, id: DatagramId) -> Option<&mut Socket> {
        self.sockets
            .get_mut(id.index as usize)
            .filter(|socket| socket.used && socket.generation == id.generation)
    }
}
