//! Frames to the guest.
//!
//! # Invariants
//! - Each chain that the device has posted has one chunk in the fill ring ([`Posted`]). Those behind them wait for
//!   a socket.
//! - Chunks of guest memory are posted only after the probe has seen that the driver keeps to its place, and not after
//!   one of them was used out of order.

use zerosock_proto::wire::net::{HEADER_LEN, Header};
use zerosock_ring::{Chain, GuestSlice, Memory, SliceBuf};
use zerosock_sys::xdp::{FRAME_OFFSET, MAX_FRAME, Probe, ReceivedChunk, Verdict, XdpSocket};

use super::posted::Posted;
use super::sizes::SIZES;
use crate::backend::{FrameError, MAX_PIECES, Taken};

/// The receiving half of a port.
#[derive(Debug, Default)]
pub(super) struct XdpReceiver {
    /// The chunks that the kernel has.
    posted: Posted,
    /// Chains behind them that have no chunk.
    waiting: usize,
    probe: Option<Probe>,
    /// Frames are always received in private chunks.
    pub(super) copies: bool,
    /// Bytes of the longest frame that the interface lets in.
    pub(super) longest: usize,
    /// Bytes of [`receive`](Self::receive) since the last turn.
    copied: u64,
    /// Frames since the last turn that were received and are for no chain.
    lost: u64,
    /// The log has a line about where frames are received.
    has_logged_place: bool,
}

/// Why a frame was not received.
pub(super) enum Failure {
    /// As for the device.
    Frame(FrameError),
    /// The driver does not keep to the rule of frames: the socket is to be closed.
    Driver(String),
}

impl From<FrameError> for Failure {
    fn from(error: FrameError) -> Failure {
        Failure::Frame(error)
    }
}

impl XdpReceiver {
    pub(super) fn new(copies: bool) -> XdpReceiver {
        XdpReceiver {
            copies,
            ..XdpReceiver::default()
        }
    }

    /// Whether no frame is longer than its chunk has room for. A card may write the first bytes of a longer
    /// one, rounded up to its own unit, before the program drops the frame.
    pub(super) fn all_frames_fit(&self) -> bool {
        self.longest <= MAX_FRAME as usize
    }

    /// Uses another socket.
    pub(super) fn attach(&mut self, socket: &XdpSocket) {
        self.probe = Some(Probe::new(socket.umem(), socket.is_zero_copy()));
        self.posted = Posted::new(socket.umem().chunk_numbers());
        self.has_logged_place = false;
    }

    /// The socket is closed: chains that it had wait for the next one. Frames that it has are lost.
    pub(super) fn detach(&mut self, socket: &mut XdpSocket) {
        self.waiting += self.posted.len();
        self.posted = Posted::default();
        self.probe = None;
        let frames = std::iter::from_fn(|| socket.receive().ok().flatten());
        self.lost += frames.take(SIZES.receive as usize).count() as u64;
    }

    /// Forgets the chains that have no chunk.
    pub(super) fn forget_waiting(&mut self) {
        self.waiting = 0;
    }

    /// Whether the kernel has chunks.
    pub(super) fn has_posted(&self) -> bool {
        self.posted.len() > 0
    }

    /// Posts private chunks for the chains that wait.
    pub(super) fn post_waiting(&mut self, socket: &mut XdpSocket) {
        while self.waiting > 0 && self.post_private(socket) {
            self.waiting -= 1;
        }
    }

    /// Posts a private chunk for a chain.
    pub(super) fn post_private(&mut self, socket: &mut XdpSocket) -> bool {
        if self.posted.len() >= SIZES.receive as usize {
            return false;
        }
        let Some(chunk) = socket.umem_mut().take_chunk() else {
            return false;
        };
        match socket.umem().chunk_number(chunk) {
            Some(number) if socket.post(chunk) => {
                self.posted.push_private(number);
                true
            }
            _ => {
                socket.umem_mut().return_chunk(chunk);
                false
            }
        }
    }

    /// Posts a chunk for a chain: that of the chain itself where possible. `is_same`: the chain lies in the
    /// memory of the socket.
    pub(super) fn post(&mut self, socket: &mut XdpSocket, chain: &Chain, is_same: bool) -> bool {
        self.post_waiting(socket);
        if self.waiting > 0 || self.posted.len() >= SIZES.receive as usize {
            return false;
        }
        let verdict = self.probe.as_ref().map(Probe::verdict);
        let is_bounded = !socket.is_zero_copy() || self.all_frames_fit();
        let in_place = is_same && is_bounded && !self.copies && verdict == Some(Verdict::InPlace);
        let chunk = match in_place {
            true => socket.chunk_for(chain.writable(), HEADER_LEN),
            false => None,
        };
        match chunk {
            None => self.post_private(socket),
            Some(chunk) => {
                let posted = socket.post(chunk);
                if posted {
                    self.posted.push_own(chunk);
                }
                posted
            }
        }
    }

