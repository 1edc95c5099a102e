//! A device for the TCP/IP stack smoltcp: an interface, and scratch memory.
//!
//! smoltcp reads and writes plain slices. With [`trust`](super::InterfaceConfig::trust) they are leases
//! and loans; without it, and for a frame in several buffers, each frame is copied once.

use std::time::Instant;

use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::time;
use zerosock_proto::wire::net::{Checksum, ETHERNET_LEN, MAX_FRAME, Repr};

use super::Interface;
use super::failure::InterfaceFailure;
use super::frame::ReceivedFrame;
use super::loan::FrameLoan;
use crate::checksum::complete_checksum;

/// The MTU of a device that does not tell its own.
const MTU: u16 = 1500;

/// An [`Interface`] as a device of smoltcp.
///
/// After each call of smoltcp's `poll`, call [`wait`](Self::wait), which sends what the stack has
/// queued; or flush the interface.
#[derive(Debug)]
pub struct SmoltcpDevice {
    interface: Interface,
    received: Vec<u8>,
    sent: Vec<u8>,
}

impl SmoltcpDevice {
    /// The device of an interface. smoltcp gets whole frames with complete checksums, whatever was
    /// negotiated, so that the other side can use all offloads.
    pub fn new(interface: Interface) -> SmoltcpDevice {
        SmoltcpDevice {
            interface,
            received: vec![0; MAX_FRAME],
            sent: vec![0; MAX_FRAME],
        }
    }

    /// The interface.
    pub fn interface(&self) -> &Interface {
        &self.interface
    }

    /// Sends what is queued, and waits for a frame for at most `delay`, as smoltcp's `poll_delay` gives
    /// it. Returns whether there is something to do.
    ///
    /// # Errors
    /// [`InterfaceFailure`]: the interface cannot be used any more.
    pub fn wait(&self, delay: Option<time::Duration>) -> Result<bool, InterfaceFailure> {
        self.interface.flush();
        // The stack sends one frame of a socket at a time, and has more.
        if delay == Some(time::Duration::ZERO) {
            return Ok(true);
        }
        let deadline = delay.map(|delay| Instant::now() + delay.into());
        self.interface.wait(deadline)
    }

    fn frame_len(&self) -> usize {
        ETHERNET_LEN + usize::from(self.interface.mtu().unwrap_or(MTU))
    }
}

impl Device for SmoltcpDevice {
    type RxToken<'a> = SmoltcpReceive<'a>;
    type TxToken<'a> = SmoltcpTransmit<'a>;

    fn receive(
        &mut self,
        _now: time::Instant,
    ) -> Option<(SmoltcpReceive<'_>, SmoltcpTransmit<'_>)> {
        // Without room for an answer the frame stays where it is.
        let loan = self.interface.loan(self.frame_len()).ok()?;
        let frame = self.interface.recv()?;
        let receive = SmoltcpReceive {
            frame,
            scratch: &mut self.received,
        };
        let transmit = SmoltcpTransmit {
            loan,
            scratch: &mut self.sent,
        };
        Some((receive, transmit))
    }

    fn transmit(&mut self, _now: time::Instant) -> Option<SmoltcpTransmit<'_>> {
        Some(SmoltcpTransmit {
            loan: self.interface.loan(self.frame_len()).ok()?,
            scratch: &mut self.sent,
        })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = self.frame_len();
        capabilities
    }
}

/// A frame for smoltcp.
#[derive(Debug)]
pub struct SmoltcpReceive<'a> {
    frame: ReceivedFrame<'a>,
    scratch: &'a mut [u8],
}

impl RxToken for SmoltcpReceive<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        let checksum = self.frame.repr().checksum;
        if let Some(bytes) = self.frame.bytes()
            && !matches!(checksum, Checksum::Partial { .. })
        {
            return f(bytes);
        }
        let len = self.frame.read(0, self.scratch);
        let bytes = self.scratch.get_mut(..len).unwrap_or_default();
        drop(self.frame);
        if let Checksum::Partial { start, offset } = checksum {
            // Both places are inside the frame.
            complete_checksum(bytes, start.into(), offset.into());
        }
        f(bytes)
    }
}

/// Room for a frame of smoltcp.
#[derive(Debug)]
pub struct SmoltcpTransmit<'a> {
    loan: FrameLoan<'a>,
    scratch: &'a mut [u8],
}

impl TxToken for SmoltcpTransmit<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(mut self, len: usize, f: F) -> R {
        self.loan.truncate(len);
        let result = match self.loan.bytes_mut() {
            Some(bytes) if bytes.len() == len => f(bytes),
            // smoltcp asks for no more than the MTU allows, and for no less than a header.
            _ => {
                let bytes = self.scratch.get_mut(..len).unwrap_or_default();
                let result = f(bytes);
                self.loan.write(0, bytes);
                result
            }
        };
        // Cannot fail: no offload is used.
        let _ = self.loan.queue(&Repr::PLAIN);
        result
    }
}
