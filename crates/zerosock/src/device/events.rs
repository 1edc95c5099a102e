//! What the protocol core says has happened to the guest's connections, and what follows.

use super::join::End;
use super::ring::Ring;
use super::sibling;
use super::timers::Timer;
use super::{Context, Device};
use crate::device::host_sockets::{self, hybrid};
use crate::device::sibling_message::Message;
use crate::header;
use zerosock_proto::Cid;
use zerosock_proto::vsock::{Event, FlowId};
use zerosock_proto::wire::vsock::{HEADER_LEN, Repr};
use zerosock_ring::Chain;

/// Writes `repr` in front of the `len` bytes of payload that lie in `chain` and completes it.
pub(super) fn emit(rx: &mut Ring, chain: Chain, repr: &Repr, len: usize) {
    header::write(rx.queue.memory(), chain.writable(), repr);
    rx.complete(chain, (HEADER_LEN + len) as u32);
}

impl Device {
    /// Acts on every event that the core has.
    #[inline]
    pub(super) fn drain_events(&mut self, cx: &mut Context<'_>) {
        while let Some(event) = self.shard.poll_event() {
            self.event(event, cx);
        }
    }

    fn event(&mut self, event: Event, cx: &mut Context<'_>) {
        match event {
            Event::Incoming {
                flow,
                local,
                peer,
                socket_type,
            } => {
                if local.cid != Cid::HOST {
                    self.ask_sibling(flow, local, peer, socket_type, cx);
                } else if !cx.routes.may_reach(self.cid, local) {
                    cx.counters.conns_refused.add(1);
                    let _ = self.shard.reject(flow);
                } else if self.app_incoming(flow, local, peer, socket_type, cx) {
                } else if cx.routes.service(local.port).is_some() {
                    self.ask_sibling(flow, local, peer, socket_type, cx);
                } else {
                    self.guest_connects(flow, local.port, cx);
                }
            }
            Event::Connected { flow } => self.guest_accepted(flow, cx),
            Event::Refused { flow, reason } => {
                cx.counters.conns_refused.add(1);
                if let Some(key) = self.key_of(flow) {
                    if let Some(join) = self.joins.get(key as usize)
                        && let End::App(end) = &join.end
                        && let Some(app) = cx.app.as_deref_mut()
                        && let Some(conn) = app.sockets.get_mut(end.id)
                    {
                        conn.refused = Some(reason);
                    }
                    self.end_join(key, cx);
                }
            }
            Event::PeerShutdown {
                flow,
                receive,
                send,
            } => {
                self.guest_shut(flow, receive, send, cx);
            }
            Event::Writable { flow } => {
                if let Some(key) = self.key_of(flow) {
                    if let Some(join) = self.joins.get_mut(key as usize) {
                        join.no_credit = false;
                        join.holds_back = false;
                        if let End::App(end) = &join.end {
                            Self::app_writable(end.id, cx);
                        }
                    }
                    self.enqueue(key);
                }
            }
            Event::Closed { flow, reason } => self.guest_closed(flow, reason.is_orderly(), cx),
        }
    }

    /// The guest has accepted what the host or a sibling asked for.
    fn guest_accepted(&mut self, flow: FlowId, cx: &mut Context<'_>) {
        let Some(key) = self.key_of(flow) else { return };
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        join.open = true;
        match &mut join.end {
            End::Socket { socket, ok } => {
                // Edges may have passed while the guest made up its mind: look again.
                join.readable = true;
                join.writable = true;
                if let Some(port) = ok.take()
                    && !hybrid::write_ok(&*socket, port)
                {
                    return self.reset_join(key, cx);
                }
            }
            End::Sibling(s) => {
                let from = crate::device::sibling_message::Peer {
                    device: self.addr,
                    flow,
                };
                let message = Message::Accepted {
                    to: s.peer.flow,
                    from,
                };
                cx.outbox.send(s.peer.device, message);
                join.readable = !s.is_drained();
                // A sibling has room, until it is found to have stalled.
                join.writable = true;
            }
            End::App(end) => Self::app_connected(end.id, cx),
            _ => {}
        }
        self.enqueue(key);
    }

    fn guest_shut(&mut self, flow: FlowId, receive: bool, send: bool, cx: &mut Context<'_>) {
        if receive && !self.gathered.is_empty() {
            self.gathered.forget(flow);
        }
        let Some(key) = self.key_of(flow) else { return };
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        if let End::App(end) = &join.end {
            let id = end.id;
            return self.app_shut(id, receive, send, cx);
        }
        if receive && !join.read_closed {
            // Nothing more goes to the guest: the host learns it by EPIPE.
            join.read_closed = true;
            match &mut join.end {
                End::Socket { socket, .. } => {
                    host_sockets::stop_reading(socket);
                }
                End::Sibling(s) => {
                    sibling::return_inbound(s, true, cx);
                    let to = s.peer.flow;
                    let message = Message::Shutdown {
                        to,
                        receive: true,
                        send: false,
                    };
                    cx.outbox.send(s.peer.device, message);
                }
                _ => {}
            }
        }
        if send && !join.guest_finished {
            join.guest_finished = true;
            // Everything that came before it goes first.
            self.flush(key, cx);
        }
        // What was waiting for the guest waits no more.
        self.settle(key, cx);
    }

