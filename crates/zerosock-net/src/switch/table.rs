//! Which port has which MAC address.
//!
//! # Invariants
//! - An address that was assigned to a port stays there, whatever other ports send.
//! - A port has learned at most [`PORT_CAP`] addresses, so that it cannot push out those of others.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use zerosock_proto::Instant;
use zerosock_proto::wire::net::{Mac, Offloads};
use zerosock_virtio::outbox::DeviceAddr;

use crate::backend::Addresses;

/// How long a learned address is valid after its last frame: as in bridges of Linux.
const AGE: Duration = Duration::from_secs(300);
/// Learned addresses of one port.
const PORT_CAP: usize = 1024;
/// Ports of one switch.
const MAX_PORTS: usize = 256;
/// How often addresses that have aged are looked for, when a port has learned too many.
const SWEEP: Duration = Duration::from_secs(1);

/// A MAC address, in the order of its bytes from the lowest one on.
type Address = u64;

fn address(bytes: [u8; 6]) -> Address {
    let [a, b, c, d, e, f] = bytes;
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
}

/// Group addresses have the lowest bit of the first byte set (IEEE 802, 8.2.2).
fn is_group(address: Address) -> bool {
    address & 1 != 0
}

/// A hash of addresses by one multiplication. Guests choose the addresses, and do not know the keys: they
/// cannot choose many that collide.
#[derive(Clone, Debug)]
struct AddressHash {
    keys: [u64; 2],
    hash: u64,
}

impl Default for AddressHash {
    fn default() -> AddressHash {
        let random = RandomState::new();
        AddressHash {
            keys: [random.hash_one(0), random.hash_one(1)],
            hash: 0,
        }
    }
}

impl BuildHasher for AddressHash {
    type Hasher = AddressHash;

    fn build_hasher(&self) -> AddressHash {
        self.clone()
    }
}

impl Hasher for AddressHash {
    fn write_u64(&mut self, address: Address) {
        let [added, factor] = self.keys.map(u128::from);
        let product = (added ^ u128::from(address)) * (factor | 1);
        self.hash = product as u64 ^ (product >> 64) as u64;
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("an address is one word");
    }

    fn finish(&self) -> u64 {
        self.hash
    }
}

/// A port.
#[derive(Debug)]
struct Port {
    addr: DeviceAddr,
    /// Addresses that it has learned.
    learned: usize,
    /// A driver uses it.
    active: bool,
    /// Those that it takes.
    offloads: Offloads,
}

#[derive(Debug)]
struct Entry {
    port: DeviceAddr,
    /// When the last frame came; `None` for an assigned address.
    seen: Option<Instant>,
}

/// Where a frame goes.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Route {
    /// To one port.
    Port(DeviceAddr),
    /// To all ports but its own: those that [`Table::others`] returns.
    Flood,
    /// To none: its receiver is behind the same port.
    Nowhere,
}

/// What the ports of a switch share. Their devices may belong to several workers.
#[derive(Debug, Default)]
pub struct Switch {
    table: Mutex<Table>,
}

impl Switch {
    /// A switch without ports.
    pub fn new() -> Arc<Switch> {
        Arc::default()
    }

    /// A panic of another thread leaves the table as it was between two frames, or one entry short.
    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ports, and the addresses behind them.
#[derive(Debug, Default)]
pub(super) struct Table {
    ports: Vec<Port>,
    entries: HashMap<Address, Entry, AddressHash>,
    swept: Option<Instant>,
}

impl Table {
    /// Adds a port. False: there are too many, or the address is taken.
    pub(super) fn add(&mut self, addr: DeviceAddr, mac: Option<Mac>) -> bool {
        let taken = |mac: &Mac| {
            let entry = self.entries.get(&address(mac.0));
            entry.is_some_and(|entry| entry.seen.is_none())
        };
        if self.ports.len() >= MAX_PORTS || mac.as_ref().is_some_and(taken) {
            return false;
        }
        self.ports.push(Port {
            addr,
            learned: 0,
            active: false,
            offloads: Offloads::default(),
        });
        if let Some(mac) = mac {
            let entry = Entry {
                port: addr,
                seen: None,
            };
            if let Some(old) = self.entries.insert(address(mac.0), entry) {
                self.count_less(old.port);
            }
        }
        true
    }

