//! The messages of the attach protocol, byte by byte; docs/attach.md describes them.
//!
//! Pure functions over byte slices.
//!
//! # Invariants
//!
//! - Any bytes decode to a valid request or to the status that refuses them.
//! - Every length is checked before it is used.

use std::fmt;

use crate::registration::START_LEN;
use crate::routing::name::Name;
use zerosock_proto::{Cid, Port};

pub use crate::registration::Start;

/// The first bytes of every message.
pub const MAGIC: [u8; 4] = *b"zsat";
/// The version implemented here.
pub const VERSION: Version = Version { major: 1, minor: 2 };
/// The first minor version that has requests for memory.
pub const MEMORY_MINOR: u16 = 2;
/// The largest number of ports in a request.
pub const MAX_PORTS: usize = 256;
/// Bytes of a request without ports.
pub const REQUEST_LEN: usize = 88;
/// Bytes of the longest request.
pub const MAX_REQUEST: usize = REQUEST_LEN + 4 * MAX_PORTS;
/// Bytes of an answer; of earlier versions 32 or [`SHORT_ANSWER_LEN`].
pub const ANSWER_LEN: usize = 48;
/// Bytes of an answer of version 1.0. The fields that it lacks are zero.
pub const SHORT_ANSWER_LEN: usize = 24;

/// Bytes of a huge page, the unit of the memory that a process takes.
const HUGE_PAGE: u64 = zerosock_ring::Extent::HUGE_PAGE;

const OP_ATTACH: u16 = 1;
const OP_RESOLVE: u16 = 2;
// Since version 1.1:
const OP_SERVE: u16 = 3;
const OP_CLAIM: u16 = 4;
const OP_RELEASE: u16 = 5;
// Since version 1.2:
const OP_START: u16 = 6;
/// The process takes memory in the place of a vhost-user connection.
const FLAG_MEMORY: u16 = 1 << 0;
/// Where a request has the [`Start`].
const START: usize = 24;

/// A version of the protocol. Versions with the same `major` are compatible.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Version {
    /// A request with another one is refused.
    pub major: u16,
    /// A side with a higher one uses only what the other side knows.
    pub minor: u16,
}

impl From<Version> for (u16, u16) {
    fn from(version: Version) -> (u16, u16) {
        (version.major, version.minor)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A request to attach. The default: any CID, no name, all ports.
///
/// ```
/// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/hub.rs"));
/// # let path = dir.path().join("attach.sock");
/// use zerosock::attach::{AttachRequest, Client};
/// use zerosock::{Cid, Port};
///
/// let request = AttachRequest {
///     cid: Some(Cid::new(77)),
///     name: Some("web".parse()?),
///     ports: vec![Port::new(80)],
/// };
/// let attached = Client::connect(&path, &request)?;
/// assert_eq!(attached.cid, Cid::new(77));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct AttachRequest {
    /// The CID; `None`: any that is free.
    pub cid: Option<Cid>,
    /// The name by which others find its CID.
    pub name: Option<Name>,
    /// The ports that others may connect to; the device refuses connections to all others. Empty:
    /// all.
    pub ports: Vec<Port>,
}

/// A request to attach as a service of the host. The default: no name, and no ports yet.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct ServiceRequest {
    /// The name by which it is listed.
    pub name: Option<Name>,
    /// The ports of CID 2 that it claims; all of them, or it does not attach.
    pub ports: Vec<Port>,
}

/// A request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Request {
    /// The first request of a process that gets a CID.
    Attach(AttachRequest),
    /// As [`Attach`](Self::Attach), of a process that takes memory of this many bytes if the server gives memory instead
    /// of a vhost-user connection: at least one huge page of 2 MiB, and whole ones.
    AttachMemory(AttachRequest, u64),
    /// The first request of a service.
    Serve(ServiceRequest),
    /// A later request: which CID has this name?
    Resolve(Name),
    /// A later request of a service: claim these ports, at least one.
    Claim(Vec<Port>),
    /// A later request of a service: release these ports, at least one.
    Release(Vec<Port>),
    /// The second request of a process that was given memory: start the queues.
    Start(Start),
}