    /// The vsock half has ended.
    fn guest_closed(&mut self, flow: FlowId, orderly: bool, cx: &mut Context<'_>) {
        if !self.gathered.is_empty() {
            self.gathered.forget(flow);
        }
        let Some(key) = self.key_of(flow) else { return };
        // One attempt for what came in the same turn.
        self.flush(key, cx);
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        // The guest may have sent its last byte and then given up waiting. A reset in the middle
        // of its stream drops what was under way, as it would in a kernel.
        if join.guest_finished && self.linger(key, cx) {
            return;
        }
        if let Some(join) = self.remove_join(key, cx) {
            // Whose end was read, or whom we had stopped reading before, has left nothing.
            if let (End::Socket { socket, .. }, true) = (&join.end, orderly && !join.read_closed) {
                host_sockets::leave_nothing_unread(socket);
            }
            sibling::tell_end(&join, orderly, cx);
            self.app_ended(&join, orderly, cx);
        }
    }

    /// Parts a join from its vsock half but lets the host socket take the bytes that are here, as
    /// it would from a kernel socket whose owner has gone. False: there is nothing to take, or
    /// nobody to take it.
    pub(super) fn linger(&mut self, key: u32, cx: &mut Context<'_>) -> bool {
        let Some(join) = self.joins.get(key as usize) else {
            return false;
        };
        if join.outbound.is_empty()
            || !join.open
            || !matches!(join.end, End::Socket { .. })
            || self.lingering.len() >= cx.limits.lingering
        {
            return false;
        }
        self.spill(key, 0, cx);
        let Some(join) = self.joins.get_mut(key as usize) else {
            return false;
        };
        join.read_closed = true;
        join.guest_finished = true;
        if let Some(flow) = join.flow.take() {
            self.by_flow[flow.index()] = u32::MAX;
            self.start_lingering(key, cx);
        }
        self.settle(key, cx);
        true
    }

    /// Ends the vsock half of a join (if it is there) with a RST, and the join with it.
    pub(super) fn reset_join(&mut self, key: u32, cx: &mut Context<'_>) {
        if let Some(flow) = self.joins.get(key as usize).and_then(|j| j.flow) {
            let _ = self.shard.reset(flow);
        }
        self.end_join(key, cx);
    }

    /// Removes a join whose guest is gone. If it had said that it sends no more, the other side has
    /// missed nothing, and reads to the end; else it is told that the connection was cut off.
    pub(super) fn part_join(&mut self, key: u32, cx: &mut Context<'_>) {
        if let Some(join) = self.remove_join(key, cx) {
            let orderly = join.guest_finished;
            sibling::tell_end(&join, orderly, cx);
            self.app_ended(&join, orderly, cx);
        }
    }

    /// Removes a join whose vsock half has been cut off and tells a sibling so.
    pub(super) fn end_join(&mut self, key: u32, cx: &mut Context<'_>) {
        if let Some(join) = self.remove_join(key, cx) {
            sibling::tell_end(&join, false, cx);
            self.app_ended(&join, false, cx);
        }
    }

    /// Answers what the timers say is due.
    pub(super) fn fire_timers(&mut self, cx: &mut Context<'_>) {
        while let Some(timer) = self.timers.pop(cx.now) {
            match timer {
                Timer::Handshake(key) => self.handshake_timed_out(key, cx),
                Timer::Connect(key) => self.connect_timed_out(key, cx),
                Timer::Backlog(to) => self.retry_connects(to, cx),
                Timer::Linger => self.linger_timed_out(cx),
                Timer::Accept(key) => self.accept(key, cx),
                Timer::Hold(key) => self.hold_timed_out(key, cx),
                // The turn itself looks again.
                Timer::Recall => {}
            }
        }
        if self.shard.poll_timeout().is_some_and(|t| t <= cx.now) {
            self.shard.handle_timeout(cx.now);
            self.drain_events(cx);
        }
        if self.datagrams.next_timeout().is_some_and(|t| t <= cx.now) {
            self.datagram_timeout(cx);
        }
    }

    /// A join has held chains for long enough.
    fn hold_timed_out(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        if !std::mem::take(&mut join.hold_timer) {
            return;
        }
        if join
            .held_since
            .is_none_or(|since| since + cx.limits.hold > cx.now)
        {
            // Held for less than that, or no more: look again in time.
            return self.settle(key, cx);
        }
        join.held_since = None;
        join.no_memory = false;
        if let End::Sibling(s) = &mut join.end {
            s.stalled = true;
            let to = s.peer.flow;
            cx.outbox.send(s.peer.device, Message::Recall { to });
            return self.settle(key, cx);
        }
        self.spill(key, 0, cx);
        if let Some(join) = self.joins.get_mut(key as usize) {
            // A send that failed for want of memory leaves no edge behind: try once more.
            join.writable |= join.open;
        }
        self.flush(key, cx);
    }

    /// Tells the driver that the device lost its connections (virtio 1.2, 5.10.6.7).
    pub(super) fn serve_events(&mut self) {
        if !self.announce_reset {
            return;
        }
        let Some(event) = self.event.as_mut() else {
            return;
        };
        if let Some(chain) = event.pop() {
            const TRANSPORT_RESET: [u8; 4] = 0u32.to_le_bytes();
            let written = event
                .queue
                .memory()
                .write(chain.writable(), 0, &TRANSPORT_RESET);
            event.complete(chain, written as u32);
            self.announce_reset = false;
            tracing::info!(cid = %self.cid, "told the driver that its connections are gone");
        }
    }
}
