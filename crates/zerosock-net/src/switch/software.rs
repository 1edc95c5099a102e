//! Checksums and segmentation in software, for a receiver that does not take what its sender has left
//! to it: a boot loader next to a Linux guest, for example. Slow: the frame is copied twice.

use zerosock_proto::wire::net::{Checksum, Gso, Header, Offloads, Repr, Segments};

use crate::checksum::{IPV4, IPV4_LEN, IPV6, add, complete_checksum, fold, network_header, put};

/// Most segments of a frame: 64 KiB in segments of 256 bytes.
const MAX_SEGMENTS: usize = 256;

/// Most bytes of headers in front of the payload, which each segment repeats.
const MAX_HEADERS: usize = 256;

const IPV6_LEN: usize = 40;
const TCP_LEN: usize = 20;
/// Places in a TCP header.
const SEQUENCE: usize = 4;
const DATA_OFFSET: usize = 12;
const FLAGS: usize = 13;
const CHECKSUM: usize = 16;
/// Flags that only the last segment has: FIN and PSH.
const LAST_ONLY: u8 = 0x09;
/// The flag that only the first segment has: CWR.
const FIRST_ONLY: u8 = 0x80;

/// Whether a receiver takes the frame as it is.
pub(super) fn is_accepted(header: &Header, len: usize, offloads: Offloads) -> bool {
    Repr::parse(header, len, offloads).is_ok()
}

/// The frames in the place of `frame` for a receiver with these offloads. `None` if the frame is not
/// what its header says, or has too many segments.
pub(super) fn convert(
    header: &Header,
    mut frame: Vec<u8>,
    offloads: Offloads,
) -> Option<Vec<(Header, Vec<u8>)>> {
    let repr = Repr::parse(header, frame.len(), Offloads::ALL).ok()?;
    let Checksum::Partial { start, offset } = repr.checksum else {
        return Some(vec![(*header, frame)]);
    };
    let (start, offset) = (usize::from(start), usize::from(offset));
    let Some(gso) = repr.gso else {
        complete_checksum(&mut frame, start, offset)?;
        return Some(vec![(Header::default(), frame)]);
    };
    let partial = Repr { gso: None, ..repr }.emit();
    let segments = segment(&frame, start, gso)?.into_iter();
    let finished = segments.map(|mut segment| match offloads.csum {
        true => Some((partial, segment)),
        false => {
            complete_checksum(&mut segment, start, CHECKSUM)?;
            Some((Header::default(), segment))
        }
    });
    finished.collect()
}

/// The segments of a frame with a TCP header at `start`, with partial checksums.
fn segment(frame: &[u8], start: usize, gso: Gso) -> Option<Vec<Vec<u8>>> {
    let ip = ip_header(frame, gso.kind, start)?;
    let tcp = frame.get(start..)?;
    let tcp_len = usize::from(*tcp.get(DATA_OFFSET)? >> 4) * 4;
    let (headers, payload) = frame.split_at_checked(start + tcp_len)?;
    let size = usize::from(gso.size);
    if headers.len() > MAX_HEADERS
        || tcp_len < TCP_LEN
        || payload.len().div_ceil(size) > MAX_SEGMENTS
    {
        return None;
    }
    let sequence = u32::from_be_bytes(*tcp.get(SEQUENCE..)?.first_chunk()?);
    let id = u16::from_be_bytes(*frame.get(ip + 4..)?.first_chunk()?);
    let count = payload.len().div_ceil(size).max(1);
    let mut segments = Vec::with_capacity(count);
    for index in 0..count {
        let rest = payload.get(index * size..)?;
        let part = rest.get(..size).unwrap_or(rest);
        let mut segment = [headers, part].concat();
        let addresses = match gso.kind {
            Segments::Tcp4 => {
                let len = u16::try_from(segment.len() - ip).ok()?;
                put(&mut segment, ip + 2, len)?;
                put(&mut segment, ip + 4, id.wrapping_add(index as u16))?;
                put(&mut segment, ip + 10, 0)?;
                let sum = !fold(add(0, segment.get(ip..start)?));
                put(&mut segment, ip + 10, sum)?;
                segment.get(ip + 12..ip + 20)?
            }
            Segments::Tcp6 => {
                let len = u16::try_from(segment.len() - ip - IPV6_LEN).ok()?;
                put(&mut segment, ip + 4, len)?;
                segment.get(ip + 8..ip + 40)?
            }
        };
        // TCP has number 6 and is padded to 4 bytes in the pseudo header of IPv6; the sum is the same.
        let pseudo = add(6 + (segment.len() - start) as u32, addresses);
        put(&mut segment, start + CHECKSUM, fold(pseudo))?;
        let at = sequence.wrapping_add((index * size) as u32);
        let place = segment.get_mut(start + SEQUENCE..)?.first_chunk_mut()?;
        *place = at.to_be_bytes();
        let flags = segment.get_mut(start + FLAGS)?;
        if index > 0 {
            *flags &= !FIRST_ONLY;
        }
        if index + 1 < count {
            *flags &= !LAST_ONLY;
        }
        segments.push(segment);
    }
    Some(segments)
}

/// The place of the IP header of a frame with a TCP header at `start`.
fn ip_header(frame: &[u8], kind: Segments, start: usize) -> Option<usize> {
    let (wanted, shortest) = match kind {
        Segments::Tcp4 => (IPV4, IPV4_LEN),
        Segments::Tcp6 => (IPV6, IPV6_LEN),
    };
    let ip = network_header(frame, wanted)?;
    let fits = match kind {
        Segments::Tcp4 => start == ip + usize::from(*frame.get(ip)? & 0xf) * 4,
        Segments::Tcp6 => true,
    };
    (fits && start >= ip + shortest && start + TCP_LEN <= frame.len()).then_some(ip)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerosock_proto::wire::net::{ETHERNET_LEN, GSO_TCPV6, NEEDS_CSUM};

    /// A frame of TCP over IPv6 in segments of one byte, with the TCP header at `start`.
    fn segments(start: usize, payload: usize) -> Option<Vec<(Header, Vec<u8>)>> {
        let mut frame = vec![0; start + TCP_LEN + payload];
        frame[12..14].copy_from_slice(&[0x86, 0xdd]);
        frame[start + DATA_OFFSET] = 5 << 4;
        let mut header = Header::default();
        header.set_flags(NEEDS_CSUM);
        header.set_gso_type(GSO_TCPV6);
        header.set_gso_size(1);
        header.set_hdr_len((start + TCP_LEN) as u16);
        header.set_csum_start(start as u16);
        header.set_csum_offset(CHECKSUM as u16);
        convert(&header, frame, Offloads::default())
    }

    #[test]
    fn the_headers_that_each_segment_repeats_are_bounded() {
        let all = segments(ETHERNET_LEN + IPV6_LEN, 200).unwrap();
        assert_eq!(all.len(), 200);
        assert!(segments(MAX_HEADERS - TCP_LEN, 200).is_some());
        assert!(segments(MAX_HEADERS - TCP_LEN + 1, 200).is_none());
        assert!(segments(60_000, 200).is_none());
    }
}
