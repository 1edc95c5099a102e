//! Stores and reads the messages of SOCK_SEQPACKET connections.
//!
//! The parts of a message arrive as those of a stream do; the last part marks the end. Only
//! complete messages are readable. An incomplete message is discarded when its connection ends.
//!
//! # Invariants
//! - An incomplete message holds at most an eighth of the pool; further parts are copied. So a
//!   message can be longer than what a connection may hold in place.
//! - A copied message counts for more than its bytes ([`COST`](super::message_end::COST)), because
//!   the peer chooses how short its messages are.

use super::ids::StreamId;
use super::message_end::{MessageEnd, cost};
use super::received::{HeldBuffer, ReceivedPart, copy_out};
use super::store::Store;
use super::{Conn, Sockets};
use crate::table::places::{LeaseParts, NoLease};

/// What [`SeqPacket::recv`](crate::vsock::SeqPacket::recv) has received.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Received {
    /// The full length of the message in bytes, as recv(2) returns with MSG_TRUNC.
    pub len: usize,
    /// Bytes copied to the buffer; the rest is discarded.
    pub copied: usize,
    /// Whether the message ends a record: MSG_EOR.
    pub end_of_record: bool,
}

impl Received {
    /// Whether the buffer was too short.
    pub fn is_truncated(&self) -> bool {
        self.copied < self.len
    }
}

impl<T> Conn<T> {
    /// Complete unread messages; `None` for a stream.
    pub(crate) fn messages(&self) -> Option<u32> {
        self.messages.as_ref().map(|messages| messages.complete)
    }

    /// The numbers of parts and bytes of the first message; `None` if it is incomplete.
    fn first_message(&self) -> Option<(usize, usize)> {
        if self.messages()? == 0 {
            return None;
        }
        let mut len = 0;
        for (at, part) in self.parts.iter().enumerate() {
            len += part.len();
            if part.ends().any() {
                return Some((at + 1, len));
            }
        }
        None
    }
}

impl<T> Sockets<T> {
    /// Makes a new connection one of type SOCK_SEQPACKET.
    pub(super) fn carry_messages(&mut self, id: StreamId) {
        if let Some(conn) = self.get_mut(id) {
            conn.messages = Some(Box::default());
        }
    }

    /// Stores a received part of a message, as [`deliver`](Self::deliver) does for a stream.
    pub(crate) fn deliver_part(
        &mut self,
        id: StreamId,
        held: HeldBuffer<T>,
        store: &mut impl Store<Token = T>,
    ) {
        let eighth = |pool: u32| {
            self.pools
                .get(pool as usize)
                .map_or(1, |pool| pool.eighth())
        };
        let most_held = self.get(id).map(|conn| eighth(conn.pool));
        let Some(conn) = self.conns.get_mut(id.index as usize).filter(|conn| {
            conn.used && conn.generation == id.generation && conn.messages.is_some()
        }) else {
            return store.release(held.token);
        };
        if conn.recv_shutdown {
            return self.discard(id, held, store);
        }
        let Some(messages) = conn.messages.as_deref_mut() else {
            return;
        };
        let (len, ends) = (held.len as usize, held.ends);
        self.counted.received += len as u64;
        let copies = conn.stalled || most_held.is_some_and(|most| messages.incomplete_held >= most);
        let begun = messages.incomplete_bytes > 0;
        messages.incomplete_bytes += len;
        messages.incomplete_held += u32::from(!copies && len > 0);
        let first = messages.complete == 0;
        if ends.any() {
            conn.unread += messages.incomplete_bytes;
            messages.incomplete_bytes = 0;
            messages.incomplete_held = 0;
            messages.complete += 1;
        }
        if len > 0 && !copies {
            let since = held.since;
            conn.parts.push_back(ReceivedPart::Held(held));
            self.add_held(id.index, since);
        } else {
            let mut copied = len;
            match conn.parts.back_mut() {
                // A part without bytes marks the end of the part before it.
                Some(ReceivedPart::Held(last)) if len == 0 && begun => last.ends = ends,
                _ => {
                    copied += cost(ends);
                    conn.push_copy(ends, len, |bytes| {
                        if len > 0 {
                            copy_out(store, &held, bytes);
                        }
                    });
                }
            }
            self.counted.copied_aside += len as u64;
            self.add_copied(id.index, copied);
            store.release(held.token);
        }
        if ends.any() && first {
            self.set_ready(id);
        }
    }

    /// Copies the first message to `out`, truncated to the length of `out`, and consumes the whole
    /// message unless `peek`. `None`: there is no complete message.
    pub(crate) fn read_message(
        &mut self,
        id: StreamId,
        out: &mut [u8],
        peek: bool,
        store: &mut impl Store<Token = T>,
    ) -> Option<Received> {
        let conn = self.get(id)?;
        let (parts, len) = conn.first_message()?;
        let mut copied = 0;
        let mut end_of_record = false;
        for part in conn.parts.iter().take(parts) {
            let target = out.get_mut(copied..).unwrap_or(&mut []);
            let step = target.len().min(part.len());
            let target = &mut target[..step];
            match part {
                ReceivedPart::Held(held) if step > 0 => {
                    if let Some(memory) = store.memory(&held.token) {
                        let pieces = store.pieces(&held.token);
                        memory.read(pieces, held.offset as usize, target);
                    }
                }
                ReceivedPart::Held(_) => {}
                ReceivedPart::Copied { bytes, taken, .. } => {
                    target.copy_from_slice(&bytes[*taken..*taken + step]);
                }
            }
            copied += step;
            end_of_record = part.ends() == MessageEnd::Record;
        }
        if !peek {
            self.counted.copied_out += copied as u64;
            self.consume_message(id, parts, store);
        }
        Some(Received {
            len,
            copied,
            end_of_record,
        })
    }

