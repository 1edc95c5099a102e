//! The state of one connection, without its payload.

use std::collections::VecDeque;

use super::credit::{RxCredit, Stall, TxCredit};
use super::event::{CloseReason, RefuseReason};
use super::flow_id::FlowId;
use super::messages::Messages;
use super::ports::PortRef;
use super::snapshot::{Reader, RestoreError, Writer};
use super::state::{Directions, State};
use crate::addr::Address;
use crate::time::Instant;
use crate::wire::vsock::{Op, Repr, SEQ_EOM, SEQ_EOR, SocketType};

/// A description of a connection.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct FlowInfo {
    /// Our address.
    pub local: Address,
    /// The peer's address.
    pub peer: Address,
    /// STREAM or SEQPACKET.
    pub socket_type: SocketType,
    /// The state.
    pub state: State,
    /// The peer has shut down receiving.
    pub peer_recv_shutdown: bool,
    /// The peer has shut down sending.
    pub peer_send_shutdown: bool,
    /// We have shut down receiving.
    pub local_recv_shutdown: bool,
    /// We have shut down sending.
    pub local_send_shutdown: bool,
    /// Bytes that may be sent now: credit neither used nor reserved.
    pub send_credit: u32,
    /// Bytes of queued sends not yet divided into packets.
    pub unsent: u64,
    /// Bytes of spans returned by `poll_transmit` and not yet released.
    pub unreleased: u64,
    /// Bytes delivered and not yet consumed.
    pub unread: u32,
    /// Our receive buffer, in bytes.
    pub buf_alloc: u32,
    /// Bytes consumed, free-running.
    pub fwd_cnt: u32,
    /// Bytes sent, free-running.
    pub tx_cnt: u32,
    /// The peer's receive buffer, in bytes.
    pub peer_buf_alloc: u32,
    /// Bytes that the peer has consumed, free-running.
    pub peer_fwd_cnt: u32,
    /// The longest message that may be sent, in bytes: the peer's buffer or our own limit of bytes
    /// in flight.
    pub max_message_len: u32,
}

/// Credit for one packet of unknown length. Commit or cancel it: one that is dropped keeps its
/// credit, and keeps queued sends waiting, until the connection ends.
#[derive(Debug)]
#[must_use = "a reservation keeps its credit until it is committed or cancelled"]
pub struct Reservation {
    pub(crate) flow: FlowId,
    pub(crate) len: u32,
}

impl Reservation {
    /// The connection.
    #[inline]
    pub const fn flow(&self) -> FlowId {
        self.flow
    }

    /// Most bytes that may be committed, never 0.
    #[allow(clippy::len_without_is_empty, reason = "it is never empty")]
    #[inline]
    pub const fn len(&self) -> u32 {
        self.len
    }
}

/// Credit for a whole message. Complete it ([`commit_part`](super::Shard::commit_part) with an end)
/// or cancel it: one that is dropped keeps its credit, and one that was begun keeps all others
/// waiting, until the connection ends.
#[derive(Debug)]
#[must_use = "a message keeps its credit until it is completed or cancelled"]
pub struct MessageReservation {
    pub(crate) flow: FlowId,
    pub(crate) remaining: u32,
    /// A part was sent.
    pub(crate) begun: bool,
}

impl MessageReservation {
    /// The connection.
    #[inline]
    pub const fn flow(&self) -> FlowId {
        self.flow
    }

    /// Bytes that may still be committed.
    #[inline]
    pub const fn remaining(&self) -> u32 {
        self.remaining
    }
}

/// The addresses that identify a connection.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub(crate) struct Key {
    pub(crate) local: Address,
    pub(crate) peer: Address,
}

impl Key {
    /// Equality without a branch for each of the four numbers.
    #[inline]
    pub(crate) fn is(&self, other: &Key) -> bool {
        let ends =
            |a: Address, b: Address| (a.cid.get() ^ b.cid.get()) | (a.port.get() ^ b.port.get());
        ends(self.local, other.local) | ends(self.peer, other.peer) == 0
    }
}

/// Control packets waiting to be sent: at most one of each kind.
#[derive(Copy, Clone, Default, Debug)]
pub(crate) struct ControlPackets {
    pub(crate) rst: bool,
    /// The RST carries no credit, because no socket existed.
    pub(crate) no_socket: bool,
    pub(crate) request: bool,
    pub(crate) response: bool,
    /// MOVED, which declines MOVE of an older driver.
    pub(crate) moved: bool,
    pub(crate) credit_update: bool,
    pub(crate) credit_request: bool,
}