    pub(super) fn remove(&mut self, addr: DeviceAddr) {
        self.ports.retain(|port| port.addr != addr);
        self.entries.retain(|_, entry| entry.port != addr);
    }

    /// A driver uses the port from now on, or does not: then it gets no frames, and what it has learned
    /// is forgotten.
    pub(super) fn set_active(&mut self, addr: DeviceAddr, active: bool) {
        if let Some(port) = self.port(addr) {
            port.active = active;
            if !active {
                port.learned = 0;
                let entries = &mut self.entries;
                entries.retain(|_, entry| entry.port != addr || entry.seen.is_none());
            }
        }
    }

    /// The port takes frames with these offloads from now on. Others are cut there.
    pub(super) fn set_offloads(&mut self, addr: DeviceAddr, offloads: Offloads) {
        if let Some(port) = self.port(addr) {
            port.offloads = offloads;
        }
    }

    fn port(&mut self, addr: DeviceAddr) -> Option<&mut Port> {
        self.ports.iter_mut().find(|port| port.addr == addr)
    }

    fn count_less(&mut self, addr: DeviceAddr) {
        if let Some(port) = self.port(addr) {
            port.learned = port.learned.saturating_sub(1);
        }
    }

    /// Learns the source of a frame and returns where the frame goes.
    pub(super) fn route(&mut self, from: DeviceAddr, addresses: &Addresses, now: Instant) -> Route {
        let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5] = *addresses;
        self.learn(from, address([s0, s1, s2, s3, s4, s5]), now);
        let to = address([d0, d1, d2, d3, d4, d5]);
        if is_group(to) {
            return Route::Flood;
        }
        match self.entries.get(&to) {
            Some(entry) if entry.seen.is_some_and(|seen| now >= seen + AGE) => Route::Flood,
            Some(entry) if entry.port == from => Route::Nowhere,
            Some(entry) => Route::Port(entry.port),
            None => Route::Flood,
        }
    }

    fn learn(&mut self, from: DeviceAddr, source: Address, now: Instant) {
        if is_group(source) {
            return;
        }
        let moved_from = match self.entries.get_mut(&source) {
            Some(Entry { seen: None, .. }) => return,
            Some(entry) if entry.port == from => {
                entry.seen = Some(now);
                return;
            }
            Some(entry) => Some(entry.port),
            None => None,
        };
        if self.port(from).is_some_and(|port| port.learned >= PORT_CAP) {
            self.forget_old(now);
        }
        let Some(port) = self.port(from).filter(|port| port.learned < PORT_CAP) else {
            return;
        };
        port.learned += 1;
        if let Some(before) = moved_from {
            self.count_less(before);
        }
        let entry = Entry {
            port: from,
            seen: Some(now),
        };
        self.entries.insert(source, entry);
    }

    /// Forgets the addresses that have aged, if there are any.
    fn forget_old(&mut self, now: Instant) {
        if self.swept.is_some_and(|swept| now < swept + SWEEP) {
            return;
        }
        self.swept = Some(now);
        let ports = &mut self.ports;
        self.entries.retain(|_, entry| {
            let old = entry.seen.is_some_and(|seen| now >= seen + AGE);
            if old && let Some(port) = ports.iter_mut().find(|port| port.addr == entry.port) {
                port.learned = port.learned.saturating_sub(1);
            }
            !old
        });
    }

    /// The ports in use other than `from`, and the offloads that they take.
    pub(super) fn others(&self, from: DeviceAddr) -> impl Iterator<Item = (DeviceAddr, Offloads)> {
        let others = self.ports.iter();
        let others = others.filter(move |port| port.active && port.addr != from);
        others.map(|port| (port.addr, port.offloads))
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
