//! Received packets: rules 1 to 5 are here, rule 6 is in the state table.

use core::hash::BuildHasher;

use super::Shard;
use crate::addr::{Address, Cid};
use crate::time::Instant;
use crate::vsock::config::Role;
use crate::vsock::connection::{Connection, Key};
use crate::vsock::event::{CloseReason, Disposition, DropReason, RefuseReason};
use crate::vsock::messages::Verdict;
use crate::vsock::ports::Admission;
use crate::vsock::state::{Action, Directions, Input, State, transition};
use crate::wire::vsock::{
    Op, Repr, SEQ_EOM, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, SocketType, WireType,
};

impl<S: BuildHasher> Shard<S> {
    /// Handles the header of a packet that arrived. The payload, `header.len` bytes, stays with the
    /// caller; the result says what to do with it.
    ///
    /// Do not call it while [`Shard::is_backlogged`]: answers would be lost.
    ///
    /// Payload for an established connection takes the fast path, in particular when packets of one
    /// connection follow each other.
    #[inline(always)]
    pub fn handle_packet(&mut self, now: Instant, header: &Repr) -> Disposition {
        match self.handle_payload(header) {
            Some(disposition) => disposition,
            // A copy, so that the header of a fast-path packet need not lie in memory.
            None => self.handle_slow(now, &{ *header }),
        }
    }

    /// The fast path, which needs no clock: payload within the credit, of a stream or a message, for
    /// the connection that was found last, which receives and has no waiter for the credit in the
    /// header. `None`: another case; nothing was changed, pass the packet to
    /// [`handle_packet`](Self::handle_packet).
    #[inline(always)]
    pub fn handle_payload(&mut self, header: &Repr) -> Option<Disposition> {
        if !self.uses_fast_path() {
            return None;
        }
        let key = Key {
            local: header.dst,
            peer: header.src,
        };
        // All connections of a device belong to its guest: a packet that matches one has the right
        // source.
        let (flow, connection) = self.table.find_last(&key)?;
        if header.socket_type.get() != SocketType::Stream as u16
            || connection.socket_type != SocketType::Stream
        {
            return self.handle_part(header);
        }
        if header.op.get() != Op::Rw as u16
            || header.len == 0
            || !connection.may_receive()
            || !connection.rx.allows(header.len)
            || !connection.has_no_waiter()
        {
            return None;
        }
        // Rule 5. There is no waiter, so `credit_changed` would do nothing.
        if !connection.tx.update(header.buf_alloc, header.fwd_cnt) {
            self.stats.bad_fwd_cnt += 1;
        }
        connection.rx.receive(header.len);
        self.stats.packets += 1;
        self.stats.delivered_bytes += u64::from(header.len);
        Some(Disposition::Deliver {
            flow,
            len: header.len,
        })
    }

    /// The fast path of messages, as [`handle_payload`](Self::handle_payload) is that of streams.
    #[inline(always)]
    fn handle_part(&mut self, header: &Repr) -> Option<Disposition> {
        if header.socket_type.get() != SocketType::SeqPacket as u16 {
            return None;
        }
        let key = Key {
            local: header.dst,
            peer: header.src,
        };
        let (flow, connection) = self.table.find_last(&key)?;
        let (len, ends) = (header.len, header.flags & SEQ_EOM != 0);
        if header.op.get() != Op::Rw as u16
            || connection.socket_type != SocketType::SeqPacket
            || (len == 0 && !ends)
            || !connection.may_receive()
            || !connection.rx.allows(len)
            || !connection.has_no_waiter()
        {
            return None;
        }
        let window = connection.rx.window();
        let messages = &mut connection.messages.as_mut()?.rx;
        if messages.check(len, ends, window) != Verdict::Fits {
            return None;
        }
        messages.receive(len, ends);
        if !connection.update_credit(header) {
            self.stats.bad_fwd_cnt += 1;
        }
        connection.rx.receive(len);
        self.stats.packets += 1;
        self.stats.delivered_bytes += u64::from(len);
        let flags = connection.message_flags(header.flags);
        if !ends && connection.rx.handle_partial_message(header.buf_alloc) {
            connection.control.credit_update = true;
            self.update_lists(flow.index);
        }
        Some(Disposition::Part { flow, len, flags })
    }

