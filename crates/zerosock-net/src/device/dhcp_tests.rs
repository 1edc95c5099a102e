//! Which checksums are completed, against sums by the definition of RFC 768.

use std::os::fd::OwnedFd;

use proptest::prelude::*;
use zerosock_proto::wire::net::{Checksum, Gso, Repr, Segments};
use zerosock_ring::{GuestSlice, Memory, RegionConfig};
use zerosock_sys::memfd;

use super::dhcp::complete;

/// A frame to be made.
#[derive(Clone)]
struct Made {
    tags: Vec<[u8; 4]>,
    /// Bytes of options of IPv4.
    options: usize,
    port: u16,
    payload: usize,
    /// Bytes behind the packet.
    padding: usize,
}

impl Default for Made {
    fn default() -> Made {
        Made {
            tags: Vec::new(),
            options: 0,
            port: 67,
            payload: 300,
            padding: 0,
        }
    }
}

impl Made {
    /// The frame, and where its UDP header begins.
    fn make(&self) -> (Vec<u8>, usize) {
        let mut frame = vec![0xff; 6];
        frame.extend([0x52, 0x54, 0, 0, 0, 1]);
        self.tags.iter().for_each(|tag| frame.extend(tag));
        frame.extend([8, 0]);
        let (udp_len, header_len) = (8 + self.payload, 20 + self.options);
        frame.push(0x40 | (header_len / 4) as u8);
        frame.push(0x10);
        frame.extend(((header_len + udp_len) as u16).to_be_bytes());
        frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
        frame.extend([10, 9, 0, 1, 10, 9, 0, 200]);
        frame.extend(vec![1; self.options]);
        let start = frame.len();
        frame.extend(self.port.to_be_bytes());
        frame.extend(68_u16.to_be_bytes());
        frame.extend((udp_len as u16).to_be_bytes());
        // The sum of the pseudo header is here.
        frame.extend([0xab, 0xcd]);
        frame.extend((0..self.payload).map(|at| (at * 37 + 11) as u8));
        frame.extend(vec![0xee; self.padding]);
        (frame, start)
    }
}

/// Whether the sum over pseudo header and packet is that of an intact one, and not the one that says
/// that there is none.
fn is_intact(frame: &[u8], start: usize, addresses: usize, payload: usize) -> bool {
    let udp_len = 8 + payload;
    let mut bytes = frame[addresses..addresses + 8].to_vec();
    bytes.extend([0, 17]);
    bytes.extend((udp_len as u16).to_be_bytes());
    bytes.extend(&frame[start..start + udp_len]);
    bytes.resize(bytes.len().next_multiple_of(2), 0);
    let sum = bytes.chunks_exact(2).fold(0_u64, |sum, word| {
        sum + 256 * u64::from(word[0]) + u64::from(word[1])
    });
    // Ones' complement arithmetic is that modulo 0xffff.
    sum % 0xffff == 0 && frame[start + 6..start + 8] != [0, 0]
}

fn partial(start: usize, offset: u16) -> Repr {
    Repr {
        checksum: Checksum::Partial {
            start: start as u16,
            offset,
        },
        gso: None,
    }
}

/// What becomes of a frame in slices of these lengths and the rest behind them.
fn completed(frame: &[u8], mut repr: Repr, lens: &[usize]) -> (Repr, Vec<u8>) {
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len: 16 << 10,
        fd_offset: 0,
    };
    let file: OwnedFd = memfd::create("guest", region.len, true).unwrap();
    let memory = Memory::map(vec![(file, region)]).unwrap();
    let mut pieces = Vec::new();
    memory.translate(0, 16 << 10, &mut pieces).unwrap();
    let all = memory.slice(pieces[0]).unwrap();
    let (mut left, mut at) = (frame, 1);
    let mut slices: Vec<GuestSlice<'_>> = Vec::new();
    for len in lens {
        let (now, later) = left.split_at(left.len().min(*len));
        slices.push(all.part(at, now.len()));
        all.write(at, now);
        (left, at) = (later, at + now.len() + 3);
    }
    let mut rest = left.to_vec();
    rest.resize(4096, 0);
    complete(&mut repr, frame.len(), &slices, &mut rest);
    let mut after = Vec::new();
    for slice in slices {
        let mut bytes = vec![0; slice.len()];
        slice.read(0, &mut bytes);
        after.extend(bytes);
    }
    after.extend(&rest[..left.len()]);
    (repr, after)
}

