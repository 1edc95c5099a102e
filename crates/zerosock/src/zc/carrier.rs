//! Which of the kernel's interfaces carries the sends; driven alike, whichever it is.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use zerosock_sys::zc::{self, Address, Calls, Event, Key, Kind, NotStarted, Order, Ring, Stable};

/// What carries the sends of a sender.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub enum Backend {
    /// io_uring: SEND_ZC and SENDMSG_ZC, registered memory, completions in shared memory. Linux 6.2.
    Uring,
    /// sendmsg(2) with MSG_ZEROCOPY, and the socket's error queue.
    ErrorQueue,
    /// sendmsg(2), which copies. Everything else works as with the others.
    Copy,
}

pub(super) enum Carrier<B: Stable> {
    Ring(Ring<B>),
    Calls(Calls<B>, Backend),
}

impl<B: Stable> Carrier<B> {
    /// The best for `socket`, or the one that is wanted.
    pub(super) fn open(
        socket: OwnedFd,
        capacity: u32,
        wanted: Option<Backend>,
    ) -> io::Result<(Self, Kind)> {
        let kind = zc::kind(&socket)?;
        let permitted = wanted != Some(Backend::Copy) && zc::permit_zero_copy(&socket)?;
        let calls = |socket, backend| {
            let zero_copy = backend == Backend::ErrorQueue;
            Self::Calls(Calls::new(socket, capacity, zero_copy), backend)
        };
        let carrier = match wanted {
            Some(Backend::Copy) => calls(socket, Backend::Copy),
            Some(_) if !permitted => return Err(io::ErrorKind::Unsupported.into()),
            Some(Backend::ErrorQueue) => calls(socket, Backend::ErrorQueue),
            Some(Backend::Uring) => {
                Self::Ring(Ring::open(socket, capacity).map_err(|lost| lost.0)?)
            }
            None if !permitted => calls(socket, Backend::Copy),
            None => match Ring::open(socket, capacity) {
                Ok(ring) => Self::Ring(ring),
                Err((_, socket)) => calls(socket, Backend::ErrorQueue),
            },
        };
        Ok((carrier, kind))
    }

    pub(super) fn backend(&self) -> Backend {
        match self {
            Self::Ring(_) => Backend::Uring,
            Self::Calls(_, backend) => *backend,
        }
    }

    pub(super) fn room(&self) -> usize {
        match self {
            Self::Ring(ring) => ring.room(),
            Self::Calls(calls, _) => calls.room(),
        }
    }

    pub(super) fn put(&mut self, buffer: B, address: Option<Address>) -> Result<Key, B> {
        match self {
            Self::Ring(ring) => ring.put(buffer, address),
            Self::Calls(calls, _) => calls.put(buffer, address),
        }
    }

    pub(super) fn start(&mut self, key: Key, order: Order) -> Result<(), NotStarted> {
        match self {
            Self::Ring(ring) => ring.start(key, order),
            Self::Calls(calls, _) => calls.start(key, order),
        }
    }

    pub(super) fn submit(&mut self) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.submit(),
            Self::Calls(calls, _) => calls.submit(),
        }
    }

    pub(super) fn next(&mut self) -> Option<Event> {
        match self {
            Self::Ring(ring) => ring.event(),
            Self::Calls(calls, _) => calls.event(),
        }
    }

    /// Makes what is done known: at most one system call, which does not wait.
    pub(super) fn reap(&mut self) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.reap(),
            Self::Calls(calls, _) => calls.reap(),
        }
    }

    pub(super) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.wait(timeout),
            Self::Calls(calls, _) => calls.wait(timeout),
        }
    }

    pub(super) fn owed(&self) -> u32 {
        match self {
            Self::Ring(ring) => ring.owed(),
            Self::Calls(calls, _) => calls.owed(),
        }
    }

    pub(super) fn idle(&self, key: Key) -> bool {
        match self {
            Self::Ring(ring) => ring.idle(key),
            Self::Calls(calls, _) => calls.idle(key),
        }
    }

    pub(super) fn take(&mut self, key: Key) -> Option<B> {
        match self {
            Self::Ring(ring) => ring.take(key),
            Self::Calls(calls, _) => calls.take(key),
        }
    }

    pub(super) fn cancel(&mut self) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.cancel(),
            Self::Calls(calls, _) => calls.cancel(),
        }
    }

    pub(super) fn system_calls(&self) -> u64 {
        match self {
            Self::Ring(ring) => ring.system_calls(),
            Self::Calls(calls, _) => calls.system_calls(),
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        match self {
            Self::Ring(ring) => ring.socket(),
            Self::Calls(calls, _) => calls.socket(),
        }
    }

    pub(super) fn registered(&self) -> usize {
        match self {
            Self::Ring(ring) => ring.registered(),
            Self::Calls(..) => 0,
        }
    }
}

impl<B: Stable> AsFd for Carrier<B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Ring(ring) => ring.as_fd(),
            Self::Calls(calls, _) => calls.as_fd(),
        }
    }
}
