//! Datagrams by rule between the guest and UDP or Unix datagram sockets outside.
//!
//! # Invariants
//! - Each pair of a port of the guest and a port of CID 2 has a socket of its own, which is connected:
//!   answers of others than the target do not reach the guest.
//! - No report about a datagram (ICMP) ends an association, unless its target is a name with another address:
//!   the next datagram goes there.
//! - Answers that the guest does not take wait in their sockets, which the kernel bounds.
//!
//! # Operation
//! A datagram of the guest leaves by one `sendmsg` from guest memory, or from a copy if it came in
//! fragments or is in too many pieces. While the connector resolves the name of the target, or the socket
//! is full, a few copies wait. An answer is received into posted buffers by one `recvmsg` once there are
//! enough of them; by way of a copy if they are too many pieces.

use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::sockopt::socket_error;
use zerosock_proto::vsock::datagram::{Control, MAX_DATAGRAM, PauseReason};
use zerosock_proto::wire::vsock::{HEADER_LEN, Repr, SocketType};
use zerosock_proto::{Address, Cid, Instant};
use zerosock_relay::associations::AssociationId;
use zerosock_ring::{Chain, Memory, SliceBuf};
use zerosock_virtio::poller::{Interest, Readiness};

use super::put::{DatagramPayload, NotPut};
use crate::device::datagrams::GuestDatagrams;
use crate::device::forwarded::{DialedFor, request_by};
use crate::device::host_sockets::hybrid::{self, Ahead};
use crate::device::host_sockets::{Attempt, HostSocket, Refusal};
use crate::device::message_sockets::{Sent, send_bytes, send_slices};
use crate::device::state::associations::{self, Outside};
use crate::device::state::forwarded::{Forwarded, Remote};
use crate::device::state::sibling_message::Dialed;
use crate::device::teardown::PART;
use crate::device::virtio::ASSOCIATION;
use crate::device::{Context, Device, TURN_BYTES};
use crate::fallible;
use crate::routing::forward::ActiveRule;

/// Answers sent to the guest in one turn.
const BUDGET: usize = 64;
/// Most sockets made in one turn: each is charged this part of the turn's budget.
const SOCKETS_PER_TURN: usize = 8;
/// Most pieces of memory in one send.
const PIECES: usize = 64;

impl GuestDatagrams<'_, '_> {
    /// Sends a datagram of the guest to the socket that a rule has for it: in `chain`, or assembled in
    /// `bytes`.
    pub(super) fn send_outside(&mut self, chain: Chain, header: &Repr, bytes: Option<Vec<u8>>) {
        let Some(key) = self.association_for(header) else {
            self.cx.shared.counters.datagrams_dropped.add(1);
            return self.complete_tx(chain);
        };
        let len = header.len as usize;
        let table = &mut self.device.datagrams.associations.table;
        let room = table.room();
        let (Some(tx), Some(association)) =
            (self.device.queues.rings.tx.as_mut(), table.get_mut(key))
        else {
            return;
        };
        let memory = tx.queue.memory();
        let mut in_place = false;
        let sent = match (&association.socket, &bytes) {
            (Some(socket), Some(bytes)) if association.held.is_empty() => send_bytes(socket, bytes),
            (Some(socket), None) if association.held.is_empty() => {
                let mut slices = SliceBuf::<PIECES>::new();
                let covered = memory.slices(chain.readable(), HEADER_LEN, len, &mut slices);
                in_place = covered == len;
                match in_place {
                    true => send_slices(socket, &slices),
                    // In too many pieces.
                    false => match copy(memory, &chain, len, self.cx) {
                        Some(bytes) => send_bytes(socket, &bytes),
                        None => Sent::NoMemory,
                    },
                }
            }
            _ => Sent::Full,
        };
        if sent == Sent::Full
            && association.held.len() < room
            && let Some(bytes) = bytes.or_else(|| copy(memory, &chain, len, self.cx))
            && association.hold(&bytes, room)
        {
            table.recount(key);
            return tx.complete(chain, 0);
        }
        tx.complete(chain, 0);
        if in_place && sent == Sent::Yes {
            self.cx.shared.counters.in_place_bytes.add(len as u64);
        }
        self.datagram_sent(key, len, sent);
    }

