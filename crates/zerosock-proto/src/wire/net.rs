//! The virtio-net header, configuration space and control commands (virtio 1.3, 5.1).
//!
//! [`Header`] reads and writes fields at their offsets and checks nothing. [`Repr::parse`] checks
//! a header against the frame behind it and against what was negotiated ([`Offloads`]): a `Repr`
//! never points outside its frame and never asks for an offload that its receiver did not accept.

use core::ops::Range;

/// Bytes in a header (`struct virtio_net_hdr_v1`).
pub const HEADER_LEN: usize = 12;
/// Bytes of an Ethernet header without a VLAN tag: the shortest frame.
pub const ETHERNET_LEN: usize = 14;
/// Bytes of two VLAN tags.
const VLAN_TAGS: usize = 8;
/// Most bytes of a frame: an IP packet of 65535 bytes behind two VLAN tags.
pub const MAX_FRAME: usize = 65535 + ETHERNET_LEN + VLAN_TAGS;
/// Smallest MTU that a device may announce (5.1.4.1).
pub const MIN_MTU: u16 = 68;

/// VIRTIO_NET_F_CSUM: the device completes checksums for the driver.
pub const F_CSUM: u64 = 1 << 0;
/// VIRTIO_NET_F_GUEST_CSUM: the driver takes frames with partial checksums.
pub const F_GUEST_CSUM: u64 = 1 << 1;
/// VIRTIO_NET_F_MTU: the configuration space has an MTU.
pub const F_MTU: u64 = 1 << 3;
/// VIRTIO_NET_F_MAC: the configuration space has a MAC address.
pub const F_MAC: u64 = 1 << 5;
/// VIRTIO_NET_F_GUEST_TSO4: the driver takes TSO frames over IPv4.
pub const F_GUEST_TSO4: u64 = 1 << 7;
/// VIRTIO_NET_F_GUEST_TSO6: the driver takes TSO frames over IPv6.
pub const F_GUEST_TSO6: u64 = 1 << 8;
/// VIRTIO_NET_F_GUEST_ECN: the driver takes TSO frames with ECN.
pub const F_GUEST_ECN: u64 = 1 << 9;
/// VIRTIO_NET_F_HOST_TSO4: the device takes TSO frames over IPv4.
pub const F_HOST_TSO4: u64 = 1 << 11;
/// VIRTIO_NET_F_HOST_TSO6: the device takes TSO frames over IPv6.
pub const F_HOST_TSO6: u64 = 1 << 12;
/// VIRTIO_NET_F_HOST_ECN: the device takes TSO frames with ECN.
pub const F_HOST_ECN: u64 = 1 << 13;
/// VIRTIO_NET_F_MRG_RXBUF: a received frame may take several buffers.
pub const F_MRG_RXBUF: u64 = 1 << 15;
/// VIRTIO_NET_F_STATUS: the configuration space has the link status.
pub const F_STATUS: u64 = 1 << 16;
/// VIRTIO_NET_F_CTRL_VQ: there is a control queue.
pub const F_CTRL_VQ: u64 = 1 << 17;
/// VIRTIO_NET_F_CTRL_RX: the control queue has the receive modes.
pub const F_CTRL_RX: u64 = 1 << 18;
/// VIRTIO_NET_F_GUEST_ANNOUNCE: the driver announces its addresses when the device asks for it.
pub const F_GUEST_ANNOUNCE: u64 = 1 << 21;
/// VIRTIO_NET_F_MQ: there are several queue pairs.
pub const F_MQ: u64 = 1 << 22;

/// Most queue pairs of a device (5.1.4.1).
pub const MAX_QUEUE_PAIRS: u16 = 0x8000;

/// Offsets of the fields.
mod field {
    use core::ops::Range;

    pub(super) const FLAGS: usize = 0;
    pub(super) const GSO_TYPE: usize = 1;
    pub(super) const HDR_LEN: Range<usize> = 2..4;
    pub(super) const GSO_SIZE: Range<usize> = 4..6;
    pub(super) const CSUM_START: Range<usize> = 6..8;
    pub(super) const CSUM_OFFSET: Range<usize> = 8..10;
    pub(super) const NUM_BUFFERS: Range<usize> = 10..12;
}

