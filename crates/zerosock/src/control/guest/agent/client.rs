//! The clients of an agent, each on a thread of its own: processes of the guest that attach at a socket, and endpoints of
//! the agent's program.
//!
//! ```text
//!  client                                   agent
//!  Attach: memory is taken      ---------->  makes and registers the pages
//!                               <----------  CID, the file, the doorbell
//!  Start: features, rings       ---------->  passes it on to the host
//!                               <----------  features
//! ```
//!
//! # Invariants
//! - A client gets descriptors of its own file and its own doorbell only.
//! - Its endpoint ends with its connection.
//! - What clients cause in the log has a limit, and no user takes the places of another one.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketFlags, accept_with};
use tracing::{info, warn};
use zerosock_proto::Cid;
use zerosock_sys::fd_passing;
use zerosock_sys::hugetlbfs::HugePageError;

use super::Agent;
use super::attachment::{AgentError, Attachment, Pages};
use super::event::Event;
use super::places::{Place, Places};
use crate::control::attach::AttachRequest;
use crate::control::attach::codec::{
    Answer, MAX_REQUEST, Request, Start, Status, VERSION, Version, decode_request, encode_answer,
    requested_version,
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
/// How long a client may take to lay out its memory, and the host to start the queues in it.
const START: Duration = Duration::from_secs(40);

/// Which processes may attach at a socket of the agent, and what they get.
#[derive(Clone, Debug)]
pub struct Clients {
    /// Users that may attach, and share the endpoints.
    pub uids: Vec<u32>,
    /// Bytes of the largest memory.
    pub memory: u64,
    /// Most endpoints at a time.
    pub endpoints: usize,
}

impl Agent {
    /// Serves clients of this socket (SOCK_SEQPACKET, non-blocking) until the agent has stopped and they have ended.
    #[doc(hidden)]
    pub fn serve(&self, listener: &OwnedFd, allowed: &Clients) {
        let server = Server {
            pages: &self.pages,
            allowed,
            clients: Places::default(),
            attached: Places::default(),
        };
        thread::scope(|scope| server.accept_all(listener, scope));
    }
}

/// What all clients share.
struct Server<'a> {
    pages: &'a Pages,
    allowed: &'a Clients,
    /// Clients, endpoints or not.
    clients: Places,
    /// Endpoints that there are, and those with pages that are not free yet.
    attached: Places,
}

