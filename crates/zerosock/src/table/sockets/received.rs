//! Received bytes that are not read yet: buffers of the peer, and copies.

use zerosock_proto::Instant;

use super::message_end::MessageEnd;
use super::store::Store;

/// Unread bytes in a buffer of the pool.
#[derive(Debug)]
pub(crate) struct HeldBuffer<T> {
    pub(crate) token: T,
    /// Offset of the first unread byte from the beginning of the buffer's pieces.
    pub(crate) offset: u32,
    /// Bytes not read yet.
    pub(crate) len: u32,
    /// When they arrived. `None`: after the last turn, and the next one sets it.
    pub(crate) since: Option<Instant>,
    /// What ends with the last of them.
    pub(crate) ends: MessageEnd,
}

/// Consecutive received bytes.
#[derive(Debug)]
pub(crate) enum ReceivedPart<T> {
    /// In the peer's buffer.
    Held(HeldBuffer<T>),
    /// In a copy, of which the first `taken` bytes were read.
    Copied {
        bytes: Vec<u8>,
        taken: usize,
        ends: MessageEnd,
    },
}

impl<T> ReceivedPart<T> {
    pub(crate) fn len(&self) -> usize {
        match self {
            ReceivedPart::Held(held) => held.len as usize,
            ReceivedPart::Copied { bytes, taken, .. } => bytes.len() - taken,
        }
    }

    pub(super) fn ends(&self) -> MessageEnd {
        match self {
            ReceivedPart::Held(held) => held.ends,
            ReceivedPart::Copied { ends, .. } => *ends,
        }
    }
}

/// Message state of a connection.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    /// Complete messages not read yet.
    pub(super) complete: u32,
    /// Bytes of the incomplete message.
    pub(super) incomplete_bytes: usize,
    /// Buffers that the incomplete message holds.
    pub(super) incomplete_held: u32,
}

/// Appends the bytes of `held` to `to`. Unreadable bytes become zeros, so that a stream keeps its
/// length; this does not happen, because buffers are validated on receipt and recalled before their
/// memory is unmapped.
pub(super) fn copy_out<T>(store: &impl Store<Token = T>, held: &HeldBuffer<T>, to: &mut Vec<u8>) {
    let start = to.len();
    to.resize(start + held.len as usize, 0);
    let mut read = 0;
    if let (Some(memory), Some(out)) = (store.memory(&held.token), to.get_mut(start..)) {
        read = memory.read(store.pieces(&held.token), held.offset as usize, out);
    }
    debug_assert_eq!(read, held.len as usize, "bytes that are nowhere");
}
