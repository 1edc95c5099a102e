//! Commands of the caller: connect, listen, accept, shut down, send, consume.

use core::hash::BuildHasher;

use super::{
    CommitError, ConnectError, ConsumeError, FlowError, ListenError, ReserveError, SendError, Shard,
};
use crate::addr::{Address, Cid, Port};
use crate::time::{Duration, Instant};
use crate::vsock::config::Role;
use crate::vsock::connection::{Connection, Key, Queued, Reservation};
use crate::vsock::flow_id::FlowId;
use crate::vsock::ports::PortRef;
use crate::vsock::state::{Action, Directions, Input, State, transition};
use crate::wire::vsock::{Op, Repr, SEQ_EOM, SEQ_EOR, SocketType};

impl<S: BuildHasher> Shard<S> {
    /// Requests a connection to `peer`. [`Event::Connected`] or [`Event::Refused`] reports the
    /// result.
    ///
    /// `local`: [`Cid::ANY`] stands for our own CID, [`Port::ANY`] for an unused port.
    ///
    /// # Errors
    /// See [`ConnectError`]; nothing was sent.
    ///
    /// [`Event::Connected`]: crate::vsock::Event::Connected
    /// [`Event::Refused`]: crate::vsock::Event::Refused
    pub fn connect(
        &mut self,
        now: Instant,
        local: Address,
        peer: Address,
        socket_type: SocketType,
    ) -> Result<FlowId, ConnectError> {
        let cid = if local.cid == Cid::ANY {
            self.own_cid()
        } else {
            local.cid
        };
        if !self.is_local(cid) {
            return Err(ConnectError::LocalCid);
        }
        let reachable = match self.config.role {
            Role::Device { peer: guest } => peer.cid == guest,
            Role::Driver { .. } => peer.cid != Cid::ANY,
        };
        if !reachable || peer.port == Port::ANY {
            return Err(ConnectError::Unreachable);
        }
        match socket_type {
            SocketType::Stream => {}
            SocketType::SeqPacket if self.seqpacket => {}
            SocketType::SeqPacket | SocketType::Datagram => return Err(ConnectError::SocketType),
        }
        if !self.can_open() {
            return Err(ConnectError::TooManyConnections);
        }
        let (key, port_ref) = self.take_port(Address::new(cid, local.port), peer)?;

        let (next, action) = transition(State::Closed, Input::Connect);
        let mut connection = self.new_connection(key, socket_type, next);
        connection.port_ref = Some(port_ref);
        self.held_ports += 1;
        connection.known_to_caller = true;
        let index = self.add_connection(connection);
        self.apply_action(now, index, next, action);
        Ok(self.table.id(index))
    }

    /// Acquires a local port such that no connection has the two addresses.
    fn take_port(&mut self, local: Address, peer: Address) -> Result<(Key, PortRef), ConnectError> {
        if local.port != Port::ANY {
            let key = Key { local, peer };
            if !self.vacate(&key) {
                return Err(ConnectError::InUse);
            }
            let port_ref = self.ports.acquire(local).ok_or(ConnectError::InUse)?;
            return Ok((key, port_ref));
        }
        // A guest may have chosen ephemeral ports of ours for its connections, but no more of them
        // than there are connections.
        for _ in 0..=self.config.max_connections {
            let allocated = self.ports.allocate(local.cid);
            let (address, port_ref) = allocated.ok_or(ConnectError::InUse)?;
            let key = Key {
                local: address,
                peer,
            };
            if self.vacate(&key) {
                return Ok((key, port_ref));
            }
            self.ports.release(address, port_ref);
        }
        Err(ConnectError::InUse)
    }

    /// Frees a pair of addresses. False: a live connection has them. A closed connection that has a
    /// queued RST is removed from the map: its RST is queued first and will be sent first.
    fn vacate(&mut self, key: &Key) -> bool {
        let Some(index) = self.table.find(key) else {
            return true;
        };
        let live = self
            .table
            .at(index)
            .is_some_and(|c| c.state != State::Closed);
        if !live {
            self.table.detach(index);
        }
        !live
    }

