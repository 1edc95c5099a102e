//! The messages between ports, and the frames for a port.

use std::ops::Range;
use std::sync::Arc;

use zerosock_proto::wire::net::{Header, Offloads};
use zerosock_ring::{GuestSlice, Memory, Piece, SliceBuf};
use zerosock_virtio::device::Message;
use zerosock_virtio::outbox::DeviceAddr;

use super::copies::Copies;
use super::software;
use crate::backend::{ADDRESSES_LEN, Addresses, Frame, MAX_PIECES};

/// Frames that wait at a port, at most.
const MAX_WAITING: usize = 1024;
/// Bytes of them: what one TCP connection of Linux has in flight at most by default (`tcp_wmem`).
const MAX_WAITING_BYTES: usize = 4 << 20;
/// Pieces for which an empty batch keeps its allocation.
const MAX_SPARE: usize = 1024;

/// A message between two ports.
#[derive(Debug)]
pub struct PortMessage(pub(super) Content);

#[derive(Debug)]
pub(super) enum Content {
    /// Frames for the receiver, which returns the batch before it handles another message.
    Frames(Batch),
    /// To the sender of the batch: its memory is not read any more.
    Returned(Batch),
}

impl Message for PortMessage {
    fn copied_bytes(&self) -> usize {
        match &self.0 {
            Content::Frames(batch) => batch.bytes,
            Content::Returned(_) => 0,
        }
    }
}

/// A header, and the frame behind it.
type Copied = (Header, Vec<u8>);

/// Frames of one sender for one receiver, in their order.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) from: DeviceAddr,
    /// The memory of the sender.
    memory: Option<Arc<Memory>>,
    frames: Vec<Lent>,
    /// The pieces of all frames.
    pieces: Vec<Piece>,
    /// Frames that the sender does not have in its memory.
    copies: Vec<Copied>,
    /// Bytes of all frames.
    bytes: usize,
}

/// A frame in the memory of its sender.
#[derive(Debug)]
pub(super) struct Lent {
    header: Header,
    pub(super) len: usize,
    /// The number of its sender.
    pub(super) number: u64,
    /// Bytes that its sender is charged for this receiver; `None`: the frame is for this port only.
    pub(super) charge: Option<usize>,
    addresses: Addresses,
    /// Its pieces among those of the batch.
    pieces: Range<usize>,
    /// Bytes of the pieces in front of what follows the addresses.
    skip: usize,
}

impl Batch {
    pub(super) fn new(from: DeviceAddr) -> Batch {
        Batch {
            from,
            memory: None,
            frames: Vec::new(),
            pieces: Vec::new(),
            copies: Vec::new(),
            bytes: 0,
        }
    }

    /// Adds a frame. All frames of a batch lie in the same memory.
    #[inline]
    pub(super) fn push(
        &mut self,
        frame: &Frame<'_>,
        addresses: &Addresses,
        (number, charge): (u64, Option<usize>),
    ) {
        self.bytes += frame.len;
        let Some(memory) = frame.memory else {
            self.copies.push((frame.header, frame.first.to_vec()));
            return;
        };
        debug_assert_eq!(frame.first.len(), ADDRESSES_LEN, "no other private part");
        let before = self.memory.get_or_insert_with(|| Arc::clone(memory));
        debug_assert!(Arc::ptr_eq(before, memory));
        let start = self.pieces.len();
        self.pieces.extend_from_slice(frame.pieces);
        self.frames.push(Lent {
            header: frame.header,
            len: frame.len,
            number,
            charge,
            addresses: *addresses,
            pieces: start..self.pieces.len(),
            skip: frame.skip,
        });
    }

    /// The frames in the memory of the sender.
    pub(super) fn frames(&self) -> impl Iterator<Item = &Lent> {
        self.frames.iter()
    }

    /// The batch without frames, with its allocations if they are not large.
    pub(super) fn emptied(mut self) -> Batch {
        self.memory = None;
        self.frames.clear();
        self.pieces.clear();
        self.pieces.shrink_to(MAX_SPARE);
        self.copies.clear();
        self.bytes = 0;
        self
    }