    /// Accounts for a datagram that has left the device or was dropped.
    fn datagram_sent(&mut self, key: u32, len: usize, sent: Sent) {
        let table = &mut self.device.datagrams.associations.table;
        let Some(association) = table.get_mut(key) else {
            return;
        };
        match sent {
            Sent::Yes => {
                association.forwarded.sent(len);
                table.touch(key, self.cx.now);
            }
            Sent::Lost => self
                .device
                .fail("guest memory vanished under a send", self.cx),
            _ => {
                association.forwarded.dropped();
                self.cx.shared.counters.datagrams_dropped.add(1);
                // A Unix socket that was closed has no successor at the same address: the next
                // datagram looks for one.
                if sent == Sent::Dropped && association.forwarded.is_to_unix() {
                    self.end_association(key, "reset by the remote side");
                }
            }
        }
    }

    /// The association for a datagram of the guest, made if there is none. `None`: no rule matches, or
    /// the rule or a limit refuses it.
    fn association_for(&mut self, header: &Repr) -> Option<u32> {
        let (from, to) = (header.src, header.dst.port);
        let routes = &self.cx.shared.routes;
        let rule = routes.forward_rule(self.device.cid, to, SocketType::Datagram)?;
        let table = &self.device.datagrams.associations.table;
        let known = table.find(&(from.port, to));
        let rule_of = |key| Some(&table.get(key)?.rule);
        if known
            .and_then(rule_of)
            .is_some_and(|known| Arc::ptr_eq(known, rule) || known.state.is_same_rule(&rule.state))
        {
            return known;
        }
        let rule = Arc::clone(rule);
        if let Some(key) = known {
            self.end_association(key, "its rule has changed");
        }
        // A guest that uses a new port for each datagram leaves the worker to the others.
        let charge = self.device.from_guest_budget.bytes() / SOCKETS_PER_TURN;
        self.device.moved += charge;
        self.device.datagrams.charged += charge;
        self.associate(from, header.dst, &rule)
    }

    fn associate(&mut self, from: Address, to: Address, rule: &Arc<ActiveRule>) -> Option<u32> {
        let (target, admitted) = self.device.admit_by(rule, from, to.port)?;
        // After all refusals: a rule that is full ends no association of another one.
        let table = &self.device.datagrams.associations.table;
        if table.count() >= associations::MAX
            && let Some(key) = table.longest_idle()
        {
            self.end_association(key, "a newer one has taken its place");
        }
        let remote = Remote::Target {
            target: target.clone(),
            address: None,
        };
        let forwarded = Forwarded::new(admitted, from, remote, None);
        let outside = Outside::new(Arc::clone(rule), forwarded);
        let table = &mut self.device.datagrams.associations.table;
        let id = table.add((from.port, to.port), outside, self.cx.now);
        match self.device.connect_by(rule, &target) {
            Some(Attempt::Ready(socket) | Attempt::InProgress(socket)) => {
                self.association_opened(id.key, socket);
            }
            Some(Attempt::Refused(error)) => self.refuse_association(id.key, &error.to_string()),
            None | Some(Attempt::Later | Attempt::NeedsConnector) => {
                let request = request_by(rule, target, from, to.port, self.cx);
                match self
                    .device
                    .ask_connector(DialedFor::Association(id), request, self.cx)
                {
                    Ok(pending) => {
                        let association =
                            self.device.datagrams.associations.table.get_mut(id.key)?;
                        association.asked = Some(pending);
                    }
                    Err(reason) => self.refuse_association(id.key, &reason),
                }
            }
        }
        self.device.datagrams.associations.table.key_of(id)
    }

    /// Handles the connector's answer.
    pub(in crate::device) fn association_dialed(
        &mut self,
        to: AssociationId,
        outcome: Result<Box<Dialed>, Refusal>,
    ) {
        // Without an association the socket is closed.
        let Some(key) = self.device.datagrams.associations.table.key_of(to) else {
            return;
        };
        match outcome {
            Ok(dialed) => {
                if let Some(association) = self.device.datagrams.associations.table.get_mut(key) {
                    association.answered(dialed.address, dialed.has_alternative);
                    association.forwarded.set_address(dialed.address);
                }
                self.association_opened(key, dialed.socket);
                self.flush_association(key);
            }
            Err(refusal) => self.refuse_association(key, &refusal.reason),
        }
    }

