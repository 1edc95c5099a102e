//! The virtio-vsock header: 44 bytes, packed, little-endian (virtio 1.2, 5.10.6).
//!
//! | bytes | field | | bytes | field |
//! |---|---|---|---|---|
//! | 0..8 | `src_cid` | | 28..30 | `type` |
//! | 8..16 | `dst_cid` | | 30..32 | `op` |
//! | 16..20 | `src_port` | | 32..36 | `flags` |
//! | 20..24 | `dst_port` | | 36..40 | `buf_alloc` |
//! | 24..28 | `len` | | 40..44 | `fwd_cnt` |
//!
//! A [`Repr`] is a valid header: both CIDs have 32 bits and `len` is at most [`MAX_PAYLOAD`].
//! Unknown types and operations survive parsing, because the reset rules answer them.

use core::fmt;

use crate::addr::{Address, Cid, Port};

/// Bytes in a header.
pub const HEADER_LEN: usize = 44;

/// Most payload bytes in one packet; Linux drops longer ones.
pub const MAX_PAYLOAD: u32 = 65536;

/// SHUTDOWN, bit 0: the sender receives no more.
pub const SHUTDOWN_RECEIVE: u32 = 1 << 0;
/// SHUTDOWN, bit 1: the sender sends no more.
pub const SHUTDOWN_SEND: u32 = 1 << 1;
/// RW on SEQPACKET, bit 0: the last packet of a message.
pub const SEQ_EOM: u32 = 1 << 0;
/// RW on SEQPACKET, bit 1: the last packet of a record (`MSG_EOR`).
pub const SEQ_EOR: u32 = 1 << 1;

/// The known socket types.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
#[repr(u16)]
pub enum SocketType {
    /// A stream of bytes.
    Stream = 1,
    /// A stream of records.
    SeqPacket = 2,
    /// Datagrams; a proposal, not in the specification.
    Datagram = 3,
}

impl fmt::Display for SocketType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SocketType::Stream => "stream",
            SocketType::SeqPacket => "seqpacket",
            SocketType::Datagram => "datagram",
        })
    }
}

/// The known operations.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
#[repr(u16)]
pub enum Op {
    /// Not an operation.
    Invalid = 0,
    /// Requests a connection.
    Request = 1,
    /// Accepts a connection.
    Response = 2,
    /// Refuses or ends a connection.
    Rst = 3,
    /// Shuts down one or both directions, see [`SHUTDOWN_RECEIVE`].
    Shutdown = 4,
    /// Payload.
    Rw = 5,
    /// Carries `buf_alloc` and `fwd_cnt`.
    CreditUpdate = 6,
    /// Requests a [`Op::CreditUpdate`].
    CreditRequest = 7,
    /// From an earlier driver: requests that the connection move to another queue pair
    /// (docs/queue-pairs.md; an extension, only where negotiated).
    Move = 0x7a10,
    /// The answer: the move is declined.
    Moved = 0x7a11,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Op::Invalid => "INVALID",
            Op::Request => "REQUEST",
            Op::Response => "RESPONSE",
            Op::Rst => "RST",
            Op::Shutdown => "SHUTDOWN",
            Op::Rw => "RW",
            Op::CreditUpdate => "CREDIT_UPDATE",
            Op::CreditRequest => "CREDIT_REQUEST",
            Op::Move => "MOVE",
            Op::Moved => "MOVED",
        })
    }
}

/// The type field as received: a [`SocketType`] or an unknown number.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub struct WireType(u16);

impl WireType {
    /// The socket type, if it is known.
    #[inline]
    pub const fn known(self) -> Option<SocketType> {
        Some(match self.0 {
            1 => SocketType::Stream,
            2 => SocketType::SeqPacket,
            3 => SocketType::Datagram,
            _ => return None,
        })
    }

    /// The number.
    #[inline]
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl From<u16> for WireType {
    #[inline]
    fn from(value: u16) -> WireType {
        WireType(value)
    }
}

impl From<SocketType> for WireType {
    #[inline]
    fn from(value: SocketType) -> WireType {
        WireType(value as u16)
    }
}

impl fmt::Display for WireType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known() {
            Some(known) => known.fmt(f),
            None => write!(f, "type {}", self.0),
        }
    }
}

/// The operation field as received: an [`Op`] or an unknown number.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub struct WireOp(u16);

impl WireOp {
    /// The operation, if it is known.
    #[inline]
    pub const fn known(self) -> Option<Op> {
        Some(match self.0 {
            0 => Op::Invalid,
            1 => Op::Request,
            2 => Op::Response,
            3 => Op::Rst,
            4 => Op::Shutdown,
            5 => Op::Rw,
            6 => Op::CreditUpdate,
            7 => Op::CreditRequest,
            0x7a10 => Op::Move,
            0x7a11 => Op::Moved,
            _ => return None,
        })
    }