impl ControlPackets {
    pub(crate) fn any(self) -> bool {
        self.rst
            || self.request
            || self.response
            || self.moved
            || self.credit_update
            || self.credit_request
    }

    fn save(self, to: &mut Writer) {
        to.bits([
            self.rst,
            self.no_socket,
            self.request,
            self.response,
            self.moved,
            self.credit_update,
            self.credit_request,
        ]);
    }

    /// Reads them: one that has ended sends an RST or nothing, and no other one does.
    fn load(from: &mut Reader<'_>, has_ended: bool) -> Result<ControlPackets, RestoreError> {
        let [
            rst,
            no_socket,
            request,
            response,
            moved,
            credit_update,
            credit_request,
        ] = from.bits()?;
        Ok(match has_ended {
            true => ControlPackets {
                rst,
                no_socket,
                ..ControlPackets::default()
            },
            false => ControlPackets {
                rst: false,
                no_socket: false,
                request,
                response,
                moved,
                credit_update,
                credit_request,
            },
        })
    }
}

/// Events waiting to be polled: at most one of each kind.
#[derive(Copy, Clone, Default, Debug)]
pub(crate) struct PendingEvents {
    pub(crate) incoming: bool,
    pub(crate) connected: bool,
    pub(crate) peer_shutdown: bool,
    pub(crate) writable: bool,
    pub(crate) end: Option<End>,
}

impl PendingEvents {
    pub(crate) fn any(self) -> bool {
        self.incoming || self.connected || self.peer_shutdown || self.writable || self.end.is_some()
    }

    /// Saves all but `incoming`.
    fn save(self, to: &mut Writer) {
        to.bits([self.connected, self.peer_shutdown, self.writable]);
        let is_end = |end: End| ENDS.iter().position(|&it| it == end);
        // None of them is not in the table.
        to.count(self.end.and_then(is_end).map_or(0, |end| end + 1));
    }

    /// Reads those that a connection in `state` can have. An undecided one is reported again, because the decision
    /// of the former caller is not known.
    fn load(from: &mut Reader<'_>, state: State) -> Result<PendingEvents, RestoreError> {
        let [connected, peer_shutdown, writable] = from.bits()?;
        let end = match from.count()? {
            0 => None,
            end => Some(
                *ENDS
                    .get(end as usize - 1)
                    .ok_or(RestoreError::Invalid("end"))?,
            ),
        };
        Ok(match state {
            State::Closed => PendingEvents {
                connected,
                end,
                ..PendingEvents::default()
            },
            State::Incoming => PendingEvents {
                incoming: true,
                ..PendingEvents::default()
            },
            _ => PendingEvents {
                connected,
                peer_shutdown,
                writable,
                ..PendingEvents::default()
            },
        })
    }
}

/// The ends by their number in a snapshot, less one.
const ENDS: [End; 17] = [
    End::Refused(RefuseReason::Reset),
    End::Refused(RefuseReason::TimedOut),
    End::Refused(RefuseReason::ProtocolError),
    End::Refused(RefuseReason::TransportReset),
    End::Refused(RefuseReason::LocalReset),
    End::Closed(CloseReason::Finished),
    End::Closed(CloseReason::PeerClosed),
    End::Closed(CloseReason::PeerReset),
    End::Closed(CloseReason::Superseded),
    End::Closed(CloseReason::ProtocolError),
    End::Closed(CloseReason::CreditExceeded),
    End::Closed(CloseReason::MessageTooLong),
    End::Closed(CloseReason::MessageFlood),
    End::Closed(CloseReason::TimedOut),
    End::Closed(CloseReason::TransportReset),
    End::Closed(CloseReason::LocalReset),
    End::Closed(CloseReason::Rejected),
];

/// How a connection ended.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(crate) enum End {
    Refused(RefuseReason),
    Closed(CloseReason),
}

/// A queued send.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Queued {
    pub(crate) len: u32,
    pub(crate) flags: u32,
}

/// First and longest delay, in milliseconds, before a sender that is stalled by a limit of its own
/// requests credit again.
pub(crate) const LIMIT_PROBE: (u32, u32) = (2, 1000);
/// First and longest delay, in milliseconds, before a sender that has filled the peer's buffer
/// requests credit again. The peer should send an update when it has read; but Linux before 6.8
/// sends none when its reader waits for more than what is left (SO_RCVLOWAT), and then both would
/// wait for ever.
pub(crate) const WINDOW_PROBE: (u32, u32) = (100, 8000);

