//! The agent's side of a registration stream.
//!
//! A call sends one request and waits for its answer, until a deadline. The stream is any connected stream socket: an
//! AF_VSOCK one in a guest.
//!
//! # Invariants
//! - Nothing is sent before the daemon's nonce is there.
//! - Bytes of the daemon are decoded from a private copy, and an answer that does not belong to the request is an error.
//! - From [`Stream::register`] on the daemon may use the pages, until [`Registered::end`], [`Stream::query`] or an error
//!   tells that it does not: [`RegistrationError::frees_pages`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use zerosock_proto::Cid;
use zerosock_ring::Memory;
use zerosock_sys::wait_ready;

use super::key::{GuestKey, Nonce};
use super::page_value::{PAGE, clear_values, write_values};
use super::wire::{
    Answer, AttachmentId, MAX_ANSWER, Reason, Refusal, Register, Request, RequestWriter, Start,
    Token, WireError, decode_answer,
};

/// Why a request has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    /// The daemon has refused the request. It uses nothing of it, except what an earlier request has given to it.
    #[error("the daemon refuses: {}{}", .0.reason, position(.0))]
    Refused(Refusal),
    /// The daemon has ended the endpoint, and does not touch its pages any more.
    #[error("the daemon has ended the endpoint: {0}")]
    Ended(Reason),
    /// The daemon has closed the stream.
    #[error("the daemon has closed the registration stream")]
    Closed,
    /// No answer until the deadline.
    #[error("the daemon has not answered in time")]
    TimedOut,
    /// The socket failed.
    #[error("the registration stream failed: {0}")]
    Io(#[from] io::Error),
    /// Bytes of the daemon are no answer.
    #[error("the daemon broke the protocol: {0}")]
    Wire(#[from] WireError),
    /// The daemon's answer belongs to another request.
    #[error("the daemon broke the protocol: an answer to another request")]
    OtherAnswer,
    /// The memory is not that of the extents, or has become shorter. Nothing was sent.
    #[error("the memory has other bytes than the extents")]
    Memory,
    /// More extents or ports than a request can have. Nothing was sent.
    #[error("more extents or ports than a request can have")]
    TooMany,
}

impl RegistrationError {
    /// Whether it tells, as the error of [`Stream::register`], that the daemon does not use the pages.
    pub fn frees_pages(&self) -> bool {
        use RegistrationError::{Ended, Memory, Refused, TooMany};
        match self {
            // An earlier attachment may have the same pages.
            Refused(refusal) => {
                !matches!(refusal.reason, Reason::IN_USE | Reason::ATTACHMENT_IN_USE)
            }
            Ended(_) | Memory | TooMany => true,
            _ => false,
        }
    }
}

/// Which extent a refusal is about, if it is about one.
fn position(refusal: &Refusal) -> String {
    match refusal.reason {
        Reason::UNALIGNED | Reason::OUTSIDE | Reason::OVERLAP | Reason::IN_USE => {
            format!(" (extent {})", refusal.index)
        }
        _ => String::new(),
    }
}

/// A stream on which nothing was requested yet.
#[derive(Debug)]
pub struct Stream {
    messages: Messages,
    nonce: Nonce,
}

/// A stream with an endpoint, which ends with it.
#[derive(Debug)]
pub struct Registered {
    messages: Messages,
    /// The endpoint's CID.
    pub cid: Cid,
    /// What opens its doorbell.
    pub token: Token,
}

impl Stream {
    /// Waits for the daemon's nonce on a connected stream socket.
    ///
    /// # Errors
    /// See [`RegistrationError`].
    pub fn open(
        socket: OwnedFd,
        key: &GuestKey,
        deadline: Instant,
    ) -> Result<Stream, RegistrationError> {
        // Replaced when the nonce is known; nothing is sent before.
        let requests = RequestWriter::new(key, &Nonce([0; 32]));
        let mut messages = Messages {
            socket,
            received: Vec::new(),
            requests,
        };
        match messages.receive(deadline)? {
            Answer::Hello(nonce) => {
                messages.requests = RequestWriter::new(key, &nonce);
                Ok(Stream { messages, nonce })
            }
            Answer::Refused(refusal) => Err(RegistrationError::Refused(refusal)),
            _ => Err(RegistrationError::OtherAnswer),
        }
    }

    /// Registers pages, which are zero: writes their values, sends the request, and clears the values when they were
    /// checked, except for those that the daemon reads again later. `memory` has the pages in the order of the extents.
    ///
    /// # Errors
    /// See [`RegistrationError`].
    pub fn register(
        mut self,
        register: Register,
        memory: &Memory,
        deadline: Instant,
    ) -> Result<Registered, RegistrationError> {
        let lens = register.extents.iter().map(|extent| extent.len);
        let len = lens.fold(0u64, u64::saturating_add);
        let pages = 0..len / PAGE;
        if len != memory.size() || write_values(memory, &self.nonce, pages.clone()).is_some() {
            return Err(RegistrationError::Memory);
        }
        self.messages.send(&Request::Register(register), deadline)?;
        match self.messages.receive(deadline)? {
            Answer::Accepted { cid, token } => {
                clear_values(memory, pages);
                let messages = self.messages;
                Ok(Registered {
                    messages,
                    cid,
                    token,
                })
            }
            answer => Err(no_result(answer)),
        }
    }

    /// Asks whether the daemon still uses the pages of an attachment.
    ///
    /// # Errors
    /// See [`RegistrationError`].
    pub fn query(
        mut self,
        attachment: AttachmentId,
        deadline: Instant,
    ) -> Result<bool, RegistrationError> {
        self.messages.send(&Request::Query(attachment), deadline)?;
        match self.messages.receive(deadline)? {
            Answer::Known(known) => Ok(known),
            answer => Err(no_result(answer)),
        }
    }
}

impl Registered {
    /// Starts the queues. Returns the virtio features in use.
    ///
    /// # Errors
    /// See [`RegistrationError`].
    pub fn start(&mut self, start: Start, deadline: Instant) -> Result<u64, RegistrationError> {
        self.messages.send(&Request::Start(start), deadline)?;
        match self.messages.receive(deadline)? {
            Answer::Started { features } if features & !start.features == 0 => Ok(features),
            answer => Err(no_result(answer)),
        }
    }

    /// Ends the endpoint. When this returns, the daemon does not touch its pages any more.
    ///
    /// # Errors
    /// See [`RegistrationError`].
    pub fn end(&mut self, deadline: Instant) -> Result<Reason, RegistrationError> {
        self.messages.send(&Request::End, deadline)?;
        loop {
            match self.messages.receive(deadline)? {
                Answer::Ended(reason) => return Ok(reason),
                // To a `start` with an earlier deadline.
                Answer::Started { .. } | Answer::Refused(_) => {}
                answer => return Err(no_result(answer)),
            }
            // `receive` waits only when no answer has arrived.
            if Instant::now() >= deadline {
                return Err(RegistrationError::TimedOut);
            }
        }
    }

    /// Whether the daemon has ended the endpoint by itself. Does not wait: call it when the socket is readable.
    ///
    /// # Errors
    /// See [`RegistrationError`].
    pub fn has_ended(&mut self) -> Result<Option<Reason>, RegistrationError> {
        match self.messages.try_receive()? {
            None => Ok(None),
            Some(Answer::Ended(reason)) => Ok(Some(reason)),
            Some(answer) => Err(no_result(answer)),
        }
    }
}

impl AsFd for Registered {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.messages.socket.as_fd()
    }
}