    fn association_opened(&mut self, key: u32, socket: HostSocket) {
        let token = self.device.token(ASSOCIATION, key);
        if let Err(error) = self.cx.poller.add(&socket, token, Interest::All) {
            return self.refuse_association(key, &error.to_string());
        }
        let table = &mut self.device.datagrams.associations.table;
        if let Some(association) = table.get_mut(key) {
            association.socket = Some(socket);
            association.forwarded.open(&self.device.access_log);
            if let Some(limit) = association.rule.rule.idle() {
                table.touch(key, self.cx.now);
                table.limit_idle(key, limit);
            }
        }
    }

    fn refuse_association(&mut self, key: u32, reason: &str) {
        if let Some(association) = self.device.datagrams.associations.table.get(key) {
            self.device.refuse_forwarded(&association.forwarded, reason);
        }
        self.end_association(key, "refused");
    }

    fn end_association(&mut self, key: u32, reason: &'static str) {
        let Some(mut association) = self.device.datagrams.associations.table.remove(key) else {
            return;
        };
        if let Some(socket) = &association.socket
            && socket.is_closed_later()
        {
            // An event of the open socket would be attributed to the next association with this key.
            self.cx.poller.remove(socket);
        }
        for _ in 0..association.held.len() {
            association.forwarded.dropped();
            self.cx.shared.counters.datagrams_dropped.add(1);
        }
        association.forwarded.set_reason(reason);
        association.forwarded.finish();
    }

    /// Ends at most `most` associations, and returns whether there are more.
    pub(in crate::device) fn end_associations(
        &mut self,
        reason: &'static str,
        most: usize,
    ) -> bool {
        let keys = self.device.datagrams.associations.table.keys();
        let more = keys.len() > most;
        for key in keys.into_iter().take(most) {
            self.end_association(key, reason);
        }
        more
    }

    /// Ends associations on which no datagram has passed for the idle time of their rules: as many as one
    /// turn may. For those that are left, the device's next timeout has come already.
    pub(super) fn end_idle_associations(&mut self) {
        for _ in 0..PART {
            let Some(key) = self
                .device
                .datagrams
                .associations
                .table
                .pop_idle(self.cx.now)
            else {
                return;
            };
            self.end_association(key, "idle");
        }
    }

    /// Handles an edge of an association's socket.
    pub(in crate::device) fn association_ready(&mut self, key: u32, readiness: Readiness) {
        let Some(association) = self.device.datagrams.associations.table.get_mut(key) else {
            return;
        };
        if readiness.has_error()
            && let (Some(address), Some(socket)) = (association.replaceable, &association.socket)
            && socket_error(socket) == Ok(Err(Errno::CONNREFUSED))
            && hybrid::look_ahead(socket) == Ahead::Nothing
        {
            let target = association
                .rule
                .rule
                .to
                .resolve(self.device.cid, association.source.1);
            if let (Some(connector), Some(target)) = (&self.cx.shared.connector, target) {
                connector.refused(&target, address);
            }
            return self.end_association(key, "refused by the remote side");
        }
        if readiness.readable() {
            association.readable = true;
            self.device
                .datagrams
                .associations
                .enqueue(key, self.device.cid, self.cx.now);
        }
        if readiness.writable() {
            self.flush_association(key);
        }
    }

    /// Sends the datagrams that wait, as far as the socket takes them.
    fn flush_association(&mut self, key: u32) {
        while let Some(association) = self.device.datagrams.associations.table.get_mut(key)
            && let (Some(socket), false) = (&association.socket, association.held.is_empty())
        {
            let bytes = association.held.first();
            let (sent, len) = (send_bytes(socket, bytes), bytes.len());
            if sent == Sent::Full {
                return;
            }
            association.held.pop();
            self.device.datagrams.associations.table.recount(key);
            self.datagram_sent(key, len, sent);
        }
    }

