//! Frames from the back-end to the guest.
//!
//! Chains that the driver has posted are popped into a window as they are needed and stay there until
//! a frame fills them. A frame is read directly into the first of them. How many bytes a frame will
//! have is not known before: there is room for as many as recent frames had, and what goes beyond
//! that is copied.
//!
//! A frame that the next chain has room for in one buffer does not need the window: its chain is read ahead
//! with others, and popped when the frame is in it ([`Singles`]).
//!
//! # Invariants
//! - The window holds the chains that were popped last, in their order. While it has any, and after each pop,
//!   no chain is read ahead.
//! - A frame that does not fit into what the driver has posted waits for more at most
//!   [`PATIENCE`]; nothing is read meanwhile.

use std::collections::VecDeque;
use std::time::Duration;

use zerosock_proto::Instant;
use zerosock_proto::wire::net::{Checksum, HEADER_LEN, Header, MAX_FRAME, Repr};
use zerosock_ring::{Chain, Memory, Singles, SliceBuf};
use zerosock_virtio::queues::Quiesced;
use zerosock_virtio::ring::Ring;

use super::dhcp;
use super::terms::{BURST, BURSTS, BYTES, Fatal, Terms};
use crate::backend::{Backend, FrameError, Half, MAX_PIECES, Taken};
use crate::header;
use crate::readable::Readable;
use crate::stats::NetStats;

/// How long a frame waits for buffers.
const PATIENCE: Duration = Duration::from_millis(100);
/// Most buffers of a frame.
const MAX_BUFFERS: usize = 1024;
/// Expected bytes of the first frame.
const FIRST: usize = 1536;
/// A long frame is expected again until the expectation has shrunk, by this part of it with each
/// shorter frame.
const SHRINK: usize = 64;

/// The receiving half of a queue pair.
#[derive(Debug)]
pub(super) struct Receiver {
    window: VecDeque<Chain>,
    /// Chains that were read ahead in this burst.
    singles: Singles,
    /// Writable bytes of the chains in the window.
    room: usize,
    /// Whether the back-end may have a frame.
    pub(super) readable: Readable,
    /// A frame, or the reading of frames, waits for chains.
    pub(super) starved: bool,
    /// Bytes for which room is offered to the next frame.
    expected: usize,
    /// The bytes of the last frame that were not read into the window.
    rest: Box<[u8]>,
    pending: Option<Pending>,
}

/// A frame that was read and is not in the guest's buffers yet.
#[derive(Clone, Copy, Debug)]
struct Pending {
    header: Header,
    /// Bytes of the frame.
    len: usize,
    /// How many of them are in the window already.
    stored: usize,
    since: Instant,
}

impl Receiver {
    pub(super) fn new() -> Receiver {
        Receiver {
            window: VecDeque::new(),
            singles: Singles::default(),
            room: 0,
            readable: Readable::default(),
            starved: false,
            expected: FIRST,
            // The longest frame, if nothing of it fits into the window.
            rest: vec![0; MAX_FRAME].into(),
            pending: None,
        }
    }

