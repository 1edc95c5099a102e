//! Whether a driver writes received frames where it should, and nothing else.
//!
//! In the guest's buffers nothing may be written but the frame. So the first frames go to private chunks
//! whose surroundings are filled with a pattern, and buffers of the guest are used only after these frames
//! have left the pattern as it was. The bytes behind the end of a frame belong to its place.

use zerosock_ring::GuestSlice;

use super::socket::ReceivedChunk;
use super::umem::{MARGIN, Umem};
use super::{CHUNK, FRAME_OFFSET, MAX_FRAME};

/// Bytes that a frame has to have to show where a driver that writes memory itself ends it.
const LONG: u32 = MAX_FRAME - 64;

/// What the frames so far have shown.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// Nothing.
    Open,
    /// Frames can be received in the guest's buffers.
    InPlace,
    /// They are to be received in private chunks and copied.
    Copy,
}

/// Looks at the first frames of a socket.
#[derive(Debug)]
pub struct Probe {
    verdict: Verdict,
    /// The probe's chunks, lowest address first.
    chunks: Vec<u64>,
    /// Shortest frame that shows enough.
    shortest: u32,
}

impl Probe {
    /// Writes the pattern. The probe's chunks must not be in use.
    ///
    /// A driver that writes the memory itself (`zero_copy`) has to show it with a frame of nearly
    /// [`MAX_FRAME`] bytes; for the kernel's own copy any frame is enough.
    pub fn new(umem: &Umem, zero_copy: bool) -> Probe {
        let chunks = umem.probes();
        for addr in &chunks {
            if let Some(memory) = surroundings(umem, *addr) {
                let bytes: Vec<u8> = (0..memory.len()).map(pattern).collect();
                memory.write(0, &bytes);
            }
        }
        Probe {
            verdict: Verdict::Open,
            chunks,
            shortest: if zero_copy { LONG } else { 0 },
        }
    }

    /// What the frames so far have shown.
    #[inline]
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Looks at a frame that was received in a chunk of its own, before the chunk is used again.
    pub fn examine(&mut self, umem: &Umem, frame: &ReceivedChunk) {
        if self.verdict == Verdict::Copy || self.chunks.binary_search(&frame.chunk).is_err() {
            return;
        }
        let Some(memory) = surroundings(umem, frame.chunk) else {
            return;
        };
        let mut bytes = vec![0; memory.len()];
        memory.read(0, &mut bytes);
        let place = (MARGIN as usize + FRAME_OFFSET as usize)..(MARGIN + u64::from(CHUNK)) as usize;
        let outside = bytes
            .iter()
            .enumerate()
            .filter(|(index, _)| !place.contains(index));
        let intact = outside.clone().all(|(index, byte)| *byte == pattern(index));
        if frame.offset != FRAME_OFFSET || !intact {
            self.verdict = Verdict::Copy;
        } else if frame.len >= self.shortest {
            self.verdict = Verdict::InPlace;
        }
        // Once used, the chunk has no pattern any more in its place, but around it.
    }
}

fn surroundings(umem: &Umem, chunk: u64) -> Option<GuestSlice<'_>> {
    let len = 2 * MARGIN + u64::from(CHUNK);
    umem.private(chunk.checked_sub(MARGIN)?, len as usize)
}

fn pattern(index: usize) -> u8 {
    (index as u8).wrapping_mul(29) ^ 0xa5
}
