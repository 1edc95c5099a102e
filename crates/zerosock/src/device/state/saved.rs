//! What a process that stops for another one writes down of a device: see
//! [`handover`](crate::device::handover).
//!
//! # Format
//! A magic number and the version, then three sections, each behind its length in bytes (64 bits): the
//! protocol core ([`Shard::save`](zerosock_proto::vsock::Shard::save)), the payload bytes that connections
//! wait to pass on, and the tables ([`SavedTables`], in the format of the `postcard` crate). Numbers are
//! little-endian.
//!
//! # Invariants
//! - All of it is input that may be hostile: [`Saved::decode`] checks the lengths, and the device what it
//!   uses. Nothing is allocated beyond what the input has.
//! - Descriptors come beside it: those of connections in the order of the table, then those of programs
//!   that have not sent a CONNECT line, then those of callers.

use serde::{Deserialize, Serialize};
use zerosock_proto::vsock::FlowInfo;
use zerosock_proto::{Address, Cid, Port};

use super::bridge_state::BridgeState;
use super::forwarded::SavedForwarded;
use crate::table::sockets::MessageEnd;

/// `ZSHO`, and the version.
const MAGIC: [u8; 8] = *b"ZSHO\x01\0\0\0";

/// The tables of a device.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(in crate::device) struct SavedTables {
    /// Where each queue was stopped.
    pub(in crate::device) stopped_at: Vec<Option<u16>>,
    pub(in crate::device) bridges: Vec<SavedBridge>,
    /// Programs that have not sent their CONNECT lines: whether each sends messages.
    pub(in crate::device) handshakes: Vec<bool>,
    pub(in crate::device) callers: Vec<SavedCaller>,
}

/// Local CID and port, and the port of the guest.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub(in crate::device) struct FlowKey(u32, u32, u32);

impl FlowKey {
    pub(in crate::device) fn new(local: Address, guest: Port) -> FlowKey {
        FlowKey(local.cid.get(), local.port.get(), guest.get())
    }

    pub(in crate::device) fn of(flow: &FlowInfo) -> FlowKey {
        FlowKey::new(flow.local, flow.peer.port)
    }

    pub(in crate::device) fn local(self) -> Address {
        Address::new(Cid::new(self.0), Port::new(self.1))
    }
}

/// A connection and its other end.
#[derive(Debug, Deserialize, Serialize)]
pub(in crate::device) struct SavedBridge {
    /// `None`: the flow has ended, and bytes for the host remain.
    pub(in crate::device) flow: Option<FlowKey>,
    pub(in crate::device) peer: SavedPeer,
    pub(in crate::device) state: BridgeState,
    /// Bytes of the guest that the other end has not taken.
    pub(in crate::device) outbound: u32,
    pub(in crate::device) messages: Option<SavedMessages>,
    pub(in crate::device) forwarded: Option<SavedForwarded>,
    pub(in crate::device) from_guest: u64,
    pub(in crate::device) to_guest: u64,
}

#[derive(Debug, Deserialize, Serialize)]
pub(in crate::device) enum SavedPeer {
    /// A socket, whose descriptor comes beside it.
    Socket {
        /// The port for the OK line, until the guest has answered.
        ok: Option<u32>,
        /// What the guest was asked for and has not answered.
        connect: Option<SavedConnect>,
    },
    /// A sibling: bytes of it that the guest has not got.
    Sibling { inbound: u32 },
}

/// A connect that the guest has not answered.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(in crate::device) struct SavedConnect {
    pub(in crate::device) to: u32,
    pub(in crate::device) wants_ok: bool,
    /// Until it has to.
    pub(in crate::device) left: std::time::Duration,
}

/// Boundaries of messages.
#[derive(Debug, Deserialize, Serialize)]
pub(in crate::device) struct SavedMessages {
    pub(in crate::device) outbound: Vec<(u32, MessageEnd)>,
    pub(in crate::device) incomplete: u32,
    pub(in crate::device) inbound: Vec<(u32, MessageEnd)>,
    /// The rest of the message that is being sent to the guest.
    pub(in crate::device) sending: Option<(u32, MessageEnd)>,
}

/// A program that waits until the guest's listener has room.
#[derive(Debug, Deserialize, Serialize)]
pub(in crate::device) struct SavedCaller {
    pub(in crate::device) messages: bool,
    pub(in crate::device) to: u32,
    pub(in crate::device) wants_ok: bool,
    pub(in crate::device) forwarded: Option<SavedForwarded>,
}

/// All of a device: see the [module](self).
#[derive(Debug)]
pub(in crate::device) struct Saved<'a> {
    pub(in crate::device) shard: &'a [u8],
    pub(in crate::device) payload: &'a [u8],
    pub(in crate::device) tables: SavedTables,
}

/// Encodes what belongs together.
pub(in crate::device) fn encode(
    shard: &[u8],
    payload: &[u8],
    tables: &SavedTables,
) -> Result<Vec<u8>, postcard::Error> {
    let tables = postcard::to_stdvec(tables)?;
    let mut out = MAGIC.to_vec();
    for section in [shard, payload, &tables] {
        out.extend((section.len() as u64).to_le_bytes());
        out.extend_from_slice(section);
    }
    Ok(out)
}

impl Saved<'_> {
    /// Decodes it. The error says why that is not possible.
    pub(in crate::device) fn decode(bytes: &[u8]) -> Result<Saved<'_>, String> {
        let mut rest = bytes
            .strip_prefix(&MAGIC)
            .ok_or("it is of another version")?;
        let mut section = || {
            let (len, after) = rest.split_first_chunk::<8>()?;
            let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
            let (section, after) = after.split_at_checked(len)?;
            rest = after;
            Some(section)
        };
        let sections = (section(), section(), section());
        let (Some(shard), Some(payload), Some(tables)) = sections else {
            return Err("it is truncated".into());
        };
        let tables = postcard::from_bytes(tables).map_err(|error| error.to_string())?;
        Ok(Saved {
            shard,
            payload,
            tables,
        })
    }
}
