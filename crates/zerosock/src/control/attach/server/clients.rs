//! Connections to the attach socket: who may have one, and what is said on it in the end.
//!
//! What must hold: a client is watched for what it is waited for, and for nothing else; whoever is
//! turned away is told why first.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::epoll::{self, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketFlags, accept_with};
use zerosock_sys::account::Account;
use zerosock_sys::{PeerFd, fd_passing};

use super::super::codec::{ANSWER_LEN, Answer, Status, Version, encode_answer};
use super::claims::PendingClaim;
use super::places::JoinRequest;
use super::{ACCEPT_REST, ANSWER_LIMIT, BUDGET, LISTENER, MAX_CLIENTS, PATIENCE, Server};
use crate::control::registry::DeviceRegistry;
use zerosock_vhost_user::FrontendRegistry;

pub(super) struct Client {
    pub(super) socket: PeerFd,
    pub(super) uid: u32,
    pub(super) pid: i32,
    pub(super) state: State,
    /// An answer that the socket did not take. While there is one, nothing is read.
    pub(super) answer: Option<[u8; ANSWER_LEN]>,
    /// What a service has asked for and the workers are told of. While there is something,
    /// nothing is read.
    pub(super) pending_claim: Option<PendingClaim>,
    pub(super) watched: EventFlags,
    /// When it is dropped for not having taken its answer.
    pub(super) stalled_until: Option<Instant>,
    /// Watches the socket.
    pub(super) epoll: Arc<OwnedFd>,
}

impl Drop for Client {
    fn drop(&mut self) {
        // The reaper closes the socket later, which until then would be reported again and again.
        let _ = epoll::delete(&self.epoll, &self.socket);
    }
}

pub(super) enum State {
    Silent {
        until: Instant,
    },
    Waiting {
        until: Instant,
        request: JoinRequest,
    },
    Joining {
        vm: usize,
        theirs: UnixStream,
    },
    Attached {
        vm: usize,
    },
}

/// Whether a user is among those who may.
pub(super) fn is_allowed(allowed: &[u32], uid: u32) -> bool {
    allowed.contains(&uid)
}

