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
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::io;
use std::mem::MaybeUninit;
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
    /// An eventfd of [`add_waker`]. Of the mailbox's kind: its event says only that the wait is
    /// over.
    const WAKER: Token = Token {
        key: 1,
        ..Token::MAILBOX
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
    /// All that [`Readiness`] tells but room to write.
    Incoming,
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
                Interest::Incoming => EventFlags::IN | EventFlags::PRI | EventFlags::RDHUP,
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

/// Most events that one wait returns.
const MAX_EVENTS: usize = 128;

/// Waits until an epoll instance has an event, which stays there, or until `timeout` has passed (`None`: no
/// limit).
///
/// # Errors
/// Errors of ppoll(2). A signal ends the wait without an error.
pub fn wait_for_event(epoll: impl AsFd, timeout: Option<Duration>) -> io::Result<()> {
    let timeout = timeout.map(timespec);
    match poll(&mut [PollFd::new(&epoll, PollFlags::IN)], timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The events that a wait has returned: the data under which each descriptor was registered, and
/// what has happened. A caller can wait without the lock of what registered the descriptors, and
/// hand the events to it afterwards.
#[derive(Debug, Default)]
pub struct Events(Vec<(u64, EventFlags)>);

impl Events {
    /// Waits on an epoll instance for events, or until `timeout` has passed (`None`: no limit), and
    /// replaces the earlier events.
    ///
    /// # Errors
    /// Errors of epoll_pwait2(2). A signal ends the wait without an error.
    pub fn wait(&mut self, epoll: impl AsFd, timeout: Option<Duration>) -> io::Result<()> {
        self.0.clear();
        let timeout = timeout.map(timespec);
        let mut events = [MaybeUninit::<Event>::uninit(); MAX_EVENTS];
        match epoll::wait(epoll, &mut events, timeout.as_ref()) {
            Ok((events, _)) => {
                // Copied out of the packed structure.
                let copies = events
                    .iter()
                    .map(|&Event { data, flags }| (data.u64(), flags));
                self.0.extend(copies);
                Ok(())
            }
            Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the wait has returned no event.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a descriptor that was registered with `data` had an event.
    pub(crate) fn contains(&self, data: u64) -> bool {
        self.0.iter().any(|&(of, _)| of == data)
    }
}

/// Registers an eventfd that ends a wait on `epoll` by writing it. It ends each wait until it is
/// read: an event that another thread takes is not lost. Receivers of events ignore it.
///
/// # Errors
/// Errors of epoll_ctl(2).
pub fn add_waker(epoll: impl AsFd, waker: impl AsFd) -> io::Result<()> {
    let data = EventData::new_u64(Token::WAKER.pack());
    Ok(epoll::add(epoll, waker, data, EventFlags::IN)?)
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

    /// Interprets events of this instance.
    pub fn interpret(events: &Events) -> impl Iterator<Item = (Token, Readiness)> {
        let events = events.0.iter();
        events.map(|&(data, flags)| (Token::unpack(data), Readiness(flags)))
    }
}

impl AsFd for Poller {
    /// Readable if there are events that [`Events::wait`] has not returned yet.
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
