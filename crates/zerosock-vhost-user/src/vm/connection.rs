//! The connection of a front-end.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::event::epoll::{self, EventFlags};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{Shutdown, shutdown};
use zerosock_sys::account::Account;
use zerosock_sys::{PeerFd, fd_passing, reaper, wait_ready};

use crate::codec::{self, DecodeError, Decoder, Message};
use crate::fds::SentFd;
use crate::journal::{self, Journal, Key};
use crate::session::{Session, record};

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
    /// The number of the next request, if there is a journal. The first one of a connection is random, so
    /// that none is used twice for a device.
    pub(super) next_number: Option<u64>,
    /// The request that is carried out, if there is a journal.
    pub(super) request: Request,
    pub(super) replay: Replay,
}

/// The requests of a predecessor's journal that have not been repeated yet. Nothing is read before.
#[derive(Default)]
pub(super) struct Replay {
    pub(super) requests: VecDeque<Message>,
    /// The last of them was not answered.
    pub(super) is_last_unanswered: bool,
}

impl Replay {
    /// The next one, and whether it was answered.
    fn next(&mut self) -> Option<(Message, bool)> {
        let message = self.requests.pop_front()?;
        let is_last = self.requests.is_empty();
        Some((message, !is_last || !self.is_last_unanswered))
    }
}

/// A request that is carried out.
#[derive(Clone, Copy, Default)]
pub(super) struct Request {
    pub(super) key: Key,
    pub(super) number: u64,
    /// A predecessor has answered it.
    pub(super) is_answered: bool,
    /// None of its descriptors was refused, so that it can be repeated.
    pub(super) is_whole: bool,
}

impl Request {
    pub(super) fn of(message: &Message, is_answered: bool) -> Request {
        Request {
            key: record::key(message.request, &message.payload),
            number: message.number,
            is_answered,
            is_whole: message.fds.iter().all(|fd| fd.as_fd().is_some()),
        }
    }
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
        if self.next_number.is_some() {
            drain(&self.socket);
        }
        if let Some(epoll) = &self.epoll {
            let _ = epoll::delete(epoll, &self.socket);
        }
    }
}

impl Connection {
    /// The next message, if one has arrived. With a journal it is in the journal before it is taken
    /// from the socket.
    pub(super) fn receive(
        &mut self,
        journal: Option<&mut (dyn Journal + 'static)>,
        account: &Account,
    ) -> Result<Option<Message>, DecodeError> {
        let Some(journal) = journal else {
            return self.decoder.read(&self.socket, account);
        };
        if let Some((message, is_answered)) = self.replay.next() {
            self.request = Request::of(&message, is_answered);
            return Ok(Some(message));
        }
        let Some((mut message, len)) = self.decoder.peek(&self.socket, account, record::has_fds)?
        else {
            return Ok(None);
        };
        message.number = self.next_number.unwrap_or_default();
        self.next_number = Some(message.number.wrapping_add(1));
        self.request = Request::of(&message, false);
        let fds: Vec<_> = message.fds.iter().filter_map(SentFd::as_fd).collect();
        journal.begin(&journal::encode(&message), &fds);
        codec::discard(&self.socket, len, account)?;
        Ok(Some(message))
    }

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

/// Has the reaper close the descriptors in the receive queue. The supervisor has the socket, too, and may
/// close it last, and what is in it.
fn drain(socket: &PeerFd) {
    let Ok(copy) = socket.as_fd().try_clone_to_owned() else {
        return;
    };
    let receive_all = move || {
        let (mut room, mut fds) = ([0; 4096], Vec::new());
        while fd_passing::recv(&copy, &mut room, &mut fds).is_ok_and(|it| it.bytes > 0) {
            fds.clear();
        }
    };
    reaper::run(receive_all, socket.account());
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
