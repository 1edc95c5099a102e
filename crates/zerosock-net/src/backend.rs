//! The interface between the device and what carries its frames.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use zerosock_proto::Instant;
use zerosock_proto::wire::net::{Header, Offloads};
use zerosock_ring::{Chain, GuestSlice, Memory, Piece};
use zerosock_virtio::device::Message;
use zerosock_virtio::outbox::{DeviceAddr, Outbox};
use zerosock_virtio::queues::Quiesced;

use crate::stats::NetStats;

/// The most slices of guest memory that one call of a back-end gets.
pub const MAX_PIECES: usize = zerosock_sys::tun::MAX_PIECES;
/// Bytes of the addresses of a frame: destination and source.
pub const ADDRESSES_LEN: usize = 12;

/// The addresses of a frame: destination and source.
pub type Addresses = [u8; ADDRESSES_LEN];

/// The message of back-ends that send none.
#[derive(Debug)]
pub enum Never {}

impl Message for Never {}

/// A frame to be sent: `first`, and then `slices`.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'m> {
    /// The header, checked against the frame.
    pub header: Header,
    /// Bytes of the frame.
    pub len: usize,
    /// A private copy of the first bytes, for a decision by them: the memory may have changed since.
    /// All bytes of a frame without memory.
    pub first: &'m [u8],
    /// Where the rest lies, if there is any.
    pub memory: Option<&'m Arc<Memory>>,
    /// The rest of the bytes, behind `skip` bytes of these pieces.
    pub pieces: &'m [Piece],
    /// See `pieces`.
    pub skip: usize,
    /// The same bytes as `pieces`.
    pub slices: &'m [GuestSlice<'m>],
}

impl<'m> Frame<'m> {
    /// A frame of this process, which has no guest memory.
    pub fn of_bytes(header: Header, bytes: &'m [u8]) -> Frame<'m> {
        Frame {
            header,
            len: bytes.len(),
            first: bytes,
            memory: None,
            pieces: &[],
            skip: 0,
            slices: &[],
        }
    }
}

/// What a back-end has done with a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Sent {
    /// Sent or copied: its memory is not needed any more.
    Done,
    /// Its memory is in use until [`Backend::sent`] returns its number.
    Held,
}

/// A frame in a posted chain.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// The header, as the back-end gives it.
    pub header: Header,
    /// Bytes of the frame; they lie in the chain behind the room for a header.
    pub len: usize,
    /// Bytes of it that the back-end has copied there.
    pub copied: usize,
}

/// The two halves of a queue pair.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Half {
    /// Frames to the guest.
    Receive,
    /// Frames from the guest.
    Transmit,
}