    /// Our own CID, which listeners are bound to.
    fn own_cid(&self) -> Cid {
        match self.config.role {
            Role::Device { .. } => Cid::HOST,
            Role::Driver { local } => local,
        }
    }

    /// An unused local port, for a connection that is assigned to a shard by its port;
    /// [`Port::ANY`]: none is left. A connection that the peer requested may still have these
    /// addresses: see [`is_connected`](Self::is_connected).
    pub fn spare_port(&self) -> Port {
        let Some((address, port_ref)) = self.ports.allocate(self.own_cid()) else {
            return Port::ANY;
        };
        self.ports.release(address, port_ref);
        address.port
    }

    /// Whether a live connection here has these addresses, so that [`connect`](Self::connect) would
    /// fail. Wildcards are not resolved: [`Cid::ANY`] matches no connection.
    ///
    /// [`Cid::ANY`]: crate::Cid::ANY
    pub fn is_connected(&self, local: Address, peer: Address) -> bool {
        self.find(local, peer).is_some()
    }

    /// The connection between these addresses, as for [`is_connected`](Self::is_connected).
    pub fn find(&self, local: Address, peer: Address) -> Option<FlowId> {
        let index = self.table.look_up(&Key { local, peer })?;
        let flow = self.table.id(index);
        self.table.get(flow).map(|_| flow)
    }