/// Flags: the checksum is partial.
pub const NEEDS_CSUM: u8 = 1 << 0;
/// Flags: the checksum is known to be right. From device to driver only.
pub const DATA_VALID: u8 = 1 << 1;

/// Where the checksum is in a TCP header.
const TCP_CHECKSUM: u16 = 16;

/// The type of a frame that is no GSO frame.
pub const GSO_NONE: u8 = 0;
/// The type of a TSO frame over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// The type of a TSO frame over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// Added to the type of a TSO frame: CWR is set in its TCP header.
pub const GSO_ECN: u8 = 0x80;

/// The bytes of a header, not checked.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub struct Header(pub [u8; HEADER_LEN]);

impl Header {
    /// The header of which these are the first eight bytes and the last four, little-endian.
    #[inline]
    pub fn from_words(first: u64, last: u32) -> Header {
        let [a, b, c, d, e, f, g, h] = first.to_le_bytes();
        let [i, j, k, l] = last.to_le_bytes();
        Header([a, b, c, d, e, f, g, h, i, j, k, l])
    }

    /// The first eight bytes and the last four, little-endian.
    #[inline]
    pub fn to_words(self) -> (u64, u32) {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = self.0;
        let first = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        (first, u32::from_le_bytes([i, j, k, l]))
    }

    #[inline]
    fn get(&self, field: Range<usize>) -> u16 {
        let bytes = self.0.get(field).and_then(|bytes| bytes.try_into().ok());
        u16::from_le_bytes(bytes.unwrap_or_default())
    }

    #[inline]
    fn set(&mut self, field: Range<usize>, value: u16) {
        if let Some(bytes) = self.0.get_mut(field) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
    }

    /// The flags.
    #[inline]
    pub fn flags(&self) -> u8 {
        self.0[field::FLAGS]
    }

    /// The GSO type, with [`GSO_ECN`].
    #[inline]
    pub fn gso_type(&self) -> u8 {
        self.0[field::GSO_TYPE]
    }

    /// Bytes of all headers of a GSO frame: a hint.
    #[inline]
    pub fn hdr_len(&self) -> u16 {
        self.get(field::HDR_LEN)
    }

    /// Most payload bytes of each segment of a GSO frame.
    #[inline]
    pub fn gso_size(&self) -> u16 {
        self.get(field::GSO_SIZE)
    }

    /// Where the checksum begins, in bytes from the start of the frame.
    #[inline]
    pub fn csum_start(&self) -> u16 {
        self.get(field::CSUM_START)
    }

    /// Where the checksum is stored, in bytes from `csum_start`.
    #[inline]
    pub fn csum_offset(&self) -> u16 {
        self.get(field::CSUM_OFFSET)
    }

    /// Buffers of a received frame.
    #[inline]
    pub fn num_buffers(&self) -> u16 {
        self.get(field::NUM_BUFFERS)
    }

    /// Sets the flags.
    #[inline]
    pub fn set_flags(&mut self, flags: u8) {
        self.0[field::FLAGS] = flags;
    }

    /// Sets the GSO type.
    #[inline]
    pub fn set_gso_type(&mut self, kind: u8) {
        self.0[field::GSO_TYPE] = kind;
    }

    /// Sets the number of header bytes.
    #[inline]
    pub fn set_hdr_len(&mut self, len: u16) {
        self.set(field::HDR_LEN, len);
    }

    /// Sets the segment size.
    #[inline]
    pub fn set_gso_size(&mut self, size: u16) {
        self.set(field::GSO_SIZE, size);
    }

    /// Sets the start of the checksum.
    #[inline]
    pub fn set_csum_start(&mut self, start: u16) {
        self.set(field::CSUM_START, start);
    }

    /// Sets the place of the checksum.
    #[inline]
    pub fn set_csum_offset(&mut self, offset: u16) {
        self.set(field::CSUM_OFFSET, offset);
    }

    /// Sets the number of buffers.
    #[inline]
    pub fn set_num_buffers(&mut self, count: u16) {
        self.set(field::NUM_BUFFERS, count);
    }
}

