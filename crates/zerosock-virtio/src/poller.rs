//! One epoll instance. Each registered descriptor has a [`Token`], which comes back with its
//! events.
//!
//! # Invariants
//!
//! - Every descriptor is registered edge-triggered, once: no system call to re-arm it, and none to
//!   read an eventfd (each write to it is an edge). The receiver of an edge goes on until EAGAIN,
//!   or records that it did not.
//! - A token may be stale when it is read (descriptor closed, key reused). Receivers treat tokens
//!   as hints.

use crate::deadline::timespec;
use crate::numbers::NUMBER_BITS;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::io;
use std::time::Duration;

/// What a device uses a descriptor for. The worker passes it back with the descriptor's events and
/// knows only [`KICK`](EventKind::KICK).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct EventKind(u8);

impl EventKind {
    /// A kick of the driver on any queue: a turn checks all of them.
    pub const KICK: EventKind = EventKind(0);
    /// The worker's mailbox.
    pub(crate) const MAILBOX: EventKind = EventKind(15);

    /// A kind of the device's own, with a number from 1 to 14.
    ///
    /// # Panics
    /// `number` is 0 or above 14.
    pub const fn new(number: u8) -> EventKind {
        assert!(number > 0 && number < EventKind::MAILBOX.0);
        EventKind(number)
    }
}

/// The name under which a descriptor is registered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Token {
    /// The number of the device, which the worker activates.
    pub device: u32,
    /// Chosen by the device.
    pub kind: EventKind,
    /// Chosen by the device: a key in a table, for instance.
    pub key: u32,
}

/// A packed token consists of four bits of kind, the device's number, and 32 bits of key.
const KIND_SHIFT: u32 = 32 + NUMBER_BITS;

impl Token {
    pub(crate) const MAILBOX: Token = Token {
        device: 0,
        kind: EventKind::MAILBOX,
        key: 0,
    };

    fn pack(self) -> u64 {
        u64::from(self.kind.0) << KIND_SHIFT | u64::from(self.device) << 32 | u64::from(self.key)
    }

    fn unpack(packed: u64) -> Token {
        Token {
            device: (packed >> 32) as u32 & ((1 << NUMBER_BITS) - 1),
            kind: EventKind((packed >> KIND_SHIFT) as u8),
            key: packed as u32,
        }
    }
}

/// The events of a descriptor to wait for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Interest {
    /// Something to read: an eventfd, or a listener.
    Read,
    /// Something to read, or the peer has shut down sending.
    ReadUntilEnd,
    /// The peer has shut down sending, or the socket has failed.
    End,
    /// There is room to write, or as [`Interest::End`].
    WriteUntilEnd,
    /// All that [`Readiness`] tells.
    All,
}

impl Interest {
    fn flags(self) -> EventFlags {
        EventFlags::ET
            | match self {
                Interest::Read => EventFlags::IN,
                Interest::End => EventFlags::RDHUP,
                Interest::ReadUntilEnd => EventFlags::IN | EventFlags::RDHUP,
                Interest::WriteUntilEnd => EventFlags::OUT | EventFlags::RDHUP,
                Interest::All => {
                    EventFlags::IN | EventFlags::PRI | EventFlags::OUT | EventFlags::RDHUP
                }
            }
    }
}

/// The events of a descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Readiness(EventFlags);

impl Readiness {
    /// Bytes, a connection, or the end of the stream can be read.
    pub fn readable(self) -> bool {
        self.0
            .intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR)
    }

    /// There is room to write, or an error that a write will return.
    pub fn writable(self) -> bool {
        self.0
            .intersects(EventFlags::OUT | EventFlags::HUP | EventFlags::ERR)
    }

    /// The peer has shut down writing: end of file follows the unread bytes.
    pub fn peer_finished(self) -> bool {
        self.0
            .intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR)
    }

    /// There is an out-of-band byte, at which reads stop.
    pub fn urgent(self) -> bool {
        self.0.contains(EventFlags::PRI)
    }

    /// Both directions are closed, or the socket failed.
    pub fn hung_up(self) -> bool {
        self.0.intersects(EventFlags::HUP | EventFlags::ERR)
    }

    /// The socket failed, or its error queue has messages.
    pub fn has_error(self) -> bool {
        self.0.contains(EventFlags::ERR)
    }

    /// The events of a TCP socket without those of its error queue. One that has failed is closed in
    /// both directions, too.
    pub fn without_error_queue(self) -> Readiness {
        match self.0.contains(EventFlags::HUP) {
            true => self,
            false => Readiness(self.0 - EventFlags::ERR),
        }
    }
}

/// An epoll instance.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    /// An instance without descriptors.
    pub fn new() -> io::Result<Poller> {
        Ok(Poller {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
        })
    }

    /// Registers `fd` for edges. Closing it removes it.
    pub fn add(&self, fd: impl AsFd, token: Token, interest: Interest) -> io::Result<()> {
        let data = EventData::new_u64(token.pack());
        Ok(epoll::add(&self.epoll, fd, data, interest.flags())?)
    }

    /// Changes the name and the events of a registered `fd`. A pending edge is reported again.
    pub fn change(&self, fd: impl AsFd, token: Token, interest: Interest) -> io::Result<()> {
        let data = EventData::new_u64(token.pack());
        Ok(epoll::modify(&self.epoll, fd, data, interest.flags())?)
    }

    /// Removes an `fd` that stays open elsewhere (a kick that the front-end still holds).
    pub fn remove(&self, fd: impl AsFd) {
        // An error means that it was not registered.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for events or until `timeout` has passed (`None`: no limit), and stores the events in
    /// `out`.
    pub fn wait(
        &self,
        timeout: Option<Duration>,
        out: &mut Vec<(Token, Readiness)>,
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
            out.push((Token::unpack(data.u64()), Readiness(flags)));
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
        for (device, kind, key) in [
            (0, EventKind::KICK, u32::MAX),
            ((1 << NUMBER_BITS) - 1, EventKind::new(1), 0),
            (7, EventKind::new(14), 9),
            (0, EventKind::MAILBOX, 0),
        ] {
            let token = Token { device, kind, key };
            assert_eq!(Token::unpack(token.pack()), token);
        }
    }
}
