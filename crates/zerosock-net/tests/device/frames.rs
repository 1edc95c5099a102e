//! Frames with contents that can be told from others.

use zerosock_proto::wire::net::{GSO_TCPV4, Header, NEEDS_CSUM};

/// The source address of all frames of tests.
pub(crate) const MARK: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0x77];
/// An Ethernet type for experiments.
const EXPERIMENT: [u8; 2] = [0x88, 0xb5];
/// Bytes of the headers of a TCP frame.
pub(crate) const TCP_HEADERS: usize = 54;

pub(crate) fn is_ours(frame: &[u8]) -> bool {
    frame.len() >= 14 && frame[6..12] == MARK
}

fn fill(bytes: &mut [u8], seed: u8) {
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = (index as u32).wrapping_mul(0x9e37_79b1).to_be_bytes()[0] ^ seed;
    }
}

/// A frame of `len` bytes, at least 14, without a protocol.
pub(crate) fn plain(len: usize, seed: u8) -> Vec<u8> {
    let mut frame = vec![0; len];
    fill(&mut frame, seed);
    frame[..6].copy_from_slice(&[0x52, 0x54, 0, 0, 0, 2]);
    frame[6..12].copy_from_slice(&MARK);
    frame[12..14].copy_from_slice(&EXPERIMENT);
    frame
}

/// A TCP segment over IPv4 with this number of bytes, and the header of a partial checksum.
pub(crate) fn tcp(payload: usize, seed: u8) -> (Header, Vec<u8>) {
    let mut frame = plain(TCP_HEADERS + payload, seed);
    frame[12..14].copy_from_slice(&[8, 0]);
    let ip = &mut frame[14..34];
    ip.fill(0);
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&(40 + payload as u16).to_be_bytes());
    ip[8] = 64;
    ip[9] = 6;
    ip[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    let tcp = &mut frame[34..54];
    tcp.fill(0);
    tcp[..4].copy_from_slice(&[0, 1, 0, 2]);
    tcp[12] = 0x50;
    tcp[13] = 0x10;
    let mut header = Header::default();
    header.set_flags(NEEDS_CSUM);
    header.set_csum_start(34);
    header.set_csum_offset(16);
    (header, frame)
}

/// A UDP packet over IPv4 from this port, as a kernel leaves its checksum to the receiver: in its place is the
/// sum of the pseudo header.
pub(crate) fn udp(port: u16, payload: usize) -> (Header, Vec<u8>) {
    let (mut header, mut frame) = tcp(payload, 7);
    header.set_csum_offset(6);
    frame.truncate(42 + payload);
    frame[16..18].copy_from_slice(&(28 + payload as u16).to_be_bytes());
    frame[23] = 17;
    frame[34..36].copy_from_slice(&port.to_be_bytes());
    frame[36..38].copy_from_slice(&68_u16.to_be_bytes());
    frame[38..40].copy_from_slice(&(8 + payload as u16).to_be_bytes());
    let sum = sum_of(&udp_pseudo_header(&frame));
    frame[40..42].copy_from_slice(&sum.to_be_bytes());
    (header, frame)
}

/// Whether a packet of [`udp`] has its whole checksum.
pub(crate) fn is_complete_udp(frame: &[u8]) -> bool {
    sum_of(&[&udp_pseudo_header(frame), &frame[34..]].concat()) == 0xffff
}

/// Addresses, protocol and length (RFC 768).
fn udp_pseudo_header(frame: &[u8]) -> Vec<u8> {
    [&frame[26..34], &[0, 17], &frame[38..40]].concat()
}

/// The ones' complement sum of 16-bit words.
fn sum_of(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2);
    words.fold(0, |sum: u16, word| {
        let word = u16::from_be_bytes([word[0], word.get(1).copied().unwrap_or(0)]);
        let (sum, carry) = sum.overflowing_add(word);
        sum + u16::from(carry)
    })
}

/// The header that makes a TCP segment a TSO frame.
pub(crate) fn tso(mut header: Header) -> Header {
    header.set_gso_type(GSO_TCPV4);
    header.set_gso_size(1448);
    header.set_hdr_len(TCP_HEADERS as u16);
    header
}

/// A frame that shows whether the guest is reached. The kernel chooses the queue of a TAP by addresses
/// and ports, with a key of its own: some of these flows arrive on each queue.
pub(crate) fn probe(flow: u8) -> Vec<u8> {
    let (_, mut frame) = tcp(6, 0xff);
    frame[26] = flow;
    frame[34..38].copy_from_slice(&[flow, 9, 0, 9]);
    frame
}

/// Whether a frame is a [`probe`].
pub(crate) fn is_probe(frame: &[u8]) -> bool {
    frame.get(26).is_some_and(|&flow| frame == probe(flow))
}
