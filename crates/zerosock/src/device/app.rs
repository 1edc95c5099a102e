//! Connections of the guest with the program that embeds the device.
//!
//! # Invariants
//! - A held chain belongs to the running queue: stopping the queue recalls all of them first.
//! - A connection is in the table by flow until its flow has ended or the program has closed it.
//! - The end of a connection is reported after the bytes before it.
//!
//! # Use
//! The other end of such a connection is an entry of the table of [`crate::table::sockets`], not a
//! socket. Bytes from the guest stay in their chain until the program has read them; bytes from the
//! program are written into the buffers that the guest has posted. [`super::app_store`] accounts
//! for held chains, [`super::lending`] has the loans, and [`crate::host`] the functions that the
//! program calls.

use crate::device::half::DeviceHalf;
use crate::device::state::app::NONE;
use zerosock_proto::vsock::{ConnectError, Directions, FlowId, Shard};
use zerosock_proto::wire::vsock::{HEADER_LEN, SocketType};
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_ring::Chain;

use super::events::RESET;
use super::state::program::{App, HostToken};
use super::{Context, Device};
use crate::stats::RefusalCause;
use crate::table::send_half::SendHalf;
use crate::table::sockets::{Arrival, HeldBuffer, MessageEnd, StreamId, StreamState};
use zerosock_virtio::ring::Ring;

impl Device {
    /// Whether a turn would take something from the rings. Reads the driver's index only if no
    /// chain is known to be available.
    #[inline]
    pub(crate) fn has_ring_work(&mut self, app: &App) -> bool {
        if let Some(tx) = &mut self.queues.rings.tx
            && tx.live()
            && tx.queue.available() > 0
            && !self.queues.is_command_pending()
            && !self.shard.is_backlogged()
            && (self.app.pool == NONE || app.sockets.has_room(self.app.pool))
        {
            return true;
        }
        self.starved
            && self
                .queues
                .rings
                .rx
                .as_mut()
                .is_some_and(|rx| rx.live() && rx.queue.available() > 0)
    }

    /// Whether packets of the guest are available.
    #[inline]
    pub(crate) fn has_arrivals(&mut self) -> bool {
        let tx = self.queues.rings.tx.as_mut().filter(|tx| tx.live());
        tx.is_some_and(|tx| tx.queue.available() > 0)
    }

    /// Whether the guest may be waiting for completed chains or credit: a credit update is due, an
    /// eighth of the queue has been completed, or the driver asked for an earlier notification (as
    /// one that sends without copying does) and the program has read everything. Also whether the
    /// protocol core has an event, such as room for a writer that waits.
    #[inline]
    pub(crate) fn is_awaited(&self, app: &App) -> bool {
        let many = |tx: &Ring| u32::from(tx.unpublished) >= u32::from(tx.queue.size() / 8).max(1);
        let all = |tx: &Ring| !app.sockets.has_unread(self.app.pool) && !tx.queue.has_available();
        let last = |tx: &Ring| tx.queue.would_notify(0) && all(tx);
        self.shard.has_transmit()
            || self.shard.has_events()
            || self
                .queues
                .rings
                .tx
                .as_ref()
                .is_some_and(|tx| many(tx) || last(tx))
    }

    /// Whether host sockets may have something for the device.
    pub(crate) fn watches_host(&self) -> bool {
        !matches!(self.host, super::HostAccess::None)
    }

    /// Asks the guest's driver for kicks. Returns true if chains became available meanwhile.
    pub(crate) fn arm(&mut self, app: &App) -> bool {
        self.rearm(self.is_full(app))
    }

    /// Resets a flow that belongs to no connection of the device, rather than lose the bytes in `chain`.
    #[cold]
    fn reset_unknown(&mut self, chain: Chain, flow: FlowId) {
        if let Some(tx) = &mut self.queues.rings.tx {
            tx.complete(chain, 0);
        }
        let _ = self.shard.reset(flow);
    }

