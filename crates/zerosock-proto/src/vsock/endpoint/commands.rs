//! Commands: connect, listen, accept, shut down, send, consume.

use core::hash::BuildHasher;

use super::{
    CommitError, ConnectError, ConsumeError, FlowError, ListenError, ReserveError, SendError, Shard,
};
use crate::addr::{Address, Cid, Port};
use crate::time::{Duration, Instant};
use crate::vsock::config::Role;
use crate::vsock::connection::{Connection, FlowId, Key, Queued, Reservation};
use crate::vsock::ports::PortRef;
use crate::vsock::state::{Action, How, Input, State, transition};
use crate::wire::vsock::{Op, Repr, SocketType};

impl<S: BuildHasher> Shard<S> {
    /// Asks `peer` for a connection. [`Event::Connected`] or
    /// [`Event::Refused`] tells how it went.
    ///
    /// `local`: the CID may be [`Cid::ANY`] for our own; the port may be
    /// [`Port::ANY`] for one that nobody has.
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
        self.act(now, index, next, action);
        Ok(self.table.id(index))
    }

    /// A local port such that the two addresses have no connection yet.
    fn take_port(&mut self, local: Address, peer: Address) -> Result<(Key, PortRef), ConnectError> {
        if local.port != Port::ANY {
            let key = Key { local, peer };
            if !self.vacate(&key) {
                return Err(ConnectError::InUse);
            }
            let port_ref = self.ports.acquire(local).ok_or(ConnectError::InUse)?;
            return Ok((key, port_ref));
        }
        // A guest may have connections to ports that look ephemeral; it has no
        // more of them than there are connections.
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

    /// False: a live connection has these addresses. One whose RST is still
    /// waiting steps aside: the RST was first in line and will leave first.
    pub(super) fn vacate(&mut self, key: &Key) -> bool {
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

    /// Our own CID: what listeners listen on.
    pub(super) fn own_cid(&self) -> Cid {
        match self.config.role {
            Role::Device { .. } => Cid::HOST,
            Role::Driver { local } => local,
        }
    }

    /// Listens: REQUESTs to `port` of our own CID become
    /// [`Event::Incoming`](crate::vsock::Event::Incoming), in every shard
    /// that shares the port table. At most `backlog` of them wait undecided, and
    /// one more, as on Linux.
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

    /// Listens no more. Connections not yet accepted stay; reject them.
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

    /// Takes `port` of our own CID, or with [`Port::ANY`] one that nobody
    /// has, so that nobody else can listen on it or bind it; which one it is.
    /// REQUESTs to it are reset.
    ///
    /// # Errors
    /// [`ListenError::InUse`].
    pub fn bind(&mut self, port: Port) -> Result<Port, ListenError> {
        let address = Address::new(self.own_cid(), port);
        self.ports.bind(address).ok_or(ListenError::InUse)
    }

    /// Gives a bound port up. Connections from it keep it until they end.
    pub fn unbind(&mut self, port: Port) {
        self.ports.unbind(Address::new(self.own_cid(), port));
    }

    /// A command through the state table.
    fn command(&mut self, now: Instant, flow: FlowId, input: Input) -> Result<(), FlowError> {
        let connection = self.table.get(flow).ok_or(FlowError::Stale)?;
        let (next, action) = transition(connection.state, input);
        if action == Action::WrongState {
            return Err(FlowError::WrongState);
        }
        self.act(now, flow.index, next, action);
        Ok(())
    }

    /// Grants a connection after [`Event::Incoming`](crate::vsock::Event::Incoming).
    /// It can be used at once; what it sends leaves behind the RESPONSE.
    ///
    /// # Errors
    /// See [`FlowError`].
    pub fn accept(&mut self, now: Instant, flow: FlowId) -> Result<(), FlowError> {
        self.command(now, flow, Input::Accept)
    }

    /// Refuses a connection after [`Event::Incoming`](crate::vsock::Event::Incoming):
    /// RST, and the id is invalid.
    ///
    /// # Errors
    /// See [`FlowError`].
    pub fn reject(&mut self, flow: FlowId) -> Result<(), FlowError> {
        self.command(Instant::ZERO, flow, Input::Reject)
    }

    /// Shuts down one direction or both. SHUTDOWN leaves behind all data
    /// committed and queued so far; reservations not yet committed are lost.
    /// Shutting down both is closing: after
    /// [`close_timeout`](crate::vsock::ShardConfig::close_timeout) without
    /// progress RST follows.
    ///
    /// # Errors
    /// See [`FlowError`].
    pub fn shutdown(&mut self, now: Instant, flow: FlowId, how: How) -> Result<(), FlowError> {
        self.command(now, flow, Input::Close(how))
    }

    /// Ends a connection at once: RST (none if its REQUEST never left), queued
    /// sends dropped, the id invalid.
    ///
    /// # Errors
    /// [`FlowError::Stale`].
    pub fn reset(&mut self, flow: FlowId) -> Result<(), FlowError> {
        self.command(Instant::ZERO, flow, Input::Reset)
    }

    /// Counts received bytes that have left the caller's hands. The peer is
    /// told when half of the buffer is free without its knowledge, or when it
    /// asked. After the last unread byte of a peer that has shut down both
    /// directions the connection ends.
    ///
    /// Only the sum counts: who gets rid of many packets at once may report
    /// them with one call, and saves the others.
    ///
    /// # Errors
    /// See [`ConsumeError`].
    #[inline(always)]
    pub fn consume(&mut self, flow: FlowId, bytes: u32) -> Result<(), ConsumeError> {
        // While the peer has shut down nothing, the last unread byte means nothing to the state
        // table; and an update that waits already need not be queued again.
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
        // A peer that sends no more needs no credit.
        if update_due && established {
            connection.control.credit_update = true;
            self.update_lists(flow.index);
        }
        if drained {
            // Cannot be the wrong state: `Drained` is no command.
            let _ = self.command(Instant::ZERO, flow, Input::Drained);
        }
        Ok(())
    }

    /// Changes a connection's receive buffer and tells the peer. What the
    /// peer was promised before may still arrive.
    ///
    /// It bounds what is in flight the other way as well, as in Linux, beside
    /// [`ShardConfig::send_limit`](crate::vsock::ShardConfig::send_limit).
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

    /// The reader of a connection takes nothing before `bytes` are there. The peer is told of what
    /// was consumed early enough that there is room for so many. To be said again when the buffer
    /// has changed.
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

    /// How long the request of a connection that is not answered yet may go unanswered, from
    /// `now`. No effect on one that is.
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

    /// Asks the peer how much it has consumed, if it is not known to have consumed everything. The
    /// answer shows in [`Shard::flow`].
    ///
    /// # Errors
    /// [`FlowError::Stale`].
    pub fn request_progress(&mut self, flow: FlowId) -> Result<(), FlowError> {
        let connection = self.table.get_mut(flow).ok_or(FlowError::Stale)?;
        let consumed = connection.tx.peer_fwd_cnt();
        // One that was asked and has nothing to tell yet will tell.
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

    /// Takes credit for one packet of up to `max` bytes before its payload,
    /// and so its length, is known. Several may be outstanding; they are
    /// sent in the order of their commits, and before sends queued later.
    ///
    /// # Errors
    /// See [`ReserveError`]; after `NoCredit`
    /// [`Event::Writable`](crate::vsock::Event::Writable) follows.
    #[inline(always)]
    pub fn reserve(&mut self, flow: FlowId, max: u32) -> Result<Reservation, ReserveError> {
        if let Some(connection) = self.table.get_mut(flow)
            && connection.may_send()
            // Nothing may overtake the RESPONSE or a queued send.
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

    /// Why nothing can be reserved. If it is for credit, somebody waits for it from now on.
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
            // Less is wanted now than before, perhaps: a queued send may find that it can be cut.
            self.update_lists(flow.index);
        }
        self.request_credit(flow.index);
        ReserveError::NoCredit
    }

    /// Makes a reservation a packet of `len` bytes, whose payload lies in the
    /// packet's buffer already: the header to write in front of it, now,
    /// before any other header of this shard is put into the queue. What was
    /// reserved above `len` goes back.
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
            // Nothing waits for what goes back, and the header takes no update's place.
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

    /// The header that an `*_other` has accounted for. It is made here, in the caller, because a
    /// header that lies in memory on one of two paths would have to on both.
    #[inline(always)]
    fn payload_header(&mut self, flow: FlowId, len: u32, flags: u32) -> Option<Repr> {
        let connection = self.table.get_mut(flow)?;
        let flags = connection.message_flags(flags);
        Some(connection.header(Op::Rw, len, flags))
    }

    /// As [`Shard::commit`], with all that can be the matter, but for the header itself.
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
                // The header tells our credit: no update is needed.
                connection.control.credit_update = false;
                Ok(())
            }
        };
        self.credit_changed(flow.index);
        result
    }

    /// [`Shard::reserve`] and [`Shard::commit`] in one step, for payload that lies ready: the header
    /// of a packet with as many of the `len` bytes as there is credit for now, to be written in
    /// front of them before any other header of this shard. Its `len` says how many; the others are
    /// to be sent later. `flags` go with the last byte: they stand in a header of all `len` only.
    ///
    /// # Errors
    /// See [`ReserveError`]; after `NoCredit`
    /// [`Event::Writable`](crate::vsock::Event::Writable) follows. After `ShouldCoalesce` the bytes are to
    /// be [gathered](Shard::coalesce), or to be sent with `reserve` and `commit`.
    #[inline(always)]
    pub fn send_now(&mut self, flow: FlowId, len: u32, flags: u32) -> Result<Repr, ReserveError> {
        if self.uses_fast_path()
            && let Some(connection) = self.table.get_mut(flow)
            && connection.may_send()
            && !connection.control.response
            && !connection.control.credit_update
            && connection.has_no_waiter()
        {
            let sent = connection.tx.send(len);
            if sent > 0 {
                let flags = if sent == len { flags } else { 0 };
                let flags = connection.message_flags(flags);
                self.stats.sent_bytes += u64::from(sent);
                return Ok(connection.header(Op::Rw, sent, flags));
            }
        }
        let sent = self.send_now_slow(flow, len)?;
        let flags = if sent == len { flags } else { 0 };
        self.payload_header(flow, sent, flags)
            .ok_or(ReserveError::Stale)
    }

    /// As [`Shard::send_now`], with all that can be the matter, but for the header itself: how many
    /// bytes it tells of.
    #[cold]
    #[inline(never)]
    fn send_now_slow(&mut self, flow: FlowId, len: u32) -> Result<u32, ReserveError> {
        if self.should_coalesce(flow, len) {
            return Err(ReserveError::ShouldCoalesce);
        }
        let Reservation { flow, len } = self.reserve(flow, len)?;
        // Cannot fail: nothing has happened since.
        self.commit_slow(flow, len, len)
            .map_err(|_| ReserveError::Stale)?;
        Ok(len)
    }

    /// Gives a reservation back.
    pub fn cancel(&mut self, reservation: Reservation) {
        if let Some(connection) = self.table.get_mut(reservation.flow) {
            connection.tx.cancel(reservation.len);
            self.credit_changed(reservation.flow.index);
        }
    }

    /// Queues a send of `len` bytes. The payload stays with the caller;
    /// [`Shard::poll_transmit`] cuts it into packets as credit allows, and
    /// names them by the number returned here. `flags`: SEQ_EOM and SEQ_EOR
    /// for a SEQPACKET message; streams have none.
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
        // As Linux: a record must fit the peer's buffer, or it never ends.
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

    /// Queues CREDIT_REQUEST: when a stall begins, and each time that a probe is due.
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

/// Why a connection takes no payload.
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