    /// The number.
    #[inline]
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl From<u16> for WireOp {
    #[inline]
    fn from(value: u16) -> WireOp {
        WireOp(value)
    }
}

impl From<Op> for WireOp {
    #[inline]
    fn from(value: Op) -> WireOp {
        WireOp(value as u16)
    }
}

impl fmt::Display for WireOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known() {
            Some(known) => known.fmt(f),
            None => write!(f, "op {}", self.0),
        }
    }
}

/// A valid header.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Repr {
    /// The sender.
    pub src: Address,
    /// The receiver.
    pub dst: Address,
    /// Payload bytes behind the header, at most [`MAX_PAYLOAD`].
    pub len: u32,
    /// The kind of socket.
    pub socket_type: WireType,
    /// The operation.
    pub op: WireOp,
    /// Flags; what they mean depends on type and operation.
    pub flags: u32,
    /// The size of the sender's receive buffer, in bytes.
    pub buf_alloc: u32,
    /// Bytes that the sender has received and consumed, free-running.
    pub fwd_cnt: u32,
}

/// Why a header is dropped, without RST, before the state is looked at.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
pub enum ParseError {
    /// The upper 32 bits of a CID are not zero.
    #[error("CID {0} is wider than 32 bits")]
    Cid(u64),
    /// More payload than a packet may have.
    #[error("a payload of {0} bytes is above the limit of 65536")]
    Len(u32),
}

impl Repr {
    /// Checks everything that does not depend on a connection.
    ///
    /// # Errors
    /// [`ParseError`]: the peer is at fault and gets no answer.
    #[inline]
    pub fn parse(header: &[u8; HEADER_LEN]) -> Result<Repr, ParseError> {
        let word = |index| match header.as_chunks().0.get(index) {
            Some(bytes) => u64::from_le_bytes(*bytes),
            None => 0,
        };
        let last = *header.last_chunk().unwrap_or(&[0; 4]);
        Repr::from_words(core::array::from_fn(word), u32::from_le_bytes(last))
    }

    /// As [`parse`](Self::parse), for a header read as five little-endian words and a last half
    /// word: a processor reads them into registers without a copy in memory.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    #[inline]
    pub fn from_words(words: [u64; 5], last: u32) -> Result<Repr, ParseError> {
        let [src, dst, ports, len_type_op, flags_alloc] = words;
        let len = len_type_op as u32;
        if (src | dst) > u64::from(u32::MAX) || len > MAX_PAYLOAD {
            return Err(Repr::fault(src, dst, len));
        }
        Ok(Repr {
            // Both fit: it was just seen.
            src: Address::new(Cid::new(src as u32), Port::new(ports as u32)),
            dst: Address::new(Cid::new(dst as u32), Port::new((ports >> 32) as u32)),
            len,
            socket_type: WireType((len_type_op >> 32) as u16),
            op: WireOp((len_type_op >> 48) as u16),
            flags: flags_alloc as u32,
            buf_alloc: (flags_alloc >> 32) as u32,
            fwd_cnt: last,
        })
    }

    /// The header as five little-endian words and a last half word: the bytes that
    /// [`emit`](Self::emit) writes.
    #[inline]
    pub fn to_words(&self) -> ([u64; 5], u32) {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let type_op = u32::from(self.socket_type.get()) | u32::from(self.op.get()) << 16;
        let words = [
            u64::from(self.src.cid.get()),
            u64::from(self.dst.cid.get()),
            pair(self.src.port.get(), self.dst.port.get()),
            pair(self.len, type_op),
            pair(self.flags, self.buf_alloc),
        ];
        (words, self.fwd_cnt)
    }

    /// The fault of a header that does not parse.
    #[cold]
    fn fault(src: u64, dst: u64, len: u32) -> ParseError {
        if len > MAX_PAYLOAD {
            ParseError::Len(len)
        } else if src > u64::from(u32::MAX) {
            ParseError::Cid(src)
        } else {
            ParseError::Cid(dst)
        }
    }

    /// Writes the header.
    #[inline]
    pub fn emit(&self, buffer: &mut [u8; HEADER_LEN]) {
        let (words, last) = self.to_words();
        let (buffer, rest) = buffer.as_chunks_mut();
        for (bytes, word) in buffer.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        rest.copy_from_slice(&last.to_le_bytes());
    }
}

impl fmt::Display for Repr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} {} -> {} len {} flags {:#x} buf_alloc {} fwd_cnt {}",
            self.socket_type,
            self.op,
            self.src,
            self.dst,
            self.len,
            self.flags,
            self.buf_alloc,
            self.fwd_cnt
        )
    }
}

#[cfg(test)]
#[path = "vsock_tests.rs"]
mod tests;
