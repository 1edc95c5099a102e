//! A received frame on lease.

use zerosock_proto::wire::net::Repr;
use zerosock_ring::GuestSlice;

use super::receive::{InterfaceReceiver, Received};

/// A received frame where the device has written it. Dropping it returns its buffers to the device.
///
/// A frame with TSO or longer than a buffer lies in several buffers. The device can write them at any
/// time: what decides something must be copied before it is checked.
#[derive(Debug)]
pub struct ReceivedFrame<'a> {
    receiver: &'a InterfaceReceiver,
    received: Received<'a>,
}

impl<'a> ReceivedFrame<'a> {
    #[inline]
    pub(super) fn new(
        receiver: &'a InterfaceReceiver,
        received: Received<'a>,
    ) -> ReceivedFrame<'a> {
        ReceivedFrame { receiver, received }
    }

    /// Bytes of the frame, at least those of an Ethernet header.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "a frame is never empty")]
    pub fn len(&self) -> usize {
        self.received.len as usize
    }

    /// The state of the checksum, and what makes it a TSO frame. Checked against the length, and
    /// against the offloads that were negotiated.
    #[inline]
    pub fn repr(&self) -> Repr {
        self.received.repr
    }

    /// The bytes in the first buffer: all of the frame if it has a single one.
    #[inline]
    pub fn first(&self) -> GuestSlice<'_> {
        self.received.first
    }

    /// All bytes, buffer by buffer.
    #[inline]
    pub fn slices(&self) -> Slices<'_> {
        let buffers = self.received.buffers;
        Slices {
            receiver: self.receiver,
            first: Some(self.first()),
            buffer: buffers.head,
            left: buffers.count - 1,
        }
    }

    /// Copies bytes from `offset` on into `out`; returns their number, fewer where the frame ends.
    #[inline]
    pub fn read(&self, mut offset: usize, out: &mut [u8]) -> usize {
        let mut done = 0;
        for slice in self.slices() {
            let Some(rest) = out.get_mut(done..).filter(|rest| !rest.is_empty()) else {
                break;
            };
            done += slice.read(offset, rest);
            offset = offset.saturating_sub(slice.len());
        }
        done
    }

    /// A copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.read(0, &mut bytes);
        bytes
    }

    /// The bytes in place. `None` for a frame in several buffers, or without
    /// [`trust`](super::InterfaceConfig::trust).
    #[inline]
    pub fn bytes(&self) -> Option<&[u8]> {
        let trust = self.receiver.trust?;
        (self.received.buffers.count == 1).then(|| self.first().trusted(trust))
    }
}

impl Drop for ReceivedFrame<'_> {
    #[inline]
    fn drop(&mut self) {
        self.receiver.release(self.received.buffers);
    }
}

/// See [`ReceivedFrame::slices`].
#[derive(Debug)]
pub struct Slices<'a> {
    receiver: &'a InterfaceReceiver,
    first: Option<GuestSlice<'a>>,
    /// The buffer before the next one.
    buffer: u16,
    left: u16,
}

impl<'a> Iterator for Slices<'a> {
    type Item = GuestSlice<'a>;

    #[inline]
    fn next(&mut self) -> Option<GuestSlice<'a>> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        self.left = self.left.checked_sub(1)?;
        let (buffer, slice) = self.receiver.behind(self.buffer)?;
        self.buffer = buffer;
        Some(slice)
    }
}
