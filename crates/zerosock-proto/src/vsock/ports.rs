//! Listeners and ports, shared by the shards of one address.
//!
//! # Invariants
//! - The lock is taken when a port is bound or a connection requested, accepted or ended; never for
//!   a packet of an existing connection.
//! - An address is in the table while a listener or a bind has it, or a connection was made from
//!   it. Accepted connections share their listener's port and are not in the table.

use core::hash::BuildHasher;
use core::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hashbrown::{DefaultHashBuilder, HashMap};

use crate::addr::{Address, Cid, Port};

/// First ephemeral port.
const EPHEMERAL_FIRST: u32 = 1 << 30;
/// Number of ephemeral ports.
const EPHEMERAL_COUNT: u32 = 1 << 30;
/// Capacity in ports that the table keeps when none is in use.
const KEPT: usize = 1024;

/// Listeners and ports in use; shards share it behind an `Arc`.
#[derive(Debug)]
pub struct PortTable {
    /// Connections that count against the limit, in all shards that share the table.
    occupied: AtomicUsize,
    inner: Mutex<Inner>,
}

/// No address is in both maps.
#[derive(Debug)]
struct Inner {
    listeners: HashMap<Address, Listener>,
    /// References of each address: its connections, and one if it is bound. There may be very many
    /// addresses.
    outgoing: HashMap<Address, u32>,
    /// First ephemeral port.
    first_ephemeral: u32,
    /// Number of ephemeral ports.
    ephemeral_count: u32,
    /// Offset of the ephemeral port to try next.
    next_ephemeral: u32,
    /// Id of the next listener.
    next_listener: u32,
}

#[derive(Debug)]
struct Listener {
    /// Distinguishes it from earlier listeners on the address.
    id: u32,
    /// Undecided connections allowed, less one.
    backlog: usize,
    /// Undecided connections.
    waiting: usize,
}

/// A connection's reference to its local address, released when the connection ends.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(crate) enum PortRef {
    /// An entry in a listener's backlog.
    Backlog { listener: u32 },
    /// The port.
    Outgoing,
}

/// Whether a listener accepts a REQUEST.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(crate) enum Admission {
    NoListener,
    Full,
    Granted(PortRef),
}

impl Default for PortTable {
    fn default() -> PortTable {
        PortTable::new()
    }
}

impl PortTable {
    /// An empty table. Ephemeral ports start at a random number, so that a restarted process does
    /// not meet connections of its predecessor.
    pub fn new() -> PortTable {
        let last = EPHEMERAL_FIRST + (EPHEMERAL_COUNT - 1);
        PortTable::with_ephemeral(Port::new(EPHEMERAL_FIRST)..=Port::new(last))
    }

    /// An empty table with these ephemeral ports: for one of several tables that share a CID.
    pub fn with_ephemeral(ports: RangeInclusive<Port>) -> PortTable {
        let first_ephemeral = ports.start().get();
        let ephemeral_count = match ports.is_empty() {
            true => 0,
            false => (ports.end().get() - first_ephemeral).saturating_add(1),
        };
        let start = DefaultHashBuilder::default().hash_one(0u32) as u32;
        PortTable {
            occupied: AtomicUsize::new(0),
            inner: Mutex::new(Inner {
                listeners: HashMap::new(),
                outgoing: HashMap::new(),
                first_ephemeral,
                ephemeral_count,
                next_ephemeral: start.checked_rem(ephemeral_count).unwrap_or(0),
                next_listener: 0,
            }),
        }
    }

    /// Addresses in use. Zero without listeners, bound ports and outgoing connections.
    pub fn len(&self) -> usize {
        let inner = self.lock();
        inner.listeners.len() + inner.outgoing.len()
    }

    /// Whether no address is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Undecided connections that count against a listener's backlog.
    pub fn waiting(&self, address: Address) -> Option<usize> {
        let inner = self.lock();
        inner
            .listeners
            .get(&address)
            .map(|listener| listener.waiting)
    }

    /// Connections that count against the limit.
    pub(crate) fn occupied(&self) -> usize {
        self.occupied.load(Ordering::Relaxed)
    }

