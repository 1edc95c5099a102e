//! Associations: a port of the guest that sends datagrams to a port of CID 2, and the socket outside
//! that a rule has for them.
//!
//! # Invariants
//! - There are at most [`MAX`], one for each pair of ports.
//! - Copies of datagrams that wait for a socket are bounded for each association ([`MAX_WAITING`])
//!   and for the device ([`MAX_WAITING_BYTES`]).

use std::sync::Arc;

use zerosock_proto::vsock::datagram::PausedDestinations;
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_relay::associations::AssociationTable;
use zerosock_virtio::deadline::earlier;

use super::forwarded::Forwarded;
use crate::device::host_sockets::HostSocket;
use crate::routing::forward::ActiveRule;

/// Associations of a device.
pub(in crate::device) const MAX: usize = 1024;
/// Datagrams of one association that wait for its socket.
const MAX_WAITING: usize = 16;
/// Bytes of all of them; one datagram may overshoot.
const MAX_WAITING_BYTES: usize = 256 << 10;

/// The port of the guest, and that of CID 2.
pub(in crate::device) type Ports = (Port, Port);

/// What the device keeps for an association.
#[derive(Debug)]
pub(in crate::device) struct Outside {
    pub(in crate::device) rule: Arc<ActiveRule>,
    pub(in crate::device) forwarded: Forwarded,
    /// `None` until the connector has answered.
    pub(in crate::device) socket: Option<HostSocket>,
    /// The socket may have answers: an edge was seen and not used up.
    pub(in crate::device) readable: bool,
}

impl Outside {
    /// Without a socket.
    pub(in crate::device) fn new(rule: Arc<ActiveRule>, forwarded: Forwarded) -> Outside {
        Outside {
            rule,
            forwarded,
            socket: None,
            readable: false,
        }
    }
}

/// The associations of a device. The queue of the table has those with answers.
#[derive(Debug)]
pub(in crate::device) struct Associations {
    pub(in crate::device) table: AssociationTable<Ports, Outside>,
    /// Addresses of the guest that have sent STOP.
    pub(in crate::device) paused: PausedDestinations,
    /// Answers go before datagrams of siblings in this turn.
    first: bool,
}

impl Default for Associations {
    fn default() -> Associations {
        Associations {
            table: AssociationTable::new(MAX_WAITING, MAX_WAITING_BYTES),
            paused: PausedDestinations::default(),
            first: false,
        }
    }
}

impl Associations {
    /// Queues an association if it may have an answer that the guest takes.
    pub(in crate::device) fn enqueue(&mut self, key: u32, cid: Cid, now: Instant) {
        let Some(association) = self.table.get(key).filter(|it| it.readable) else {
            return;
        };
        let (from, to) = association.source;
        let guest = Address::new(cid, from);
        if self.paused.is_empty() || self.paused.reason(now, to, guest).is_none() {
            self.table.enqueue(key);
        }
    }

    /// Ends the pauses that are over.
    pub(in crate::device) fn handle_timeout(&mut self, cid: Cid, now: Instant) {
        let mut ended = false;
        self.paused.expire(now, |_| ended = true);
        if ended {
            for key in self.table.keys() {
                self.enqueue(key, cid, now);
            }
        }
    }

    /// When a pause or an idle time may be over.
    pub(in crate::device) fn next_timeout(&self) -> Option<Instant> {
        earlier(self.paused.poll_timeout(), self.table.next_timeout())
    }

    /// Whether answers go before datagrams of siblings in this turn: every other time.
    pub(in crate::device) fn take_first(&mut self) -> bool {
        self.first = !self.first;
        self.first
    }
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

    fn one_readable() -> (Associations, u32) {
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
        let outside = Outside::new(Arc::clone(rule), forwarded);
        let key = all.table.add((FROM, TO), outside, Instant::ZERO).key;
        all.table.get_mut(key).unwrap().readable = true;
        (all, key)
    }

    #[test]
    fn answers_wait_while_the_guest_has_stopped_them() {
        let (mut all, key) = one_readable();
        let guest = Address::new(CID, FROM);
        let (now, place) = (Instant::ZERO, PauseSource::Receiver);
        let stop = |all: &mut Associations| {
            assert!(all.paused.pause(now, TO, guest, PauseReason::Full(place)));
            all.enqueue(key, CID, now);
            assert_eq!(all.table.dequeue(), None);
        };
        stop(&mut all);
        assert!(all.paused.resume(TO, guest, place));
        all.enqueue(key, CID, now);
        assert_eq!(all.table.dequeue(), Some(key));
        // START is lost.
        stop(&mut all);
        all.handle_timeout(CID, now + STOP_DURATION);
        assert_eq!(all.table.dequeue(), Some(key));
    }

    #[test]
    fn an_association_that_ends_leaves_no_entry() {
        let (mut all, key) = one_readable();
        all.enqueue(key, CID, Instant::ZERO);
        for number in 0..=MAX_WAITING {
            let room = all.table.room();
            let association = all.table.get_mut(key).unwrap();
            assert_eq!(association.hold(&[0; 10], room), number < MAX_WAITING);
            all.table.recount(key);
        }
        let removed = all.table.remove(key).unwrap();
        assert!(all.table.queued() == 0 && all.table.find(&(FROM, TO)).is_none());
        assert_eq!(
            (removed.held.len(), all.table.room()),
            (MAX_WAITING, MAX_WAITING)
        );
    }
}
