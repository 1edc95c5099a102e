//! Sleeping until the socket or ring of a sender has an event, without a reference to the sender.
//!
//! The descriptor of the sender is in an epoll instance of its own, edge-triggered: a socket that
//! has hung up is reported once, not for ever. A thread that wakes up reads all events of the epoll
//! instance before it polls the sender, so that an event in between wakes it again.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

/// An epoll instance with the descriptor of a sender, an eventfd to wake threads, and a timer.
#[derive(Debug)]
pub(super) struct Readiness {
    epoll: OwnedFd,
    event_fd: OwnedFd,
    /// Created when it is first needed.
    timer: OnceLock<OwnedFd>,
    /// When the timer expires.
    timer_at: Mutex<Option<Instant>>,
}

impl Readiness {
    /// Watches the descriptor of a sender.
    pub(super) fn of(sender: BorrowedFd<'_>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let event_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // IN is for io_uring: received bytes of a socket are no event of the sender.
        let wanted = match rustix::net::sockopt::socket_type(sender) {
            Ok(_) => epoll::EventFlags::OUT,
            Err(_) => epoll::EventFlags::IN,
        };
        let nothing = epoll::EventData::new_u64(0);
        epoll::add(&epoll, sender, nothing, wanted | epoll::EventFlags::ET)?;
        let event_fd_events = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &event_fd, nothing, event_fd_events)?;
        let timer = OnceLock::new();
        Ok(Self {
            epoll,
            event_fd,
            timer,
            timer_at: Mutex::new(None),
        })
    }

    /// Waits for an event, or for `timeout`, and clears the events.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut events = [MaybeUninit::uninit(); 4];
        match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Wakes a sleeping thread after this time, or earlier if that was requested before: a thread
    /// that is woken early requests its time again. So a time that moves on with each send rarely
    /// costs a system call.
    pub(super) fn wake_after(&self, time: Duration) -> io::Result<()> {
        let mut timer_at = self.timer_at.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let wanted = now.checked_add(time);
        if timer_at.is_some_and(|at| now < at && wanted.is_none_or(|wanted| at <= wanted)) {
            return Ok(());
        }
        let timer = match self.timer.get() {
            Some(timer) => timer,
            None => {
                let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
                let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
                let timer_events = epoll::EventFlags::IN | epoll::EventFlags::ET;
                epoll::add(
                    &self.epoll,
                    &timer,
                    epoll::EventData::new_u64(0),
                    timer_events,
                )?;
                // If another thread was faster, its timer serves: this one is closed, which removes
                // it from the epoll instance.
                self.timer.get_or_init(|| timer)
            }
        };
        let once = Itimerspec {
            it_interval: Timespec::default(),
            // Zero would disarm the timer.
            it_value: Timespec::try_from(time.max(Duration::from_nanos(1)))
                .map_err(io::Error::other)?,
        };
        timerfd_settime(timer, TimerfdTimerFlags::empty(), &once)?;
        *timer_at = wanted;
        Ok(())
    }

    /// Wakes a sleeping thread, or ends the next sleep at once.
    pub(super) fn wake(&self) {
        // It fails only if the counter is at its maximum, and then the descriptor is readable.
        let _ = rustix::io::write(&self.event_fd, &1u64.to_ne_bytes());
    }
}

impl AsFd for Readiness {
    /// Readable when the sender may have an event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl AsRawFd for Readiness {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}