/// Queued sends and the spans made from them. The caller has their payload.
#[derive(Debug, Default)]
pub(crate) struct SendQueue {
    pub(crate) sends: VecDeque<Queued>,
    /// The id of the first message in the queue, or of the next one to be queued.
    pub(crate) front_message: u64,
    /// Bytes of that message already in packets.
    pub(crate) front_offset: u32,
    /// Bytes not yet in packets.
    pub(crate) unsent: u64,
    /// Bytes in packets and not yet released by the caller.
    pub(crate) unreleased: u64,
}

impl SendQueue {
    fn save(&self, to: &mut Writer) {
        to.u64(self.front_message);
        to.u64(self.unreleased);
        to.u32s([self.front_offset]);
        to.count(self.sends.len());
        for send in &self.sends {
            to.u32s([send.len, send.flags]);
        }
    }

    fn load(from: &mut Reader<'_>) -> Result<SendQueue, RestoreError> {
        let mut queue = SendQueue {
            front_message: from.u64()?,
            unreleased: from.u64()?,
            ..SendQueue::default()
        };
        [queue.front_offset] = from.u32s()?;
        for _ in 0..from.count()? {
            let [len, flags] = from.u32s()?;
            queue.sends.push_back(Queued { len, flags });
            queue.unsent += u64::from(len);
        }
        let front = queue.sends.front().map_or(1, |send| send.len);
        let is_valid = queue.front_offset < front
            && queue.sends.iter().all(|send| send.len > 0)
            && queue.front_message.max(queue.unreleased) <= MAX_RESTORED_COUNT;
        if !is_valid {
            return Err(RestoreError::Invalid("send queue"));
        }
        queue.unsent -= u64::from(queue.front_offset);
        Ok(queue)
    }
}

/// Most bytes of a coalesced send that is restored: more can be added.
const MAX_RESTORED_COALESCED: u32 = 1 << 31;
/// The largest count of messages or bytes that is restored: it can still grow.
const MAX_RESTORED_COUNT: u64 = 1 << 62;

/// Flags that few connections have.
#[derive(Copy, Clone, Debug, Default)]
pub(crate) struct RareFlags(u8);

impl RareFlags {
    /// The caller got `QueueFull`, or must wait with a message that has credit.
    const WANTS_SPACE: u8 = 1;
    /// Small writes are coalesced near the packet limit.
    const COALESCES: u8 = 2;

    pub(crate) fn wants_space(self) -> bool {
        self.0 & Self::WANTS_SPACE != 0
    }

    pub(crate) fn set_wants_space(&mut self, wants: bool) {
        self.set(Self::WANTS_SPACE, wants);
    }

    pub(crate) fn coalescing_enabled(self) -> bool {
        self.0 & Self::COALESCES != 0
    }

    pub(crate) fn set_coalescing_enabled(&mut self, coalesces: bool) {
        self.set(Self::COALESCES, coalesces);
    }

    fn set(&mut self, bit: u8, on: bool) {
        self.0 = if on { self.0 | bit } else { self.0 & !bit };
    }
}

/// A connection. An idle one owns no further memory, unless its user queues sends: a device must
/// support a hundred thousand of them, so rare parts are behind a pointer.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) key: Key,
    pub(crate) socket_type: SocketType,
    pub(crate) state: State,
    pub(crate) rx: RxCredit,
    pub(crate) tx: TxCredit,
    /// Further state of a SEQPACKET connection.
    pub(crate) messages: Option<Box<Messages>>,
    pub(crate) control: ControlPackets,
    /// The flags of the last SHUTDOWN sent.
    pub(crate) shutdown_sent: Directions,
    pub(crate) pending: PendingEvents,
    /// Whether the caller knows the id.
    pub(crate) known_to_caller: bool,
    /// Its reference to a port or to a listener's backlog, if it has one.
    pub(crate) port_ref: Option<PortRef>,

    /// Allocated by the first queued send, and kept.
    pub(crate) queue: Option<Box<SendQueue>>,
    /// Whether `queue` has sends: the fast path reads only this.
    pub(crate) has_queued: bool,
    /// Whether `queue` has one send of coalesced bytes.
    pub(crate) coalescing: bool,

    /// The caller got `NoCredit`, and waits for credit.
    pub(crate) wants_credit: bool,
    /// Flags that few connections have, in one byte because every packet tests for any of them.
    pub(crate) rare: RareFlags,
    /// A small packet is delayed until there are more bytes, or the peer has read.
    pub(crate) delays_small: bool,
    /// The delay is over: the next packet may be small.
    pub(crate) delay_over: bool,
    /// Delays in a row that ended by the timer.
    pub(crate) delays_expired: u8,
    /// CREDIT_REQUEST was queued in this stall.
    pub(crate) credit_requested: bool,
    /// The peer has not answered a request for its progress.
    pub(crate) progress_pending: bool,
    /// Delay of the next probe, in milliseconds.
    pub(crate) probe_wait: u32,
    /// When credit is requested again.
    pub(crate) probe_at: Option<Instant>,
    /// When connecting or closing times out.
    pub(crate) deadline: Option<Instant>,
    /// The peer's `fwd_cnt` when its progress was requested.
    pub(crate) progress_base: u32,
    /// The time of its entry in the shard's timers.
    pub(crate) armed: Option<Instant>,
}

