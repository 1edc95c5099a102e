//! `ZcSocket`: one interface to the three back-ends.
#![allow(unsafe_code)]

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::in_doubt::{self, UnresolvedSend};
use super::places::Places;
use super::requests::Requests;
use super::sendmsg::SendmsgBackend;
use super::socket_state::SocketState;
use super::uring::UringBackend;
use super::{
    Event, Key, NotStarted, SocketAddress, SocketKind, Stable, Started, Submission, kind, orphans,
    permit_zero_copy, reset,
};

/// How sends reach the kernel.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub enum SendBackend {
    /// io_uring: SEND_ZC and SENDMSG_ZC, registered memory, completions in shared memory. Linux
    /// 6.2, and stable releases of 6.1.
    Uring,
    /// sendmsg(2) with MSG_ZEROCOPY, and the socket's error queue.
    ErrorQueue,
    /// sendmsg(2) with copies. Everything else works as with the other back-ends.
    Copy,
}

/// A socket, and the buffers that the kernel may read.
///
/// It belongs to the process that opened it. A forked child has a copy, but the memory of the ring
/// is not mapped there, and the requests belong to the parent: the child may only drop its copy,
/// which leaks it.
pub struct ZcSocket<B: Stable> {
    /// Taken out only by drop.
    inner: ManuallyDrop<Inner<B>>,
    /// The process that opened the socket.
    pid: u32,
}

struct Inner<B> {
    // Closing a ring does not end its requests at once. So ring and buffers are dropped together,
    // when no result or notification is pending.
    implementation: BackendImpl,
    state: SocketState<B>,
    backend: SendBackend,
    /// Why io_uring could not be used.
    refused: Option<io::ErrorKind>,
    /// When the stream of a dropped socket is reset, if its buffers are not free by then.
    reset_at: Option<Instant>,
}

#[expect(
    clippy::large_enum_variant,
    reason = "one per socket; a box would cost an indirection for each send"
)]
enum BackendImpl {
    Uring(UringBackend),
    Sendmsg(SendmsgBackend),
}

