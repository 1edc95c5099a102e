//! Complete checksums for DHCP clients.
//!
//! The host, or another guest, may leave the checksum of a packet to the driver (GUEST_CSUM). DHCP clients
//! and boot loaders that read raw frames see no header of virtio and drop such a packet. So the device
//! completes the UDP checksum of what comes from the port of DHCP servers over IPv4, as the back-ends of
//! QEMU do. A frame whose headers do not fit, a fragment, or a longer frame passes unchanged, with its partial
//! checksum.
//!
//! # Invariants
//! - The decision and the sum are made from one private copy of the frame. Only the two bytes of the checksum
//!   are written.

use zerosock_proto::wire::net::{Checksum, Repr};
use zerosock_ring::GuestSlice;

use crate::checksum::{IPV4, IPV4_LEN, add, finish, network_header};

/// Bytes of the longest frame that is completed: servers answer clients without an address in 1500.
const MAX_LEN: usize = 2048;
/// The port of DHCP servers (RFC 2131, 4.1).
const SERVER: [u8; 2] = 67_u16.to_be_bytes();
/// The number of UDP in IPv4.
const UDP: u8 = 17;
const UDP_LEN: usize = 8;
/// Where the checksum is in a UDP header.
const CHECKSUM: u16 = 6;
/// The bits of a fragment: more of them follow, or its offset.
const FRAGMENT: u16 = 0x3fff;

/// Completes the checksum of a frame of `len` bytes if it is one of a DHCP server. The frame lies in
/// `slices`, and behind them in `rest`.
#[inline]
pub(super) fn complete(repr: &mut Repr, len: usize, slices: &[GuestSlice<'_>], rest: &mut [u8]) {
    if let Checksum::Partial {
        start,
        offset: CHECKSUM,
    } = repr.checksum
        && repr.gso.is_none()
        && complete_udp(start.into(), len, slices, rest).is_some()
    {
        repr.checksum = Checksum::Complete;
    }
}

/// Completes the checksum of the UDP packet at `start`; `None` if it is none of a DHCP server.
#[inline(never)]
fn complete_udp(
    start: usize,
    len: usize,
    slices: &[GuestSlice<'_>],
    rest: &mut [u8],
) -> Option<()> {
    // Most packets end here.
    let mut port = [0; 2];
    read(slices, rest, start, &mut port)?;
    if port != SERVER {
        return None;
    }
    let mut copy = [0; MAX_LEN];
    let frame_copy = copy.get_mut(..len)?;
    read(slices, rest, 0, frame_copy)?;
    let sum = checksum(frame_copy, start)?;
    write(slices, rest, start + usize::from(CHECKSUM), sum)
}

/// The checksum of a DHCP server's packet with its UDP header at `start`.
fn checksum(frame_copy: &[u8], start: usize) -> Option<u16> {
    let ip = network_header(frame_copy, IPV4)?;
    let header = frame_copy.get(ip..start)?;
    let word = |bytes: &[u8], at: usize| Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?));
    let version_and_len = *header.first()?;
    if header.len() < IPV4_LEN
        || usize::from(version_and_len & 0xf) * 4 != header.len()
        || version_and_len >> 4 != 4
        || *header.get(9)? != UDP
        || word(header, 6)? & FRAGMENT != 0
    {
        return None;
    }
    let udp_len = word(frame_copy, start + 4)?;
    let packet = frame_copy.get(start..start + usize::from(udp_len))?;
    let (udp, payload) = packet.split_at_checked(UDP_LEN)?;
    let total = header.len() + packet.len();
    if usize::from(word(header, 2)?) != total || !udp.starts_with(&SERVER) {
        return None;
    }
    // The pseudo header: addresses, protocol, length (RFC 768).
    let pseudo = u32::from(UDP) + u32::from(udp_len);
    let sum = add(pseudo, header.get(12..20)?);
    let sum = add(sum, udp.get(..usize::from(CHECKSUM))?);
    Some(finish(add(sum, payload)))
}

/// Copies bytes of the frame from `at` on; `None` if it ends before.
fn read(slices: &[GuestSlice<'_>], rest: &[u8], mut at: usize, mut out: &mut [u8]) -> Option<()> {
    for slice in slices {
        if out.is_empty() {
            break;
        }
        let count = slice.read(at, out);
        out = out.get_mut(count..)?;
        at = (at + count).saturating_sub(slice.len());
    }
    out.copy_from_slice(rest.get(at..at.checked_add(out.len())?)?);
    Some(())
}

/// Writes a word to the frame; `None` if it ends before.
fn write(slices: &[GuestSlice<'_>], rest: &mut [u8], mut at: usize, word: u16) -> Option<()> {
    let bytes = word.to_be_bytes();
    let mut bytes = &bytes[..];
    for slice in slices {
        if bytes.is_empty() {
            break;
        }
        let count = slice.write(at, bytes);
        bytes = bytes.get(count..)?;
        at = (at + count).saturating_sub(slice.len());
    }
    let place = rest.get_mut(at..at.checked_add(bytes.len())?)?;
    place.copy_from_slice(bytes);
    Some(())
}
