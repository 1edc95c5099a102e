//! One connection: what is known about it, and nothing of what it carries.

use std::collections::VecDeque;

use super::credit::{RxCredit, Stall, TxCredit};
use super::event::{CloseReason, RefuseReason};
use super::messages::Messages;
use super::ports::PortRef;
use super::state::{How, State};
use crate::addr::Address;
use crate::time::Instant;
use crate::wire::vsock::{Op, Repr, SEQ_EOM, SEQ_EOR, SocketType};

/// Names a connection of one shard, and no other that is later at its place.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub struct FlowId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl FlowId {
    /// The connection's place, small and reused: for side tables, which keep
    /// the whole id beside what they store.
    #[inline]
    pub const fn index(self) -> usize {
        self.index as usize
    }
}

/// What can be asked about a connection.
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
    /// The peer will receive no more.
    pub peer_recv_shutdown: bool,
    /// The peer will send no more.
    pub peer_send_shutdown: bool,
    /// We will receive no more.
    pub local_recv_shutdown: bool,
    /// We will send no more.
    pub local_send_shutdown: bool,
    /// Bytes that may be sent now: credit neither used nor reserved.
    pub send_credit: u32,
    /// Bytes of queued sends not yet cut into packets.
    pub unsent: u64,
    /// Bytes of spans given out and not yet released.
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
    /// The longest message that may be sent, in bytes: the peer's buffer, and our own bound on
    /// what is under way.
    pub max_message_len: u32,
}

/// Credit and a packet's place, taken before the header exists. It is to be
/// committed or cancelled: one that is dropped keeps its credit, and keeps
/// queued sends waiting, until the connection ends.
#[derive(Debug)]
#[must_use = "a reservation holds credit until it is committed or cancelled"]
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

/// Credit for a whole message, taken before its first byte leaves. It is to be ended
/// ([`commit_part`](super::Shard::commit_part) with an end) or cancelled: one that is dropped keeps
/// its credit, and one that was begun keeps all others waiting, until the connection ends.
#[derive(Debug)]
#[must_use = "a message holds credit until it is ended or cancelled"]
pub struct MessageReservation {
    pub(crate) flow: FlowId,
    pub(crate) remaining: u32,
    /// A part has left.
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

/// What finds a connection.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub(crate) struct Key {
    pub(crate) local: Address,
    pub(crate) peer: Address,
}

impl Key {
    /// Equality, without a branch for each of the four numbers.
    #[inline]
    pub(crate) fn is(&self, other: &Key) -> bool {
        let ends =
            |a: Address, b: Address| (a.cid.get() ^ b.cid.get()) | (a.port.get() ^ b.port.get());
        ends(self.local, other.local) | ends(self.peer, other.peer) == 0
    }
}

/// Control packets waiting to be sent: at most one of each kind.
#[derive(Copy, Clone, Default, Debug)]
pub(crate) struct Control {
    pub(crate) rst: bool,
    /// The RST is for no socket, as there has been no connection: it has no credit to tell.
    pub(crate) no_socket: bool,
    pub(crate) request: bool,
    pub(crate) response: bool,
    pub(crate) credit_update: bool,
    pub(crate) credit_request: bool,
}

impl Control {
    pub(crate) fn any(self) -> bool {
        self.rst || self.request || self.response || self.credit_update || self.credit_request
    }
}

/// Whether a connection is on its way to another queue pair (docs/queue-pairs.md).
#[derive(Copy, Clone, Eq, PartialEq, Default, Debug)]
pub(crate) enum MoveState {
    #[default]
    No,
    /// A driver's: MOVE to that pair is to be sent, and nothing behind it.
    RequestQueued(u16),
    /// A driver's: MOVE has left.
    RequestSent,
    /// A device's: MOVE has come, and its caller is to say what becomes of it.
    Requested,
    /// A device's: it stays at that pair, where it is, and MOVED is to say so.
    DeclineQueued(u16),
    /// A device's: it was moved, and its driver has not been heard of here.
    AwaitingDriver,
}

/// Events waiting to be polled: at most one of each kind.
#[derive(Copy, Clone, Default, Debug)]
pub(crate) struct Pending {
    pub(crate) incoming: bool,
    pub(crate) connected: bool,
    pub(crate) peer_shutdown: bool,
    pub(crate) writable: bool,
    pub(crate) end: Option<End>,
}

