//! A buffer for a frame to send, on loan.

use zerosock_proto::wire::net::{ETHERNET_LEN, HEADER_LEN, HeaderError, Repr};
use zerosock_ring::{Claim, GuestSlice};

use super::transmit::{InterfaceTransmitter, LoanError};
use crate::header;

/// A buffer from which the device will read a frame. It contains what was there before until it is
/// written. [`queue`](Self::queue) sends it; a loan that is dropped sends nothing.
#[derive(Debug)]
pub struct FrameLoan<'a> {
    transmitter: &'a InterfaceTransmitter,
    buffer: u16,
    /// The header and the frame.
    whole: GuestSlice<'a>,
    /// Made when the caller asks for a plain slice.
    claim: Option<Claim>,
}

impl<'a> FrameLoan<'a> {
    #[inline]
    pub(super) fn take(
        transmitter: &'a InterfaceTransmitter,
        len: usize,
    ) -> Result<FrameLoan<'a>, LoanError> {
        let (buffer, whole) = transmitter.take(len)?;
        Ok(FrameLoan {
            transmitter,
            buffer,
            whole,
            claim: None,
        })
    }

    /// Bytes of the frame, at least those of an Ethernet header.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "a frame is never empty")]
    pub fn len(&self) -> usize {
        self.whole.len() - HEADER_LEN
    }

    /// Shortens the frame to `len` bytes, but not below those of an Ethernet header.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        self.whole = self.whole.part(0, HEADER_LEN + len.max(ETHERNET_LEN));
        self.claim = None;
    }

    /// The bytes of the frame.
    #[inline]
    pub fn slice(&self) -> GuestSlice<'_> {
        self.whole.part(HEADER_LEN, usize::MAX)
    }

    /// Copies `bytes` to the frame from `offset` on; returns their number, fewer where the frame ends.
    #[inline]
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> usize {
        self.slice().write(offset, bytes)
    }

    /// The bytes in place, for writing. `None` without [`trust`](super::InterfaceConfig::trust).
    #[inline]
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        if self.claim.is_none() {
            self.claim = self.transmitter.claim(self.buffer, self.len());
        }
        self.claim.as_mut()?.slice_mut(self.transmitter.memory())
    }

    /// Queues the frame. The device sees it after [`flush`](super::Interface::flush).
    ///
    /// # Errors
    /// `repr` lies about the frame, or uses an offload that the device does not take
    /// ([`offloads`](super::Interface::offloads)). Nothing is sent.
    #[inline]
    pub fn queue(self, repr: &Repr) -> Result<(), HeaderError> {
        match self.transmitter.header(repr, self.len())? {
            None => header::write_repr(self.whole, &Repr::PLAIN, 0),
            Some(header) => header::write(self.whole, header),
        };
        self.transmitter
            .queue(self.buffer, self.len(), repr.gso.is_some());
        // The buffer is the device's; nothing else is owned.
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for FrameLoan<'_> {
    #[inline]
    fn drop(&mut self) {
        self.transmitter.put_back(self.buffer);
    }
}