    /// Counts one more connection. The count is a limit only; it orders no other memory.
    pub(crate) fn occupy(&self) {
        self.occupied.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts `count` connections less.
    pub(crate) fn vacate(&self, count: usize) {
        self.occupied.fetch_sub(count, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Each change below is complete before it can panic, so a poisoned lock protects valid
        // data.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False: the address is in use.
    pub(crate) fn listen(&self, address: Address, backlog: usize) -> bool {
        let mut inner = self.lock();
        if inner.listeners.contains_key(&address) || inner.outgoing.contains_key(&address) {
            return false;
        }
        let listener = Listener {
            id: inner.next_listener,
            backlog,
            waiting: 0,
        };
        inner.next_listener = inner.next_listener.wrapping_add(1);
        inner.listeners.insert(address, listener);
        true
    }

    /// False: there was no listener.
    pub(crate) fn unlisten(&self, address: Address) -> bool {
        self.lock().listeners.remove(&address).is_some()
    }

    /// Takes an entry in the backlog.
    pub(crate) fn admit(&self, address: Address) -> Admission {
        match self.lock().listeners.get_mut(&address) {
            // Linux lets one more connection wait, so that a backlog of 0 is of use.
            Some(listener) if listener.waiting > listener.backlog => Admission::Full,
            Some(listener) => {
                listener.waiting += 1;
                Admission::Granted(PortRef::Backlog {
                    listener: listener.id,
                })
            }
            None => Admission::NoListener,
        }
    }

    /// Binds a port without a connection: it cannot be bound or listened on again before
    /// [`unbind`](Self::unbind). [`Port::ANY`] chooses an unused port. `None`: the port is in use,
    /// or none is left.
    pub fn bind(&self, address: Address) -> Option<Port> {
        if address.port == Port::ANY {
            let (address, _) = self.allocate(address.cid)?;
            return Some(address.port);
        }
        let mut inner = self.lock();
        if inner.listeners.contains_key(&address) || inner.outgoing.contains_key(&address) {
            return None;
        }
        inner.outgoing.try_reserve(1).ok()?;
        inner.outgoing.insert(address, 1);
        Some(address.port)
    }

    /// Releases a bound port, once. Connections that were made from it keep it until they end.
    pub fn unbind(&self, address: Address) {
        self.release(address, PortRef::Outgoing);
    }

    /// Acquires a given port; several connections may share it, with a listener it is in use.
    pub(crate) fn acquire(&self, address: Address) -> Option<PortRef> {
        let mut inner = self.lock();
        if inner.listeners.contains_key(&address) {
            return None;
        }
        inner.outgoing.try_reserve(1).ok()?;
        // Fewer than there are connections.
        *inner.outgoing.entry(address).or_insert(0) += 1;
        Some(PortRef::Outgoing)
    }

    /// Acquires an unused port, if there is one. Tries no more ports than are in use, plus one.
    pub(crate) fn allocate(&self, cid: Cid) -> Option<(Address, PortRef)> {
        let mut inner = self.lock();
        for _ in 0..inner.ephemeral_count {
            let port = Port::new(inner.first_ephemeral + inner.next_ephemeral);
            inner.next_ephemeral = (inner.next_ephemeral + 1) % inner.ephemeral_count;
            let address = Address::new(cid, port);
            let listened_on = inner.listeners.contains_key(&address);
            if !listened_on && !inner.outgoing.contains_key(&address) {
                inner.outgoing.try_reserve(1).ok()?;
                inner.outgoing.insert(address, 1);
                return Some((address, PortRef::Outgoing));
            }
        }
        None
    }

    /// Releases a connection's reference to `address`.
    pub(crate) fn release(&self, address: Address, port_ref: PortRef) {
        let mut inner = self.lock();
        match port_ref {
            PortRef::Backlog { listener: id } => {
                let listener = inner.listeners.get_mut(&address);
                if let Some(listener) = listener.filter(|listener| listener.id == id) {
                    listener.waiting = listener.waiting.saturating_sub(1);
                }
            }
            PortRef::Outgoing => {
                if let Some(connections) = inner.outgoing.get_mut(&address) {
                    *connections = connections.saturating_sub(1);
                    if *connections == 0 {
                        inner.outgoing.remove(&address);
                    }
                }
                if inner.outgoing.is_empty() && inner.outgoing.capacity() > KEPT {
                    inner.outgoing = HashMap::new();
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "ports_tests.rs"]
mod tests;