/// The offloads that the receiver of frames accepts: the device those of the driver, and the driver
/// those of the device.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub struct Offloads {
    /// Partial checksums.
    pub csum: bool,
    /// TSO over IPv4.
    pub tso4: bool,
    /// TSO over IPv6.
    pub tso6: bool,
    /// TSO frames with ECN.
    pub ecn: bool,
}

impl Offloads {
    /// All of them.
    pub const ALL: Offloads = Offloads {
        csum: true,
        tso4: true,
        tso6: true,
        ecn: true,
    };

    /// Those that a device accepts from a driver that negotiated `features`.
    pub fn of_device(features: u64) -> Offloads {
        Offloads::from_bits(features, [F_CSUM, F_HOST_TSO4, F_HOST_TSO6, F_HOST_ECN])
    }

    /// Those that a driver that negotiated `features` accepts.
    pub fn of_driver(features: u64) -> Offloads {
        let bits = [F_GUEST_CSUM, F_GUEST_TSO4, F_GUEST_TSO6, F_GUEST_ECN];
        Offloads::from_bits(features, bits)
    }

    /// TSO needs checksums, and ECN needs TSO (5.1.3.1): without that they do not count.
    fn from_bits(features: u64, bits: [u64; 4]) -> Offloads {
        let [csum, tso4, tso6, ecn] = bits.map(|bit| features & bit != 0);
        Offloads {
            csum,
            tso4: csum && tso4,
            tso6: csum && tso6,
            ecn: csum && (tso4 || tso6) && ecn,
        }
    }

    /// Whether TSO frames are accepted at all.
    pub fn tso(self) -> bool {
        self.tso4 || self.tso6
    }
}

/// The state of a frame's checksum.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum Checksum {
    /// In the frame, if it has one.
    Complete,
    /// In the frame and checked (DATA_VALID).
    Valid,
    /// Partial (NEEDS_CSUM): the receiver adds up the bytes from `start` to the end of the frame
    /// and stores the sum `offset` bytes behind `start`. Both bytes of it are in the frame.
    Partial {
        /// In bytes from the start of the frame, behind the Ethernet header.
        start: u16,
        /// In bytes from `start`.
        offset: u16,
    },
}

/// The protocol of a TSO frame.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum Segments {
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
}

/// What makes a frame a TSO frame.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Gso {
    /// The protocol.
    pub kind: Segments,
    /// CWR is set in the TCP header.
    pub ecn: bool,
    /// Most payload bytes of a segment; not 0.
    pub size: u16,
    /// Bytes of all headers, at most those of the frame.
    pub hdr_len: u16,
}

/// A checked header.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Repr {
    /// The state of the checksum; partial if `gso` is set.
    pub checksum: Checksum,
    /// Set for a TSO frame.
    pub gso: Option<Gso>,
}

/// Why a header does not fit its frame.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// A partial checksum that was not negotiated.
    #[error("a partial checksum that was not negotiated")]
    ChecksumNotNegotiated,
    /// The checksum lies in the Ethernet header or beyond the end of the frame.
    #[error("the checksum at {start} + {offset} is not in the payload of a frame of {len} bytes")]
    ChecksumOutside {
        /// As [`Header::csum_start`].
        start: u16,
        /// As [`Header::csum_offset`].
        offset: u16,
        /// Bytes of the frame.
        len: usize,
    },
    /// A GSO type that is unknown or was not negotiated.
    #[error("GSO type {0:#x}, unknown or not negotiated")]
    GsoNotNegotiated(u8),
    /// A GSO frame without a partial checksum.
    #[error("a GSO frame without a partial checksum")]
    GsoWithoutChecksum,
    /// A GSO frame with its checksum elsewhere than in a TCP header. Linux refuses it, too.
    #[error("a GSO frame with a checksum at {0} behind its TCP header's start")]
    GsoChecksum(u16),
    /// Segments without payload.
    #[error("a GSO frame with segments of 0 bytes")]
    GsoSize,
    /// Headers longer than the frame.
    #[error("{0} bytes of headers in a frame of {1}")]
    HeadersTooLong(u16, usize),
}

