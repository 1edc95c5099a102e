//! Frames from the guest to the back-end.
//!
//! # Invariants
//! - A chain that the back-end does not take now is un-popped, and nothing is popped until the
//!   back-end reports room.
//! - A frame is sent with a header that was made from the checked one.
//! - Chains are completed in the order in which they were popped, also if the back-end holds some. Unusable
//!   ones are returned at once.
//! - Chains of one buffer are read ahead, and popped when the back-end has taken their frames.

use std::collections::VecDeque;
use std::sync::Arc;

use zerosock_proto::Instant;
use zerosock_proto::wire::net::{Checksum, ETHERNET_LEN, HEADER_LEN, Header, MAX_FRAME, Repr};
use zerosock_ring::{Chain, Memory, Piece, Singles, SliceBuf};
use zerosock_virtio::queues::Quiesced;
use zerosock_virtio::ring::Ring;

use super::terms::{BURST, Fatal, Terms};
use crate::backend::{
    ADDRESSES_LEN, Addresses, Backend, Frame, FrameError, Half, MAX_PIECES, Sent,
};
use crate::header;
use crate::stats::NetStats;

/// The sending half of a queue pair.
#[derive(Debug, Default)]
pub(super) struct Transmitter {
    /// The back-end had no room.
    pub(super) blocked: bool,
    /// Chains that were read ahead in this burst.
    singles: Singles,
    /// Chains in order, from the first one that the back-end holds on.
    held: VecDeque<Held>,
    /// The number of the first of them.
    first: u64,
}

#[derive(Debug)]
struct Held {
    chain: Chain,
    /// The back-end does not need it any more.
    done: bool,
}

impl Transmitter {
    /// Moves a burst of frames, and stops at `end` bytes of the tally. Returns whether there may be more.
    pub(super) fn run(
        &mut self,
        ring: &mut Ring,
        (backend, queue): (&mut impl Backend, usize),
        terms: &Terms,
        (tally, end): (&mut NetStats, u64),
        now: Instant,
    ) -> Result<bool, Fatal> {
        if self.blocked {
            return Ok(false);
        }
        // Most back-ends have this processor read the whole frame.
        let bytes = match backend.posts() {
            true => HEADER_LEN,
            false => usize::MAX,
        };
        self.singles.clear();
        for index in 0..BURST {
            if tally.tx_bytes >= end {
                return Ok(true);
            }
            if self.singles.front().is_none() {
                ring.read_singles(&mut self.singles, BURST - index, false, bytes);
            }
            let number = self.first.wrapping_add(self.held.len() as u64);
            let (sent, chain) = match self.singles.front() {
                Some(single) => {
                    let pieces = std::slice::from_ref(single.piece());
                    let frame = (pieces, single.len());
                    let memory = ring.queue.memory();
                    let sent = send(memory, frame, terms, (backend, queue), (number, now, tally));
                    (sent, None)
                }
                None => {
                    let Some(chain) = ring.pop() else {
                        return Ok(false);
                    };
                    let frame = (chain.readable(), chain.readable_len() as usize);
                    let memory = ring.queue.memory();
                    let sent = send(memory, frame, terms, (backend, queue), (number, now, tally));
                    (sent, Some(chain))
                }
            };
            if index == 0 {
                ring.queue.disable_notifications();
            }
            let (done, fatal) = match sent {
                Ok(sent) => (sent == Sent::Done, None),
                Err(FrameError::NotNow) => {
                    if let Some(chain) = chain {
                        ring.queue.unpop(chain);
                    }
                    self.blocked = true;
                    return Ok(false);
                }
                Err(error) => {
                    match &error {
                        FrameError::LinkDown => tally.tx_link_down += 1,
                        _ => tally.tx_refused += 1,
                    }
                    (true, Fatal::of(error))
                }
            };
            match chain {
                Some(chain) => self.finish(ring, chain, done),
                None if done && self.held.is_empty() => {
                    self.first = self.first.wrapping_add(1);
                    ring.complete_single(&mut self.singles, 0);
                }
                None => {
                    if let Some(chain) = ring.pop_single(&mut self.singles) {
                        self.finish(ring, chain, done);
                    }
                }
            }
            if let Some(fatal) = fatal {
                return Err(fatal);
            }
        }
        Ok(true)
    }

    /// Completes a chain, or keeps it until those before it are done.
    #[inline]
    fn finish(&mut self, ring: &mut Ring, chain: Chain, done: bool) {
        if done && self.held.is_empty() {
            self.first = self.first.wrapping_add(1);
            ring.complete(chain, 0);
        } else {
            self.held.push_back(Held { chain, done });
        }
    }

