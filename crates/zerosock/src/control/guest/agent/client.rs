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
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tracing::{info, warn};
use zerosock_proto::Cid;
use zerosock_sys::fd_passing;

use super::attachment::{Attachment, Pages};
use crate::control::attach::codec::{
    Answer, MAX_REQUEST, Request, Start, Status, VERSION, decode_request, encode_answer,
};
use crate::control::guest::client::RegistrationError;
use crate::control::guest::wire::Reason;

/// How long a client may take to lay out its memory, and the host to start the queues in it.
const START: Duration = Duration::from_secs(40);

/// Why an endpoint ends.
enum End {
    /// The host has ended it.
    Host(Reason),
    /// It is to be ended.
    Ours(&'static str),
}

/// What a client's thread has to look at.
pub(super) enum Wake {
    Client,
    Host,
    Stop,
    TimeIsUp,
}

impl Pages {
    /// Serves the client of an endpoint until it, the host or the agent ends. `pid` is for the log.
    pub(super) fn run(&self, socket: &OwnedFd, mut attachment: Attachment, pid: u32) {
        let cid = attachment.stream.cid;
        info!(%cid, pid, "process attached");
        let end = self.wait_for_end(socket, &mut attachment);
        match &end {
            End::Host(reason) => warn!(%cid, pid, "endpoint ended by the host: {reason}"),
            End::Ours(reason) => info!(%cid, pid, "process gone: {reason}"),
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

/// Starts the queues of an endpoint.
fn begin(attachment: &mut Attachment, start: Start) -> Result<Answer, End> {
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
pub(super) fn wait(
    stop: impl AsFd,
    client: &OwnedFd,
    host: Option<BorrowedFd<'_>>,
    until: Option<Instant>,
) -> Wake {
    let mut fds = vec![
        PollFd::new(&stop, PollFlags::IN),
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
pub(super) fn receive(socket: &OwnedFd) -> Option<Vec<u8>> {
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