impl<B: Stable> ZcSocket<B> {
    /// Opens `socket` with the best back-end, or with the one that is `wanted`, and `capacity`
    /// places.
    ///
    /// # Errors
    /// `Unsupported` if the wanted back-end does not support this socket, or not on this kernel;
    /// ENOTSOCK if it is no socket; errors of setsockopt(2) and io_uring_setup(2).
    pub fn open(socket: OwnedFd, capacity: u32, wanted: Option<SendBackend>) -> io::Result<Self> {
        let kind = kind(&socket)?;
        if kind == SocketKind::VsockMessages {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let permitted = wanted != Some(SendBackend::Copy) && permit_zero_copy(&socket)?;
        let mut refused = None;
        let (implementation, backend) = match (wanted, permitted) {
            (Some(SendBackend::Copy) | None, false) => (None, SendBackend::Copy),
            (Some(_), false) => return Err(io::ErrorKind::Unsupported.into()),
            (Some(SendBackend::Uring), true) => (
                Some(UringBackend::open(&socket, capacity)?),
                SendBackend::Uring,
            ),
            (None, true) => match UringBackend::open(&socket, capacity) {
                Ok(uring) => (Some(uring), SendBackend::Uring),
                Err(why) => {
                    refused = Some(why.kind());
                    (None, SendBackend::ErrorQueue)
                }
            },
            (Some(wanted), true) => (None, wanted),
        };
        let sendmsg = || {
            BackendImpl::Sendmsg(SendmsgBackend::new(
                kind,
                backend == SendBackend::ErrorQueue,
            ))
        };
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
        Ok(Self { inner, pid })
    }

    /// Whether this is the copy of a forked child. One system call.
    #[must_use]
    pub fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    /// The kind of the socket.
    #[must_use]
    pub fn kind(&self) -> SocketKind {
        self.inner.state.kind
    }

    /// The back-end in use.
    #[must_use]
    pub fn backend(&self) -> SendBackend {
        self.inner.backend
    }

    /// Why io_uring is not used, if it was tried.
    #[must_use]
    pub fn ring_refused(&self) -> Option<io::ErrorKind> {
        self.inner.refused
    }

    /// Number of free places.
    #[must_use]
    pub fn room(&self) -> usize {
        self.inner.state.places.room()
    }

    /// Puts a buffer, and its destination if the socket is not connected, into a place.
    ///
    /// # Errors
    /// The buffer, if no place is free.
    pub fn put(&mut self, buffer: B, address: Option<SocketAddress>) -> Result<Key, B> {
        self.inner.state.places.put(buffer, address)
    }

    /// Makes one request of the buffer in the first of these places and, on a stream, of as many of
    /// the next ones as can join it. Over io_uring, [`submit`](Self::submit) passes it to the
    /// kernel; otherwise the request is one call, which does not block.
    ///
    /// # Errors
    /// If it cannot be made; the places are unchanged.
    pub fn start(&mut self, keys: &[Key], submission: Submission) -> Result<Started, NotStarted> {
        let (implementation, state) = self.inner.parts();
        match implementation {
            BackendImpl::Uring(uring) => uring.start(state, keys, submission),
            BackendImpl::Sendmsg(sendmsg) => sendmsg.start(state, keys, submission),
        }
    }

    /// Passes started requests to the kernel: one system call over io_uring, none if there are no
    /// requests.
    ///
    /// # Errors
    /// Errors of io_uring_enter(2), except that the completion queue must be read first.
    pub fn submit(&mut self) -> io::Result<()> {
        let (implementation, state) = self.inner.parts();
        match implementation {
            BackendImpl::Uring(uring) => uring.submit(state),
            BackendImpl::Sendmsg(_) => Ok(()),
        }
    }

    /// The next event, without a system call.
    pub fn event(&mut self) -> Option<Event> {
        let (implementation, state) = self.inner.parts();
        match implementation {
            BackendImpl::Uring(uring) => uring.event(state),
            BackendImpl::Sendmsg(_) => state.requests.events.pop_front(),
        }
    }

    /// Makes completions available to [`event`](Self::event): lets the kernel post them, or reads
    /// the error queue. At most one system call, which does not wait; none if nothing can have
    /// completed.
    ///
    /// # Errors
    /// Errors of io_uring_enter(2) or recvmmsg(2).
    pub fn reap(&mut self) -> io::Result<()> {
        let (implementation, state) = self.inner.parts();
        match implementation {
            BackendImpl::Uring(uring) => uring.reap(state),
            BackendImpl::Sendmsg(sendmsg) => sendmsg.reap(state).map(drop),
        }
    }

    /// As [`reap`](Self::reap), until no completion is left; reads a limited number of messages of
    /// the error queue, because peers can fill it as well.
    pub fn reap_all(&mut self) {
        let (implementation, state) = self.inner.parts();
        match implementation {
            // After an error, the kernel posts the completions later.
            BackendImpl::Uring(uring) => drop(uring.reap(state)),
            BackendImpl::Sendmsg(sendmsg) => sendmsg.reap_all(state),
        }
    }

    /// Submits, and waits for an event, for a writable socket after WouldBlock of a call, or for
    /// `timeout`. Returns at once if nothing is pending. A signal ends the wait early, and so does a failed
    /// datagram whose notification is the only one pending and may never come.
    ///
    /// # Errors
    /// Errors of io_uring_enter(2), or poll(2) and recvmmsg(2).
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let (implementation, state) = self.inner.parts();
        match implementation {
            BackendImpl::Uring(uring) => uring.wait(state, timeout),
            BackendImpl::Sendmsg(sendmsg) => sendmsg.wait(state, timeout),
        }
    }

    /// Number of places with a pending result or notification.
    #[must_use]
    pub fn busy_places(&self) -> u32 {
        self.inner.state.places.busy
    }

