//! A table of associations: the sources of datagrams, each with what its owner keeps for it.
//!
//! # Invariants
//! - A source has at most one association, and an [`AssociationId`] is never that of a later one with the
//!   same key.
//! - Associations are listed in the order in which they were used, so that the longest idle one is found
//!   without a search.
//! - Datagrams that wait for a socket are bounded by number for each association and by bytes for all; the
//!   last one may overshoot.
//! - [`AssociationTable::remove`] leaves no entry of any kind, and cancels the request to the connector.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::Hash;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use slab::Slab;
use zerosock_proto::Instant;

use crate::connector::PendingConnect;
use crate::due::{DueList, Link, Linked};
pub use crate::held_messages::HeldMessages;

/// Names one association also after its key was used again.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct AssociationId {
    /// The key in the table, for events of its socket.
    pub key: u32,
    serial: u32,
}

/// An entry of an [`AssociationTable`], which dereferences to what its owner keeps.
#[derive(Debug)]
pub struct Association<S, T> {
    /// What the table finds it by.
    pub source: S,
    /// The request to the connector for the socket.
    pub asked: Option<PendingConnect>,
    /// The address of the target, if its name has another one.
    pub replaceable: Option<SocketAddr>,
    /// Datagrams of the source that the socket did not take yet.
    pub held: HeldMessages,
    serial: u32,
    /// Bytes of `held` at the last [`AssociationTable::recount`].
    counted: usize,
    used: Instant,
    /// The idle time at which it ends.
    limit: Option<Duration>,
    /// Its entry in the set of deadlines.
    deadline: Option<Instant>,
    /// It is in the queue of those with work.
    queued: bool,
    link: Link,
    value: T,
}

impl<S, T> Association<S, T> {
    /// The connector has found `address`, and perhaps others of the same name.
    pub fn answered(&mut self, address: Option<SocketAddr>, has_alternative: bool) {
        self.asked = None;
        self.replaceable = address.filter(|_| has_alternative);
    }

    /// Keeps a copy of a datagram, with the [`room`](AssociationTable::room) of the table; false: it is lost.
    pub fn hold(&mut self, message: &[u8], room: usize) -> bool {
        self.held.len() < room && self.held.push(message)
    }
}

