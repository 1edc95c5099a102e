//! Leases on received bytes: creation, copying out under the holder, return of the buffer.
//!
//! A lease's index in this table is its index in [`Leases`](crate::table::leases). Loans have
//! entries here too, because holders return both in the same way; the backend keeps the loaned
//! buffer.

use std::sync::Arc;

use zerosock_proto::Instant;

use super::Sockets;
use super::ids::{StreamId, StreamState};
use super::lent_entry::{LentEntry, LentKind};
use super::message_end::cost;
use super::received::{HeldBuffer, ReceivedPart, copy_out};
use super::store::Store;
use crate::table::leases::NONE;
use crate::table::places::{BufferPlace, Copied, LeaseParts, NoLease, PIECES};
use crate::table::transfers::{Ahead, Next, NextKind};

impl<T> Sockets<T> {
    /// What a reader would find, and how a [`lease`](Self::lease) would be made.
    pub(crate) fn ahead(&self, id: StreamId, store: &impl Store<Token = T>) -> Option<Ahead> {
        let conn = self.get(id)?;
        let next = conn.parts.front().map(|part| Next {
            len: part.len(),
            kind: match part {
                ReceivedPart::Held(held) if can_place(store, held) => {
                    if self.may_lease(conn.pool, conn.leased) {
                        NextKind::InPlace
                    } else {
                        NextKind::Bounded
                    }
                }
                _ => NextKind::Copied,
            },
        });
        Some(Ahead {
            unread: conn.unread,
            closed: conn.is_at_end() || conn.state == StreamState::Reset,
            next,
        })
    }

    /// Leases the first unread part, or `arrived`, which has just arrived at a connection that holds
    /// nothing: in place if the limits allow, else as a copy.
    #[inline]
    pub(crate) fn lease(
        &mut self,
        id: StreamId,
        arrived: Option<HeldBuffer<T>>,
        store: &mut impl Store<Token = T>,
    ) -> Result<LeaseParts, NoLease> {
        let free = self.free_lent.len();
        let conn = match self.get_mut(id) {
            // A connection may use at most half of the free entries, the next one half of the rest:
            // a reader that never drops a lease leaves entries to other connections and to loans.
            Some(conn) if (conn.lent as usize) < free => conn,
            conn => {
                let full = conn.is_some_and(|conn| arrived.is_some() || !conn.parts.is_empty());
                if let Some(held) = arrived {
                    self.deliver(id, held, store);
                }
                return Err(if full {
                    NoLease::TooMany
                } else {
                    NoLease::Empty
                });
            }
        };
        let (pool, leased) = (conn.pool, conn.leased);
        let part = match arrived {
            Some(held) => {
                if store.memory(&held.token).is_none() {
                    // The memory was lost since the packet was taken, and its bytes are undefined.
                    store.release(held.token);
                    return Err(NoLease::Empty);
                }
                conn.taken += u64::from(held.len);
                self.counted.received += u64::from(held.len);
                self.add_held(id.index, held.since);
                ReceivedPart::Held(held)
            }
            None => {
                let part = conn.parts.pop_front().ok_or(NoLease::Empty)?;
                conn.unread = conn.unread.saturating_sub(part.len());
                conn.taken += part.len() as u64;
                part
            }
        };
        let len = part.len();
        let (held, place) = match part {
            ReceivedPart::Copied { bytes, taken, ends } => {
                self.remove_copied(id.index, len + cost(ends));
                (None, BufferPlace::Copied((Arc::new(bytes), taken)))
            }
            ReceivedPart::Held(held) => {
                match self.may_lease(pool, leased).then(|| place(store, &held)) {
                    Some(Some(place)) => {
                        self.counted.leased += len as u64;
                        (Some(held), place)
                    }
                    _ => {
                        let mut bytes = Vec::with_capacity(len);
                        copy_out(store, &held, &mut bytes);
                        self.counted.copied_aside += len as u64;
                        store.release(held.token);
                        self.remove_held(id.index, 1);
                        (None, BufferPlace::Copied((Arc::new(bytes), 0)))
                    }
                }
            }
        };
        let index = self.free_lent.pop().ok_or(NoLease::TooMany)?;
        let round = self.add_lease(index, id, len as u32, held, store);
        self.clear_stalled_if_drained(id.index);
        Ok(LeaseParts {
            index,
            len,
            place,
            round,
        })
    }