    /// Makes a chain a buffer that the program holds. `since`: when it arrived; `None`: the next turn sets
    /// it. `None` without a transmit queue.
    #[inline]
    pub(super) fn hold_for_program(
        &mut self,
        chain: Chain,
        len: u32,
        ends: MessageEnd,
        since: Option<Instant>,
        app: &mut App,
    ) -> Option<HeldBuffer<HostToken>> {
        let tx = self.queues.rings.tx.as_mut()?;
        self.app.note_descriptors(chain.descriptors(), tx, app);
        Some(HeldBuffer {
            token: HostToken {
                chain,
                vm: self.addr.number,
                epoch: tx.epoch,
            },
            offset: HEADER_LEN as u32,
            len,
            since,
            ends,
        })
    }

    /// Asks for a kick when buffers are posted. Has no effect while a command is pending: then the
    /// program gets no buffers, even if some are available.
    pub(super) fn request_buffers(&mut self) {
        self.starved |= !self.queues.is_command_pending();
    }

    /// Whether the program waits for buffers.
    pub(super) fn program_waits(&self) -> bool {
        self.datagrams.room_is_wanted() || !self.app.waiters.is_empty()
    }

    /// The flows of the guest's connections.
    pub(crate) fn shard(&self) -> &Shard {
        &self.shard
    }

    /// The flows of the guest's connections; the next flush makes changes visible.
    pub(crate) fn shard_mut(&mut self) -> &mut Shard {
        &mut self.shard
    }

    /// Shuts down one direction, or both.
    pub(crate) fn app_shutdown(&mut self, flow: FlowId, how: Directions, now: Instant) {
        // Fails if the flow has ended, and then no shutdown is needed.
        let _ = self.shard.shutdown(now, flow, how);
    }
}

impl DeviceHalf<'_, '_> {
    /// Delivers a packet of the guest to the program.
    #[inline]
    pub(super) fn deliver(&mut self, chain: Chain, arrival: Arrival) {
        let Self { device, cx } = self;
        let Arrival { flow, len, ends } = arrival;
        let (Some(id), Some(app)) = (device.app.flows.get(flow), cx.shared.app.as_deref_mut())
        else {
            return device.reset_unknown(chain, flow);
        };
        let end = ends.unwrap_or_default();
        let Some(held) = device.hold_for_program(chain, len, end, Some(cx.now), app) else {
            return;
        };
        match ends {
            None => app.sockets.deliver(id, held, &mut device.store()),
            Some(_) => app.sockets.deliver_part(id, held, &mut device.store()),
        };
    }

    /// Handles the guest's request to connect to the host. Returns false if the program does not
    /// listen on the port.
    pub(super) fn incoming(
        &mut self,
        flow: FlowId,
        local: Address,
        peer: Address,
        socket_type: SocketType,
    ) -> bool {
        let app = self.cx.shared.app.as_deref();
        if !app.is_some_and(|app| app.listeners.contains(local.port)) {
            return false;
        }
        let app = self.cx.shared.app.as_deref_mut();
        if self.device.app.flows.reserve(flow).is_err()
            || app.is_some_and(|app| app.sockets.reserve().is_err())
        {
            self.cx.shared.counters.refuse(RefusalCause::Limit);
            self.device.bridges_with(self.cx).reset_without_memory(flow);
            return true;
        }
        let Some(app) = self.cx.shared.app.as_deref_mut() else {
            return false;
        };
        let admitted = app.listeners.admit(local.port, socket_type);
        if admitted.is_err() || self.device.shard.accept(self.cx.now, flow).is_err() {
            let ended = (RefusalCause::Other, "the request has ended");
            let (cause, reason) = admitted.err().unwrap_or(ended);
            self.cx.shared.counters.refuse(cause);
            tracing::debug!(from = %peer, to = %local, reason, "connection refused");
            let _ = self.device.shard.reject(flow);
            return true;
        }
        if let Ok(Some(bytes)) = admitted {
            // The RESPONSE, which advertises the size, has not been sent yet: this cannot fail.
            let _ = self.device.shard.set_buf_alloc(flow, bytes);
        }
        let pool = self.device.app_pool(app);
        let state = StreamState::Connected;
        let id = app
            .sockets
            .insert(pool, flow, state, local, peer, socket_type);
        app.listeners.push(local.port, id);
        self.device.app.flows.insert(flow, id);
        self.cx.shared.counters.conns_added.add(1);
        true
    }