    /// Sends the guest answers of sockets, as far as there are buffers.
    pub(super) fn transmit_answers(&mut self) {
        // Streams that wait have more than answers.
        let most = match self.device.bridges.has_ready() {
            true => TURN_BYTES / 2,
            false => TURN_BYTES,
        };
        let before = self.device.moved;
        for _ in 0..BUDGET {
            if self.device.starved || self.device.moved - before >= most {
                return;
            }
            let Some(key) = self.device.datagrams.associations.table.dequeue() else {
                return;
            };
            match self.transmit_answer(key) {
                Ok(()) => {
                    self.device
                        .datagrams
                        .associations
                        .enqueue(key, self.device.cid, self.cx.now)
                }
                Err(NotPut::NoRoom) => {
                    return self.device.datagrams.associations.table.requeue(key);
                }
                Err(_) => {
                    return self
                        .device
                        .fail("guest memory vanished under a receive", self.cx);
                }
            }
        }
    }

    /// Sends the guest the next answer of an association, or finds that there is none.
    fn transmit_answer(&mut self, key: u32) -> Result<(), NotPut> {
        let guest = self.device.cid;
        let Some(association) = self.device.datagrams.associations.table.get_mut(key) else {
            return Ok(());
        };
        let Some(socket) = association.socket.take() else {
            return Ok(());
        };
        let (port, host_port) = association.source;
        let (from, to) = (
            Address::new(Cid::HOST, host_port),
            Address::new(guest, port),
        );
        let ahead = match hybrid::look_ahead(&socket) {
            // A report about an earlier datagram, which is over now. A lasting one has an edge.
            Ahead::Failed => hybrid::look_ahead(&socket),
            ahead => ahead,
        };
        let put = match ahead {
            Ahead::Message(len) if len > MAX_DATAGRAM as usize => Some((Err(NotPut::TooLong), len)),
            Ahead::Message(len) => {
                let source = DatagramPayload::Socket(&socket, len);
                Some((self.put_of_sibling(from, to, source), len))
            }
            _ => None,
        };
        let table = &mut self.device.datagrams.associations.table;
        if let Some((Ok(()), _)) = put {
            table.touch(key, self.cx.now);
        }
        let Some(association) = table.get_mut(key) else {
            return Ok(());
        };
        let result = match put {
            Some((Ok(()), len)) => {
                self.device.moved += len;
                association.forwarded.received(len);
                Ok(())
            }
            Some((Err(NotPut::TooLong), _)) => {
                // Reading any part of a datagram removes it.
                let _ = socket.recv(&mut [0u8; 1]);
                association.forwarded.dropped();
                self.cx.shared.counters.datagrams_dropped.add(1);
                Ok(())
            }
            Some((Err(NotPut::NotReceived(false)), _)) => Ok(()),
            Some((error, _)) => error,
            None => {
                association.readable = false;
                Ok(())
            }
        };
        association.socket = Some(socket);
        result
    }
}

impl Device {
    /// Handles STOP or START of the guest to a port of CID 2.
    pub(super) fn association_control(&mut self, header: &Repr, now: Instant) {
        let (port, guest) = (header.dst.port, header.src);
        let all = &mut self.datagrams.associations;
        let Some(key) = all.table.find(&(guest.port, port)) else {
            return;
        };
        let reason = match Control::parse(header) {
            Some(Control::Stop(place)) => PauseReason::Full(place),
            Some(Control::Unsupported) => PauseReason::Unsupported,
            Some(Control::Start(place)) => {
                if all.paused.resume(port, guest, place) {
                    all.enqueue(key, self.cid, now);
                }
                return;
            }
            None => return,
        };
        all.handle_timeout(self.cid, now);
        // Beyond the bound of entries the guest drops what it cannot take.
        let _ = all.paused.pause(now, port, guest, reason);
    }
}

/// A copy of the payload of a chain. `None`: there is no memory for it.
fn copy(memory: &Memory, chain: &Chain, len: usize, cx: &Context<'_>) -> Option<Vec<u8>> {
    let mut bytes = fallible::zeroed(len).ok()?;
    memory.read(chain.readable(), HEADER_LEN, &mut bytes);
    cx.shared.counters.copied_bytes.add(len as u64);
    Some(bytes)
}
