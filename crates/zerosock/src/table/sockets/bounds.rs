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
//! A lease under a reader stays where it is, and keeps counting. Once it is due the pool notes it,
//! and the last of its readers says when he has left ([`crate::table::leases`]): no timer goes on
//! for it.
//!
//! The copies have a bound of their own, for all connections of a pool together: credit bounds
//! them for each, but a peer can have many connections that nobody reads. Above it those that have
//! most are to be reset ([`Sockets::overfull`]).
//!
//! The holders of a pool are looked through when its oldest buffer may be due, not more often:
//! there are never more of them than buffers.

use super::messages::cost;
use super::parts::{Part, copy_out};
use super::{NONE, ReadyFlags, Sockets, Store, StreamId, StreamState, due};
use crate::io::deadline::earlier;
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
    /// Leases in place whose connection is gone; all of them under readers when last looked at.
    orphans: Vec<u32>,
    /// Leases in place that were due, but under readers.
    overdue: Vec<u32>,
    /// Bytes of its connections that are unread and in copies.
    unread_copies: usize,
    /// When to look next for what is due; `None` while nothing is held.
    check: Option<Instant>,
    /// Every lease is a copy.
    copied: bool,
    /// Readers may have plain slices of its buffers.
    trusted: bool,
}

impl Pool {
    fn limit(&self) -> u32 {
        (self.size / 4 * 3).max(1)
    }

