//! Saves a shard for a successor, and restores it there: an upgrade of the program keeps its connections.
//!
//! # Format
//! A magic word and the version, the role and its CID, what was negotiated, the RSTs without a connection, the
//! connections, and the order of each list of connections. [`super::super::snapshot`] has the encoding; the types that
//! are saved have functions `save` and `load` each, which are read together. Another order of fields is another
//! version. Configuration, counters and listeners are not part of it.
//!
//! # Invariants
//! - A snapshot is hostile input: what is read is within bounds, or masked, or refused. What a forged one can
//!   still do is what a peer can: stall or reset its own connections.
//! - [`Shard::restore`] changes nothing before it has read and checked all.

use core::hash::BuildHasher;
use std::collections::BTreeSet;

use super::Shard;
use crate::addr::{Address, Cid};
use crate::time::Instant;
use crate::vsock::config::Role;
use crate::vsock::connection::Connection;
use crate::vsock::flow_id::FlowId;
use crate::vsock::ports::{Admission, PortRef};
use crate::vsock::snapshot::{Reader, RestoreError, VERSION, Writer};
use crate::vsock::state::State;
use crate::wire::vsock::WireType;

/// The first bytes of a snapshot.
const MAGIC: u64 = u64::from_le_bytes(*b"zs-shard");

/// A connection of a snapshot, and what the shard has to know of it.
struct Saved {
    connection: Connection,
    /// Another connection may have its addresses.
    is_detached: bool,
    /// It had a reference to a port or a backlog.
    has_port: bool,
    /// It had reservations, which are cancelled.
    had_reserved: bool,
}

/// A snapshot that was read.
struct Snapshot {
    seqpacket: bool,
    declines_moves: Option<u16>,
    /// Our address, the peer's, and the type.
    resets: Vec<(Address, Address, WireType)>,
    connections: Vec<Saved>,
    /// The connections of each list, by their position in `connections`.
    lists: [Vec<u32>; 3],
}

/// Checks that these bytes are a snapshot of the version that [`Shard::restore`] reads, and no more.
///
/// # Errors
/// They are none, or of another version.
pub fn check_snapshot_version(bytes: &[u8]) -> Result<(), RestoreError> {
    check_version(&mut Reader(bytes))
}

fn check_version(from: &mut Reader<'_>) -> Result<(), RestoreError> {
    if from.u64()? != MAGIC {
        return Err(RestoreError::NotASnapshot);
    }
    match from.count()? {
        VERSION => Ok(()),
        version => Err(RestoreError::Version(version)),
    }
}

impl<S: BuildHasher> Shard<S> {
    /// Everything of the shard that a successor needs to continue its connections, for
    /// [`restore`](Self::restore). Times count from `now`. Counters and listeners are not saved.
    ///
    /// Reservations are saved as cancelled. A message that was begun in place waits to be
    /// [resumed](Self::resume_message). The payload of queued sends stays with the caller, under the same
    /// numbers.
    pub fn save(&self, now: Instant) -> Vec<u8> {
        let mut to = Writer::default();
        to.u64(MAGIC);
        to.u32s([VERSION]);
        let (half, cid) = self.identity();
        to.u32s([half, cid.get()]);
        to.bits([self.seqpacket, self.declines_moves.is_some()]);
        to.u32s([self.declines_moves.unwrap_or_default().into()]);
        to.count(self.resets.len());
        for reset in &self.resets {
            to.address(reset.src);
            to.address(reset.dst);
            to.u32s([reset.socket_type.get().into()]);
        }

        to.count(self.table.occupied());
        let mut positions = vec![0; self.table.slots.len()];
        let slots = (0u32..).zip(&self.table.slots);
        let connections = slots.filter_map(|(index, it)| Some((index, it.connection.as_ref()?)));
        for (position, (index, connection)) in (0u32..).zip(connections) {
            positions[index as usize] = position;
            let is_detached = self.table.look_up(&connection.key) != Some(index);
            let has_port = connection.port_ref.is_some();
            to.bits([is_detached, has_port, connection.tx.has_reserved()]);
            connection.save(&mut to, now);
        }
        let slots = &self.table.slots;
        let mut list = |members: Vec<u32>| {
            to.count(members.len());
            for index in members {
                to.u32s([positions[index as usize]]);
            }
        };
        list(self.control.members(slots).collect());
        list(self.data.members(slots).collect());
        list(self.events.members(slots).collect());
        to.0
    }