    /// Handles every other packet.
    #[cold]
    #[inline(never)]
    fn handle_slow(&mut self, now: Instant, header: &Repr) -> Disposition {
        self.stats.packets += 1;
        let disposition = self.receive(now, header);
        if let Disposition::Dropped(reason) = disposition {
            self.count_drop(reason);
        }
        disposition
    }

    fn count_drop(&mut self, reason: DropReason) {
        let stats = &mut self.stats;
        *match reason {
            DropReason::WrongSource => &mut stats.wrong_source,
            DropReason::UnknownType | DropReason::TypeMismatch => &mut stats.wrong_type,
            DropReason::NoSocket => &mut stats.no_socket,
            DropReason::OverCap => &mut stats.over_cap,
            DropReason::StrayReset | DropReason::Unexpected | DropReason::Empty => {
                &mut stats.unexpected
            }
            DropReason::CreditExceeded => &mut stats.credit_exceeded,
            DropReason::MessageTooLong => &mut stats.message_too_long,
            DropReason::MessageFlood => &mut stats.message_flood,
            DropReason::ProtocolError => &mut stats.protocol_errors,
            DropReason::ReceiveShut => &mut stats.receive_shut,
        } += 1;
    }

    fn receive(&mut self, now: Instant, header: &Repr) -> Disposition {
        // "src_cid not the guest's: dropped without RST".
        if let Role::Device { peer } = self.config.role
            && header.src.cid != peer
        {
            return Disposition::Dropped(DropReason::WrongSource);
        }
        // Rule 1. Datagrams do not get here: the caller handles them.
        let socket_type = match header.socket_type.known() {
            Some(known @ (SocketType::Stream | SocketType::SeqPacket)) => known,
            Some(SocketType::Datagram) | None => {
                return self.reset_packet(header, DropReason::UnknownType);
            }
        };
        let key = Key {
            local: header.dst,
            peer: header.src,
        };
        match self.table.find(&key) {
            Some(index) => self.receive_for(now, index, header, socket_type),
            None => self.receive_unconnected(header, key, socket_type),
        }
    }

    /// Rule 2: no connection. A REQUEST may find a listener.
    fn receive_unconnected(
        &mut self,
        header: &Repr,
        key: Key,
        socket_type: SocketType,
    ) -> Disposition {
        let mut port_ref = None;
        let (state, input) = match header.op.known() {
            Some(Op::Request) if !self.is_local(key.local.cid) => (State::Closed, Input::Request),
            Some(Op::Request) => {
                let admitted = self.can_open();
                if self.config.accept_all {
                    let admitted = admitted && self.undecided < self.config.backlog;
                    let input = if admitted {
                        Input::Request
                    } else {
                        Input::RequestOverCap
                    };
                    (State::Listen, input)
                } else if !admitted {
                    (State::Listen, Input::RequestOverCap)
                } else {
                    match self.ports.admit(key.local) {
                        Admission::NoListener => (State::Closed, Input::Request),
                        Admission::Full => (State::Listen, Input::RequestOverCap),
                        Admission::Granted(granted) => {
                            port_ref = Some(granted);
                            (State::Listen, Input::Request)
                        }
                    }
                }
            }
            // All other packets are handled alike with and without a listener.
            op => (State::Closed, self.classify(op, header, None)),
        };
        // Rule 3: without the feature we have no SEQPACKET sockets.
        let mismatch = socket_type == SocketType::SeqPacket
            && !self.seqpacket
            && matches!(state, State::Listen);
        let input = if mismatch { Input::TypeMismatch } else { input };

        let (next, action) = transition(state, input);
        match action {
            Action::Incoming => {
                let mut connection = self.new_connection(key, socket_type, next);
                // Rule 5.
                connection.tx.update(header.buf_alloc, header.fwd_cnt);
                connection.port_ref = port_ref;
                connection.pending.incoming = true;
                let index = self.add_connection(connection);
                self.undecided += 1;
                self.events.push(&mut self.table.slots, index);
                Disposition::Handled
            }
            Action::Ignore(reason) => Disposition::Dropped(reason),
            Action::ResetPacket(reason) => {
                if let Some(port_ref) = port_ref {
                    self.ports.release(header.dst, port_ref);
                }
                self.reset_packet(header, reason)
            }
            _ => Disposition::Handled,
        }
    }

