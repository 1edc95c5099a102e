//! Datagrams of any number of senders to one socket: a socket of its own to the target for each sender.
//!
//! # Invariants
//! - A datagram is relayed whole or dropped and counted.
//! - The number of associations is bounded with that of connections. A further sender takes the place of the
//!   association on which nothing was relayed for the longest time; each ends at the time-out. For
//!   datagrams that the kernel moves, the time is when the relay last read their counters.
//! - A full UDP target loses datagrams, as anywhere on the network. A Unix receiver that is full gets
//!   those of one batch later; further ones are dropped until then.
//! - A target with a name that refuses a datagram (ICMP) ends the association, if the name has another address:
//!   the next datagram goes there.
//! - Datagrams that wait for a target have at most [`HELD_LIMIT`] bytes, and those of one batch.

mod joining;
mod outcome;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use zerosock_proto::Instant;
use zerosock_sys::mmsg::KernelAddress;
use zerosock_virtio::deadline::earlier;

pub(super) use self::outcome::{Ended, OpenError};

use super::direction::{Ready, WatchedSocket, end_of_messages};
use super::joined::{Joined, Joining, Turns};
use super::pair::SocketStage;
use super::socket::Socket;
use super::store::{BATCH, Store};
use crate::associations::{self, AssociationId, AssociationTable};
use crate::connector::PendingConnect;

/// Batches that one turn receives from the listening socket, and from one association.
const BATCHES: usize = 16;

/// Bytes after which a turn receives no further batch: one can have 4 MiB.
const TURN_BYTES: usize = 1 << 20;

/// Bytes that all associations of a worker may hold for their targets; senders can have any number of
/// addresses.
const HELD_LIMIT: usize = 64 << 20;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Associations {
    listener: Socket,
    readable: bool,
    table: AssociationTable<KernelAddress, Exchange>,
    timeout: Duration,
    /// The address of the listener, if the kernel may join senders to their sockets.
    connects_at: Option<SocketAddr>,
    /// Associations with a socket to their sender that are not joined yet.
    joining: Vec<u32>,
    /// Associations that are, or will be.
    joined: usize,
    turns: Turns,
}

/// One sender, with its socket to the target.
pub(super) type SenderAssociation = associations::Association<KernelAddress, Exchange>;

/// The datagrams of one sender, and the answers to them.
#[derive(Debug)]
pub(super) struct Exchange {
    side: WatchedSocket,
    pub(super) stage: SocketStage,
    /// Datagrams that came at the listener.
    received: usize,
    joining: Joining,
    /// Bytes and lost datagrams of the joined sockets, as far as they are counted.
    redirected: ([u64; 2], u64),
    pub(super) opened: Instant,
    /// Bytes to the target, and to the source.
    pub(super) bytes: [u64; 2],
    pub(super) dropped: u64,
}

/// What the relay decides for a new sender.
pub(super) trait Opener {
    /// Makes a socket to the target for the association that will have this name.
    fn open(
        &mut self,
        id: AssociationId,
        source: &KernelAddress,
    ) -> Result<AssociationSocket, OpenError>;

    /// An association has ended.
    fn end(&mut self, association: SenderAssociation, reason: Ended, now: Instant);

    /// Has the kernel join the sockets of an association, to its sender and to the target.
    fn join(&mut self, sockets: [OwnedFd; 2], key: u32) -> Result<Joined, [OwnedFd; 2]>;

    /// Watches the sockets for the events that they need.
    fn watch(&mut self, joined: &mut Joined, key: u32);
}

/// The socket of a new association, or its absence and the request for it.
pub(super) type AssociationSocket = (Socket, SocketStage, Option<PendingConnect>);

/// What a turn has done.
#[derive(Debug, Default)]
pub(super) struct TurnCounts {
    /// Bytes to the target, and to the source.
    pub(super) bytes: [u64; 2],
    pub(super) dropped: u64,
    /// Times that a sender got no association because there was no room.
    pub(super) refused: u64,
    /// There is more to do.
    pub(super) more: bool,
}

