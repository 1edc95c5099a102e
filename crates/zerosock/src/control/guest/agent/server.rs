//! Clients of an attach socket: processes of the guest, each on a thread of its own.
//!
//! # Invariants
//! - A client gets descriptors of its own file and its own doorbell only.
//! - Its endpoint ends with its connection.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketFlags, accept_with};
use tracing::{info, warn};
use zerosock_proto::Cid;
use zerosock_sys::hugetlbfs::HugePageError;

use super::Agent;
use super::attachment::{AgentError, Attachment, Pages};
use super::client::{Wake, answer, receive, wait};
use crate::control::attach::AttachRequest;
use crate::control::attach::codec::{
    Answer, Request, Status, VERSION, Version, decode_request, requested_version,
};
use crate::control::guest::client::RegistrationError;
use crate::control::guest::wire::{Reason, Refusal};
use crate::driver::guest_device::FEATURES;

/// How long a client may take for its first request.
const REQUEST: Duration = Duration::from_secs(10);
/// Clients that are no endpoints: their first request has not arrived.
const MAX_NEW: usize = 32;
/// How long no client is accepted when a call has failed.
const PAUSE: Duration = Duration::from_millis(100);

/// Which processes may attach at a socket of the agent, and what they get.
#[derive(Clone, Debug)]
pub struct Clients {
    /// Users that may attach.
    pub uids: Vec<u32>,
    /// Bytes of the largest memory.
    pub memory: u64,
    /// Most endpoints at a time.
    pub endpoints: usize,
}

impl Agent {
    /// Accepts clients at a socket (SOCK_SEQPACKET) that does not block. Returns when the agent has stopped, and all
    /// endpoints of clients have ended.
    pub fn serve(&self, listener: &OwnedFd, allowed: &Clients) {
        let server = Server {
            pages: &self.pages,
            allowed,
            clients: AtomicUsize::new(0),
            attached: AtomicUsize::new(0),
        };
        thread::scope(|scope| server.accept_all(listener, scope));
    }
}

/// What all clients share.
struct Server<'a> {
    pages: &'a Pages,
    allowed: &'a Clients,
    /// Clients, endpoints or not.
    clients: AtomicUsize,
    /// Endpoints that there are, and those with pages that are not free yet.
    attached: AtomicUsize,
}

impl Server<'_> {
    /// Serves a client until it, the host or the agent ends. `pid` is for the log.
    fn serve(&self, socket: &OwnedFd, pid: u32) {
        let Some(bytes) = self.first_request(socket) else {
            return;
        };
        let refusal = match decode_request(&bytes) {
            Ok(Request::AttachMemory(request, len)) => match self.attach(request, len) {
                Ok(attachment) => {
                    let granted = Answer {
                        cid: attachment.stream.cid,
                        host: Cid::HOST,
                        features: FEATURES,
                        memory: len,
                        ..Answer::refusal(Status::Ok, VERSION)
                    };
                    let fds = [attachment.file.as_fd(), attachment.doorbell.as_fd()];
                    // A client that has not got it has closed its connection.
                    let _ = answer(socket, &granted, &fds);
                    self.pages.run(socket, attachment, pid);
                    self.attached.fetch_sub(1, Ordering::Relaxed);
                    return;
                }
                Err(status) => Answer::refusal(status, VERSION),
            },
            Ok(_) => Answer::memory_only(requested_version(&bytes)),
            Err(refusal) => refusal,
        };
        info!(pid, "process refused: {:?}", refusal.status);
        let _ = answer(socket, &refusal, &[]);
    }

    /// The first request; `None`: the client is gone, or takes too long.
    fn first_request(&self, socket: &OwnedFd) -> Option<Vec<u8>> {
        let until = Instant::now() + REQUEST;
        match wait(&self.pages.stop, socket, None, Some(until)) {
            Wake::Client => receive(socket),
            _ => None,
        }
    }

    /// Makes an endpoint, which is counted.
    fn attach(&self, request: AttachRequest, len: u64) -> Result<Attachment, Status> {
        if len > self.allowed.memory {
            warn!("a process asks for {len} bytes; see --memory");
            return Err(Status::Full);
        }
        let most = self.allowed.endpoints;
        let more = |attached| (attached < most).then_some(attached + 1);
        let counted = self
            .attached
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted.map_err(|_| Status::Full)?;
        self.pages.attach(request, len).map_err(|error| {
            self.attached.fetch_sub(1, Ordering::Relaxed);
            warn!("cannot attach a process: {error}");
            status(&error)
        })
    }

    /// Accepts clients until the agent stops.
    fn accept_all<'scope>(&'scope self, listener: &OwnedFd, scope: &'scope Scope<'scope, '_>) {
        let mut fds = [
            PollFd::new(&self.pages.stop, PollFlags::IN),
            PollFd::new(listener, PollFlags::IN),
        ];
        loop {
            let polled = poll(&mut fds, None);
            if fds.first().is_none_or(|stop| !stop.revents().is_empty()) {
                return;
            }
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let accepted = polled.and_then(|_| accept_with(listener, flags));
            match accepted {
                Ok(socket) => self.admit(socket, scope),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => {
                    warn!("cannot accept a process: {errno}");
                    self.pages.stop.wait(PAUSE);
                }
            }
        }
    }

    /// Gives a client a thread, or turns it away.
    fn admit<'scope>(&'scope self, socket: OwnedFd, scope: &'scope Scope<'scope, '_>) {
        let Ok(user) = socket_peercred(&socket) else {
            return;
        };
        let (uid, pid) = (
            user.uid.as_raw(),
            user.pid.as_raw_nonzero().get().cast_unsigned(),
        );
        let status = if !self.allowed.uids.contains(&uid) {
            warn!(
                pid,
                uid, "process refused: its user may not attach; see --attach-uid"
            );
            Status::NotPermitted
        } else if self.clients.fetch_add(1, Ordering::Relaxed) >= self.allowed.endpoints + MAX_NEW {
            self.clients.fetch_sub(1, Ordering::Relaxed);
            Status::Full
        } else {
            let serve = move || {
                self.serve(&socket, pid);
                self.clients.fetch_sub(1, Ordering::Relaxed);
            };
            if let Err(error) = thread::Builder::new().spawn_scoped(scope, serve) {
                warn!(pid, "cannot serve a process: {error}");
                self.clients.fetch_sub(1, Ordering::Relaxed);
            }
            return;
        };
        let _ = answer(&socket, &Answer::refusal(status, Version::default()), &[]);
    }
}

/// The answer for a process that cannot attach. The log has the error.
fn status(error: &AgentError) -> Status {
    match error {
        AgentError::Pages(HugePageError::TooFew { .. }) => Status::Full,
        AgentError::Host(RegistrationError::Refused(Refusal { reason, .. })) => match *reason {
            Reason::CID_TAKEN => Status::CidTaken,
            Reason::NAME_TAKEN => Status::NameTaken,
            Reason::NOT_PERMITTED => Status::NotPermitted,
            Reason::FULL => Status::Full,
            _ => Status::ServerFailed,
        },
        _ => Status::ServerFailed,
    }
}