#[test]
fn replies_of_dhcp_servers_get_a_complete_checksum_wherever_they_lie() {
    let tag = [0x81, 0x00, 0, 5];
    for made in [
        Made::default(),
        Made {
            payload: 301,
            ..Made::default()
        },
        Made {
            tags: vec![tag],
            ..Made::default()
        },
        Made {
            tags: vec![[0x88, 0xa8, 0, 7], tag],
            options: 12,
            ..Made::default()
        },
        Made {
            options: 40,
            payload: 0,
            padding: 7,
            ..Made::default()
        },
    ] {
        let (frame, start) = made.make();
        for lens in [
            &[4096][..],
            &[],
            &[14],
            &[start, 1, 1],
            &[start + 7, 9, 100],
        ] {
            let (repr, after) = completed(&frame, partial(start, 6), lens);
            assert_eq!(repr, Repr::PLAIN);
            let addresses = start - made.options - 8;
            assert!(
                is_intact(&after, start, addresses, made.payload),
                "{lens:?}"
            );
            let others = |frame: &[u8]| [&frame[..start + 6], &frame[start + 8..]].concat();
            assert_eq!(others(&after), others(&frame), "only the checksum changes");
        }
    }
}

/// 0 says that there is no checksum, and 0xffff is the same sum.
#[test]
fn a_sum_of_zero_is_stored_as_its_other_form() {
    let made = Made {
        payload: 2,
        ..Made::default()
    };
    let (mut frame, start) = made.make();
    frame[start + 8..].fill(0);
    let (_, after) = completed(&frame, partial(start, 6), &[]);
    // The payload that makes the whole sum 0.
    frame[start + 8..].copy_from_slice(&after[start + 6..start + 8]);
    let (_, after) = completed(&frame, partial(start, 6), &[]);
    assert_eq!(after[start + 6..start + 8], [0xff, 0xff]);
}

#[test]
fn all_other_frames_pass_unchanged() {
    let (frame, start) = Made::default().make();
    let changed = |at: usize, byte: u8| {
        let mut frame = frame.clone();
        assert_ne!(frame[at], byte);
        frame[at] = byte;
        frame
    };
    let of = |made: Made| made.make().0;
    let gso = Gso {
        kind: Segments::Tcp4,
        ecn: false,
        size: 1000,
        hdr_len: 42,
    };
    let check = |what: &str, frame: &[u8], repr: Repr| {
        let (after_repr, after) = completed(frame, repr, &[64, 64]);
        assert_eq!((after_repr, &after[..]), (repr, frame), "{what}");
    };
    let repr = partial(start, 6);
    for (what, frame) in [
        (
            "another port",
            of(Made {
                port: 53,
                ..Made::default()
            }),
        ),
        (
            "a longer frame",
            of(Made {
                payload: 2100,
                ..Made::default()
            }),
        ),
        ("IPv6", changed(12, 0x86)),
        ("version 6", changed(14, 0x65)),
        ("options in the place of UDP", changed(14, 0x46)),
        ("less than an IPv4 header", changed(14, 0x44)),
        ("TCP", changed(23, 6)),
        ("more fragments", changed(20, 0x20)),
        ("the last fragment", changed(21, 1)),
        ("a shorter IP packet", changed(16, 0)),
        ("a longer UDP packet", changed(start + 4, 9)),
        ("less than a UDP header", changed(start + 5, 7)),
    ] {
        check(what, &frame, repr);
    }
    check("another place", &frame, partial(start, 4));
    check("a start elsewhere", &frame, partial(start + 2, 6));
    check("no partial checksum", &frame, Repr::PLAIN);
    check(
        "TSO",
        &frame,
        Repr {
            gso: Some(gso),
            ..repr
        },
    );
    let three = vec![[0x81, 0, 0, 1]; 3];
    let (frame, start) = Made {
        tags: three,
        ..Made::default()
    }
    .make();
    check("three tags", &frame, partial(start, 6));
}

proptest! {
    /// Only the two bytes of a checksum that is in the frame ever change.
    #[test]
    fn no_frame_is_changed_elsewhere(
        changes in prop::collection::vec((0..80_usize, any::<u8>()), 0..6),
        start in 0..400_usize,
        len in 0..360_usize,
        cut in 0..400_usize,
        keeps_start in any::<bool>(),
    ) {
        let (mut frame, udp) = Made::default().make();
        changes.into_iter().for_each(|(at, byte)| frame[at] = byte);
        frame.truncate(len);
        let start = if keeps_start { udp } else { start };
        let (repr, mut after) = completed(&frame, partial(start, 6), &[cut, 1]);
        if repr == Repr::PLAIN {
            after[start + 6..start + 8].copy_from_slice(&frame[start + 6..start + 8]);
        }
        prop_assert_eq!(after, frame);
    }
}
