//! The received bytes of a connection: storing and reading an ordered list of buffers and copies.

use super::ids::StreamId;
use super::message_end::{MessageEnd, cost};
use super::messages::Received;
use super::received::{HeldBuffer, ReceivedPart, copy_out};
use super::store::Store;
use super::{Conn, Sockets};
use crate::table::transfers::Payload;
use zerosock_proto::vsock::FlowId;
use zerosock_ring::SliceBuf;

/// Limit on one copy buffer, in bytes, so that its allocation does not fail.
const MAX_COPIED: usize = 64 << 10;

impl<T> Conn<T> {
    /// See [`Sockets::drained_flow`].
    #[inline]
    pub(crate) fn drained_flow(&self) -> Option<FlowId> {
        self.flow
            .filter(|_| self.parts.is_empty() && !self.recv_shutdown)
    }

    /// Appends `len` bytes to the last copy: many small packets share one buffer of at most
    /// [`MAX_COPIED`] bytes, unless a message ends there. The read part of a buffer is removed when
    /// it reaches half, so that the memory stays below twice the unread bytes.
    pub(super) fn push_copy(
        &mut self,
        ends: MessageEnd,
        len: usize,
        copy: impl FnOnce(&mut Vec<u8>),
    ) {
        if !self.whole
            && let Some(ReceivedPart::Copied {
                bytes,
                taken,
                ends: end @ MessageEnd::Nothing,
            }) = self.parts.back_mut()
            && bytes.len() - *taken + len <= MAX_COPIED
            && bytes.try_reserve(len).is_ok()
        {
            if *taken >= bytes.len() / 2 {
                bytes.drain(..*taken);
                *taken = 0;
            }
            copy(bytes);
            *end = ends;
        } else {
            let mut bytes = Vec::with_capacity(len);
            copy(&mut bytes);
            self.parts.push_back(ReceivedPart::Copied {
                bytes,
                taken: 0,
                ends,
            });
        }
    }
}

impl<T> Sockets<T> {
    /// Stores `len` bytes at `offset` of a buffer's pieces. The buffer is held, or returned at once
    /// if its bytes were copied (the connection has stalled) or discarded.
    #[inline]
    pub(crate) fn deliver(
        &mut self,
        id: StreamId,
        held: HeldBuffer<T>,
        store: &mut impl Store<Token = T>,
    ) {
        let Some(conn) = self
            .conns
            .get_mut(id.index as usize)
            .filter(|conn| conn.used && conn.generation == id.generation && held.len > 0)
        else {
            return store.release(held.token);
        };
        if conn.recv_shutdown {
            return self.discard(id, held, store);
        }
        if conn.unread < conn.low_water as usize {
            self.set_ready(id);
        }
        let Some(conn) = self.conns.get_mut(id.index as usize) else {
            return;
        };
        self.counted.received += u64::from(held.len);
        conn.unread += held.len as usize;
        if !conn.stalled {
            let since = held.since;
            conn.parts.push_back(ReceivedPart::Held(held));
            return self.add_held(id.index, since);
        }
        self.counted.copied_aside += u64::from(held.len);
        let len = held.len as usize;
        conn.push_copy(MessageEnd::Nothing, len, |bytes| {
            copy_out(store, &held, bytes)
        });
        self.add_copied(id.index, held.len as usize);
        store.release(held.token);
    }