    /// Whether no result or notification is pending, except possibly the notification of a failed datagram
    /// that may never come: it is not waited for longer than a second. Its place stays busy.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.busy_places() == 0
            || self
                .inner
                .only_unresolved_left()
                .is_some_and(UnresolvedSend::is_lasting)
    }

    /// The time after which [`reap`](Self::reap) is to be called without an event: while only the
    /// notification of a failed datagram is pending that may never come, until
    /// [`is_drained`](Self::is_drained).
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Duration> {
        let doubt = self.inner.only_unresolved_left()?;
        (!doubt.is_lasting()).then_some(in_doubt::TURN)
    }

    /// Number of pending notifications of requests that took bytes, counted for each place of a
    /// request. Each of them frees memory that the kernel accounts to the socket or user.
    #[must_use]
    pub fn reading(&self) -> u32 {
        self.inner.state.places.reading
    }

    /// Whether this place has no pending result or notification.
    #[must_use]
    pub fn idle(&self, key: Key) -> bool {
        self.inner.state.places.idle(key)
    }

    /// Takes the buffer out of an idle place, which is free then.
    pub fn take(&mut self, key: Key) -> Option<B> {
        self.inner.state.places.take(key)
    }

    /// Cancels the requests that the kernel has not completed; each has a result. Without io_uring
    /// there are none.
    ///
    /// # Errors
    /// Errors of io_uring_register(2).
    pub fn cancel(&mut self) -> io::Result<()> {
        match &self.inner.implementation {
            BackendImpl::Uring(uring) => uring.cancel(),
            BackendImpl::Sendmsg(_) => Ok(()),
        }
    }

    /// Number of messages of the error queue that were no notifications, and were dropped.
    #[must_use]
    pub fn foreign(&self) -> u64 {
        self.inner.state.foreign
    }

    /// Sets when the stream is reset (TCP: RST) after the socket was dropped, if the kernel still
    /// reads buffers then.
    pub fn reset_at(&mut self, time: Instant) {
        self.inner.reset_at = Some(time);
    }

    /// Number of system calls so far, to send, to poll and to wait.
    #[must_use]
    pub fn system_calls(&self) -> u64 {
        self.inner.state.system_calls
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.inner.state.socket.as_fd()
    }

    /// Number of pool arenas that are registered with the kernel.
    #[must_use]
    pub fn registered(&self) -> usize {
        match &self.inner.implementation {
            BackendImpl::Uring(uring) => uring.registered(),
            BackendImpl::Sendmsg(_) => 0,
        }
    }
}

impl<B: Stable> AsFd for ZcSocket<B> {
    /// The descriptor that an event loop waits on. Over io_uring, it is readable when
    /// [`event`](ZcSocket::event) returns one. Otherwise it is the socket: EPOLLERR reports a
    /// notification, EPOLLOUT that it takes more.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl<B: Stable> Drop for ZcSocket<B> {
    fn drop(&mut self) {
        if self.is_forked() {
            // Requests, error queue and connection belong to the parent, and the ring is not mapped
            // here.
            return;
        }
        // SAFETY: taken once, as this is drop, and `inner` is not used after it.
        let mut inner = unsafe { ManuallyDrop::take(&mut self.inner) };
        let (implementation, state) = inner.parts();
        match implementation {
            BackendImpl::Uring(uring) => {
                // Requests that the kernel does not take now are abandoned.
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
            // Otherwise the ring keeps the socket open until the kernel has destroyed it, some time
            // later.
            uring.unregister_socket();
        }
    }
}

impl<B> Inner<B> {
    fn parts(&mut self) -> (&mut BackendImpl, &mut SocketState<B>) {
        (&mut self.implementation, &mut self.state)
    }

    /// The doubt about a failed datagram, if nothing else is pending.
    fn only_unresolved_left(&self) -> Option<&UnresolvedSend> {
        match &self.implementation {
            BackendImpl::Uring(_) => None,
            BackendImpl::Sendmsg(sendmsg) => sendmsg.only_unresolved_left(),
        }
    }

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
        let (implementation, state) = self.parts();
        match implementation {
            BackendImpl::Uring(uring) => uring.continue_shutdown(state),
            BackendImpl::Sendmsg(sendmsg) => sendmsg.reap_all(state),
        }
        if self
            .only_unresolved_left()
            .is_some_and(UnresolvedSend::is_lasting)
        {
            self.state.places.take_busy().for_each(in_doubt::leak);
            return true;
        }
        self.state.places.busy == 0
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
