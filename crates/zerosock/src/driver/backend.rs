//! The driver as the [`Backend`] of an endpoint's sockets: calls that act on connections and slots
//! without sleeping or queueing events.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use zerosock_proto::vsock::datagram::DatagramId;
use zerosock_proto::vsock::{ConnectError, Directions, FlowId, ListenError, Shard};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Port};
use zerosock_ring::GuestSlice;
use zerosock_virtio::poller::Events;

use super::half::DriverHalf;
use super::queue_pairs::{QueuePair, QueuePairId, RxSlot};
use super::store::Buffers;
use super::{Driver, DriverError, StreamId, StreamState};
use crate::fault::Fault;
use crate::table::calls::TableAccess;
use crate::table::datagrams::DatagramBackend;
use crate::table::inboxes::Inboxes;
use crate::table::leases::Leases;
use crate::table::loan_calls::LoanCalls;
use crate::table::loans::LoanOf;
use crate::table::outgoing::Outgoing;
use crate::table::over::EndpointEnded;
use crate::table::send_calls::{SendCalls, WholePacket};
use crate::table::sending::SendAccess;
use crate::table::sockets::{Copied, LeaseParts, NoLease, Shown, Sockets};
use crate::table::{
    backend::{Backend, EndpointStats, ReadySource},
    transfers::{Payload, Publish, ShowBounds},
};

impl Driver {
    /// Declares whether the application trusts the peer not to write leased bytes.
    pub(crate) fn set_trusted(&mut self, trusted: bool) {
        self.trusted = trusted;
    }
}

impl TableAccess for Driver {
    type Token = RxSlot;
    type Store<'a> = Buffers;
    type AllStores<'a> = Buffers;

    #[inline]
    fn sockets(&self) -> Option<&Sockets<RxSlot>> {
        Some(&self.sockets)
    }

    #[inline]
    fn sockets_mut(&mut self) -> Option<&mut Sockets<RxSlot>> {
        Some(&mut self.sockets)
    }

    fn trusts_pool(&self, _: u32) -> bool {
        self.trusted
    }

    #[inline]
    fn with_received(
        &mut self,
        _: StreamId,
        act: impl FnOnce(&mut Sockets<RxSlot>, &mut Buffers) -> bool,
    ) {
        act(&mut self.sockets, &mut self.store);
    }

