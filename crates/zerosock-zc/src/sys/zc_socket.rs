//! The `ZcSocket`: one interface to the three ways of sending.
#![allow(unsafe_code)]

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::places::Places;
use super::requests::Requests;
use super::sendmsg::SendmsgBackend;
use super::uring::{MAX_REQUEST_LEN, UringBackend};
use super::{
    Address, Event, Key, Kind, NotStarted, SendMode, Stable, Started, Submission, kind, orphans,
    permit_zero_copy, reset,
};

/// What carries sends.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub enum Backend {
    /// io_uring: SEND_ZC and SENDMSG_ZC, registered memory, completions in shared memory. Linux 6.2,
    /// and stable releases of 6.1.
    Uring,
    /// sendmsg(2) with MSG_ZEROCOPY, and the socket's error queue.
    ErrorQueue,
    /// sendmsg(2), which copies. Everything else works as with the others.
    Copy,
}

/// The sends of one socket.
///
/// It belongs to the process that opened it. A child that was forked has a copy of it, but the ring's
/// memory is not mapped there, and socket and requests are the parent's still: the child's copy may
/// only be dropped, which leaks it.
pub struct ZcSocket<B: Stable> {
    /// Taken out by drop alone.
    inner: ManuallyDrop<Inner<B>>,
    /// The process that opened it.
    pid: u32,
}

struct Inner<B> {
    // To close a ring is no end of what the kernel reads, which takes it apart later: both go
    // together, when nothing is owed.
    implementation: BackendImpl,
    state: SocketState<B>,
    backend: Backend,
    /// Why the kernel gave no ring.
    refused: Option<io::ErrorKind>,
    /// When the stream is reset, if it was dropped and its buffers are not free by then.
    reset_at: Option<Instant>,
}

#[expect(
    clippy::large_enum_variant,
    reason = "one for a zc_socket; what lies in a box is looked up for each send"
)]
enum BackendImpl {
    Uring(UringBackend),
    Sendmsg(SendmsgBackend),
}

/// What every `ZcSocket` has.
pub(super) struct SocketState<B> {
    pub(super) socket: OwnedFd,
    pub(super) places: Places<B>,
    pub(super) requests: Requests,
    pub(super) kind: Kind,
    /// System calls for sending, asking and waiting.
    pub(super) system_calls: u64,
    /// Messages of the error queue that were about something else.
    pub(super) foreign: u64,
}

impl<B> SocketState<B> {
    /// The longest request, in bytes.
    pub(super) fn longest(&self, mode: SendMode) -> usize {
        match self.kind {
            Kind::VsockStream if mode == SendMode::ZeroCopy => MAX_VSOCK_PACKET,
            _ => MAX_REQUEST_LEN,
        }
    }

    /// Whether a request can be of several places. A socket that takes only so many pages in place as
    /// one packet holds, and copies what has more, gets them one by one.
    pub(super) fn gathers(&self, mode: SendMode) -> bool {
        self.kind.is_tcp() || self.kind.is_stream() && mode == SendMode::Copy
    }
}

/// The longest packet that vsock makes (VIRTIO_VSOCK_MAX_PKT_BUF_SIZE). Of what it cuts into several
/// only the last keeps the buffer: when that one cannot be made, for want of memory, the others are
/// on their way, and no notification tells when they have been read.
const MAX_VSOCK_PACKET: usize = 64 << 10;

impl<B: Stable> ZcSocket<B> {
    /// The best for `socket`, or the one that is wanted, with `capacity` places; and what kind of
    /// socket it is.
    ///
    /// # Errors
    /// `Unsupported` if the one that is wanted does not carry this socket, or not on this kernel;
    /// ENOTSOCK if it is none; what setsockopt(2) and io_uring_setup(2) answer.
    pub fn open(
        socket: OwnedFd,
        capacity: u32,
        wanted: Option<Backend>,
    ) -> io::Result<(Self, Kind)> {
        let kind = kind(&socket)?;
        if kind == Kind::VsockMessages {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let permitted = wanted != Some(Backend::Copy) && permit_zero_copy(&socket)?;
        let mut refused = None;
        let (implementation, backend) = match (wanted, permitted) {
            (Some(Backend::Copy) | None, false) => (None, Backend::Copy),
            (Some(_), false) => return Err(io::ErrorKind::Unsupported.into()),
            (Some(Backend::Uring), true) => {
                (Some(UringBackend::open(&socket, capacity)?), Backend::Uring)
            }
            (None, true) => match UringBackend::open(&socket, capacity) {
                Ok(uring) => (Some(uring), Backend::Uring),
                Err(why) => {
                    refused = Some(why.kind());
                    (None, Backend::ErrorQueue)
                }
            },
            (Some(wanted), true) => (None, wanted),
        };
        let sendmsg =
            || BackendImpl::Sendmsg(SendmsgBackend::new(kind, backend == Backend::ErrorQueue));
        let inner = Inner {
            implementation: implementation.map_or_else(sendmsg, BackendImpl::Uring),
            state: SocketState {
                socket,
                places: Places::new(capacity),
                requests: Requests::default(),
                kind,
                system_calls: 0,
                foreign: 0,
            },
            backend,
            refused,
            reset_at: None,
        };
        let inner = ManuallyDrop::new(inner);
        let pid = std::process::id();
        Ok((Self { inner, pid }, kind))
    }

    /// Whether this is a forked child's copy. A system call.
    #[must_use]
    pub fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    /// What it is.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.inner.backend
    }

