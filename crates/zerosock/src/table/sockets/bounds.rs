//! Limits on the number and age of held buffers.
//!
//! The peer cannot use a held buffer. These limits keep one slow reader from blocking the queue:
//!
//! - number of held buffers: at most three quarters of a pool are held, unread or leased; beyond
//!   that no packets are received until buffers return or the hold time ends;
//! - number of leases: one connection leases at most an eighth of the pool in place, all
//!   connections three eighths; further leases are copies;
//! - age: a buffer held for [`Sockets::hold`](super::Sockets) is copied and returned if it has no
//!   reader. If unread buffers of a connection were copied, it has stalled: arriving bytes are
//!   copied at once until it has read all. Credit bounds those copies.
//!
//! A lease with a reader keeps its buffer, and the buffer stays counted. When its time ends, the
//! lease is marked and the last reader requests a recheck ([`crate::table::leases`]); no timer runs.
//!
//! The copied bytes of all connections of a pool have a limit as well, because a peer can open many
//! connections that the application does not read. Above it, the connections with most copied bytes
//! are reset ([`Sockets::connections_to_shed`]).
//!
//! The holders and leases of a pool are scanned when its oldest buffer may be due, and in the turn after a
//! packet was leased as it arrived: that turn sets the time from which the packet is held, so the lease itself
//! reads no clock. Their number is bounded by the pool's size.

use std::time::Duration;

#[cfg(test)]
use super::Conn;
use super::Sockets;
use super::ids::{StreamId, StreamState};
use super::message_end::cost;
use super::pool::Pool;
use super::received::{ReceivedPart, copy_out};
use super::store::Store;
use crate::table::leases::NONE;
use zerosock_proto::Instant;
use zerosock_virtio::deadline::earlier;

impl<T> Sockets<T> {
    /// Adds a pool of `size` buffers; returns its number.
    pub(crate) fn add_pool(&mut self, size: u32) -> u32 {
        self.pools.push(Pool {
            size,
            held: 0,
            leases: Vec::new(),
            has_overdue: false,
            holders: Vec::new(),
            unread_copies: 0,
            check: None,
            copied: false,
            trusted: false,
        });
        self.pools.len() as u32 - 1
    }

