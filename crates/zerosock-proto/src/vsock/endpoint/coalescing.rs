//! Delays and coalesces small packets when the peer's packet limit is near.
//!
//! Linux counts the packets that its receiver has not read, and resets a connection that has too
//! many, however small they are ([`PACKET_OVERHEAD`]). So [`TxCredit`] counts packets as well as
//! bytes, and keeps a part of the limit for packets that are not small: as many as fill the peer's
//! buffer. Then a reader that waits for a full buffer gets one. A sender that reads from a socket
//! can *delay* a small packet: it leaves the bytes where they are until there are more. The writes
//! of an application cannot be left anywhere: they are *coalesced* into one queued send.
//!
//! # Invariants
//! - A delayed sender gets [`Event::Writable`](crate::vsock::Event::Writable) when the peer has
//!   read or a timer has fired, and may then send what it has.
//! - Coalesced bytes are sent at the same times, and before SHUTDOWN.
//!
//! [`PACKET_OVERHEAD`]: crate::vsock::credit::PACKET_OVERHEAD
//! [`TxCredit`]: crate::vsock::credit::TxCredit

use core::hash::BuildHasher;

use super::Shard;
use crate::vsock::connection::{Connection, Queued};
use crate::vsock::credit::SMALL_PACKET;
use crate::vsock::flow_id::FlowId;
use crate::wire::vsock::SocketType;

impl<S: BuildHasher> Shard<S> {
    /// Whether so many packets are in flight that small ones should wait for more bytes; then
    /// [`Shard::should_delay`] decides.
    #[inline]
    pub fn nears_packet_limit(&self, flow: FlowId) -> bool {
        let connection = self.table.get(flow);
        connection.is_some_and(|connection| connection.tx.nears_packet_limit())
    }

    /// Whether `bytes` bytes that are ready to send should wait for more, to go in one packet. If
    /// so, [`Event::Writable`](crate::vsock::Event::Writable) follows when the peer has read, or
    /// after 2 ms, doubled each time; then they may be sent as they are. Call it again when there
    /// are more bytes. For streams that can leave bytes at their source.
    pub fn should_delay(&mut self, flow: FlowId, bytes: u32) -> bool {
        let Some(connection) = self.table.get_mut(flow) else {
            return false;
        };
        if !connection.tx.nears_packet_limit() {
            (connection.delays_expired, connection.delay_over) = (0, false);
            return false;
        }
        // A small window makes small packets too.
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

    /// Sets whether small writes of a stream, sent with [`send_now`](Self::send_now), are coalesced
    /// while the packet limit is near. Initially not: each write is a packet as long as the limit
    /// allows. Disabling it flushes coalesced bytes.
    pub fn set_coalescing(&mut self, flow: FlowId, coalesces: bool) {
        if let Some(connection) = self.table.get_mut(flow) {
            connection.rare.set_coalescing_enabled(coalesces);
            if !coalesces {
                self.flush_coalesced(flow);
            }
        }
    }

    /// Whether `len` bytes that the caller sends now should be coalesced instead.
    pub fn should_coalesce(&self, flow: FlowId, len: u32) -> bool {
        let Some(connection) = self.table.get(flow) else {
            return false;
        };
        let few = (1..SMALL_PACKET).contains(&len) && connection.tx.nears_packet_limit();
        can_coalesce(connection)
            && (connection.coalescing || connection.rare.coalescing_enabled() && few)
    }

    /// Takes up to `len` bytes of a stream into a queued send that grows until it has
    /// [`SMALL_PACKET`] bytes. It is sent earlier when the peer has read, after 2 ms (doubled each
    /// time), when the connection is shut down, or by [`flush_coalesced`](Self::flush_coalesced).
    /// Returns how many bytes it takes: as many as fit one packet and have credit. The caller keeps
    /// the bytes and puts them, in order, behind the headers that [`Shard::poll_transmit`] returns
    /// ([`Shard::has_data`]). After 0 [`Event::Writable`](crate::vsock::Event::Writable) follows.
    pub fn coalesce(&mut self, flow: FlowId, len: u32) -> u32 {
        let Some(connection) = self.table.get_mut(flow).filter(|it| can_coalesce(it)) else {
            return 0;
        };
        let unsent = connection.queue.as_ref().map_or(0, |queue| queue.unsent);
        let unsent = u32::try_from(unsent).unwrap_or(u32::MAX);
        let space = SMALL_PACKET
            .min(connection.tx.available())
            .saturating_sub(unsent);
        let len = len.min(space);
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

    /// Whether [`coalesce`](Self::coalesce) would take another byte; `None`: nothing is coalesced.
    /// After `false` [`Event::Writable`](crate::vsock::Event::Writable) follows.
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

    /// Sends coalesced bytes as soon as there is credit.
    pub fn flush_coalesced(&mut self, flow: FlowId) {
        if let Some(connection) = self.table.get_mut(flow).filter(|it| it.coalescing) {
            (connection.delays_small, connection.delay_over) = (false, true);
            self.credit_changed(flow.index);
        }
    }

    /// Ends the delay of a small packet, if one is running.
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

/// Whether bytes of a connection may be coalesced. Not behind queued sends or while a reservation
/// is outstanding, which go first.
fn can_coalesce(connection: &Connection) -> bool {
    connection.socket_type == SocketType::Stream
        && connection.may_send()
        && !connection.control.response
        && !connection.tx.has_reserved()
        && (connection.coalescing || !connection.has_queued && connection.tx.available() > 0)
}
