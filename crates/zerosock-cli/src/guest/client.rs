//! A client of the agent: a process of the guest that attaches, on a thread of its own.
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

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tracing::{info, warn};
use zerosock::Cid;
use zerosock::attach::codec::{
    Answer, MAX_REQUEST, Request, VERSION, decode_request, encode_answer, requested_version,
};
use zerosock::attach::{AttachRequest, Start, Status};
use zerosock::driver::FEATURES;
use zerosock::guest::client::RegistrationError;
use zerosock::guest::wire::{Reason, Refusal};
use zerosock_sys::fd_passing;
use zerosock_sys::hugetlbfs::HugePageError;

use super::attachment::{Attachment, AttachmentError, Pages};

/// How long a client may take for its first request.
const REQUEST: Duration = Duration::from_secs(10);
/// How long a client may take to lay out its memory, and the host to start the queues in it.
const START: Duration = Duration::from_secs(40);

/// What all clients share.
pub(super) struct Agent {
    pub(super) pages: Pages,
    /// Users that may attach.
    pub(super) uids: Vec<u32>,
    /// Bytes of the largest memory.
    pub(super) memory: u64,
    /// Most endpoints at a time.
    pub(super) endpoints: usize,
    /// Clients, endpoints or not.
    pub(super) clients: AtomicUsize,
    /// Endpoints that there are, and those with pages that are not free yet.
    pub(super) attached: AtomicUsize,
}

/// Why an endpoint ends.
enum End {
    /// The host has ended it.
    Host(Reason),
    /// It is to be ended.
    Ours(&'static str),
}

/// What a client's thread has to look at.
enum Event {
    Client,
    Host,
    Stop,
    TimeIsUp,
}

impl Agent {
    /// Serves a client until it, the host or the agent ends. `pid` is for the log.
    pub(super) fn serve(&self, socket: &OwnedFd, pid: i32) {
        let Some(bytes) = self.first_request(socket) else {
            return;
        };
        let refusal = match decode_request(&bytes) {
            Ok(Request::AttachMemory(request, len)) => match self.attach(request, len) {
                Ok(mut attachment) => {
                    let cid = attachment.stream.cid;
                    info!(%cid, pid, "process attached");
                    let end = self.run(socket, &mut attachment, len);
                    match &end {
                        End::Host(reason) => {
                            warn!(%cid, pid, "endpoint ended by the host: {reason}")
                        }
                        End::Ours(reason) => info!(%cid, pid, "process gone: {reason}"),
                    }
                    self.pages
                        .detach(socket, attachment, matches!(end, End::Host(_)));
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
        match self.wait(socket, None, Some(until)) {
            Event::Client => receive(socket),
            _ => None,
        }
    }

    /// Makes an endpoint, which is counted.
    fn attach(&self, request: AttachRequest, len: u64) -> Result<Attachment, Status> {
        if len > self.memory {
            warn!("a process asks for {len} bytes; see --memory");
            return Err(Status::Full);
        }
        let most = self.endpoints;
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

    /// Gives a client its memory, starts its queues, and waits for an end.
    fn run(&self, socket: &OwnedFd, attachment: &mut Attachment, len: u64) -> End {
        let granted = Answer {
            cid: attachment.stream.cid,
            host: Cid::HOST,
            features: FEATURES,
            memory: len,
            ..Answer::refusal(Status::Ok, VERSION)
        };
        let fds = [attachment.file.as_fd(), attachment.doorbell.as_fd()];
        if answer(socket, &granted, &fds).is_err() {
            return End::Ours("it does not take its answer");
        }
        // Until its queues are started once.
        let mut until = Some(Instant::now() + START);
        loop {
            match self.wait(socket, Some(attachment.stream.as_fd()), until) {
                Event::Stop => return End::Ours("the agent ends"),
                Event::TimeIsUp => return End::Ours("it has not started its queues in time"),
                Event::Host => match attachment.stream.has_ended() {
                    Ok(None) => {}
                    Ok(Some(reason)) => return End::Host(reason),
                    Err(error) => {
                        warn!("the host has left: {error}");
                        return End::Ours("the host has left");
                    }
                },
                Event::Client => {
                    let Some(bytes) = receive(socket) else {
                        return End::Ours("it closed its connection");
                    };
                    let reply = match decode_request(&bytes) {
                        Ok(Request::Start(start)) if until.take().is_some() => {
                            match self.start(attachment, start) {
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

    fn start(&self, attachment: &mut Attachment, start: Start) -> Result<Answer, End> {
        match attachment.stream.start(start, Instant::now() + START) {
            Ok(features) => Ok(Answer {
                cid: attachment.stream.cid,
                host: Cid::HOST,
                features,
                ..Answer::refusal(Status::Ok, VERSION)
            }),
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
        &self,
        client: &OwnedFd,
        host: Option<BorrowedFd<'_>>,
        until: Option<Instant>,
    ) -> Event {
        let mut fds = vec![
            PollFd::new(&self.pages.stop, PollFlags::IN),
            PollFd::new(client, PollFlags::IN),
        ];
        fds.extend(host.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        loop {
            let left = until.map(|at| at.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut fds, left.as_ref()) {
                Ok(0) => return Event::TimeIsUp,
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(_) => return Event::Stop,
            }
        }
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        match (ready.next(), ready.next()) {
            (Some(true), _) => Event::Stop,
            // What the host says comes first: the client may have left because of it.
            _ if ready.next() == Some(true) => Event::Host,
            // Other requests do not prolong the wait for the one that counts.
            _ if until.is_some_and(|at| Instant::now() >= at) => Event::TimeIsUp,
            _ => Event::Client,
        }
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
pub(super) fn answer(socket: impl AsFd, answer: &Answer, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    fd_passing::send(socket, &[IoSlice::new(&encode_answer(answer))], fds).map(drop)
}

/// The answer for a process that cannot attach. The log has the error.
fn status(error: &AttachmentError) -> Status {
    match error {
        AttachmentError::Pages(HugePageError::TooFew { .. }) => Status::Full,
        AttachmentError::Host(RegistrationError::Refused(Refusal { reason, .. })) => {
            match *reason {
                Reason::CID_TAKEN => Status::CidTaken,
                Reason::NAME_TAKEN => Status::NameTaken,
                Reason::NOT_PERMITTED => Status::NotPermitted,
                Reason::FULL => Status::Full,
                _ => Status::ServerFailed,
            }
        }
        _ => Status::ServerFailed,
    }
}
