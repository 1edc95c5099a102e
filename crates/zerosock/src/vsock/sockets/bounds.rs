//! How many buffers may be held, and for how long.
//!
//! A buffer that is held is one that the peer's side cannot use. Three bounds keep one slow reader
//! from stopping everybody behind it:
//!
//! - in number, for all: of a pool at most three quarters are held, unread or on lease; at that
//!   point no more packets are taken in, until some come back or time is up;
//! - in number, for leases: a connection has an eighth of the pool on lease in place, all of them
//!   three eighths; beyond that a lease is a copy;
//! - in time: what was held for [`Sockets::hold`](super::Sockets) and can be moved is copied out.
//!   A connection of which unread buffers had to be copied has stalled: what comes for it is
//!   copied at once, until it has caught up. Credit bounds those copies.
//!
//! A lease under a reader stays where it is, and keeps counting.
//!
//! The holders of a pool are looked through when its oldest buffer may be due, not more often:
//! there are never more of them than buffers.

use super::parts::{Part, copy_out};
use super::{NONE, Sockets, Store, StreamId, due};
use zerosock_proto::Instant;

/// Buffers that come from one queue.
#[derive(Debug)]
pub(crate) struct Pool {
    /// How many there are.
    size: u32,
    /// Unread or on lease, in place.
    held: u32,
    /// On lease, in place.
    leased: u32,
    /// Connections that hold some.
    holders: Vec<u32>,
    /// Leases in place whose connection is gone.
    orphans: Vec<u32>,
    /// When to look next for what is due; `None` while nothing is held.
    check: Option<Instant>,
    /// Every lease is a copy.
    copied: bool,
}

impl Pool {
    fn limit(&self) -> u32 {
        (self.size / 4 * 3).max(1)
    }
}

impl<T> Sockets<T> {
    /// A new pool of `size` buffers; its number.
    pub(crate) fn add_pool(&mut self, size: u32) -> u32 {
        self.pools.push(Pool {
            size,
            held: 0,
            leased: 0,
            holders: Vec::new(),
            orphans: Vec::new(),
            check: None,
            copied: false,
        });
        self.pools.len() as u32 - 1
    }

