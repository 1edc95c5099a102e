//! What an application passes to a sender, and what the sender returns.

use std::fmt;
use std::io;

use super::NoSuchSlot;
use crate::sys::{Buf, SocketAddress, Stable};

/// Whether a send may go without a copy.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum Copying {
    /// The cheaper way, as far as that is known.
    #[default]
    Auto,
    /// The sender does not copy, however short the buffer. The kernel may still copy, and reports
    /// it.
    Never,
    /// Always copied: the buffer is free when the kernel has taken it; for a piece of a datagram
    /// see [`Outgoing::more`]. Such a send has no number.
    Always,
}

/// A buffer, and how to send it.
///
/// ```
/// use zerosock_zc::{Buf, Copying, Outgoing};
///
/// let mut outgoing: Outgoing = Outgoing::new(vec![0; 4096]).slot(3).flush();
/// outgoing.copying = Copying::Never;
/// ```
pub struct Outgoing<B = Buf> {
    /// The bytes.
    pub buffer: B,
    /// The destination, if the socket is not connected.
    pub to: Option<SocketAddress>,
    /// The slot with the notifier that the send attaches to.
    pub slot: Option<u32>,
    /// Closes that notifier if the send succeeds, as soon as every earlier send to the slot is
    /// finished.
    pub flush: bool,
    /// The next send continues this one (MSG_MORE): on a datagram socket it is the next piece of
    /// the same datagram, on a stream it should share a segment. When a piece of a datagram fails,
    /// the later pieces fail as well, and nothing arrives; earlier pieces were taken and are
    /// returned as sent.
    ///
    /// The buffers of a datagram's pieces are returned when the last piece was taken, also those
    /// that were copied: so all of them can be copied if there is no memory to send a later piece
    /// without a copy. They are returned earlier if the sender has no free place for the next
    /// piece, or if the application polls or waits before it has sent the next piece; the datagram
    /// then fails if there is no memory for a later piece. The kernel reads the buffers of
    /// zero-copy pieces until the datagram is complete, so a sender needs more places than a
    /// datagram has such pieces.
    pub more: bool,
    /// Whether the send may go without a copy.
    pub copying: Copying,
}

impl<B> Outgoing<B> {
    /// A send to the connected peer, attached to no slot, with [`Copying::Auto`].
    pub fn new(buffer: impl Into<B>) -> Self {
        Self {
            buffer: buffer.into(),
            to: None,
            slot: None,
            flush: false,
            more: false,
            copying: Copying::Auto,
        }
    }

    /// Sends to this address.
    #[must_use]
    pub fn to(self, address: SocketAddress) -> Self {
        let to = Some(address);
        Self { to, ..self }
    }

    /// Attaches the send to the notifier of this slot.
    #[must_use]
    pub fn slot(self, slot: u32) -> Self {
        let slot = Some(slot);
        Self { slot, ..self }
    }

    /// Closes the notifier of its slot if the send succeeds.
    #[must_use]
    pub fn flush(self) -> Self {
        let flush = true;
        Self { flush, ..self }
    }

    /// The next send continues this one (MSG_MORE).
    #[must_use]
    pub fn more(self) -> Self {
        let more = true;
        Self { more, ..self }
    }

    /// Sets whether the send is copied.
    #[must_use]
    pub fn copying(self, copying: Copying) -> Self {
        Self { copying, ..self }
    }
}

impl<B: Stable> fmt::Debug for Outgoing<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outgoing")
            .field("bytes", &self.buffer.total())
            .field("to", &self.to)
            .field("slot", &self.slot)
            .field("flush", &self.flush)
            .field("more", &self.more)
            .field("copying", &self.copying)
            .finish()
    }
}

/// Why a sender did not accept a send. Nothing of it was sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// No place is free for the buffer.
    #[error("all places of the sender are in use")]
    Full,
    /// The application has not taken 1024 free buffers more than there are places, or 65536
    /// notifications or completions.
    #[error("too many buffers, notifications or completions were not taken from the sender")]
    Unread,
    /// The slot does not exist.
    #[error(transparent)]
    NoSuchSlot(#[from] NoSuchSlot),
    /// A flush without a slot.
    #[error("the send has the flag flush and no slot")]
    FlushWithoutSlot,
    /// The buffer has more pieces than one system call takes (1024).
    #[error("a buffer of more than 1024 pieces")]
    TooManyPieces,
    /// An earlier send of the stream failed, or exceeded [`SenderBuilder::limit`](super::SenderBuilder::limit)
    /// (ETIMEDOUT): a later one would follow a gap. Or a raw socket has collected a part of a
    /// packet, and a later piece failed ([`Outgoing::more`]): the socket cannot drop that part, and
    /// would append the next packet to it.
    #[error("an earlier send failed: {0}")]
    Broken(io::Error),
    /// Another handle closed the sender.
    #[error("the sender is closed")]
    Closed,
    /// Room for more than 16 completions.
    #[error("room for more than 16 completions")]
    TooMuchRoom,
    /// The sender keeps no completions: this needs
    /// [`SenderBuilder::inline_completions`](super::SenderBuilder::inline_completions).
    #[error("the sender keeps no completions: its builder did not request them")]
    NoCompletions,
    /// A system call failed.
    #[error(transparent)]
    Call(io::Error),
}

/// A send that was not accepted, and its buffer.
#[derive(thiserror::Error)]
#[error("{why}")]
pub struct Refused<B = Buf> {
    /// The send, as it was passed in.
    pub outgoing: Outgoing<B>,
    /// Why it was not accepted.
    #[source]
    pub why: Refusal,
}

impl<B> Refused<B> {
    /// The buffer, as it was passed in.
    pub fn into_buffer(self) -> B {
        self.outgoing.buffer
    }
}

impl<B: Stable> fmt::Debug for Refused<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused")
            .field("why", &self.why)
            .field("outgoing", &self.outgoing)
            .finish()
    }
}

/// A buffer that is free again.
pub struct Returned<B = Buf> {
    /// The buffer, as it was passed in.
    pub buffer: B,
    /// The number of the send; none with [`Copying::Always`].
    pub number: Option<u32>,
    /// The result of the send.
    pub outcome: Result<Sent, Failed>,
}

impl<B: Stable> fmt::Debug for Returned<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Returned")
            .field("bytes", &self.buffer.total())
            .field("number", &self.number)
            .field("outcome", &self.outcome)
            .finish()
    }
}

/// How a buffer was sent.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Sent {
    /// The device or the receiver read the buffer directly, as far as the kernel reports it. Over
    /// the error queue, a reported range has one mark, that of its first send; over io_uring, the
    /// kernel does not report that vsock copied because the credit of the peer was short.
    InPlace,
    /// This crate or the kernel copied the bytes.
    Copied,
}

/// A send that failed.
#[derive(Debug, thiserror::Error)]
#[error("{error}, after {sent} bytes")]
pub struct Failed {
    /// Number of bytes that the kernel took before the failure.
    pub sent: usize,
    /// The error of the kernel; ETIMEDOUT if the send was late
    /// ([`SenderBuilder::limit`](super::SenderBuilder::limit)).
    #[source]
    pub error: io::Error,
}

/// Whether a buffer has more pieces than one system call takes.
pub(super) fn too_many_pieces(buffer: &impl Stable) -> bool {
    let mut pieces = 0;
    buffer.pieces(&mut |_| pieces += 1);
    pieces > 1024
}
