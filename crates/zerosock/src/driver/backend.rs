//! The driver as the [`Backend`] of an endpoint's sockets: calls that act on connections and slots
//! without sleeping or queueing events.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use zerosock_proto::vsock::{ConnectError, How, ListenError, MoveError};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Port};
use zerosock_virtio::poller::Events;

use super::queue_pairs::{QueuePair, QueuePairId};
use super::{Driver, DriverError, SendError, StreamId, lending};
use crate::fault::Fault;
use crate::table::coalesced::unsent;
use crate::table::datagrams::DatagramBackend;
use crate::table::leases::Leases;
use crate::table::outgoing::Outgoing;
use crate::table::over::EndpointEnded;
use crate::table::sockets::{
    Copied, LeaseParts, MessageRead, NoLease, ReadyFlag, copy_shown, read_shown,
};
use crate::table::{
    backend::{Ahead, Backend, ConnInfo, CreditInfo, EndpointStats, ReadySource},
    transfers::{LoanParts, LoanedPart, Payload, RecvFault, SendFault, ShowBounds},
};

impl Driver {
    /// Declares whether the application trusts the peer not to write leased bytes.
    pub(crate) fn set_trusted(&mut self, trusted: bool) {
        self.trusted = trusted;
    }

    /// The result of a read that found nothing: `Ok` for end of stream, else the reason.
    #[cold]
    fn why_empty(&self, id: StreamId) -> Result<(), RecvFault> {
        let conn = self.sockets.get(id).ok_or(RecvFault::Unknown)?;
        conn.why_empty()
    }

    /// Copies arriving bytes of a connection that holds nothing to `out`.
    #[inline]
    fn read_arrivals(&mut self, id: StreamId, out: &mut [u8]) -> usize {
        let show = |bounds, copy: &mut dyn FnMut(Payload<'_>) -> bool| {
            self.show_arrivals(id, bounds, copy)
        };
        let bytes = copy_shown(out, show);
        self.sockets.count_read(bytes);
        bytes
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
        if self.watch.is_hang_up(events) {
            self.device_gone();
        }
    }