    /// Why it is not a ring, if that was tried.
    #[must_use]
    pub fn ring_refused(&self) -> Option<io::ErrorKind> {
        self.inner.refused
    }

    /// How many places are free.
    #[must_use]
    pub fn room(&self) -> usize {
        self.inner.state.places.room()
    }

    /// Puts a buffer, and where it goes if the socket is not connected, into a place.
    ///
    /// # Errors
    /// Gives it back if no place is free.
    pub fn put(&mut self, buffer: B, address: Option<Address>) -> Result<Key, B> {
        self.inner.state.places.put(buffer, address)
    }

    /// Makes one request of what lies in the first of these places, and on a stream in those behind it,
    /// as many as go together. Over a ring the kernel learns of it by [`submit`](Self::submit); else it
    /// is one call, which does not block.
    ///
    /// # Errors
    /// If it cannot be made; the places are as they were.
    pub fn start(&mut self, keys: &[Key], submission: Submission) -> Result<Started, NotStarted> {
        let Inner {
            implementation,
            state,
            ..
        } = &mut *self.inner;
        match implementation {
            BackendImpl::Uring(uring) => uring.start(state, keys, submission),
            BackendImpl::Sendmsg(sendmsg) => sendmsg.start(state, keys, submission),
        }
    }

    /// Tells the kernel of the requests that were started: one system call over a ring, none if
    /// there are none.
    ///
    /// # Errors
    /// What io_uring_enter(2) answers, but for a completion queue that is to be read first.
    pub fn submit(&mut self) -> io::Result<()> {
        let Inner {
            implementation,
            state,
            ..
        } = &mut *self.inner;
        match implementation {
            BackendImpl::Uring(uring) => uring.submit(state),
            BackendImpl::Sendmsg(_) => Ok(()),
        }
    }

    /// The next thing that the kernel has said: no system call.
    pub fn event(&mut self) -> Option<Event> {
        let Inner {
            implementation,
            state,
            ..
        } = &mut *self.inner;
        match implementation {
            BackendImpl::Uring(uring) => uring.event(state),
            BackendImpl::Sendmsg(_) => state.requests.events.pop_front(),
        }
    }

    /// Makes what is done known: has the kernel post it, or reads the error queue. At most one
    /// system call, which does not wait; none if nothing can have happened.
    ///
    /// # Errors
    /// What io_uring_enter(2) or recvmmsg(2) answers.
    pub fn reap(&mut self) -> io::Result<()> {
        let Inner {
            implementation,
            state,
            ..
        } = &mut *self.inner;
        match implementation {
            BackendImpl::Uring(uring) => uring.reap(state),
            BackendImpl::Sendmsg(sendmsg) => sendmsg.reap(state).map(drop),
        }
    }

    /// As [`reap`](Self::reap), for everything that is done, within reason: on the error queue, also
    /// what is behind messages that are not the `ZcSocket`'s.
    pub fn reap_all(&mut self) {
        let Inner {
            implementation,
            state,
            ..
        } = &mut *self.inner;
        match implementation {
            // What it cannot post now it posts later.
            BackendImpl::Uring(uring) => drop(uring.reap(state)),
            BackendImpl::Sendmsg(sendmsg) => sendmsg.reap_all(state),
        }
    }