    /// Connects the program to the guest.
    pub(crate) fn connect(
        &mut self,
        from: Port,
        to: Address,
        socket_type: SocketType,
    ) -> Result<StreamId, ConnectError> {
        let Self { device, cx } = self;
        if !device.accepts_requests() || cx.shared.app.is_none() {
            return Err(ConnectError::Unreachable);
        }
        let local = Address::new(Cid::HOST, from);
        if let Err(denial) = cx.shared.routes.admit(Cid::HOST, to) {
            device.deny(local, to, denial, cx);
            return Err(ConnectError::Unreachable);
        }
        let flow = device
            .shard
            .connect(cx.now, local, to, socket_type)
            .inspect_err(|&error| cx.shared.counters.refuse(error.into()))?;
        let app = cx.shared.app.as_deref_mut();
        if device.app.flows.reserve(flow).is_err()
            || app.is_some_and(|app| app.sockets.reserve().is_err())
        {
            device.bridges_with(cx).reset_without_memory(flow);
            return Err(ConnectError::TooManyConnections);
        }
        device.log_flow(flow, "connection requested");
        let local = device.shard.flow(flow).map_or(local, |info| info.local);
        let Some(app) = cx.shared.app.as_deref_mut() else {
            return Err(ConnectError::Unreachable);
        };
        let pool = device.app_pool(app);
        let state = StreamState::Connecting;
        let id = app
            .sockets
            .insert(pool, flow, state, local, to, socket_type);
        device.app.flows.insert(flow, id);
        cx.shared.counters.conns_added.add(1);
        Ok(id)
    }

    /// The flow of a connection has ended: tells the program how. Has no effect on another flow.
    pub(super) fn end_app(&mut self, flow: FlowId, orderly: bool, reason: &str) {
        let Some(id) = self.device.app.flows.remove(flow) else {
            return;
        };
        self.cx.shared.counters.conns_removed.add(1);
        let Some(app) = self.cx.shared.app.as_deref_mut() else {
            return;
        };
        let conn = app.sockets.get(id);
        if conn.is_some_and(|conn| conn.state == StreamState::Connected) {
            // The program counts the bytes by itself.
            tracing::debug!(cid = %self.device.cid, %flow, reason, "connection closed");
        }
        app.sockets.ended(id, orderly, &mut self.device.store());
    }

    /// Resets a connection of the program.
    pub(super) fn reset_app(&mut self, flow: FlowId) {
        // Fails if the flow has ended.
        let _ = self.device.shard.reset(flow);
        self.end_app(flow, false, RESET);
    }

    /// Wakes connections that found no buffer once buffers are available; else asks for kicks.
    pub(super) fn wake_buffer_waiters(&mut self) {
        let Self { device, cx } = self;
        if device.app.waiters.is_empty() {
            return;
        }
        let room = !device.queues.is_command_pending()
            && device
                .queues
                .rings
                .rx
                .as_mut()
                .is_some_and(|rx| rx.live() && rx.queue.available() > 0);
        if !room {
            device.request_buffers();
            return;
        }
        if let Some(app) = cx.shared.app.as_deref_mut() {
            app.sockets.wake_waiters(&mut device.app.waiters);
        }
    }

    /// Publishes the packets that the program has sent, and nothing else.
    #[inline]
    pub(crate) fn publish_sent(&mut self) {
        if let Some(rx) = &mut self.device.queues.rings.rx {
            publish(rx, self.cx);
        }
    }