impl Server<'_> {
    /// Serves a client of this user until it, the host or the agent ends. `pid` is for the log.
    fn serve(&self, socket: &OwnedFd, uid: u32, pid: u32) {
        let Some(bytes) = self.first_request(socket) else {
            return;
        };
        let refusal = match decode_request(&bytes) {
            Ok(Request::AttachMemory(request, len)) => match self.attach(uid, request, len) {
                Ok((attachment, _place)) => {
                    let granted = Answer {
                        memory: len,
                        ..granted(&attachment, FEATURES)
                    };
                    let fds = [attachment.file.as_fd(), attachment.doorbell.as_fd()];
                    // A client that has not got it has closed its connection.
                    let _ = answer(socket, &granted, &fds);
                    return self.pages.run(socket, attachment, pid);
                }
                Err(status) => Answer::refusal(status, VERSION),
            },
            Ok(_) => Answer::memory_only(requested_version(&bytes)),
            Err(refusal) => refusal,
        };
        if let Some(suppressed) = self.pages.admit_log() {
            info!(pid, suppressed, "process refused: {:?}", refusal.status);
        }
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

    /// Makes an endpoint of this user.
    fn attach(
        &self,
        uid: u32,
        request: AttachRequest,
        len: u64,
    ) -> Result<(Attachment, Place<'_>), Status> {
        let Clients {
            uids,
            memory,
            endpoints,
        } = self.allowed;
        if len > *memory {
            if let Some(suppressed) = self.pages.admit_log() {
                warn!(suppressed, "a process asks for {len} bytes; see --memory");
            }
            return Err(Status::Full);
        }
        let place = self.attached.take(uid, uids, *endpoints);
        let place = place.ok_or(Status::Full)?;
        match self.pages.attach(request, len) {
            Ok(attachment) => Ok((attachment, place)),
            Err(error) => {
                if let Some(suppressed) = self.pages.admit_log() {
                    warn!(suppressed, "cannot attach a process: {error}");
                }
                Err(status(&error))
            }
        }
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
        let Clients {
            uids, endpoints, ..
        } = self.allowed;
        let status = if !uids.contains(&uid) {
            if let Some(suppressed) = self.pages.admit_log() {
                let why = "its user may not attach; see --attach-uid";
                warn!(pid, uid, suppressed, "process refused: {why}");
            }
            Status::NotPermitted
        } else if let Some(place) = self.clients.take(uid, uids, endpoints + MAX_NEW) {
            let serve = move || {
                self.serve(&socket, uid, pid);
                drop(place);
            };
            if let Err(error) = thread::Builder::new().spawn_scoped(scope, serve) {
                warn!(pid, "cannot serve a process: {error}");
            }
            return;
        } else {
            Status::Full
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

/// Why an endpoint ends.
enum End {
    /// The host has ended it.
    Host(Reason),
    /// It is to be ended.
    Ours(&'static str),
}

/// What a client's thread has to look at.
enum Wake {
    Client,
    Host,
    Stop,
    TimeIsUp,
}

impl Pages {
    /// Whether to log what a client has caused: as [`LogLimit::admit`](zerosock_sys::LogLimit::admit).
    fn admit_log(&self) -> Option<Option<u64>> {
        self.log.admit(Instant::now())
    }

    /// Serves the client of an endpoint until it, the host or the agent ends. `pid` is for the log.
    pub(super) fn run(&self, socket: &OwnedFd, mut attachment: Attachment, pid: u32) {
        let cid = attachment.stream.cid;
        if let Some(suppressed) = self.admit_log() {
            info!(%cid, pid, suppressed, "process attached");
        }
        let end = self.wait_for_end(socket, &mut attachment);
        if let Some(suppressed) = self.admit_log() {
            match &end {
                End::Host(reason) => {
                    warn!(%cid, pid, suppressed, "endpoint ended by the host: {reason}");
                }
                End::Ours(reason) => info!(%cid, pid, suppressed, "process gone: {reason}"),
            }
        }
        self.detach(socket, attachment, matches!(end, End::Host(_)));
    }

    /// Starts the client's queues, and waits for an end.
    fn wait_for_end(&self, socket: &OwnedFd, attachment: &mut Attachment) -> End {
        // Until its queues are started once.
        let mut until = Some(Instant::now() + START);
        loop {
            match wait(&self.stop, socket, Some(attachment.stream.as_fd()), until) {
                Wake::Stop => return End::Ours("the agent ends"),
                Wake::TimeIsUp => return End::Ours("it has not started its queues in time"),
                Wake::Host => match attachment.stream.has_ended() {
                    Ok(None) => {}
                    Ok(Some(reason)) => return End::Host(reason),
                    Err(error) => {
                        warn!("the host has left: {error}");
                        return End::Ours("the host has left");
                    }
                },
                Wake::Client => {
                    let Some(bytes) = receive(socket) else {
                        return End::Ours("it closed its connection");
                    };
                    let reply = match decode_request(&bytes) {
                        Ok(Request::Start(start)) if until.take().is_some() => {
                            match begin(attachment, start) {
                                Ok(reply) => reply,
                                Err(end) => return end,
                            }
                        }
                        // The protocol with the host has no names of others.
                        Ok(Request::Resolve(_)) => Answer::refusal(Status::UnknownName, VERSION),
                        Ok(_) => Answer::refusal(Status::BadRequest, VERSION),
                        Err(refusal) => refusal,
                    };
                    if answer(socket, &reply, &[]).is_err() {
                        return End::Ours("it does not take its answer");
                    }
                }
            }
        }
    }
}

fn granted(attachment: &Attachment, features: u64) -> Answer {
    Answer {
        cid: attachment.stream.cid,
        host: Cid::HOST,
        features,
        ..Answer::refusal(Status::Ok, VERSION)
    }
}

/// Starts the queues of an endpoint.
fn begin(attachment: &mut Attachment, start: Start) -> Result<Answer, End> {
    match attachment.stream.start(start, Instant::now() + START) {
        Ok(features) => Ok(granted(attachment, features)),
        Err(RegistrationError::Ended(reason)) => Err(End::Host(reason)),
        Err(RegistrationError::Refused(refusal)) => {
            warn!("the host does not start queues: {}", refusal.reason);
            Ok(Answer::refusal(Status::BadRequest, VERSION))
        }
        Err(error) => {
            warn!("the host does not start queues: {error}");
            Err(End::Ours("the host has not started its queues"))
        }
    }
}

/// Waits for the client, its registration stream, or the end of the agent.
fn wait(
    stop: &Event,
    client: &OwnedFd,
    host: Option<BorrowedFd<'_>>,
    until: Option<Instant>,
) -> Wake {
    let mut fds = vec![
        PollFd::new(stop, PollFlags::IN),
        PollFd::new(client, PollFlags::IN),
    ];
    fds.extend(host.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    loop {
        let left = until.map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut fds, left.as_ref()) {
            Ok(0) => return Wake::TimeIsUp,
            Ok(_) => break,
            Err(Errno::INTR) => {}
            Err(_) => return Wake::Stop,
        }
    }
    let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
    match (ready.next(), ready.next()) {
        (Some(true), _) => Wake::Stop,
        // What the host says comes first: the client may have left because of it.
        _ if ready.next() == Some(true) => Wake::Host,
        // Other requests do not prolong the wait for the one that counts.
        _ if until.is_some_and(|at| Instant::now() >= at) => Wake::TimeIsUp,
        _ => Wake::Client,
    }
}

/// Receives a request. `None`: the client is gone, or has sent descriptors.
fn receive(socket: &OwnedFd) -> Option<Vec<u8>> {
    let (mut bytes, mut fds) = (vec![0; MAX_REQUEST + 1], Vec::new());
    match fd_passing::recv(socket, &mut bytes, &mut fds) {
        Ok(received) if received.bytes > 0 && !received.truncated_fds && fds.is_empty() => {
            bytes.truncate(received.bytes);
            Some(bytes)
        }
        _ => None,
    }
}

/// Sends an answer. A client that does not receive a few of them is gone.
fn answer(socket: impl AsFd, answer: &Answer, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    fd_passing::send(socket, &[IoSlice::new(&encode_answer(answer))], fds).map(drop)
}