impl Pending {
    pub(crate) fn any(self) -> bool {
        self.incoming || self.connected || self.peer_shutdown || self.writable || self.end.is_some()
    }
}

/// How a connection ended.
#[derive(Copy, Clone, Debug)]
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

/// First and longest wait, in milliseconds, before a sender that a limit of its own stalls asks
/// again.
pub(crate) const LIMIT_PROBE: (u32, u32) = (2, 1000);
/// First and longest wait, in milliseconds, before a sender whose peer's buffer is full asks again. The peer is to
/// tell of itself when that changes; but Linux before 6.8 does not when its reader waits for more
/// than what is left (SO_RCVLOWAT), and then both wait for ever.
pub(crate) const WINDOW_PROBE: (u32, u32) = (100, 8000);

/// Queued sends, and the spans cut from them. Their payload is the caller's.
#[derive(Debug, Default)]
pub(crate) struct SendQueue {
    pub(crate) sends: VecDeque<Queued>,
    /// The id of the message at the front of the queue, or of the next one.
    pub(crate) front_message: u64,
    /// Bytes of it already cut.
    pub(crate) front_offset: u32,
    pub(crate) unsent: u64,
    pub(crate) unreleased: u64,
}

/// What few connections are.
#[derive(Copy, Clone, Debug, Default)]
pub(crate) struct RareFlags(u8);

impl RareFlags {
    /// The caller was told QueueFull; or that a message for which it has credit is to wait.
    const WANTS_SPACE: u8 = 1;
    /// Small pieces are to be gathered when it is short of packets.
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

/// A connection. At rest it owns no memory but itself, unless its user queues sends: a hundred
/// thousand of them is a number that a device is to bear, so what few have is behind a pointer.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) key: Key,
    pub(crate) socket_type: SocketType,
    pub(crate) state: State,
    pub(crate) rx: RxCredit,
    pub(crate) tx: TxCredit,
    /// What a SEQPACKET connection has beside.
    pub(crate) messages: Option<Box<Messages>>,
    pub(crate) control: Control,
    /// The flags of the last SHUTDOWN that left.
    pub(crate) shutdown_sent: How,
    pub(crate) pending: Pending,
    pub(crate) move_state: MoveState,
    /// Whether the caller knows the id.
    pub(crate) known_to_caller: bool,
    pub(crate) port_ref: Option<PortRef>,

    /// Made by the first queued send, and kept.
    pub(crate) queue: Option<Box<SendQueue>>,
    /// Whether there are sends in it, so that packets need not look.
    pub(crate) has_queued: bool,
    /// Whether the queue is of such.
    pub(crate) coalescing: bool,

    /// The caller was told NoCredit.
    pub(crate) wants_credit: bool,
    /// What few connections are; one byte, because every packet asks whether it is any of them.
    pub(crate) rare: RareFlags,
    /// The caller was told to wait until it has more to send, or the peer has read.
    pub(crate) delays_small: bool,
    /// It has waited for long enough: the next packet may be small.
    pub(crate) delay_over: bool,
    /// How often in a row it had to.
    pub(crate) delays_expired: u8,
    /// This stall's CREDIT_REQUEST has been queued.
    pub(crate) credit_requested: bool,
    /// The peer was asked what it has consumed, and has not answered since.
    pub(crate) progress_pending: bool,
    /// In milliseconds.
    pub(crate) probe_wait: u32,
    pub(crate) probe_at: Option<Instant>,
    /// Connecting, or closing, ends then.
    pub(crate) deadline: Option<Instant>,
    /// What the peer had consumed when it was asked ([`progress_pending`](Self::progress_pending)).
    pub(crate) progress_base: u32,
    /// The entry in the shard's timers.
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
            control: Control::default(),
            shutdown_sent: How::NONE,
            pending: Pending::default(),
            move_state: MoveState::No,
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

    /// Rule 5: takes the peer's credit from a header. False: it made no sense.
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

    /// Directions that we, and the peer, have shut down.
    pub(crate) fn shutdown_directions(&self) -> (How, How) {
        match self.state {
            State::Established { local, peer } => (local, peer),
            State::Closing { peer } => (How::BOTH, peer),
            State::Listen | State::Connecting | State::Incoming | State::Closed => {
                (How::NONE, How::NONE)
            }
        }
    }

