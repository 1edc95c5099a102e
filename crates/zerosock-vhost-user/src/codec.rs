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

use rustix::io::Errno;
use rustix::net::RecvFlags;
use thiserror::Error;
use vhost::vhost_user::message::{BackendReq, FrontendReq, MAX_MSG_SIZE, VhostUserHeaderFlag};
use zerosock_sys::PeerFd;
use zerosock_sys::account::{Account, MAX_DEFERRED, MAX_UNCOUNTED};
use zerosock_sys::fd_passing::{self, ReceivedRights};

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
    /// Its number in the [journal](crate::journal); zero without one.
    pub number: u64,
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
        let receive = |room: &mut [u8], fds: &mut Vec<SentFd>, at_boundary| {
            let (bytes, sent) = receive(
                &socket,
                room,
                fds.len(),
                account,
                at_boundary,
                fd_passing::recv,
            )?;
            fds.extend(examine(sent, account));
            Ok(bytes)
        };
        if self.filled < HEADER_LEN {
            while let Some(room) = self.header.get_mut(self.filled..).filter(|r| !r.is_empty()) {
                match receive(room, &mut self.fds, self.filled == 0)? {
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
            match receive(room, &mut self.fds, false)? {
                Some(bytes) => self.received += bytes,
                None => return Ok(None),
            }
        }
        Ok(Some(std::mem::take(self).message()))
    }

    /// As [`read`](Self::read), but a message that has arrived as a whole stays in the socket. Also
    /// returns its length there, for [`discard`]. The length is zero for a message that has arrived in
    /// parts: that is read as by `read`.
    ///
    /// `has_fds` says whether a request with this payload has descriptors. Those of any other request
    /// are left out, because they may be those of a later one.
    ///
    /// # Errors
    /// As `read`.
    pub fn peek(
        &mut self,
        socket: impl AsFd,
        account: &Account,
        has_fds: fn(u32, &[u8]) -> bool,
    ) -> Result<Option<(Message, usize)>, DecodeError> {
        if self.filled == 0 {
            match peek_whole(&socket, account, has_fds)? {
                Peeked::Whole(message) => {
                    let len = HEADER_LEN + message.payload.len();
                    return Ok(Some((message, len)));
                }
                Peeked::Nothing => return Ok(None),
                Peeked::Part => {}
            }
        }
        Ok(self.read(socket, account)?.map(|message| (message, 0)))
    }

    fn message(self) -> Message {
        let [request, flags, _] = self.fields();
        Message {
            request,
            need_reply: flags & VhostUserHeaderFlag::NEED_REPLY.bits() != 0,
            payload: self.payload,
            fds: self.fds,
            number: 0,
        }
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

/// What is at the front of a socket.
enum Peeked {
    Nothing,
    /// A part of a message.
    Part,
    Whole(Message),
}

/// Peeks the message at the front of the socket.
fn peek_whole(
    socket: impl AsFd,
    account: &Account,
    has_fds: fn(u32, &[u8]) -> bool,
) -> Result<Peeked, DecodeError> {
    let mut decoder = Decoder::new();
    let rewind = || fd_passing::set_peek_offset(&socket, 0).map_err(DecodeError::Io);
    rewind()?;
    // Without room for descriptors: a second look at the same bytes would receive them twice.
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    match rustix::net::recv(&socket, &mut decoder.header, flags) {
        Ok((_, HEADER_LEN)) => {}
        Ok((_, 0)) | Err(Errno::CONNRESET) => return Err(DecodeError::End),
        Ok(_) => return Ok(Peeked::Part),
        Err(Errno::AGAIN) => return Ok(Peeked::Nothing),
        Err(error) => return Err(DecodeError::Io(error.into())),
    }
    let size = decoder.check_header()?;
    let queued = rustix::io::ioctl_fionread(&socket);
    let queued = queued.map_err(|error| DecodeError::Io(error.into()))?;
    if queued < (HEADER_LEN + size) as u64 {
        return Ok(Peeked::Part);
    }
    rewind()?;
    let mut bytes = vec![0; HEADER_LEN + size];
    let mut peeked = 0;
    let mut sent = Vec::new();
    while let Some(room) = bytes.get_mut(peeked..).filter(|room| !room.is_empty()) {
        let (bytes, fds) = receive(&socket, room, sent.len(), account, false, fd_passing::peek)?;
        // The bytes were there.
        peeked += bytes.ok_or(DecodeError::Truncated)?;
        sent.extend(fds);
    }
    decoder.payload = bytes.split_off(HEADER_LEN);
    let [request, _, _] = decoder.fields();
    if has_fds(request, &decoder.payload) {
        decoder.fds = examine(sent, account);
    }
    Ok(Peeked::Whole(decoder.message()))
}

/// Takes `bytes` bytes that were peeked from the socket. Their descriptors are closed: the caller has
/// duplicates.
///
/// # Errors
/// As [`Decoder::read`].
pub fn discard(socket: impl AsFd, bytes: usize, account: &Account) -> Result<(), DecodeError> {
    let mut left = bytes;
    let mut room = [0; HEADER_LEN + MAX_PAYLOAD];
    while left > 0 {
        // No message is longer.
        let room = room.get_mut(..left).ok_or(DecodeError::Truncated)?;
        let (bytes, _) = receive(&socket, room, 0, account, false, fd_passing::recv)?;
        left -= bytes.ok_or(DecodeError::Truncated)?;
    }
    Ok(())
}

/// Examines descriptors that have arrived.
pub(crate) fn examine(sent: Vec<PeerFd>, account: &Account) -> Vec<SentFd> {
    let sent = sent.into_iter();
    sent.map(|fd| SentFd::examine(fd, account)).collect()
}

/// [`fd_passing::recv`] or [`fd_passing::peek`].
type Receive<S> = fn(S, &mut [u8], &mut Vec<PeerFd>) -> io::Result<ReceivedRights>;

/// Receives into `room`, which is not empty, the bytes of a message of which so many descriptors have
/// arrived. Returns the number of bytes, or `None` if none have arrived, and further descriptors.
fn receive<S: AsFd>(
    socket: S,
    room: &mut [u8],
    fds_before: usize,
    account: &Account,
    at_boundary: bool,
    call: Receive<S>,
) -> Result<(Option<usize>, Vec<PeerFd>), DecodeError> {
    if account.is_clogged() {
        return Err(DecodeError::UnclosedDescriptors);
    }
    // Until each descriptor has a permit.
    let Some(_reserved) = account.reserve_message() else {
        return Err(DecodeError::UnclosedDescriptors);
    };
    let mut sent = Vec::new();
    let received = match call(socket, room, &mut sent) {
        Ok(received) => received,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok((None, sent)),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
            return Err(if at_boundary {
                DecodeError::End
            } else {
                DecodeError::Truncated
            });
        }
        Err(error) => return Err(DecodeError::Io(error)),
    };
    let sent: Vec<_> = sent.into_iter().map(|fd| fd.owned_by(account)).collect();
    if received.truncated_fds || fds_before + sent.len() > MAX_FDS {
        return Err(DecodeError::TooManyDescriptors);
    }
    match received.bytes {
        0 if at_boundary => Err(DecodeError::End),
        0 => Err(DecodeError::Truncated),
        bytes => Ok((Some(bytes), sent)),
    }
}

/// Encodes a request as a front-end does.
pub(crate) fn encode_request(message: &Message) -> Vec<u8> {
    let flags = match message.need_reply {
        true => VhostUserHeaderFlag::NEED_REPLY.bits(),
        false => 0,
    };
    encode(message.request, flags, &message.payload)
}

/// Decodes what [`encode_request`] returned. `None`: it did not.
pub(crate) fn decode_request(bytes: &[u8], fds: Vec<SentFd>) -> Option<Message> {
    let (header, payload) = bytes.split_first_chunk()?;
    let decoder = Decoder {
        header: *header,
        payload: payload.to_vec(),
        fds,
        ..Decoder::new()
    };
    let size = decoder.check_header().ok()?;
    (size == payload.len()).then(|| decoder.message())
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
