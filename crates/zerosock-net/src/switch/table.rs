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
mod tests {
    use super::*;

    const A: DeviceAddr = addr(1);
    const B: DeviceAddr = addr(2);
    const C: DeviceAddr = addr(3);

    const fn addr(number: u32) -> DeviceAddr {
        DeviceAddr { worker: 0, number }
    }

    fn frame(to: u16, from: u16) -> Addresses {
        let ([t0, t1], [f0, f1]) = (to.to_be_bytes(), from.to_be_bytes());
        [2, 0, 0, 0, t0, t1, 2, 0, 0, 0, f0, f1]
    }

    fn mac(number: u16) -> Mac {
        let [a, b] = number.to_be_bytes();
        Mac([2, 0, 0, 0, a, b])
    }

    fn table() -> Table {
        let mut table = Table::default();
        for port in [A, B, C] {
            assert!(table.add(port, None));
            table.set_active(port, true);
        }
        table
    }

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn an_address_is_learned_moves_and_ages() {
        let mut table = table();
        assert_eq!(table.route(A, &frame(2, 1), at(0)), Route::Flood);
        assert_eq!(table.route(B, &frame(1, 2), at(1)), Route::Port(A));
        assert_eq!(table.route(A, &frame(1, 3), at(1)), Route::Nowhere);
        table.route(C, &frame(9, 1), at(2));
        assert_eq!(table.route(B, &frame(1, 2), at(3)), Route::Port(C));
        assert_eq!(table.route(B, &frame(1, 2), at(301)), Route::Port(C));
        assert_eq!(table.route(B, &frame(1, 2), at(302)), Route::Flood);
    }

    #[test]
    fn group_addresses_go_to_all_other_ports_in_use_and_are_not_learned() {
        let mut table = table();
        table.set_active(C, false);
        let mut broadcast = frame(0, 1);
        broadcast[..6].fill(0xff);
        assert_eq!(table.route(A, &broadcast, at(0)), Route::Flood);
        assert_eq!(
            table.others(A).map(|(port, _)| port).collect::<Vec<_>>(),
            [B]
        );
        broadcast[6..].fill(0xff);
        table.route(A, &broadcast, at(0));
        assert_eq!(table.entries.len(), 1);
    }

    #[test]
    fn an_assigned_address_stays_and_is_given_once() {
        let mut table = Table::default();
        assert!(table.add(A, Some(mac(1))));
        assert!(!table.add(B, Some(mac(1))));
        assert!(table.add(B, None));
        table.route(B, &frame(9, 1), at(0));
        assert_eq!(table.route(B, &frame(1, 2), at(999)), Route::Port(A));
        table.remove(A);
        assert_eq!(table.route(B, &frame(1, 2), at(999)), Route::Flood);
    }

    #[test]
    fn an_address_that_was_learned_is_assigned_to_its_port() {
        let mut table = table();
        table.route(A, &frame(9, 7), at(0));
        let d = addr(4);
        assert!(table.add(d, Some(mac(7))));
        assert_eq!(table.route(B, &frame(7, 2), at(0)), Route::Port(d));
        assert_eq!(table.ports[0].learned, 0);
    }

    #[test]
    fn a_port_learns_a_bounded_number_of_addresses() {
        let mut table = table();
        table.route(B, &frame(0, 1), at(0));
        for number in 0..3 * PORT_CAP as u16 {
            table.route(A, &frame(0, 100 + number), at(1));
        }
        assert_eq!(table.ports[0].learned, PORT_CAP);
        assert_eq!(table.entries.len(), PORT_CAP + 1);
        assert_eq!(table.route(C, &frame(1, 3), at(1)), Route::Port(B));
        // Room comes with age, and when the driver goes.
        table.route(A, &frame(0, 5000), at(301));
        assert_eq!(table.ports[0].learned, 1);
        table.set_active(A, false);
        assert_eq!(table.ports[0].learned, 0);
        assert_eq!(table.route(C, &frame(5000, 3), at(301)), Route::Flood);
    }
}