impl Associations {
    /// The datagrams that come to this socket.
    pub(super) fn new(
        listener: Socket,
        timeout: Duration,
        connects_at: Option<SocketAddr>,
    ) -> Associations {
        Associations {
            listener,
            readable: false,
            table: AssociationTable::new(BATCH, HELD_LIMIT),
            timeout: timeout.max(Duration::from_millis(1)),
            connects_at,
            joining: Vec::new(),
            joined: 0,
            turns: Turns::default(),
        }
    }

    pub(super) fn listener(&self) -> &Socket {
        &self.listener
    }

    /// The listening socket is readable.
    pub(super) fn set_readable(&mut self) {
        self.readable = true;
    }

    /// The socket of an association is ready.
    pub(super) fn set_ready(&mut self, key: u32, ready: Ready) {
        if let Some(association) = self.table.get_mut(key) {
            association.side.ready.set(ready);
            self.table.enqueue(key);
        }
    }

    /// Gives an association the socket that was asked for. Returns it for registration.
    pub(super) fn connected(
        &mut self,
        id: AssociationId,
        socket: Socket,
    ) -> Option<&mut SenderAssociation> {
        let key = self.table.key_of(id)?;
        self.table.enqueue(key);
        let association = self.table.get_mut(key)?;
        association.side.socket = socket;
        association.side.ready = Ready::WRITE;
        association.stage = SocketStage::Connected;
        Some(association)
    }

    /// Removes an association whose socket cannot be had.
    pub(super) fn failed(&mut self, id: AssociationId) -> Option<SenderAssociation> {
        self.remove(self.table.key_of(id)?)
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        earlier(self.table.next_timeout(), self.turns.next())
    }

    /// Ends the associations for which nothing was relayed for the time-out.
    fn end_idle(&mut self, opener: &mut impl Opener, now: Instant, done: &mut TurnCounts) {
        while let Some(key) = self.table.pop_idle(now) {
            if !self.observe(key, now, done) {
                self.end(key, Ended::Idle, opener, now);
            }
        }
    }

    /// Ends the association on which nothing was relayed for the longest time; false if there is none.
    fn end_longest_idle(
        &mut self,
        opener: &mut impl Opener,
        now: Instant,
        done: &mut TurnCounts,
    ) -> bool {
        // The kernel may have moved datagrams of an association meanwhile: `observe` finds that once per turn.
        while let Some(key) = self.table.longest_idle() {
            if !self.observe(key, now, done) {
                self.end(key, Ended::Replaced, opener, now);
                return true;
            }
        }
        false
    }

    /// Counts the datagrams that the kernel has moved for an association. Returns whether they are the first of this turn.
    fn observe(&mut self, key: u32, now: Instant, done: &mut TurnCounts) -> bool {
        let association = self.table.get_mut(key);
        association.is_some_and(|it| it.observe(done)) && self.table.touch(key, now)
    }

    /// Removes all associations.
    pub(super) fn drain(&mut self, done: &mut TurnCounts) -> Vec<SenderAssociation> {
        let keys = self.table.keys().into_iter();
        let mut all: Vec<_> = keys.filter_map(|key| self.remove(key)).collect();
        for association in &mut all {
            association.observe(done);
        }
        all
    }

    fn end(&mut self, key: u32, reason: Ended, opener: &mut impl Opener, now: Instant) {
        if let Some(association) = self.remove(key) {
            opener.end(association, reason, now);
        }
    }

    fn remove(&mut self, key: u32) -> Option<SenderAssociation> {
        let mut association = self.table.remove(key)?;
        match &mut association.joining {
            Joining::No | Joining::Refused => {}
            Joining::Soon(_) => self.joined -= 1,
            Joining::Yes(joined) => {
                self.turns.plan(key, joined, None);
                self.joined -= 1;
            }
        }
        Some(association)
    }

