//! An attachment: a file of huge pages that is the memory of an endpoint, from its creation to its removal.
//!
//! # Invariants
//! - The pages are pinned by the keeper before the host learns of them. They are unpinned, and the file is removed, when
//!   the host has told that it does not use them.
//! - A file is for one client: pages go from one client to the next through the kernel, which clears them.
//! - The agent never makes a file shorter. A client may still live when its endpoint ends, and have references to the bytes
//!   of its file: it keeps the pages until it drops its mapping.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use rustix::rand::{GetRandomFlags, getrandom};
use tracing::{info, warn};
use zerosock_ring::Memory;
use zerosock_sys::hugetlbfs::{HugeDir, HugePageError};
use zerosock_sys::{LogLimit, vsock};

use super::event::Event;
use super::keeper::{Keeper, KeeperError};
use crate::control::attach::AttachRequest;
use crate::control::guest::client::{Registered, RegistrationError, Stream};
use crate::control::guest::key::GuestKey;
use crate::control::guest::wire::{AttachmentId, Register};
use crate::control::guest::{DOORBELL_PORT, REGISTRATION_PORT};
use crate::driver::guest_device::{FEATURES, GuestDevice};
use crate::fault::Fault;

/// The host.
const HOST: u32 = 2;
/// Time limit of a connection to the host.
const CONNECT: Duration = Duration::from_secs(5);
/// Time limit of a request to the host. It answers some refusals after ten seconds.
const REQUEST: Duration = Duration::from_secs(40);
/// Time between two questions whether an attachment is in use.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Why there is no agent, or no endpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The process is not privileged.
    #[error("this process needs CAP_SYS_ADMIN: run it as root, outside of containers")]
    Capability,
    /// This directory cannot be made or read.
    #[error("{0}: {1}")]
    Dir(&'static str, io::Error),
    /// There are no huge pages, or no place for their files.
    #[error(transparent)]
    Pages(#[from] HugePageError),
    /// Another agent runs, or the pages cannot be pinned.
    #[error(transparent)]
    Keeper(#[from] KeeperError),
    /// The host does not listen, or this process may not connect from a port below 1024.
    #[error(
        "cannot connect to port {port:#x} of the host: {source}; it takes a vsock device, `zerosock serve` with \
         --guest-endpoints on the host, and CAP_NET_BIND_SERVICE here"
    )]
    Connect {
        /// The port.
        port: u32,
        /// The error.
        source: io::Error,
    },
    /// The host refuses the endpoint.
    #[error(transparent)]
    Host(#[from] RegistrationError),
    /// The doorbell cannot be opened.
    #[error("cannot open the doorbell: {0}")]
    Doorbell(io::Error),
    /// The host has not answered in time, or there is no thread or descriptor left.
    #[error(transparent)]
    System(#[from] io::Error),
}

impl AgentError {
    /// The side at fault.
    pub fn fault(&self) -> Fault {
        match self {
            AgentError::Host(_) => Fault::Peer,
            _ => Fault::System,
        }
    }
}

/// What attachments are made with.
#[derive(Debug)]
pub(super) struct Pages {
    pub(super) dir: HugeDir,
    pub(super) keeper: Keeper,
    pub(super) key: GuestKey,
    /// The agent ends.
    pub(super) stop: Event,
    /// The pages of earlier agents are free.
    pub(super) recovered: Event,
    /// What clients cause to be logged.
    pub(super) log: LogLimit,
}

/// A registered endpoint.
pub(super) struct Attachment {
    id: AttachmentId,
    pub(super) file: OwnedFd,
    pub(super) stream: Registered,
    pub(super) doorbell: OwnedFd,
}

impl Attachment {
    /// The endpoint's device, for this process.
    pub(super) fn device(&self) -> Result<GuestDevice, AgentError> {
        Ok(GuestDevice {
            memory: self.file.try_clone()?,
            doorbell: self.doorbell.try_clone()?,
            features: FEATURES,
            cid: self.stream.cid,
        })
    }
}

fn name(id: AttachmentId) -> String {
    id.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The attachment of the file with this name.
fn id(name: &str) -> Option<AttachmentId> {
    let digits = name.as_bytes().chunks(2).map(|pair| {
        let text = std::str::from_utf8(pair).ok()?;
        u8::from_str_radix(text, 16).ok()
    });
    let bytes: Vec<u8> = digits.collect::<Option<_>>()?;
    let id = bytes.try_into().ok().map(AttachmentId);
    id.filter(|&id| self::name(id) == name)
}

fn deadline(limit: Duration) -> Instant {
    Instant::now() + limit
}

impl Pages {
    /// Makes an endpoint on `len` bytes of new huge pages.
    pub(super) fn attach(
        &self,
        endpoint: AttachRequest,
        len: u64,
    ) -> Result<Attachment, AgentError> {
        let mut random = [0; 16];
        getrandom(&mut random, GetRandomFlags::empty()).map_err(HugePageError::from)?;
        let id = AttachmentId(random);
        let file = self.dir.create(&name(id), len)?;
        let registered = self.register(id, &file, endpoint, len);
        let mut stream = match registered {
            Ok(stream) => stream,
            Err(error) => {
                match &error {
                    AgentError::Host(host) if !host.frees_pages() => self.free_later(vec![id]),
                    _ => self.free(id),
                }
                return Err(error);
            }
        };
        match open_doorbell(&stream) {
            Ok(doorbell) => Ok(Attachment {
                id,
                file,
                stream,
                doorbell,
            }),
            Err(error) => {
                self.end(id, &mut stream);
                Err(AgentError::Doorbell(error))
            }
        }
    }

    fn register(
        &self,
        id: AttachmentId,
        file: &OwnedFd,
        endpoint: AttachRequest,
        len: u64,
    ) -> Result<Registered, AgentError> {
        let extents = self.keeper.pin(id, file)?;
        let memory = Memory::of_file(file, len).map_err(io::Error::other)?;
        let stream = self.open_stream()?;
        let register = Register {
            attachment: id,
            endpoint,
            extents,
        };
        Ok(stream.register(register, &memory, deadline(REQUEST))?)
    }

    fn open_stream(&self) -> Result<Stream, AgentError> {
        let port = REGISTRATION_PORT.get();
        let socket = vsock::connect_from_privileged_port(HOST, port, CONNECT);
        let socket = socket.map_err(|source| AgentError::Connect { port, source })?;
        // Nothing was requested yet.
        Stream::open(socket, &self.key, deadline(REQUEST)).map_err(|error| match error {
            RegistrationError::Refused(refusal) => RegistrationError::Refused(refusal).into(),
            error => AgentError::Connect {
                port,
                source: io::Error::other(error),
            },
        })
    }

    /// Ends an endpoint, unless the host has, and frees its pages when the host has told that it does not use them.
    pub(super) fn detach(&self, client: &OwnedFd, mut attachment: Attachment, has_ended: bool) {
        // The client, which may have copies of both, learns of the end at once: the host may take long to confirm it.
        let _ = shutdown(&attachment.doorbell, Shutdown::Both);
        let _ = shutdown(client, Shutdown::Both);
        match has_ended {
            true => self.free(attachment.id),
            false => self.end(attachment.id, &mut attachment.stream),
        }
    }

    fn end(&self, id: AttachmentId, stream: &mut Registered) {
        match stream.end(deadline(REQUEST)) {
            Ok(_) | Err(RegistrationError::Ended(_)) => self.free(id),
            Err(error) => {
                info!(
                    attachment = name(id),
                    "the host has not confirmed the end: {error}"
                );
                self.free_later(vec![id]);
            }
        }
    }

    /// Frees the pages of an attachment that the host does not use. A client that has them mapped keeps them so long.
    fn free(&self, id: AttachmentId) {
        let name = name(id);
        if let Err(error) = self.keeper.unpin(id) {
            warn!(attachment = name, "cannot unpin its pages: {error}");
        }
        if let Err(error) = self.dir.remove(&name) {
            warn!(attachment = name, "cannot remove its file: {error}");
        }
    }

    /// Frees the pages of attachments of earlier agents. Returns when all are free, or when the agent stops.
    pub(super) fn recover(&self, names: Vec<String>) {
        let mut ids = Vec::new();
        for name in names {
            match id(&name) {
                Some(id) => {
                    info!(attachment = name, "an earlier agent has left it");
                    ids.push(id);
                }
                None => warn!(name, "a file that is no attachment is left alone"),
            }
        }
        self.free_later(ids);
    }

    /// Frees the pages of each attachment when the host tells that it does not use them. Gives up when the agent stops:
    /// the files stay for the next agent.
    fn free_later(&self, mut ids: Vec<AttachmentId>) {
        let mut last = String::new();
        loop {
            ids.retain(|&id| {
                let stays = self.stop.wait(Duration::ZERO) || self.is_in_use(id, &mut last);
                if !stays {
                    self.free(id);
                }
                stays
            });
            if ids.is_empty() || self.stop.wait(ASK_AGAIN) {
                return;
            }
        }
    }

    /// Whether the host may use the pages of an attachment. `last` is the last error in the log.
    fn is_in_use(&self, id: AttachmentId, last: &mut String) -> bool {
        let stream = self.open_stream();
        let known = stream.and_then(|stream| Ok(stream.query(id, deadline(REQUEST))?));
        known.unwrap_or_else(|error| {
            let text = error.to_string();
            if text != *last {
                warn!(attachment = name(id), "the host may use its pages: {text}");
                *last = text;
            }
            true
        })
    }
}

fn open_doorbell(stream: &Registered) -> io::Result<OwnedFd> {
    // From a port of any process, not from one below 1024: the client gets this socket.
    let doorbell = vsock::connect_blocking(HOST, DOORBELL_PORT.get(), CONNECT)?;
    // A few bytes fit an empty stream at once.
    match send(
        &doorbell,
        &stream.token.0,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    )? {
        len if len == stream.token.0.len() => Ok(doorbell),
        _ => Err(Errno::AGAIN.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_those_of_attachments() {
        let bytes = *b"\x00\x01\x0f\xf0\xff0123456789a";
        let text = "00010ff0ff3031323334353637383961";
        assert_eq!(name(AttachmentId(bytes)), text);
        assert_eq!(id(text), Some(AttachmentId(bytes)));
        for bad in [
            "",
            "00",
            &text[1..],
            &text.to_uppercase(),
            &text.replace("00", "+0"),
            "é",
        ] {
            assert_eq!(id(bad), None, "{bad}");
        }
    }
}