    /// What one connection may lease in place, or hold of a message that has not ended.
    pub(super) fn eighth(&self) -> u32 {
        (self.size / 8).max(1)
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
            overdue: Vec::new(),
            unread_copies: 0,
            check: None,
            copied: false,
            trusted: false,
        });
        self.pools.len() as u32 - 1
    }

    /// Whether leases of `pool` are copies, however few there are.
    pub(crate) fn lease_copies(&mut self, pool: u32, copied: bool) {
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.copied = copied;
        }
    }

    /// Whether readers of `pool` may have plain slices of its buffers: then none of them gets into
    /// the peer's hands under a reader.
    pub(crate) fn trust_pool(&mut self, pool: u32, trusted: bool) {
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.trusted = trusted;
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

    /// Whether anything in `pool`'s buffers is unread.
    pub(crate) fn has_unread(&self, pool: u32) -> bool {
        let pool = self.pools.get(pool as usize);
        pool.is_some_and(|pool| pool.held > pool.leased)
    }

    /// Whether one more buffer of `pool` may be held by a datagram: at most half are held then, so
    /// that datagrams alone never keep packets from being taken in.
    #[inline]
    pub(crate) fn has_place(&self, pool: u32) -> bool {
        let pool = self.pools.get(pool as usize);
        pool.is_some_and(|pool| pool.held < pool.size / 2)
    }

    /// Buffers of `pool` that are held.
    #[cfg(test)]
    pub(crate) fn held(&self, pool: u32) -> u32 {
        self.pools.get(pool as usize).map_or(0, |pool| pool.held)
    }

    /// Bytes of `pool` that are unread and in copies.
    #[cfg(test)]
    pub(crate) fn copies(&self, pool: u32) -> usize {
        let pool = self.pools.get(pool as usize);
        pool.map_or(0, |pool| pool.unread_copies)
    }

    pub(super) fn may_lease(&self, pool: u32, leased: u32) -> bool {
        self.pools.get(pool as usize).is_some_and(|pool| {
            !pool.copied && leased < pool.eighth() && pool.leased < pool.size / 8 * 3 + 1
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
    pub(super) fn add_orphan(&mut self, conn: u32, pool: u32, index: u32) {
        if let Some(conn) = self.conns.get_mut(conn as usize) {
            conn.leased = conn.leased.saturating_sub(1);
        }
        // Held no more by the connection, but still of the pool.
        self.unhold(conn, 1);
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.held += 1;
            pool.orphans.push(index);
        }
    }

    pub(super) fn forget_orphan(&mut self, pool: u32, index: u32) {
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.orphans.retain(|&orphan| orphan != index);
        }
    }

    /// Takes the lease at `place` off the list of overdue ones; `NONE` is on none.
    pub(super) fn forget_overdue(&mut self, pool: u32, place: u32) {
        let pool = self.pools.get_mut(pool as usize).filter(|_| place != NONE);
        if let Some(pool) = pool {
            pool.overdue.swap_remove(place as usize);
            if let Some(&moved) = pool.overdue.get(place as usize) {
                self.set_overdue(moved, place);
            }
        }
    }

    /// `bytes` of a connection that are unread lie in a copy now.
    pub(super) fn copied(&mut self, index: u32, bytes: usize) {
        let Some(conn) = self.conns.get_mut(index as usize) else {
            return;
        };
        conn.copied += bytes;
        if let Some(pool) = self.pools.get_mut(conn.pool as usize) {
            pool.unread_copies += bytes;
            self.over |= pool.unread_copies > self.most_copied;
        }
    }

    /// `bytes` of a connection that lay in a copy were read, or never will be.
    pub(super) fn uncopy(&mut self, index: u32, bytes: usize) {
        let Some(conn) = self.conns.get_mut(index as usize) else {
            return;
        };
        conn.copied = conn.copied.saturating_sub(bytes);
        if let Some(pool) = self.pools.get_mut(conn.pool as usize) {
            pool.unread_copies = pool.unread_copies.saturating_sub(bytes);
        }
    }

    /// Whether a pool's connections may have more bytes in copies than they are allowed.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.over
    }

    /// The connections to be reset because there are too many bytes in copies: of each pool that
    /// is over, those with most, until an eighth of what is allowed is free again. So the table is
    /// looked through once for many bytes, however small its connections' parts of them.
    pub(crate) fn overfull(&mut self) -> Vec<StreamId> {
        self.over = false;
        let mut found = Vec::new();
        for (number, pool) in self.pools.iter().enumerate() {
            if pool.unread_copies <= self.most_copied {
                continue;
            }
            let with_copies = |(index, conn): (usize, &super::Conn<T>)| {
                let here = conn.used && conn.pool as usize == number && conn.copied > 0;
                here.then_some((conn.copied, index as u32))
            };
            let mut all: Vec<_> = self
                .conns
                .iter()
                .enumerate()
                .filter_map(with_copies)
                .collect();
            all.sort_unstable_by(|one, other| other.cmp(one));
            let mut left = pool.unread_copies;
            for (bytes, index) in all {
                if left <= self.most_copied / 8 * 7 {
                    break;
                }
                left = left.saturating_sub(bytes);
                found.extend(self.at(index));
            }
        }
        found
    }

    /// Notes that a connection was reset on our part, and throws away what was not read of it.
    pub(crate) fn give_up(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        self.drop_unread(id, store);
        if let Some(conn) = self.get_mut(id) {
            conn.flow = None;
            conn.state = StreamState::Reset;
            self.announce(id, ReadyFlags::Closed);
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
        let mut check = None;
        let mut at = 0;
        while let Some(&index) = self.pools[pool].holders.get(at) {
            if let Some(id) = self.at(index) {
                check = earlier(check, self.relieve_leases(id, now, store));
                check = earlier(check, self.relieve_parts(id, now, store));
            }
            // One that holds nothing any more has left the list, and another has its place.
            at += usize::from(self.pools[pool].holders.get(at) == Some(&index));
        }
        self.pools[pool].check = check;
    }

    /// Moves the leases of a connection that are due and that nobody reads; when the next one is.
    fn relieve_leases(
        &mut self,
        id: StreamId,
        now: Instant,
        store: &mut impl Store<Token = T>,
    ) -> Option<Instant> {
        let mut check = None;
        let conn = self.get(id)?;
        let (pool, mut lease) = (conn.pool, conn.leases);
        while lease != NONE {
            let next = self.next_lease(lease);
            if let Some(since) = self.leased_since(lease) {
                let at = due(since, self.hold);
                if at > now {
                    check = earlier(check, Some(at));
                } else if !self.move_out(lease, store)
                    && let Some(pool) = self.pools.get_mut(pool as usize)
                {
                    let place = pool.overdue.len() as u32;
                    pool.overdue.push(lease);
                    self.set_overdue(lease, place);
                }
            }
            lease = next;
        }
        check
    }

    /// Copies out the unread parts of a connection if the oldest is due; else, when it is.
    fn relieve_parts(
        &mut self,
        id: StreamId,
        now: Instant,
        store: &mut impl Store<Token = T>,
    ) -> Option<Instant> {
        let oldest = self.get(id)?.parts.iter().find_map(|part| match part {
            Part::Held(held) => Some(held.since),
            Part::Copied { .. } => None,
        });
        let at = due(oldest?, self.hold);
        if at > now {
            return Some(at);
        }
        self.spill(id, store);
        if let Some(conn) = self.get_mut(id) {
            conn.stalled = true;
        }
        None
    }

    /// Readers have left leases that were wanted: those that nobody reads any more are moved.
    pub(super) fn look_again(&mut self, store: &mut impl Store<Token = T>) {
        for pool in 0..self.pools.len() {
            for at in (0..self.pools[pool].orphans.len()).rev() {
                let orphan = self.pools[pool].orphans[at];
                if self.move_out(orphan, store) {
                    self.pools[pool].orphans.swap_remove(at);
                }
            }
            for at in (0..self.pools[pool].overdue.len()).rev() {
                let lease = self.pools[pool].overdue[at];
                if self.move_out(lease, store) || !self.is_held(lease) {
                    let place = self.set_overdue(lease, NONE);
                    self.forget_overdue(pool as u32, place);
                }
            }
        }
    }

    /// Copies out all unread parts of a connection.
    pub(super) fn spill(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        let Some(conn) = self.get_mut(id) else { return };
        let parts = std::mem::take(&mut conn.parts);
        let mut released = 0;
        let mut copied = 0;
        let mut costs = 0;
        for part in parts {
            match part {
                Part::Held(held) => {
                    conn.push_copy(held.ends, held.len as usize, |bytes| {
                        copy_out(store, &held, bytes)
                    });
                    copied += u64::from(held.len);
                    costs += cost(held.ends);
                    released += 1;
                    store.release(held.token);
                }
                Part::Copied { bytes, taken, ends } => {
                    conn.push_copy(ends, bytes.len() - taken, |to| {
                        to.extend_from_slice(bytes.get(taken..).unwrap_or(&[]))
                    });
                }
            }
        }
        self.counted.copied_aside += copied;
        if let Some(messages) = self.get_mut(id).and_then(|conn| conn.messages.as_mut()) {
            messages.half_held = 0;
        }
        self.copied(id.index, copied as usize + costs);
        if released > 0 {
            self.unhold(id.index, released);
        }
    }

    /// As [`recall`](Self::recall) with force, but what the memory holds means nothing any more:
    /// unread parts in it are thrown away, and all leases are torn.
    pub(crate) fn lose(&mut self, pool: u32, store: &mut impl Store<Token = T>) {
        let trusted = self.pools.get(pool as usize).is_some_and(|p| p.trusted);
        self.each_lease(pool, store, Self::drop_unread, |sockets, lease, store| {
            sockets.tear(lease, trusted, store);
        });
    }

    /// Gives every buffer of `pool` back: its queue stops, or its memory goes. Unread parts and
    /// leases are copied out; a lease under a reader is torn.
    ///
    /// Not so if readers may have plain slices of it: a peer that keeps its promise writes what it
    /// has back. False: some are read at this moment, and have their buffers still. With `force`,
    /// for a peer that is gone, they are torn as well, but nobody gets those buffers.
    pub(crate) fn recall(
        &mut self,
        pool: u32,
        force: bool,
        store: &mut impl Store<Token = T>,
    ) -> bool {
        let trusted = self.pools.get(pool as usize).is_some_and(|p| p.trusted);
        let mut all = true;
        self.each_lease(pool, store, Self::spill, |sockets, lease, store| {
            if sockets.is_held(lease) && !sockets.move_out(lease, store) {
                if trusted && !force {
                    all = false;
                } else {
                    sockets.tear(lease, trusted, store);
                }
            }
        });
        all
    }

    /// Does `conn` with every connection that holds buffers of the pool, and `lease` with every
    /// lease of them.
    fn each_lease<S: Store<Token = T>>(
        &mut self,
        pool: u32,
        store: &mut S,
        mut conn: impl FnMut(&mut Self, StreamId, &mut S),
        mut lease: impl FnMut(&mut Self, u32, &mut S),
    ) {
        let Some(of) = self.pools.get(pool as usize) else {
            return;
        };
        let (holders, orphans) = (of.holders.clone(), of.orphans.clone());
        for id in holders
            .into_iter()
            .filter_map(|index| self.at(index))
            .collect::<Vec<_>>()
        {
            conn(self, id, store);
            let mut index = self.get(id).map_or(NONE, |conn| conn.leases);
            while index != NONE {
                let next = self.next_lease(index);
                lease(self, index, store);
                index = next;
            }
        }
        for orphan in orphans {
            lease(self, orphan, store);
        }
        // Those that have lost their buffers are nobody's business any more.
        let Some(of) = self.pools.get_mut(pool as usize) else {
            return;
        };
        let mut orphans = std::mem::take(&mut of.orphans);
        orphans.retain(|&orphan| self.is_held(orphan));
        if let Some(of) = self.pools.get_mut(pool as usize) {
            of.orphans = orphans;
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
