//! Small packets when the peer has room for few: they wait for each other.
//!
//! Linux counts the packets that its receiver has not read, and resets a connection that has too
//! many, however small they are ([`PACKET_OVERHEAD`]). So packets are counted as well as bytes
//! ([`TxCredit`]), and a third of those that there is room for is kept for packets that are not small:
//! as many as it takes to fill the buffer. A reader that waits for a full one gets it, as long as its
//! sender can leave small pieces where they are until there are more. What a program writes cannot be
//! left anywhere: it is *gathered*, as queued sends that become one, until it is not small any more.
//! What must hold: who holds back is told, by the peer's reading or by a timer, and may then send what
//! it has; what is gathered leaves at the same times, and before an end.
//!
//! [`PACKET_OVERHEAD`]: crate::vsock::credit::PACKET_OVERHEAD
//! [`TxCredit`]: crate::vsock::credit::TxCredit

use core::hash::BuildHasher;

use super::Shard;
use crate::vsock::connection::{Connection, FlowId, MoveState, Queued};
use crate::vsock::credit::SMALL_PACKET;
use crate::wire::vsock::SocketType;

impl<S: BuildHasher> Shard<S> {
    /// Whether so many packets are under way to the peer that small ones should wait for each
    /// other; then [`Shard::should_delay`] decides.
    #[inline]
    pub fn nears_packet_limit(&self, flow: FlowId) -> bool {
        let connection = self.table.get(flow);
        connection.is_some_and(|connection| connection.tx.nears_packet_limit())
    }

    /// Whether `bytes` bytes that are ready to be sent should wait for more to go with them in one
    /// packet. If so, [`Event::Writable`](crate::vsock::Event::Writable) follows: when the peer has
    /// read, or after 2 ms, and after twice as long each time, when they may go as they are. To be
    /// asked again when there are more. For streams whose bytes can be left where they come from.
    pub fn should_delay(&mut self, flow: FlowId, bytes: u32) -> bool {
        let Some(connection) = self.table.get_mut(flow) else {
            return false;
        };
        if !connection.tx.nears_packet_limit() {
            (connection.delays_expired, connection.delay_over) = (0, false);
            return false;
        }
        // A window that opens by little makes small packets too.
        if bytes.min(connection.tx.available()) >= SMALL_PACKET
            || !connection.may_send()
            || connection.messages.is_some()
        {
            connection.delays_small = false;
            return false;
        }
        if core::mem::take(&mut connection.delay_over) {
            connection.delays_expired = connection.delays_expired.saturating_add(1);
            return false;
        }
        connection.delays_small = true;
        connection.wants_credit = true;
        self.request_credit(flow.index);
        true
    }

    /// Whether small pieces of a stream, sent with [`send_now`](Self::send_now), are to be gathered
    /// when so many packets are under way that they should wait for each other. At first not: each is
    /// a packet of its own, as long as there is room for packets. What is gathered when that ends is
    /// let go.
    pub fn set_coalescing(&mut self, flow: FlowId, coalesces: bool) {
        if let Some(connection) = self.table.get_mut(flow) {
            connection.rare.set_coalescing_enabled(coalesces);
            if !coalesces {
                self.flush_coalesced(flow);
            }
        }
    }

    /// Whether `len` bytes that are to be sent at once should be gathered instead.
    pub(super) fn should_coalesce(&self, flow: FlowId, len: u32) -> bool {
        let Some(connection) = self.table.get(flow) else {
            return false;
        };
        let few = (1..SMALL_PACKET).contains(&len) && connection.tx.nears_packet_limit();
        can_coalesce(connection)
            && (connection.coalescing || connection.rare.coalescing_enabled() && few)
    }

    /// Takes up to `len` bytes of a stream, as a queued send, to leave with those that follow: as
    /// soon as they are [`SMALL_PACKET`] together, and before that when the peer has read, or after 2 ms and
    /// twice as long each time, or when the connection is shut down, or is [let go](Self::flush_coalesced).
    /// How many bytes it takes: what with those before it makes one packet, and has credit. The
    /// caller keeps them, and puts them behind the headers that [`Shard::poll_transmit`] returns
    /// ([`Shard::has_data`]), in their order. After 0
    /// [`Event::Writable`](crate::vsock::Event::Writable) follows.
    pub fn coalesce(&mut self, flow: FlowId, len: u32) -> u32 {
        let Some(connection) = self.table.get_mut(flow).filter(|it| can_coalesce(it)) else {
            return 0;
        };
        let unsent = connection.queue.as_ref().map_or(0, |queue| queue.unsent);
        let unsent = u32::try_from(unsent).unwrap_or(u32::MAX);
        let room = SMALL_PACKET
            .min(connection.tx.available())
            .saturating_sub(unsent);
        let len = len.min(room);
        if len == 0 {
            connection.wants_credit = true;
            self.request_credit(flow.index);
            return 0;
        }
        let queue = connection.queue.as_mut();
        match queue.and_then(|queue| Some((queue.sends.back_mut()?, &mut queue.unsent))) {
            Some((all, unsent)) => {
                all.len += len;
                *unsent += u64::from(len);
            }
            None => {
                connection.enqueue(Queued { len, flags: 0 });
                connection.coalescing = true;
            }
        }
        connection.delays_small = unsent + len < SMALL_PACKET && !connection.delay_over;
        self.credit_changed(flow.index);
        len
    }

    /// Whether [`coalesce`](Self::coalesce) would take a byte behind those that it has; `None`: it has
    /// none. After `false` [`Event::Writable`](crate::vsock::Event::Writable) follows.
    pub fn can_coalesce_more(&mut self, flow: FlowId) -> Option<bool> {
        let connection = self.table.get_mut(flow).filter(|it| it.coalescing)?;
        let unsent = connection.queue.as_ref().map_or(0, |queue| queue.unsent);
        let most = SMALL_PACKET.min(connection.tx.available());
        let more = !can_coalesce(connection) || unsent < u64::from(most);
        if !more {
            connection.wants_credit = true;
            self.request_credit(flow.index);
        }
        Some(more)
    }

    /// What is gathered of a connection waits for nothing but credit any more.
    pub fn flush_coalesced(&mut self, flow: FlowId) {
        if let Some(connection) = self.table.get_mut(flow).filter(|it| it.coalescing) {
            (connection.delays_small, connection.delay_over) = (false, true);
            self.credit_changed(flow.index);
        }
    }

    /// Who holds back has waited for long enough, if it does.
    pub(super) fn end_delay(&mut self, index: u32) {
        let Some(connection) = self.table.at(index) else {
            return;
        };
        if connection.delays_small && connection.is_stalled() && connection.tx.available() > 0 {
            (connection.delays_small, connection.delay_over) = (false, true);
            self.credit_changed(index);
        }
    }
}

/// Whether bytes of a connection may be queued to be sent with others. Not behind sends that are queued
/// or while a reservation is out, which go first, nor while it is moved.
fn can_coalesce(connection: &Connection) -> bool {
    connection.socket_type == SocketType::Stream
        && connection.may_send()
        && connection.move_state == MoveState::No
        && !connection.control.response
        && !connection.tx.has_reserved()
        && (connection.coalescing || !connection.has_queued && connection.tx.available() > 0)
}