    /// Tells the kernel of what was started and waits until it says something or, after WouldBlock
    /// of a call, until the socket is writable, or for `timeout`. Returns at once if there is
    /// nothing to wait for.
    ///
    /// # Errors
    /// What io_uring_enter(2), or poll(2) and recvmmsg(2), answer. A signal ends the waiting early.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let Inner {
            implementation,
            state,
            ..
        } = &mut *self.inner;
        match implementation {
            BackendImpl::Uring(uring) => uring.wait(state, timeout),
            BackendImpl::Sendmsg(sendmsg) => sendmsg.wait(state, timeout),
        }
    }

    /// After which time to call [`reap`](Self::reap) although the descriptor has no event: the state of
    /// a send in doubt has to be polled. [`wait`](Self::wait) does so itself.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Duration> {
        match &self.inner.implementation {
            BackendImpl::Uring(_) => None,
            BackendImpl::Sendmsg(sendmsg) => sendmsg.next_timeout(),
        }
    }

    /// How many places the kernel owes something for.
    #[must_use]
    pub fn busy_places(&self) -> u32 {
        self.inner.state.places.busy
    }

    /// Of how many places, each for every request, bytes were taken whose notification is to come: it
    /// frees memory then that the kernel counts.
    #[must_use]
    pub fn reading(&self) -> u32 {
        self.inner.state.places.reading
    }

    /// Whether the kernel owes nothing for this place.
    #[must_use]
    pub fn idle(&self, key: Key) -> bool {
        self.inner.state.places.idle(key)
    }

    /// The buffer, if the kernel owes nothing for it. The place is free then.
    pub fn take(&mut self, key: Key) -> Option<B> {
        self.inner.state.places.take(key)
    }

    /// Ends what the kernel has not done yet; each request says so by its result. Without a ring
    /// there is none.
    ///
    /// # Errors
    /// What io_uring_register(2) answers.
    pub fn cancel(&mut self) -> io::Result<()> {
        match &self.inner.implementation {
            BackendImpl::Uring(uring) => uring.cancel(),
            BackendImpl::Sendmsg(_) => Ok(()),
        }
    }

    /// Messages of the socket's error queue that were about something else than sends, and have been
    /// dropped.
    #[must_use]
    pub fn foreign(&self) -> u64 {
        self.inner.state.foreign
    }

    /// Once it has been dropped: resets the stream at this time (TCP: RST), if the kernel still reads
    /// buffers then.
    pub fn reset_at(&mut self, time: Instant) {
        self.inner.reset_at = Some(time);
    }

    /// System calls so far, for sending, asking and waiting.
    #[must_use]
    pub fn system_calls(&self) -> u64 {
        self.inner.state.system_calls
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.inner.state.socket.as_fd()
    }

    /// Whether a request without a copy of this buffer is expected to be made from memory that is
    /// registered with the kernel: it is, or can be.
    #[must_use]
    pub fn expects_registered(&self, buffer: &B) -> bool {
        match &self.inner.implementation {
            BackendImpl::Uring(uring) => uring.expects_registered(buffer),
            BackendImpl::Sendmsg(_) => false,
        }
    }

    /// How many arenas of pools are registered with the kernel.
    #[must_use]
    pub fn registered(&self) -> usize {
        match &self.inner.implementation {
            BackendImpl::Uring(uring) => uring.registered(),
            BackendImpl::Sendmsg(_) => 0,
        }
    }
}

impl<B: Stable> AsFd for ZcSocket<B> {
    /// What an event loop waits on. A ring is readable when [`event`](ZcSocket::event) has something
    /// to tell. Else it is the socket: it has an error to tell (EPOLLERR) when a notification has
    /// come, and is writable when it takes more.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl<B: Stable> Drop for ZcSocket<B> {
    fn drop(&mut self) {
        if self.is_forked() {
            // To submit, to read the error queue or to reset the socket would take from the parent
            // what is its own; and the ring is not mapped here.
            return;
        }
        // SAFETY: taken once, as this is drop, and `inner` is not used after it.
        let mut inner = unsafe { ManuallyDrop::take(&mut self.inner) };
        let Inner {
            implementation,
            state,
            ..
        } = &mut inner;
        match implementation {
            BackendImpl::Uring(uring) => {
                // What was accepted is the kernel's if it takes it now, and ends if it does not.
                let _ = uring.submit(state);
                while uring.event(state).is_some() {}
                uring.abandon(state);
            }
            BackendImpl::Sendmsg(sendmsg) => {
                let _ = sendmsg.reap(state);
            }
        }
        if state.places.busy > 0 {
            return orphans::adopt(inner);
        }
        if let BackendImpl::Uring(uring) = implementation {
            // Else the socket stays open until the kernel has taken the ring apart, which is later.
            uring.unregister_socket();
        }
    }
}

impl<B> Inner<B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.implementation {
            BackendImpl::Uring(uring) => uring.as_fd(),
            BackendImpl::Sendmsg(_) => self.state.socket.as_fd(),
        }
    }
}

impl<B: Stable> orphans::Orphan for Inner<B> {
    fn is_done(&mut self) -> bool {
        if self.reset_at.is_some_and(|time| time <= Instant::now()) {
            self.reset_at = None;
            let _ = reset(&self.state.socket);
        }
        let Inner {
            implementation,
            state,
            ..
        } = self;
        match implementation {
            BackendImpl::Uring(uring) => uring.continue_shutdown(state),
            BackendImpl::Sendmsg(sendmsg) => sendmsg.reap_all(state),
        }
        state.places.busy == 0
    }

    fn free_one(&mut self) -> bool {
        self.state.places.drop_one()
    }

    fn descriptor(&self) -> (BorrowedFd<'_>, bool) {
        (
            self.as_fd(),
            matches!(self.implementation, BackendImpl::Uring(_)),
        )
    }
}