    /// Continues the connections of a former process from what [`save`](Self::save) returned there. To be called for
    /// a shard that has no connection, before the first packet, with the configuration of the former one and after
    /// [`set_flow_log`](Self::set_flow_log) if there is a log; call [`reset_stale`](Self::reset_stale) for its
    /// entries and then [`finish_restore`](Self::finish_restore).
    ///
    /// Returns the connections that the former caller had requested or accepted and that have not ended. The caller
    /// knows them from now on, by [`flow`](Self::flow), and resets those that it cannot continue, for instance because
    /// their unread or unsent bytes are not those that it has. Ids are new. Events that were not polled follow, also
    /// [`Event::Closed`] of connections that have ended. [`Event::Incoming`] of undecided ones follows in any case.
    ///
    /// # Errors
    /// See [`RestoreError`]; the shard is unchanged.
    ///
    /// [`Event::Closed`]: crate::vsock::Event::Closed
    /// [`Event::Incoming`]: crate::vsock::Event::Incoming
    pub fn restore(&mut self, now: Instant, bytes: &[u8]) -> Result<Vec<FlowId>, RestoreError> {
        if self.table.occupied() > 0 || !self.resets.is_empty() {
            return Err(RestoreError::InUse);
        }
        let snapshot = self.read(now, bytes)?;
        if !self.has_memory_for(snapshot.connections.len()) {
            return Err(RestoreError::OutOfMemory);
        }

        self.seqpacket = snapshot.seqpacket;
        self.declines_moves = snapshot.declines_moves;
        for (src, dst, socket_type) in snapshot.resets {
            self.push_reset(src, dst, socket_type);
        }
        let mut indices = Vec::new();
        let mut changed = Vec::new();
        for saved in snapshot.connections {
            // A message that was begun keeps its reservation.
            let had_reserved = saved.had_reserved && !saved.connection.message_in_progress();
            let index = self.insert_saved(saved);
            indices.push(index);
            changed.extend(had_reserved.then_some(index));
        }
        let [control, data, events] = snapshot.lists;
        let slots = &mut self.table.slots;
        let at = |position: u32| indices[position as usize];
        control
            .into_iter()
            .for_each(|it| self.control.push(slots, at(it)));
        data.into_iter()
            .for_each(|it| self.data.push(slots, at(it)));
        events
            .into_iter()
            .for_each(|it| self.events.push(slots, at(it)));
        for &index in &indices {
            self.update_lists(index);
            self.rearm(index);
        }
        for index in changed {
            self.credit_changed(index);
        }
        let flows = indices.into_iter().map(|index| self.table.id(index));
        let known = |flow: &FlowId| self.table.get(*flow).is_some_and(|it| it.known_to_caller);
        Ok(flows.filter(known).collect())
    }

    /// Which half of the queue pair this is, and the CID of its guest.
    fn identity(&self) -> (u32, Cid) {
        match self.config.role {
            Role::Device { peer } => (1, peer),
            Role::Driver { local } => (2, local),
        }
    }

    /// Reads a snapshot and checks it.
    fn read(&self, now: Instant, bytes: &[u8]) -> Result<Snapshot, RestoreError> {
        let from = &mut Reader(bytes);
        check_version(from)?;
        let (half, cid) = self.identity();
        if from.u32s()? != [half, cid.get()] {
            return Err(RestoreError::OtherEndpoint);
        }
        let [seqpacket, declines_moves] = from.bits()?;
        let pair = u16::try_from(from.count()?);
        let pair = pair.map_err(|_| RestoreError::Invalid("queue pair"))?;
        let mut snapshot = Snapshot {
            seqpacket,
            declines_moves: declines_moves.then_some(pair),
            resets: Vec::new(),
            connections: Vec::new(),
            lists: Default::default(),
        };
        for _ in 0..from.count()? {
            let (src, dst) = (from.address()?, from.address()?);
            self.check_peer(dst.cid)?;
            let socket_type = u16::try_from(from.count()?);
            let socket_type = socket_type.map_err(|_| RestoreError::Invalid("socket type"))?;
            snapshot.resets.push((src, dst, socket_type.into()));
        }

        let count = from.count()? as usize;
        if count
            > self
                .config
                .max_connections
                .saturating_sub(self.ports.occupied())
        {
            return Err(RestoreError::TooManyConnections);
        }
        let mut keys = BTreeSet::new();
        for _ in 0..count {
            let [is_detached, has_port, had_reserved] = from.bits()?;
            let connection = Connection::load(from, now)?;
            let (key, is_live) = (connection.key, connection.state != State::Closed);
            self.check_peer(key.peer.cid)?;
            if is_live && !self.is_local(key.local.cid) {
                return Err(RestoreError::OtherEndpoint);
            }
            // Only one that has ended can be detached, and one without an RST is.
            let is_detached = !is_live && (is_detached || !connection.control.rst);
            if !is_detached && !keys.insert((key.local, key.peer)) {
                return Err(RestoreError::Duplicate);
            }
            snapshot.connections.push(Saved {
                connection,
                is_detached,
                has_port,
                had_reserved,
            });
        }
        for list in &mut snapshot.lists {
            for _ in 0..from.count()? {
                let position = from.count()?;
                if position as usize >= count {
                    return Err(RestoreError::Invalid("list"));
                }
                list.push(position);
            }
        }
        match from.0 {
            [] => Ok(snapshot),
            _ => Err(RestoreError::Length),
        }
    }

    /// Whether a connection with this peer may be here.
    fn check_peer(&self, cid: Cid) -> Result<(), RestoreError> {
        match self.config.role {
            Role::Device { peer } if cid != peer => Err(RestoreError::OtherEndpoint),
            _ => Ok(()),
        }
    }

    /// Inserts a connection and acquires its port. One that finds a listener at its port, or no entry in the backlog,
    /// continues without.
    fn insert_saved(&mut self, saved: Saved) -> u32 {
        let mut connection = saved.connection;
        let local = connection.key.local;
        connection.port_ref = match connection.state {
            State::Closed | State::Listen => None,
            _ if !saved.has_port => None,
            State::Incoming => match self.ports.admit(local) {
                Admission::Granted(port_ref) => Some(port_ref),
                Admission::NoListener | Admission::Full => None,
            },
            State::Connecting | State::Established { .. } | State::Closing { .. } => {
                self.ports.acquire(local)
            }
        };
        self.held_ports += usize::from(connection.port_ref == Some(PortRef::Outgoing));
        self.undecided += usize::from(connection.state == State::Incoming);
        let is_live = connection.state != State::Closed;
        self.live += usize::from(is_live);
        self.stats.opened += u64::from(is_live);
        self.ports.occupy();
        let index = self.table.insert(connection);
        if saved.is_detached {
            self.table.detach(index);
        }
        index
    }
}

#[cfg(test)]
#[path = "snapshot_tests.rs"]
mod tests;
