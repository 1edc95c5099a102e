//! The descriptors that waiters sleep on: eventfds, timerfds, and epoll instances of several.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use zerosock_virtio::deadline::timespec;
use zerosock_virtio::poller::add_waker;

/// The shortest time that a timerfd can be set to: 0 would disarm it.
const TICK: Duration = Duration::from_nanos(1);

/// An eventfd that wakes a poller, which polls it beside the backend's descriptor.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

/// An eventfd that ends the sleep of one thread, with one system call for each sleep that it ends.
/// The lock of the endpoint is held for each call.
#[derive(Debug)]
pub(super) struct SleepWaker {
    event_fd: EventFd,
    signalled: AtomicBool,
}

/// A timerfd: readable once its time has come.
#[derive(Debug)]
pub(crate) struct TimerFd {
    fd: OwnedFd,
    /// When it expires.
    at: Option<Instant>,
}

impl EventFd {
    pub(crate) fn new() -> io::Result<EventFd> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(EventFd(eventfd(0, flags)?))
    }

    pub(super) fn signal(&self) {
        // Fails only when the counter is full: then the eventfd is readable, too.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn clear(&self) {
        // Fails only when the eventfd was not signalled.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl SleepWaker {
    /// Registers an eventfd at the epoll descriptor on which the thread will sleep.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub(super) fn new(epoll: impl AsFd) -> io::Result<SleepWaker> {
        let event_fd = EventFd::new()?;
        add_waker(epoll, &event_fd)?;
        Ok(SleepWaker {
            event_fd,
            signalled: AtomicBool::new(false),
        })
    }

    pub(super) fn signal(&self) {
        if !self.signalled.swap(true, Ordering::Relaxed) {
            self.event_fd.signal();
        }
    }

    /// The sleep has ended.
    pub(super) fn clear(&self) {
        if self.signalled.swap(false, Ordering::Relaxed) {
            self.event_fd.clear();
        }
    }
}

impl TimerFd {
    pub(crate) fn new() -> io::Result<TimerFd> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let fd = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(TimerFd { fd, at: None })
    }

    /// Makes the timer expire at `until` or earlier; `None` disarms it.
    pub(crate) fn set(&mut self, until: Option<Instant>) {
        if self.at.is_none() && until.is_none() {
            return;
        }
        let now = Instant::now();
        let is_early_enough = |at| at > now && until.is_none_or(|until| at <= until);
        if self.at.is_some_and(is_early_enough) {
            return;
        }
        // 0 would disarm the timer. Setting it also clears an earlier expiration.
        let left = until.map(|at| at.saturating_duration_since(now).max(TICK));
        let value = left.map_or_else(Timespec::default, timespec);
        let once = Itimerspec {
            it_interval: Timespec::default(),
            it_value: value,
        };
        // Cannot fail: the descriptor is a timerfd, and the time is valid.
        let _ = timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &once);
        self.at = until;
    }
}

impl AsFd for TimerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An epoll instance that is readable when any of `fds` is.
///
/// # Errors
/// When the system has no descriptor left.
pub(crate) fn epoll_of<'a>(fds: impl IntoIterator<Item = BorrowedFd<'a>>) -> io::Result<OwnedFd> {
    let any = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for fd in fds {
        epoll::add(
            &any,
            fd,
            epoll::EventData::new_u64(0),
            epoll::EventFlags::IN,
        )?;
    }
    Ok(any)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerosock_virtio::poller::Events;

    #[test]
    fn sleep_waker_ends_each_wait_until_it_is_cleared() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let waker = SleepWaker::new(&epoll).unwrap();
        let is_woken = || {
            let mut events = Events::default();
            events.wait(&epoll, Some(Duration::ZERO)).unwrap();
            !events.is_empty()
        };
        assert!(!is_woken());
        for _ in 0..2 {
            waker.signal();
            waker.signal();
            // Another thread may take the event before the sleeper does.
            assert!(is_woken() && is_woken());
            waker.clear();
            assert!(!is_woken());
        }
    }
}