/// The error for an answer that is not the one to the request.
fn no_result(answer: Answer) -> RegistrationError {
    match answer {
        Answer::Refused(refusal) => RegistrationError::Refused(refusal),
        Answer::Ended(reason) => RegistrationError::Ended(reason),
        _ => RegistrationError::OtherAnswer,
    }
}

/// Requests out, answers in.
#[derive(Debug)]
struct Messages {
    socket: OwnedFd,
    /// Bytes that were received and are no whole answer yet; at most [`MAX_ANSWER`] and one read.
    received: Vec<u8>,
    requests: RequestWriter,
}

impl Messages {
    fn send(&mut self, request: &Request, deadline: Instant) -> Result<(), RegistrationError> {
        let bytes = self.requests.encode(request);
        let bytes = bytes.ok_or(RegistrationError::TooMany)?;
        let mut left = &bytes[..];
        while !left.is_empty() {
            match send(
                &self.socket,
                left,
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            ) {
                Ok(sent) => left = left.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                // The daemon may have answered before it closed the stream.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
        Ok(())
    }

    fn receive(&mut self, deadline: Instant) -> Result<Answer, RegistrationError> {
        loop {
            match self.try_receive()? {
                Some(answer) => return Ok(answer),
                None => self.wait(PollFlags::IN, deadline)?,
            }
        }
    }

    /// The next answer, as far as it has arrived.
    fn try_receive(&mut self) -> Result<Option<Answer>, RegistrationError> {
        loop {
            if let Some((answer, len)) = decode_answer(&self.received)? {
                self.received.drain(..len);
                return Ok(Some(answer));
            }
            let mut bytes = [0; MAX_ANSWER];
            match recv(&self.socket, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) | Err(Errno::CONNRESET | Errno::PIPE) => {
                    return Err(RegistrationError::Closed);
                }
                Ok((len, _)) => self.received.extend(bytes.get(..len).unwrap_or_default()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
    }

    fn wait(&self, events: PollFlags, deadline: Instant) -> Result<(), RegistrationError> {
        let left = deadline.saturating_duration_since(Instant::now());
        match wait_ready(&self.socket, events, Some(left))? {
            none if none.is_empty() => Err(RegistrationError::TimedOut),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