impl<S, T> Deref for Association<S, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<S, T> DerefMut for Association<S, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<S, T> Linked for Association<S, T> {
    fn link(&mut self) -> &mut Link {
        &mut self.link
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct AssociationTable<S, T> {
    slots: Slab<Association<S, T>>,
    by_source: HashMap<S, u32>,
    /// In the order of their last use.
    by_use: DueList,
    /// When idle time-outs are to be checked: an association that was used since gets a later entry then.
    deadlines: BTreeSet<(Instant, u32)>,
    /// Associations with work.
    queue: VecDeque<u32>,
    /// Bytes of all datagrams that are held, as far as they are counted.
    pub(crate) held: usize,
    most_held: usize,
    most_bytes_held: usize,
    serial: u32,
}

impl<S: Copy + Eq + Hash, T> AssociationTable<S, T> {
    /// An empty table. For each association `most_held` datagrams may wait, for all `most_bytes_held`.
    pub fn new(most_held: usize, most_bytes_held: usize) -> AssociationTable<S, T> {
        AssociationTable {
            slots: Slab::new(),
            by_source: HashMap::new(),
            by_use: DueList::new(Some(Duration::ZERO)),
            deadlines: BTreeSet::new(),
            queue: VecDeque::new(),
            held: 0,
            most_held,
            most_bytes_held,
            serial: 0,
        }
    }

    /// The number of associations.
    pub fn count(&self) -> usize {
        self.slots.len()
    }

    /// The number of idle time-outs to be checked.
    pub fn deadlines(&self) -> usize {
        self.deadlines.len()
    }

    /// The key of a source's association.
    pub fn find(&self, source: &S) -> Option<u32> {
        self.by_source.get(source).copied()
    }

    /// The association with this key.
    pub fn get(&self, key: u32) -> Option<&Association<S, T>> {
        self.slots.get(key as usize)
    }

    /// The association with this key.
    pub fn get_mut(&mut self, key: u32) -> Option<&mut Association<S, T>> {
        self.slots.get_mut(key as usize)
    }

    /// The key of an association that still exists.
    pub fn key_of(&self, id: AssociationId) -> Option<u32> {
        let association = self.get(id.key)?;
        (association.serial == id.serial).then_some(id.key)
    }

    /// The keys of all associations.
    pub fn keys(&self) -> Vec<u32> {
        self.slots.iter().map(|(key, _)| key as u32).collect()
    }

    /// The name that the next association will have.
    pub fn next_id(&self) -> AssociationId {
        AssociationId {
            key: self.slots.vacant_key() as u32,
            serial: self.serial,
        }
    }

    /// Adds the association of a source that has none.
    pub fn add(&mut self, source: S, value: T, now: Instant) -> AssociationId {
        let id = self.next_id();
        self.serial = self.serial.wrapping_add(1);
        let key = self.slots.insert(Association {
            source,
            asked: None,
            replaceable: None,
            held: HeldMessages::default(),
            serial: id.serial,
            counted: 0,
            used: now,
            limit: None,
            deadline: None,
            queued: false,
            link: Link::default(),
            value,
        }) as u32;
        self.by_source.insert(source, key);
        self.by_use.add(&mut self.slots, key, now);
        id
    }

    /// Removes an association.
    pub fn remove(&mut self, key: u32) -> Option<Association<S, T>> {
        self.by_use.remove(&mut self.slots, key);
        let mut association = self.slots.try_remove(key as usize)?;
        self.by_source.remove(&association.source);
        if let Some(at) = association.deadline {
            self.deadlines.remove(&(at, key));
        }
        if association.queued {
            self.queue.retain(|&other| other != key);
        }
        if let Some(request) = association.asked.take() {
            request.cancel();
        }
        self.held -= association.counted;
        Some(association)
    }

    /// A datagram has passed. Returns whether it was the first one at this time.
    pub fn touch(&mut self, key: u32, now: Instant) -> bool {
        let Some(association) = self.slots.get_mut(key as usize) else {
            return false;
        };
        if association.used == now {
            return false;
        }
        association.used = now;
        self.plan(key);
        self.by_use.remove(&mut self.slots, key);
        self.by_use.add(&mut self.slots, key, now);
        true
    }

    /// The association on which no datagram has passed for the longest time.
    pub fn longest_idle(&self) -> Option<u32> {
        self.by_use.first()
    }

    /// Has [`pop_idle`](Self::pop_idle) return an association that was not used for `limit`.
    pub fn limit_idle(&mut self, key: u32, limit: Duration) {
        if let Some(association) = self.slots.get_mut(key as usize) {
            association.limit = Some(limit);
            self.plan(key);
        }
    }

    /// Gives an association that has no deadline the next one.
    fn plan(&mut self, key: u32) {
        if let Some(association) = self.slots.get_mut(key as usize)
            && association.deadline.is_none()
        {
            association.deadline = association.limit.map(|limit| association.used + limit);
            self.deadlines
                .extend(association.deadline.map(|at| (at, key)));
        }
    }

    /// When [`pop_idle`](Self::pop_idle) is to be called.
    pub fn next_timeout(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// The next association that was idle for its time. It is returned again only after it was used.
    pub fn pop_idle(&mut self, now: Instant) -> Option<u32> {
        while let Some(&(at, key)) = self.deadlines.first().filter(|(at, _)| *at <= now) {
            self.deadlines.remove(&(at, key));
            let association = self.slots.get_mut(key as usize)?;
            association.deadline = None;
            if association.used + association.limit? <= now {
                return Some(key);
            }
            self.plan(key);
        }
        None
    }

    /// Queues an association that has work.
    pub fn enqueue(&mut self, key: u32) {
        if let Some(association) = self.slots.get_mut(key as usize)
            && !std::mem::replace(&mut association.queued, true)
        {
            self.queue.push_back(key);
        }
    }

    /// The number of associations with work.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Removes the first association from the queue.
    pub fn dequeue(&mut self) -> Option<u32> {
        let key = self.queue.pop_front()?;
        if let Some(association) = self.slots.get_mut(key as usize) {
            association.queued = false;
        }
        Some(key)
    }

    /// Returns an association to the front of the queue.
    pub fn requeue(&mut self, key: u32) {
        if let Some(association) = self.slots.get_mut(key as usize) {
            association.queued = true;
            self.queue.push_front(key);
        }
    }

    /// The number of datagrams that may be held for one association: 0 while all hold too many bytes.
    pub fn room(&self) -> usize {
        self.most_held * usize::from(self.held < self.most_bytes_held)
    }

    /// Counts the bytes that an association holds now, and frees the memory of those that are sent.
    pub fn recount(&mut self, key: u32) {
        if let Some(association) = self.slots.get_mut(key as usize) {
            if association.held.is_empty() {
                association.held = HeldMessages::default();
            }
            let bytes = association.held.memory();
            self.held = self.held - association.counted + bytes;
            association.counted = bytes;
        }
    }
}

#[cfg(test)]
#[path = "associations_tests.rs"]
mod tests;