    /// Leases a copy that belongs to no connection.
    pub(crate) fn lend_copy(&mut self, bytes: Vec<u8>) -> Result<LeaseParts, (NoLease, Vec<u8>)> {
        // Leaves to others as much as connections do.
        if self.free_lent.len() <= self.lent.len() / 4 {
            return Err((NoLease::TooMany, bytes));
        }
        let Some(index) = self.free_lent.pop() else {
            return Err((NoLease::TooMany, bytes));
        };
        self.lease_table.begin(index);
        let len = bytes.len();
        if let Some(lent) = self.lent.get_mut(index as usize) {
            *lent = LentEntry {
                kind: LentKind::Lease,
                len: len as u32,
                ..LentEntry::default()
            };
        }
        let place = BufferPlace::Copied((Arc::new(bytes), 0));
        Ok(LeaseParts {
            index,
            len,
            place,
            round: None,
        })
    }

    /// Enters a new lease. Returns the round if its return may wait for the endpoint's next call.
    #[inline]
    fn add_lease(
        &mut self,
        index: u32,
        id: StreamId,
        len: u32,
        held: Option<HeldBuffer<T>>,
        store: &impl Store<Token = T>,
    ) -> Option<u32> {
        self.lease_table.begin(index);
        let conn = self.conns.get_mut(id.index as usize)?;
        let mut has_room = false;
        if let Some(pool) = self.pools.get_mut(conn.pool as usize) {
            pool.leased += u32::from(held.is_some());
            has_room = pool.held < pool.limit();
        }
        conn.leased += u32::from(held.is_some());
        conn.lent += 1;
        let next = std::mem::replace(&mut conn.leases, index);
        if let Some(first) = self.lent.get_mut(next as usize) {
            first.previous = index;
        }
        let later =
            has_room && (conn.flow).is_some_and(|flow| store.may_return_later(conn.pool, flow));
        if !later {
            // The leases before it may free what the peer waits for, those of other connections too: they
            // hold buffers of the same pool.
            self.lease_table.end_round();
        }
        let pool = conn.pool;
        *self.lent.get_mut(index as usize)? = LentEntry {
            kind: LentKind::Lease,
            conn: Some(id),
            pool,
            len,
            held,
            copy: None,
            overdue: NONE,
            previous: NONE,
            next,
        };
        later.then(|| self.lease_table.round())
    }

    /// Ends a dropped lease: returns its buffer and gives the sender credit. For the recheck index
    /// ([`Leases::recheck_index`](crate::table::leases::Leases::recheck_index)), moves the overdue
    /// leases that have no readers any more. Returns false if `index` is neither; it may be a loan.
    pub(crate) fn end_lease(&mut self, index: u32, store: &mut impl Store<Token = T>) -> bool {
        let Some(lent) = self.lent.get_mut(index as usize) else {
            if index == self.lease_table.recheck_index() {
                self.lease_table.begin_recheck();
                self.recheck_overdue(store);
                return true;
            }
            return false;
        };
        if lent.kind != LentKind::Lease {
            return false;
        }
        lent.kind = LentKind::Nothing;
        lent.copy = None;
        let held = lent.held.take();
        let (conn, pool, len) = (lent.conn, lent.pool, lent.len);
        let (overdue, previous, next) = (lent.overdue, lent.previous, lent.next);
        self.free_lent.push(index);
        if let Some(next) = self.lent.get_mut(next as usize) {
            next.previous = previous;
        }
        if let Some(previous) = self.lent.get_mut(previous as usize) {
            previous.next = next;
        } else if let Some(conn) = conn.and_then(|id| self.get_mut(id)) {
            conn.leases = next;
        }
        if let Some(held) = held {
            store.release(held.token);
            self.remove_leased(conn.map_or(NONE, |id| id.index), pool);
            if conn.is_none() {
                self.forget_orphan(pool, index);
            }
        }
        self.forget_overdue(pool, overdue);
        if let Some(conn) = conn.and_then(|id| self.get_mut(id)) {
            conn.lent = conn.lent.saturating_sub(1);
            conn.stalled &= !conn.parts.is_empty();
            if let Some(flow) = conn.flow {
                store.consumed(pool, flow, len);
            }
        }
        true
    }

    /// The copy of a lease's bytes, if they were moved.
    pub(crate) fn copy_of(&self, index: u32) -> Option<Copied> {
        self.lent.get(index as usize)?.copy.clone()
    }

    /// Copies the bytes of a lease and returns its buffer, unless it has readers.
    pub(super) fn move_out(&mut self, index: u32, store: &mut impl Store<Token = T>) -> bool {
        let Some(lent) = self.lent.get_mut(index as usize) else {
            return false;
        };
        if lent.held.is_none() || !self.lease_table.try_move(index) {
            return false;
        }
        let (conn, pool) = (lent.conn, lent.pool);
        if let Some(held) = lent.held.take() {
            let mut bytes = Vec::with_capacity(held.len as usize);
            copy_out(store, &held, &mut bytes);
            self.counted.copied_aside += bytes.len() as u64;
            lent.copy = Some((Arc::new(bytes), 0));
            store.release(held.token);
            self.remove_leased(conn.map_or(NONE, |id| id.index), pool);
        }
        true
    }

