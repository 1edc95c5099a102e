//! A TAP interface as the back-end.
//!
//! While no driver uses the first queue, the interface has no carrier, so that the host's network
//! does not queue frames for a guest that is not there. Further queues are detached while they are
//! not in use, so that the kernel spreads frames over the others.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use zerosock_proto::Instant;
use zerosock_proto::wire::net::{HEADER_LEN, Header, Offloads};
use zerosock_ring::GuestSlice;
pub use zerosock_sys::tun::Tap;
use zerosock_sys::tun::{self, Offload};
use zerosock_virtio::outbox::Outbox;

use crate::backend::{Backend, Frame, FrameError, Never, Sent};
use crate::model::ALL_OFFLOADS;
use crate::stats::NetStats;

/// "File descriptor in bad state": the interface was removed.
const EBADFD: i32 = 77;
const EIO: i32 = 5;
const EFAULT: i32 = 14;

/// Frames that are dropped at most when a driver begins to use a queue: more than a queue has (1000 by
/// default, `txqueuelen`).
const MAX_STALE: usize = 1 << 16;

/// See the [module](self).
#[derive(Debug)]
pub struct TapBackend {
    tap: Tap,
    /// The kernel has told that it does not know TUNSETCARRIER.
    no_carrier: bool,
}

impl TapBackend {
    /// A back-end with all queues of `tap`, none of them in use.
    ///
    /// # Errors
    /// A queue cannot be detached.
    pub fn new(tap: Tap) -> io::Result<TapBackend> {
        let mut backend = TapBackend {
            tap,
            no_carrier: false,
        };
        for queue in 0..backend.tap.queues().len() {
            backend.set_active(queue, false)?;
        }
        Ok(backend)
    }

    fn queue(&self, queue: usize) -> Result<BorrowedFd<'_>, FrameError> {
        let queue = self.tap.queues().get(queue);
        let missing = || FrameError::BackendGone(io::ErrorKind::NotFound.into());
        Ok(queue.ok_or_else(missing)?.as_fd())
    }

    /// Drops the frames that came before a driver used the queue.
    fn drop_stale(&self, queue: usize) -> io::Result<()> {
        for _ in 0..MAX_STALE {
            let queue = self.tap.queues().get(queue);
            let queue = queue.ok_or(io::ErrorKind::NotFound)?.as_fd();
            match tun::read_frame(queue, &mut [0; HEADER_LEN], &[], &mut []) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn set_carrier(&mut self, carrier: bool) -> io::Result<()> {
        match self.tap.set_carrier(carrier) {
            Err(error) if error.raw_os_error() == Some(EBADFD) => return Err(error),
            Err(error) if !std::mem::replace(&mut self.no_carrier, true) => {
                let name = self.tap.name();
                tracing::warn!("{name}: the carrier cannot be set: {error}");
            }
            _ => {}
        }
        Ok(())
    }
}

fn frame_error(error: io::Error) -> FrameError {
    match error.raw_os_error() {
        _ if error.kind() == io::ErrorKind::WouldBlock => FrameError::NotNow,
        Some(EBADFD) => FrameError::BackendGone(error),
        Some(EFAULT) => FrameError::MemoryLost,
        Some(EIO) => FrameError::LinkDown,
        _ => FrameError::Refused,
    }
}

impl Backend for TapBackend {
    type Message = Never;

    fn queues(&self) -> u16 {
        u16::try_from(self.tap.queues().len()).unwrap_or(u16::MAX)
    }

    fn features(&self) -> u64 {
        ALL_OFFLOADS
    }

    fn descriptor(&self, queue: usize) -> Option<BorrowedFd<'_>> {
        Some(self.tap.queues().get(queue)?.as_fd())
    }

    /// The network of the host handles a frame, and often sends the answer, before the write returns.
    fn may_have_answers(&self) -> bool {
        true
    }

    fn set_offloads(&mut self, offloads: Offloads) -> io::Result<()> {
        let Offloads {
            csum,
            tso4,
            tso6,
            ecn,
        } = offloads;
        self.tap.set_offload(Offload {
            csum,
            tso4,
            tso6,
            ecn,
        })
    }

    fn set_active(&mut self, queue: usize, active: bool) -> io::Result<()> {
        match (queue, active) {
            (0, true) => {
                self.drop_stale(0)?;
                self.set_carrier(true)
            }
            (0, false) => self.set_carrier(false),
            _ => self.tap.attach_queue(queue, active),
        }
    }

    #[inline]
    fn receive(
        &mut self,
        queue: usize,
        header: &mut Header,
        slices: &[GuestSlice<'_>],
        rest: &mut [u8],
    ) -> Result<usize, FrameError> {
        tun::read_frame(self.queue(queue)?, &mut header.0, slices, rest).map_err(frame_error)
    }

    #[inline]
    fn send(
        &mut self,
        queue: usize,
        frame: &Frame<'_>,
        _: u64,
        _: Instant,
    ) -> Result<Sent, FrameError> {
        let sent = tun::write_frame(
            self.queue(queue)?,
            &frame.header.0,
            frame.first,
            frame.slices,
        );
        sent.map(|()| Sent::Done).map_err(frame_error)
    }

    fn on_message(&mut self, message: Never, _: Instant, _: &mut NetStats) -> bool {
        match message {}
    }

    fn undeliverable(message: Never, _: &mut Outbox<Never>) {
        match message {}
    }
}