    /// Closes a connection: in order, as a kernel socket (bytes sent still arrive, then SHUTDOWN of
    /// both directions; unread bytes are dropped), or with an RST if `reset` is set or the guest
    /// has not answered the request.
    pub(crate) fn close(&mut self, flow: FlowId, reset: bool) {
        if self.device.app.flows.remove(flow).is_some() {
            self.cx.shared.counters.conns_removed.add(1);
        }
        if reset
            || self
                .device
                .shard
                .shutdown(self.cx.now, flow, Directions::BOTH)
                .is_err()
        {
            // Fails if the flow has ended, and then no reset is needed.
            let _ = self.device.shard.reset(flow);
        }
    }

    /// Whether an attempt to send control packets can succeed. It reads the clock, after which the device has a turn: a
    /// caller that waits for buffers and tries again would have no rest.
    pub(super) fn may_send_control(&mut self) -> bool {
        !self.device.starved || self.has_buffer()
    }

    /// Publishes what the program has sent or returned; the caller has sent flow control. Returns true if a
    /// timer may have changed or work is left.
    #[inline]
    pub(crate) fn flush(&mut self) -> bool {
        let control = self.device.shard.has_transmit() && self.may_send_control();
        if control {
            self.device.transmit_control(self.cx);
        }
        if self.device.shard.has_events() {
            self.cx.time();
            self.device.drain_events(self.cx);
        }
        if let Some(rx) = &mut self.device.queues.rings.rx {
            publish(rx, self.cx);
        }
        if let Some(tx) = &mut self.device.queues.rings.tx {
            publish(tx, self.cx);
        }
        control || self.device.has_broken()
    }

    /// Resets a connection with more unread bytes than may be copied.
    pub(crate) fn reset_unread(&mut self, id: StreamId) {
        let conn = self
            .cx
            .shared
            .app
            .as_deref()
            .and_then(|app| app.sockets.get(id));
        if let Some(flow) = conn.and_then(|conn| conn.flow) {
            self.reset_app(flow);
        }
        if let Some(app) = self.cx.shared.app.as_deref_mut() {
            app.sockets.mark_reset(id, &mut self.device.store());
        }
    }
}

/// Publishes a ring, and counts the notification.
#[inline]
fn publish(ring: &mut Ring, cx: &mut Context<'_>) {
    if ring.publish(cx.notifier)
        && let Some(app) = cx.shared.app.as_deref_mut()
    {
        app.tally.notifications += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::lab::DeviceFixture;
    use crate::table::leases::Leases;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn request_of_the_wrong_type_is_not_counted_as_full_backlog() {
        let mut lab = DeviceFixture::new();
        let leases = Arc::new(Leases::new(8));
        let mut app = App::new(leases, Duration::from_secs(1), 0, false);
        let local = Address::new(Cid::HOST, Port::new(9));
        let peer = Address::new(Cid::new(3), Port::new(1));
        app.listen(local.port, 0, SocketType::Stream);
        lab.shared.app = Some(Box::new(app));
        let (device, mut cx) = lab.lend();
        let mut flow = || {
            let from = Address::new(Cid::HOST, Port::ANY);
            let stream = SocketType::Stream;
            device.shard.connect(cx.now, from, peer, stream).unwrap()
        };
        let (waiting, flows) = (flow(), [flow(), flow()]);
        let app = cx.shared.app.as_deref_mut().unwrap();
        let pool = device.app_pool(app);
        let state = StreamState::Connected;
        let stream = SocketType::Stream;
        let id = app
            .sockets
            .insert(pool, waiting, state, local, peer, stream);
        app.listeners.push(local.port, id);
        let types = [SocketType::SeqPacket, SocketType::Stream];
        for ((flow, socket_type), full) in flows.into_iter().zip(types).zip([0, 1]) {
            assert!(
                device
                    .half(&mut cx)
                    .incoming(flow, local, peer, socket_type)
            );
            let counters = &cx.shared.counters;
            assert_eq!(counters.refused_backlog_full.get(), full, "{socket_type:?}");
        }
        assert_eq!(lab.counters().conns_refused.get(), 2);
    }
}