    /// Relays what has come, within a budget.
    pub(super) fn run(
        &mut self,
        store: &mut Store,
        opener: &mut impl Opener,
        now: Instant,
    ) -> TurnCounts {
        let mut done = TurnCounts::default();
        self.receive(store, opener, now, &mut done);
        while let Some(key) = self.joining.pop() {
            self.join(key, store, opener, &mut done);
        }
        while let Some(key) = self.turns.pop(now) {
            self.set_ready(key, Ready::default());
        }
        for _ in 0..self.table.queued() {
            let Some(key) = self.table.dequeue() else {
                break;
            };
            let ended = match self.table.get(key) {
                Some(association) if association.is_joined() => {
                    self.step(key, store, opener, now, &mut done)
                }
                _ => self.answer(key, store, now, &mut done),
            };
            self.table.recount(key);
            if let Some(reason) = ended {
                self.end(key, reason, opener, now);
            }
        }
        self.end_idle(opener, now, &mut done);
        done.more = self.readable || self.table.queued() > 0;
        done
    }

    /// From the listening socket to the target.
    fn receive(
        &mut self,
        store: &mut Store,
        opener: &mut impl Opener,
        now: Instant,
        done: &mut TurnCounts,
    ) {
        let mut bytes = 0;
        for _ in 0..BATCHES {
            if !self.readable || bytes >= TURN_BYTES {
                return;
            }
            let got = match self.listener.receive_batch(store.batch(), BATCH) {
                Ok(got) => got,
                Err(error) => {
                    // Other errors are those of earlier sends, and were taken by this call.
                    self.readable = error.kind() != std::io::ErrorKind::WouldBlock;
                    continue;
                }
            };
            bytes += store.batch().bytes();
            let mut first = 0;
            while first < got {
                let batch = store.batch();
                let source = *batch.source(first);
                let same = |n: &usize| batch.source(*n) != &source;
                let end = (first + 1..got).find(same).unwrap_or(got);
                match self.find(source, opener, now, done) {
                    Some(key) => {
                        self.forward(key, first..end, store, now, done);
                        self.connect_sender(key, end - first);
                        self.table.recount(key);
                    }
                    None => done.dropped += (end - first) as u64,
                }
                first = end;
            }
        }
    }

