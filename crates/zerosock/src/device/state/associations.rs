//! Associations: a port of the guest that sends datagrams to a port of CID 2, and the socket outside
//! that a rule has for them.
//!
//! # Invariants
//! - There are at most [`MAX`], one for each pair of ports.
//! - Copies of datagrams that wait for a socket are bounded for each association ([`MAX_WAITING`])
//!   and for the device ([`MAX_WAITING_BYTES`]).

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use slab::Slab;
use zerosock_proto::vsock::datagram::{OVERHEAD, PausedDestinations};
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_relay::connector::PendingConnect;

use super::forwarded::Forwarded;
use crate::device::host_sockets::HostSocket;
use crate::routing::forward::ActiveRule;

/// Associations of a device.
pub(in crate::device) const MAX: usize = 1024;
/// Datagrams of one association that wait for its socket.
const MAX_WAITING: usize = 16;
/// Bytes of all of them, overheads included; one datagram may overshoot.
const MAX_WAITING_BYTES: usize = 256 << 10;

/// Names one association also after its key was used again.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct AssociationId {
    pub(in crate::device) key: u32,
    serial: u32,
}

/// See the [module](self).
#[derive(Debug)]
pub(in crate::device) struct Association {
    pub(in crate::device) rule: Arc<ActiveRule>,
    pub(in crate::device) forwarded: Forwarded,
    /// The guest's port.
    pub(in crate::device) from: Port,
    /// The port of CID 2.
    pub(in crate::device) to: Port,
    /// `None` until the connector has answered.
    pub(in crate::device) socket: Option<HostSocket>,
    pub(in crate::device) pending: Option<PendingConnect>,
    /// The address of the socket, if its target is a name that may have a better one.
    pub(in crate::device) replaceable: Option<SocketAddr>,
    /// Datagrams of the guest, copied, that the socket could not take.
    pub(in crate::device) waiting: VecDeque<Vec<u8>>,
    /// When a datagram last passed.
    pub(in crate::device) used: Instant,
    /// The socket may have answers: an edge was seen and not used up.
    pub(in crate::device) readable: bool,
    /// On the list `ready`.
    in_ready: bool,
    serial: u32,
}

/// The associations of a device.
#[derive(Debug, Default)]
pub(in crate::device) struct Associations {
    all: Slab<Association>,
    /// Keys, by the guest's port and the port of CID 2.
    by_ports: HashMap<(Port, Port), u32>,
    /// Keys of associations with answers, in the order of their turns.
    pub(in crate::device) ready: VecDeque<u32>,
    waiting_bytes: usize,
    /// Addresses of the guest that have sent STOP.
    pub(in crate::device) paused: PausedDestinations,
    /// Answers go before datagrams of siblings in this turn.
    first: bool,
    next_serial: u32,
}

impl Associations {
    pub(in crate::device) fn len(&self) -> usize {
        self.all.len()
    }

    pub(in crate::device) fn find(&self, from: Port, to: Port) -> Option<u32> {
        self.by_ports.get(&(from, to)).copied()
    }

    pub(in crate::device) fn get(&self, key: u32) -> Option<&Association> {
        self.all.get(key as usize)
    }

    pub(in crate::device) fn get_mut(&mut self, key: u32) -> Option<&mut Association> {
        self.all.get_mut(key as usize)
    }

    /// The key of an association that still exists.
    pub(in crate::device) fn key_of(&self, id: AssociationId) -> Option<u32> {
        let association = self.get(id.key)?;
        (association.serial == id.serial).then_some(id.key)
    }

    /// Adds an association without a socket.
    pub(in crate::device) fn add(
        &mut self,
        rule: Arc<ActiveRule>,
        forwarded: Forwarded,
        (from, to): (Port, Port),
        now: Instant,
    ) -> AssociationId {
        let serial = self.next_serial;
        self.next_serial = serial.wrapping_add(1);
        let key = self.all.insert(Association {
            rule,
            forwarded,
            from,
            to,
            socket: None,
            pending: None,
            replaceable: None,
            waiting: VecDeque::new(),
            used: now,
            readable: false,
            in_ready: false,
            serial,
        }) as u32;
        self.by_ports.insert((from, to), key);
        AssociationId { key, serial }
    }

    pub(in crate::device) fn remove(&mut self, key: u32) -> Option<Association> {
        let association = self.all.try_remove(key as usize)?;
        self.by_ports.remove(&(association.from, association.to));
        self.waiting_bytes -= association
            .waiting
            .iter()
            .map(|bytes| cost(bytes))
            .sum::<usize>();
        if association.in_ready {
            self.ready.retain(|&other| other != key);
        }
        Some(association)
    }

    /// The association on which no datagram has passed for the longest time.
    pub(in crate::device) fn longest_idle(&self) -> Option<u32> {
        let idlest = self.all.iter().min_by_key(|(_, it)| it.used);
        idlest.map(|(key, _)| key as u32)
    }

    pub(in crate::device) fn keys(&self) -> Vec<u32> {
        self.all.iter().map(|(key, _)| key as u32).collect()
    }

    /// Whether a copy of one more datagram may wait.
    pub(in crate::device) fn may_wait(&self, key: u32) -> bool {
        let waiting = self.get(key).map(|association| association.waiting.len());
        self.waiting_bytes <= MAX_WAITING_BYTES && waiting.is_some_and(|len| len < MAX_WAITING)
    }

