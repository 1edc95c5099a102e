//! One descriptor to sleep on: the device's calls, its hang-up, and a bell of our own.
//!
//! All is registered edge-triggered: what happened is forgotten by asking for it once, with one
//! system call and without reading any eventfd. What must hold: nothing is forgotten while
//! somebody may sleep on the descriptor without having been woken.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

use super::frontend::timespec;

/// A call of a queue, or our own bell.
const BELL: u64 = 0;
/// The first device that was ever attached; later ones count on.
const DEVICE: u64 = 1;

/// See the module.
#[derive(Debug)]
pub(crate) struct Watch {
    epoll: OwnedFd,
    waker: Arc<OwnedFd>,
    /// What the device that is attached now is known by.
    device: u64,
}

impl Watch {
    pub(crate) fn new(calls: &[OwnedFd]) -> io::Result<Watch> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        for bell in calls.iter().chain([&waker]) {
            let flags = EventFlags::IN | EventFlags::ET;
            epoll::add(&epoll, bell, EventData::new_u64(BELL), flags)?;
        }
        Ok(Watch {
            epoll,
            waker: Arc::new(waker),
            device: DEVICE,
        })
    }

    /// Watches a device's control socket instead of that of the one before, which leaves by being
    /// closed.
    pub(crate) fn device(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.device += 1;
        let flags = EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.epoll, socket, EventData::new_u64(self.device), flags)?;
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn waker(&self) -> &Arc<OwnedFd> {
        &self.waker
    }

    /// Wakes who sleeps here.
    pub(crate) fn wake(&self) {
        // Only a full counter fails, and then it is being woken already.
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }

    /// Forgets what was told. True: the device has hung up.
    pub(crate) fn forget(&self) -> io::Result<bool> {
        self.take(Some(&Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        }))
    }

    /// Sleeps until something is told, or until `deadline`, and forgets it. True: the device has
    /// hung up.
    pub(crate) fn sleep(&self, deadline: Option<Instant>) -> io::Result<bool> {
        let left = deadline.map(|at| timespec(at.saturating_duration_since(Instant::now())));
        self.take(left.as_ref())
    }

    fn take(&self, timeout: Option<&Timespec>) -> io::Result<bool> {
        // All that is watched: three calls, the bell, the device.
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(BELL),
        }; 5];
        let told = match epoll::wait(&self.epoll, &mut events, timeout) {
            Ok(told) => told,
            Err(Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        Ok(events.iter().take(told).any(|event| {
            // Copied out of the packed structure before use.
            let data = event.data;
            data.u64() == self.device
        }))
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