/// The result of a request.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[repr(u16)]
pub enum Status {
    /// The request was granted.
    Ok = 0,
    /// The two sides speak different major versions.
    VersionMismatch = 1,
    /// The process's user may not attach.
    NotPermitted = 2,
    /// Another endpoint has the requested CID.
    CidTaken = 3,
    /// Another process has the requested name.
    NameTaken = 4,
    /// The request breaks the protocol.
    BadRequest = 5,
    /// The limit of processes, services, claims or requests is reached.
    Full = 6,
    /// No attached process has the name.
    UnknownName = 7,
    /// A system call failed in the server.
    ServerFailed = 8,
    /// The port belongs to a service.
    PortTaken = 9,
    /// The port is outside of the range that services may claim.
    PortReserved = 10,
    /// The port to release is not claimed by the service.
    NotClaimed = 11,
    /// The server gives memory, which the request does not take.
    MemoryOnly = 12,
}

impl Status {
    /// All statuses, in the order of their numbers.
    pub const ALL: [Status; 13] = [
        Status::Ok,
        Status::VersionMismatch,
        Status::NotPermitted,
        Status::CidTaken,
        Status::NameTaken,
        Status::BadRequest,
        Status::Full,
        Status::UnknownName,
        Status::ServerFailed,
        Status::PortTaken,
        Status::PortReserved,
        Status::NotClaimed,
        Status::MemoryOnly,
    ];
}

/// The answer to a request.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Answer {
    /// The version of the server.
    pub version: Version,
    /// The result.
    pub status: Status,
    /// The CID that was assigned or found; 0 unless the status is `Ok`.
    pub cid: Cid,
    /// The CID at which the host is reached; 0 unless the status is `Ok`.
    pub host: Cid,
    /// The version that the request named; 0.0 if it could not be read.
    pub asked: Version,
    /// For a refusal, the port that the status is about; for a service that has attached, the first
    /// port of the block that its own connections use; else 0.
    pub port: Port,
    /// The size of that block; else 0.
    pub ports: u32,
    /// For a process that is given memory, the virtio features that its device offers; for a start, those in use; else 0.
    pub features: u64,
    /// For a process that is given memory, the bytes of the file; else 0.
    pub memory: u64,
}

impl Answer {
    /// An answer that refuses a request.
    pub fn refusal(status: Status, asked: Version) -> Answer {
        let none = Cid::new(0);
        Answer {
            version: VERSION,
            status,
            cid: none,
            host: none,
            asked,
            port: Port::new(0),
            ports: 0,
            features: 0,
            memory: 0,
        }
    }

    /// The answer of a server that gives only memory to a request of this version that takes none.
    pub fn memory_only(asked: Version) -> Answer {
        // Earlier versions do not have the status, and name both versions for this one.
        let status = match asked.minor < MEMORY_MINOR {
            true => Status::VersionMismatch,
            false => Status::MemoryOnly,
        };
        Answer::refusal(status, asked)
    }

    /// An answer that refuses a request because of a port.
    pub fn about(status: Status, port: Port) -> Answer {
        Answer {
            port,
            ..Answer::refusal(status, VERSION)
        }
    }
}

/// Why bytes are not an answer: the server's fault.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AnswerError {
    /// Too short, too long, or not of this protocol at all.
    #[error("not an answer of the attach protocol")]
    NotAnAnswer,
    /// A status that this version does not have.
    #[error("an answer with the unknown status {0}")]
    UnknownStatus(u16),
}

