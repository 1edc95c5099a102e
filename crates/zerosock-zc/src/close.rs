//! Closing a sender: what the peer receives, and what the application gets back.
//!
//! # Invariants
//! A stream is reset if it ends before the kernel has taken everything, or before every buffer is
//! free within the timeout: a peer never takes a part of the stream for all of it. Only TCP has a
//! reset; for other streams the result says that there was none.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::in_flight;
use super::{Completion, Notification, Returned, Sender};
use crate::sys::{Buf, Stable};

/// How a sender was closed.
#[derive(Debug)]
#[non_exhaustive]
pub enum CloseOutcome {
    /// Every accepted send succeeded or was reported as failed, and every buffer is free. The peer
    /// of a stream reads all of it, and then end of file.
    Whole,
    /// The timeout ended before that, or a buffer is held that is no longer waited for
    /// ([`Sender::is_quiet`]).
    TimedOut,
    /// An earlier send of the stream failed, was cancelled, or exceeded
    /// [`SenderBuilder::limit`](super::SenderBuilder::limit) (ETIMEDOUT).
    Broken(io::Error),
    /// The last piece of the last datagram is missing ([`Outgoing::more`](super::Outgoing::more));
    /// nothing of that datagram is sent.
    Corked,
    /// A system call failed.
    Call(io::Error),
}

/// The result of closing a sender, with everything that was not taken from it.
#[derive(Debug)]
#[must_use = "the outcome says whether everything was sent"]
#[non_exhaustive]
pub struct Closed<B: Stable = Buf> {
    /// How the sender was closed.
    pub outcome: CloseOutcome,
    /// The stream was reset: the peer gets ECONNRESET where the rest is missing. If this is false
    /// and the outcome is not [`CloseOutcome::Whole`], the socket has no reset (vsock, Unix
    /// sockets), and the peer cannot tell the end from an orderly one.
    pub reset: bool,
    /// Free buffers that the application had not taken, in the order in which they became free.
    /// Sends that the kernel had not taken are failed (ECANCELED).
    pub returned: Vec<Returned<B>>,
    /// Notifications that the application had not taken.
    pub notifications: Vec<Notification>,
    /// Completions that the application had not taken, if the sender keeps any.
    pub completions: Vec<Completion>,
    /// Number of buffers that the kernel still reads, or may read. They are freed, not returned, when it
    /// no longer does; see [`Sender::is_quiet`] for one of which that is not known.
    pub held: usize,
}

impl<B: Stable> Closed<B> {
    /// Whether the outcome is [`CloseOutcome::Whole`].
    #[must_use]
    pub fn is_whole(&self) -> bool {
        matches!(self.outcome, CloseOutcome::Whole)
    }
}

/// Why [`Sender::into_socket`] refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeepReason {
    /// A send is not finished, or the kernel still reads its buffer.
    #[error("a send is not finished, or the kernel still reads its buffer")]
    Busy,
    /// The last piece of the last datagram is missing.
    #[error("the last piece of the last datagram is missing")]
    Corked,
    /// A send failed: the next one would follow a gap in the stream, or be appended to a part of a
    /// raw packet.
    #[error("an earlier send failed: {0}")]
    Broken(io::Error),
    /// The descriptor could not be duplicated.
    #[error(transparent)]
    Call(io::Error),
}

/// A sender that still uses its socket.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct StillBusy<B: Stable = Buf> {
    /// The sender, unchanged.
    pub sender: Box<Sender<B>>,
    /// Why.
    #[source]
    pub why: KeepReason,
}