    #[inline]
    fn show_arrivals(
        &mut self,
        id: StreamId,
        bounds: ShowBounds,
        look: &mut impl FnMut(Payload<'_>) -> bool,
    ) -> Shown {
        self.take_arrivals(id, bounds, look)
    }

    #[inline]
    fn lease_next(&mut self, id: StreamId) -> Result<LeaseParts, NoLease> {
        match self.take_arrival(id) {
            Some(held) => self.sockets.lease_arrived(id, held, &mut self.store),
            None => self.sockets.lease(id, &mut self.store),
        }
    }

    fn flow(&self, id: StreamId) -> Option<(&Shard, FlowId)> {
        let (queue_pair, flow) = self.flow_of(id)?;
        Some((&self.store.queue_pairs[queue_pair].shard, flow))
    }

    fn with_flow<T>(
        &mut self,
        id: StreamId,
        act: impl FnOnce(&mut Shard, FlowId) -> T,
    ) -> Option<T> {
        let (queue_pair, flow) = self.flow_of(id)?;
        Some(act(&mut self.store.queue_pairs[queue_pair].shard, flow))
    }

    #[inline]
    fn inboxes(&self) -> Option<&Inboxes> {
        Some(&self.datagrams.inboxes)
    }

    #[inline]
    fn with_inboxes<T>(
        &mut self,
        act: impl FnOnce(&mut Inboxes, &mut Sockets<RxSlot>, &mut Buffers) -> T,
    ) -> Option<T> {
        let inboxes = &mut self.datagrams.inboxes;
        Some(act(inboxes, &mut self.sockets, &mut self.store))
    }

    fn show_datagram(&mut self, id: DatagramId, look: &mut dyn FnMut(Address, Payload<'_>, bool)) {
        self.take_datagram_for(id, look);
    }

    fn take_in_datagrams(&mut self, id: DatagramId) {
        self.fill_inbox(id);
    }
}

impl SendAccess for Driver {
    type Half<'a> = DriverHalf<'a>;

    #[inline]
    fn half_of_pool(&self, pool: u32) -> Option<u32> {
        Some(pool)
    }

    #[inline]
    fn with_half<T>(&mut self, half: u32, act: impl FnOnce(&mut Self::Half<'_>) -> T) -> Option<T> {
        Some(act(&mut self.half(QueuePairId::of_pool(half))))
    }

    #[inline(always)] // every packet
    fn send_packet(
        &mut self,
        half: u32,
        publish: Publish,
        packet: WholePacket,
        fill: impl FnOnce(GuestSlice<'_>),
    ) -> bool {
        let queue_pair = QueuePairId::of_pool(half);
        let sent = self.half(queue_pair).send_whole(packet, fill);
        if sent && publish == Publish::Now {
            self.publish(queue_pair);
        }
        sent
    }

    fn outgoing(&self, half: u32) -> Option<&VecDeque<Outgoing>> {
        Some(&self.store.queue_pairs[QueuePairId::of_pool(half)].outgoing)
    }

    #[inline]
    fn loan_at(&self, index: u32) -> Option<(LoanOf, u32)> {
        let loan = self.loans.get(index)?;
        Some((loan.of, loan.half))
    }

    fn drop_loan(&mut self, index: u32) {
        if let Some((_, half)) = self.loan_at(index) {
            self.half(QueuePairId::of_pool(half)).drop_loan(index);
        }
    }

    fn flush_sent(&mut self) {
        Driver::flush(self);
    }
}

impl Backend for Driver {
    fn lease_table(&self) -> Arc<Leases> {
        self.sockets.lease_table().clone()
    }

    #[inline]
    fn pending(&mut self) -> bool {
        self.has_arrivals()
    }

    fn drive(&mut self) -> Result<bool, EndpointEnded> {
        let over = |error: DriverError| EndpointEnded::new(error.fault(), error);
        let busy = Driver::drive(self).map_err(over)?;
        if self.is_attached() {
            Ok(busy)
        } else {
            // Received bytes remain readable; no more will arrive.
            Err(EndpointEnded::new(Fault::Peer, "the device has hung up"))
        }
    }

    fn flush(&mut self) {
        Driver::flush(self);
    }

    #[inline]
    fn flush_after_read(&mut self) {
        let enough = (self.config.slots() / 8).max(1);
        let is_due = |queue_pair: &QueuePair| {
            queue_pair.rx.unpublished() >= enough
                || queue_pair.shard.has_transmit()
                || queue_pair.blocked
        };
        if self.store.queue_pairs.iter().any(is_due) || self.datagrams.inboxes.table.has_control() {
            Driver::flush(self);
        }
    }

    fn arm(&mut self) -> bool {
        // The next turn reports the hang-up.
        Driver::arm(self) || !self.is_attached()
    }

    fn is_stale(&self) -> bool {
        // A loan that was dropped, for instance, gives a waiting writer room.
        self.has_core_events()
    }

    fn disarm(&mut self) {
        self.disable_notifications();
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }

    fn handle_events(&mut self, events: &Events) {
        if self.watch.has_device_event(events) && self.doorbell.has_hung_up() {
            self.device_gone();
        }
    }

    fn next_ready(&mut self) -> Option<ReadySource> {
        if let Some(port) = self.listeners.next_port() {
            return Some(ReadySource::Port(port));
        }
        if let Some(stream) = self.sockets.next_ready() {
            return Some(ReadySource::Conn(stream));
        }
        self.datagrams
            .inboxes
            .next_ready()
            .map(ReadySource::Datagram)
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.next_due().map(|at| self.wall(at))
    }

    fn connect(
        &mut self,
        from: Port,
        to: Address,
        socket_type: SocketType,
    ) -> Result<StreamId, ConnectError> {
        if self.link.is_none() {
            return Err(ConnectError::Unreachable);
        }
        let now = self.now();
        let (queue_pair, port) = self.store.queue_pairs.place(self.cid, from, to)?;
        let local = Address::new(self.cid, port);
        let pair = &mut self.store.queue_pairs[queue_pair];
        let flow = pair.shard.connect(now, local, to, socket_type)?;
        if pair.flows.reserve(flow).is_err() || self.sockets.reserve().is_err() {
            let _ = pair.shard.reset(flow);
            return Err(ConnectError::TooManyConnections);
        }
        let local = pair.shard.flow(flow).map_or(local, |info| info.local);
        let (pool, state) = (queue_pair.pool(), StreamState::Connecting);
        let id = self
            .sockets
            .insert(pool, flow, state, local, to, socket_type);
        pair.flows.insert(flow, id);
        Ok(id)
    }

    fn listen(
        &mut self,
        port: Port,
        backlog: usize,
        socket_type: SocketType,
    ) -> Result<(), ListenError> {
        self.store.queue_pairs[QueuePairId::FIRST]
            .shard
            .listen(port, backlog)?;
        self.listeners.add(port, backlog, socket_type);
        Ok(())
    }

    fn unlisten(&mut self, port: Port) {
        // An error means that the port is not listening.
        let _ = self.store.queue_pairs[QueuePairId::FIRST]
            .shard
            .unlisten(port);
        for id in self.listeners.remove(port) {
            self.abort(id);
        }
    }

    fn bind(&mut self, port: Port) -> Result<Port, ListenError> {
        self.store.queue_pairs[QueuePairId::FIRST].shard.bind(port)
    }

    fn unbind(&mut self, port: Port) {
        self.store.queue_pairs[QueuePairId::FIRST]
            .shard
            .unbind(port);
    }

    fn set_accept_buffer(&mut self, port: Port, bytes: u32) {
        self.listeners.set_buffer(port, bytes);
    }

    fn accept(&mut self, port: Port) -> Option<StreamId> {
        self.listeners.accept(port)
    }

    fn shutdown(&mut self, id: StreamId, how: Directions) {
        let now = self.now();
        if how.receive {
            self.sockets.shutdown_recv(id, &mut self.store);
        }
        let Some(conn) = self.sockets.get_mut(id) else {
            return;
        };
        conn.send_shutdown |= how.send;
        // Fails only for a flow that has ended.
        self.with_flow(id, |shard, flow| shard.shutdown(now, flow, how));
        // Wakes a writer that waits on another thread.
        self.sockets.set_ready(id);
    }

    fn close(&mut self, id: StreamId) {
        let now = self.now();
        if let Some((queue_pair, flow)) = self.remove_flow(id) {
            let shard = &mut self.store.queue_pairs[queue_pair].shard;
            if shard.shutdown(now, flow, Directions::BOTH).is_err() {
                // Fails only for a flow that has ended.
                let _ = shard.reset(flow);
            }
        }
        self.sockets.remove(id, &mut self.store);
    }

    fn abort(&mut self, id: StreamId) {
        if let Some((queue_pair, flow)) = self.remove_flow(id) {
            // Fails only for a flow that has ended.
            let _ = self.store.queue_pairs[queue_pair].shard.reset(flow);
        }
        self.sockets.remove(id, &mut self.store);
    }

    fn queue_pair(&self, id: StreamId) -> u16 {
        let conn = self.sockets.get(id);
        conn.map_or(0, |conn| QueuePairId::of_pool(conn.pool).pair())
    }

    fn set_connect_timeout(&mut self, id: StreamId, timeout: Duration) {
        let now = self.now();
        self.with_flow(id, |shard, flow| {
            shard.set_connect_timeout(now, flow, timeout)
        });
    }

    fn copy_of(&self, index: u32) -> Option<Copied> {
        self.sockets.copy_of(index)
    }

    fn handle_dropped(&mut self, index: u32) {
        if !self.sockets.end_lease(index, &mut self.store) {
            self.drop_loan(index);
        }
    }

    fn is_acceptable(&self, port: Port) -> bool {
        self.listeners.has_waiting(port)
    }

    fn stats(&self) -> EndpointStats {
        EndpointStats::new(&self.tally, self.sockets.counted())
    }

    fn datagrams(&mut self) -> Option<&mut dyn DatagramBackend> {
        Some(self)
    }
}
