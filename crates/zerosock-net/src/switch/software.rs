//! Checksums and segmentation in software, for a receiver that does not take what its sender has left
//! to it: a boot loader next to a Linux guest, for example. Slow: the frame is copied twice.

use zerosock_proto::wire::net::{Checksum, Gso, Header, Offloads, Repr, Segments};

use super::copies::Copies;
use crate::checksum::{IPV4, IPV4_LEN, IPV6, add, complete_checksum, fold, network_header, put};

/// Most segments of a frame: 64 KiB in segments of 256 bytes.
const MAX_SEGMENTS: usize = 256;

/// Most bytes of headers in front of the payload, which each segment repeats.
const MAX_HEADERS: usize = 256;

const IPV6_LEN: usize = 40;
const TCP_LEN: usize = 20;
/// With all options that there can be.
const MAX_TCP_LEN: usize = 60;
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

/// How many frames a receiver with these offloads gets in the place of this one, at most, and the bytes of
/// each, at most. A frame that such a receiver drops counts as one that it cuts.
pub(super) fn cut(header: &Header, len: usize, offloads: Offloads) -> (usize, usize) {
    if is_accepted(header, len, offloads) {
        return (1, len);
    }
    match Repr::parse(header, len, Offloads::ALL) {
        Ok(Repr {
            checksum: Checksum::Partial { start, .. },
            gso: Some(gso),
        }) => {
            // The shortest headers leave the most payload, the longest make the longest segments.
            let [shortest, longest] = [TCP_LEN, MAX_TCP_LEN].map(|tcp| usize::from(start) + tcp);
            let size = usize::from(gso.size);
            let segments = len.saturating_sub(shortest).div_ceil(size);
            (segments.clamp(1, MAX_SEGMENTS), len.min(longest + size))
        }
        _ => (1, len),
    }
}

/// Adds the frames in the place of `frame` for a receiver with these offloads to `out`. `None` if the frame
/// is not what its header says, has too many segments, or there is no memory; some may have been added.
pub(super) fn convert(
    header: &Header,
    frame: &[u8],
    offloads: Offloads,
    out: &mut Copies,
) -> Option<()> {
    let repr = Repr::parse(header, frame.len(), Offloads::ALL).ok()?;
    let Checksum::Partial { start, offset } = repr.checksum else {
        out.add(*header, frame.len())?.copy_from_slice(frame);
        return Some(());
    };
    let (start, offset) = (usize::from(start), usize::from(offset));
    let Some(gso) = repr.gso else {
        let place = out.add(Header::default(), frame.len())?;
        place.copy_from_slice(frame);
        return complete_checksum(place, start, offset);
    };
    let header = match offloads.csum {
        true => Repr { gso: None, ..repr }.emit(),
        false => Header::default(),
    };
    let finish = |segment: &mut [u8]| match offloads.csum {
        true => Some(()),
        false => complete_checksum(segment, start, CHECKSUM),
    };
    segment(frame, (start, gso), (out, header), finish)
}

/// Adds the segments of a frame with a TCP header at `start` to `out`, each with this header. Their checksums
/// are partial; `finish` may change that.
fn segment(
    frame: &[u8],
    (start, gso): (usize, Gso),
    (out, header): (&mut Copies, Header),
    finish: impl Fn(&mut [u8]) -> Option<()>,
) -> Option<()> {
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
    for index in 0..count {
        let rest = payload.get(index * size..)?;
        let part = rest.get(..size).unwrap_or(rest);
        let segment = out.add(header, headers.len() + part.len())?;
        let (of_headers, of_payload) = segment.split_at_mut_checked(headers.len())?;
        of_headers.copy_from_slice(headers);
        of_payload.copy_from_slice(part);
        let addresses = match gso.kind {
            Segments::Tcp4 => {
                let len = u16::try_from(segment.len() - ip).ok()?;
                put(segment, ip + 2, len)?;
                put(segment, ip + 4, id.wrapping_add(index as u16))?;
                put(segment, ip + 10, 0)?;
                let sum = !fold(add(0, segment.get(ip..start)?));
                put(segment, ip + 10, sum)?;
                segment.get(ip + 12..ip + 20)?
            }
            Segments::Tcp6 => {
                let len = u16::try_from(segment.len() - ip - IPV6_LEN).ok()?;
                put(segment, ip + 4, len)?;
                segment.get(ip + 8..ip + 40)?
            }
        };
        // TCP has number 6 and is padded to 4 bytes in the pseudo header of IPv6; the sum is the same.
        let pseudo = add(6 + (segment.len() - start) as u32, addresses);
        put(segment, start + CHECKSUM, fold(pseudo))?;
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
        finish(segment)?;
    }
    Some(())
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
#[path = "software_tests.rs"]
mod tests;
