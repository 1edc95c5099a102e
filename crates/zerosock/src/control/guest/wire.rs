//! The messages of the stream between an agent and the daemon, byte by byte.
//!
//! A message is a header of 16 bytes and a body. A request has a tag behind the body. All numbers are little-endian.
//!
//! | at | bytes | |
//! |---|---|---|
//! | 0 | 4 | magic: `z` `s` `g` `e` |
//! | 4 | 2 | major version: 1 |
//! | 6 | 2 | minor version: 0 |
//! | 8 | 2 | operation |
//! | 10 | 2 | 0 |
//! | 12 | 4 | length of the body |
//!
//! Pure functions over byte slices.
//!
//! # Invariants
//! - Any bytes decode to a valid message, or to the error that refuses them, or are the beginning of one.
//! - A message has a bound that its header shows, so that a side reads at most [`MAX_REQUEST`] or [`MAX_ANSWER`] bytes
//!   ahead.
//! - The body of a request is looked at only behind a valid tag.

use zerosock_proto::Cid;
use zerosock_ring::{Extent, MAX_REGIONS};

use super::key::{GuestKey, Nonce, StreamTags, TAG_LEN};
use crate::control::attach::codec as attach;
use crate::control::attach::{AttachRequest, Version};
use crate::registration::START_LEN;
pub use crate::registration::{Reason, Refusal, Start, Token};

/// The first bytes of every message.
pub const MAGIC: [u8; 4] = *b"zsge";
/// The version implemented here.
pub const VERSION: Version = Version { major: 1, minor: 0 };
/// Bytes of a header.
pub const HEADER_LEN: usize = 16;
/// The largest number of extents in a request.
pub const MAX_EXTENTS: usize = MAX_REGIONS;
/// Bytes of a `Register` without its endpoint and its extents.
const REGISTER_LEN: usize = 24;
const EXTENT_LEN: usize = 16;
const ID_LEN: usize = 16;
const MAX_REGISTER: usize = REGISTER_LEN + attach::MAX_REQUEST + EXTENT_LEN * MAX_EXTENTS;
/// Bytes of the longest request.
pub const MAX_REQUEST: usize = HEADER_LEN + MAX_REGISTER + TAG_LEN;
/// Bytes of the longest body of an answer. One of a later minor version may have more fields than this one.
const MAX_ANSWER_BODY: usize = 64;
/// Bytes of the longest answer.
pub const MAX_ANSWER: usize = HEADER_LEN + MAX_ANSWER_BODY;

const OP_REGISTER: u16 = 1;
const OP_START: u16 = 2;
const OP_END: u16 = 3;
const OP_QUERY: u16 = 4;

const OP_HELLO: u16 = 0x101;
const OP_ACCEPTED: u16 = 0x102;
const OP_REFUSED: u16 = 0x103;
const OP_STARTED: u16 = 0x104;
const OP_ENDED: u16 = 0x105;
const OP_KNOWN: u16 = 0x106;

/// The number that an agent chooses for an attachment: random, and part of the name of the file with its memory, so that
/// a later agent can ask for it.
#[derive(Copy, Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct AttachmentId(pub [u8; ID_LEN]);

/// A request to make an endpoint on these pages.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Register {
    /// The agent's number of it.
    pub attachment: AttachmentId,
    /// The CID, the name and the ports, as for a process that attaches.
    pub endpoint: AttachRequest,
    /// The pages, in the order of the endpoint's file.
    pub extents: Vec<Extent>,
}

/// A request of an agent.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Request {
    /// The first request of a stream.
    Register(Register),
    /// The second.
    Start(Start),
    /// The last one, at any time: end the endpoint. The answer is [`Answer::Ended`].
    End,
    /// The only request of a stream: does the daemon still use the pages of this attachment?
    Query(AttachmentId),
}

/// An answer of the daemon.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Answer {
    /// The first message of a stream.
    Hello(Nonce),
    /// The pages have shown their values.
    Accepted {
        /// The endpoint's CID.
        cid: Cid,
        /// Opens the doorbell.
        token: Token,
    },
    /// A request was refused, and nothing of it is in use. Its pages may be in use by an earlier request, so an agent does
    /// not give them back to its kernel before [`Ended`](Self::Ended) or [`Known(false)`](Self::Known).
    Refused(Refusal),
    /// The queues run.
    Started {
        /// The virtio features in use.
        features: u64,
    },
    /// The daemon does not touch the pages any more, and never will.
    Ended(Reason),
    /// The answer to a query: whether the attachment is in use.
    Known(bool),
}

