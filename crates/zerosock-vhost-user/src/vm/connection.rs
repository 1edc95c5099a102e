//! The connection of a front-end.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::event::epoll::{self, EventFlags};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{Shutdown, shutdown};
use zerosock_sys::{PeerFd, fd_passing, wait_ready};

use crate::codec::Decoder;
use crate::session::Session;

/// A front-end's connection.
pub(in super::super) struct Connection {
    pub(in super::super) socket: PeerFd,
    pub(in super::super) number: u64,
    /// The events that the epoll instance watches for; `None` before the socket was added.
    pub(in super::super) watched: Option<EventFlags>,
    /// The epoll instance, once it watches the socket.
    pub(in super::super) epoll: Option<Arc<OwnedFd>>,
    pub(super) decoder: Decoder,
    pub(super) session: Session,
    /// The current reply, and how much of it is written. Nothing is read while a part of it is
    /// left, so there is never more than one.
    pub(super) output: Vec<u8>,
    pub(super) written: usize,
    /// Since when the socket has had no room for the rest of the reply.
    pub(super) stalled_since: Option<Instant>,
    /// Sequence number of the command that the worker is to answer. Nothing is read until then.
    pub(super) waiting: Option<u64>,
    /// Whether the front-end has sent a message.
    pub(super) has_sent_message: bool,
    /// Since when the connection is read; `None` until the worker has answered `Connected`.
    pub(super) read_since: Option<Instant>,
    pub(super) driver: Driver,
}

/// The driver, for the log.
pub(super) enum Driver {
    /// The queues that it needs do not run.
    Away,
    /// They run since then, and whether there is a buffer in one is not known yet.
    Began(Instant),
    Ready,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The reaper closes the socket later, perhaps after descriptors that do not close. Without
        // this, epoll would report it until then, and the front-end would not see the end.
        hang_up(&self.socket);
        if let Some(epoll) = &self.epoll {
            let _ = epoll::delete(epoll, &self.socket);
        }
    }
}

impl Connection {
    /// The events to watch for now. The end of the connection is always reported.
    pub(in super::super) fn interest(&self) -> EventFlags {
        if self.waiting.is_some() {
            EventFlags::empty()
        } else if self.written < self.output.len() {
            EventFlags::OUT
        } else {
            EventFlags::IN
        }
    }

    /// Writes the rest of the reply. Returns false if the socket has no room for all of it.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        while let Some(rest) = self
            .output
            .get(self.written..)
            .filter(|rest| !rest.is_empty())
        {
            match fd_passing::send(&self.socket, &[IoSlice::new(rest)], &[]) {
                Ok(bytes) => {
                    self.written += bytes;
                    self.stalled_since = None;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.stalled_since.get_or_insert_with(Instant::now);
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        self.output.clear();
        self.written = 0;
        Ok(true)
    }
}

/// Ends both directions of a connection without waiting. The peer can still read what was sent to
/// it.
pub(super) fn hang_up(socket: &PeerFd) {
    // Fails only if the connection has ended.
    let _ = shutdown(socket, Shutdown::Both);
}

/// Whether the peer has closed its end or the socket has failed.
pub(super) fn has_hung_up(socket: &PeerFd) -> bool {
    let events = wait_ready(socket, PollFlags::empty(), Some(Duration::ZERO));
    events.is_ok_and(|events| events.intersects(PollFlags::HUP | PollFlags::ERR))
}

/// The peer's process and user, for the log.
pub(super) fn peer(socket: &PeerFd) -> String {
    match socket_peercred(socket) {
        Ok(cred) => format!(
            "pid {}, uid {}",
            cred.pid.as_raw_nonzero(),
            cred.uid.as_raw()
        ),
        Err(_) => "unknown".into(),
    }
}
