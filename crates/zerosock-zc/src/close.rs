//! The end of a sender: what the peer sees, and what is left of the sends.
//!
//! # Invariants
//! A stream is reset if it ends before the kernel has taken everything, or before every buffer is free
//! in the time that was given: a peer never takes a part for the whole. Only TCP has a reset; for other
//! streams the result says that there was none.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::in_flight;
use super::{Completion, Notification, Returned, Sender};
use crate::sys::{Buf, Stable};

/// How a sender ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum CloseOutcome {
    /// Everything that was accepted is over, and every buffer is free. The peer of a stream reads all
    /// of it, and then the end.
    Whole,
    /// The time was up before that.
    TimedOut,
    /// A send of the stream had failed before, had been cancelled, or was late (ETIMEDOUT,
    /// [`Builder::limit`](super::Builder::limit)).
    Broken(io::Error),
    /// The last datagram was to be continued ([`Outgoing::more`](super::Outgoing::more)); nothing of
    /// it is sent.
    Corked,
    /// The kernel refused a call.
    Call(io::Error),
}

/// What is left of a sender that was closed.
#[derive(Debug)]
#[must_use = "it says whether everything was sent"]
#[non_exhaustive]
pub struct Closed<B: Stable = Buf> {
    /// How it ended.
    pub outcome: CloseOutcome,
    /// Its stream was reset: the peer meets an error (ECONNRESET) where the rest is missing. If
    /// neither this nor [`CloseOutcome::Whole`] is said of a stream, its kind knows no reset, and the peer
    /// cannot tell the end from an orderly one: vsock, Unix sockets.
    pub reset: bool,
    /// The buffers that are free and had not been taken, in the order in which they became free. What
    /// the kernel had not taken has failed (ECANCELED).
    pub returned: Vec<Returned<B>>,
    /// The notifications that had not been taken.
    pub notifications: Vec<Notification>,
    /// The completions that had not been taken, if the sender kept any.
    pub completions: Vec<Completion>,
    /// How many buffers the kernel still reads. They are freed, not given back, when it has let go
    /// of them.
    pub held: usize,
}

impl<B: Stable> Closed<B> {
    /// Whether it ended as [`CloseOutcome::Whole`].
    #[must_use]
    pub fn is_whole(&self) -> bool {
        matches!(self.outcome, CloseOutcome::Whole)
    }
}

/// Why a sender keeps its socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeepReason {
    /// Something that was accepted is not over, or its buffer is not free.
    #[error("not everything that was accepted is over")]
    Busy,
    /// The last datagram is to be continued.
    #[error("the last datagram is to be continued")]
    Corked,
    /// A send failed: what is sent next would lie behind a gap in the stream, or be glued to a part
    /// of a raw packet.
    #[error("an earlier send failed: {0}")]
    Broken(io::Error),
    /// There is no descriptor to be had.
    #[error(transparent)]
    Call(io::Error),
}

/// A sender that keeps its socket.
#[derive(Debug)]
pub struct StillBusy<B: Stable = Buf> {
    /// As it was.
    pub sender: Box<Sender<B>>,
    /// Why.
    pub why: KeepReason,
}

impl<B: Stable> std::fmt::Display for StillBusy<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.why.fmt(f)
    }
}

impl<B: Stable + std::fmt::Debug> std::error::Error for StillBusy<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.why)
    }
}

impl<B: Stable> Sender<B> {
    /// Flushes every slot, and ends when every buffer is free, or after `timeout`; at once if a send
    /// of the stream has failed.
    ///
    /// If every buffer is free in time, the peer of a stream is told of the end. If not, whatever is
    /// missing, the stream is reset: what the peer has not acknowledged is given up, and with it the
    /// buffers that only it held. So this bounds how long a slow receiver can hold a buffer; a time
    /// of zero ends it at once. What other sockets have not handed over is cancelled; what waits in
    /// front of a device stays there.
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

    /// Nothing more is accepted.
    pub(super) fn begin_close(&mut self) {
        self.queue.closed = true;
        self.flush_all();
    }

    /// Whether there is nothing to wait for: a stream with a gap is reset.
    pub(super) fn may_end(&self) -> bool {
        self.is_quiet() || self.queue.broken.is_some()
    }

    /// Ends it, after having waited until it may.
    pub(super) fn end(&mut self, waited: io::Result<bool>) -> Closed<B> {
        let outcome = match (self.queue.broken, waited) {
            (Some(code), _) => CloseOutcome::Broken(in_flight::error(code)),
            (None, Ok(true)) if self.queue.cork.accepting => CloseOutcome::Corked,
            (None, Ok(true)) => CloseOutcome::Whole,
            (None, Ok(false)) => CloseOutcome::TimedOut,
            (None, Err(error)) => CloseOutcome::Call(error),
        };
        let whole = matches!(outcome, CloseOutcome::Whole);
        if !whole {
            // What it answers to this, the `ZcSocket` goes on with when it is dropped.
            let _ = self.queue.cancel();
            self.queue.release_kept();
            if self.queue.open == 0 {
                self.queue.forget_pieces();
            }
        }
        let reset = self.queue.end(whole);
        // A reset frees buffers within the call.
        let _ = self.queue.zc_socket.reap();
        self.queue.process_events();
        let mut completions = vec![Completion::default(); self.queue.ranges.len()];
        let told = self.queue.ranges.take(&mut completions);
        completions.truncate(told);
        Closed {
            outcome,
            reset,
            returned: std::iter::from_fn(|| self.returned()).collect(),
            notifications: std::iter::from_fn(|| self.notification()).collect(),
            completions,
            held: self.capacity.saturating_sub(self.room()),
        }
    }

    /// The socket, once everything that was accepted is over and its buffer free. What is free and
    /// has not been taken is dropped.
    ///
    /// # Errors
    /// [`StillBusy`], with the sender.
    pub fn into_socket(mut self) -> Result<OwnedFd, StillBusy<B>> {
        self.queue.release_kept_for_caller();
        let why = match self.queue.broken {
            Some(code) => KeepReason::Broken(in_flight::error(code)),
            None if !self.is_quiet() => KeepReason::Busy,
            None if self.queue.cork.accepting => KeepReason::Corked,
            // The ring lets go of its own when it is dropped; to have that one out of it would be
            // the same socket.
            None => match self.socket().try_clone_to_owned() {
                Ok(socket) => return Ok(socket),
                Err(error) => KeepReason::Call(error),
            },
        };
        let sender = Box::new(self);
        Err(StillBusy { sender, why })
    }
}
