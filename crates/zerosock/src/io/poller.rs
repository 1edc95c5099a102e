//! One epoll instance, and the encoding of the source of an event in its token.
//!
//! # Invariants
//!
//! - Every descriptor is registered edge-triggered, once: no system call to re-arm it, and none to
//!   read an eventfd (each write to it is an edge). The receiver of an edge goes on until EAGAIN, or
//!   records that it did not.
//! - A token may be stale when it is read (descriptor closed, key reused). Receivers treat tokens as
//!   hints.

use super::deadline::timespec;
use super::numbers::NUMBER_BITS;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::io;
use std::time::Duration;

/// The events of the socket of a bridge.
const BRIDGE: EventFlags = EventFlags::IN
    .union(EventFlags::PRI)
    .union(EventFlags::OUT)
    .union(EventFlags::RDHUP)
    .union(EventFlags::ET);

/// The source of an event.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Source {
    /// The worker's own mailbox.
    Mailbox,
    /// A guest's kick on any queue: a turn checks all of them.
    Kick { vm: u32 },
    /// A host-side listening socket.
    Listener { vm: u32, key: u32 },
    /// A host program that has connected and has not sent CONNECT yet.
    Handshake { vm: u32, key: u32 },
    /// The socket of a bridge.
    Bridge { vm: u32, key: u32 },
}

/// A token consists of four bits of kind, the device's number, and 32 bits of key.
const VM_BITS: u32 = NUMBER_BITS;
const KIND_SHIFT: u32 = 32 + VM_BITS;

impl Source {
    fn token(self) -> u64 {
        let (kind, vm, key) = match self {
            Source::Mailbox => (0u64, 0, 0),
            Source::Kick { vm } => (1, vm, 0),
            Source::Listener { vm, key } => (2, vm, key),
            Source::Handshake { vm, key } => (3, vm, key),
            Source::Bridge { vm, key } => (4, vm, key),
        };
        kind << KIND_SHIFT | u64::from(vm) << 32 | u64::from(key)
    }

    fn from_token(token: u64) -> Option<Source> {
        let vm = (token >> 32) as u32 & ((1 << VM_BITS) - 1);
        let key = token as u32;
        Some(match token >> KIND_SHIFT {
            0 => Source::Mailbox,
            1 => Source::Kick { vm },
            2 => Source::Listener { vm, key },
            3 => Source::Handshake { vm, key },
            4 => Source::Bridge { vm, key },
            _ => return None,
        })
    }
}

/// The events of a descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Readiness(EventFlags);

impl Readiness {
    /// Bytes, a connection, or the end of the stream can be read.
    pub(crate) fn readable(self) -> bool {
        self.0
            .intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR)
    }

    /// There is room to write, or an error that a write will return.
    pub(crate) fn writable(self) -> bool {
        self.0
            .intersects(EventFlags::OUT | EventFlags::HUP | EventFlags::ERR)
    }

    /// The peer has shut down writing: end of file follows the unread bytes.
    pub(crate) fn peer_finished(self) -> bool {
        self.0
            .intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR)
    }

    /// There is an out-of-band byte, at which reads stop.
    pub(crate) fn urgent(self) -> bool {
        self.0.contains(EventFlags::PRI)
    }

    /// Both directions are closed, or the socket failed.
    pub(crate) fn hung_up(self) -> bool {
        self.0.intersects(EventFlags::HUP | EventFlags::ERR)
    }
}

/// An epoll instance.
#[derive(Debug)]
pub(crate) struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    pub(crate) fn new() -> io::Result<Poller> {
        Ok(Poller {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
        })
    }

    /// Registers `fd` for edges in both directions. Closing it removes it.
    pub(crate) fn add(&self, fd: impl AsFd, source: Source) -> io::Result<()> {
        let flags = match source {
            Source::Bridge { .. } => BRIDGE,
            Source::Handshake { .. } => EventFlags::IN | EventFlags::RDHUP | EventFlags::ET,
            _ => EventFlags::IN | EventFlags::ET,
        };
        Ok(epoll::add(
            &self.epoll,
            fd,
            EventData::new_u64(source.token()),
            flags,
        )?)
    }

    /// Changes the source of a registered `fd`. A pending edge is reported again.
    pub(crate) fn change(&self, fd: impl AsFd, source: Source) -> io::Result<()> {
        let flags = BRIDGE;
        Ok(epoll::modify(
            &self.epoll,
            fd,
            EventData::new_u64(source.token()),
            flags,
        )?)
    }

    /// Removes an `fd` that stays open elsewhere (a kick that the front-end still holds).
    pub(crate) fn remove(&self, fd: impl AsFd) {
        // An error means that it was not registered.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for events or until `timeout` has passed (`None`: no limit), and stores the events in
    /// `out`.
    pub(crate) fn wait(
        &self,
        timeout: Option<Duration>,
        out: &mut Vec<(Source, Readiness)>,
    ) -> io::Result<()> {
        out.clear();
        let timeout = timeout.map(timespec);
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 128];
        let n = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok(n) => n,
            Err(Errno::INTR) => 0,
            Err(e) => return Err(e.into()),
        };
        for event in &events[..n] {
            // Copied out of the packed structure before use.
            let (flags, data) = (event.flags, event.data);
            if let Some(source) = Source::from_token(data.u64()) {
                out.push((source, Readiness(flags)));
            }
        }
        Ok(())
    }
}

impl AsFd for Poller {
    /// Readable if there are events that [`Poller::wait`] has not returned yet.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_back_as_it_was_packed() {
        let (vm, key) = ((1 << VM_BITS) - 1, u32::MAX);
        for source in [
            Source::Mailbox,
            Source::Kick { vm },
            Source::Listener { vm, key },
            Source::Handshake { vm: 0, key },
            Source::Bridge { vm, key: 0 },
        ] {
            assert_eq!(Source::from_token(source.token()), Some(source));
        }
        assert_eq!(Source::from_token(9 << KIND_SHIFT), None);
    }
}
