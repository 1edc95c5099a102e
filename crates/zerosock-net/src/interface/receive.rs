//! The receive queue: every buffer is posted, part of a frame on lease, or part of a frame that the
//! device has not completed.
//!
//! # Invariants
//! - The number of a buffer is the token of its chain. `DriverQueue` returns only tokens of chains that
//!   were posted.
//! - A length, a number of buffers or a header is read once, into a private copy, and checked.
//! - Nothing is allocated after construction.

use std::cell::RefCell;
use std::sync::Arc;

use zerosock_proto::wire::net::{ETHERNET_LEN, HEADER_LEN, Header, MAX_FRAME, Offloads, Repr};
use zerosock_ring::{DriverQueue, FixedChain, GuestSlice, Memory, Piece, Trust, Used};
use zerosock_vhost_user::frontend::QueueEventFds;

use super::config::InterfaceConnectError;
use super::failure::InterfaceFailure;
use super::link::InterfaceTerms;
use super::memory::{HEADER, Layout};
use super::parts::{Chained, Parts};
use super::stats::ReceiveStats;
use crate::header;

/// Index of the receive queue.
pub(super) const RECEIVE: usize = 0;
/// How many buffers ahead memory is prefetched.
const PREFETCH_AHEAD: u16 = 4;
/// Returned buffers that are published together, if the device has many others.
const BATCH: u16 = 32;

/// The receive queue and its buffers.
#[derive(Debug)]
pub(super) struct InterfaceReceiver {
    memory: Arc<Memory>,
    event_fds: Arc<QueueEventFds>,
    pieces: Box<[Piece]>,
    parts: Parts,
    mergeable: bool,
    offloads: Offloads,
    pub(super) trust: Option<Trust>,
    state: RefCell<State>,
}

#[derive(Debug)]
struct State {
    queue: DriverQueue,
    chains: Box<[FixedChain]>,
    /// Buffers posted and not published yet.
    unpublished: u16,
    /// The frame of which not all buffers have come.
    partial: Option<Partial>,
    /// Notifications were requested, and nothing was received since.
    armed: bool,
    stats: ReceiveStats,
}

/// A frame that was received.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received<'m> {
    pub(super) buffers: Chained,
    /// The bytes in the first buffer.
    pub(super) first: GuestSlice<'m>,
    /// Bytes of the frame.
    pub(super) len: u32,
    pub(super) repr: Repr,
}

#[derive(Clone, Copy, Debug)]
struct Partial {
    header: Header,
    /// Those that have come.
    buffers: Chained,
    /// Bytes of the frame in the first of them.
    first_len: u32,
    last: u16,
    /// Buffers that are still to come, not 0.
    missing: u16,
    /// Bytes of the frame so far.
    len: u32,
}

impl InterfaceReceiver {
    /// A new ring, with every buffer posted.
    pub(super) fn new(
        memory: &Arc<Memory>,
        layout: &Layout,
        terms: &InterfaceTerms,
        trust: Option<Trust>,
        event_fds: &Arc<QueueEventFds>,
    ) -> Result<InterfaceReceiver, InterfaceConnectError> {
        let ring = layout.rings[RECEIVE];
        let mut queue = DriverQueue::new(Arc::clone(memory), ring, terms.event_idx)?;
        let (mut pieces, mut chains) = (Vec::new(), Vec::new());
        layout.receive.translate(memory, &mut pieces)?;
        layout.receive.set_chains(&mut queue, true, &mut chains)?;
        for chain in &chains {
            queue.add_fixed(*chain)?;
        }
        // The device has not started yet and needs no kick.
        let _ = queue.publish();
        Ok(InterfaceReceiver {
            memory: Arc::clone(memory),
            event_fds: Arc::clone(event_fds),
            parts: Parts::new(pieces.len()),
            pieces: pieces.into(),
            mergeable: terms.mergeable,
            offloads: terms.from_device,
            trust,
            state: RefCell::new(State {
                queue,
                chains: chains.into(),
                unpublished: 0,
                partial: None,
                armed: false,
                stats: ReceiveStats::default(),
            }),
        })
    }

