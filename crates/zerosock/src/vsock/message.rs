//! Received packets in a callback: see [`Stream::recv_each`](super::Stream::recv_each).

use std::fmt;

use zerosock_ring::Trust;

use crate::table::transfers::Payload;

/// The bytes of one received packet or datagram, in place, for the time of a callback.
///
/// ```
/// use std::io::Write;
///
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// (&process).write_all(b"shown")?;
/// let mut sum = 0u32;
/// host.recv_each(1, |message| {
///     let bytes = message.as_slice().expect("trusted");
///     sum = bytes.iter().map(|&byte| u32::from(byte)).sum();
/// })?;
/// assert_eq!(sum, 559);
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// After the callback the buffer returns to the sender, so a message cannot leave the callback:
///
/// ```compile_fail,E0521
/// # use zerosock::vsock::{Message, Stream};
/// fn message_outlives_its_call(stream: &Stream) {
///     let mut kept: Option<Message<'_>> = None;
///     let _ = stream.recv_each(1, |message| kept = Some(message));
/// }
/// ```
#[derive(Copy, Clone)]
pub struct Message<'m> {
    payload: Payload<'m>,
    trust: Option<Trust>,
}

impl<'m> Message<'m> {
    #[inline]
    pub(super) fn new(payload: Payload<'m>, trust: Option<Trust>) -> Message<'m> {
        Message { payload, trust }
    }

    /// Length in bytes; never 0.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "a message is never empty")]
    pub fn len(&self) -> usize {
        match self.payload {
            Payload::Copied(bytes) => bytes.len(),
            Payload::InPlace([slice]) => slice.len(),
            Payload::InPlace(slices) => slices.iter().map(|slice| slice.len()).sum(),
        }
    }

    /// Whether the bytes are where the peer's side wrote them.
    pub fn is_in_place(&self) -> bool {
        matches!(self.payload, Payload::InPlace(_))
    }

    /// The bytes themselves. `None` if the peer may write them meanwhile, or if they lie in more
    /// than one piece: then use [`copy_to`](Self::copy_to).
    #[inline]
    pub fn as_slice(&self) -> Option<&'m [u8]> {
        match self.payload {
            Payload::Copied(bytes) => Some(bytes),
            Payload::InPlace([slice]) => Some(slice.trusted(self.trust?)),
            Payload::InPlace(_) => None,
        }
    }

    /// Copies bytes from `offset` on to `out`; returns how many. Safe with any peer.
    #[inline]
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) -> usize {
        self.payload.copy_to(offset, out)
    }

    /// Passes all bytes in order to `look` in plain slices, which are copies if the peer may write the
    /// bytes meanwhile; see [`LeaseReader::windows`](super::LeaseReader::windows).
    #[inline]
    pub fn windows(&self, mut look: impl FnMut(&[u8])) {
        match (self.as_slice(), self.payload) {
            (Some(bytes), _) => look(bytes),
            (None, Payload::InPlace(slices)) => {
                slices.iter().for_each(|slice| slice.windows(&mut look));
            }
            // `as_slice` has given it.
            (None, Payload::Copied(_)) => {}
        }
    }

    /// A copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(0, &mut bytes);
        bytes
    }
}

impl fmt::Debug for Message<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("len", &self.len())
            .field("in_place", &self.is_in_place())
            .finish_non_exhaustive()
    }
}