    /// Sets whether all leases of `pool` are copies.
    pub(crate) fn lease_copies(&mut self, pool: u32, copied: bool) {
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.copied = copied;
        }
    }

    /// Sets whether readers of `pool` may have plain slices of its buffers. A buffer of such a pool
    /// is never returned to the peer under a reader.
    pub(crate) fn trust_pool(&mut self, pool: u32, trusted: bool) {
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.trusted = trusted;
        }
    }

    /// Sets the number of buffers after a queue was set up again.
    pub(crate) fn resize_pool(&mut self, pool: u32, size: u32) {
        if let Some(pool) = self.pools.get_mut(pool as usize) {
            pool.size = size;
        }
    }

    /// Whether one more packet may be received from `pool`.
    #[inline]
    pub(crate) fn has_room(&self, pool: u32) -> bool {
        self.pools
            .get(pool as usize)
            .is_some_and(|pool| pool.held < pool.limit())
    }

    /// Whether unread bytes lie in `pool`'s buffers.
    pub(crate) fn has_unread(&self, pool: u32) -> bool {
        let pool = self.pools.get(pool as usize);
        pool.is_some_and(|pool| pool.held as usize > pool.leases.len())
    }

    /// Whether a datagram may hold one more buffer of `pool`. Datagrams hold at most half, so that
    /// they alone never stop reception.
    #[inline]
    pub(crate) fn may_hold_datagram(&self, pool: u32) -> bool {
        let pool = self.pools.get(pool as usize);
        pool.is_some_and(|pool| pool.held < pool.size / 2)
    }

    /// Held buffers of `pool`.
    #[cfg(test)]
    pub(crate) fn held(&self, pool: u32) -> u32 {
        self.pools.get(pool as usize).map_or(0, |pool| pool.held)
    }

    /// Unread bytes of `pool` in copies.
    #[cfg(test)]
    pub(crate) fn copies(&self, pool: u32) -> usize {
        let pool = self.pools.get(pool as usize);
        pool.map_or(0, |pool| pool.unread_copies)
    }

    #[inline]
    pub(super) fn may_lease(&self, pool: u32, leased: u32) -> bool {
        let pool = self.pools.get(pool as usize);
        pool.is_some_and(|pool| pool.may_lease(leased))
    }

    /// Counts an unread buffer that a connection holds since then.
    #[inline]
    pub(super) fn add_held(&mut self, index: u32, since: Option<Instant>) {
        let Some(conn) = self.conns.get_mut(index as usize) else {
            return;
        };
        let Some(pool) = self.pools.get_mut(conn.pool as usize) else {
            return;
        };
        pool.add_held(since, self.hold);
        conn.held += 1;
        if conn.held == 1 {
            conn.holder = pool.holders.len() as u32;
            pool.holders.push(index);
        }
    }

    /// Counts `count` unread buffers that a connection no longer holds.
    #[inline]
    pub(super) fn remove_held(&mut self, index: u32, count: u32) {
        if let Some(conn) = self.conns.get(index as usize)
            && let Some(pool) = self.pools.get_mut(conn.pool as usize)
        {
            pool.remove_held(count);
        }
        self.unlist_held(index, count);
    }

    /// As `remove_held`, for buffers that stay counted in the pool.
    #[inline]
    pub(super) fn unlist_held(&mut self, index: u32, count: u32) {
        let Some(conn) = self.conns.get_mut(index as usize) else {
            return;
        };
        conn.held = conn.held.saturating_sub(count);
        if conn.held == 0
            && conn.holder != NONE
            && let Some(pool) = self.pools.get_mut(conn.pool as usize)
        {
            let place = std::mem::replace(&mut conn.holder, NONE);
            pool.holders.swap_remove(place as usize);
            if let Some(&moved) = pool.holders.get(place as usize)
                && let Some(conn) = self.conns.get_mut(moved as usize)
            {
                conn.holder = place;
            }
        }
    }

    /// Counts a lease that no longer has its buffer, but is not ended.
    pub(super) fn count_returned(&mut self, conn: Option<StreamId>, pool: u32, place: u32) {
        if let Some(conn) = conn.and_then(|id| self.get_mut(id)) {
            conn.leased = conn.leased.saturating_sub(1);
        }
        self.unlist_lease(pool, place);
    }

    /// Removes the lease at `place` from its pool's list, because its buffer is returned.
    #[inline]
    pub(super) fn unlist_lease(&mut self, pool: u32, place: u32) {
        let Some(pool) = self.pools.get_mut(pool as usize) else {
            return;
        };
        pool.remove_held(1);
        pool.leases.swap_remove(place as usize);
        if let Some(&moved) = pool.leases.get(place as usize)
            && let Some(lent) = self.lent.get_mut(moved as usize)
        {
            lent.place = place;
        }
    }

    /// Counts `bytes` unread bytes of a connection as copied.
    pub(super) fn add_copied(&mut self, index: u32, bytes: usize) {
        let Some(conn) = self.conns.get_mut(index as usize) else {
            return;
        };
        conn.copied += bytes;
        if let Some(pool) = self.pools.get_mut(conn.pool as usize) {
            pool.unread_copies += bytes;
            self.over_copy_limit |= pool.unread_copies > self.max_copied;
        }
    }

    /// Counts `bytes` copied bytes of a connection as read or discarded.
    pub(super) fn remove_copied(&mut self, index: u32, bytes: usize) {
        let Some(conn) = self.conns.get_mut(index as usize) else {
            return;
        };
        conn.copied = conn.copied.saturating_sub(bytes);
        if let Some(pool) = self.pools.get_mut(conn.pool as usize) {
            pool.unread_copies = pool.unread_copies.saturating_sub(bytes);
        }
    }

    /// Whether a pool may exceed the limit on copied bytes.
    #[inline]
    pub(crate) fn is_over_copy_limit(&self) -> bool {
        self.over_copy_limit
    }

    /// The connections to reset because a pool exceeds the limit on copied bytes: those with most,
    /// until an eighth of the limit is free again. The table is therefore scanned once for many
    /// bytes, however few each connection has.
    pub(crate) fn connections_to_shed(&mut self) -> Vec<StreamId> {
        self.over_copy_limit = false;
        let mut found = Vec::new();
        for (number, pool) in self.pools.iter().enumerate() {
            if pool.unread_copies <= self.max_copied {
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
                if left <= self.max_copied / 8 * 7 {
                    break;
                }
                left = left.saturating_sub(bytes);
                found.extend(self.at(index));
            }
        }
        found
    }

    /// Marks a connection as reset by this side and discards its unread bytes.
    pub(crate) fn mark_reset(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        self.drop_unread(id, store);
        if let Some(conn) = self.get_mut(id) {
            conn.flow = None;
            conn.state = StreamState::Reset;
            self.set_ready(id);
        }
    }

    /// Ends the stalled state of a connection that has read all: arriving bytes are held again.
    #[inline]
    pub(super) fn clear_stalled_if_drained(&mut self, index: u32) {
        if let Some(conn) = self.conns.get_mut(index as usize) {
            conn.stalled &= !conn.parts.is_empty();
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.pools.iter().filter_map(|pool| pool.check).min()
    }

    /// Copies buffers held for too long.
    pub(crate) fn handle_timeout(&mut self, now: Instant, store: &mut impl Store<Token = T>) {
        for pool in 0..self.pools.len() {
            if self.pools[pool].check.is_some_and(|at| at <= now) {
                self.copy_overdue(pool, now, store);
            }
        }
    }

    fn copy_overdue(&mut self, pool: usize, now: Instant, store: &mut impl Store<Token = T>) {
        let mut check = self.move_overdue_leases(pool, now, store);
        let mut at = 0;
        while let Some(&index) = self.pools[pool].holders.get(at) {
            if let Some(id) = self.at(index) {
                check = earlier(check, self.copy_overdue_parts(id, now, store));
            }
            // A connection that holds nothing any more has left the list, and another has its
            // place.
            at += usize::from(self.pools[pool].holders.get(at) == Some(&index));
        }
        self.pools[pool].check = check;
    }

    /// Moves the overdue leases that have no reader; returns when the next one is due.
    fn move_overdue_leases(
        &mut self,
        pool: usize,
        now: Instant,
        store: &mut impl Store<Token = T>,
    ) -> Option<Instant> {
        let mut check = None;
        // A lease that is moved leaves the list, and the last one takes its place.
        for at in (0..self.pools[pool].leases.len()).rev() {
            let lease = self.pools[pool].leases[at];
            if let Some(since) = self.leased_since(lease, now) {
                let at = due(since, self.hold);
                if at > now {
                    check = earlier(check, Some(at));
                } else {
                    self.move_out_when_unread(lease, store);
                }
            }
        }
        check
    }

    /// Copies the unread parts of a connection if the oldest is overdue; else returns when it is
    /// due.
    fn copy_overdue_parts(
        &mut self,
        id: StreamId,
        now: Instant,
        store: &mut impl Store<Token = T>,
    ) -> Option<Instant> {
        let mut parts = self.get_mut(id)?.parts.iter_mut();
        let oldest = parts.find_map(|part| match part {
            ReceivedPart::Held(held) => Some(*held.since.get_or_insert(now)),
            ReceivedPart::Copied { .. } => None,
        });
        let at = due(oldest?, self.hold);
        if at > now {
            return Some(at);
        }
        self.copy_unread(id, store);
        if let Some(conn) = self.get_mut(id) {
            conn.stalled = true;
        }
        None
    }

    /// Moves the overdue leases that have no readers any more.
    pub(super) fn recheck_overdue(&mut self, store: &mut impl Store<Token = T>) {
        for pool in 0..self.pools.len() {
            if !std::mem::take(&mut self.pools[pool].has_overdue) {
                continue;
            }
            // As in `move_overdue_leases`.
            for at in (0..self.pools[pool].leases.len()).rev() {
                let lease = self.pools[pool].leases[at];
                if self.is_overdue(lease) {
                    self.move_out_when_unread(lease, store);
                }
            }
        }
    }

    /// Copies all unread parts of a connection.
    pub(super) fn copy_unread(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        let Some(conn) = self.get_mut(id) else { return };
        let parts = std::mem::take(&mut conn.parts);
        let mut released = 0;
        let mut copied = 0;
        let mut costs = 0;
        for part in parts {
            match part {
                ReceivedPart::Held(held) => {
                    conn.push_copy(held.ends, held.len as usize, |bytes| {
                        copy_out(store, &held, bytes)
                    });
                    copied += u64::from(held.len);
                    costs += cost(held.ends);
                    released += 1;
                    store.release(held.token);
                }
                ReceivedPart::Copied { bytes, taken, ends } => {
                    conn.push_copy(ends, bytes.len() - taken, |to| {
                        to.extend_from_slice(bytes.get(taken..).unwrap_or(&[]))
                    });
                }
            }
        }
        self.counted.copied_aside += copied;
        if let Some(messages) = self.get_mut(id).and_then(|conn| conn.messages.as_mut()) {
            messages.incomplete_held = 0;
        }
        self.add_copied(id.index, copied as usize + costs);
        if released > 0 {
            self.remove_held(id.index, released);
        }
    }

    /// As [`recall`](Self::recall) with `force`, for memory with invalid contents: unread
    /// parts are discarded and all leases revoked.
    pub(crate) fn recall_lost(&mut self, pool: u32, store: &mut impl Store<Token = T>) {
        let trusted = self.pools.get(pool as usize).is_some_and(|p| p.trusted);
        self.each_lease(pool, store, Self::drop_unread, |sockets, lease, store| {
            sockets.revoke(lease, trusted, store);
        });
    }

    /// Returns every buffer of `pool`, before its queue stops or its memory is unmapped. Unread
    /// parts and leases are copied; a lease with a reader is revoked.
    ///
    /// A trusted pool's leases are not revoked, because a trusted peer may write a buffer that it has
    /// back. Returns false if some have readers and keep their buffers. With `force`, for a peer
    /// that is gone, they are revoked as well, but their buffers are not returned.
    pub(crate) fn recall(
        &mut self,
        pool: u32,
        force: bool,
        store: &mut impl Store<Token = T>,
    ) -> bool {
        let trusted = self.pools.get(pool as usize).is_some_and(|p| p.trusted);
        let mut all = true;
        self.each_lease(pool, store, Self::copy_unread, |sockets, lease, store| {
            if !sockets.move_out(lease, store) {
                if trusted && !force {
                    all = false;
                } else {
                    sockets.revoke(lease, trusted, store);
                }
            }
        });
        all
    }

    /// Calls `conn` for every connection with unread buffers of the pool, and `lease` for every lease
    /// in place.
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
        // The calls change both lists.
        let (holders, leases) = (of.holders.clone(), of.leases.clone());
        for index in holders {
            if let Some(id) = self.at(index) {
                conn(self, id, store);
            }
        }
        for index in leases {
            lease(self, index, store);
        }
    }
}

/// When `span` has passed since `since`.
fn due(since: Instant, span: Duration) -> Instant {
    since + span
}

#[cfg(test)]
impl<T> Conn<T> {
    /// Whether arriving bytes are copied because the connection stalled.
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled
    }
}