impl Repr {
    /// Of a frame without offloads.
    pub const PLAIN: Repr = Repr {
        checksum: Checksum::Complete,
        gso: None,
    };

    /// Checks the header of a frame of `len` bytes for a receiver that accepts `offloads`. Unknown
    /// flags are ignored, as 5.1.6.2.2 demands.
    ///
    /// # Errors
    /// [`HeaderError`]: the header lies about the frame, or uses what was not negotiated.
    #[inline]
    pub fn parse(header: &Header, len: usize, offloads: Offloads) -> Result<Repr, HeaderError> {
        let flags = header.flags();
        let checksum = if flags & NEEDS_CSUM != 0 {
            if !offloads.csum {
                return Err(HeaderError::ChecksumNotNegotiated);
            }
            let (start, offset) = (header.csum_start(), header.csum_offset());
            let end = usize::from(start) + usize::from(offset) + 2;
            if usize::from(start) < ETHERNET_LEN || end > len {
                return Err(HeaderError::ChecksumOutside { start, offset, len });
            }
            Checksum::Partial { start, offset }
        } else if flags & DATA_VALID != 0 {
            Checksum::Valid
        } else {
            Checksum::Complete
        };
        let kind = header.gso_type();
        let gso = match kind {
            GSO_NONE => None,
            _ => Some(Gso::parse(header, len, offloads)?),
        };
        match checksum {
            _ if gso.is_none() => {}
            Checksum::Partial { offset, .. } if offset == TCP_CHECKSUM => {}
            Checksum::Partial { offset, .. } => return Err(HeaderError::GsoChecksum(offset)),
            _ => return Err(HeaderError::GsoWithoutChecksum),
        }
        Ok(Repr { checksum, gso })
    }

    /// The header, with `num_buffers` of 0. Fields that have no meaning are 0.
    #[inline]
    pub fn emit(&self) -> Header {
        let mut header = Header::default();
        match self.checksum {
            Checksum::Complete => {}
            Checksum::Valid => header.set_flags(DATA_VALID),
            Checksum::Partial { start, offset } => {
                header.set_flags(NEEDS_CSUM);
                header.set_csum_start(start);
                header.set_csum_offset(offset);
            }
        }
        if let Some(gso) = &self.gso {
            let kind = match gso.kind {
                Segments::Tcp4 => GSO_TCPV4,
                Segments::Tcp6 => GSO_TCPV6,
            };
            header.set_gso_type(if gso.ecn { kind | GSO_ECN } else { kind });
            header.set_gso_size(gso.size);
            header.set_hdr_len(gso.hdr_len);
        }
        header
    }
}

impl Gso {
    fn parse(header: &Header, len: usize, offloads: Offloads) -> Result<Gso, HeaderError> {
        let raw = header.gso_type();
        let ecn = raw & GSO_ECN != 0;
        let kind = match raw & !GSO_ECN {
            GSO_TCPV4 if offloads.tso4 => Segments::Tcp4,
            GSO_TCPV6 if offloads.tso6 => Segments::Tcp6,
            _ => return Err(HeaderError::GsoNotNegotiated(raw)),
        };
        if ecn && !offloads.ecn {
            return Err(HeaderError::GsoNotNegotiated(raw));
        }
        let (size, hdr_len) = (header.gso_size(), header.hdr_len());
        if size == 0 {
            return Err(HeaderError::GsoSize);
        }
        if usize::from(hdr_len) > len {
            return Err(HeaderError::HeadersTooLong(hdr_len, len));
        }
        Ok(Gso {
            kind,
            ecn,
            size,
            hdr_len,
        })
    }
}

/// An Ethernet address.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Whether it can be the address of one interface: not all zeros, and no group address.
    pub fn is_unicast(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }
}

impl core::fmt::Display for Mac {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// Why a text is no address of an interface.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[error("not a MAC address of an interface, such as 52:54:00:12:34:56")]
pub struct MacError;

impl core::str::FromStr for Mac {
    type Err = MacError;