    /// The next frame. Without one, publishes all returned buffers.
    ///
    /// # Errors
    /// The device broke the protocol.
    #[inline]
    pub(super) fn next(&self) -> Result<Option<Received<'_>>, InterfaceFailure> {
        let state = &mut *self.state.borrow_mut();
        if state.armed {
            state.armed = false;
            state.queue.disable_notifications();
        }
        while let Some(used) = state.queue.poll()? {
            if let Some(token) = state.queue.peek_token(PREFETCH_AHEAD)
                && let Some(piece) = self.pieces.get(token as usize)
                && let Some(slice) = self.memory.slice(*piece)
            {
                // The frames of a burst are often of one length.
                slice.part(0, used.len as usize).prefetch_lines(false);
            }
            if let Some(received) = self.accept(state, &used)? {
                return Ok(Some(received));
            }
        }
        state.publish(&self.event_fds);
        Ok(None)
    }

    /// Handles one returned buffer. Returns the frame that it completes.
    #[inline]
    fn accept(
        &self,
        state: &mut State,
        used: &Used,
    ) -> Result<Option<Received<'_>>, InterfaceFailure> {
        if used.claimed != used.len {
            return Err(InterfaceFailure::Length(used.claimed));
        }
        let buffer = used.token as u16;
        let partial = match state.partial.take() {
            None => {
                let written = self.slice(buffer, used.len);
                let header = written.and_then(header::read);
                let (Some(written), Some(header)) = (written, header) else {
                    // A device returns a buffer in this way that it has not used.
                    state.stats.dropped += 1;
                    state.repost(buffer);
                    return Ok(None);
                };
                let buffers = Chained {
                    head: buffer,
                    count: 1,
                };
                let first = written.part(HEADER_LEN, usize::MAX);
                let len = used.len - HEADER;
                let count = match self.mergeable {
                    true => header.num_buffers(),
                    false => 1,
                };
                if count == 1 {
                    return Ok(self.check(state, &header, buffers, first, len));
                }
                if count == 0 || usize::from(count) > self.pieces.len() {
                    return Err(InterfaceFailure::Buffers(count));
                }
                Partial {
                    header,
                    buffers,
                    first_len: len,
                    last: buffer,
                    missing: count - 1,
                    len,
                }
            }
            Some(mut partial) => {
                self.parts.append(partial.last, buffer, used.len);
                partial.last = buffer;
                partial.missing -= 1;
                partial.buffers.count += 1;
                // A buffer has less than 2^17 bytes, and the sum so far is at most that of a frame.
                partial.len += used.len;
                partial
            }
        };
        if partial.len as usize > MAX_FRAME {
            return Err(InterfaceFailure::FrameLength);
        }
        if partial.missing > 0 {
            state.partial = Some(partial);
            return Ok(None);
        }
        let Partial {
            header, buffers, ..
        } = partial;
        let Some(written) = self.slice(buffers.head, HEADER + partial.first_len) else {
            return Ok(None);
        };
        let first = written.part(HEADER_LEN, usize::MAX);
        Ok(self.check(state, &header, buffers, first, partial.len))
    }

    /// Checks the header of a complete frame; drops the frame if it lies.
    #[inline]
    fn check<'m>(
        &self,
        state: &mut State,
        header: &Header,
        buffers: Chained,
        first: GuestSlice<'m>,
        len: u32,
    ) -> Option<Received<'m>> {
        match Repr::parse(header, len as usize, self.offloads) {
            Ok(repr) if len as usize >= ETHERNET_LEN => {
                state.stats.frames += 1;
                state.stats.bytes += u64::from(len);
                state.stats.tso += u64::from(repr.gso.is_some());
                Some(Received {
                    buffers,
                    first,
                    len,
                    repr,
                })
            }
            _ => {
                state.stats.dropped += 1;
                self.repost_all(state, buffers);
                None
            }
        }
    }

    /// The first `len` bytes of a buffer.
    #[inline]
    fn slice(&self, buffer: u16, len: u32) -> Option<GuestSlice<'_>> {
        let piece = self.pieces.get(usize::from(buffer))?;
        Some(self.memory.slice(*piece)?.part(0, len as usize))
    }

    /// The buffer behind this one, with its bytes of the frame.
    #[inline]
    pub(super) fn behind(&self, buffer: u16) -> Option<(u16, GuestSlice<'_>)> {
        let (next, len) = self.parts.behind(buffer)?;
        Some((next, self.slice(next, len)?))
    }

    /// Posts the buffers of a frame again.
    #[inline]
    pub(super) fn release(&self, buffers: Chained) {
        let state = &mut *self.state.borrow_mut();
        self.repost_all(state, buffers);
        if state.unpublished >= BATCH {
            state.publish(&self.event_fds);
        }
    }

    #[inline]
    fn repost_all(&self, state: &mut State, buffers: Chained) {
        let mut buffer = buffers.head;
        state.repost(buffer);
        for _ in 1..buffers.count {
            let Some((next, _)) = self.parts.behind(buffer) else {
                return;
            };
            buffer = next;
            state.repost(buffer);
        }
    }

    /// Whether the device has returned buffers: one load.
    #[inline]
    pub(super) fn has_used(&self) -> bool {
        self.state.borrow().queue.has_used()
    }

    /// Publishes all returned buffers and requests a notification for the next frame. True: one is
    /// there, and no notification follows for it.
    pub(super) fn arm(&self) -> bool {
        let state = &mut *self.state.borrow_mut();
        state.publish(&self.event_fds);
        state.armed = true;
        state.queue.enable_notifications()
    }

    pub(super) fn stats(&self) -> ReceiveStats {
        self.state.borrow().stats
    }
}

impl State {
    #[inline]
    fn repost(&mut self, buffer: u16) {
        if let Some(chain) = self.chains.get(usize::from(buffer)) {
            // Cannot fail: the chain was returned.
            let _ = self.queue.add_fixed(*chain);
            self.unpublished += 1;
        }
    }

    #[inline]
    fn publish(&mut self, event_fds: &QueueEventFds) {
        if std::mem::take(&mut self.unpublished) > 0
            && event_fds.kick_if(self.queue.publish(), RECEIVE)
        {
            self.stats.kicks += 1;
        }
    }
}