    /// When the frame that waits is dropped, or reading is tried again.
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        match self.pending {
            Some(pending) => Some(pending.since + PATIENCE),
            None => self.readable.next_timeout(),
        }
    }

    /// Returns all chains to the driver's ring, as if they had not been popped.
    pub(super) fn unpop(&mut self, ring: Option<&mut Ring>, tally: &mut NetStats) {
        if self.pending.take().is_some() {
            tally.rx_dropped += 1;
        }
        self.room = 0;
        self.starved = false;
        match ring {
            Some(ring) => {
                while let Some(chain) = self.window.pop_back() {
                    ring.queue.unpop(chain);
                }
            }
            None => self.window.clear(),
        }
    }

    /// Moves frames within the budget of a turn. Returns whether there may be more.
    pub(super) fn run_turn(
        &mut self,
        ring: &mut Ring,
        (backend, queue): (&mut impl Backend, usize),
        terms: &Terms,
        tally: &mut NetStats,
        now: Instant,
    ) -> Result<bool, Fatal> {
        let end = tally.rx_bytes + BYTES;
        for _ in 0..BURSTS {
            let backend = (&mut *backend, queue);
            if !self.run(ring, backend, terms, (&mut *tally, end), now)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Moves a burst of frames, and stops at `end` bytes of the tally. Returns whether there may be more.
    pub(super) fn run(
        &mut self,
        ring: &mut Ring,
        (backend, queue): (&mut impl Backend, usize),
        terms: &Terms,
        (tally, end): (&mut NetStats, u64),
        now: Instant,
    ) -> Result<bool, Fatal> {
        if backend.posts() {
            return self.run_posted(ring, (backend, queue), terms, (tally, end));
        }
        let is_readable = self.readable.check(now);
        if let Some(pending) = self.pending.take() {
            self.deliver(ring, pending, terms, tally, now);
        }
        self.singles.clear();
        for _ in 0..BURST {
            if self.pending.is_some() || !is_readable {
                return Ok(false);
            }
            if tally.rx_bytes >= end {
                return Ok(true);
            }
            let known = backend.next_len(queue);
            if let Some(len) = known
                && terms.mergeable
            {
                self.expected = len;
            }
            if self.window.is_empty() && self.singles.front().is_none() {
                // For as many frames as may be there.
                let (most, bytes) = match known {
                    Some(len) => (BURST, HEADER_LEN + len),
                    None => (1, 0),
                };
                ring.read_singles(&mut self.singles, most, true, bytes);
            }
            let received = match self.singles.front() {
                Some(single) if self.suits(single.len(), terms) => {
                    self.receive_single(ring, (backend, queue), terms, (tally, now))
                }
                _ => self.receive(ring, (backend, queue), terms, (tally, now)),
            };
            match received {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(FrameError::NotNow) => {
                    self.readable.clear();
                    return Ok(false);
                }
                Err(error) => {
                    tally.rx_dropped += u64::from(matches!(error, FrameError::Refused));
                    self.readable.fail(now);
                    return Fatal::of(error).map_or(Ok(false), Err);
                }
            }
        }
        Ok(self.pending.is_none())
    }

    /// Whether the next frame is received into a single buffer of `len` bytes.
    #[inline]
    fn suits(&self, len: usize, terms: &Terms) -> bool {
        let least = if terms.mergeable { self.expected } else { 0 };
        len >= HEADER_LEN + least
    }

    /// Receives a frame into the next chain that was read ahead. Returns true.
    #[inline]
    fn receive_single(
        &mut self,
        ring: &mut Ring,
        (backend, queue): (&mut impl Backend, usize),
        terms: &Terms,
        (tally, now): (&mut NetStats, Instant),
    ) -> Result<bool, FrameError> {
        if std::mem::take(&mut self.starved) {
            ring.queue.disable_notifications();
        }
        let single = self.singles.front();
        let slice = single.and_then(|single| ring.queue.memory().slice(*single.piece()));
        let Some(slice) = slice else {
            return self.receive(ring, (backend, queue), terms, (tally, now));
        };
        let room = slice.part(HEADER_LEN, usize::MAX);
        let mut header = Header::default();
        let len = backend.receive(queue, &mut header, &[room], &mut self.rest)?;
        self.expect(len, terms);
        let Some(mut repr) = check(&header, len, terms) else {
            tally.rx_dropped += 1;
            return Ok(true);
        };
        dhcp::complete(&mut repr, len, &[room], &mut self.rest);
        if len <= room.len() {
            header::write_repr(slice, &repr, 1);
            ring.complete_single(&mut self.singles, (HEADER_LEN + len) as u32);
            tally.rx_frames += 1;
            tally.rx_bytes += len as u64;
            return Ok(true);
        }
        let stored = room.len();
        let popped = ring.pop_single(&mut self.singles);
        self.singles.clear();
        if let Some(chain) = popped {
            self.room += chain.writable_len() as usize;
            self.window.push_back(chain);
        }
        self.keep(ring, (&repr, len, stored), terms, (tally, now));
        Ok(true)
    }

    /// Receives a frame into chains of any form. Returns false if there are none.
    #[inline(never)]
    fn receive(
        &mut self,
        ring: &mut Ring,
        (backend, queue): (&mut impl Backend, usize),
        terms: &Terms,
        (tally, now): (&mut NetStats, Instant),
    ) -> Result<bool, FrameError> {
        self.fill(ring, HEADER_LEN + self.expected, terms);
        if self.window.is_empty() {
            self.starved = true;
            return Ok(false);
        }
        if std::mem::take(&mut self.starved) {
            ring.queue.disable_notifications();
        }
        let mut header = Header::default();
        let mut slices = SliceBuf::<MAX_PIECES>::new();
        let offered = self.offer(ring.queue.memory(), terms, &mut slices);
        let len = backend.receive(queue, &mut header, &slices, &mut self.rest)?;
        self.expect(len, terms);
        match check(&header, len, terms) {
            Some(mut repr) => {
                dhcp::complete(&mut repr, len, &slices, &mut self.rest);
                self.keep(ring, (&repr, len, offered), terms, (tally, now));
            }
            None => tally.rx_dropped += 1,
        }
        Ok(true)
    }

    /// Notes the length of a frame.
    #[inline]
    fn expect(&mut self, len: usize, terms: &Terms) {
        if terms.mergeable {
            let shrunk = self.expected - self.expected / SHRINK;
            self.expected = len.max(shrunk);
        }
    }

    /// Delivers a frame of `len` bytes, of which the window has the first `offered`, or keeps it.
    fn keep(
        &mut self,
        ring: &mut Ring,
        (repr, len, offered): (&Repr, usize, usize),
        terms: &Terms,
        (tally, now): (&mut NetStats, Instant),
    ) {
        if len > offered + self.rest.len() {
            tally.rx_no_room += 1;
            return;
        }
        let frame = Pending {
            header: repr.emit(),
            len,
            stored: len.min(offered),
            since: now,
        };
        self.deliver(ring, frame, terms, tally, now);
    }

    /// As [`run`](Self::run), for a back-end that takes all chains ahead of the frames: each frame
    /// fills the oldest one.
    fn run_posted(
        &mut self,
        ring: &mut Ring,
        (backend, queue): (&mut impl Backend, usize),
        terms: &Terms,
        (tally, end): (&mut NetStats, u64),
    ) -> Result<bool, Fatal> {
        if std::mem::take(&mut self.starved) {
            ring.queue.disable_notifications();
        }
        // There is always an interest in more chains.
        self.starved = true;
        for _ in 0..BURST {
            // Chains of the window may have to be un-popped: no later one may be completed before them.
            while let Some(chain) = ring.pop_if(HEADER_LEN, self.window.is_empty()) {
                if !backend.post(queue, ring.queue.memory(), &chain) {
                    ring.queue.unpop(chain);
                    self.starved = false;
                    break;
                }
                self.window.push_back(chain);
            }
            // An unusable chain: notifications would find it again and again.
            self.starved &= self.window.is_empty() || ring.queue.available() == 0;
            let Some(first) = self.window.front() else {
                return Ok(false);
            };
            if tally.rx_bytes >= end {
                return Ok(true);
            }
            let memory = ring.queue.memory();
            let taken = match backend.take(queue, memory, first) {
                Ok(taken) => Some(taken),
                Err(FrameError::NotNow) => return Ok(false),
                Err(FrameError::Refused) => {
                    tally.rx_no_room += 1;
                    None
                }
                Err(error) => return Fatal::of(error).map_or(Ok(false), Err),
            };
            let mut written = 0;
            if let Some(Taken {
                header,
                len,
                copied,
            }) = taken
            {
                if let Some(repr) = check(&header, len, terms) {
                    let mut header = repr.emit();
                    header.set_num_buffers(1);
                    memory.write(first.writable(), 0, &header.0);
                    written = (HEADER_LEN + len) as u32;
                    tally.rx_frames += 1;
                    tally.rx_bytes += len as u64;
                    tally.rx_copied += copied as u64;
                } else {
                    tally.rx_dropped += 1;
                }
            }
            // The driver counts a chain without bytes as an error of the device and posts it again.
            if let Some(chain) = self.window.pop_front() {
                ring.complete(chain, written);
            }
        }
        Ok(true)
    }

    /// Whether the back-end has given back the chains.
    pub(super) fn quiesce(&self, (backend, queue): (&mut impl Backend, usize)) -> Quiesced {
        match backend.posts() && !self.window.is_empty() {
            true => backend.recall(queue, Half::Receive),
            false => Quiesced::Done,
        }
    }

    /// Pops chains until the window has room for `bytes`; one chain if a frame cannot take several.
    fn fill(&mut self, ring: &mut Ring, bytes: usize, terms: &Terms) {
        self.singles.clear();
        let most = match terms.mergeable {
            true => MAX_BUFFERS,
            false => 1,
        };
        while self.room < bytes
            && self.window.len() < most
            && let Some(chain) = ring.pop_if(HEADER_LEN, self.window.is_empty())
        {
            self.room += chain.writable_len() as usize;
            self.window.push_back(chain);
        }
    }

    /// The slices for the next frame, and how many bytes they have.
    fn offer<'m>(
        &self,
        memory: &'m Memory,
        terms: &Terms,
        slices: &mut SliceBuf<'m, MAX_PIECES>,
    ) -> usize {
        let mut offered = 0;
        let mut skip = HEADER_LEN;
        for chain in &self.window {
            let room = chain.writable_len() as usize - skip;
            let covered = memory.slices(chain.writable(), skip, room, slices);
            offered += covered;
            if covered < room || (terms.mergeable && offered >= self.expected) {
                break;
            }
            skip = 0;
        }
        offered
    }

    /// Completes the chains that the frame fills, or keeps the frame, or drops it.
    fn deliver(
        &mut self,
        ring: &mut Ring,
        frame: Pending,
        terms: &Terms,
        tally: &mut NetStats,
        now: Instant,
    ) {
        let total = HEADER_LEN + frame.len;
        self.fill(ring, total, terms);
        if self.room < total {
            // Chains that are posted and not in the window cannot be added to it: the next one is too
            // short, or the window has as many as a frame may take.
            let closed = terms.mergeable && ring.live() && ring.queue.available() > 0;
            if closed {
                // The driver counts chains without bytes as errors of the device and posts them again.
                while let Some(chain) = self.window.pop_front() {
                    ring.complete(chain, 0);
                }
                self.room = 0;
            }
            let hopeless = closed || !terms.mergeable || !ring.live();
            if hopeless || now >= frame.since + PATIENCE {
                tally.rx_no_room += 1;
            } else {
                self.pending = Some(frame);
                self.starved = true;
            }
            return;
        }
        let Pending {
            mut header,
            len,
            stored,
            ..
        } = frame;
        let memory = ring.queue.memory();
        if stored < len {
            let rest = self.rest.get(..len - stored).unwrap_or_default();
            write(memory, &self.window, HEADER_LEN + stored, rest);
            tally.rx_copied += rest.len() as u64;
        }
        let mut left = total;
        let mut buffers = 0;
        for chain in &self.window {
            left = left.saturating_sub(chain.writable_len() as usize);
            buffers += 1;
            if left == 0 {
                break;
            }
        }
        header.set_num_buffers(buffers);
        if let Some(first) = self.window.front() {
            memory.write(first.writable(), 0, &header.0);
        }
        let mut left = total;
        for _ in 0..buffers {
            let Some(chain) = self.window.pop_front() else {
                break;
            };
            let room = chain.writable_len() as usize;
            let written = left.min(room);
            left -= written;
            self.room -= room;
            ring.complete(chain, written as u32);
        }
        tally.rx_frames += 1;
        tally.rx_bytes += len as u64;
    }
}

/// Copies `bytes` to the chains, from `offset` of all of them on.
fn write(memory: &Memory, window: &VecDeque<Chain>, mut offset: usize, mut bytes: &[u8]) {
    for chain in window {
        let room = chain.writable_len() as usize;
        if bytes.is_empty() {
            return;
        }
        if offset >= room {
            offset -= room;
            continue;
        }
        let (now, later) = bytes.split_at(bytes.len().min(room - offset));
        memory.write(chain.writable(), offset, now);
        (bytes, offset) = (later, 0);
    }
}

/// The header of a frame from the back-end as the driver gets it; `None` if the frame needs what the
/// driver did not accept.
#[inline]
fn check(header: &Header, len: usize, terms: &Terms) -> Option<Repr> {
    let offloads = terms.of_driver;
    let mut repr = Repr::parse(header, len, offloads).ok()?;
    if repr.checksum == Checksum::Valid && !offloads.csum {
        repr.checksum = Checksum::Complete;
    }
    Some(repr)
}