    /// Lets a copy of a datagram wait.
    pub(in crate::device) fn wait(&mut self, key: u32, bytes: Vec<u8>) {
        if let Some(association) = self.all.get_mut(key as usize) {
            self.waiting_bytes += cost(&bytes);
            association.waiting.push_back(bytes);
        }
    }

    /// Removes the oldest datagram that waits.
    pub(in crate::device) fn pop_waiting(&mut self, key: u32) {
        if let Some(association) = self.all.get_mut(key as usize)
            && let Some(bytes) = association.waiting.pop_front()
        {
            self.waiting_bytes -= cost(&bytes);
        }
    }

    /// Puts an association on the list `ready` if it may have an answer that the guest takes.
    pub(in crate::device) fn enqueue(&mut self, key: u32, cid: Cid, now: Instant) {
        let Some(association) = self.all.get_mut(key as usize) else {
            return;
        };
        let guest = Address::new(cid, association.from);
        if association.readable
            && !association.in_ready
            && (self.paused.is_empty() || self.paused.reason(now, association.to, guest).is_none())
        {
            association.in_ready = true;
            self.ready.push_back(key);
        }
    }

    /// Removes the first entry of the list `ready`.
    pub(in crate::device) fn pop_ready(&mut self) -> Option<u32> {
        let key = self.ready.pop_front()?;
        if let Some(association) = self.all.get_mut(key as usize) {
            association.in_ready = false;
        }
        Some(key)
    }

    /// Returns an entry to the front of the list `ready`: the guest has too few buffers.
    pub(in crate::device) fn unpop_ready(&mut self, key: u32) {
        if let Some(association) = self.all.get_mut(key as usize) {
            association.in_ready = true;
            self.ready.push_front(key);
        }
    }

    /// Ends the pauses that are over.
    pub(in crate::device) fn handle_timeout(&mut self, cid: Cid, now: Instant) {
        let mut ended = false;
        self.paused.expire(now, |_| ended = true);
        if ended {
            for key in self.keys() {
                self.enqueue(key, cid, now);
            }
        }
    }

    /// Whether answers go before datagrams of siblings in this turn: every other time.
    pub(in crate::device) fn take_first(&mut self) -> bool {
        self.first = !self.first;
        self.first
    }
}

fn cost(bytes: &[u8]) -> usize {
    bytes.len() + OVERHEAD as usize
}

#[cfg(test)]
mod tests {
    use zerosock_proto::vsock::datagram::{PauseReason, PauseSource, STOP_DURATION};
    use zerosock_proto::wire::vsock::SocketType;

    use super::super::forwarded::Remote;
    use super::*;
    use crate::routing::Routes;
    use crate::routing::forward::{ForwardRule, ForwardRules};

    const CID: Cid = Cid::new(3);
    const FROM: Port = Port::new(1000);
    const TO: Port = Port::new(53);

    fn one_readable() -> (Associations, AssociationId) {
        let rule = ForwardRule::new(TO..=TO, "unix-dgram:/a".parse().unwrap());
        let mut routes = Routes::default();
        let device = zerosock_virtio::outbox::DeviceAddr {
            worker: 0,
            number: 0,
        };
        routes.add(CID, device, &[]);
        routes.set_forward(ForwardRules::default().replaced(vec![rule]).unwrap());
        let rule = routes.forward_rule(CID, TO, SocketType::Datagram).unwrap();
        let remote = Remote::Target {
            target: rule.rule.to.resolve(CID, TO).unwrap(),
            address: None,
        };
        let admitted = rule.state.admit().unwrap();
        let forwarded = Forwarded::new(admitted, Address::new(CID, FROM), remote, None);
        let mut all = Associations::default();
        let id = all.add(Arc::clone(rule), forwarded, (FROM, TO), Instant::ZERO);
        all.get_mut(id.key).unwrap().readable = true;
        (all, id)
    }

    #[test]
    fn answers_wait_while_the_guest_has_stopped_them() {
        let (mut all, id) = one_readable();
        let guest = Address::new(CID, FROM);
        let (now, place) = (Instant::ZERO, PauseSource::Receiver);
        let stop = |all: &mut Associations| {
            assert!(all.paused.pause(now, TO, guest, PauseReason::Full(place)));
            all.enqueue(id.key, CID, now);
            assert_eq!(all.pop_ready(), None);
        };
        stop(&mut all);
        assert!(all.paused.resume(TO, guest, place));
        all.enqueue(id.key, CID, now);
        assert_eq!(all.pop_ready(), Some(id.key));
        // START is lost.
        stop(&mut all);
        all.handle_timeout(CID, now + STOP_DURATION);
        assert_eq!(all.pop_ready(), Some(id.key));
    }

    #[test]
    fn an_association_that_ends_leaves_no_entry() {
        let (mut all, id) = one_readable();
        all.enqueue(id.key, CID, Instant::ZERO);
        for _ in 0..MAX_WAITING {
            assert!(all.may_wait(id.key));
            all.wait(id.key, vec![0; 10]);
        }
        assert!(!all.may_wait(id.key));
        all.remove(id.key);
        assert!(all.ready.is_empty() && all.find(FROM, TO).is_none());
        assert_eq!((all.waiting_bytes, all.key_of(id)), (0, None));
    }
}
