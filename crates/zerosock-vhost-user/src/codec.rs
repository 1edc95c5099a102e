//! vhost-user framing: from the bytes and descriptors of a socket to whole messages.
//!
//! A [`Decoder`] reads what has arrived and keeps it; it never waits. It reads a header, then
//! exactly its payload, so that each descriptor belongs to the message it arrived with.
//!
//! # Invariants
//!
//! - Memory is bounded by one message and [`MAX_FDS`] descriptors.
//! - Dropping the decoder closes the descriptors that it holds.
//!
//! vhost-user, "Message Specification": a header of three native-endian u32 (request, flags,
//! size), then `size` bytes.

use std::io;
use std::os::fd::AsFd;

use thiserror::Error;
use vhost::vhost_user::message::{BackendReq, FrontendReq, MAX_MSG_SIZE, VhostUserHeaderFlag};
use zerosock_sys::account::{Account, MAX_DEFERRED, MAX_UNCOUNTED};
use zerosock_sys::fd_passing;

use super::fds::SentFd;
use super::stats::FrontendFault;

/// Length of a message's header in bytes.
pub const HEADER_LEN: usize = 12;
/// The longest payload of a message in bytes. The longest of a known request, a SET_MEM_TABLE of 32
/// regions, has 1032.
pub const MAX_PAYLOAD: usize = MAX_MSG_SIZE;
/// The most descriptors of a message, over all its parts. More end the connection. The decoder
/// receives them nevertheless, so that the kernel never has to close them on the control thread.
pub const MAX_FDS: usize = 32;

/// The protocol's version, in the low two bits of the flags.
const VERSION: u32 = 1;

/// A whole message of a front-end. Its kind and contents are not validated.
#[derive(Debug)]
pub struct Message {
    /// The kind of request; may be unknown.
    pub request: u32,
    /// The front-end wants an acknowledgement, if REPLY_ACK is negotiated.
    pub need_reply: bool,
    /// At most [`MAX_PAYLOAD`] bytes.
    pub payload: Vec<u8>,
    /// At most [`MAX_FDS`] descriptors. Those of a kind that no request accepts are closed
    /// already.
    pub fds: Vec<SentFd>,
}

impl Message {
    /// The request's name in the specification, or its number.
    pub fn name(&self) -> String {
        request_name(self.request)
    }
}

pub(super) fn request_name(request: u32) -> String {
    match FrontendReq::try_from(request) {
        Ok(known) => format!("{known:?}"),
        Err(()) => format!("request {request}"),
    }
}

/// Why a connection yields no further messages. The caller closes it.
#[derive(Debug, Error)]
pub enum DecodeError {
    /// The front-end closed the connection between two messages.
    #[error("the front-end closed the connection")]
    End,
    /// The connection ended or failed within a message. Peer's fault.
    #[error("the connection ended in the middle of a message")]
    Truncated,
    /// Another protocol version, or the reply flag. Peer's fault.
    #[error("a header with flags {flags:#x}: not a vhost-user version 1 request")]
    Header {
        /// The header's flags.
        flags: u32,
    },
    /// The payload is too long. Peer's fault.
    #[error("{} with a payload of {size} bytes, at most {MAX_PAYLOAD} are taken", request_name(*.request))]
    PayloadTooLong {
        /// The kind of request.
        request: u32,
        /// The length in its header.
        size: u32,
    },
    /// More than [`MAX_FDS`] descriptors (peer's fault), or no descriptor left in this process
    /// (system's fault).
    #[error("more descriptors in a message than the {MAX_FDS} that are taken, or than may be open")]
    TooManyDescriptors,
    /// The front-end's descriptors wait to be closed, as many as may; or those of all peers leave
    /// too few numbers for a message. Peer's fault.
    #[error(
        "descriptors that the front-end has sent wait to be closed: at most {MAX_UNCOUNTED} may, and \
         {MAX_DEFERRED} behind others of it that do not close, and those of all must leave numbers for \
         a message (RLIMIT_NOFILE)"
    )]
    UnclosedDescriptors,
    /// The socket failed. System's fault.
    #[error("cannot read the connection: {0}")]
    Io(io::Error),
}

impl DecodeError {
    /// The fault to count; `None` for the regular end of a connection.
    pub fn fault(&self) -> Option<FrontendFault> {
        match self {
            DecodeError::End | DecodeError::Io(_) => None,
            DecodeError::Truncated => Some(FrontendFault::Truncated),
            DecodeError::Header { .. } => Some(FrontendFault::Header),
            DecodeError::PayloadTooLong { .. } => Some(FrontendFault::PayloadTooLong),
            DecodeError::TooManyDescriptors => Some(FrontendFault::TooManyDescriptors),
            DecodeError::UnclosedDescriptors => Some(FrontendFault::UnclosedDescriptors),
        }
    }
}