impl Connection {
    pub(crate) fn new(
        key: Key,
        socket_type: SocketType,
        state: State,
        first_count: u32,
        buf_alloc: u32,
        send_limit: u32,
    ) -> Connection {
        Connection {
            key,
            socket_type,
            state,
            rx: RxCredit::new(first_count, buf_alloc),
            tx: TxCredit::new(first_count, send_limit),
            messages: (socket_type == SocketType::SeqPacket).then(Box::default),
            control: ControlPackets::default(),
            shutdown_sent: Directions::NONE,
            pending: PendingEvents::default(),
            known_to_caller: false,
            port_ref: None,
            queue: None,
            has_queued: false,
            coalescing: false,
            wants_credit: false,
            rare: RareFlags::default(),
            delays_small: false,
            delay_over: false,
            delays_expired: 0,
            credit_requested: false,
            probe_wait: 0,
            probe_at: None,
            deadline: None,
            progress_base: 0,
            progress_pending: false,
            armed: None,
        }
    }

    pub(crate) fn save(&self, to: &mut Writer, now: Instant) {
        to.address(self.key.local);
        to.address(self.key.peer);
        to.u8(self.socket_type as u8);
        self.state.save(to);
        self.rx.save(to);
        self.tx.save(to);
        if self.socket_type == SocketType::SeqPacket {
            // One that was reset as stale has none.
            let none = Messages::default();
            self.messages.as_deref().unwrap_or(&none).save(to);
        }
        self.control.save(to);
        self.pending.save(to);
        to.bits([
            self.shutdown_sent.receive,
            self.shutdown_sent.send,
            self.coalescing,
            self.wants_credit,
            self.rare.wants_space(),
            self.rare.coalescing_enabled(),
            self.delays_small,
            self.delay_over,
        ]);
        to.bits([
            self.credit_requested,
            self.progress_pending,
            self.queue.is_some(),
        ]);
        to.u8(self.delays_expired);
        to.u32s([self.probe_wait, self.progress_base]);
        to.time(now, self.probe_at);
        to.time(now, self.deadline);
        if let Some(queue) = &self.queue {
            queue.save(to);
        }
    }

    /// The connection, without its port and its timer.
    pub(crate) fn load(from: &mut Reader<'_>, now: Instant) -> Result<Connection, RestoreError> {
        let (local, peer) = (from.address()?, from.address()?);
        let socket_type = match from.u8()? {
            1 => SocketType::Stream,
            2 => SocketType::SeqPacket,
            _ => return Err(RestoreError::Invalid("socket type")),
        };
        let state = State::load(from)?;
        let mut it = Connection::new(Key { local, peer }, socket_type, state, 0, 0, 0);
        it.rx = RxCredit::load(from)?;
        it.tx = TxCredit::load(from)?;
        if let Some(messages) = &mut it.messages {
            **messages = Messages::load(from)?;
        }
        it.control = ControlPackets::load(from, state == State::Closed)?;
        it.pending = PendingEvents::load(from, state)?;
        let (wants_space, coalescing_enabled, has_queue);
        [
            it.shutdown_sent.receive,
            it.shutdown_sent.send,
            it.coalescing,
            it.wants_credit,
            wants_space,
            coalescing_enabled,
            it.delays_small,
            it.delay_over,
        ] = from.bits()?;
        it.rare.set_wants_space(wants_space);
        it.rare.set_coalescing_enabled(coalescing_enabled);
        [it.credit_requested, it.progress_pending, has_queue] = from.bits()?;
        it.delays_expired = from.u8()?;
        [it.probe_wait, it.progress_base] = from.u32s()?;
        it.probe_at = from.time(now)?;
        it.deadline = from.time(now)?;
        if has_queue {
            let queue = SendQueue::load(from)?;
            it.has_queued = !queue.sends.is_empty();
            it.queue = Some(Box::new(queue));
        }
        if it.message_in_progress() {
            it.tx.reserve_packet();
        }
        it.known_to_caller = state != State::Incoming;
        if state == State::Closed {
            it.known_to_caller = it.pending.end.is_some();
            (it.probe_at, it.deadline) = (None, None);
            if !it.control.rst && it.pending.end.is_none() {
                return Err(RestoreError::Invalid("connection that has ended"));
            }
        }
        let sends = it.queue.iter().flat_map(|queue| &queue.sends);
        let coalesced = sends.map(|send| send.len);
        if it.coalescing && (it.queued() > 1 || coalesced.max() > Some(MAX_RESTORED_COALESCED)) {
            return Err(RestoreError::Invalid("coalesced send"));
        }
        Ok(it)
    }