    /// Whether new payload may be taken from the caller.
    #[inline]
    pub(crate) fn may_send(&self) -> bool {
        matches!(self.state, State::Established { local, peer } if !local.send && !peer.receive)
    }

    /// Whether payload from the peer is to be delivered, as the state table says it.
    #[inline]
    pub(crate) fn may_receive(&self) -> bool {
        matches!(self.state, State::Established { local, peer } if !local.receive && !peer.send)
    }

    /// Whether nothing waits for credit or space: no caller was told to, no send is queued, and no
    /// stall has been seen whose end would have to be. Then a change of credit changes neither an
    /// event, nor a control packet, nor a place in a list: `Shard::credit_changed` has no effect.
    /// (`probe_wait` and `control.credit_request` are set in a stall only, and so behind `credit_requested`.) One
    /// that coalesces never goes straight.
    #[inline]
    pub(crate) fn has_no_waiter(&self) -> bool {
        let waits = self.wants_credit | self.credit_requested | self.has_queued;
        u8::from(waits) | self.rare.0 == 0
    }

    /// Queues a send behind the others; its number.
    pub(crate) fn enqueue(&mut self, send: Queued) -> u64 {
        let queue = self.queue.get_or_insert_default();
        let message = queue.front_message + queue.sends.len() as u64;
        queue.sends.push_back(send);
        queue.unsent += u64::from(send.len);
        self.has_queued = true;
        message
    }

    /// How many sends are queued.
    pub(crate) fn queued(&self) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.sends.len())
    }

    /// Whether a queued send can be cut now. A reservation was there first.
    pub(crate) fn has_data(&self) -> bool {
        matches!(self.state, State::Established { .. })
            && self.has_queued
            && !self.control.response
            && !self.tx.has_reserved()
            && self.stall() == Stall::None
    }

    /// What is in the way of what is wanted next: as a rule, of one more byte.
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

    /// Whether a message of the queue has left in part. It ends whatever the bound on packets, which
    /// a receiver releases by messages.
    pub(crate) fn queued_message_begun(&self) -> bool {
        let begun = |queue: &SendQueue| queue.front_offset > 0;
        self.messages.is_some() && self.queue.as_deref().is_some_and(begun)
    }

    /// Whether a part of a message that is not the last has left.
    pub(crate) fn message_in_progress(&self) -> bool {
        self.messages
            .as_ref()
            .is_some_and(|messages| messages.tx.in_progress)
    }

    /// Whether something other than credit is in the way of a message for which there is credit.
    pub(crate) fn message_blocked(&self) -> bool {
        self.messages.as_ref().is_some_and(|messages| {
            let tx = &messages.tx;
            tx.in_progress || (tx.wants_empty && tx.empty_limit_reached())
        })
    }

    /// Directions that a SHUTDOWN should tell the peer about now. It stands
    /// behind all data: one that closes waits as a whole, because a peer that
    /// learns early that we do not receive may reset what we still send.
    pub(crate) fn shutdown_due(&self) -> How {
        let State::Established { local, .. } = self.state else {
            return How::NONE;
        };
        let drained = !self.has_queued && !self.message_in_progress();
        if local.is_both() && !drained {
            return How::NONE;
        }
        How {
            receive: local.receive && !self.shutdown_sent.receive,
            send: local.send && !self.shutdown_sent.send && drained,
        }
    }

    /// Whether a control packet waits, and may be sent.
    pub(crate) fn has_control(&self) -> bool {
        match self.move_state {
            MoveState::RequestQueued(_) | MoveState::DeclineQueued(_) => true,
            MoveState::No | MoveState::Requested => {
                self.control.any() || !self.shutdown_due().is_none()
            }
            // The end of a connection overtakes its move.
            MoveState::RequestSent | MoveState::AwaitingDriver => self.control.rst,
        }
    }

    /// Whether the peer is to be told of room: it is there, and may send.
    pub(crate) fn peer_may_send(&self) -> bool {
        matches!(self.state, State::Established { peer, .. } if !peer.send)
    }

    /// Whether a credit stall holds somebody up.
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

    /// Forgets queued sends: nobody will receive them.
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

    /// A header with our credit, which need not be told again.
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