/// Why bytes are not a message: the fault of the side that has sent them. Nothing behind them can be read.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Other bytes than the magic.
    #[error("not a message of this protocol")]
    NotThisProtocol,
    /// Another major version.
    #[error("version {0} of the protocol, {VERSION} is spoken here")]
    Version(Version),
    /// The tag of a request is not that of its bytes, of its place, of this stream, or of this VM.
    #[error("the tag of the request is wrong")]
    Tag,
    /// An operation that this side does not take, or a body that is none of it.
    #[error("operation {0:#x} is unknown, or has a length or fields that it cannot have")]
    Malformed(u16),
}

impl WireError {
    /// The answer to a request that has this error.
    pub fn refusal(self) -> Refusal {
        Refusal::from(match self {
            WireError::Version(_) => Reason::VERSION_MISMATCH,
            WireError::Tag => Reason::FAILED,
            _ => Reason::BAD_REQUEST,
        })
    }
}

/// Encodes the requests of one stream.
#[derive(Debug)]
pub struct RequestWriter(StreamTags);

impl RequestWriter {
    /// For the stream that began with this nonce.
    pub fn new(key: &GuestKey, nonce: &Nonce) -> RequestWriter {
        RequestWriter(StreamTags::new(key, nonce))
    }

    /// Encodes the next request. `None`: it has more extents or ports than a request can have.
    pub fn encode(&mut self, request: &Request) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        let operation = match request {
            Request::Register(register) => {
                let endpoint = attach::Request::Attach(register.endpoint.clone());
                let endpoint = attach::encode_request(&endpoint)?;
                let count = register.extents.len();
                if count > MAX_EXTENTS {
                    return None;
                }
                body.extend(register.attachment.0);
                // At most attach::MAX_REQUEST and MAX_EXTENTS, so both fit.
                body.extend((endpoint.len() as u16).to_le_bytes());
                body.extend((count as u16).to_le_bytes());
                body.extend([0; 4]);
                body.extend(endpoint);
                for Extent { addr, len } in &register.extents {
                    body.extend(addr.to_le_bytes());
                    body.extend(len.to_le_bytes());
                }
                OP_REGISTER
            }
            Request::Start(start) => {
                body.extend(start.encode());
                OP_START
            }
            Request::End => OP_END,
            Request::Query(attachment) => {
                body.extend(attachment.0);
                OP_QUERY
            }
        };
        let mut bytes = message(operation, &body);
        let tag = self.0.next(&bytes);
        bytes.extend(tag);
        Some(bytes)
    }
}

/// Decodes the requests of one stream.
#[derive(Debug)]
pub struct RequestReader(StreamTags);

impl RequestReader {
    /// For the stream that began with this nonce.
    pub fn new(key: &GuestKey, nonce: &Nonce) -> RequestReader {
        RequestReader(StreamTags::new(key, nonce))
    }

    /// Decodes the next request, at the beginning of the bytes received. Returns the number of its bytes too. `None`: some
    /// of them are missing.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn decode(&mut self, received: &[u8]) -> Result<Option<(Request, usize)>, WireError> {
        let most = |operation| match operation {
            OP_REGISTER => Some(MAX_REGISTER),
            OP_START => Some(START_LEN),
            OP_END => Some(0),
            OP_QUERY => Some(ID_LEN),
            _ => None,
        };
        let Some((operation, body_len)) = header(received, most)? else {
            return Ok(None);
        };
        let signed = HEADER_LEN + body_len;
        let Some((message, rest)) = received.split_at_checked(signed) else {
            return Ok(None);
        };
        let Some(tag) = rest.get(..TAG_LEN) else {
            return Ok(None);
        };
        if !self.0.verify(message, tag) {
            return Err(WireError::Tag);
        }
        let body = Fields(message.get(HEADER_LEN..).unwrap_or_default());
        let request = request(operation, body).ok_or(WireError::Malformed(operation))?;
        Ok(Some((request, signed + TAG_LEN)))
    }
}

/// Decodes the body of a request.
fn request(operation: u16, mut body: Fields<'_>) -> Option<Request> {
    let request = match operation {
        OP_REGISTER => {
            let attachment = AttachmentId(body.array()?);
            let (endpoint_len, count) = (body.u16()?, body.u16()?);
            body.zero::<4>()?;
            let endpoint = body.take(endpoint_len.into())?;
            let Ok(attach::Request::Attach(endpoint)) = attach::decode_request(endpoint) else {
                return None;
            };
            if usize::from(count) > MAX_EXTENTS {
                return None;
            }
            let mut extents = Vec::with_capacity(count.into());
            for _ in 0..count {
                let (addr, len) = (body.u64()?, body.u64()?);
                extents.push(Extent { addr, len });
            }
            Request::Register(Register {
                attachment,
                endpoint,
                extents,
            })
        }
        OP_START => Request::Start(Start::decode(&body.array()?)?),
        OP_END => Request::End,
        OP_QUERY => Request::Query(AttachmentId(body.array()?)),
        _ => return None,
    };
    body.0.is_empty().then_some(request)
}

