//! The transmit queue: every buffer is free, on loan, or in the hands of the device.
//!
//! # Invariants
//! - The number of a buffer is the token of its chain.
//! - Nothing is allocated after construction.

use std::cell::RefCell;
use std::sync::Arc;

use zerosock_proto::wire::net::{
    Checksum, ETHERNET_LEN, HEADER_LEN, Header, HeaderError, MAX_FRAME, Offloads, Repr,
};
use zerosock_ring::{Claim, DriverQueue, FixedChain, GuestSlice, Memory, Piece, Trust};
use zerosock_vhost_user::frontend::QueueEventFds;

use super::config::InterfaceConnectError;
use super::failure::InterfaceFailure;
use super::link::InterfaceTerms;
use super::memory::{HEADER, Layout};
use super::stats::TransmitStats;

/// Index of the transmit queue.
const TRANSMIT: usize = 1;
/// How many loans ahead memory is prefetched.
const PREFETCH_AHEAD: usize = 3;

/// Why there is no loan.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LoanError {
    /// No buffer is free now. [`wait`](super::Interface::wait) returns when the device has returned
    /// some.
    #[error("no buffer is free")]
    Full,
    /// A frame of this length is shorter than an Ethernet header, or longer than any packet of IP, or
    /// there are no large loans.
    #[error("no loan has {0} bytes")]
    Length(usize),
    /// The interface cannot be used any more.
    #[error(transparent)]
    Failed(#[from] InterfaceFailure),
}

/// The transmit queue and its buffers.
#[derive(Debug)]
pub(super) struct InterfaceTransmitter {
    memory: Arc<Memory>,
    event_fds: Arc<QueueEventFds>,
    /// The small ones first.
    pieces: Box<[Piece]>,
    /// Small buffers.
    small: u16,
    /// Bytes of a frame that fits into a small buffer.
    small_len: usize,
    /// Bytes of the longest frame for which there is a buffer.
    most_len: usize,
    offloads: Offloads,
    trust: Option<Trust>,
    state: RefCell<State>,
}

#[derive(Debug)]
struct State {
    queue: DriverQueue,
    chains: Box<[FixedChain]>,
    /// The one that was returned last comes last: its lines are still in the cache.
    free_small: Vec<u16>,
    free_large: Vec<u16>,
    /// Frames queued and not published yet.
    unpublished: bool,
    /// Frames that the device has.
    in_flight: u16,
    /// A loan was refused and no buffer has come back since.
    starved: bool,
    stats: TransmitStats,
}

impl InterfaceTransmitter {
    /// A new ring, with every buffer free.
    pub(super) fn new(
        memory: &Arc<Memory>,
        layout: &Layout,
        terms: &InterfaceTerms,
        trust: Option<Trust>,
        event_fds: &Arc<QueueEventFds>,
    ) -> Result<InterfaceTransmitter, InterfaceConnectError> {
        let ring = layout.rings[TRANSMIT];
        let mut queue = DriverQueue::new(Arc::clone(memory), ring, terms.event_idx)?;
        let (mut pieces, mut chains) = (Vec::new(), Vec::new());
        for buffers in [layout.small, layout.large] {
            buffers.translate(memory, &mut pieces)?;
            buffers.set_chains(&mut queue, false, &mut chains)?;
        }
        queue.disable_notifications();
        let small = layout.small.count;
        let small_len = (layout.small.len - HEADER) as usize;
        Ok(InterfaceTransmitter {
            memory: Arc::clone(memory),
            event_fds: Arc::clone(event_fds),
            pieces: pieces.into(),
            small,
            small_len,
            most_len: match layout.large.count {
                0 => small_len,
                _ => MAX_FRAME,
            },
            offloads: terms.to_device,
            trust,
            state: RefCell::new(State {
                queue,
                chains: chains.into(),
                free_small: (0..small).rev().collect(),
                free_large: (small..small + layout.large.count).rev().collect(),
                unpublished: false,
                in_flight: 0,
                starved: false,
                stats: TransmitStats::default(),
            }),
        })
    }

    /// Takes a free buffer for a frame of `len` bytes. Returns its bytes, too, with room
    /// for a header in front.
    #[inline]
    pub(super) fn take(&self, len: usize) -> Result<(u16, GuestSlice<'_>), LoanError> {
        let is_small = len <= self.small_len;
        if !(ETHERNET_LEN..=self.most_len).contains(&len) {
            return Err(LoanError::Length(len));
        }
        let state = &mut *self.state.borrow_mut();
        if let Some(buffer) = state.pop(is_small)
            && let Some(slice) = self.slice(buffer, len)
        {
            if let Some(later) = state.peek(is_small, PREFETCH_AHEAD)
                && let Some(later) = self.slice(later, len)
            {
                later.prefetch_lines(true);
            }
            return Ok((buffer, slice));
        }
        self.reap(state)?;
        if let Some(buffer) = state.pop(is_small)
            && let Some(slice) = self.slice(buffer, len)
        {
            return Ok((buffer, slice));
        }
        // What is not published never comes back.
        state.publish(&self.event_fds);
        state.starved = true;
        state.stats.full += 1;
        Err(LoanError::Full)
    }

