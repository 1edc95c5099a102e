//! A back-end of the device that returns each frame to the guest, by way of one copy: what a program
//! on DPDK does that sends what it has received.

use std::collections::VecDeque;

use zerosock_net::backend::{Backend, Frame, FrameError, Never, Sent};
use zerosock_net::stats::NetStats;
use zerosock_proto::Instant;
use zerosock_proto::wire::net::Header;
use zerosock_ring::GuestSlice;
use zerosock_virtio::outbox::Outbox;

/// Bytes of a buffer: frames are at most as long.
const BUFFER: usize = 2048;
/// Buffers: more than a queue has, so that no frame waits for one.
const BUFFERS: usize = 1024;

/// See the [module](self).
pub(super) struct Echo {
    free: Vec<Box<[u8]>>,
    /// Frames that were not returned yet, with their lengths.
    frames: VecDeque<(Box<[u8]>, usize)>,
}

impl Echo {
    pub(super) fn new() -> Echo {
        Echo {
            free: (0..BUFFERS).map(|_| vec![0; BUFFER].into()).collect(),
            frames: VecDeque::with_capacity(BUFFERS),
        }
    }
}

impl Backend for Echo {
    type Message = Never;

    fn may_have_answers(&self) -> bool {
        true
    }

    fn next_len(&mut self, _: usize) -> Option<usize> {
        self.frames.front().map(|(_, len)| *len)
    }

    #[inline]
    fn receive(
        &mut self,
        _: usize,
        header: &mut Header,
        slices: &[GuestSlice<'_>],
        rest: &mut [u8],
    ) -> Result<usize, FrameError> {
        let (buffer, len) = self.frames.pop_front().ok_or(FrameError::NotNow)?;
        *header = Header::default();
        let mut done = 0;
        for slice in slices {
            done += slice.write(0, &buffer[done..len]);
        }
        rest[..len - done].copy_from_slice(&buffer[done..len]);
        self.free.push(buffer);
        Ok(len)
    }

    #[inline]
    fn send(
        &mut self,
        _: usize,
        frame: &Frame<'_>,
        _: u64,
        _: Instant,
    ) -> Result<Sent, FrameError> {
        if frame.len > BUFFER {
            return Err(FrameError::Refused);
        }
        let mut buffer = self.free.pop().ok_or(FrameError::Refused)?;
        let mut done = frame.first.len();
        buffer[..done].copy_from_slice(frame.first);
        for slice in frame.slices {
            done += slice.read(0, &mut buffer[done..frame.len]);
        }
        self.frames.push_back((buffer, done));
        Ok(Sent::Done)
    }

    fn on_message(&mut self, message: Never, _: Instant, _: &mut NetStats) -> bool {
        match message {}
    }

    fn undeliverable(message: Never, _: &mut Outbox<Never>) {
        match message {}
    }
}