    /// Rules 3 to 6: a connection exists, or its RST is still queued.
    fn receive_for(
        &mut self,
        now: Instant,
        index: u32,
        header: &Repr,
        socket_type: SocketType,
    ) -> Disposition {
        let op = header.op.known();
        let Some(connection) = self.table.at(index) else {
            return Disposition::Dropped(DropReason::NoSocket);
        };
        if connection.state == State::Closed {
            // Rule 4. The RST that would answer this packet is queued already, unless the peer has
            // ended the connection as well: then ours would hit the next connection between these
            // ports.
            return match op {
                Some(Op::Rst) => {
                    self.forget_reset(index);
                    Disposition::Dropped(DropReason::StrayReset)
                }
                Some(Op::Request) => {
                    self.forget_reset(index);
                    let key = Key {
                        local: header.dst,
                        peer: header.src,
                    };
                    self.receive_unconnected(header, key, socket_type)
                }
                _ => Disposition::Dropped(DropReason::NoSocket),
            };
        }
        // Rule 3.
        if connection.socket_type != socket_type {
            return self.reset_packet(header, DropReason::TypeMismatch);
        }
        // Rule 5.
        if op != Some(Op::Rst) && !connection.update_credit(header) {
            self.stats.bad_fwd_cnt += 1;
        }
        if op == Some(Op::CreditUpdate) {
            connection.progress_pending = false;
        }
        // RW without payload is valid only at the end of a message.
        let ends = connection.message_flags(header.flags) & SEQ_EOM != 0;
        if op == Some(Op::Move)
            && self.declines_moves.is_some()
            && matches!(connection.state, State::Established { .. })
        {
            connection.control.moved = true;
            self.credit_changed(index);
            return Disposition::Handled;
        }
        if op == Some(Op::Rw) && header.len == 0 && !ends {
            self.credit_changed(index);
            return Disposition::Dropped(DropReason::Empty);
        }
        // Rule 6.
        let input = self.classify(op, header, Some(index));
        let disposition = self.receive_input(now, index, input, header);
        self.credit_changed(index);
        disposition
    }

    fn receive_input(
        &mut self,
        now: Instant,
        index: u32,
        input: Input,
        header: &Repr,
    ) -> Disposition {
        let Some(connection) = self.table.at(index) else {
            return Disposition::Handled;
        };
        let (next, action) = transition(connection.state, input);
        match action {
            Action::Deliver => {
                connection.rx.receive(header.len);
                self.stats.delivered_bytes += u64::from(header.len);
                let (len, flags) = (header.len, connection.message_flags(header.flags));
                let Some(messages) = &mut connection.messages else {
                    let flow = self.table.id(index);
                    return Disposition::Deliver { flow, len };
                };
                let ends = flags & SEQ_EOM != 0;
                messages.rx.receive(len, ends);
                if !ends && connection.rx.handle_partial_message(header.buf_alloc) {
                    connection.control.credit_update = true;
                    self.update_lists(index);
                }
                let flow = self.table.id(index);
                Disposition::Part { flow, len, flags }
            }
            Action::Discard => {
                connection.rx.receive(header.len);
                if connection.rx.consume(header.len, header.buf_alloc) == Some(true) {
                    connection.control.credit_update = true;
                }
                self.update_lists(index);
                Disposition::Dropped(DropReason::ReceiveShut)
            }
            Action::Ignore(reason) => Disposition::Dropped(reason),
            Action::ResetPacket(reason) => self.reset_packet(header, reason),
            Action::Supersede => {
                self.end(index, false, CloseReason::Superseded);
                let key = Key {
                    local: header.dst,
                    peer: header.src,
                };
                match header.socket_type.known() {
                    Some(socket_type) => self.receive_unconnected(header, key, socket_type),
                    None => Disposition::Handled,
                }
            }
            Action::Refuse {
                reason: RefuseReason::ProtocolError,
                ..
            } => {
                self.apply_action(now, index, next, action);
                Disposition::Dropped(DropReason::ProtocolError)
            }
            Action::End { reason, .. } => {
                if input == Input::Rst {
                    self.stats.resets_received += 1;
                }
                self.apply_action(now, index, next, action);
                match reason {
                    CloseReason::ProtocolError => Disposition::Dropped(DropReason::ProtocolError),
                    CloseReason::CreditExceeded => Disposition::Dropped(DropReason::CreditExceeded),
                    CloseReason::MessageTooLong => Disposition::Dropped(DropReason::MessageTooLong),
                    CloseReason::MessageFlood => Disposition::Dropped(DropReason::MessageFlood),
                    _ => Disposition::Handled,
                }
            }
            _ => {
                self.apply_action(now, index, next, action);
                Disposition::Handled
            }
        }
    }