/// Encodes a request. `None` if it has more than [`MAX_PORTS`] ports or the port 2^32 - 1, or takes no whole number of
/// huge pages, or more than 2^32 - 1 of them.
pub fn encode_request(request: &Request) -> Option<Vec<u8>> {
    let mut bytes = vec![0; REQUEST_LEN];
    let (op, cid, name, ports) = match request {
        Request::Attach(attach) | Request::AttachMemory(attach, _) => {
            let AttachRequest { cid, name, ports } = attach;
            let cid = cid.map_or(0, Cid::get);
            (OP_ATTACH, cid, name.as_ref(), ports.as_slice())
        }
        Request::Serve(ServiceRequest { name, ports }) => {
            (OP_SERVE, 0, name.as_ref(), ports.as_slice())
        }
        Request::Resolve(name) => (OP_RESOLVE, 0, Some(name), [].as_slice()),
        Request::Claim(ports) => (OP_CLAIM, 0, None, ports.as_slice()),
        Request::Release(ports) => (OP_RELEASE, 0, None, ports.as_slice()),
        Request::Start(_) => (OP_START, 0, None, [].as_slice()),
    };
    if ports.len() > MAX_PORTS || ports.contains(&Port::ANY) {
        return None;
    }
    let name = name.map_or("", Name::as_str).as_bytes();
    put(&mut bytes, 0, &MAGIC);
    put(&mut bytes, 4, &VERSION.major.to_le_bytes());
    put(&mut bytes, 6, &VERSION.minor.to_le_bytes());
    put(&mut bytes, 8, &op.to_le_bytes());
    put(&mut bytes, 12, &cid.to_le_bytes());
    // At most 64 and 256, so both fit.
    put(&mut bytes, 16, &(name.len() as u16).to_le_bytes());
    put(&mut bytes, 18, &(ports.len() as u16).to_le_bytes());
    put(&mut bytes, 24, name);
    match request {
        Request::AttachMemory(_, len) => {
            let pages = Some(len / HUGE_PAGE).filter(|&pages| pages > 0 && len % HUGE_PAGE == 0)?;
            put(&mut bytes, 10, &FLAG_MEMORY.to_le_bytes());
            put(&mut bytes, 20, &u32::try_from(pages).ok()?.to_le_bytes());
        }
        Request::Start(start) => put(&mut bytes, START, &start.encode()),
        _ => {}
    }
    for port in ports {
        bytes.extend_from_slice(&port.get().to_le_bytes());
    }
    Some(bytes)
}

/// The version that a request names, for [`Answer::memory_only`].
pub fn requested_version(bytes: &[u8]) -> Version {
    version(bytes, 4)
}

/// Decodes a request, or returns the answer that refuses it.
pub fn decode_request(bytes: &[u8]) -> Result<Request, Answer> {
    let header = bytes.first_chunk::<8>().filter(|h| h.starts_with(&MAGIC));
    let Some(header) = header else {
        return Err(Answer::refusal(Status::BadRequest, Version::default()));
    };
    let asked = version(header, 4);
    if asked.major != VERSION.major {
        return Err(Answer::refusal(Status::VersionMismatch, asked));
    }
    request(bytes).ok_or_else(|| Answer::refusal(Status::BadRequest, asked))
}

/// Decodes what follows the version.
fn request(bytes: &[u8]) -> Option<Request> {
    let (fixed, rest) = bytes.split_first_chunk::<REQUEST_LEN>()?;
    let (op, flags) = (u16_at(fixed, 8), u16_at(fixed, 10));
    if op == OP_START {
        return start(fixed).filter(|_| rest.is_empty());
    }
    let cid = u32_at(fixed, 12);
    let (name_len, count) = (u16_at(fixed, 16), u16_at(fixed, 18));
    let pages = u64::from(u32_at(fixed, 20));
    let takes_memory = flags == FLAG_MEMORY && op == OP_ATTACH;
    let (name, padding) = fixed[24..].split_at_checked(usize::from(name_len))?;
    let zero = padding.iter().all(|&b| b == 0) && (takes_memory || flags == 0);
    if !zero
        || takes_memory != (pages > 0)
        || usize::from(count) > MAX_PORTS
        || rest.len() != 4 * usize::from(count)
    {
        return None;
    }
    let name = match name {
        [] => None,
        name => Some(Name::new(name).ok()?),
    };
    let ports: Vec<Port> = rest
        .chunks_exact(4)
        .map(|chunk| Port::new(u32_at(chunk, 0)))
        .collect();
    let cid = match cid {
        0 => None,
        cid => Some(Cid::new(cid).for_guest().ok()?),
    };
    if ports.contains(&Port::ANY) {
        return None;
    }
    match (op, cid) {
        (OP_ATTACH, cid) => {
            let attach = AttachRequest { cid, name, ports };
            Some(match takes_memory {
                true => Request::AttachMemory(attach, pages * HUGE_PAGE),
                false => Request::Attach(attach),
            })
        }
        (OP_RESOLVE, None) if ports.is_empty() => Some(Request::Resolve(name?)),
        (OP_SERVE, None) => Some(Request::Serve(ServiceRequest { name, ports })),
        (OP_CLAIM, None) if name.is_none() && !ports.is_empty() => Some(Request::Claim(ports)),
        (OP_RELEASE, None) if name.is_none() && !ports.is_empty() => Some(Request::Release(ports)),
        _ => None,
    }
}

