//! What a program gives to a sender, and what it gets back.

use std::fmt;
use std::io;

use super::NoSuchSlot;
use crate::sys::{Address, Buf, Stable};

/// Whether a send may go without a copy.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum Copying {
    /// Whatever costs less, as far as that is known.
    #[default]
    Auto,
    /// Never copied by us, however short. The kernel may still copy, and says so.
    Never,
    /// Always copied: the buffer is free with the result; that of a piece of a datagram as
    /// [`Outgoing::more`] says. Such a send has no number.
    Always,
}

/// A buffer and how it is to be sent.
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
    /// Where to, if the socket is not connected.
    pub to: Option<Address>,
    /// The slot whose notifier it attaches to.
    pub slot: Option<u32>,
    /// Closes that notifier if the send succeeds, once every send to the slot that was accepted
    /// before it is over, too.
    pub flush: bool,
    /// More is to come that belongs to it (MSG_MORE): of a datagram the rest, of a stream what
    /// should go with it in one segment. When a piece of a datagram fails, those behind it fail, too,
    /// and nothing arrives; those before it have been taken, and come back as sent.
    ///
    /// The buffers of a datagram's pieces come back when its last one was taken, also those that were
    /// copied: so all of it can be copied if there is no memory to send a later piece without a copy.
    /// They come back before that when the sender has no other place for the rest, or is polled or
    /// waited for while no more of the datagram was accepted; but those that go without a copy are the
    /// kernel's until the datagram is complete, so that a sender needs more places than a datagram has
    /// such pieces. If there is no memory after that, the datagram fails.
    pub more: bool,
    /// Whether it may go without a copy.
    pub copying: Copying,
}

impl<B> Outgoing<B> {
    /// Sent to the peer the socket is connected to, attached to no slot, copied or not as costs
    /// less.
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

    /// Sent to this address.
    #[must_use]
    pub fn to(self, address: Address) -> Self {
        let to = Some(address);
        Self { to, ..self }
    }

    /// Attached to the notifier of this slot.
    #[must_use]
    pub fn slot(self, slot: u32) -> Self {
        let slot = Some(slot);
        Self { slot, ..self }
    }

    /// Closes its slot's notifier if it succeeds.
    #[must_use]
    pub fn flush(self) -> Self {
        let flush = true;
        Self { flush, ..self }
    }

    /// To be continued by the next send (MSG_MORE).
    #[must_use]
    pub fn more(self) -> Self {
        let more = true;
        Self { more, ..self }
    }

    /// Copied or not as is said here.
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
    /// As many buffers are under way as the sender has places for.
    #[error("all places of the sender are taken")]
    Full,
    /// More buffers are to be taken back than there are places, by 1024, or 65536 notifications or
    /// completions are to be read.
    #[error("buffers, notifications or completions are to be taken first")]
    Unread,
    /// There is no such slot.
    #[error(transparent)]
    NoSuchSlot(#[from] NoSuchSlot),
    /// A flush without a slot.
    #[error("a flush names no slot")]
    FlushWithoutSlot,
    /// More pieces than one call of the kernel takes (1024).
    #[error("a buffer of more than 1024 pieces")]
    TooManyPieces,
    /// A stream that has failed, or of which a send was late (ETIMEDOUT,
    /// [`Builder::limit`](super::Builder::limit)): nothing can be sent behind what got lost. Or a raw
    /// socket that has gathered a part of a packet whose rest failed ([`Outgoing::more`]): it cannot
    /// be made to forget that, and would glue the next packet to it.
    #[error("an earlier send failed: {0}")]
    Broken(io::Error),
    /// The sender was closed, by another handle to it.
    #[error("the sender is closed")]
    Closed,
    /// More room for completions than 16.
    #[error("room for more than 16 completions")]
    TooMuchRoom,
    /// Room for completions of a sender that keeps none
    /// ([`Builder::inline_completions`](super::Builder::inline_completions)).
    #[error("the sender keeps no completions: its builder was not told to")]
    NoCompletions,
    /// The kernel's answer to the call itself.
    #[error(transparent)]
    Call(io::Error),
}

/// A send that was not accepted, and its buffer.
pub struct Refused<B = Buf> {
    /// As it was given.
    pub outgoing: Outgoing<B>,
    /// Why.
    pub why: Refusal,
}

impl<B> Refused<B> {
    /// The buffer, as it was given.
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

impl<B> fmt::Display for Refused<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(f)
    }
}

impl<B: Stable> std::error::Error for Refused<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.why)
    }
}

/// A buffer that is free again.
pub struct Returned<B = Buf> {
    /// As it was given.
    pub buffer: B,
    /// Its number; none if it was to be copied ([`Copying::Always`]).
    pub number: Option<u32>,
    /// How it went.
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
    /// The device, or the receiver, read the buffer itself, as far as the kernel tells: over the
    /// error queue it may name copied sends together with others that were not (each range has one
    /// mark, that of its first), and over io_uring it does not tell when vsock copied because the
    /// peer's credit was short.
    InPlace,
    /// Through a copy, by us or by the kernel after all.
    Copied,
}

/// A send that failed.
#[derive(Debug, thiserror::Error)]
#[error("{error}, after {sent} bytes")]
pub struct Failed {
    /// How many bytes of it were taken before.
    pub sent: usize,
    /// What the kernel answered; ETIMEDOUT if it was late ([`Builder::limit`](super::Builder::limit)).
    #[source]
    pub error: io::Error,
}

/// Whether a buffer has more pieces than the kernel takes.
pub(super) fn too_many_pieces(buffer: &impl Stable) -> bool {
    let mut pieces = 0;
    buffer.pieces(&mut |_| pieces += 1);
    pieces > 1024
}
