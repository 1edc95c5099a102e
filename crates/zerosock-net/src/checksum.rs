//! Checksums of the Internet (RFC 1071), and the headers in front of them, in private copies of frames.

use zerosock_proto::wire::net::ETHERNET_LEN;

/// Ethernet types.
pub(crate) const IPV4: [u8; 2] = [0x08, 0x00];
pub(crate) const IPV6: [u8; 2] = [0x86, 0xdd];
/// Bytes of an IPv4 header without options.
pub(crate) const IPV4_LEN: usize = 20;
const VLAN_TAG: usize = 4;

/// Adds up the bytes from `start` on and stores the sum. The field has the sum of the pseudo header.
pub(crate) fn complete_checksum(frame: &mut [u8], start: usize, offset: usize) -> Option<()> {
    let sum = finish(add(0, frame.get(start..)?));
    put(frame, start + offset, sum)
}

/// The field of a UDP or TCP header for this sum of the pseudo header, the header and the payload.
pub(crate) fn finish(sum: u32) -> u16 {
    match !fold(sum) {
        // For UDP a sum of 0 means that there is none; for TCP both are the same.
        0 => 0xffff,
        sum => sum,
    }
}

/// The place of the header behind the Ethernet header, if that has this type: there are at most two VLAN
/// tags (802.1Q and 802.1ad) in between.
pub(crate) fn network_header(frame: &[u8], wanted: [u8; 2]) -> Option<usize> {
    let mut at = ETHERNET_LEN;
    loop {
        let kind: [u8; 2] = *frame.get(at - 2..)?.first_chunk()?;
        if kind == wanted {
            return Some(at);
        }
        if !matches!(kind, [0x81, 0x00] | [0x88, 0xa8]) || at >= ETHERNET_LEN + 2 * VLAN_TAG {
            return None;
        }
        at += VLAN_TAG;
    }
}

/// Adds 16-bit words, of which the last may lack its second byte.
pub(crate) fn add(sum: u32, bytes: &[u8]) -> u32 {
    // At most 2^15 words of 2^16: no overflow, with a start below 2^31.
    bytes.chunks(2).fold(sum, |sum, word| {
        let low = word.get(1).copied().unwrap_or(0);
        sum + u32::from(u16::from_be_bytes([word[0], low]))
    })
}

pub(crate) fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum + (sum >> 16)) as u16
}

pub(crate) fn put(frame: &mut [u8], at: usize, value: u16) -> Option<()> {
    *frame.get_mut(at..)?.first_chunk_mut()? = value.to_be_bytes();
    Some(())
}