/// Reads one message at a time from a socket.
#[derive(Debug, Default)]
pub struct Decoder {
    header: [u8; HEADER_LEN],
    /// Bytes of the header received.
    filled: usize,
    /// Has the length of the payload once the header is complete.
    payload: Vec<u8>,
    /// Bytes of the payload received.
    received: usize,
    fds: Vec<SentFd>,
}

impl Decoder {
    /// A decoder at the start of a message.
    pub fn new() -> Decoder {
        Decoder::default()
    }

    /// Reads on. `Ok(None)` if the socket has no more bytes now. Descriptors count against
    /// `account`.
    ///
    /// # Errors
    /// See [`DecodeError`]; the decoder cannot be used afterwards.
    pub fn read(
        &mut self,
        socket: impl AsFd,
        account: &Account,
    ) -> Result<Option<Message>, DecodeError> {
        if self.filled < HEADER_LEN {
            while let Some(room) = self.header.get_mut(self.filled..).filter(|r| !r.is_empty()) {
                match receive(&socket, room, &mut self.fds, account, self.filled == 0)? {
                    Some(bytes) => self.filled += bytes,
                    None => return Ok(None),
                }
            }
            let size = self.check_header()?;
            self.payload.resize(size, 0);
        }
        while let Some(room) = self
            .payload
            .get_mut(self.received..)
            .filter(|r| !r.is_empty())
        {
            match receive(&socket, room, &mut self.fds, account, false)? {
                Some(bytes) => self.received += bytes,
                None => return Ok(None),
            }
        }
        let done = std::mem::take(self);
        let [request, flags, _] = done.fields();
        Ok(Some(Message {
            request,
            need_reply: flags & VhostUserHeaderFlag::NEED_REPLY.bits() != 0,
            payload: done.payload,
            fds: done.fds,
        }))
    }

    /// Validates the header and returns the length of the payload.
    fn check_header(&self) -> Result<usize, DecodeError> {
        let [request, flags, size] = self.fields();
        if flags & VhostUserHeaderFlag::VERSION.bits() != VERSION
            || flags & VhostUserHeaderFlag::REPLY.bits() != 0
        {
            return Err(DecodeError::Header { flags });
        }
        match usize::try_from(size) {
            Ok(size) if size <= MAX_PAYLOAD => Ok(size),
            _ => Err(DecodeError::PayloadTooLong { request, size }),
        }
    }

    /// Request, flags and size.
    fn fields(&self) -> [u32; 3] {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = self.header;
        [[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(u32::from_ne_bytes)
    }
}

/// Receives into `room`, which is not empty. Returns the number of bytes, or `None` if none have
/// arrived.
fn receive(
    socket: impl AsFd,
    room: &mut [u8],
    fds: &mut Vec<SentFd>,
    account: &Account,
    at_boundary: bool,
) -> Result<Option<usize>, DecodeError> {
    if account.is_clogged() {
        return Err(DecodeError::UnclosedDescriptors);
    }
    // Until each descriptor has a permit.
    let Some(_reserved) = account.reserve_message() else {
        return Err(DecodeError::UnclosedDescriptors);
    };
    let mut sent = Vec::new();
    let received = match fd_passing::recv(socket, room, &mut sent) {
        Ok(received) => received,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
            return Err(if at_boundary {
                DecodeError::End
            } else {
                DecodeError::Truncated
            });
        }
        Err(error) => return Err(DecodeError::Io(error)),
    };
    if received.truncated_fds || fds.len() + sent.len() > MAX_FDS {
        // Not examined, to save time.
        let sent = sent.into_iter();
        sent.for_each(|fd| drop(fd.owned_by(account)));
        return Err(DecodeError::TooManyDescriptors);
    }
    let sent = sent.into_iter();
    fds.extend(sent.map(|fd| SentFd::examine(fd, account)));
    match received.bytes {
        0 if at_boundary => Err(DecodeError::End),
        0 => Err(DecodeError::Truncated),
        bytes => Ok(Some(bytes)),
    }
}

/// Encodes a reply to `request`. `payload` is short and comes from this process.
pub fn encode_reply(request: u32, payload: &[u8]) -> Vec<u8> {
    encode(request, VhostUserHeaderFlag::REPLY.bits(), payload)
}

/// Encodes the message of a back-end request channel that the configuration space has changed
/// (CONFIG_CHANGE_MSG). No reply is asked for.
pub fn encode_config_change() -> Vec<u8> {
    encode(BackendReq::CONFIG_CHANGE_MSG as u32, 0, &[])
}

fn encode(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let flags = VERSION | flags;
    let size = payload.len() as u32;
    let mut bytes = Vec::with_capacity(HEADER_LEN + payload.len());
    for word in [request, flags, size] {
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    bytes.extend_from_slice(payload);
    bytes
}
