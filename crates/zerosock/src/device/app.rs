//! Connections of the guest with the program that embeds the device.
//!
//! The other end of such a connection is no socket but an entry of the program's table of
//! [`Sockets`]: what the guest sends is held there where the guest wrote it, and goes back when
//! the program has read it; what the program sends is written straight into the buffers that the
//! guest has posted. Here is what a device does for them; [`super::app_store`] has what is held,
//! [`super::lending`] the loans, and [`crate::host`] what the program calls.
//!
//! What must hold: a chain that is held is of the queue that runs now, because every way to stop
//! it recalls them first; the table and the bridge of a connection end together, whoever ends it; an
//! end is told after the bytes before it.

use zerosock_proto::vsock::{ConnectError, FlowError, FlowId, How, ReserveError, Shard};
use zerosock_proto::wire::vsock::{HEADER_LEN, MAX_PAYLOAD, SocketType};
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_ring::Chain;

use super::app_store::{NONE, QueueStore};
use super::bridge::{AppEnd, Bridge, BridgePeer};
use super::events::emit;
use super::program::{App, HostToken};
use super::ring::Ring;
use super::{Context, Device};
use crate::table::backend::{CreditInfo, SendFault};
use crate::table::gathered::unsent;
use crate::table::sockets::{Ends, HeldBuffer, ReadyFlags, Sockets, StreamId, StreamState};

impl Device {
    /// Whether there is something that a turn would take in. Reads what the guest writes only if
    /// nothing is known to be left.
    #[inline]
    pub(crate) fn has_news(&mut self, app: &App) -> bool {
        if let Some(tx) = &mut self.tx
            && tx.live()
            && tx.queue.available() > 0
            && self.waiting.is_none()
            && !self.shard.is_backlogged()
            && (self.app.pool == NONE || app.sockets.has_room(self.app.pool))
        {
            return true;
        }
        self.starved
            && self
                .rx
                .as_mut()
                .is_some_and(|rx| rx.live() && rx.queue.available() > 0)
    }

    /// Whether packets of the guest are there.
    #[inline]
    pub(crate) fn has_arrivals(&mut self) -> bool {
        let tx = self.tx.as_mut().filter(|tx| tx.live());
        tx.is_some_and(|tx| tx.queue.available() > 0)
    }

    /// Whether packets without payload wait to be sent: to send them takes the time.
    #[inline]
    pub(crate) fn has_control(&self) -> bool {
        self.shard.has_transmit()
    }

    /// Whether the guest may be waiting for what was given back: credit is to be told, a good
    /// number of buffers is there, or it has asked to be told of fewer (as one does that sends
    /// without a copy) and the program has taken all that there is.
    #[inline]
    pub(crate) fn is_awaited(&self, app: &App) -> bool {
        let many = |tx: &Ring| u32::from(tx.unseen) >= u32::from(tx.queue.size() / 8).max(1);
        let all = |tx: &Ring| !app.sockets.has_unread(self.app.pool) && !tx.queue.has_available();
        let last = |tx: &Ring| tx.queue.would_notify() && all(tx);
        self.shard.has_transmit() || self.tx.as_ref().is_some_and(|tx| many(tx) || last(tx))
    }

    /// Whether host sockets may have something for the device.
    pub(crate) fn watches_host(&self) -> bool {
        !matches!(self.host, super::HostEnd::None)
    }

    /// Asks the guest's driver for kicks. True: something came meanwhile.
    pub(crate) fn arm(&mut self, app: &App) -> bool {
        self.rearm(self.is_full(app))
    }

    /// Bytes of the guest's for the program.
    #[inline]
    pub(super) fn app_deliver(
        &mut self,
        id: StreamId,
        chain: Chain,
        len: u32,
        cx: &mut Context<'_>,
    ) {
        self.app_hold(chain, len, Ends::Nothing, cx, |sockets, held, store| {
            sockets.deliver(id, held, store);
        });
    }

    /// As `app_deliver`, a part of a message.
    pub(super) fn app_deliver_part(
        &mut self,
        id: StreamId,
        chain: Chain,
        len: u32,
        ends: Ends,
        cx: &mut Context<'_>,
    ) {
        self.app_hold(chain, len, ends, cx, |sockets, held, store| {
            sockets.deliver_part(id, held, store);
        });
    }