    /// The next frame, with its chunk taken out of the posted ones.
    fn next(&mut self, socket: &mut XdpSocket, name: &str) -> Result<ReceivedChunk, Failure> {
        if !self.has_posted() {
            return Err(FrameError::NotNow.into());
        }
        let received = socket.receive();
        let received = received.map_err(|error| Failure::Driver(error.to_string()))?;
        let received = received.ok_or(FrameError::NotNow)?;
        let chunk = received.chunk;
        let number = socket.umem().chunk_number(chunk);
        if let Err(error) = self.posted.take(chunk, number) {
            self.lost += 1;
            return Err(Failure::Driver(error.to_string()));
        }
        if !socket.umem().is_private(chunk) && received.offset != FRAME_OFFSET {
            // Its chain has no chunk now.
            self.waiting += 1;
            self.lost += 1;
            let reason = "the driver writes frames to another place than before";
            return Err(Failure::Driver(reason.into()));
        }
        if socket.umem().is_private(chunk)
            && let Some(probe) = &mut self.probe
        {
            probe.examine(socket.umem(), &received);
            let place = match probe.verdict() {
                _ if self.copies => "copies of them",
                Verdict::Open => return Ok(received),
                Verdict::InPlace => "its memory",
                Verdict::Copy => "copies of them: the driver writes around frames",
            };
            if socket.umem().memory().is_some()
                && !std::mem::replace(&mut self.has_logged_place, true)
            {
                tracing::info!("{name}: the guest receives frames in {place}");
            }
        }
        Ok(received)
    }

    /// The frame in `chain`, the oldest one that was posted.
    pub(super) fn take(
        &mut self,
        socket: &mut XdpSocket,
        (memory, chain): (&Memory, &Chain),
        name: &str,
    ) -> Result<Taken, Failure> {
        let received = self.next(socket, name)?;
        let len = received.len as usize;
        let mut copied = 0;
        if socket.umem().is_private(received.chunk) {
            let fits = HEADER_LEN + len <= chain.writable_len() as usize;
            if fits {
                let mut slices = SliceBuf::<MAX_PIECES>::new();
                let covered = memory.slices(chain.writable(), HEADER_LEN, len, &mut slices);
                // All or nothing: what is written is logged only for a frame.
                if covered == len {
                    copied = copy(socket, &received, &slices, &mut []);
                }
            }
            socket.umem_mut().return_chunk(received.chunk);
            if copied < len {
                return Err(FrameError::Refused.into());
            }
        }
        Ok(Taken {
            header: Header::default(),
            len,
            copied,
        })
    }

    /// Bytes that [`receive`](Self::receive) has copied since the last call.
    pub(super) fn take_copied(&mut self) -> u64 {
        std::mem::take(&mut self.copied)
    }

    /// Frames that were lost since the last call.
    pub(super) fn take_lost(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }

    /// Copies the next frame to `slices`, and what has no room there to `rest`. Returns its length.
    pub(super) fn receive(
        &mut self,
        socket: &mut XdpSocket,
        (slices, rest): (&[GuestSlice<'_>], &mut [u8]),
        name: &str,
    ) -> Result<usize, Failure> {
        let received = self.next(socket, name)?;
        self.copied += copy(socket, &received, slices, rest) as u64;
        socket.umem_mut().return_chunk(received.chunk);
        self.post_private(socket);
        Ok(received.len as usize)
    }
}

/// Copies a frame out of a private chunk. Returns how many bytes had room.
fn copy(
    socket: &XdpSocket,
    received: &ReceivedChunk,
    slices: &[GuestSlice<'_>],
    rest: &mut [u8],
) -> usize {
    let at = received.chunk + u64::from(received.offset);
    let Some(mut bytes) = socket.umem().private(at, received.len as usize) else {
        return 0;
    };
    let mut done = 0;
    for slice in slices {
        let copied = bytes.copy_to(*slice);
        bytes = bytes.part(copied, usize::MAX);
        done += copied;
    }
    done + bytes.read(0, rest)
}

#[cfg(test)]
#[path = "received_tests.rs"]
mod tests;