/// What carries frames between the device and the world. It has one queue for each queue pair of the
/// device. No call blocks.
///
/// A back-end that takes the guest's buffers before there is a frame ([`posts`](Self::posts))
/// implements `post` and `take`, any other one `receive`.
pub trait Backend: Send + 'static {
    /// A message between two devices, for back-ends that are joined.
    type Message: Message + 'static;

    /// The address of the device; called once, before all other calls.
    ///
    /// # Errors
    /// The back-end cannot be used.
    fn start(&mut self, addr: DeviceAddr) -> io::Result<()> {
        let _ = addr;
        Ok(())
    }

    /// The number of queues.
    fn queues(&self) -> u16 {
        1
    }

    /// Those of the features of virtio-net that depend on the back-end: the offloads.
    fn features(&self) -> u64 {
        0
    }

    /// The largest MTU with which all frames of a guest pass; `None`: any.
    fn max_mtu(&self) -> Option<u16> {
        None
    }

    /// The descriptor of a queue, for an edge-triggered poller. It is polled for room only while the
    /// back-end has none.
    fn descriptor(&self, queue: usize) -> Option<BorrowedFd<'_>> {
        let _ = queue;
        None
    }

    /// Whether what was sent may have been answered already, so that it pays to look for received frames
    /// before an event reports them.
    fn may_have_answers(&self) -> bool {
        false
    }

    /// Whether frames to be sent need [`Addresses`] in a private copy.
    fn needs_addresses(&self) -> bool {
        false
    }

    /// The driver takes frames with these offloads from now on.
    ///
    /// # Errors
    /// The back-end does not know one. Frames that need it are dropped.
    fn set_offloads(&mut self, offloads: Offloads) -> io::Result<()> {
        let _ = offloads;
        Ok(())
    }

    /// The driver uses this queue from now on, or does not. Frames that came before it does are
    /// dropped.
    ///
    /// # Errors
    /// The back-end has gone.
    fn set_active(&mut self, queue: usize, active: bool) -> io::Result<()> {
        let _ = (queue, active);
        Ok(())
    }

    /// The guest's memory is another one from now on, or there is none. All that the back-end had of
    /// the old one has been recalled, or the guest has gone.
    fn set_memory(&mut self, memory: Option<&Arc<Memory>>) {
        let _ = memory;
    }

    /// The length of the next frame, if it is known before the frame is received.
    fn next_len(&mut self, queue: usize) -> Option<usize> {
        let _ = queue;
        None
    }

    /// Receives one frame into `slices`, and into `rest` the bytes for which there is no room there.
    /// Returns the number of bytes of the frame.
    ///
    /// # Errors
    /// See [`FrameError`].
    fn receive(
        &mut self,
        queue: usize,
        header: &mut Header,
        slices: &[GuestSlice<'_>],
        rest: &mut [u8],
    ) -> Result<usize, FrameError>;

    /// Whether the back-end takes posted chains before there is a frame.
    fn posts(&self) -> bool {
        false
    }

    /// Takes a chain that the guest has posted, with room for a header in front. False: not now.
    fn post(&mut self, queue: usize, memory: &Arc<Memory>, chain: &Chain) -> bool {
        let _ = (queue, memory, chain);
        false
    }

    /// Whether there is a frame in `chain`, the oldest one that was posted.
    ///
    /// # Errors
    /// See [`FrameError`]. `Refused`: the frame did not fit; the chain has none and is returned.
    fn take(
        &mut self,
        queue: usize,
        memory: &Arc<Memory>,
        chain: &Chain,
    ) -> Result<Taken, FrameError> {
        let _ = (queue, memory, chain);
        Err(FrameError::NotNow)
    }

    /// Sends one frame. Numbers grow by one with each frame that has memory; one without is never held.
    /// Only ports of a switch return `Held` for a frame with a non-empty `first`.
    ///
    /// # Errors
    /// See [`FrameError`].
    fn send(
        &mut self,
        queue: usize,
        frame: &Frame<'_>,
        number: u64,
        now: Instant,
    ) -> Result<Sent, FrameError>;

    /// Sends a frame of this process, which has no guest memory. The back-end sends it at once, or keeps a copy that
    /// it sends when it can.
    ///
    /// # Errors
    /// See [`FrameError`].
    fn send_copy(
        &mut self,
        queue: usize,
        header: &Header,
        bytes: &[u8],
        now: Instant,
    ) -> Result<(), FrameError> {
        let frame = Frame::of_bytes(*header, bytes);
        // No frame without memory is held, so the number has no meaning.
        self.send(queue, &frame, 0, now).map(drop)
    }

    /// Whether there is room again after [`FrameError::NotNow`], where no event of the descriptor says so.
    fn has_room(&self, queue: usize) -> bool {
        let _ = queue;
        false
    }

    /// The end of a batch: frames that were sent and chains that were posted have to reach their
    /// destination now. Called in each turn, for all queues, also after [`next_timeout`](Self::next_timeout).
    ///
    /// # Errors
    /// [`FrameError::BackendGone`]. Others concern single frames and are counted.
    fn flush(
        &mut self,
        queue: usize,
        now: Instant,
        tally: &mut NetStats,
    ) -> Result<(), FrameError> {
        let _ = (queue, now, tally);
        Ok(())
    }

    /// The number of a frame with memory that was held and is not needed any more, in any order.
    /// Numbers of before a restart are ignored.
    fn sent(&mut self, queue: usize) -> Option<u64> {
        let _ = queue;
        None
    }

    /// The queue stops: the back-end gives back the posted chains, or the memory of frames that are
    /// sent. Called again until the answer is [`Quiesced::Done`]; nothing is posted or sent meanwhile.
    fn recall(&mut self, queue: usize, half: Half) -> Quiesced {
        let _ = (queue, half);
        Quiesced::Done
    }

    /// A message for this back-end. Returns whether there are frames to receive: the device receives them
    /// at once, as far as the driver has buffers. [`finish_turn`](Self::finish_turn) and a turn follow.
    fn on_message(&mut self, message: Self::Message, now: Instant, tally: &mut NetStats) -> bool;

    /// Answers a message to a device that does not exist any more.
    fn undeliverable(message: Self::Message, outbox: &mut Outbox<Self::Message>);

    /// Called at the end of each turn, and after a message: sends messages, and does what is due.
    fn finish_turn(
        &mut self,
        now: Instant,
        outbox: &mut Outbox<Self::Message>,
        tally: &mut NetStats,
    ) {
        let _ = (now, outbox, tally);
    }

    /// When [`finish_turn`](Self::finish_turn) or [`flush`](Self::flush) has something to do.
    fn next_timeout(&self) -> Option<Instant> {
        None
    }

    /// Called before the device is removed.
    fn retire(&mut self, outbox: &mut Outbox<Self::Message>) {
        let _ = outbox;
    }
}

/// Why a frame was not moved.
#[derive(Debug)]
#[non_exhaustive]
pub enum FrameError {
    /// There is no frame, or no room for one: an event follows when that has changed.
    NotNow,
    /// The back-end refuses this frame. A frame to be received is lost then; there may be others.
    Refused,
    /// The link is down.
    LinkDown,
    /// The guest's memory has vanished.
    MemoryLost,
    /// The back-end has gone, for good.
    BackendGone(io::Error),
}
