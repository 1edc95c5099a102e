//! For drivers: one epoll descriptor for the device's notifications, its hang-up and wake-ups by
//! other threads. The notifications and the hang-up of a device with a doorbell come by one stream.
//!
//! All descriptors are registered edge-triggered: one `epoll_wait` clears what was raised, as a
//! rule with one system call and without reading an eventfd. The driver reads a doorbell after each of its events.
//!
//! # Invariants
//! No notification is cleared while a thread may sleep on the descriptor without having been woken.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

use crate::deadline::timespec;
use crate::poller::Events;

/// Event key of the queues' calls and of the waker.
const NOTIFICATION: u64 = 0;
/// Event key of the first attached device; later devices have higher keys.
const DEVICE: u64 = 1;
/// Events returned by one system call: as a rule all of a driver with several queue pairs.
const EVENTS: usize = 16;
const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// The descriptors of a driver to sleep on. See the module documentation.
#[derive(Debug)]
pub struct Watch {
    epoll: OwnedFd,
    waker: Arc<OwnedFd>,
    /// Event key of the attached device.
    device: u64,
    /// Number of registered descriptors: calls, waker, device.
    watched: usize,
}

impl Watch {
    /// Registers the calls of the queues.
    ///
    /// # Errors
    /// The system refuses a descriptor.
    pub fn new(calls: &[OwnedFd]) -> io::Result<Watch> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        for event_fd in calls.iter().chain([&waker]) {
            let flags = EventFlags::IN | EventFlags::ET;
            epoll::add(&epoll, event_fd, EventData::new_u64(NOTIFICATION), flags)?;
        }
        Ok(Watch {
            epoll,
            waker: Arc::new(waker),
            device: DEVICE,
            watched: calls.len() + 2,
        })
    }

    /// Registers a device's control socket. That of the previous device is deregistered by closing
    /// it.
    ///
    /// # Errors
    /// Errors of epoll_ctl(2).
    pub fn device(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.add_device(socket, EventFlags::RDHUP)
    }

    /// Registers the stream that is the doorbell of a device, in the place of its control socket. Its events are bytes to
    /// read as well as its end.
    ///
    /// # Errors
    /// Errors of epoll_ctl(2).
    pub fn doorbell(&mut self, stream: BorrowedFd<'_>) -> io::Result<()> {
        self.add_device(stream, EventFlags::IN | EventFlags::RDHUP)
    }

    fn add_device(&mut self, fd: BorrowedFd<'_>, events: EventFlags) -> io::Result<()> {
        self.device += 1;
        let key = EventData::new_u64(self.device);
        Ok(epoll::add(&self.epoll, fd, key, events | EventFlags::ET)?)
    }

    /// The eventfd of [`wake`](Self::wake).
    pub fn waker(&self) -> &Arc<OwnedFd> {
        &self.waker
    }

    /// Wakes a thread that sleeps on the descriptor.
    pub fn wake(&self) {
        // Fails only if the counter is full; then a wake-up is pending.
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }

    /// Clears pending notifications. Returns true if the device has hung up, or its doorbell has an event.
    ///
    /// # Errors
    /// Errors of epoll_wait(2).
    pub fn clear(&self) -> io::Result<bool> {
        self.take(Some(&NOW))
    }

    /// Sleeps until a notification or until `deadline`, and clears it. Returns true as [`clear`](Self::clear).
    ///
    /// # Errors
    /// Errors of epoll_wait(2).
    pub fn sleep(&self, deadline: Option<Instant>) -> io::Result<bool> {
        let left = deadline.map(|at| timespec(at.saturating_duration_since(Instant::now())));
        self.take(left.as_ref())
    }

    /// Whether the events of a wait on the descriptor show that the device has hung up, or that its doorbell has an event.
    pub fn has_device_event(&self, events: &Events) -> bool {
        events.contains(self.device)
    }

    fn take(&self, timeout: Option<&Timespec>) -> io::Result<bool> {
        let none = Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(NOTIFICATION),
        };
        let mut device = false;
        let mut timeout = timeout;
        // At most one pass over all descriptors; what is raised again meanwhile is a new
        // notification.
        for _ in 0..=self.watched / EVENTS {
            let mut events = [none; EVENTS];
            let count = match epoll::wait(&self.epoll, &mut events, timeout) {
                Ok(count) => count,
                Err(Errno::INTR) => 0,
                Err(error) => return Err(error.into()),
            };
            device |= events.iter().take(count).any(|event| {
                // Copied out of the packed structure before use.
                let data = event.data;
                data.u64() == self.device
            });
            if count < EVENTS {
                break;
            }
            timeout = Some(&NOW);
        }
        Ok(device)
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
