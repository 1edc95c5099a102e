//! The messages between ports, and the frames that wait at one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::Instant;
use zerosock_proto::wire::net::Header;
use zerosock_ring::{GuestSlice, Memory, Piece, PieceBuf, SliceBuf};
use zerosock_virtio::device::Message;
use zerosock_virtio::outbox::DeviceAddr;

use crate::backend::{Addresses, Frame, MAX_PIECES};

/// How long a frame waits for buffers of its receiver.
pub const HOLD: Duration = Duration::from_millis(20);
/// Frames that a receiver which let one wait for too long has to take at once before one may wait again.
const PROBATION: u16 = 64;
/// Frames that wait at a port.
const MAX_WAITING: usize = 1024;
/// Bytes of copied frames among them.
const MAX_COPIED: usize = 1 << 20;

/// A message between two ports.
#[derive(Debug)]
pub struct PortMessage(pub(super) Content);

#[derive(Debug)]
pub(super) enum Content {
    /// A frame for the receiver.
    Frame(Forwarded),
    /// To its sender: the memory of the frame with this number is not needed any more.
    Returned(u64),
}

impl Message for PortMessage {}

/// A frame on its way.
#[derive(Debug)]
pub(super) struct Forwarded {
    pub(super) header: Header,
    pub(super) len: usize,
    pub(super) addresses: Addresses,
    /// What follows the addresses.
    pub(super) rest: Bytes,
}

/// Where bytes of a frame are.
#[derive(Debug)]
pub(super) enum Bytes {
    /// In the memory of the sender, which gets the number back.
    Lent {
        from: DeviceAddr,
        number: u64,
        memory: Arc<Memory>,
        pieces: Pieces,
    },
    /// In a copy, because there are several receivers.
    Copied(Arc<[u8]>),
}

/// The places of a frame's bytes.
#[derive(Debug)]
pub(super) enum Pieces {
    Few(PieceBuf),
    /// Those of a long frame: its copy takes much longer than this allocation. Behind so many bytes.
    Many(Box<[Piece]>, usize),
}

impl Pieces {
    pub(super) fn of(frame: &Frame<'_>) -> Pieces {
        let rest = frame.len.saturating_sub(frame.first.len());
        match PieceBuf::from_part(frame.pieces, frame.skip, rest) {
            Some(few) => Pieces::Few(few),
            None => Pieces::Many(frame.pieces.into(), frame.skip),
        }
    }

    fn get(&self) -> (&[Piece], usize) {
        match self {
            Pieces::Few(few) => (few, 0),
            Pieces::Many(all, skip) => (all, *skip),
        }
    }
}