impl<B: Stable> Sender<B> {
    /// Flushes every slot, and closes the sender when every buffer is free, or after `timeout`; at
    /// once if a send of the stream has failed.
    ///
    /// If every buffer is free in time, the peer of a stream reads end of file. If not, the stream
    /// is reset: unacknowledged bytes are dropped, and the buffers that they kept busy are free. So
    /// `timeout` bounds how long a slow receiver can keep a buffer busy; zero closes at once. On
    /// other sockets, sends that the kernel has not taken are cancelled; packets in the queue of a
    /// device stay there.
    ///
    /// ```
    /// use std::io::Read;
    /// use std::net::{TcpListener, TcpStream};
    /// use std::time::Duration;
    /// use zerosock_zc::{Outgoing, Sender};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let listener = TcpListener::bind("127.0.0.1:0")?;
    /// let mut sender: Sender = Sender::open(TcpStream::connect(listener.local_addr()?)?)?;
    /// let mut peer = listener.accept()?.0;
    /// sender.send(Outgoing::new(&b"all of it"[..]))?;
    /// let closed = sender.close(Some(Duration::from_secs(30)));
    /// assert!(closed.is_whole());
    /// assert_eq!(closed.returned.len(), 1);
    /// let mut text = String::new();
    /// peer.read_to_string(&mut text)?;
    /// assert_eq!(text, "all of it");
    /// # Ok(())
    /// # }
    /// ```
    pub fn close(mut self, timeout: Option<Duration>) -> Closed<B> {
        self.begin_close();
        let waited = self.wait_until(timeout, Self::may_end);
        self.end(waited)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.queue.closed
    }

    /// Refuses new sends and flushes every slot.
    pub(super) fn begin_close(&mut self) {
        self.queue.closed = true;
        self.flush_all();
    }

    /// Whether there is nothing to wait for: a stream on which a send failed is reset at once.
    pub(super) fn may_end(&self) -> bool {
        self.is_quiet() || self.queue.broken.is_some()
    }

    /// Closes the sender; `waited` is the result of waiting for [`may_end`](Self::may_end).
    pub(super) fn end(&mut self, waited: io::Result<bool>) -> Closed<B> {
        let outcome = match (self.queue.broken, waited) {
            (Some(code), _) => CloseOutcome::Broken(in_flight::error(code)),
            (None, Ok(true)) if self.holds_buffer() => CloseOutcome::TimedOut,
            (None, Ok(true)) if self.queue.cork.accepting => CloseOutcome::Corked,
            (None, Ok(true)) => CloseOutcome::Whole,
            (None, Ok(false)) => CloseOutcome::TimedOut,
            (None, Err(error)) => CloseOutcome::Call(error),
        };
        let whole = matches!(outcome, CloseOutcome::Whole);
        if !whole {
            // If this fails, the drop of `ZcSocket` ends the requests.
            let _ = self.queue.cancel();
            self.queue.release_kept();
            if self.queue.open == 0 {
                self.queue.forget_pieces();
            }
        }
        let reset = self.queue.end(whole);
        // A reset frees buffers before it returns.
        let _ = self.queue.zc_socket.reap();
        self.queue.process_events();
        let mut completions = vec![Completion::default(); self.queue.ranges.len()];
        let count = self.queue.ranges.take(&mut completions);
        completions.truncate(count);
        Closed {
            outcome,
            reset,
            returned: std::iter::from_fn(|| self.returned()).collect(),
            notifications: std::iter::from_fn(|| self.notification()).collect(),
            completions,
            held: self.capacity.saturating_sub(self.room()),
        }
    }

    /// Returns the socket, if every send is finished and its buffer free. Drops the free buffers
    /// that the application has not taken.
    ///
    /// # Errors
    /// [`StillBusy`], with the sender.
    pub fn into_socket(mut self) -> Result<OwnedFd, StillBusy<B>> {
        self.queue.release_kept_for_caller();
        let why = match self.queue.broken {
            Some(code) => KeepReason::Broken(in_flight::error(code)),
            None if !self.is_quiet() || self.holds_buffer() => KeepReason::Busy,
            None if self.queue.cork.accepting => KeepReason::Corked,
            // The sender closes its own descriptor when it is dropped.
            None => match self.socket().try_clone_to_owned() {
                Ok(socket) => return Ok(socket),
                Err(error) => KeepReason::Call(error),
            },
        };
        let sender = Box::new(self);
        Err(StillBusy { sender, why })
    }
}
