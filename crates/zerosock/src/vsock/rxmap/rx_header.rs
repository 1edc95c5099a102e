//! The header that [`RxMap`](super::RxMap) shows for each packet.

/// Bytes of a header.
pub(super) const HEADER: usize = 16;

/// The header of a packet in a [`RxMap`](super::RxMap), in native byte order: `{u32 length, u32
/// flags, u64 offset}`. The first two fields are those of the kernel patch set for zero-copy
/// receive.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/mapped.rs"));
/// use std::io::Write;
/// use zerosock::vsock::RxMap;
/// use zerosock::vsock::rxmap::{RxHeader, RxMapConfig};
///
/// let mut map = RxMap::new(&process, RxMapConfig::default())?;
/// (&host).write_all(b"eight by")?;
/// map.wait()?;
/// assert_eq!(map.fill()?, 1);
/// let header: RxHeader = map.header(0).expect("one packet");
/// assert_eq!(header.length, 8);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct RxHeader {
    /// Bytes of payload. 0 marks the end of the headers.
    pub length: u32,
    /// [`EOM`](super::EOM), [`EOR`](super::EOR), [`SPILLED`](super::SPILLED).
    pub flags: u32,
    /// Offset of the first byte, in bytes. With [`SPILLED`](super::SPILLED) it counts from the
    /// start of the spill pages; otherwise from the start of the memory shared with the peer, whose
    /// regions count one after the other in order of their guest addresses. `u64::MAX`: the bytes
    /// are in neither; [`RxMap::packet`](super::RxMap::packet) returns them.
    pub offset: u64,
}

impl RxHeader {
    pub(super) fn encode(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&self.length.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.offset.to_ne_bytes());
        bytes
    }

    pub(super) fn decode(bytes: [u8; HEADER]) -> RxHeader {
        let [a, b, c, d, e, f, g, h, offset @ ..] = bytes;
        RxHeader {
            length: u32::from_ne_bytes([a, b, c, d]),
            flags: u32::from_ne_bytes([e, f, g, h]),
            offset: u64::from_ne_bytes(offset),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_layout_is_length_flags_offset() {
        let header = RxHeader {
            length: 0x0403_0201,
            flags: 0x0807_0605,
            offset: 0x100f_0e0d_0c0b_0a09,
        };
        if cfg!(target_endian = "little") {
            assert_eq!(header.encode(), std::array::from_fn(|at| at as u8 + 1));
        }
        assert_eq!(RxHeader::decode(header.encode()), header);
    }
}