    /// Copies received bytes to `out` and consumes them unless `peek`.
    pub(crate) fn read(
        &mut self,
        id: StreamId,
        out: &mut [u8],
        peek: bool,
        store: &mut impl Store<Token = T>,
    ) -> usize {
        if peek {
            return self.peek(id, out, store);
        }
        let mut done = 0;
        let mut uncopied = 0;
        while let Some(rest) = out.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let Some(conn) = self.get_mut(id) else { break };
            let Some(part) = conn.parts.front_mut() else {
                break;
            };
            let len = rest.len().min(part.len());
            match part {
                ReceivedPart::Held(held) => {
                    if let Some(memory) = store.memory(&held.token) {
                        let pieces = store.pieces(&held.token);
                        memory.read(pieces, held.offset as usize, &mut rest[..len]);
                    }
                    held.offset += len as u32;
                    held.len -= len as u32;
                }
                ReceivedPart::Copied { bytes, taken, .. } => {
                    rest[..len].copy_from_slice(&bytes[*taken..*taken + len]);
                    *taken += len;
                    uncopied += len;
                }
            }
            done += len;
            if part.len() == 0 {
                self.drop_front(id, store);
            }
        }
        if uncopied > 0 {
            self.remove_copied(id.index, uncopied);
        }
        self.counted.copied_out += done as u64;
        self.consumed(id, done, store);
        done
    }

    /// Consumes up to `len` bytes that a peek returned; returns how many.
    pub(crate) fn skip(
        &mut self,
        id: StreamId,
        len: usize,
        store: &mut impl Store<Token = T>,
    ) -> usize {
        let mut done = 0;
        let mut uncopied = 0;
        while done < len {
            let Some(part) = self.get_mut(id).and_then(|conn| conn.parts.front_mut()) else {
                break;
            };
            let step = part.len().min(len - done);
            match part {
                ReceivedPart::Held(held) => {
                    held.offset += step as u32;
                    held.len -= step as u32;
                }
                ReceivedPart::Copied { taken, .. } => {
                    *taken += step;
                    uncopied += step;
                }
            }
            done += step;
            if part.len() == 0 {
                self.drop_front(id, store);
            }
        }
        if uncopied > 0 {
            self.remove_copied(id.index, uncopied);
        }
        self.counted.copied_out += done as u64;
        self.consumed(id, done, store);
        done
    }

    fn peek(&self, id: StreamId, out: &mut [u8], store: &impl Store<Token = T>) -> usize {
        let mut done = 0;
        let Some(conn) = self.get(id) else { return 0 };
        for part in &conn.parts {
            let rest = &mut out[done..];
            let len = rest.len().min(part.len());
            match part {
                ReceivedPart::Held(held) => {
                    if let Some(memory) = store.memory(&held.token) {
                        let pieces = store.pieces(&held.token);
                        memory.read(pieces, held.offset as usize, &mut rest[..len]);
                    }
                }
                ReceivedPart::Copied { bytes, taken, .. } => {
                    rest[..len].copy_from_slice(&bytes[*taken..*taken + len]);
                }
            }
            done += len;
        }
        done
    }

    /// Passes up to `most` parts to `look` in place and consumes them. Stops after the part for
    /// which `look` returns false.
    #[inline]
    pub(crate) fn consume_in_place(
        &mut self,
        id: StreamId,
        most: usize,
        look: &mut dyn FnMut(Payload<'_>) -> bool,
        store: &mut impl Store<Token = T>,
    ) -> usize {
        let mut shown = Shown {
            sockets: self,
            store,
            id,
            showing: false,
            bytes: 0,
        };
        let mut seen = 0;
        while seen < most {
            let Some(part) = shown.sockets.get(id).and_then(|conn| conn.parts.front()) else {
                break;
            };
            shown.bytes += part.len();
            shown.showing = true;
            let go_on = match part {
                ReceivedPart::Copied { bytes, taken, .. } => {
                    look(Payload::copied(&bytes[*taken..]))
                }
                ReceivedPart::Held(held) => {
                    let mut slices = SliceBuf::<4>::new();
                    let (offset, len) = (held.offset as usize, held.len as usize);
                    let mut covered = 0;
                    if let Some(memory) = shown.store.memory(&held.token) {
                        let pieces = shown.store.pieces(&held.token);
                        covered = memory.slices(pieces, offset, len, &mut slices);
                    }
                    if covered == len {
                        look(Payload::in_place(&slices))
                    } else {
                        // In more pieces than fit on the stack.
                        let mut bytes = Vec::with_capacity(len);
                        copy_out(&*shown.store, held, &mut bytes);
                        look(Payload::copied(&bytes))
                    }
                }
            };
            seen += 1;
            shown.taken();
            if !go_on {
                break;
            }
        }
        seen
    }

    /// The pool and the flow of a connection that holds nothing, so that arriving bytes may be passed
    /// to the reader directly; `None` if it has no flow or discards what arrives.
    #[inline]
    pub(crate) fn drained_flow(&self, id: StreamId) -> Option<(u32, FlowId)> {
        let conn = self.get(id)?;
        if conn.lent > 0 {
            // As in `consumed`.
            self.lease_table.end_round();
        }
        Some((conn.pool, conn.drained_flow()?))
    }

    /// Counts bytes passed to a reader in place without having been held.
    #[inline]
    pub(crate) fn count_shown(&mut self, bytes: usize) {
        self.counted.received += bytes as u64;
        self.counted.leased += bytes as u64;
    }

    /// Counts bytes copied to a reader without having been held.
    #[inline]
    pub(crate) fn count_read(&mut self, bytes: usize) {
        self.counted.received += bytes as u64;
        self.counted.copied_out += bytes as u64;
    }

    /// As `count_read`, for a message, of which the rest was discarded.
    #[inline]
    pub(crate) fn count_read_message(&mut self, message: &Received) {
        self.counted.received += message.len as u64;
        self.counted.copied_out += message.copied as u64;
    }

    /// Counts bytes copied because of the limits without having been held.
    pub(crate) fn count_copied(&mut self, bytes: usize) {
        self.counted.received += bytes as u64;
        self.counted.copied_aside += bytes as u64;
    }

    /// Counts bytes of such a copy that were copied to a reader.
    pub(crate) fn count_copied_out(&mut self, bytes: usize) {
        self.counted.copied_out += bytes as u64;
    }

    /// Removes the first part, all of which was read.
    #[inline]
    pub(super) fn drop_front(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        let Some(part) = self.get_mut(id).and_then(|conn| conn.parts.pop_front()) else {
            return;
        };
        match part {
            ReceivedPart::Held(held) => {
                store.release(held.token);
                self.remove_held(id.index, 1);
            }
            ReceivedPart::Copied { bytes, taken, ends } => {
                self.remove_copied(id.index, bytes.len() - taken + cost(ends));
            }
        }
        self.clear_stalled_if_drained(id.index);
    }

    /// Reports `bytes` removed from the list as consumed.
    #[inline]
    pub(super) fn consumed(
        &mut self,
        id: StreamId,
        bytes: usize,
        store: &mut impl Store<Token = T>,
    ) {
        if bytes == 0 {
            return;
        }
        if let Some(conn) = self.get_mut(id) {
            conn.unread = conn.unread.saturating_sub(bytes);
            conn.taken += bytes as u64;
            if let Some(flow) = conn.flow {
                store.consumed(conn.pool, flow, bytes as u32);
            }
            if conn.lent > 0 {
                // With these bytes, leases that are out may free what the peer waits for.
                self.lease_table.end_round();
            }
        }
    }

    /// SHUT_RD: reads return end of stream from now on, on Linux even if unread bytes had arrived.
    /// Those and all arriving buffers are returned; leases remain valid.
    pub(crate) fn shutdown_recv(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        self.drop_unread(id, store);
        if let Some(conn) = self.get_mut(id) {
            conn.recv_shutdown = true;
        }
    }

    /// Returns a buffer that arrived after SHUT_RD.
    #[cold]
    pub(super) fn discard(
        &mut self,
        id: StreamId,
        held: HeldBuffer<T>,
        store: &mut impl Store<Token = T>,
    ) {
        self.counted.received += u64::from(held.len);
        if let Some(conn) = self.get(id)
            && let Some(flow) = conn.flow.filter(|_| held.len > 0)
        {
            store.consumed(conn.pool, flow, held.len);
        }
        store.release(held.token);
    }

    /// Discards the unread bytes.
    pub(crate) fn drop_unread(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        let Some(unread) = self.get(id).map(|conn| conn.unread) else {
            return;
        };
        self.discard_incomplete_message(id, store);
        while self.get(id).is_some_and(|conn| !conn.parts.is_empty()) {
            self.drop_front(id, store);
        }
        self.consumed(id, unread, store);
        if let Some(messages) = self.get_mut(id).and_then(|conn| conn.messages.as_mut()) {
            messages.complete = 0;
        }
    }
}

/// Consumes the parts shown by `consume_in_place` when dropped, so that a panic of the callback
/// leaves the table consistent.
struct Shown<'a, T, S: Store<Token = T>> {
    sockets: &'a mut Sockets<T>,
    store: &'a mut S,
    id: StreamId,
    /// The callback is looking at the first part.
    showing: bool,
    bytes: usize,
}

impl<T, S: Store<Token = T>> Shown<'_, T, S> {
    /// The callback has returned.
    #[inline]
    fn taken(&mut self) {
        self.showing = false;
        self.sockets.drop_front(self.id, self.store);
    }
}

impl<T, S: Store<Token = T>> Drop for Shown<'_, T, S> {
    #[inline]
    fn drop(&mut self) {
        if self.showing {
            self.taken();
        }
        self.sockets.counted.leased += self.bytes as u64;
        self.sockets.consumed(self.id, self.bytes, self.store);
    }
}