    #[inline]
    fn app_hold(
        &mut self,
        chain: Chain,
        len: u32,
        ends: Ends,
        cx: &mut Context<'_>,
        deliver: impl FnOnce(&mut Sockets<HostToken>, HeldBuffer<HostToken>, &mut QueueStore<'_>),
    ) {
        let (Some(tx), Some(app)) = (self.tx.as_mut(), cx.app.as_deref_mut()) else {
            return;
        };
        self.app.note_descriptors(chain.descriptors(), tx, app);
        let held = HeldBuffer {
            token: HostToken {
                chain,
                vm: self.addr.vm,
                epoch: tx.epoch,
            },
            offset: HEADER_LEN as u32,
            len,
            since: cx.now,
            ends,
        };
        let mut store = QueueStore::new(tx, &mut self.shard);
        deliver(&mut app.sockets, held, &mut store);
    }

    /// The guest wants to reach a port of the host. False: the program does not listen there.
    pub(super) fn app_incoming(
        &mut self,
        flow: FlowId,
        local: Address,
        peer: Address,
        socket_type: SocketType,
        cx: &mut Context<'_>,
    ) -> bool {
        let Some(app) = cx.app.as_deref_mut() else {
            return false;
        };
        let Some(listener) = app.listener(local.port) else {
            return false;
        };
        if listener.socket_type != socket_type
            || listener.waiting.len() > listener.backlog
            || self.shard.accept(cx.now, flow).is_err()
        {
            cx.counters.conns_refused.add(1);
            let _ = self.shard.reject(flow);
            return true;
        }
        if let Some(bytes) = listener.buffer {
            // The RESPONSE, which tells of it, has not left: it cannot fail.
            let _ = self.shard.set_buf_alloc(flow, bytes);
        }
        let pool = self.app_pool(app);
        let state = StreamState::Connected;
        let id = app.sockets.insert(pool, flow, state, local, peer);
        if socket_type == SocketType::SeqPacket {
            app.sockets.carry_messages(id);
        }
        app.wait_on(local.port, id);
        let key = self.add_bridge(flow, BridgePeer::App(AppEnd { id, loans: 0 }), cx);
        if let Some(bridge) = self.bridges.get_mut(key as usize) {
            bridge.open = true;
        }
        true
    }

    /// The program wants to reach the guest.
    pub(crate) fn app_connect(
        &mut self,
        from: Port,
        to: Address,
        socket_type: SocketType,
        cx: &mut Context<'_>,
    ) -> Result<StreamId, ConnectError> {
        let running = self.rx.as_ref().is_some_and(Ring::live);
        if !running || !cx.routes.may_reach(Cid::HOST, to) || cx.app.is_none() {
            return Err(ConnectError::Unreachable);
        }
        let local = Address::new(Cid::HOST, from);
        let flow = self
            .shard
            .connect(cx.now, local, to, socket_type)
            .inspect_err(|_| cx.counters.conns_refused.add(1))?;
        let local = self.shard.flow(flow).map_or(local, |info| info.local);
        let Some(app) = cx.app.as_deref_mut() else {
            return Err(ConnectError::Unreachable);
        };
        let pool = self.app_pool(app);
        let state = StreamState::Connecting;
        let id = app.sockets.insert(pool, flow, state, local, to);
        if socket_type == SocketType::SeqPacket {
            app.sockets.carry_messages(id);
        }
        self.add_bridge(flow, BridgePeer::App(AppEnd { id, loans: 0 }), cx);
        Ok(id)
    }

    /// The guest has accepted what the program asked for.
    pub(super) fn app_connected(id: StreamId, cx: &mut Context<'_>) {
        if let Some(app) = cx.app.as_deref_mut()
            && let Some(conn) = app.sockets.get_mut(id)
        {
            conn.state = StreamState::Connected;
            app.sockets.set_ready(id, ReadyFlags::Connected);
        }
    }

    /// The guest will not receive, or not send, any more.
    pub(super) fn app_shut(
        &mut self,
        id: StreamId,
        receive: bool,
        send: bool,
        cx: &mut Context<'_>,
    ) {
        if let Some(app) = cx.app.as_deref_mut()
            && let Some(conn) = app.sockets.get_mut(id)
        {
            conn.peer_finished |= send;
            conn.peer_recv_shutdown |= receive;
            if send {
                app.sockets.drop_half(id, &mut self.store());
            }
            app.sockets.set_ready(id, ReadyFlags::PeerShutdown);
        }
    }

    /// There is credit again.
    pub(super) fn app_writable(id: StreamId, cx: &mut Context<'_>) {
        if let Some(app) = cx.app.as_deref_mut()
            && let Some(conn) = app.sockets.get_mut(id)
        {
            conn.wants_room = false;
            app.sockets.set_ready(id, ReadyFlags::Writable);
        }
    }

    /// A bridge is gone: the program is told how.
    pub(super) fn app_ended(&mut self, bridge: &Bridge, orderly: bool, cx: &mut Context<'_>) {
        Self::app_ended_in(&mut self.store(), bridge, orderly, cx);
    }

    /// As `app_ended`, of a bridge whose device has this store.
    pub(super) fn app_ended_in(
        store: &mut QueueStore<'_>,
        bridge: &Bridge,
        orderly: bool,
        cx: &mut Context<'_>,
    ) {
        if let BridgePeer::App(end) = &bridge.end
            && let Some(app) = cx.app.as_deref_mut()
        {
            app.sockets.drop_half(end.id, store);
            app.ended(end.id, orderly);
        }
    }

    /// Tells those who found no buffer, once there are some; else asks to be told of them.
    pub(super) fn tell_of_room(&mut self, cx: &mut Context<'_>) {
        if self.app.waiters.is_empty() {
            return;
        }
        let room = self.waiting.is_none()
            && self
                .rx
                .as_mut()
                .is_some_and(|rx| rx.live() && rx.queue.available() > 0);
        if !room {
            self.starve();
            return;
        }
        if let Some(app) = cx.app.as_deref_mut() {
            app.sockets.wake_waiters(&mut self.app.waiters);
        }
    }

    /// The program wants to be told of buffers. While a command waits it gets none, and those that are
    /// there are no ready_flags.
    pub(super) fn starve(&mut self) {
        self.starved |= self.waiting.is_none();
    }

    /// Whether the program waits to be told of buffers.
    pub(super) fn starves_program(&self) -> bool {
        self.datagrams.are_wanted() || !self.app.waiters.is_empty()
    }

    /// A send found no buffer.
    pub(super) fn wait_for_room(&mut self, id: StreamId, cx: &mut Context<'_>) {
        self.starve();
        if let Some(app) = cx.app.as_deref_mut() {
            app.sockets.wait_for_room(id, &mut self.app.waiters);
        }
    }

    /// Copies as much of `bytes` as there is room for into buffers of the guest.
    pub(crate) fn app_write(
        &mut self,
        id: StreamId,
        flow: FlowId,
        bytes: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<usize, SendFault> {
        if self.shard.has_transmit() {
            // What was said before goes first: a RESPONSE above all.
            self.transmit_control(cx);
        }
        let (mut sent, mut gathered, mut packets) = (0, 0, 0);
        let mut fault = None;
        while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
            let rx = self.rx.as_mut().filter(|_| self.waiting.is_none());
            let popped = rx.and_then(|rx| Some((rx.pop_if(HEADER_LEN + 1, true)?, rx)));
            let Some((chain, rx)) = popped else {
                self.wait_for_room(id, cx);
                fault = Some(SendFault::WouldBlock);
                break;
            };
            let room = (chain.writable_len() as usize - HEADER_LEN).min(MAX_PAYLOAD as usize);
            let max = rest.len().min(room) as u32;
            let header = match self.shard.send_now(flow, max, 0) {
                Ok(header) => header,
                Err(error) => {
                    rx.queue.unpop(chain);
                    if error == ReserveError::ShouldCoalesce {
                        match self.app_gather(flow, rest, cx) {
                            Ok(taken) => {
                                sent += taken;
                                gathered += taken;
                                continue;
                            }
                            Err(why) => fault = Some(why),
                        }
                    } else {
                        fault = Some(send_fault(error));
                    }
                    break;
                }
            };
            let payload = rest.get(..header.len as usize).unwrap_or(rest);
            rx.queue
                .memory()
                .write(chain.writable(), HEADER_LEN, payload);
            emit(rx, chain, &header, payload.len());
            sent += payload.len();
            packets += 1;
        }
        if let Some(app) = cx.app.as_deref_mut() {
            app.tally.sent += (sent - gathered) as u64;
            app.tally.copied_in += sent as u64;
            app.tally.packets_sent += packets;
        }
        match fault {
            Some(fault) if sent == 0 => Err(fault),
            _ => Ok(sent),
        }
    }

    /// Changes how a connection is; one that has ended needs nothing.
    pub(crate) fn app_tune(
        &mut self,
        flow: FlowId,
        act: impl FnOnce(&mut Shard, FlowId) -> Result<(), FlowError>,
    ) {
        let _ = act(&mut self.shard, flow);
    }

    /// A connection's credit.
    pub(crate) fn app_credit(&self, flow: FlowId) -> Option<CreditInfo> {
        let info = self.shard.flow(flow)?;
        Some(CreditInfo {
            buffer: info.buf_alloc,
            unsent: unsent(&info),
        })
    }

    /// Shuts one way down, or both.
    pub(crate) fn app_shutdown(&mut self, flow: FlowId, how: How, now: Instant) {
        // A flow that ended meanwhile needs no shutdown.
        let _ = self.shard.shutdown(now, flow, how);
    }

    /// The program gives a connection up: in good order, as a kernel closes a socket (what was
    /// sent still arrives, SHUTDOWN of both ways follows, bytes that were not read are dropped), or
    /// with a RST. One that the guest has not answered can only be reset.
    pub(crate) fn app_close(&mut self, flow: FlowId, reset: bool, cx: &mut Context<'_>) {
        if let Some(key) = self.key_of(flow) {
            self.remove_bridge(key, cx);
        }
        if reset || self.shard.shutdown(cx.now, flow, How::BOTH).is_err() {
            // A flow that ended meanwhile needs no reset.
            let _ = self.shard.reset(flow);
        }
    }

    /// Shows the guest what the program has queued or given back. True: there may be a timer to
    /// note, or something left to do.
    #[inline]
    pub(crate) fn app_flush(&mut self, cx: &mut Context<'_>) -> bool {
        let control = self.shard.has_transmit();
        if control {
            self.transmit_control(cx);
        }
        self.put_app_words(cx);
        if self.shard.has_events() {
            self.drain_events(cx);
        }
        for ring in [&mut self.rx, &mut self.tx].into_iter().flatten() {
            let told = ring.publish(cx.notifier);
            if let Some(app) = cx.app.as_deref_mut() {
                app.tally.notifications += u64::from(told);
            }
        }
        control || self.has_broken()
    }

    /// Resets a connection of which nobody reads so much that it has to be kept in copies.
    pub(crate) fn app_give_up(&mut self, id: StreamId, cx: &mut Context<'_>) {
        let Some(app) = cx.app.as_deref_mut() else {
            return;
        };
        let flow = app.sockets.get(id).and_then(|conn| conn.flow);
        app.sockets.mark_reset(id, &mut self.store());
        if let Some(key) = flow.and_then(|flow| self.key_of(flow)) {
            self.reset_bridge(key, cx);
        }
    }
}

/// What a refused reservation means for the sender.
pub(super) fn send_fault(error: ReserveError) -> SendFault {
    match error {
        ReserveError::NoCredit | ReserveError::ShouldCoalesce => SendFault::WouldBlock,
        ReserveError::NotConnected => SendFault::NotConnected,
        ReserveError::Shutdown | ReserveError::PeerShutdown => SendFault::ShutDown,
        ReserveError::TooLong => SendFault::TooLong,
        ReserveError::Stale | ReserveError::Empty | ReserveError::SocketType => SendFault::Reset,
    }
}