    /// Six pairs of hexadecimal digits, joined by colons. Refuses addresses of groups and of no
    /// interface.
    fn from_str(text: &str) -> Result<Mac, MacError> {
        let mut mac = Mac([0; 6]);
        let mut parts = text.split(':');
        for byte in &mut mac.0 {
            let part = parts.next().ok_or(MacError)?;
            if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(MacError);
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| MacError)?;
        }
        match parts.next() {
            None if mac.is_unicast() => Ok(mac),
            _ => Err(MacError),
        }
    }
}

/// The configuration space up to the MTU (5.1.4). Which fields have a meaning depends on the
/// features.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Config {
    /// The MAC address.
    pub mac: Mac,
    /// The link is up.
    pub link_up: bool,
    /// The driver is to announce its addresses, and to acknowledge that.
    pub announce: bool,
    /// Most queue pairs.
    pub max_queue_pairs: u16,
    /// Most bytes of a packet without the Ethernet header.
    pub mtu: u16,
}

impl Config {
    /// Bytes of the configuration space.
    pub const LEN: usize = 12;
    /// Where the status is: whether the link is up, and whether the driver is to announce itself.
    pub const STATUS: Range<usize> = 6..8;
    /// Where the MTU is.
    pub const MTU: Range<usize> = 10..12;

    /// The fields of a configuration space.
    pub fn parse(bytes: &[u8; Config::LEN]) -> Config {
        let [a, b, c, d, e, f, status, _, pairs @ .., low, high] = *bytes;
        Config {
            mac: Mac([a, b, c, d, e, f]),
            link_up: status & 1 != 0,
            announce: status & 2 != 0,
            max_queue_pairs: u16::from_le_bytes(pairs),
            mtu: u16::from_le_bytes([low, high]),
        }
    }

    /// The configuration space.
    pub fn emit(&self) -> [u8; Config::LEN] {
        let mut bytes = [0; Config::LEN];
        bytes[..6].copy_from_slice(&self.mac.0);
        let status = status(self.link_up, self.announce);
        bytes[Config::STATUS].copy_from_slice(&status);
        bytes[8..10].copy_from_slice(&self.max_queue_pairs.to_le_bytes());
        bytes[Config::MTU].copy_from_slice(&self.mtu.to_le_bytes());
        bytes
    }
}

/// The bytes of the status in the configuration space (5.1.4): VIRTIO_NET_S_LINK_UP and
/// VIRTIO_NET_S_ANNOUNCE.
pub fn status(link_up: bool, announce: bool) -> [u8; 2] {
    (u16::from(link_up) | u16::from(announce) << 1).to_le_bytes()
}

/// Most bytes of a control command that are read: those that a MAC table has are not among them.
pub const COMMAND_LEN: usize = 4;

/// The answer to a control command: it was carried out.
pub const CONTROL_OK: u8 = 0;
/// The answer to a control command: it was not.
pub const CONTROL_ERR: u8 = 1;

/// A control command that is known (5.1.6.5).
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum Command {
    /// Receive all frames, or all of groups, or stop that (CTRL_RX).
    ReceiveMode,
    /// A list of addresses to receive (CTRL_RX).
    MacTable,
    /// The driver has announced its addresses (GUEST_ANNOUNCE).
    AnnounceAck,
    /// Use this number of queue pairs (MQ); not 0.
    QueuePairs(u16),
}

impl Command {
    /// The command in the first bytes of a buffer, at most [`COMMAND_LEN`], of `len` bytes in all.
    /// `None` if it is not known or has no such length.
    pub fn parse(bytes: &[u8], len: usize) -> Option<Command> {
        match *bytes {
            [0, 0 | 1, 0 | 1] => Some(Command::ReceiveMode),
            // Two tables, each of an le32 and addresses.
            [1, 0, ..] if len >= 2 + 4 + 4 && (len - 2 - 4 - 4).is_multiple_of(6) => {
                Some(Command::MacTable)
            }
            [3, 0] if len == 2 => Some(Command::AnnounceAck),
            [4, 0, low, high] if len == COMMAND_LEN => match u16::from_le_bytes([low, high]) {
                0 => None,
                pairs => Some(Command::QueuePairs(pairs)),
            },
            _ => None,
        }
    }
}