    /// Calls `take` with the frame at this index, as back-ends take it.
    #[inline]
    fn with_frame<T>(&self, index: usize, take: impl FnOnce(&Frame<'_>) -> T) -> Option<T> {
        let (lent, memory) = (self.frames.get(index)?, self.memory.as_ref()?);
        let pieces = self.pieces.get(lent.pieces.clone())?;
        let mut slices = SliceBuf::<MAX_PIECES>::new();
        memory.slices(pieces, lent.skip, lent.len - ADDRESSES_LEN, &mut slices);
        Some(take(&Frame {
            header: lent.header,
            len: lent.len,
            first: &lent.addresses,
            memory: Some(memory),
            pieces,
            skip: lent.skip,
            slices: &slices,
        }))
    }
}

/// Copies a frame into `slices`, and the bytes for which there is no room there into `rest`.
#[inline]
pub(super) fn copy(frame: &Frame<'_>, slices: &[GuestSlice<'_>], rest: &mut [u8]) {
    let mut target = Target {
        slices: slices.iter(),
        current: None,
        rest,
    };
    target.write(frame.first);
    frame.slices.iter().for_each(|source| target.copy(*source));
}

/// Where a frame is copied to.
struct Target<'a, 'm> {
    slices: std::slice::Iter<'a, GuestSlice<'m>>,
    current: Option<GuestSlice<'m>>,
    rest: &'a mut [u8],
}

impl<'m> Target<'_, 'm> {
    /// What is left of the current slice, or the next one.
    #[inline]
    fn slice(&mut self) -> Option<GuestSlice<'m>> {
        let current = self.current.take().filter(|slice| !slice.is_empty());
        current.or_else(|| self.slices.find(|slice| !slice.is_empty()).copied())
    }

    fn skip_rest(&mut self, count: usize) {
        let rest = std::mem::take(&mut self.rest);
        self.rest = rest.get_mut(count..).unwrap_or_default();
    }

    #[inline]
    fn write(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let Some(slice) = self.slice() else {
                let count = bytes.len().min(self.rest.len());
                self.rest[..count].copy_from_slice(&bytes[..count]);
                self.skip_rest(count);
                return;
            };
            let written = slice.write(0, bytes);
            self.current = Some(slice.part(written, usize::MAX));
            bytes = &bytes[written..];
        }
    }

    #[inline]
    fn copy(&mut self, mut source: GuestSlice<'_>) {
        while !source.is_empty() {
            let Some(slice) = self.slice() else {
                let count = source.read(0, self.rest);
                self.skip_rest(count);
                return;
            };
            let copied = source.copy_to(slice);
            self.current = Some(slice.part(copied, usize::MAX));
            source = source.part(copied, usize::MAX);
        }
    }
}

/// Frames that an [`Inbox`] has copied or dropped since they were last read.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Bytes that were copied because their frames wait, or need an offload.
    pub(super) copied: u64,
    /// Frames that were dropped because too many wait.
    pub(super) no_room: u64,
    /// Frames that were dropped because they are not what their headers say.
    pub(super) unfit: u64,
}

/// The frames for a port: copies that wait, and behind them the batch that has just come. A frame waits as
/// it is, and is cut into segments for its receiver when it is the next one.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// What is left of the last frame that was cut.
    segments: Copies,
    waiting: Copies,
    batch: Option<Batch>,
    /// Frames that were taken of the batch.
    taken: usize,
    /// Those that the receiver takes.
    pub(super) offloads: Offloads,
    losses: Losses,
}

impl Inbox {
    /// Adds a batch, which the next [`take_batch`](Self::take_batch) returns.
    pub(super) fn add_batch(&mut self, mut batch: Batch) {
        for (header, bytes) in batch.copies.drain(..) {
            self.wait(&Frame::of_bytes(header, &bytes));
        }
        (self.batch, self.taken) = (Some(batch), 0);
    }