    /// The input of the state table for a packet.
    fn classify(&mut self, op: Option<Op>, header: &Repr, index: Option<u32>) -> Input {
        let connection: Option<&Connection> =
            index.and_then(|i| self.table.slots[i as usize].connection.as_ref());
        match op {
            Some(Op::Invalid) => Input::Invalid,
            Some(Op::Request) => Input::Request,
            Some(Op::Response) => Input::Response,
            Some(Op::Rst) => Input::Rst,
            Some(Op::Shutdown) => Input::Shutdown {
                how: Directions {
                    receive: header.flags & SHUTDOWN_RECEIVE != 0,
                    send: header.flags & SHUTDOWN_SEND != 0,
                },
                unread: connection.is_some_and(|c| c.rx.unread() > 0),
            },
            Some(Op::Rw) => connection.map_or(Input::Rw, |c| classify_payload(c, header)),
            Some(Op::CreditUpdate) => Input::CreditUpdate,
            Some(Op::CreditRequest) => Input::CreditRequest,
            // A MOVE that is declined is handled before.
            Some(Op::Move | Op::Moved) | None => Input::Unknown,
        }
    }

    /// Answers a packet with RST: addresses swapped, the type kept, no credit. An RST is never
    /// answered.
    fn reset_packet(&mut self, header: &Repr, reason: DropReason) -> Disposition {
        if header.op.known() != Some(Op::Rst) {
            self.push_reset(header.dst, header.src, header.socket_type);
        }
        Disposition::Dropped(reason)
    }

    /// Queues an RST that belongs to no connection.
    pub(super) fn push_reset(&mut self, src: Address, dst: Address, socket_type: WireType) {
        if self.resets.len() >= self.config.max_pending_resets {
            self.stats.resets_lost += 1;
            return;
        }
        self.resets.push_back(Repr {
            src,
            dst,
            len: 0,
            socket_type,
            op: Op::Rst.into(),
            flags: 0,
            buf_alloc: 0,
            fwd_cnt: 0,
        });
    }

    /// Whether we accept connections to `cid`.
    pub(super) fn is_local(&self, cid: Cid) -> bool {
        match self.config.role {
            Role::Device { .. } => self.config.local.contains(cid),
            Role::Driver { local } => cid == local,
        }
    }
}

/// The input of the state table for payload.
fn classify_payload(connection: &Connection, header: &Repr) -> Input {
    let (rx, len) = (&connection.rx, header.len);
    if let Some(messages) = &connection.messages
        && connection.may_receive()
    {
        let ends = header.flags & SEQ_EOM != 0;
        match messages.rx.check(len, ends, rx.window()) {
            Verdict::TooLong => return Input::RwTooLong,
            Verdict::Flood => return Input::RwFlood,
            Verdict::Fits => {}
        }
    }
    if rx.allows(len) {
        Input::Rw
    } else {
        Input::RwOverCredit
    }
}
