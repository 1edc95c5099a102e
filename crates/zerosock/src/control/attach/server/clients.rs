//! Connections to the attach socket: accepting, refusing and watching them.
//!
//! # Invariants
//!
//! - A client is watched only for the events that its state can handle.
//! - A client that is turned away gets the reason first.

use std::io::{self, IoSlice};
use std::time::Instant;

use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketFlags, accept_with};
use zerosock_sys::account::Account;
use zerosock_sys::{PeerFd, fd_passing};

use super::super::codec::{Answer, Status, Version, encode_answer};
use super::state::{
    ACCEPT_PAUSE, ANSWER_LIMIT, AttachedClient, BUDGET, ClientState, LISTENER, MAX_CLIENTS,
    REQUEST_TIMEOUT, Server,
};
use crate::control::guest;
use crate::control::registry::DeviceRegistry;
use zerosock_vhost_user::FrontendRegistry;

/// Whether a user is in the list.
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
            let permit = match self.turned_away(registry).take_descriptors(1) {
                Ok(permit) => permit,
                Err(_) => {
                    self.warn("accepts no process: connections that were turned away cannot be closed yet");
                    return self.pause_accepting(frontends);
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
                    return self.pause_accepting(frontends);
                }
            }
        }
    }

    /// Stops accepting for [`ACCEPT_PAUSE`].
    fn pause_accepting(&mut self, frontends: &FrontendRegistry) {
        self.accept_paused_until = Some(Instant::now() + ACCEPT_PAUSE);
        self.watch_listener(frontends, EventFlags::empty());
    }

    pub(super) fn watch_listener(&self, frontends: &FrontendRegistry, flags: EventFlags) {
        if let Err(error) = frontends.watch_for(&self.config.listener, LISTENER, flags) {
            tracing::error!(%error, "cannot watch the attach socket: no process can attach; restart the daemon");
        }
    }

    /// Makes a connection a client, or turns it away.
    pub(super) fn admit(
        &mut self,
        socket: PeerFd,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        let (uid, pid) = match socket_peercred(&socket) {
            Ok(cred) => (cred.uid.as_raw(), cred.pid.as_raw_nonzero().get()),
            Err(error) => return self.warn(&format!("cannot get the user of a process: {error}")),
        };
        let status = if !self.may_connect(uid) {
            Status::NotPermitted
        } else if self.unattached_clients(uid) >= MAX_CLIENTS {
            Status::Full
        } else if let Ok(permit) = self.account(uid, registry).take_descriptors(1) {
            let socket = socket.with_permit(permit);
            let until = Instant::now() + REQUEST_TIMEOUT;
            let key = self.free_key();
            let watched = EventFlags::IN;
            if let Err(error) = frontends.watch(&socket, key, watched) {
                return self.warn(&format!("cannot watch a process: {error}"));
            }
            let client = AttachedClient {
                socket,
                uid,
                pid,
                state: ClientState::AwaitingRequest { until },
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
        self.directory.count_refusal();
        let reason = reason_for(status, uid);
        self.warn(&format!(
            "process {pid} of user {uid} is refused a connection: {reason}"
        ));
        send_last_answer(&socket, &Answer::refusal(status, Version::default()));
    }

    /// Whether processes of a user may attach, in either way.
    fn may_connect(&self, uid: u32) -> bool {
        let config = &self.config;
        is_allowed(&config.allowed_uids, uid) || is_allowed(&config.service_uids, uid)
    }

    /// Clients of a user that are not members.
    fn unattached_clients(&self, uid: u32) -> usize {
        let clients = self.clients.values().filter(|client| client.uid == uid);
        let unattached = clients.filter(|c| !matches!(c.state, ClientState::Attached { .. }));
        unattached.count()
    }

    pub(super) fn free_key(&mut self) -> u32 {
        loop {
            // The keys above are those of guest endpoints.
            self.last_key = (self.last_key + 1) % guest::server::FIRST_KEY;
            if self.last_key != LISTENER && !self.clients.contains_key(&self.last_key) {
                return self.last_key;
            }
        }
    }

    /// Refuses the request of a client that is no member, and drops the client.
    pub(super) fn refuse(&mut self, key: u32, answer: &Answer) {
        let Some(client) = self.clients.remove(&key) else {
            return;
        };
        self.directory.count_refusal();
        let (pid, uid, status) = (client.pid, client.uid, answer.status);
        let reason = reason_for(status, uid);
        self.warn(&format!("process {pid} of user {uid} is refused: {reason}"));
        send_last_answer(&client.socket, answer);
    }

    /// Drops a client and disconnects its member.
    pub(super) fn drop_client(&mut self, key: u32, reason: &str, frontends: &mut FrontendRegistry) {
        let Some(client) = self.clients.remove(&key) else {
            return;
        };
        if let ClientState::Joining { vm, .. } | ClientState::Attached { vm } = client.state {
            self.disconnect_member(vm, reason, frontends);
        }
    }

    /// Watches a client for the events that its state can handle.
    pub(super) fn update_interest(&mut self, key: u32, frontends: &mut FrontendRegistry) {
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        let interest = match (&client.answer, &client.pending_claim) {
            (Some(_), _) => EventFlags::OUT,
            // A hang-up is reported nevertheless.
            (None, Some(_)) => EventFlags::empty(),
            (None, None) => EventFlags::IN,
        };
        if interest == client.watched {
            return;
        }
        client.watched = interest;
        if let Err(error) = frontends.watch_for(&client.socket, key, interest) {
            self.drop_client(key, &format!("cannot watch it: {error}"), frontends);
        }
    }
}

impl AttachedClient {
    /// Sends the pending answer. Returns false if the socket has no room for it.
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

/// Sends an answer on a connection that is about to be closed, without waiting.
pub(super) fn send_last_answer(socket: &PeerFd, answer: &Answer) {
    let bytes = encode_answer(answer);
    // The client may have exited or may not read.
    let _ = fd_passing::send(socket, &[IoSlice::new(&bytes)], &[]);
    // Unread bytes would make the kernel report a reset to the client before the answer, so they
    // are read here. After descriptors have arrived nothing more is received, and the client
    // may get the reset.
    let (mut bytes, mut fds) = ([0; 1], Vec::new());
    for _ in 0..BUDGET {
        if socket.account().is_some_and(Account::is_clogged) || !fds.is_empty() {
            return;
        }
        match fd_passing::recv_owned(socket, &mut bytes, &mut fds) {
            Ok(received) if received.bytes > 0 && !received.truncated_fds => {}
            _ => return,
        }
    }
}

/// Whether the other end is closed.
pub(super) fn has_hung_up(socket: &PeerFd) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(PollFlags::HUP)
}

/// Why a process is refused, and for a user that is not listed, the option that lists it.
fn reason_for(status: Status, uid: u32) -> String {
    match status {
        Status::NotPermitted => format!(
            "its user is not listed; add --attach-uid {uid} (in the file: `uid` of `attach`), for a \
             service --service-uid {uid}"
        ),
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_users_named_may_attach() {
        assert!(is_allowed(&[1000, 7], 7));
        assert!(!is_allowed(&[1000, 7], 8));
        // Root has no special rights.
        assert!(!is_allowed(&[1000], 0));
        assert!(!is_allowed(&[], 0));
    }
}