    /// Copies the frames of the batch that were not taken, as far as there is room for so many to wait,
    /// and returns the batch.
    pub(super) fn take_batch(&mut self) -> Option<Batch> {
        let batch = self.batch.take()?;
        for index in self.taken..batch.frames.len() {
            batch.with_frame(index, |frame| self.wait(frame));
        }
        Some(batch)
    }

    /// Bytes of the next frame.
    #[inline]
    pub(super) fn next_len(&mut self) -> Option<usize> {
        self.cut_for_receiver();
        match self.segments.first().or_else(|| self.waiting.first()) {
            Some((_, bytes)) => Some(bytes.len()),
            None => Some(self.batch.as_ref()?.frames.get(self.taken)?.len),
        }
    }

    /// Calls `take` with the next frame.
    #[inline]
    pub(super) fn with_next<T>(&mut self, take: impl FnOnce(&Frame<'_>) -> T) -> Option<T> {
        self.cut_for_receiver();
        let copies = self.segments.first().or_else(|| self.waiting.first());
        match copies {
            Some((header, bytes)) => Some(take(&Frame::of_bytes(*header, bytes))),
            None => self.batch.as_ref()?.with_frame(self.taken, take),
        }
    }

    /// Removes the next frame.
    #[inline]
    pub(super) fn pop(&mut self) {
        if !self.segments.pop() {
            self.pop_whole();
        }
    }

    /// Removes the next frame that was not cut.
    fn pop_whole(&mut self) {
        if !self.waiting.pop() {
            self.taken += 1;
        }
    }

    /// Drops the frames that wait, and gives their memory back.
    pub(super) fn clear(&mut self) {
        self.losses.unfit += (self.segments.len() + self.waiting.len()) as u64;
        self.segments.clear();
        self.waiting.clear();
    }

    pub(super) fn take_losses(&mut self) -> Losses {
        std::mem::take(&mut self.losses)
    }

    /// Bytes of memory for frames that wait.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.segments.capacity() + self.waiting.capacity()
    }

    #[inline]
    fn cut_for_receiver(&mut self) {
        // The batch has nothing that a receiver of all offloads does not take.
        if self.offloads != Offloads::ALL {
            self.cut();
        }
    }

    /// Makes segments, or complete checksums, of the next frame if the receiver does not take it as it is.
    fn cut(&mut self) {
        while self.segments.is_empty() {
            let offloads = self.offloads;
            let is_accepted = |header: &Header, len| software::is_accepted(header, len, offloads);
            let out = &mut self.segments;
            let converted = match (self.waiting.first(), &self.batch) {
                (Some((header, bytes)), _) => {
                    if is_accepted(header, bytes.len()) {
                        return;
                    }
                    software::convert(header, bytes, offloads, out)
                }
                (None, Some(batch)) => {
                    let unaccepted = batch.with_frame(self.taken, |frame| {
                        (!is_accepted(&frame.header, frame.len)).then(|| copied(frame))
                    });
                    let Some(Some((header, bytes))) = unaccepted else {
                        return;
                    };
                    software::convert(&header, &bytes, offloads, out)
                }
                (None, None) => return,
            };
            if converted.is_none() {
                out.clear();
                self.losses.unfit += 1;
            }
            self.losses.copied += out.bytes() as u64;
            self.pop_whole();
        }
    }

    /// Has a frame wait, if there is room.
    fn wait(&mut self, frame: &Frame<'_>) {
        let has_room = self.waiting.len() < MAX_WAITING
            && self.waiting.bytes() + frame.len <= MAX_WAITING_BYTES;
        let place = match has_room {
            true => self.waiting.add(frame.header, frame.len),
            false => None,
        };
        let Some(place) = place else {
            self.losses.no_room += 1;
            return;
        };
        copy(frame, &[], place);
        self.losses.copied += frame.len as u64;
    }
}

fn copied(frame: &Frame<'_>) -> Copied {
    let mut bytes = vec![0; frame.len];
    copy(frame, &[], &mut bytes);
    (frame.header, bytes)
}