    fn next_ready(&mut self) -> Option<ReadySource> {
        let unreported = |listener: &&mut super::Listener| listener.unreported > 0;
        if let Some(listener) = self.listeners.iter_mut().find(unreported) {
            listener.unreported = 0;
            return Some(ReadySource::Port(listener.port));
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
        self.connect_for(from, to, socket_type)
    }

    fn listen(
        &mut self,
        port: Port,
        backlog: usize,
        socket_type: SocketType,
    ) -> Result<(), ListenError> {
        self.listen_for(port, backlog, socket_type)
    }

    fn unlisten(&mut self, port: Port) {
        Driver::unlisten(self, port);
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
        let mut listeners = self.listeners.iter_mut();
        if let Some(listener) = listeners.find(|listener| listener.port == port) {
            listener.buffer = Some(bytes);
        }
    }

    fn accept(&mut self, port: Port) -> Option<StreamId> {
        Driver::accept(self, port)
    }

    fn info(&self, id: StreamId) -> Option<ConnInfo> {
        let conn = self.sockets.get(id)?;
        Some(ConnInfo::new(conn, self.trusted))
    }

    fn ahead(&mut self, id: StreamId) -> Option<Ahead> {
        self.sockets.ahead(id, &self.store)
    }

    fn shutdown(&mut self, id: StreamId, how: How) {
        Driver::shutdown(self, id, how);
        // Wakes a writer that waits on another thread.
        self.sockets.set_ready(id, ReadyFlag::Writable);
    }

    fn close(&mut self, id: StreamId) {
        // Fails only if a slot cannot be posted, which the next turn reports.
        let _ = Driver::close(self, id);
    }

    fn abort(&mut self, id: StreamId) {
        Driver::abort(self, id);
    }

    #[inline]
    fn read(&mut self, id: StreamId, out: &mut [u8], peek: bool) -> Result<usize, RecvFault> {
        let mut done = 0;
        if !peek && !out.is_empty() {
            // Nothing, if the connection holds bytes; a packet that is longer than `out` is held.
            done = self.read_arrivals(id, out);
        }
        if done == 0 {
            done = self.sockets.read(id, out, peek, &mut self.store);
        }
        match done {
            0 if out.is_empty() && self.sockets.get(id).is_some() => Ok(0),
            0 => self.why_empty(id).map(|()| 0),
            done => Ok(done),
        }
    }

    fn skip(&mut self, id: StreamId, len: usize) -> usize {
        self.sockets.skip(id, len, &mut self.store)
    }

    fn queue_pair(&self, id: StreamId) -> u16 {
        Driver::queue_pair(self, id).unwrap_or(0)
    }

    fn move_to_pair(&mut self, id: StreamId, pair: u16) -> Result<(), MoveError> {
        Driver::move_to_pair(self, id, pair)
    }

    fn is_moving(&self, id: StreamId) -> bool {
        Driver::is_moving(self, id)
    }

    fn set_low_water(&mut self, id: StreamId, bytes: u32) {
        self.sockets.set_low_water(id, bytes);
        if let Some((queue_pair, flow)) = self.flow_of(id) {
            // Fails only for a flow that has ended; likewise in the calls below.
            let _ = self.store.queue_pairs[queue_pair]
                .shard
                .set_low_water(flow, bytes);
        }
    }

    fn set_buffer(&mut self, id: StreamId, bytes: u32) {
        if let Some((queue_pair, flow)) = self.flow_of(id) {
            let _ = self.store.queue_pairs[queue_pair]
                .shard
                .set_buf_alloc(flow, bytes);
        }
    }

    fn set_connect_timeout(&mut self, id: StreamId, timeout: Duration) {
        if let Some((queue_pair, flow)) = self.flow_of(id) {
            let now = self.now();
            let _ = self.store.queue_pairs[queue_pair]
                .shard
                .set_connect_timeout(now, flow, timeout);
        }
    }

    fn credit(&self, id: StreamId) -> Option<CreditInfo> {
        let (queue_pair, flow) = self.flow_of(id)?;
        let flow = self.store.queue_pairs[queue_pair].shard.flow(flow)?;
        Some(CreditInfo {
            buffer: flow.buf_alloc,
            unsent: unsent(&flow),
        })
    }

    fn request_credit_update(&mut self, id: StreamId) {
        if let Some((queue_pair, flow)) = self.flow_of(id) {
            let _ = self.store.queue_pairs[queue_pair]
                .shard
                .request_progress(flow);
        }
    }

    fn lease(&mut self, id: StreamId) -> Result<Option<LeaseParts>, RecvFault> {
        let mut parts = self.sockets.lease(id, &mut self.store);
        if matches!(parts, Err(NoLease::Empty)) {
            self.show_arrivals(id, ShowBounds::HOLD, &mut |_| false);
            parts = self.sockets.lease(id, &mut self.store);
        }
        match parts {
            Ok(parts) => Ok(Some(parts)),
            Err(NoLease::Empty) => self.why_empty(id).map(|()| None),
            Err(NoLease::TooMany) => Err(RecvFault::TooManyLeases),
        }
    }

    #[inline]
    fn consume_in_place(
        &mut self,
        id: StreamId,
        most: usize,
        look: &mut dyn FnMut(Payload<'_>) -> bool,
    ) -> Result<usize, RecvFault> {
        let stopped = std::cell::Cell::new(false);
        let mut look = |payload: Payload<'_>| {
            stopped.set(!look(payload));
            !stopped.get()
        };
        let mut seen = self
            .sockets
            .consume_in_place(id, most, &mut look, &mut self.store);
        if seen < most && !stopped.get() {
            let bounds = ShowBounds {
                packets: most - seen,
                bytes: usize::MAX,
            };
            let shown = self.show_arrivals(id, bounds, &mut look);
            self.sockets.count_shown(shown.bytes);
            seen += shown.packets as usize;
        }
        match seen {
            0 if most > 0 => self.why_empty(id).map(|()| 0),
            seen => Ok(seen),
        }
    }

    fn copy_of(&self, index: u32) -> Option<Copied> {
        self.sockets.copy_of(index)
    }

    fn handle_dropped(&mut self, index: u32) {
        if !self.sockets.end_lease(index, &mut self.store) && !self.end_datagram_loan(index) {
            self.end_lent(index);
        }
    }

    #[inline]
    fn write(&mut self, id: StreamId, bytes: &[u8]) -> Result<usize, SendFault> {
        self.send(id, bytes).map_err(lending::fault)
    }

    fn set_coalesces(&mut self, id: StreamId, coalesces: bool) {
        Driver::set_coalesces(self, id, coalesces);
    }

    fn flush_coalesced(&mut self, id: StreamId) {
        if let Some((queue_pair, flow)) = self.flow_of(id) {
            self.store.queue_pairs[queue_pair]
                .shard
                .flush_coalesced(flow);
        }
    }

    fn can_coalesce_more(&mut self, id: StreamId) -> Option<bool> {
        let (queue_pair, flow) = self.flow_of(id)?;
        self.store.queue_pairs[queue_pair]
            .shard
            .can_coalesce_more(flow)
    }

    fn loan(&mut self, id: StreamId, max: usize) -> Result<LoanParts, SendFault> {
        self.lend(id, max)
    }

    fn send_loan(
        &mut self,
        index: u32,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<usize, SendFault> {
        self.send_lent(index, len, private)
    }

    fn read_message(
        &mut self,
        id: StreamId,
        out: &mut [u8],
        peek: bool,
    ) -> Result<Option<MessageRead>, RecvFault> {
        if !peek {
            // Nothing, if the connection holds bytes.
            let show = |bounds, copy: &mut dyn FnMut(Payload<'_>) -> bool| {
                self.show_arrivals(id, bounds, copy)
            };
            if let Some(message) = read_shown(out, show) {
                self.sockets.count_read_message(&message);
                return Ok(Some(message));
            }
        }
        let message = self.sockets.read_message(id, out, peek, &mut self.store);
        match message {
            Some(message) => Ok(Some(message)),
            None => self.why_empty(id).map(|()| None),
        }
    }

    fn lease_message(
        &mut self,
        id: StreamId,
    ) -> Result<Option<(Vec<LeaseParts>, bool)>, RecvFault> {
        match self.sockets.lease_message(id, &mut self.store) {
            Ok(message) => Ok(Some(message)),
            Err(NoLease::Empty) => self.why_empty(id).map(|()| None),
            Err(NoLease::TooMany) => Err(RecvFault::TooManyLeases),
        }
    }

    fn send_message(
        &mut self,
        id: StreamId,
        slices: &[IoSlice<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault> {
        self.put_message(id, slices, ends_record)
            .map_err(lending::fault)
    }

    fn loan_message(&mut self, id: StreamId, len: usize) -> Result<Vec<LoanParts>, SendFault> {
        self.lend_message(id, len)
    }

    fn send_message_loan(
        &mut self,
        id: StreamId,
        parts: &[LoanedPart<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault> {
        self.send_lent_message(id, parts, ends_record)
    }

    fn is_sending(&self, id: StreamId) -> bool {
        let Some((queue_pair, flow)) = self.flow_of(id) else {
            return false;
        };
        let kept = |kept: &Outgoing| kept.room.flow() == flow;
        self.store.queue_pairs[queue_pair].outgoing.iter().any(kept)
    }

    fn may_send_message(&mut self, id: StreamId) -> bool {
        match self.sendable(id) {
            Ok((queue_pair, flow)) => {
                if !self.store.queue_pairs[queue_pair].tx.has_data_slot() {
                    // The next turn reports a broken ring.
                    let _ = self.store.queue_pairs[queue_pair].tx.reap();
                    if !self.store.queue_pairs[queue_pair].tx.has_data_slot() {
                        self.wait_for_slot(id);
                        return false;
                    }
                }
                self.store.queue_pairs[queue_pair]
                    .shard
                    .can_reserve_message(flow)
            }
            Err(SendError::NotConnected) => false,
            Err(_) => true,
        }
    }

    fn is_acceptable(&self, port: Port) -> bool {
        self.listeners
            .iter()
            .any(|listener| listener.port == port && !listener.waiting.is_empty())
    }

    fn stats(&self) -> EndpointStats {
        let counted = self.sockets.counted();
        EndpointStats {
            received: counted.received,
            received_in_place: counted.in_place(),
            copied_aside: counted.copied_aside,
            copied_out: counted.copied_out,
            sent: self.stats.tx_bytes,
            sent_in_place: self.loans.sent_in_place,
            copied_in: self.loans.copied_in,
            packets_received: self.stats.rx_packets,
            packets_sent: self.stats.tx_packets,
            notifications: self.stats.kicks,
            sleeps: 0,
        }
    }

    fn datagrams(&mut self) -> Option<&mut dyn DatagramBackend> {
        Some(self)
    }
}