/// Decodes a start. All but the header and the start is zero.
fn start(fixed: &[u8; REQUEST_LEN]) -> Option<Request> {
    let (start, rest) = fixed[START..].split_first_chunk::<START_LEN>()?;
    let is_zero = fixed[10..START].iter().chain(rest).all(|&byte| byte == 0);
    Start::decode(start).filter(|_| is_zero).map(Request::Start)
}

/// Encodes an answer.
pub fn encode_answer(answer: &Answer) -> [u8; ANSWER_LEN] {
    let mut bytes = [0; ANSWER_LEN];
    put(&mut bytes, 0, &MAGIC);
    put(&mut bytes, 4, &answer.version.major.to_le_bytes());
    put(&mut bytes, 6, &answer.version.minor.to_le_bytes());
    put(&mut bytes, 8, &(answer.status as u16).to_le_bytes());
    put(&mut bytes, 12, &answer.cid.get().to_le_bytes());
    put(&mut bytes, 16, &answer.host.get().to_le_bytes());
    put(&mut bytes, 20, &answer.asked.major.to_le_bytes());
    put(&mut bytes, 22, &answer.asked.minor.to_le_bytes());
    put(&mut bytes, 24, &answer.port.get().to_le_bytes());
    put(&mut bytes, 28, &answer.ports.to_le_bytes());
    put(&mut bytes, 32, &answer.features.to_le_bytes());
    put(&mut bytes, 40, &answer.memory.to_le_bytes());
    bytes
}

/// Decodes an answer. A longer one is of a higher minor version; the additional bytes are ignored.
pub fn decode_answer(bytes: &[u8]) -> Result<Answer, AnswerError> {
    let fixed = bytes.first_chunk::<SHORT_ANSWER_LEN>();
    let fixed = fixed.filter(|f| f.starts_with(&MAGIC));
    let fixed = fixed.ok_or(AnswerError::NotAnAnswer)?;
    let number = u16_at(fixed, 8);
    let status = Status::ALL.get(usize::from(number));
    Ok(Answer {
        version: version(fixed, 4),
        status: *status.ok_or(AnswerError::UnknownStatus(number))?,
        cid: Cid::new(u32_at(fixed, 12)),
        host: Cid::new(u32_at(fixed, 16)),
        asked: version(fixed, 20),
        port: Port::new(u32_at(bytes, 24)),
        ports: u32_at(bytes, 28),
        features: u64_at(bytes, 32),
        memory: u64_at(bytes, 40),
    })
}

fn version(bytes: &[u8], at: usize) -> Version {
    Version {
        major: u16_at(bytes, at),
        minor: u16_at(bytes, at + 2),
    }
}

/// Offsets are constants within the fixed part; bytes beyond its end read as zero.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    let word = bytes.get(at..).and_then(|b| b.first_chunk());
    word.map_or(0, |word| u16::from_le_bytes(*word))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(|b| b.first_chunk());
    word.map_or(0, |word| u32::from_le_bytes(*word))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    if let Some(field) = bytes.get_mut(at..at + what.len()) {
        field.copy_from_slice(what);
    }
}

#[cfg(test)]
#[path = "codec_tests.rs"]
mod tests;