    fn find(
        &mut self,
        source: KernelAddress,
        opener: &mut impl Opener,
        now: Instant,
        done: &mut TurnCounts,
    ) -> Option<u32> {
        if let Some(key) = self.table.find(&source) {
            return Some(key);
        }
        let mut opened = opener.open(self.table.next_id(), &source);
        if matches!(opened, Err(OpenError::Full)) && self.end_longest_idle(opener, now, done) {
            opened = opener.open(self.table.next_id(), &source);
        }
        let (socket, stage, asked) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                done.refused += u64::from(error == OpenError::Full);
                return None;
            }
        };
        let exchange = Exchange {
            side: WatchedSocket {
                socket,
                ready: Ready::WRITE,
            },
            stage,
            received: 0,
            joining: Joining::No,
            redirected: ([0; 2], 0),
            opened: now,
            bytes: [0; 2],
            dropped: 0,
        };
        let key = self.table.add(source, exchange, now).key;
        self.table.limit_idle(key, self.timeout);
        self.table.get_mut(key)?.asked = asked;
        Some(key)
    }

    /// Sends a run of messages of one source to the target.
    fn forward(
        &mut self,
        key: u32,
        run: std::ops::Range<usize>,
        store: &mut Store,
        now: Instant,
        done: &mut TurnCounts,
    ) {
        self.table.touch(key, now);
        let room = self.table.room();
        let Some(association) = self.table.get_mut(key) else {
            return;
        };
        let before = association.dropped;
        association.send_held(done);
        let batch = store.batch();
        let mut next = run.start;
        let mut retried = false;
        while next < run.end {
            if batch.is_truncated(next) {
                association.dropped += 1;
                next += 1;
                continue;
            }
            if !association.held.is_empty() || association.stage != SocketStage::Connected {
                let held = association.hold(batch.message(next), room);
                association.dropped += u64::from(!held);
                next += 1;
                continue;
            }
            let end = (next..run.end).find(|&n| batch.is_truncated(n));
            match association.send(batch, next..end.unwrap_or(run.end)) {
                Ok(sent) => {
                    let bytes: usize = (next..next + sent).map(|n| batch.message(n).len()).sum();
                    association.bytes[0] += bytes as u64;
                    done.bytes[0] += bytes as u64;
                    next += sent;
                    retried = false;
                }
                Err(error) => {
                    if let Joining::Yes(joined) = &association.joining {
                        joined.insert_again(1);
                    }
                    match Errno::from_io_error(&error) {
                        Some(Errno::AGAIN) if association.side.socket.kind().has_room_events() => {
                            association.side.ready.clear(Ready::WRITE);
                            let held = association.hold(batch.message(next), room);
                            association.dropped += u64::from(!held);
                            next += 1;
                        }
                        // The answer to an earlier datagram, such as that no process listens there.
                        Some(Errno::CONNREFUSED) if !retried => retried = true,
                        _ => {
                            association.dropped += 1;
                            next += 1;
                        }
                    }
                }
            }
        }
        done.dropped += association.dropped - before;
    }

    /// From the target to the source. Returns why the association ends, if it does.
    fn answer(
        &mut self,
        key: u32,
        store: &mut Store,
        now: Instant,
        done: &mut TurnCounts,
    ) -> Option<Ended> {
        let association = self.table.get_mut(key)?;
        if association.stage != SocketStage::Connected {
            return None;
        }
        let before = association.dropped;
        association.send_held(done);
        let (mut ended, mut moved, mut refused) = (None, false, false);
        let mut bytes = 0;
        for _ in 0..BATCHES {
            if !association.side.ready.has(Ready::READ) || bytes >= TURN_BYTES {
                break;
            }
            let batch = store.batch();
            let got = match association.side.socket.receive_batch(batch, BATCH) {
                Ok(got) => got,
                Err(error) => {
                    let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                    if errno == Errno::AGAIN {
                        association.side.ready.clear(Ready::READ);
                    } else if association.side.socket.kind().has_end() {
                        ended = Some(Ended::Failed(errno));
                        break;
                    }
                    refused |= errno == Errno::CONNREFUSED;
                    continue;
                }
            };
            moved = true;
            bytes += batch.bytes();
            let end = end_of_messages(batch, got, &mut association.side);
            let count = end.unwrap_or(got);
            let mut next = 0;
            while next < count {
                if batch.is_truncated(next) || !association.source.is_named() {
                    association.dropped += 1;
                    next += 1;
                    continue;
                }
                let long = (next..count).find(|&n| batch.is_truncated(n));
                let (run, to) = (next..long.unwrap_or(count), Some(&association.source));
                match self.listener.send_batch(batch, run, to) {
                    Ok(sent) => {
                        let bytes: usize =
                            (next..next + sent).map(|n| batch.message(n).len()).sum();
                        association.bytes[1] += bytes as u64;
                        done.bytes[1] += bytes as u64;
                        next += sent;
                    }
                    Err(_) => {
                        association.dropped += 1;
                        next += 1;
                    }
                }
            }
            if end.is_some() {
                ended = Some(Ended::Closed);
                break;
            }
        }
        done.dropped += association.dropped - before;
        // What the target sent before is on its way: the sender's next datagram goes to another address.
        if let (true, false, Some(address)) = (refused, moved, association.replaceable) {
            ended = Some(Ended::Refused(address));
        }
        if ended.is_none() && association.side.ready.has(Ready::READ) {
            self.table.enqueue(key);
        }
        if moved {
            self.table.touch(key, now);
        }
        ended
    }
}

impl SenderAssociation {
    pub(super) fn socket(&self) -> &Socket {
        &self.side.socket
    }

    /// Datagrams that the target did not take; they are lost with the association.
    pub(super) fn unsent(&self) -> u64 {
        self.held.len() as u64
    }

    /// Sends what the target did not take before.
    fn send_held(&mut self, done: &mut TurnCounts) {
        if self.stage != SocketStage::Connected {
            return;
        }
        while !self.held.is_empty() && self.side.ready.has(Ready::WRITE) {
            match self.side.socket.send(self.held.first()) {
                Ok(sent) => {
                    self.bytes[0] += sent as u64;
                    done.bytes[0] += sent as u64;
                }
                Err(Errno::AGAIN) => {
                    self.side.ready.clear(Ready::WRITE);
                    return;
                }
                Err(_) => self.dropped += 1,
            }
            self.held.pop();
        }
    }
}

#[cfg(test)]
mod tests;
