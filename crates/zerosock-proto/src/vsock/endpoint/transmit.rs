//! Output: headers to send, events, and timers.

use core::hash::BuildHasher;

use super::Shard;
use crate::time::{Duration, Instant};
use crate::vsock::connection::{End, LIMIT_PROBE, WINDOW_PROBE};
use crate::vsock::credit::Stall;
use crate::vsock::event::{Event, Span, Transmit};
use crate::vsock::state::{Directions, Input, State, transition};
use crate::wire::vsock::{MAX_PAYLOAD, Op, Repr, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

/// Most entries that an empty send queue keeps memory for.
const QUEUE_KEPT: usize = 16;

impl<S: BuildHasher> Shard<S> {
    /// The next packet for a buffer that holds `max_payload` bytes behind the header: control
    /// packets first, then queued sends, one packet of each connection in turn. A returned packet
    /// counts as sent: send headers, also those of [`Shard::commit`], in the order in which they
    /// were returned.
    pub fn poll_transmit(&mut self, now: Instant, max_payload: u32) -> Option<Transmit> {
        if let Some(header) = self.resets.pop_front() {
            self.stats.resets_sent += 1;
            return Some(Transmit { header, span: None });
        }
        while let Some(index) = self.control.front() {
            if let Some(header) = self.next_control(now, index) {
                return Some(Transmit { header, span: None });
            }
            self.control.remove(&mut self.table.slots, index);
        }
        if max_payload == 0 {
            return None;
        }
        let index = self.data.front()?;
        self.next_data(now, index, max_payload)
    }

    /// The next control packet of a connection, in order of precedence.
    fn next_control(&mut self, now: Instant, index: u32) -> Option<Repr> {
        let connection = self.table.at(index)?;
        let header;
        if connection.control.rst {
            connection.control.rst = false;
            let mut rst = connection.header(Op::Rst, 0, 0);
            if connection.control.no_socket {
                (rst.buf_alloc, rst.fwd_cnt) = (0, 0);
            }
            header = rst;
            self.stats.resets_sent += 1;
            self.table.detach(index);
            self.update_lists(index);
            self.free_if_over(index);
            return Some(header);
        } else if connection.control.request {
            connection.control.request = false;
            header = connection.header(Op::Request, 0, 0);
        } else if connection.control.response {
            connection.control.response = false;
            header = connection.header(Op::Response, 0, 0);
            self.credit_changed(index);
        } else if !connection.shutdown_due().is_none() {
            let how = connection.shutdown_sent.and(connection.shutdown_due());
            connection.shutdown_sent = how;
            header = connection.header(Op::Shutdown, 0, shutdown_flags(how));
            if how.is_both() {
                connection.control = Default::default();
                connection.probe_at = None;
                let (next, action) = transition(connection.state, Input::ShutdownSent);
                connection.deadline = Some(now + self.config.close_timeout);
                self.apply_action(now, index, next, action);
                self.rearm(index);
            }
        } else if connection.control.moved {
            connection.control.moved = false;
            let pair = self.declines_moves.unwrap_or_default();
            header = connection.header(Op::Moved, 0, pair.into());
        } else if connection.control.credit_update {
            header = connection.header(Op::CreditUpdate, 0, 0);
        } else if connection.control.credit_request {
            connection.control.credit_request = false;
            header = connection.header(Op::CreditRequest, 0, 0);
            if let Some(messages) = &mut connection.messages {
                messages.tx.handle_request_sent();
            }
            if connection.is_stalled() {
                let (first, most) = match connection.stall() {
                    Stall::Limit => LIMIT_PROBE,
                    Stall::Window | Stall::None => WINDOW_PROBE,
                };
                let wait = if connection.delays_small {
                    // 2 ms, 4 ms, and so on
                    (first << connection.delays_expired.min(16)).min(most)
                } else {
                    connection.probe_wait.clamp(first, most)
                };
                let probe = now + Duration::from_millis(wait.into());
                connection.probe_at = Some(connection.probe_at.map_or(probe, |at| at.min(probe)));
                connection.probe_wait = (wait * 2).min(most);
                self.rearm(index);
            }
        } else {
            return None;
        }
        self.update_lists(index);
        Some(header)
    }

    /// The next packet of a connection's queued sends.
    fn next_data(&mut self, now: Instant, index: u32, max_payload: u32) -> Option<Transmit> {
        self.data.remove(&mut self.table.slots, index);
        let flow = self.table.id(index);
        let connection = self.table.at(index)?;
        let cuts_message = connection.queued_message_begun();
        let queue = connection.queue.as_mut()?;
        let front = *queue.sends.front()?;
        let offset = queue.front_offset;
        let left = front.len - offset;
        let most = left.min(max_payload).min(MAX_PAYLOAD);
        let len = if cuts_message {
            connection.tx.send_within(most)
        } else {
            connection.tx.send(most)
        };
        if len == 0 {
            return None;
        }
        // Only the last packet of a message carries EOM and EOR.
        let flags = if len == left { front.flags } else { 0 };
        let span = Span {
            flow,
            message: queue.front_message,
            offset,
            len,
            flags,
        };
        if len == left {
            queue.sends.pop_front();
            queue.front_message += 1;
            queue.front_offset = 0;
            if queue.sends.is_empty() && queue.sends.capacity() > QUEUE_KEPT {
                queue.sends.shrink_to(QUEUE_KEPT);
            }
        } else {
            queue.front_offset += len;
        }
        queue.unsent -= u64::from(len);
        queue.unreleased += u64::from(len);
        connection.has_queued = !queue.sends.is_empty();
        connection.coalescing &= connection.has_queued;
        if core::mem::take(&mut connection.delay_over) {
            connection.delays_expired = connection.delays_expired.saturating_add(1);
        } else if !connection.tx.nears_packet_limit() {
            connection.delays_expired = 0;
        }
        let header = connection.header(Op::Rw, len, flags);
        self.stats.sent_bytes += u64::from(len);
        // A closing connection has made progress.
        if matches!(connection.state, State::Established { local, .. } if local.is_both()) {
            connection.deadline = Some(now + self.config.close_timeout);
            self.rearm(index);
        }
        self.credit_changed(index);
        Some(Transmit {
            header,
            span: Some(span),
        })
    }

    /// The next event, if any.
    pub fn poll_event(&mut self) -> Option<Event> {
        while let Some(index) = self.events.front() {
            if let Some(event) = self.next_event(index) {
                return Some(event);
            }
            self.events.remove(&mut self.table.slots, index);
        }
        None
    }

    fn next_event(&mut self, index: u32) -> Option<Event> {
        let flow = self.table.id(index);
        let connection = self.table.at(index)?;
        let pending = &mut connection.pending;
        if core::mem::take(&mut pending.incoming) {
            connection.known_to_caller = true;
            return Some(Event::Incoming {
                flow,
                local: connection.key.local,
                peer: connection.key.peer,
                socket_type: connection.socket_type,
            });
        }
        if core::mem::take(&mut pending.connected) {
            return Some(Event::Connected { flow });
        }
        if core::mem::take(&mut pending.peer_shutdown) {
            let (_, Directions { receive, send }) = connection.shutdown_directions();
            return Some(Event::PeerShutdown {
                flow,
                receive,
                send,
            });
        }
        if core::mem::take(&mut pending.writable) {
            return Some(Event::Writable { flow });
        }
        let end = pending.end.take()?;
        self.events.remove(&mut self.table.slots, index);
        self.free_if_over(index);
        Some(match end {
            End::Refused(reason) => Event::Refused { flow, reason },
            End::Closed(reason) => Event::Closed { flow, reason },
        })
    }

    /// When to call [`Shard::handle_timeout`] at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|&(at, _)| at)
    }

    /// Handles every timer that is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(&(at, index)) = self.timers.first() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            let Some(connection) = self.table.at(index) else {
                continue;
            };
            connection.armed = None;
            if connection.deadline.is_some_and(|deadline| deadline <= now) {
                connection.deadline = None;
                let (next, action) = transition(connection.state, Input::TimedOut);
                self.apply_action(now, index, next, action);
            } else if connection.probe_at.is_some_and(|probe| probe <= now) {
                connection.probe_at = None;
                self.end_delay(index);
                self.request_credit(index);
            }
            self.rearm(index);
        }
    }

    /// The payload of a span is no longer needed: the packet has been sent, or the connection has
    /// ended. Spans may be released in any order; stale ones have no effect.
    pub fn handle_released(&mut self, span: Span) {
        let connection = self.table.get_mut(span.flow);
        if let Some(queue) = connection.and_then(|connection| connection.queue.as_mut()) {
            queue.unreleased = queue.unreleased.saturating_sub(u64::from(span.len));
        }
    }
}

const fn shutdown_flags(how: Directions) -> u32 {
    (if how.receive { SHUTDOWN_RECEIVE } else { 0 }) | (if how.send { SHUTDOWN_SEND } else { 0 })
}
