//! The virtio-vsock header: 44 bytes, packed, little-endian (virtio 1.2, 5.10.6).
//!
//! [`Packet`] reads and writes fields at their offsets and checks nothing about them. The rest of
//! the crate works with [`Repr`]: both CIDs have 32 bits and `len` is at most [`MAX_PAYLOAD`].
//! Unknown types and operations survive parsing, because the reset rules answer them.

use core::fmt;
use core::ops::Range;

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

/// Offsets of the fields.
mod field {
    use core::ops::Range;

    pub(super) const SRC_CID: Range<usize> = 0..8;
    pub(super) const DST_CID: Range<usize> = 8..16;
    pub(super) const SRC_PORT: Range<usize> = 16..20;
    pub(super) const DST_PORT: Range<usize> = 20..24;
    pub(super) const LEN: Range<usize> = 24..28;
    pub(super) const TYPE: Range<usize> = 28..30;
    pub(super) const OP: Range<usize> = 30..32;
    pub(super) const FLAGS: Range<usize> = 32..36;
    pub(super) const BUF_ALLOC: Range<usize> = 36..40;
    pub(super) const FWD_CNT: Range<usize> = 40..44;
}

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

/// A header over bytes; only its length is checked.
#[derive(Copy, Clone, Debug)]
pub struct Packet<T: AsRef<[u8]>> {
    buffer: T,
}

/// The bytes are fewer than [`HEADER_LEN`].
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[error("a vsock header has 44 bytes, not {0}")]
pub struct Truncated(pub usize);

impl<T: AsRef<[u8]>> Packet<T> {
    /// [`Truncated`] if the buffer is shorter than a header.
    ///
    /// # Errors
    /// [`Truncated`] when it is not all there.
    #[inline]
    pub fn new_checked(buffer: T) -> Result<Packet<T>, Truncated> {
        match buffer.as_ref().len() {
            len if len < HEADER_LEN => Err(Truncated(len)),
            _ => Ok(Packet { buffer }),
        }
    }

    /// Returns the bytes.
    pub fn into_inner(self) -> T {
        self.buffer
    }

    /// The header as one array, so that field access needs no bounds check.
    #[inline]
    fn header(&self) -> &[u8; HEADER_LEN] {
        // `new_checked` has checked the length; a `T` that returns fewer bytes now reads as zeros.
        self.buffer
            .as_ref()
            .first_chunk()
            .unwrap_or(&[0; HEADER_LEN])
    }

    /// The sender's CID, all 64 bits of it.
    #[inline]
    pub fn src_cid(&self) -> u64 {
        u64::from_le_bytes(bytes(self.header(), field::SRC_CID))
    }

    /// The receiver's CID, all 64 bits of it.
    #[inline]
    pub fn dst_cid(&self) -> u64 {
        u64::from_le_bytes(bytes(self.header(), field::DST_CID))
    }

    /// The sender's port.
    #[inline]
    pub fn src_port(&self) -> u32 {
        u32::from_le_bytes(bytes(self.header(), field::SRC_PORT))
    }

    /// The receiver's port.
    #[inline]
    pub fn dst_port(&self) -> u32 {
        u32::from_le_bytes(bytes(self.header(), field::DST_PORT))
    }

    /// Payload bytes behind the header, as the sender claims.
    #[inline]
    pub fn payload_len(&self) -> u32 {
        u32::from_le_bytes(bytes(self.header(), field::LEN))
    }

    /// The kind of socket.
    #[inline]
    pub fn socket_type(&self) -> WireType {
        WireType(u16::from_le_bytes(bytes(self.header(), field::TYPE)))
    }

    /// The operation.
    #[inline]
    pub fn op(&self) -> WireOp {
        WireOp(u16::from_le_bytes(bytes(self.header(), field::OP)))
    }

    /// Flags; what they mean depends on type and operation.
    #[inline]
    pub fn flags(&self) -> u32 {
        u32::from_le_bytes(bytes(self.header(), field::FLAGS))
    }

    /// The size of the sender's receive buffer, in bytes.
    #[inline]
    pub fn buf_alloc(&self) -> u32 {
        u32::from_le_bytes(bytes(self.header(), field::BUF_ALLOC))
    }

    /// Bytes that the sender has received and consumed, free-running.
    #[inline]
    pub fn fwd_cnt(&self) -> u32 {
        u32::from_le_bytes(bytes(self.header(), field::FWD_CNT))
    }
}

/// A field of a header. The range is a constant, so it is known to be within the header.
#[inline]
fn bytes<const N: usize>(header: &[u8; HEADER_LEN], field: Range<usize>) -> [u8; N] {
    let mut bytes = [0; N];
    if let Some(source) = header.get(field) {
        bytes.copy_from_slice(source);
    }
    bytes
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
    pub fn parse<T: AsRef<[u8]>>(packet: &Packet<T>) -> Result<Repr, ParseError> {
        // Reads the bytes once, with one branch for all faults.
        let packet = Packet {
            buffer: *packet.header(),
        };
        let (src, dst, len) = (packet.src_cid(), packet.dst_cid(), packet.payload_len());
        if (src | dst) > u64::from(u32::MAX) || len > MAX_PAYLOAD {
            return Err(Repr::fault(src, dst, len));
        }
        Ok(Repr {
            // Both fit: it was just seen.
            src: Address::new(Cid::new(src as u32), Port::new(packet.src_port())),
            dst: Address::new(Cid::new(dst as u32), Port::new(packet.dst_port())),
            len,
            socket_type: packet.socket_type(),
            op: packet.op(),
            flags: packet.flags(),
            buf_alloc: packet.buf_alloc(),
            fwd_cnt: packet.fwd_cnt(),
        })
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
        buffer[field::SRC_CID].copy_from_slice(&u64::from(self.src.cid.get()).to_le_bytes());
        buffer[field::DST_CID].copy_from_slice(&u64::from(self.dst.cid.get()).to_le_bytes());
        buffer[field::SRC_PORT].copy_from_slice(&self.src.port.get().to_le_bytes());
        buffer[field::DST_PORT].copy_from_slice(&self.dst.port.get().to_le_bytes());
        buffer[field::LEN].copy_from_slice(&self.len.to_le_bytes());
        buffer[field::TYPE].copy_from_slice(&self.socket_type.get().to_le_bytes());
        buffer[field::OP].copy_from_slice(&self.op.get().to_le_bytes());
        buffer[field::FLAGS].copy_from_slice(&self.flags.to_le_bytes());
        buffer[field::BUF_ALLOC].copy_from_slice(&self.buf_alloc.to_le_bytes());
        buffer[field::FWD_CNT].copy_from_slice(&self.fwd_cnt.to_le_bytes());
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