    /// Whether leases of `pool` are copies, however few there are.
    pub(crate) fn lease_copies(&mut self, pool: u32, copied: bool) {
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.copied = copied;
        }
    }

    /// The pool has another number of buffers, because its queue was set up anew.
    pub(crate) fn resize_pool(&mut self, pool: u32, size: u32) {
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.size = size;
        }
    }

    /// Whether one more packet may be taken in from `pool`.
    #[inline]
    pub(crate) fn has_room(&self, pool: u32) -> bool {
        self.pools
            .get(pool as usize)
            .is_some_and(|pool| pool.held < pool.limit())
    }

    /// Buffers of `pool` that are held.
    #[cfg(test)]
    pub(crate) fn held(&self, pool: u32) -> u32 {
        self.pools.get(pool as usize).map_or(0, |pool| pool.held)
    }

    pub(super) fn may_lease(&self, pool: u32, leased: u32) -> bool {
        self.pools.get(pool as usize).is_some_and(|pool| {
            !pool.copied && leased < (pool.size / 8).max(1) && pool.leased < pool.size / 8 * 3 + 1
        })
    }

    /// A part in place was added to a connection.
    #[inline]
    pub(super) fn hold_one(&mut self, index: u32) {
        let Some(conn) = self.conns.get_mut(index as usize) else {
            return;
        };
        let Some(pool) = self.pools.get_mut(conn.pool as usize) else {
            return;
        };
        pool.held += 1;
        conn.held += 1;
        if conn.held == 1 {
            conn.holder = pool.holders.len() as u32;
            pool.holders.push(index);
        }
        if pool.check.is_none()
            && let Some(Part::Held(held)) = conn.parts.back()
        {
            pool.check = Some(due(held.since, self.hold));
        }
    }

    /// `count` buffers of a connection are held no more.
    #[inline]
    pub(super) fn unhold(&mut self, index: u32, count: u32) {
        let Some(conn) = self.conns.get_mut(index as usize) else {
            return;
        };
        let Some(pool) = self.pools.get_mut(conn.pool as usize) else {
            return;
        };
        pool.held = pool.held.saturating_sub(count);
        if pool.held == 0 {
            pool.check = None;
        }
        conn.held = conn.held.saturating_sub(count);
        if conn.held == 0 && conn.holder != NONE {
            let place = std::mem::replace(&mut conn.holder, NONE);
            pool.holders.swap_remove(place as usize);
            if let Some(&moved) = pool.holders.get(place as usize)
                && let Some(conn) = self.conns.get_mut(moved as usize)
            {
                conn.holder = place;
            }
        }
    }

    /// A held part became a lease in place.
    pub(super) fn lease_one(&mut self, index: u32, pool: u32) {
        if let Some(conn) = self.conns.get_mut(index as usize) {
            conn.leased += 1;
        }
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.leased += 1;
        }
    }

    /// A lease in place has given its buffer back. `index` is `NONE` if its connection is gone.
    pub(super) fn unlease_one(&mut self, index: u32, pool: u32) {
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.leased = pool.leased.saturating_sub(1);
            if index == NONE {
                pool.held = pool.held.saturating_sub(1);
                if pool.held == 0 {
                    pool.check = None;
                }
            }
        }
        if let Some(conn) = self.conns.get_mut(index as usize) {
            conn.leased = conn.leased.saturating_sub(1);
            self.unhold(index, 1);
        }
    }

    /// A lease under a reader has lost its connection.
    pub(super) fn add_orphan(&mut self, conn: u32, pool: u32, index: u32, since: Instant) {
        if let Some(conn) = self.conns.get_mut(conn as usize) {
            conn.leased = conn.leased.saturating_sub(1);
        }
        // Held no more by the connection, but still of the pool.
        self.unhold(conn, 1);
        let hold = self.hold;
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.held += 1;
            pool.orphans.push(index);
            pool.check.get_or_insert(due(since, hold));
        }
    }

    pub(super) fn forget_orphan(&mut self, pool: u32, index: u32) {
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.orphans.retain(|&orphan| orphan != index);
        }
    }

    /// A connection that had stalled has read everything: what comes is held again.
    #[inline]
    pub(super) fn catch_up(&mut self, index: u32) {
        if let Some(conn) = self.conns.get_mut(index as usize) {
            conn.stalled &= !conn.parts.is_empty();
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) has something to do.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.pools.iter().filter_map(|pool| pool.check).min()
    }

    /// Copies out what was held for too long.
    pub(crate) fn handle_timeout(&mut self, now: Instant, store: &mut impl Store<Token = T>) {
        for pool in 0..self.pools.len() {
            if self.pools[pool].check.is_some_and(|at| at <= now) {
                self.relieve(pool, now, store);
            }
        }
    }

    fn relieve(&mut self, pool: usize, now: Instant, store: &mut impl Store<Token = T>) {
        // Nothing that is here now and not due will be so before this.
        let mut check = due(now, self.hold);
        let mut at = 0;
        while let Some(&index) = self.pools[pool].holders.get(at) {
            if let Some(id) = self.at(index) {
                check = check.min(self.relieve_leases(id, now, check, store));
                check = check.min(self.relieve_parts(id, now, check, store));
            }
            // One that holds nothing any more has left the list, and another has its place.
            at += usize::from(self.pools[pool].holders.get(at) == Some(&index));
        }
        for at in (0..self.pools[pool].orphans.len()).rev() {
            let orphan = self.pools[pool].orphans[at];
            if self.move_out(orphan, store) {
                self.pools[pool].orphans.swap_remove(at);
            }
        }
        let pool = &mut self.pools[pool];
        pool.check = (pool.held > 0).then_some(check);
    }

    /// Moves the leases of a connection that are due and that nobody reads; when to look again.
    fn relieve_leases(
        &mut self,
        id: StreamId,
        now: Instant,
        mut check: Instant,
        store: &mut impl Store<Token = T>,
    ) -> Instant {
        let mut lease = self.get(id).map_or(NONE, |conn| conn.leases);
        while lease != NONE {
            let next = self.next_lease(lease);
            if let Some(since) = self.leased_since(lease) {
                let at = due(since, self.hold);
                if at > now {
                    check = check.min(at);
                } else {
                    self.move_out(lease, store);
                }
            }
            lease = next;
        }
        check
    }

    /// Copies out the unread parts of a connection if the oldest is due; when to look again.
    fn relieve_parts(
        &mut self,
        id: StreamId,
        now: Instant,
        check: Instant,
        store: &mut impl Store<Token = T>,
    ) -> Instant {
        let Some(conn) = self.get_mut(id) else {
            return check;
        };
        let oldest = conn.parts.iter().find_map(|part| match part {
            Part::Held(held) => Some(held.since),
            Part::Copied { .. } => None,
        });
        let Some(oldest) = oldest else { return check };
        let at = due(oldest, self.hold);
        if at > now {
            return check.min(at);
        }
        self.spill(id, store);
        if let Some(conn) = self.get_mut(id) {
            conn.stalled = true;
        }
        check
    }

    /// Copies out all unread parts of a connection.
    fn spill(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        let Some(conn) = self.get_mut(id) else { return };
        let parts = std::mem::take(&mut conn.parts);
        let mut released = 0;
        let mut copied = 0;
        for part in parts {
            match part {
                Part::Held(held) => {
                    conn.push_copy(|bytes| copy_out(store, &held, bytes));
                    copied += u64::from(held.len);
                    released += 1;
                    store.release(held.token);
                }
                Part::Copied { bytes, taken } => {
                    conn.push_copy(|to| to.extend_from_slice(bytes.get(taken..).unwrap_or(&[])));
                }
            }
        }
        self.counted.copied_aside += copied;
        if released > 0 {
            self.unhold(id.index, released);
        }
    }

    /// As [`recall`](Self::recall), but what the memory holds means nothing any more: unread parts
    /// in it are thrown away, and all leases are torn.
    pub(crate) fn lose(&mut self, pool: u32, store: &mut impl Store<Token = T>) {
        let holders = self.pools.get(pool as usize).map(|p| p.holders.clone());
        for index in holders.into_iter().flatten() {
            let Some(id) = self.at(index) else { continue };
            self.drop_unread(id, store);
            let mut lease = self.get(id).map_or(NONE, |conn| conn.leases);
            while lease != NONE {
                let next = self.next_lease(lease);
                self.tear(lease, store);
                lease = next;
            }
        }
        let pool = self.pools.get_mut(pool as usize);
        for orphan in pool
            .into_iter()
            .flat_map(|p| std::mem::take(&mut p.orphans))
            .collect::<Vec<_>>()
        {
            self.tear(orphan, store);
        }
    }

    /// Gives every buffer of `pool` back: its queue stops, or its memory goes. Unread parts and
    /// leases are copied out; a lease under a reader is torn.
    pub(crate) fn recall(&mut self, pool: u32, store: &mut impl Store<Token = T>) {
        let Some(holders) = self
            .pools
            .get(pool as usize)
            .map(|pool| pool.holders.clone())
        else {
            return;
        };
        for id in holders
            .into_iter()
            .filter_map(|index| self.at(index))
            .collect::<Vec<_>>()
        {
            self.spill(id, store);
            let mut lease = self.get(id).map_or(NONE, |conn| conn.leases);
            while lease != NONE {
                let next = self.next_lease(lease);
                if !self.move_out(lease, store) {
                    self.tear(lease, store);
                }
                lease = next;
            }
        }
        let orphans = self
            .pools
            .get_mut(pool as usize)
            .map(|pool| std::mem::take(&mut pool.orphans));
        for orphan in orphans.into_iter().flatten() {
            if !self.move_out(orphan, store) {
                self.tear(orphan, store);
            }
        }
    }
}

#[cfg(test)]
impl<T> super::Conn<T> {
    /// Whether what comes is copied because it stalled.
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled
    }
}