    /// Frees the buffers that the device has returned.
    fn reap(&self, state: &mut State) -> Result<(), InterfaceFailure> {
        // A device writes nothing to these buffers; the length that it claims has no meaning.
        while let Some(used) = state.queue.poll()? {
            state.put(used.token as u16, self.small);
            state.in_flight -= 1;
            state.starved = false;
        }
        Ok(())
    }

    /// Returns a buffer that was not queued.
    #[inline]
    pub(super) fn put_back(&self, buffer: u16) {
        let state = &mut *self.state.borrow_mut();
        state.put(buffer, self.small);
        state.starved = false;
    }

    #[inline]
    fn slice(&self, buffer: u16, len: usize) -> Option<GuestSlice<'_>> {
        let piece = self.pieces.get(usize::from(buffer))?;
        Some(self.memory.slice(*piece)?.part(0, HEADER_LEN + len))
    }

    /// Exclusive access to the bytes of a frame, if trust was declared.
    pub(super) fn claim(&self, buffer: u16, len: usize) -> Option<Claim> {
        let piece = self.pieces.get(usize::from(buffer))?;
        Claim::new(&self.memory, piece.part(HEADER as usize, len), self.trust?)
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The header of a frame of `len` bytes; `None` for one without offloads.
    ///
    /// # Errors
    /// It lies about the frame, or uses an offload that the device does not take.
    #[inline]
    pub(super) fn header(&self, repr: &Repr, len: usize) -> Result<Option<Header>, HeaderError> {
        if let (Checksum::Complete, None) = (repr.checksum, repr.gso) {
            return Ok(None);
        }
        let mut repr = *repr;
        if repr.checksum == Checksum::Valid {
            // A flag of the other direction (5.1.6.2).
            repr.checksum = Checksum::Complete;
        }
        let header = repr.emit();
        Repr::parse(&header, len, self.offloads)?;
        Ok(Some(header))
    }

    /// Queues a frame of `len` bytes, behind its header.
    #[inline]
    pub(super) fn queue(&self, buffer: u16, len: usize, is_tso: bool) {
        let state = &mut *self.state.borrow_mut();
        let Some(chain) = state.chains.get(usize::from(buffer)) else {
            return;
        };
        // Cannot fail: the buffer was free, and `len` is at most its length.
        if state
            .queue
            .add_fixed_part(*chain, HEADER + len as u32)
            .is_ok()
        {
            state.unpublished = true;
            state.in_flight += 1;
            state.stats.frames += 1;
            state.stats.bytes += len as u64;
            state.stats.tso += u64::from(is_tso);
        }
    }

    /// Publishes queued frames.
    #[inline]
    pub(super) fn flush(&self) {
        self.state.borrow_mut().publish(&self.event_fds);
    }

    /// Whether a refused loan can be had now, or the queue is broken.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        let state = self.state.borrow();
        state.starved && state.queue.has_used()
    }

    /// Publishes queued frames and, if a loan was refused, requests a notification when half of the
    /// frames have come back. True: they have, and no notification follows.
    pub(super) fn arm(&self) -> bool {
        let state = &mut *self.state.borrow_mut();
        state.publish(&self.event_fds);
        if !state.starved {
            state.queue.disable_notifications();
            return false;
        }
        state.queue.enable_notifications_after(state.in_flight / 2)
    }

    pub(super) fn stats(&self) -> TransmitStats {
        self.state.borrow().stats
    }
}

impl State {
    /// The buffer that [`pop`](Self::pop) returns after `ahead` others.
    #[inline]
    fn peek(&self, is_small: bool, ahead: usize) -> Option<u16> {
        let free = match is_small {
            true => &self.free_small,
            false => &self.free_large,
        };
        free.get(free.len().checked_sub(ahead + 1)?).copied()
    }

    #[inline]
    fn pop(&mut self, is_small: bool) -> Option<u16> {
        match is_small {
            true => self.free_small.pop(),
            false => self.free_large.pop(),
        }
    }

    #[inline]
    fn put(&mut self, buffer: u16, small: u16) {
        if buffer < small {
            self.free_small.push(buffer);
        } else {
            self.free_large.push(buffer);
        }
    }

    #[inline]
    fn publish(&mut self, event_fds: &QueueEventFds) {
        if std::mem::take(&mut self.unpublished)
            && event_fds.kick_if(self.queue.publish(), TRANSMIT)
        {
            self.stats.kicks += 1;
        }
    }
}
