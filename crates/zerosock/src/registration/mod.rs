//! What the device of a VM and the server of its agents both need for guest endpoints: ports, keys, the values of pages,
//! and the terms of the messages. [`control::guest`](crate::control::guest) has the protocol.

// - `key`: the key of a VM, and the tags of requests;
// - `page_value`: what the agent writes into the pages.

use std::fmt;

use zerosock_proto::Port;
use zerosock_ring::ExtentError;

pub mod key;
pub mod page_value;

/// The port of CID 2 at which an agent opens its stream, from a port below 1024: the first bytes of every message, as a
/// number. No rule, service or program can have it on a VM that may have guest endpoints.
pub const REGISTRATION_PORT: Port = Port::new(0x7a73_6765);

/// The port of CID 2 at which doorbells are opened. The guest sends the token of the attachment first, and one byte for
/// each wake-up from then on. The daemon sends one byte for each wake-up.
pub const DOORBELL_PORT: Port = Port::new(0x7a73_6766);

/// Bytes of the secret of a doorbell.
const TOKEN_LEN: usize = 16;

/// What opens the doorbell of an attachment, once: a secret.
#[derive(Copy, Clone, Eq, PartialEq)]
pub struct Token(pub [u8; TOKEN_LEN]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// Bytes of the encoded request.
pub(crate) const START_LEN: usize = 40;

/// A request to start the queues of an endpoint on memory that was given to its driver. The attach protocol and that of
/// guest endpoints have it in the same 40 bytes, so that an agent can pass it on:
///
/// | at | bytes | |
/// |---|---|---|
/// | 0 | 8 | the virtio features that the driver accepts |
/// | 8 | 2 | descriptors of each queue |
/// | 10 | 6 | 0 |
/// | 16 | 8 × 3 | where the receive, the transmit and the event ring begin in the memory |
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Start {
    /// The virtio features that the driver accepts of those that the device has.
    pub features: u64,
    /// Descriptors of each queue.
    pub queue_size: u16,
    /// Where the rings of the receive, transmit and event queue begin, in bytes from the start of the file: as
    /// [`DriverLayout::at`](zerosock_ring::DriverLayout::at) takes it.
    pub rings: [u64; 3],
}

impl Start {
    /// The request, byte by byte.
    pub(crate) fn encode(&self) -> [u8; START_LEN] {
        let mut bytes = [0; START_LEN];
        bytes[..8].copy_from_slice(&self.features.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.queue_size.to_le_bytes());
        for (field, ring) in bytes[16..].chunks_exact_mut(8).zip(self.rings) {
            field.copy_from_slice(&ring.to_le_bytes());
        }
        bytes
    }

    /// The request in these bytes; `None` if a byte is not zero that has to be.
    pub(crate) fn decode(bytes: &[u8; START_LEN]) -> Option<Start> {
        let (words, _) = bytes.as_chunks::<8>();
        let [features, size, rings @ ..] = <[[u8; 8]; 5]>::try_from(words).ok()?;
        let [low, high, 0, 0, 0, 0, 0, 0] = size else {
            return None;
        };
        Some(Start {
            features: u64::from_le_bytes(features),
            queue_size: u16::from_le_bytes([low, high]),
            rings: rings.map(u64::from_le_bytes),
        })
    }
}

/// Why a request was refused.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Refusal {
    /// The reason.
    pub reason: Reason,
    /// The position of the extent that it is about; else 0.
    pub index: u32,
}

/// Why the daemon has refused a request, or has ended an endpoint. A later minor version may have others than these.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Reason(pub u16);

/// Makes a constant and a text of each reason.
macro_rules! reasons {
    ($($name:ident = $number:literal: $text:literal,)*) => {
        impl Reason {
            $(#[doc = $text] pub const $name: Reason = Reason($number);)*
        }

        impl fmt::Display for Reason {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match *self {
                    $(Reason::$name => f.write_str($text),)*
                    Reason(number) => write!(f, "reason {number} of a later version"),
                }
            }
        }
    };
}

reasons! {
    REQUESTED = 0: "requested by the agent",
    VERSION_MISMATCH = 1: "the two sides speak different major versions",
    FAILED = 2: "the tag is wrong, or a page has not shown its value: the log of the daemon says which",
    BAD_REQUEST = 3: "the request breaks the protocol",
    CID_TAKEN = 4: "another endpoint has the CID",
    NAME_TAKEN = 5: "another endpoint has the name",
    NOT_PERMITTED = 6: "the VM may have no endpoint of this name or CID",
    FULL = 7: "the VM has as many endpoints, or as much memory in them, as it may have",
    TOO_MANY_EXTENTS = 8: "more extents than are taken",
    UNALIGNED = 9: "an extent does not consist of whole huge pages",
    OUTSIDE = 10: "an extent lies outside of the VM's memory",
    OVERLAP = 11: "an extent overlaps another one of the list",
    IN_USE = 12: "an extent belongs to another attachment",
    NOT_READY = 13: "the VM's own device does not run, or with several queue pairs",
    RINGS = 14: "the rings do not lie in the pages",
    SERVER_FAILED = 15: "a system call failed in the daemon",
    DEVICE_RESET = 16: "the guest's driver has reset the VM's device",
    FRONTEND_GONE = 17: "the VM's front-end has disconnected",
    MEMORY_CHANGED = 18: "the pages are not in the VM's new memory, or have lost their values while the VM was stopped",
    MEMORY_LOST = 19: "memory of the VM has vanished",
    DOORBELL_CLOSED = 20: "the doorbell was closed",
    REMOVED = 22: "the daemon ends, or the VM or the option was removed",
    ATTACHMENT_IN_USE = 23: "another request has named this attachment, and its pages may be in use",
    NOT_STOPPED = 24: "a program on the host has kept a buffer in the pages for too long, so their queues could not stop",
}

impl From<Reason> for Refusal {
    fn from(reason: Reason) -> Refusal {
        Refusal { reason, index: 0 }
    }
}

impl From<ExtentError> for Refusal {
    fn from(error: ExtentError) -> Refusal {
        let (reason, index) = match error {
            ExtentError::TooMany => (Reason::TOO_MANY_EXTENTS, 0),
            ExtentError::Unaligned(index) => (Reason::UNALIGNED, index),
            ExtentError::Outside(index) => (Reason::OUTSIDE, index),
            ExtentError::Overlap(index) => (Reason::OVERLAP, index),
            _ => (Reason::BAD_REQUEST, 0),
        };
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        Refusal { reason, index }
    }
}