    pub(crate) fn info(&self) -> FlowInfo {
        let (local, peer) = self.shutdown_directions();
        FlowInfo {
            local: self.key.local,
            peer: self.key.peer,
            socket_type: self.socket_type,
            state: self.state,
            peer_recv_shutdown: peer.receive,
            peer_send_shutdown: peer.send,
            local_recv_shutdown: local.receive,
            local_send_shutdown: local.send,
            send_credit: if self.may_send() {
                self.tx.available()
            } else {
                0
            },
            unsent: self.queue.as_ref().map_or(0, |queue| queue.unsent),
            unreleased: self.queue.as_ref().map_or(0, |queue| queue.unreleased),
            unread: self.rx.unread(),
            buf_alloc: self.rx.buf_alloc(),
            fwd_cnt: self.rx.fwd_cnt(),
            tx_cnt: self.tx.tx_cnt(),
            peer_buf_alloc: self.tx.peer_buf_alloc(),
            peer_fwd_cnt: self.tx.peer_fwd_cnt(),
            max_message_len: self.tx.limit(),
        }
    }

    /// Rule 5: updates the peer's credit from a header. False: `fwd_cnt` was invalid.
    #[inline]
    pub(crate) fn update_credit(&mut self, header: &Repr) -> bool {
        let sound = self.tx.update(header.buf_alloc, header.fwd_cnt);
        if let Some(messages) = &mut self.messages {
            let answer = header.op.get() == Op::CreditUpdate as u16;
            let (fwd_cnt, tx_cnt) = (self.tx.peer_fwd_cnt(), self.tx.tx_cnt());
            messages.tx.handle_fwd_cnt(fwd_cnt, tx_cnt, answer);
        }
        sound
    }

    /// The directions that we and the peer have shut down.
    pub(crate) fn shutdown_directions(&self) -> (Directions, Directions) {
        match self.state {
            State::Established { local, peer } => (local, peer),
            State::Closing { peer } => (Directions::BOTH, peer),
            State::Listen | State::Connecting | State::Incoming | State::Closed => {
                (Directions::NONE, Directions::NONE)
            }
        }
    }

    /// Whether the caller may send payload.
    #[inline]
    pub(crate) fn may_send(&self) -> bool {
        matches!(self.state, State::Established { local, peer } if !local.send && !peer.receive)
    }

    /// Whether a packet may be sent at once, if there is credit for it: nothing goes before it, and
    /// nothing waits for the credit that it leaves. Its header replaces a queued credit update, which
    /// then leaves a list: that takes longer.
    #[inline(always)] // every packet
    pub(crate) fn may_send_now(&self) -> bool {
        self.may_send()
            && !(self.control.response | self.control.credit_update)
            && self.has_no_waiter()
    }

    /// Whether payload from the peer is delivered, as the state table says.
    #[inline]
    pub(crate) fn may_receive(&self) -> bool {
        matches!(self.state, State::Established { local, peer } if !local.receive && !peer.send)
    }

    /// Whether no caller waits for credit or space, no send is queued, and no stall is in progress.
    /// Then a change of credit affects no event, control packet or list: `Shard::credit_changed`
    /// has no effect. (`probe_wait` and `control.credit_request` are set only in a stall, and so
    /// after `credit_requested`.) A connection that coalesces never takes the fast path.
    #[inline]
    pub(crate) fn has_no_waiter(&self) -> bool {
        let waits = self.wants_credit | self.credit_requested | self.has_queued;
        u8::from(waits) | self.rare.0 == 0
    }