impl Forwarded {
    /// Copies the frame into `slices`, and the bytes for which there is no room there into `rest`.
    pub(super) fn copy_to(&self, slices: &[GuestSlice<'_>], rest: &mut [u8]) {
        let mut target = Target {
            slices: slices.iter(),
            current: None,
            rest,
        };
        target.write(&self.addresses);
        match &self.rest {
            Bytes::Copied(bytes) => target.write(bytes),
            Bytes::Lent { memory, pieces, .. } => {
                let (pieces, skip) = pieces.get();
                let mut sources = SliceBuf::<MAX_PIECES>::new();
                memory.slices(pieces, skip, self.len - self.addresses.len(), &mut sources);
                sources.iter().for_each(|source| target.copy(*source));
            }
        }
    }

    /// Calls `send` with the frame as back-ends take it.
    pub(super) fn with_frame<T>(&self, send: impl FnOnce(&Frame<'_>) -> T) -> T {
        let frame = |first, memory, pieces, skip, slices| Frame {
            header: self.header,
            len: self.len,
            first,
            memory,
            pieces,
            skip,
            slices,
        };
        match &self.rest {
            Bytes::Copied(bytes) => {
                let first = [&self.addresses[..], bytes].concat();
                send(&frame(&first, None, &[], 0, &[]))
            }
            Bytes::Lent { memory, pieces, .. } => {
                let (pieces, skip) = pieces.get();
                let mut slices = SliceBuf::<MAX_PIECES>::new();
                memory.slices(pieces, skip, self.len - self.addresses.len(), &mut slices);
                send(&frame(&self.addresses, Some(memory), pieces, skip, &slices))
            }
        }
    }

    /// All bytes of the frame, in a copy.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to(&[], &mut bytes);
        bytes
    }

    /// A frame of these bytes; `None` if they are too few.
    pub(super) fn of_bytes(header: Header, bytes: &[u8]) -> Option<Forwarded> {
        let (addresses, rest) = bytes.split_first_chunk()?;
        Some(Forwarded {
            header,
            len: bytes.len(),
            addresses: *addresses,
            rest: Bytes::Copied(rest.into()),
        })
    }

    fn copied(&self) -> usize {
        match &self.rest {
            Bytes::Copied(bytes) => bytes.len(),
            Bytes::Lent { .. } => 0,
        }
    }

    /// The message that gives the sender its memory back.
    pub(super) fn returned(self) -> Option<(DeviceAddr, PortMessage)> {
        match self.rest {
            Bytes::Lent { from, number, .. } => {
                Some((from, PortMessage(Content::Returned(number))))
            }
            Bytes::Copied(_) => None,
        }
    }
}

/// Where a frame is copied to.
struct Target<'a, 'm> {
    slices: std::slice::Iter<'a, GuestSlice<'m>>,
    current: Option<GuestSlice<'m>>,
    rest: &'a mut [u8],
}

impl<'m> Target<'_, 'm> {
    /// What is left of the current slice, or the next one.
    fn slice(&mut self) -> Option<GuestSlice<'m>> {
        let current = self.current.take().filter(|slice| !slice.is_empty());
        current.or_else(|| self.slices.find(|slice| !slice.is_empty()).copied())
    }

    fn skip_rest(&mut self, count: usize) {
        let rest = std::mem::take(&mut self.rest);
        self.rest = rest.get_mut(count..).unwrap_or_default();
    }

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

/// The frames that wait at a port, in their order.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    frames: VecDeque<(Instant, Forwarded)>,
    copied: usize,
    /// While this is above 0 no frame waits. See [`PROBATION`].
    probation: u16,
}

impl Inbox {
    /// Adds a frame, or returns it if too many wait.
    #[must_use]
    pub(super) fn push(&mut self, frame: Forwarded, now: Instant) -> Option<Forwarded> {
        let copied = self.copied + frame.copied();
        if self.frames.len() >= MAX_WAITING || copied > MAX_COPIED {
            return Some(frame);
        }
        self.copied = copied;
        self.frames.push_back((now, frame));
        None
    }

    pub(super) fn front(&self) -> Option<&Forwarded> {
        self.frames.front().map(|(_, frame)| frame)
    }

    /// Puts `frames` in the place of the next one, which they have come from. Returns that.
    pub(super) fn replace_front(&mut self, frames: Vec<Forwarded>) -> Option<Forwarded> {
        let (since, front) = self.frames.pop_front()?;
        self.copied -= front.copied();
        for frame in frames.into_iter().rev() {
            self.copied += frame.copied();
            self.frames.push_front((since, frame));
        }
        Some(front)
    }

    /// Takes the next frame, for a receiver that has room.
    pub(super) fn pop(&mut self) -> Option<Forwarded> {
        self.probation = self.probation.saturating_sub(1);
        self.remove()
    }

    /// Takes the next frame that has waited for too long, or may not wait.
    pub(super) fn pop_expired(&mut self, now: Instant) -> Option<Forwarded> {
        let &(since, _) = self.frames.front()?;
        if now >= since + HOLD {
            self.probation = PROBATION;
        }
        match self.probation {
            0 => None,
            _ => self.remove(),
        }
    }

    /// Takes the next frame of a port that has no driver.
    pub(super) fn remove(&mut self) -> Option<Forwarded> {
        let (_, frame) = self.frames.pop_front()?;
        self.copied -= frame.copied();
        Some(frame)
    }

    /// When [`pop_expired`](Self::pop_expired) finds a frame.
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.frames.front().map(|&(since, _)| since + HOLD)
    }
}