    /// Removes the first message, which has `parts` parts, and returns its credit.
    fn consume_message(&mut self, id: StreamId, parts: usize, store: &mut impl Store<Token = T>) {
        let mut bytes = 0;
        for _ in 0..parts {
            let first = self.get(id).and_then(|conn| conn.parts.front());
            bytes += first.map_or(0, ReceivedPart::len);
            self.drop_front(id, store);
        }
        self.consumed(id, bytes, store);
        self.count_consumed_message(id, bytes, store);
    }

    /// Counts the first message, of `bytes` bytes, as consumed.
    fn count_consumed_message(
        &mut self,
        id: StreamId,
        bytes: usize,
        store: &mut impl Store<Token = T>,
    ) {
        let Some(conn) = self.get_mut(id) else { return };
        if let Some(messages) = &mut conn.messages {
            messages.complete = messages.complete.saturating_sub(1);
        }
        if let Some(flow) = conn.flow.filter(|_| bytes == 0) {
            store.consumed_empty(conn.pool, flow, 1);
        }
    }

    /// Leases the first message: a lease for each part, in place where the limits allow. An empty
    /// message has none. The flag of the result: the message ends a record (MSG_EOR).
    pub(crate) fn lease_message(
        &mut self,
        id: StreamId,
        store: &mut impl Store<Token = T>,
    ) -> Result<(Vec<LeaseParts>, bool), NoLease> {
        let conn = self.get(id).ok_or(NoLease::Empty)?;
        let (mut parts, len) = conn.first_message().ok_or(NoLease::Empty)?;
        let last = conn.parts.get(parts - 1).map(ReceivedPart::ends);
        let ends_record = last == Some(MessageEnd::Record);
        if len == 0 {
            self.consume_message(id, parts, store);
            return Ok((Vec::new(), ends_record));
        }
        // Connections share the entries of the lease table as they do for streams. A message takes
        // an entry for each part or, merged into one copy, a single one.
        let lent = conn.lent as usize;
        if lent + 2 * parts > self.free_lent() {
            self.merge_parts(id, parts, store);
            parts = 1;
        }
        if lent + parts > self.free_lent() {
            return Err(NoLease::TooMany);
        }
        let mut leases = Vec::with_capacity(parts);
        let mut lent = 0;
        while lent < parts {
            // The entries were checked above.
            let Ok(lease) = self.lease(id, store) else {
                break;
            };
            if lease.len > 0 {
                leases.push(lease);
            } else {
                // A part without bytes that only carries the end.
                self.end_lease(lease.index, store);
            }
            lent += 1;
        }
        self.count_consumed_message(id, len, store);
        Ok((leases, ends_record))
    }

    /// Replaces the first `parts` parts by one copy of them.
    fn merge_parts(&mut self, id: StreamId, parts: usize, store: &mut impl Store<Token = T>) {
        let Some(conn) = self.get_mut(id).filter(|_| parts > 1) else {
            return;
        };
        let mut all = Vec::new();
        let mut last = MessageEnd::Nothing;
        // Buffers released, their bytes, and what the former copies counted for.
        let (mut released, mut newly_copied, mut copied_before) = (0, 0, 0);
        for part in conn.parts.drain(..parts.min(conn.parts.len())) {
            last = part.ends();
            match part {
                ReceivedPart::Held(held) => {
                    copy_out(store, &held, &mut all);
                    newly_copied += held.len as usize;
                    released += 1;
                    store.release(held.token);
                }
                ReceivedPart::Copied { bytes, taken, ends } => {
                    all.extend_from_slice(bytes.get(taken..).unwrap_or(&[]));
                    copied_before += bytes.len() - taken + cost(ends);
                }
            }
        }
        let copied_now = all.len() + cost(last);
        conn.parts.push_front(ReceivedPart::Copied {
            bytes: all,
            taken: 0,
            ends: last,
        });
        self.counted.copied_aside += newly_copied as u64;
        self.remove_copied(id.index, copied_before);
        self.add_copied(id.index, copied_now);
        if released > 0 {
            self.remove_held(id.index, released);
        }
    }

    /// Discards an incomplete message, of which no more parts will arrive, and returns its credit.
    pub(crate) fn discard_incomplete_message(
        &mut self,
        id: StreamId,
        store: &mut impl Store<Token = T>,
    ) {
        let Some(conn) = self.get_mut(id) else { return };
        let Some(messages) = conn.messages.as_deref_mut() else {
            return;
        };
        let bytes = std::mem::take(&mut messages.incomplete_bytes);
        messages.incomplete_held = 0;
        let (mut released, mut copies) = (0, 0);
        while conn.parts.back().is_some_and(|part| !part.ends().any()) {
            let Some(part) = conn.parts.pop_back() else {
                break;
            };
            match part {
                ReceivedPart::Held(held) => {
                    store.release(held.token);
                    released += 1;
                }
                ReceivedPart::Copied { bytes, taken, .. } => copies += bytes.len() - taken,
            }
        }
        if let Some(flow) = conn.flow.filter(|_| bytes > 0) {
            store.consumed(conn.pool, flow, bytes as u32);
        }
        self.remove_copied(id.index, copies);
        if released > 0 {
            self.remove_held(id.index, released);
        }
        self.clear_stalled_if_drained(id.index);
    }
}