    /// Queues a send behind the others; returns its number.
    pub(crate) fn enqueue(&mut self, send: Queued) -> u64 {
        let queue = self.queue.get_or_insert_default();
        let message = queue.front_message + queue.sends.len() as u64;
        queue.sends.push_back(send);
        queue.unsent += u64::from(send.len);
        self.has_queued = true;
        message
    }

    /// Number of queued sends.
    pub(crate) fn queued(&self) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.sends.len())
    }

    /// Whether a packet of a queued send can be sent now. Reservations go first.
    pub(crate) fn has_data(&self) -> bool {
        matches!(self.state, State::Established { .. })
            && self.has_queued
            && !self.control.response
            && !self.tx.has_reserved()
            && self.stall() == Stall::None
    }

    /// What stalls the next send: as a rule, of one more byte.
    pub(crate) fn stall(&self) -> Stall {
        let Some(messages) = &self.messages else {
            return match self.tx.stall() {
                Stall::None if self.delays_small && self.tx.nears_packet_limit() => Stall::Limit,
                stall => stall,
            };
        };
        if self.queued_message_begun() {
            return self.tx.stall_within();
        }
        if messages.tx.wants_empty && messages.tx.empty_limit_reached() {
            return Stall::Window;
        }
        self.tx.stall_for(messages.tx.wanted)
    }

    /// Whether a part of the first queued message was sent. The packet limit does not apply to its
    /// rest, because a receiver releases packets message by message.
    pub(crate) fn queued_message_begun(&self) -> bool {
        let begun = |queue: &SendQueue| queue.front_offset > 0;
        self.messages.is_some() && self.queue.as_deref().is_some_and(begun)
    }

    /// Whether a message sent in place was begun and not completed.
    pub(crate) fn message_in_progress(&self) -> bool {
        self.messages
            .as_ref()
            .is_some_and(|messages| messages.tx.in_progress)
    }

    /// Whether a message that has credit must wait for another message.
    pub(crate) fn message_blocked(&self) -> bool {
        self.messages.as_ref().is_some_and(|messages| {
            let tx = &messages.tx;
            tx.in_progress || (tx.wants_empty && tx.empty_limit_reached())
        })
    }

    /// Directions that the next SHUTDOWN shuts down. It follows all data. A close is sent as a
    /// whole, because a peer that learns early that we do not receive may reset what we still send.
    pub(crate) fn shutdown_due(&self) -> Directions {
        let State::Established { local, .. } = self.state else {
            return Directions::NONE;
        };
        let drained = !self.has_queued && !self.message_in_progress();
        if local.is_both() && !drained {
            return Directions::NONE;
        }
        Directions {
            receive: local.receive && !self.shutdown_sent.receive,
            send: local.send && !self.shutdown_sent.send && drained,
        }
    }

    /// Whether a control packet is queued and may be sent.
    pub(crate) fn has_control(&self) -> bool {
        self.control.any() || !self.shutdown_due().is_none()
    }

    /// Whether the peer needs credit updates: it is connected and may send.
    pub(crate) fn peer_may_send(&self) -> bool {
        matches!(self.state, State::Established { peer, .. } if !peer.send)
    }

    /// Whether a sender waits in a stall.
    pub(crate) fn is_stalled(&self) -> bool {
        matches!(self.state, State::Established { .. })
            && (self.wants_credit || self.has_queued)
            && self.stall() != Stall::None
    }

    /// The flags that a message may carry.
    #[inline]
    pub(crate) fn message_flags(&self, flags: u32) -> u32 {
        if self.socket_type == SocketType::SeqPacket {
            flags & (SEQ_EOM | SEQ_EOR)
        } else {
            0
        }
    }

    /// Drops queued sends: the peer will not receive them.
    pub(crate) fn drop_queue(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.front_message += queue.sends.len() as u64;
            queue.front_offset = 0;
            queue.unsent = 0;
            queue.sends = VecDeque::new();
        }
        self.has_queued = false;
        self.rare.set_wants_space(false);
    }

    /// A header with our credit, which makes a queued credit update unnecessary.
    #[inline]
    pub(crate) fn header(&mut self, op: Op, len: u32, flags: u32) -> Repr {
        let (buf_alloc, fwd_cnt) = self.rx.announce();
        self.control.credit_update = false;
        Repr {
            src: self.key.local,
            dst: self.key.peer,
            len,
            socket_type: self.socket_type.into(),
            op: op.into(),
            flags,
            buf_alloc,
            fwd_cnt,
        }
    }
}
