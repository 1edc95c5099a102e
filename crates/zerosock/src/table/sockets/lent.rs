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

    /// Leases the first unread part: in place if the limits allow, else as a copy.
    pub(crate) fn lease(
        &mut self,
        id: StreamId,
        store: &mut impl Store<Token = T>,
    ) -> Result<LeaseParts, NoLease> {
        let free = self.free_lent.len();
        let conn = self.get_mut(id).filter(|conn| !conn.parts.is_empty());
        let conn = conn.ok_or(NoLease::Empty)?;
        if !conn.may_lend_one_of(free) {
            return Err(NoLease::TooMany);
        }
        let part = conn.parts.pop_front().ok_or(NoLease::Empty)?;
        let len = part.len();
        conn.unread = conn.unread.saturating_sub(len);
        conn.taken += len as u64;
        conn.stalled &= !conn.parts.is_empty();
        match part {
            ReceivedPart::Held(held) => {
                self.unlist_held(id.index, 1);
                self.lease_held(id, held, store)
            }
            ReceivedPart::Copied { bytes, taken, ends } => {
                self.remove_copied(id.index, len + cost(ends));
                let place = BufferPlace::Copied((Arc::new(bytes), taken));
                self.add_lease(id, len as u32, None, place, store)
            }
        }
    }

    /// Leases `held`, which has just arrived at a connection that holds nothing. If the connection has too
    /// many leases, the bytes are unread.
    #[inline(always)] // saves a copy of the token
    pub(crate) fn lease_arrived(
        &mut self,
        id: StreamId,
        held: HeldBuffer<T>,
        store: &mut impl Store<Token = T>,
    ) -> Result<LeaseParts, NoLease> {
        let free = self.free_lent.len();
        let Some(conn) = self.get_mut(id).filter(|conn| conn.may_lend_one_of(free)) else {
            self.deliver(id, held, store);
            return Err(self.get(id).map_or(NoLease::Empty, |_| NoLease::TooMany));
        };
        if store.memory(&held.token).is_none() {
            // The memory was lost since the packet was taken, and its bytes are undefined.
            store.release(held.token);
            return Err(NoLease::Empty);
        }
        let pool = conn.pool;
        conn.taken += u64::from(held.len);
        self.counted.received += u64::from(held.len);
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.add_held(held.since, self.hold);
        }
        self.lease_held(id, held, store)
    }

    /// Leases a buffer that is counted in the pool, but not with the connection. The caller has checked
    /// that there is a free entry.
    #[inline(always)] // as `lease_arrived`
    fn lease_held(
        &mut self,
        id: StreamId,
        held: HeldBuffer<T>,
        store: &mut impl Store<Token = T>,
    ) -> Result<LeaseParts, NoLease> {
        let len = held.len;
        let conn = self.conns.get(id.index as usize);
        let in_place = conn.is_some_and(|conn| self.may_lease(conn.pool, conn.leased));
        match in_place.then(|| place(store, &held)).flatten() {
            Some(place) => {
                self.counted.leased += u64::from(len);
                self.add_lease(id, len, Some(held), place, store)
            }
            None => self.lease_copy(id, held, store),
        }
    }

    /// Leases a copy of a buffer, which is returned.
    #[cold]
    fn lease_copy(
        &mut self,
        id: StreamId,
        held: HeldBuffer<T>,
        store: &mut impl Store<Token = T>,
    ) -> Result<LeaseParts, NoLease> {
        let len = held.len;
        let mut bytes = Vec::with_capacity(len as usize);
        copy_out(store, &held, &mut bytes);
        self.counted.copied_aside += u64::from(len);
        store.release(held.token);
        let pool = self.get(id).map(|conn| conn.pool);
        if let Some(pool) = pool.and_then(|pool| self.pools.get_mut(pool as usize)) {
            pool.remove_held(1);
        }
        let place = BufferPlace::Copied((Arc::new(bytes), 0));
        self.add_lease(id, len, None, place, store)
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

    /// Enters a new lease of a connection. `held`: its buffer, if it is in place.
    #[inline(always)] // as `lease_arrived`
    fn add_lease(
        &mut self,
        id: StreamId,
        len: u32,
        held: Option<HeldBuffer<T>>,
        place: BufferPlace,
        store: &impl Store<Token = T>,
    ) -> Result<LeaseParts, NoLease> {
        let index = self.free_lent.pop().ok_or(NoLease::TooMany)?;
        self.lease_table.begin(index);
        let (Some(conn), Some(lent)) = (
            self.conns.get_mut(id.index as usize),
            self.lent.get_mut(index as usize),
        ) else {
            return Err(NoLease::Empty);
        };
        let pool_index = conn.pool;
        let mut has_room = false;
        if let Some(pool) = self.pools.get_mut(pool_index as usize) {
            if held.is_some() {
                lent.place = pool.leases.len() as u32;
                pool.leases.push(index);
                conn.leased += 1;
            }
            has_room = pool.held < pool.limit();
        }
        conn.lent += 1;
        lent.kind = LentKind::Lease;
        lent.conn = Some(id);
        lent.pool = pool_index;
        lent.len = len;
        lent.held = held;
        lent.overdue = false;
        let flow = conn.flow.filter(|_| has_room);
        let round = match flow.is_some_and(|flow| store.may_return_later(pool_index, flow)) {
            true => Some(self.lease_table.round()),
            false => {
                // The leases before it may free what the peer waits for, those of other connections too:
                // they hold buffers of the same pool.
                self.lease_table.end_round();
                None
            }
        };
        let len = len as usize;
        Ok(LeaseParts {
            index,
            len,
            place,
            round,
        })
    }

    /// The pool of a lease; `None` if `index` is none.
    #[inline]
    pub(crate) fn pool_of_lease(&self, index: u32) -> Option<u32> {
        let lent = self.lent.get(index as usize)?;
        (lent.kind == LentKind::Lease).then_some(lent.pool)
    }

    /// Ends a dropped lease: returns its buffer and gives the sender credit. For the recheck index
    /// ([`Leases::recheck_index`](crate::table::leases::Leases::recheck_index)), moves the overdue
    /// leases that have no readers any more. Returns false if `index` is neither; it may be a loan.
    #[inline]
    pub(crate) fn end_lease(&mut self, index: u32, store: &mut impl Store<Token = T>) -> bool {
        let Some(lent) = self.lent.get_mut(index as usize) else {
            return self.recheck(index, store);
        };
        if lent.kind != LentKind::Lease {
            return false;
        }
        lent.kind = LentKind::Nothing;
        lent.copy = None;
        self.free_lent.push(index);
        let (conn, pool, place, len) = (lent.conn, lent.pool, lent.place, lent.len);
        let mut in_place = 0;
        if let Some(held) = lent.held.take() {
            in_place = 1;
            store.release(held.token);
            self.unlist_lease(pool, place);
        }
        if let Some(conn) = conn.and_then(|id| self.get_mut(id)) {
            conn.lent = conn.lent.saturating_sub(1);
            conn.leased = conn.leased.saturating_sub(in_place);
            conn.stalled &= !conn.parts.is_empty();
            if let Some(flow) = conn.flow {
                store.consumed(pool, flow, len);
            }
        }
        true
    }

    /// Moves the overdue leases without readers if `index` is the recheck index; else returns false.
    #[cold]
    fn recheck(&mut self, index: u32, store: &mut impl Store<Token = T>) -> bool {
        if index != self.lease_table.recheck_index() {
            return false;
        }
        self.lease_table.begin_recheck();
        self.recheck_overdue(store);
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
        let (conn, pool, place) = (lent.conn, lent.pool, lent.place);
        if let Some(held) = lent.held.take() {
            let mut bytes = Vec::with_capacity(held.len as usize);
            copy_out(store, &held, &mut bytes);
            self.counted.copied_aside += bytes.len() as u64;
            lent.copy = Some((Arc::new(bytes), 0));
            store.release(held.token);
            self.count_returned(conn, pool, place);
        }
        true
    }

    /// Takes a lease's buffer under its readers: from now on they may read other bytes than were
    /// sent. With `keep` the buffer is not returned to the peer.
    pub(super) fn revoke(&mut self, index: u32, keep: bool, store: &mut impl Store<Token = T>) {
        let Some(lent) = self.lent.get_mut(index as usize) else {
            return;
        };
        let (conn, pool, place) = (lent.conn, lent.pool, lent.place);
        if let Some(held) = lent.held.take() {
            self.lease_table.mark_torn(index);
            if !keep {
                store.release(held.token);
            }
            self.count_returned(conn, pool, place);
        }
    }

    /// Since when a lease has held its buffer; `None` if it holds none, or is overdue.
    pub(super) fn leased_since(&mut self, index: u32, now: Instant) -> Option<Instant> {
        let lent = self.lent.get_mut(index as usize);
        let held = lent.filter(|lent| !lent.overdue)?.held.as_mut()?;
        Some(*held.since.get_or_insert(now))
    }

    /// Whether a lease is to be moved as soon as it has no readers.
    pub(super) fn is_overdue(&self, index: u32) -> bool {
        let lent = self.lent.get(index as usize);
        lent.is_some_and(|lent| lent.overdue)
    }

    /// Moves a lease: now, or as soon as it has no readers.
    pub(super) fn move_out_when_unread(&mut self, index: u32, store: &mut impl Store<Token = T>) {
        if self.move_out(index, store) {
            return;
        }
        let lent = self.lent.get_mut(index as usize);
        if let Some(lent) = lent.filter(|lent| lent.held.is_some()) {
            lent.overdue = true;
            if let Some(pool) = self.pools.get_mut(lent.pool as usize) {
                pool.has_overdue = true;
            }
        }
    }

    /// Detaches the leases of a connection that is removed. Those without readers return their buffers at
    /// once.
    pub(super) fn detach_leases(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        let Some((mut left, pool, flow)) = self.get(id).map(|c| (c.lent, c.pool, c.flow)) else {
            return;
        };
        // The table is searched, because a connection seldom ends while leases of it are out.
        let mut bytes = 0;
        for index in 0..self.lent.len() as u32 {
            if left == 0 {
                break;
            }
            let lent = self.lent.get(index as usize);
            if lent.is_none_or(|lent| lent.kind != LentKind::Lease || lent.conn != Some(id)) {
                continue;
            }
            left -= 1;
            self.move_out_when_unread(index, store);
            bytes += self.lent.get(index as usize).map_or(0, |lent| lent.len);
        }
        // Given now, because the protocol core forgets the connection when everything received is
        // consumed.
        if let Some(flow) = flow.filter(|_| bytes > 0) {
            store.consumed(pool, flow, bytes);
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