/// Encodes an answer.
pub fn encode_answer(answer: &Answer) -> Vec<u8> {
    let mut body = Vec::new();
    let operation = match answer {
        Answer::Hello(nonce) => {
            body.extend(nonce.0);
            OP_HELLO
        }
        Answer::Accepted { cid, token } => {
            body.extend(cid.get().to_le_bytes());
            body.extend([0; 4]);
            body.extend(token.0);
            OP_ACCEPTED
        }
        Answer::Refused(Refusal { reason, index }) => {
            body.extend(reason.0.to_le_bytes());
            body.extend([0; 2]);
            body.extend(index.to_le_bytes());
            OP_REFUSED
        }
        Answer::Started { features } => {
            body.extend(features.to_le_bytes());
            OP_STARTED
        }
        Answer::Ended(reason) => {
            body.extend(reason.0.to_le_bytes());
            OP_ENDED
        }
        Answer::Known(known) => {
            body.push(u8::from(*known));
            OP_KNOWN
        }
    };
    message(operation, &body)
}

/// Decodes the answer at the beginning of the bytes received. Returns the number of its bytes too. `None`: some of them are
/// missing. A longer body is of a later minor version; the additional bytes are ignored.
///
/// # Errors
/// [`WireError`].
pub fn decode_answer(received: &[u8]) -> Result<Option<(Answer, usize)>, WireError> {
    let most = |operation| {
        (OP_HELLO..=OP_KNOWN)
            .contains(&operation)
            .then_some(MAX_ANSWER_BODY)
    };
    let Some((operation, body_len)) = header(received, most)? else {
        return Ok(None);
    };
    let len = HEADER_LEN + body_len;
    let Some(body) = received.get(HEADER_LEN..len) else {
        return Ok(None);
    };
    let answer = answer(operation, Fields(body)).ok_or(WireError::Malformed(operation))?;
    Ok(Some((answer, len)))
}

/// Decodes the body of an answer.
fn answer(operation: u16, mut body: Fields<'_>) -> Option<Answer> {
    Some(match operation {
        OP_HELLO => Answer::Hello(Nonce(body.array()?)),
        OP_ACCEPTED => {
            let cid = Cid::new(body.u32()?).for_guest().ok()?;
            body.zero::<4>()?;
            let token = Token(body.array()?);
            Answer::Accepted { cid, token }
        }
        OP_REFUSED => {
            let reason = Reason(body.u16()?);
            body.zero::<2>()?;
            let index = body.u32()?;
            Answer::Refused(Refusal { reason, index })
        }
        OP_STARTED => Answer::Started {
            features: body.u64()?,
        },
        OP_ENDED => Answer::Ended(Reason(body.u16()?)),
        OP_KNOWN => match body.array()? {
            [known @ (0 | 1)] => Answer::Known(known == 1),
            _ => return None,
        },
        _ => return None,
    })
}

/// A message without a tag.
fn message(operation: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_LEN + body.len() + TAG_LEN);
    bytes.extend(MAGIC);
    bytes.extend(VERSION.major.to_le_bytes());
    bytes.extend(VERSION.minor.to_le_bytes());
    bytes.extend(operation.to_le_bytes());
    bytes.extend([0; 2]);
    // At most MAX_REGISTER.
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body);
    bytes
}

/// Checks a header: the operation, and the length of its body, which is at most `most` of the operation.
fn header(
    received: &[u8],
    most: impl FnOnce(u16) -> Option<usize>,
) -> Result<Option<(u16, usize)>, WireError> {
    // As soon as it can be known: another protocol may never send a whole header.
    if received
        .iter()
        .zip(&MAGIC)
        .any(|(got, wanted)| got != wanted)
    {
        return Err(WireError::NotThisProtocol);
    }
    let fields = || {
        let mut fields = Fields(received.get(MAGIC.len()..)?);
        let (major, minor) = (fields.u16()?, fields.u16()?);
        Some((Version { major, minor }, fields))
    };
    let Some((version, mut fields)) = fields() else {
        return Ok(None);
    };
    if version.major != VERSION.major {
        return Err(WireError::Version(version));
    }
    let (Some(operation), Some(zero), Some(len)) = (fields.u16(), fields.u16(), fields.u32())
    else {
        return Ok(None);
    };
    let malformed = WireError::Malformed(operation);
    let most = most(operation).ok_or(malformed)?;
    let len = usize::try_from(len)
        .ok()
        .filter(|&len| len <= most && zero == 0);
    Ok(Some((operation, len.ok_or(malformed)?)))
}

/// Fields that follow each other. Each call takes the next one; `None`: the bytes have ended.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (field, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(field)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    /// Bytes that have to be zero.
    fn zero<const N: usize>(&mut self) -> Option<()> {
        (self.array()? == [0; N]).then_some(())
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
