//! Listeners and ports, shared by the shards that share an address.
//!
//! One lock, taken when a port is bound, a connection asked for, granted or
//! ended; never for a packet of a connection that exists. An address is in
//! the table while somebody listens on it or a connection was made from it;
//! accepted connections share their listener's port and are not in it.

use core::hash::BuildHasher;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hashbrown::{DefaultHashBuilder, HashMap};

use crate::addr::{Address, Cid, Port};

/// First of the ports given out by ourselves; below are the ones that people
/// listen on.
const EPHEMERAL_FIRST: u32 = 1 << 30;
/// How many there are.
const EPHEMERAL_COUNT: u32 = 1 << 30;

/// Listeners and ports in use; shards share it behind an `Arc`.
#[derive(Debug)]
pub struct PortTable {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    entries: HashMap<Address, Entry>,
    next_ephemeral: u32,
    next_listener: u64,
}

#[derive(Debug)]
enum Entry {
    Listener {
        id: u64,
        backlog: usize,
        waiting: usize,
    },
    Outgoing {
        connections: usize,
    },
}

/// What a connection holds in the table, to be given back when it ends.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(crate) enum Hold {
    /// A place in a listener's backlog.
    Backlog { address: Address, listener: u64 },
    /// A local port.
    Outgoing { address: Address },
}

/// A REQUEST's fate.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(crate) enum Admission {
    NoListener,
    Full,
    Granted(Hold),
}

impl Default for PortTable {
    fn default() -> PortTable {
        PortTable::new()
    }
}

impl PortTable {
    /// An empty table. Ephemeral ports start anywhere, so that a restarted
    /// process does not meet connections of its former self.
    pub fn new() -> PortTable {
        let start = DefaultHashBuilder::default().hash_one(0u32) as u32;
        PortTable {
            inner: Mutex::new(Inner {
                entries: HashMap::new(),
                next_ephemeral: start % EPHEMERAL_COUNT,
                next_listener: 0,
            }),
        }
    }

    /// Addresses in use. Zero when nobody listens and nothing is connected.
    pub fn len(&self) -> usize {
        self.lock().entries.len()
    }

    /// Whether no address is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Undecided connections that count against a listener's backlog.
    pub fn waiting(&self, address: Address) -> Option<usize> {
        match self.lock().entries.get(&address) {
            Some(&Entry::Listener { waiting, .. }) => Some(waiting),
            _ => None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every change below is complete when it can be seen: a panic
        // elsewhere while the lock was held left nothing half done.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False: the address is in use.
    pub(crate) fn listen(&self, address: Address, backlog: usize) -> bool {
        let mut inner = self.lock();
        if inner.entries.contains_key(&address) {
            return false;
        }
        let id = inner.next_listener;
        inner.next_listener += 1;
        inner.entries.insert(
            address,
            Entry::Listener {
                id,
                backlog,
                waiting: 0,
            },
        );
        true
    }

    /// False: nobody listened.
    pub(crate) fn unlisten(&self, address: Address) -> bool {
        let mut inner = self.lock();
        let listens = matches!(inner.entries.get(&address), Some(Entry::Listener { .. }));
        if listens {
            inner.entries.remove(&address);
        }
        listens
    }

    /// Takes a place in the backlog.
    pub(crate) fn admit(&self, address: Address) -> Admission {
        match self.lock().entries.get_mut(&address) {
            Some(Entry::Listener {
                backlog, waiting, ..
            }) if *waiting >= *backlog => Admission::Full,
            Some(Entry::Listener { id, waiting, .. }) => {
                *waiting += 1;
                Admission::Granted(Hold::Backlog {
                    address,
                    listener: *id,
                })
            }
            _ => Admission::NoListener,
        }
    }

    /// Takes a port of one's choice; several connections may have it, a
    /// listener may not.
    pub(crate) fn hold(&self, address: Address) -> Option<Hold> {
        let mut inner = self.lock();
        match inner
            .entries
            .entry(address)
            .or_insert(Entry::Outgoing { connections: 0 })
        {
            Entry::Listener { .. } => return None,
            Entry::Outgoing { connections } => *connections += 1,
        }
        Some(Hold::Outgoing { address })
    }

    /// Takes a port that nobody has.
    pub(crate) fn allocate(&self, cid: Cid) -> (Address, Hold) {
        let mut inner = self.lock();
        loop {
            // Ends: there are more ports than connections can be.
            let port = Port::new(EPHEMERAL_FIRST + inner.next_ephemeral);
            inner.next_ephemeral = (inner.next_ephemeral + 1) % EPHEMERAL_COUNT;
            let address = Address::new(cid, port);
            if !inner.entries.contains_key(&address) {
                inner
                    .entries
                    .insert(address, Entry::Outgoing { connections: 1 });
                return (address, Hold::Outgoing { address });
            }
        }
    }

    /// Gives back what a connection held.
    pub(crate) fn release(&self, hold: Hold) {
        let mut inner = self.lock();
        match hold {
            Hold::Backlog { address, listener } => {
                if let Some(Entry::Listener { id, waiting, .. }) = inner.entries.get_mut(&address)
                    && *id == listener
                {
                    *waiting = waiting.saturating_sub(1);
                }
            }
            Hold::Outgoing { address } => {
                if let Some(Entry::Outgoing { connections }) = inner.entries.get_mut(&address) {
                    *connections = connections.saturating_sub(1);
                    if *connections == 0 {
                        inner.entries.remove(&address);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: Address = Address::new(Cid::HOST, Port::new(5));

    #[test]
    fn a_listener_has_its_port_alone() {
        let ports = PortTable::new();
        assert!(ports.listen(ADDRESS, 1));
        assert!(!ports.listen(ADDRESS, 1));
        assert_eq!(ports.hold(ADDRESS), None);
        assert!(ports.unlisten(ADDRESS) && !ports.unlisten(ADDRESS));
        let hold = ports.hold(ADDRESS).unwrap();
        assert!(!ports.listen(ADDRESS, 1) && !ports.unlisten(ADDRESS));
        ports.release(hold);
        assert!(ports.listen(ADDRESS, 1));
    }

    #[test]
    fn the_backlog_is_the_listener_s_own() {
        let ports = PortTable::new();
        assert_eq!(ports.admit(ADDRESS), Admission::NoListener);
        ports.listen(ADDRESS, 1);
        let Admission::Granted(old) = ports.admit(ADDRESS) else {
            panic!()
        };
        assert_eq!(ports.admit(ADDRESS), Admission::Full);
        ports.unlisten(ADDRESS);
        ports.listen(ADDRESS, 1);
        let Admission::Granted(_) = ports.admit(ADDRESS) else {
            panic!()
        };
        ports.release(old);
        assert_eq!(
            ports.waiting(ADDRESS),
            Some(1),
            "not the old listener's place"
        );
    }

    #[test]
    fn ephemeral_ports_wrap_and_skip_what_is_taken() {
        let ports = PortTable::new();
        ports.lock().next_ephemeral = EPHEMERAL_COUNT - 1;
        let taken = Address::new(Cid::HOST, Port::new(EPHEMERAL_FIRST));
        ports.listen(taken, 1);
        let (last, hold) = ports.allocate(Cid::HOST);
        let (next, _) = ports.allocate(Cid::HOST);
        assert_eq!(last.port.get(), EPHEMERAL_FIRST + EPHEMERAL_COUNT - 1);
        assert_eq!(next.port.get(), EPHEMERAL_FIRST + 1);
        ports.release(hold);
        assert!(ports.hold(last).is_some(), "reusable at once");
    }
}
