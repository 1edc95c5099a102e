//! Unit tests of `software`.

use super::*;
use zerosock_proto::wire::net::{ETHERNET_LEN, GSO_TCPV6, NEEDS_CSUM};

/// A frame of TCP over IPv6 in segments of one byte, with the TCP header at `start`.
fn tso(start: usize, payload: usize) -> (Header, Vec<u8>) {
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
    (header, frame)
}

/// How many segments it has.
fn segments(start: usize, payload: usize) -> Option<usize> {
    let (header, frame) = tso(start, payload);
    let mut out = Copies::default();
    convert(&header, &frame, Offloads::default(), &mut out)?;
    Some(out.len())
}

#[test]
fn the_headers_that_each_segment_repeats_are_bounded() {
    assert_eq!(segments(ETHERNET_LEN + IPV6_LEN, 200), Some(200));
    assert_eq!(segments(MAX_HEADERS - TCP_LEN, 200), Some(200));
    assert_eq!(segments(MAX_HEADERS - TCP_LEN + 1, 200), None);
    assert_eq!(segments(60_000, 200), None);
}

#[test]
fn the_number_of_segments_is_known_before_a_frame_is_cut() {
    let start = ETHERNET_LEN + IPV6_LEN;
    for (payload, wanted) in [(0, 1), (1, 1), (200, 200), (256, 256), (257, 256)] {
        let (mut header, frame) = tso(start, payload);
        let cut = |header: &Header, offloads| cut(header, frame.len(), offloads);
        let longest = (start + TCP_LEN + payload).min(start + MAX_TCP_LEN + 1);
        assert_eq!(cut(&header, Offloads::default()), (wanted, longest));
        assert_eq!(cut(&header, Offloads::ALL), (1, frame.len()));
        if payload <= MAX_SEGMENTS {
            assert_eq!(segments(start, payload), Some(wanted));
        }
        // The length of the headers that a sender claims changes nothing.
        header.set_hdr_len(frame.len() as u16);
        assert_eq!(cut(&header, Offloads::default()).0, wanted);
        header.set_gso_type(0);
        assert_eq!(cut(&header, Offloads::default()), (1, frame.len()));
    }
}

/// Found by the fuzz target `frame`.
#[test]
fn segments_with_options_are_as_long_as_announced() {
    let start = ETHERNET_LEN + IPV6_LEN;
    let (header, mut frame) = tso(start, 100);
    frame[start + DATA_OFFSET] = 15 << 4;
    let mut out = Copies::default();
    convert(&header, &frame, Offloads::default(), &mut out).unwrap();
    let (segments, longest) = cut(&header, frame.len(), Offloads::default());
    assert!(out.len() <= segments);
    assert_eq!(out.first().unwrap().1.len(), longest);
}
