//! Frames from the guest.
//!
//! # Invariants
//! - The kernel reads a frame in the guest's memory until it has completed it, or its socket is closed;
//!   only then the device gets its number back.
//! - A frame in the guest's memory has a first part with a whole Ethernet header: kernels take it for
//!   granted that such a header lies in one piece.
//! - A frame without [`Frame::memory`], one in another memory than that of the socket, with a private part or
//!   of too many parts is sent from a private chunk.

use std::collections::VecDeque;

use zerosock_proto::wire::net::ETHERNET_LEN;
use zerosock_sys::xdp::{self, CHUNK, MAX_PARTS, SendError, XdpSocket};

use super::sizes::{MAX_COPIES, SIZES};
use crate::backend::{Frame, FrameError, Sent};

/// The sending half of a port.
#[derive(Debug, Default)]
pub(super) struct XdpTransmitter {
    /// In their order.
    in_flight: VecDeque<Flying>,
    /// Private chunks among them.
    copies: usize,
    /// Numbers of frames of a socket that is being closed.
    closing: VecDeque<u64>,
    /// Numbers of frames that the device gets back.
    returned: VecDeque<u64>,
    /// Bytes that were copied since the last turn.
    copied: u64,
}

/// A frame that the kernel reads.
#[derive(Debug)]
enum Flying {
    /// In the guest's memory: its number.
    InPlace(u64),
    /// In a private chunk.
    Copy(u64),
}

impl XdpTransmitter {
    /// Sends a frame. `is_same`: it lies in the memory of the socket.
    pub(super) fn send(
        &mut self,
        socket: &mut XdpSocket,
        frame: &Frame<'_>,
        number: u64,
        is_same: bool,
    ) -> Result<Sent, FrameError> {
        let in_place = match is_same && frame.first.is_empty() {
            true => socket.frame_of(frame.pieces, frame.skip),
            false => None,
        };
        let has_header = |parts: &[(u64, u32)]| {
            parts
                .first()
                .is_some_and(|part| part.1 >= ETHERNET_LEN as u32)
        };
        if let Some(in_place) = in_place.filter(|frame| has_header(frame.parts())) {
            return match socket.send(&in_place) {
                Ok(()) => {
                    self.in_flight.push_back(Flying::InPlace(number));
                    Ok(Sent::Held)
                }
                Err(SendError::Full) => Err(FrameError::NotNow),
                Err(SendError::Invalid) => Err(FrameError::Refused),
            };
        }
        self.send_copy(socket, frame)
    }

    fn send_copy(&mut self, socket: &mut XdpSocket, frame: &Frame<'_>) -> Result<Sent, FrameError> {
        if frame.len > CHUNK as usize {
            return Err(FrameError::Refused);
        }
        if self.copies >= MAX_COPIES {
            return Err(FrameError::NotNow);
        }
        let chunk = socket
            .umem_mut()
            .take_send_chunk()
            .ok_or(FrameError::NotNow)?;
        let mut copied = 0;
        if let Some(room) = socket.umem().private(chunk, frame.len) {
            copied = room.write(0, frame.first);
            for slice in frame.slices {
                copied += slice.copy_to(room.part(copied, usize::MAX));
            }
        }
        let sent = match copied == frame.len {
            true => socket.send(&xdp::XdpFrame::of_one(chunk, frame.len as u32)),
            false => Err(SendError::Invalid),
        };
        match sent {
            Ok(()) => {
                self.in_flight.push_back(Flying::Copy(chunk));
                self.copies += 1;
                self.copied += frame.len as u64;
                Ok(Sent::Done)
            }
            Err(error) => {
                socket.umem_mut().return_chunk(chunk);
                Err(match error {
                    SendError::Full => FrameError::NotNow,
                    SendError::Invalid => FrameError::Refused,
                })
            }
        }
    }

    /// Whether any frame can be sent.
    pub(super) fn has_room(&self, socket: &XdpSocket) -> bool {
        socket.in_flight() + MAX_PARTS <= SIZES.transmit as usize && self.copies < MAX_COPIES
    }

    /// Takes the frames that the kernel has completed.
    pub(super) fn complete(&mut self, socket: &mut XdpSocket) {
        for _ in 0..socket.completed() {
            match self.in_flight.pop_front() {
                Some(Flying::InPlace(number)) => self.returned.push_back(number),
                Some(Flying::Copy(chunk)) => {
                    self.copies -= 1;
                    socket.umem_mut().return_chunk(chunk);
                }
                None => {}
            }
        }
    }

    /// The socket is being closed.
    pub(super) fn detach(&mut self) {
        let numbers = self.in_flight.drain(..).filter_map(|frame| match frame {
            Flying::InPlace(number) => Some(number),
            Flying::Copy(_) => None,
        });
        self.closing.extend(numbers);
        self.copies = 0;
    }

    /// The socket is closed.
    pub(super) fn closed(&mut self) {
        self.returned.append(&mut self.closing);
    }

    pub(super) fn pop_returned(&mut self) -> Option<u64> {
        self.returned.pop_front()
    }

    /// Whether the kernel reads no frame any more.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.closing.is_empty()
    }

    /// Bytes that were copied since the last call.
    pub(super) fn take_copied(&mut self) -> u64 {
        std::mem::take(&mut self.copied)
    }
}
