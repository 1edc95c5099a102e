//! Writes connections down in a log, from which a successor resets them.
//!
//! If the process of a shard dies, its peer still has the connections and waits for bytes of them. The
//! successor has a shard without connections, and resets those of the log.
//!
//! # Invariants
//! - A connection has an entry before `poll_transmit`, `commit` or `send_now` returns its first packet. An
//!   incoming one has it when `handle_packet` returns.
//! - The entry is cleared when the connection has ended and the peer can see its last packet
//!   ([`Shard::handle_published`]). Its slot may be another connection's by then, so entries have numbers of
//!   their own.
//! - An entry counts against [`max_connections`](crate::vsock::ShardConfig::max_connections) until it is
//!   cleared.

use core::hash::BuildHasher;

use super::Shard;
use super::table::NO_ENTRY;
use crate::vsock::connection::{Connection, Key};
use crate::vsock::flow_log::{FlowLog, LoggedFlow, Logging};
use crate::vsock::state::State;

impl<S: BuildHasher> Shard<S> {
    /// Writes connections down in `log` from now on. To be called before the first one, followed by
    /// [`reset_stale`](Self::reset_stale) for each entry that the log has.
    pub fn set_flow_log(&mut self, log: Box<dyn FlowLog>) {
        self.logging = Some(Logging::new(log));
    }

    /// Resets a connection that a former process has left in the log: as a connection of this shard that has
    /// ended, it waits until its RST is sent. A REQUEST or RST of the peer with its addresses cancels that RST,
    /// and [`connect`](Self::connect) from these addresses sends it first.
    ///
    /// Returns false if no connection is reset: a [restored](Self::restore) one has these addresses, and the entry
    /// is its own from now on; or another one has them, there is no memory, or the limit of connections is reached,
    /// and the entry is cleared. To be called before the first packet.
    pub fn reset_stale(&mut self, entry: u32, flow: LoggedFlow) -> bool {
        let key = Key {
            local: flow.local,
            peer: flow.peer,
        };
        let found = self.table.look_up(&key);
        let slot = found.and_then(|index| self.table.slots.get_mut(index as usize));
        let has_type = |it: &Connection| it.socket_type == flow.socket_type;
        if let Some(slot) = slot
            && slot.log_entry == NO_ENTRY
            && slot.connection.as_ref().is_some_and(has_type)
        {
            slot.log_entry = entry;
            return false;
        }
        if found.is_some() || !self.has_memory_for(1) {
            if let Some(logging) = &mut self.logging {
                logging.log.clear(entry);
            }
            return false;
        }
        let mut connection = self.new_connection(key, flow.socket_type, State::Closed);
        connection.messages = None;
        connection.control.rst = true;
        // Its credit is not known.
        connection.control.no_socket = true;
        self.ports.occupy();
        let index = self.table.insert(connection);
        self.table.slots[index as usize].log_entry = entry;
        self.update_lists(index);
        true
    }

    /// Writes down the [restored](Self::restore) connections that are not in the log, after the last
    /// [`reset_stale`](Self::reset_stale) and before the first packet. A log that is full has no entry for them: then
    /// a later successor does not reset them.
    pub fn finish_restore(&mut self) {
        for index in 0..self.table.slots.len() {
            let slot = &self.table.slots[index];
            let is_missing = slot.connection.is_some() && slot.log_entry == NO_ENTRY;
            let log = self.logging.as_ref();
            if is_missing && log.is_some_and(|logging| !logging.log.is_full()) {
                self.log_opened(index as u32);
            }
        }
    }

    /// The peer can see all packets returned so far by `poll_transmit`, `commit` and `send_now`, and will see
    /// them even if this process dies. Only a shard with a log needs this call.
    pub fn handle_published(&mut self) {
        let Some(logging) = &mut self.logging else {
            return;
        };
        if !logging.ended.is_empty() {
            self.ports.vacate(logging.ended.len());
            for entry in logging.ended.drain(..) {
                logging.log.clear(entry);
            }
        }
    }

    /// Whether the limit and the memory allow `count` more connections, apart from their entries.
    pub(super) fn has_memory_for(&mut self, count: usize) -> bool {
        let ends = self.table.occupied() + count;
        self.ports.occupied().saturating_add(count) <= self.config.max_connections
            && self.table.reserve(count)
            && self
                .logging
                .as_mut()
                .is_none_or(|logging| logging.reserve_ends(ends))
    }

    /// Whether the limit, the memory and the log allow another connection.
    pub(super) fn can_open(&mut self) -> bool {
        let logging = self.logging.as_ref();
        !logging.is_some_and(|logging| logging.log.is_full()) && self.has_memory_for(1)
    }

    /// Writes down the connection in a slot.
    pub(super) fn log_opened(&mut self, index: u32) {
        let slot = &mut self.table.slots[index as usize];
        if let (Some(logging), Some(connection)) = (&mut self.logging, &slot.connection) {
            slot.log_entry = logging.log.enter(LoggedFlow {
                local: connection.key.local,
                peer: connection.key.peer,
                socket_type: connection.socket_type,
            });
        }
    }

    /// Frees the slot of a connection that has ended.
    pub(super) fn free_slot(&mut self, index: u32) {
        let entry = self.table.slots[index as usize].log_entry;
        self.table.free(index);
        match &mut self.logging {
            Some(logging) if entry != NO_ENTRY => logging.ended.push(entry),
            _ => self.ports.vacate(1),
        }
    }
}

#[cfg(test)]
#[path = "flow_log_tests.rs"]
mod tests;