    /// Listens on `port` of our own CID: REQUESTs to it become
    /// [`Event::Incoming`](crate::vsock::Event::Incoming), in every shard that shares the port
    /// table. At most `backlog + 1` of them may be undecided, as on Linux.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn listen(&mut self, port: Port, backlog: usize) -> Result<(), ListenError> {
        if port == Port::ANY {
            return Err(ListenError::AnyPort);
        }
        let address = Address::new(self.own_cid(), port);
        if self.ports.listen(address, backlog) {
            Ok(())
        } else {
            Err(ListenError::InUse)
        }
    }

    /// Stops listening. Undecided connections stay; reject them.
    ///
    /// # Errors
    /// [`ListenError::NotListening`].
    pub fn unlisten(&mut self, port: Port) -> Result<(), ListenError> {
        let address = Address::new(self.own_cid(), port);
        if self.ports.unlisten(address) {
            Ok(())
        } else {
            Err(ListenError::NotListening)
        }
    }

    /// Binds `port` of our own CID, or an unused port for [`Port::ANY`], and returns it: no other
    /// socket can listen on it or bind it. REQUESTs to it are reset.
    ///
    /// # Errors
    /// [`ListenError::InUse`].
    pub fn bind(&mut self, port: Port) -> Result<Port, ListenError> {
        let address = Address::new(self.own_cid(), port);
        self.ports.bind(address).ok_or(ListenError::InUse)
    }

    /// Releases a bound port. Connections from it keep it until they end.
    pub fn unbind(&mut self, port: Port) {
        self.ports.unbind(Address::new(self.own_cid(), port));
    }

    /// Runs a command through the state table.
    fn command(&mut self, now: Instant, flow: FlowId, input: Input) -> Result<(), FlowError> {
        let connection = self.table.get(flow).ok_or(FlowError::Stale)?;
        let (next, action) = transition(connection.state, input);
        if action == Action::WrongState {
            return Err(FlowError::WrongState);
        }
        self.apply_action(now, flow.index, next, action);
        Ok(())
    }

    /// Accepts a connection after [`Event::Incoming`](crate::vsock::Event::Incoming). It can be
    /// used at once; data is sent behind the RESPONSE.
    ///
    /// # Errors
    /// See [`FlowError`].
    pub fn accept(&mut self, now: Instant, flow: FlowId) -> Result<(), FlowError> {
        self.command(now, flow, Input::Accept)
    }

    /// Rejects a connection after [`Event::Incoming`](crate::vsock::Event::Incoming): sends RST;
    /// the id is invalid.
    ///
    /// # Errors
    /// See [`FlowError`].
    pub fn reject(&mut self, flow: FlowId) -> Result<(), FlowError> {
        self.command(Instant::ZERO, flow, Input::Reject)
    }

    /// Shuts down one direction or both. SHUTDOWN is sent behind all data committed and queued so
    /// far; reservations not yet committed are lost. Shutting down both directions closes the
    /// connection: after [`close_timeout`](crate::vsock::ShardConfig::close_timeout) without
    /// progress RST is sent.
    ///
    /// # Errors
    /// See [`FlowError`].
    pub fn shutdown(
        &mut self,
        now: Instant,
        flow: FlowId,
        how: Directions,
    ) -> Result<(), FlowError> {
        self.command(now, flow, Input::Close(how))
    }

    /// Ends a connection at once: sends RST (unless its REQUEST is still queued), drops queued
    /// sends; the id is invalid.
    ///
    /// # Errors
    /// [`FlowError::Stale`].
    pub fn reset(&mut self, flow: FlowId) -> Result<(), FlowError> {
        self.command(Instant::ZERO, flow, Input::Reset)
    }

    /// Reports received bytes that the caller has no more use for. The peer gets a credit update
    /// when half of the buffer is free without its knowledge, or when it requested one. The
    /// connection ends with the last unread byte if the peer has shut down both directions.
    ///
    /// Only the sum counts: one call may report the bytes of many packets.
    ///
    /// # Errors
    /// See [`ConsumeError`].
    #[inline(always)]
    pub fn consume(&mut self, flow: FlowId, bytes: u32) -> Result<(), ConsumeError> {
        // While the peer has shut down no direction, consuming the last unread byte has no effect
        // on the state; and an update that is queued need not be queued again.
        if self.uses_fast_path()
            && let Some(connection) = self.table.get_mut(flow)
            && matches!(connection.state, State::Established { peer, .. } if peer.is_none())
            && let Some(update_due) = connection.rx.consume(bytes, connection.tx.peer_buf_alloc())
        {
            if update_due && !connection.control.credit_update {
                connection.control.credit_update = true;
                self.update_lists(flow.index);
            }
            return Ok(());
        }
        self.consume_slow(flow, bytes)
    }

    /// Whether the peer would learn nothing now of the consumption of all bytes that an open connection
    /// has received: then it may be reported later, with the bytes that arrive next.
    #[inline]
    pub fn may_consume_later(&self, flow: FlowId) -> bool {
        self.table.get(flow).is_some_and(|connection| {
            matches!(connection.state, State::Established { peer, .. } if peer.is_none())
                && !connection.rx.would_update(connection.tx.peer_buf_alloc())
        })
    }

    /// As [`Shard::consume`], for any state.
    #[cold]
    #[inline(never)]
    fn consume_slow(&mut self, flow: FlowId, bytes: u32) -> Result<(), ConsumeError> {
        let connection = self.table.get_mut(flow).ok_or(ConsumeError::Stale)?;
        let peer_buffer = connection.tx.peer_buf_alloc();
        let update_due = connection.rx.consume(bytes, peer_buffer);
        let update_due = update_due.ok_or(ConsumeError::TooMany)?;
        let drained = connection.rx.unread() == 0;
        let established = matches!(connection.state, State::Established { peer, .. } if !peer.send);
        // A peer that has shut down sending needs no credit.
        if update_due && established {
            connection.control.credit_update = true;
            self.update_lists(flow.index);
        }
        if drained {
            // Never `WrongState`: `Drained` is no command.
            let _ = self.command(Instant::ZERO, flow, Input::Drained);
        }
        Ok(())
    }

    /// Changes a connection's receive buffer and informs the peer. Bytes within the credit given
    /// before may still arrive.
    ///
    /// As in Linux, it also bounds the bytes in flight towards the peer, as
    /// [`ShardConfig::send_limit`](crate::vsock::ShardConfig::send_limit) does.
    ///
    /// # Errors
    /// [`FlowError::Stale`].
    pub fn set_buf_alloc(&mut self, flow: FlowId, buf_alloc: u32) -> Result<(), FlowError> {
        let limit = self.config.send_limit.unwrap_or(u32::MAX);
        let connection = self.table.get_mut(flow).ok_or(FlowError::Stale)?;
        if connection.rx.buf_alloc() == buf_alloc {
            return Ok(());
        }
        connection.rx.set_buf_alloc(buf_alloc);
        connection.tx.set_limit(buf_alloc.min(limit));
        connection.control.credit_update |= connection.peer_may_send();
        self.credit_changed(flow.index);
        Ok(())
    }

    /// Sets the low-water mark (SO_RCVLOWAT): the reader takes nothing before `bytes` bytes have
    /// arrived. Credit updates are sent early enough for that many bytes to arrive. Call it again
    /// after a change of the buffer.
    ///
    /// # Errors
    /// [`FlowError::Stale`].
    pub fn set_low_water(&mut self, flow: FlowId, bytes: u32) -> Result<(), FlowError> {
        let connection = self.table.get_mut(flow).ok_or(FlowError::Stale)?;
        if connection.rx.set_low_water(bytes) && connection.peer_may_send() {
            connection.control.credit_update = true;
            self.update_lists(flow.index);
        }
        Ok(())
    }

    /// Sets the connect timeout of a connection, counted from `now`. No effect once it is answered.
    ///
    /// # Errors
    /// [`FlowError::Stale`].
    pub fn set_connect_timeout(
        &mut self,
        now: Instant,
        flow: FlowId,
        timeout: Duration,
    ) -> Result<(), FlowError> {
        let connection = self.table.get_mut(flow).ok_or(FlowError::Stale)?;
        if connection.state == State::Connecting {
            connection.deadline = Some(now + timeout);
            self.rearm(flow.index);
        }
        Ok(())
    }

    /// Requests from the peer how much it has consumed, unless it is known to have consumed
    /// everything. The answer shows in [`Shard::flow`].
    ///
    /// # Errors
    /// [`FlowError::Stale`].
    pub fn request_progress(&mut self, flow: FlowId) -> Result<(), FlowError> {
        let connection = self.table.get_mut(flow).ok_or(FlowError::Stale)?;
        let consumed = connection.tx.peer_fwd_cnt();
        // A peer that has a pending request and nothing to report will answer later.
        let awaited = connection.progress_pending && connection.progress_base == consumed;
        if connection.tx.in_flight() > 0
            && !awaited
            && matches!(connection.state, State::Established { .. })
        {
            connection.progress_pending = true;
            connection.progress_base = consumed;
            connection.control.credit_request = true;
            self.update_lists(flow.index);
        }
        Ok(())
    }

    /// Reserves credit for one packet of up to `max` bytes, before its length is known. Several
    /// reservations may be outstanding; their packets are sent in the order of the commits, and
    /// before sends queued later.
    ///
    /// # Errors
    /// See [`ReserveError`]; after `NoCredit`
    /// [`Event::Writable`](crate::vsock::Event::Writable) follows.
    #[inline(always)]
    pub fn reserve(&mut self, flow: FlowId, max: u32) -> Result<Reservation, ReserveError> {
        if let Some(connection) = self.table.get_mut(flow)
            && connection.may_send()
            // No packet may overtake the RESPONSE or a queued send.
            && !connection.control.response
            && !connection.has_queued
        {
            let len = connection.tx.reserve(max);
            if len > 0 {
                return Ok(Reservation { flow, len });
            }
        }
        Err(self.reserve_error(flow, max))
    }

    /// Why nothing can be reserved. For lack of credit, the caller becomes a waiter.
    #[cold]
    #[inline(never)]
    fn reserve_error(&mut self, flow: FlowId, max: u32) -> ReserveError {
        let Some(connection) = self.table.get_mut(flow) else {
            return ReserveError::Stale;
        };
        match sendable(connection) {
            Ok(()) if max == 0 => return ReserveError::Empty,
            Ok(()) => {}
            Err(Unsendable::NotConnected) => return ReserveError::NotConnected,
            Err(Unsendable::Shutdown) => return ReserveError::Shutdown,
            Err(Unsendable::PeerShutdown) => return ReserveError::PeerShutdown,
        }
        connection.wants_credit = true;
        if let Some(messages) = &mut connection.messages {
            messages.tx.wanted = 1;
            // The waiter may need less than before: a queued send may have become sendable.
            self.update_lists(flow.index);
        }
        self.request_credit(flow.index);
        ReserveError::NoCredit
    }

    /// Turns a reservation into a packet of `len` bytes; the payload is already in the packet's
    /// buffer. Returns the header to write in front of it, now, before any other header of this
    /// shard is put into the queue. Unused credit is released.
    ///
    /// # Errors
    /// See [`CommitError`]; the reservation is gone in any case.
    #[inline(always)]
    pub fn commit(
        &mut self,
        reservation: Reservation,
        len: u32,
        flags: u32,
    ) -> Result<Repr, CommitError> {
        let Reservation {
            flow,
            len: reserved,
        } = reservation;
        if self.uses_fast_path()
            && let Some(connection) = self.table.get_mut(flow)
            && connection.may_send()
            && (1..=reserved).contains(&len)
            // No waiter needs the released credit, and no credit update is queued that this header
            // replaces.
            && connection.has_no_waiter()
            && !connection.control.credit_update
        {
            connection.tx.commit(reserved, len);
            let flags = connection.message_flags(flags);
            self.stats.sent_bytes += u64::from(len);
            return Ok(connection.header(Op::Rw, len, flags));
        }
        self.commit_slow(flow, reserved, len)?;
        self.payload_header(flow, len, flags)
            .ok_or(CommitError::Stale)
    }

    /// The header of a packet that a `*_slow` function has counted. The caller builds it because a
    /// header that lies in memory on one of two paths would have to on both.
    #[inline(always)]
    fn payload_header(&mut self, flow: FlowId, len: u32, flags: u32) -> Option<Repr> {
        let connection = self.table.get_mut(flow)?;
        let flags = connection.message_flags(flags);
        Some(connection.header(Op::Rw, len, flags))
    }

    /// As [`Shard::commit`], with all error cases, without building the header.
    #[cold]
    #[inline(never)]
    fn commit_slow(&mut self, flow: FlowId, reserved: u32, len: u32) -> Result<(), CommitError> {
        let connection = self.table.get_mut(flow).ok_or(CommitError::Stale)?;
        let fault = match sendable(connection) {
            Ok(()) if len == 0 => Some(CommitError::Empty),
            Ok(()) if len > reserved => Some(CommitError::TooMany),
            Ok(()) => None,
            Err(Unsendable::NotConnected) => Some(CommitError::Stale),
            Err(Unsendable::Shutdown) => Some(CommitError::Shutdown),
            Err(Unsendable::PeerShutdown) => Some(CommitError::PeerShutdown),
        };
        let result = match fault {
            Some(fault) => {
                connection.tx.cancel(reserved);
                Err(fault)
            }
            None => {
                connection.tx.commit(reserved, len);
                self.stats.sent_bytes += u64::from(len);
                // The header carries our credit: no update is needed.
                connection.control.credit_update = false;
                Ok(())
            }
        };
        self.credit_changed(flow.index);
        result
    }

    /// [`Shard::reserve`] and [`Shard::commit`] in one step, for payload that is already there.
    /// Returns the header of a packet with as many of the `len` bytes as there is credit for, to
    /// write in front of them before any other header of this shard. The header's `len` says how
    /// many; send the others later. `flags` belong to the last byte: only a header of all `len`
    /// bytes carries them.
    ///
    /// # Errors
    /// See [`ReserveError`]; after `NoCredit` [`Event::Writable`](crate::vsock::Event::Writable)
    /// follows. After `ShouldCoalesce`, [`coalesce`](Shard::coalesce) the bytes, or send them with
    /// `reserve` and `commit`.
    #[inline(always)]
    pub fn send_now(&mut self, flow: FlowId, len: u32, flags: u32) -> Result<Repr, ReserveError> {
        if let Some(header) = self.send_whole_now(flow, len, flags) {
            return Ok(header);
        }
        let sent = self.send_now_slow(flow, len)?;
        let flags = if sent == len { flags } else { 0 };
        self.payload_header(flow, sent, flags)
            .ok_or(ReserveError::Stale)
    }

    /// As [`send_now`](Shard::send_now), for bytes of a stream (`flags` 0) or a whole message (SEQ_EOM,
    /// and SEQ_EOR if it ends a record), in the common case: there is credit for all of the `len`
    /// bytes, one packet takes them, and nothing is waiting. `None`: nothing was changed; use the other
    /// calls.
    #[inline(always)]
    pub fn send_whole_now(&mut self, flow: FlowId, len: u32, flags: u32) -> Option<Repr> {
        if !self.uses_fast_path() {
            return None;
        }
        let connection = self.table.get_mut(flow)?;
        let is_whole = match &connection.messages {
            None => flags == 0,
            Some(messages) => flags & SEQ_EOM != 0 && !messages.tx.in_progress,
        };
        if !is_whole || !connection.may_send_now() || !connection.tx.send_whole(len) {
            return None;
        }
        self.stats.sent_bytes += u64::from(len);
        Some(connection.header(Op::Rw, len, flags & (SEQ_EOM | SEQ_EOR)))
    }

    /// As [`Shard::send_now`], with all error cases, without building the header: returns the bytes
    /// sent.
    #[cold]
    #[inline(never)]
    fn send_now_slow(&mut self, flow: FlowId, len: u32) -> Result<u32, ReserveError> {
        if self.should_coalesce(flow, len) {
            return Err(ReserveError::ShouldCoalesce);
        }
        let Reservation { flow, len } = self.reserve(flow, len)?;
        // Cannot fail: the reservation was made just now.
        self.commit_slow(flow, len, len)
            .map_err(|_| ReserveError::Stale)?;
        Ok(len)
    }

    /// Releases a reservation.
    pub fn cancel(&mut self, reservation: Reservation) {
        if let Some(connection) = self.table.get_mut(reservation.flow) {
            connection.tx.cancel(reservation.len);
            self.credit_changed(reservation.flow.index);
        }
    }

    /// Queues a send of `len` bytes. The payload stays with the caller; [`Shard::poll_transmit`]
    /// divides it into packets as credit allows, and names them by the number returned here.
    /// `flags`: SEQ_EOM and SEQ_EOR for a SEQPACKET message; streams have none.
    ///
    /// # Errors
    /// See [`SendError`]; nothing was queued.
    pub fn send(&mut self, flow: FlowId, len: u32, flags: u32) -> Result<u64, SendError> {
        let most = self.config.max_queued_sends;
        let connection = self.table.get_mut(flow).ok_or(SendError::Stale)?;
        match sendable(connection) {
            Ok(()) => {}
            Err(Unsendable::NotConnected) => return Err(SendError::NotConnected),
            Err(Unsendable::Shutdown) => return Err(SendError::Shutdown),
            Err(Unsendable::PeerShutdown) => return Err(SendError::PeerShutdown),
        }
        if len == 0 {
            return Err(SendError::Empty);
        }
        // As in Linux, a message must fit the peer's buffer, or it never arrives.
        if connection.socket_type == SocketType::SeqPacket && len > connection.tx.limit() {
            return Err(SendError::TooLong);
        }
        if connection.queued() >= most {
            connection.rare.set_wants_space(true);
            return Err(SendError::QueueFull);
        }
        let flags = connection.message_flags(flags);
        let message = connection.enqueue(Queued { len, flags });
        self.credit_changed(flow.index);
        Ok(message)
    }

    /// Queues CREDIT_REQUEST when a stall begins, and whenever a probe is due.
    pub(super) fn request_credit(&mut self, index: u32) {
        let Some(connection) = self.table.at(index) else {
            return;
        };
        if !connection.is_stalled() {
            return;
        }
        let unanswered = connection.probe_at.is_none();
        if !connection.credit_requested {
            connection.credit_requested = true;
            self.stats.credit_stalls += 1;
        } else if !unanswered {
            return;
        }
        connection.control.credit_request = true;
        self.update_lists(index);
    }
}

/// Why a connection accepts no payload.
pub(super) enum Unsendable {
    NotConnected,
    Shutdown,
    PeerShutdown,
}

pub(super) fn sendable(connection: &Connection) -> Result<(), Unsendable> {
    match connection.state {
        State::Established { local, .. } if local.send => Err(Unsendable::Shutdown),
        State::Established { peer, .. } if peer.receive => Err(Unsendable::PeerShutdown),
        State::Established { .. } => Ok(()),
        State::Closing { .. } => Err(Unsendable::Shutdown),
        State::Listen | State::Connecting | State::Incoming | State::Closed => {
            Err(Unsendable::NotConnected)
        }
    }
}
