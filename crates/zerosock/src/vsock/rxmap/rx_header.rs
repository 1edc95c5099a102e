//! The header that [`RxMap`](super::RxMap) shows for each packet.

/// Bytes of a header.
pub(super) const HEADER: usize = 16;

/// `{u32 length, u32 flags, u64 offset}`: the document's header and an offset.
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
    /// Bytes of payload. 0: the end of the headers.
    pub length: u32,
    /// [`EOM`](super::EOM), [`EOR`](super::EOR), [`SPILLED`](super::SPILLED).
    pub flags: u32,
    /// Offset of the first byte, in bytes, in the memory shared with the peer's side (its regions
    /// one after the other, in order of guest addresses), or in the spill pages. `u64::MAX`: in
    /// neither; [`RxMap::packet`](super::RxMap::packet) has the bytes anyway.
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