impl Server {
    pub(super) fn accept(
        &mut self,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        for _ in 0..BUDGET {
            let permit = match self.turned_away.take_descriptors(1) {
                Ok(permit) => permit,
                Err(_) => {
                    self.warn("accepts no process: those that were turned away cannot be closed");
                    return self.rest(frontends);
                }
            };
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match accept_with(&self.config.listener, flags) {
                Ok(socket) => self.admit(
                    PeerFd::from(socket).with_permit(permit),
                    registry,
                    frontends,
                ),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    self.warn(&format!("cannot accept a process: {error}"));
                    return self.rest(frontends);
                }
            }
        }
    }

    /// Accepts nothing for a while.
    fn rest(&mut self, frontends: &FrontendRegistry) {
        self.rest = Some(Instant::now() + ACCEPT_REST);
        self.watch_listener(frontends, EventFlags::empty());
    }

    pub(super) fn watch_listener(&self, frontends: &FrontendRegistry, flags: EventFlags) {
        if let Err(error) = frontends.watch_for(&self.config.listener, LISTENER, flags) {
            tracing::error!(%error, "cannot change what is watched");
        }
    }

    /// Lets a process say what it wants, or turns it away.
    pub(super) fn admit(
        &mut self,
        socket: PeerFd,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        let (uid, pid) = match socket_peercred(&socket) {
            Ok(cred) => (cred.uid.as_raw(), cred.pid.as_raw_nonzero().get()),
            Err(error) => return self.warn(&format!("a process without a user: {error}")),
        };
        let status = if !self.may_connect(uid) {
            Status::NotPermitted
        } else if self.newcomers() >= MAX_CLIENTS {
            Status::Full
        } else if let Ok(permit) = self.account(uid, registry).take_descriptors(1) {
            let socket = socket.with_permit(permit);
            let until = Instant::now() + PATIENCE;
            let key = self.free_key();
            let watched = EventFlags::IN;
            if let Err(error) = frontends.watch(&socket, key, watched) {
                return self.warn(&format!("cannot watch a process: {error}"));
            }
            let client = Client {
                socket,
                uid,
                pid,
                state: State::Silent { until },
                answer: None,
                pending_claim: None,
                watched,
                stalled_until: None,
                epoll: frontends.epoll(),
            };
            self.clients.insert(key, client);
            return;
        } else {
            Status::Full
        };
        self.directory.refuse();
        self.warn(&format!(
            "process {pid} of user {uid} is turned away: {status:?}"
        ));
        dismiss(&socket, &Answer::refusal(status, Version::default()));
    }

    /// Whether the processes of a user may ask for anything.
    fn may_connect(&self, uid: u32) -> bool {
        let config = &self.config;
        is_allowed(&config.allowed_uids, uid) || is_allowed(&config.service_uids, uid)
    }

    pub(super) fn newcomers(&self) -> usize {
        let clients = self.clients.values();
        let attached = clients.filter(|c| matches!(c.state, State::Attached { .. }));
        self.clients.len() - attached.count()
    }

    pub(super) fn free_key(&mut self) -> u32 {
        loop {
            self.last_key = self.last_key.wrapping_add(1);
            if self.last_key != LISTENER && !self.clients.contains_key(&self.last_key) {
                return self.last_key;
            }
        }
    }

    /// Tells a client that has no place why not, and is done with it.
    pub(super) fn refuse(&mut self, key: u32, answer: &Answer) {
        let Some(client) = self.clients.remove(&key) else {
            return;
        };
        self.directory.refuse();
        let (pid, uid, status) = (client.pid, client.uid, answer.status);
        self.warn(&format!(
            "process {pid} of user {uid} is refused: {status:?}"
        ));
        dismiss(&client.socket, answer);
    }

    /// A client is gone, or given up.
    pub(super) fn lose(&mut self, key: u32, reason: &str, frontends: &mut FrontendRegistry) {
        let Some(client) = self.clients.remove(&key) else {
            return;
        };
        if let State::Joining { vm, .. } | State::Attached { vm } = client.state {
            self.send_off(vm, reason, frontends);
        }
    }

    /// Watches a client for what it is waited for now.
    pub(super) fn settle(&mut self, key: u32, frontends: &mut FrontendRegistry) {
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        let interest = match (&client.answer, &client.pending_claim) {
            (Some(_), _) => EventFlags::OUT,
            // That it hangs up is told all the same.
            (None, Some(_)) => EventFlags::empty(),
            (None, None) => EventFlags::IN,
        };
        if interest == client.watched {
            return;
        }
        client.watched = interest;
        if let Err(error) = frontends.watch_for(&client.socket, key, interest) {
            self.lose(key, &format!("cannot watch it: {error}"), frontends);
        }
    }
}

impl State {
    /// When patience is at its end.
    pub(super) fn until(&self) -> Option<Instant> {
        match self {
            State::Silent { until } | State::Waiting { until, .. } => Some(*until),
            State::Joining { .. } | State::Attached { .. } => None,
        }
    }
}

impl Client {
    /// Sends the answer that is left over. False: not now.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        if let Some(answer) = &self.answer {
            match fd_passing::send(&self.socket, &[IoSlice::new(answer)], &[]) {
                Ok(_) => (self.answer, self.stalled_until) = (None, None),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let until = Instant::now() + ANSWER_LIMIT;
                    self.stalled_until.get_or_insert(until);
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// The last word to someone whose socket is about to be closed.
pub(super) fn dismiss(socket: &PeerFd, answer: &Answer) {
    let bytes = encode_answer(answer);
    // It may have gone, or may not want to hear.
    let _ = fd_passing::send(socket, &[IoSlice::new(&bytes)], &[]);
    // What it has said and nobody read would make the kernel speak of a reset before the answer. One
    // that has sent descriptors may get the reset: no more of them are received.
    let (mut bytes, mut fds) = ([0; 1], Vec::new());
    for _ in 0..BUDGET {
        if socket.account().is_some_and(Account::is_clogged) || !fds.is_empty() {
            return;
        }
        match fd_passing::recv_owned(socket, &mut bytes, &mut fds) {
            Ok(received) if received.bytes > 0 => {}
            _ => return,
        }
    }
}

/// Whether nobody is at the other end any more.
pub(super) fn has_hung_up(socket: &PeerFd) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_users_named_may_attach() {
        assert!(is_allowed(&[1000, 7], 7));
        assert!(!is_allowed(&[1000, 7], 8));
        // Root is a user like any other.
        assert!(!is_allowed(&[1000], 0));
        assert!(!is_allowed(&[], 0));
    }
}