    /// Completes the chains that the back-end does not need any more.
    pub(super) fn reclaim(
        &mut self,
        ring: &mut Ring,
        (backend, queue): (&mut impl Backend, usize),
    ) {
        self.blocked &= !backend.has_room(queue);
        while let Some(number) = backend.sent(queue) {
            let at = usize::try_from(number.wrapping_sub(self.first)).unwrap_or(usize::MAX);
            if let Some(held) = self.held.get_mut(at) {
                held.done = true;
            }
        }
        while self.held.front().is_some_and(|held| held.done) {
            self.complete_first(ring);
        }
    }

    fn complete_first(&mut self, ring: &mut Ring) {
        if let Some(held) = self.held.pop_front() {
            self.first = self.first.wrapping_add(1);
            ring.complete(held.chain, 0);
        }
    }

    /// Whether all chains have been returned to the ring.
    pub(super) fn quiesce(
        &mut self,
        ring: Option<&mut Ring>,
        (backend, queue): (&mut impl Backend, usize),
    ) -> Quiesced {
        if self.held.is_empty() {
            return Quiesced::Done;
        }
        let answer = backend.recall(queue, Half::Transmit);
        if answer == Quiesced::Done {
            match ring {
                Some(ring) => {
                    while !self.held.is_empty() {
                        self.complete_first(ring);
                    }
                }
                None => self.reset(),
            }
        }
        answer
    }

    /// Forgets the chains that the back-end holds: the driver has no use for them any more.
    pub(super) fn reset(&mut self) {
        self.first = self.first.wrapping_add(self.held.len() as u64);
        self.held.clear();
        self.blocked = false;
    }
}

/// Sends the frame in `pieces` of `total` bytes. One that is dropped is counted, and done.
#[inline]
fn send(
    memory: &Arc<Memory>,
    (pieces, total): (&[Piece], usize),
    terms: &Terms,
    (backend, queue): (&mut impl Backend, usize),
    (number, now, tally): (u64, Instant, &mut NetStats),
) -> Result<Sent, FrameError> {
    let mut slices = SliceBuf::<MAX_PIECES>::new();
    let mut addresses = None;
    let parts = (&mut addresses, &mut slices);
    let Some(frame) = prepare(memory, (pieces, total), terms, parts, tally) else {
        return Ok(Sent::Done);
    };
    let sent = backend.send(queue, &frame, number, now)?;
    tally.tx_frames += 1;
    tally.tx_bytes += frame.len as u64;
    Ok(sent)
}

/// The frame to send. `None` for one that is dropped; it has been counted.
#[inline]
fn prepare<'f, 'm: 'f>(
    memory: &'m Arc<Memory>,
    (pieces, total): (&'f [Piece], usize),
    terms: &Terms,
    (first, slices): (&'f mut Option<Addresses>, &'f mut SliceBuf<'m, MAX_PIECES>),
    tally: &mut NetStats,
) -> Option<Frame<'f>> {
    let len = total.saturating_sub(HEADER_LEN);
    if len < ETHERNET_LEN {
        tally.tx_runt += 1;
        return None;
    }
    // The only time that the guest's header is read.
    let header_copy = match memory.contiguous(pieces, 0, HEADER_LEN) {
        Some(slice) => header::read(slice)?,
        None => Header(memory.read_array(pieces, 0)?),
    };
    let Ok(mut repr) = Repr::parse(&header_copy, len, terms.of_device) else {
        tally.tx_bad_header += 1;
        return None;
    };
    if repr.checksum == Checksum::Valid {
        // Only a device may say so.
        repr.checksum = Checksum::Complete;
    }
    let most = match repr.gso {
        Some(_) => MAX_FRAME,
        None => terms.max_frame,
    };
    let mut skip = HEADER_LEN;
    if terms.needs_addresses {
        let copy: Addresses = memory.read_array(pieces, HEADER_LEN)?;
        if terms.only_mac.is_some_and(|mac| copy[6..] != mac.0) {
            tally.tx_spoofed += 1;
            return None;
        }
        *first = Some(copy);
        skip += ADDRESSES_LEN;
    }
    let rest = len + HEADER_LEN - skip;
    if len > most || memory.slices(pieces, skip, rest, slices) < rest {
        tally.tx_too_long += 1;
        return None;
    }
    Some(Frame {
        header: repr.emit(),
        len,
        first: first.as_ref().map_or(&[], |addresses| addresses),
        memory: Some(memory),
        pieces,
        skip,
        slices,
    })
}