    /// Takes a lease's buffer under its readers: from now on they may read other bytes than were
    /// sent. With `keep` the buffer is not returned to the peer.
    pub(super) fn revoke(&mut self, index: u32, keep: bool, store: &mut impl Store<Token = T>) {
        let Some(lent) = self.lent.get_mut(index as usize) else {
            return;
        };
        let (conn, pool) = (lent.conn, lent.pool);
        if let Some(held) = lent.held.take() {
            self.lease_table.mark_torn(index);
            if !keep {
                store.release(held.token);
            }
            self.remove_leased(conn.map_or(NONE, |id| id.index), pool);
        }
    }

    /// Since when a lease has held its buffer; `None` if it holds none or is on the overdue list.
    pub(super) fn leased_since(&mut self, index: u32, now: Instant) -> Option<Instant> {
        let lent = self.lent.get_mut(index as usize);
        let held = lent.filter(|lent| lent.overdue == NONE)?.held.as_mut()?;
        Some(*held.since.get_or_insert(now))
    }

    /// Whether a lease holds its buffer.
    pub(super) fn is_held(&self, index: u32) -> bool {
        self.lent
            .get(index as usize)
            .is_some_and(|lent| lent.held.is_some())
    }

    /// Stores a lease's position in the overdue list; returns the previous one.
    pub(super) fn set_overdue(&mut self, index: u32, place: u32) -> u32 {
        let lent = self.lent.get_mut(index as usize);
        lent.map_or(NONE, |lent| std::mem::replace(&mut lent.overdue, place))
    }

    /// The next lease in the connection's list.
    pub(super) fn next_lease(&self, index: u32) -> u32 {
        self.lent.get(index as usize).map_or(NONE, |lent| lent.next)
    }

    /// Detaches the leases of a connection that is removed. Those without readers return their
    /// buffers at once.
    pub(super) fn orphan_leases(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        let mut index = self.get(id).map_or(NONE, |conn| conn.leases);
        let mut bytes = 0;
        while let Some(next) = self.lent.get(index as usize).map(|lent| lent.next) {
            let moved = self.move_out(index, store);
            let Some(lent) = self.lent.get_mut(index as usize) else {
                break;
            };
            bytes += lent.len;
            lent.conn = None;
            (lent.previous, lent.next) = (NONE, NONE);
            let pool = lent.pool;
            if !moved && lent.held.is_some() {
                self.add_orphan(id.index, pool, index);
            }
            let place = self.set_overdue(index, NONE);
            self.forget_overdue(pool, place);
            index = next;
        }
        if let Some(conn) = self.get_mut(id) {
            conn.leases = NONE;
            // Given now, because the protocol core forgets the connection when everything received
            // is consumed.
            if let Some(flow) = conn.flow.filter(|_| bytes > 0) {
                store.consumed(conn.pool, flow, bytes);
            }
        }
    }

    /// Reserves an entry for a loan; freed by [`end_loan`](Self::end_loan).
    pub(crate) fn begin_loan(&mut self) -> Option<u32> {
        let index = self.free_lent.pop()?;
        self.lease_table.begin(index);
        if let Some(lent) = self.lent.get_mut(index as usize) {
            lent.kind = LentKind::Loan;
        }
        Some(index)
    }

    /// Frees the entry of a loan. Returns false if `index` is not a loan.
    pub(crate) fn end_loan(&mut self, index: u32) -> bool {
        let Some(lent) = self.lent.get_mut(index as usize) else {
            return false;
        };
        if lent.kind != LentKind::Loan {
            return false;
        }
        lent.kind = LentKind::Nothing;
        self.free_lent.push(index);
        true
    }

    /// Free entries.
    pub(super) fn free_lent(&self) -> usize {
        self.free_lent.len()
    }

    /// Leases and loans that are out.
    #[cfg(test)]
    pub(crate) fn lent_out(&self) -> usize {
        self.lent.len() - self.free_lent.len()
    }
}

/// Whether [`place`] succeeds.
fn can_place<T>(store: &impl Store<Token = T>, held: &HeldBuffer<T>) -> bool {
    store.memory(&held.token).is_some() && store.pieces(&held.token).len() <= PIECES
}

/// Describes where a held buffer lies; `None` if it has too many pieces.
fn place<T>(store: &impl Store<Token = T>, held: &HeldBuffer<T>) -> Option<BufferPlace> {
    let (memory, pieces) = (store.memory(&held.token)?, store.pieces(&held.token));
    BufferPlace::new(memory, pieces, held.offset as usize)
}
