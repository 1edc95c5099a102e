//! virtio-net headers: what `parse` accepts is inside the frame and was negotiated.

use proptest::prelude::*;
use zerosock_proto::wire::net::{
    COMMAND_LEN, Checksum, Command, Config, DATA_VALID, ETHERNET_LEN, F_CSUM, F_GUEST_CSUM,
    F_GUEST_ECN, F_GUEST_TSO4, F_GUEST_TSO6, F_HOST_ECN, F_HOST_TSO4, F_HOST_TSO6, GSO_ECN,
    GSO_NONE, GSO_TCPV4, GSO_TCPV6, HEADER_LEN, Header, HeaderError, Mac, NEEDS_CSUM, Offloads,
    Repr, Segments,
};

const ALL: Offloads = Offloads {
    csum: true,
    tso4: true,
    tso6: true,
    ecn: true,
};

/// A valid header of a TSO frame of 3000 bytes.
fn tso() -> Header {
    let mut header = Header::default();
    header.set_flags(NEEDS_CSUM);
    header.set_gso_type(GSO_TCPV4);
    header.set_hdr_len(54);
    header.set_gso_size(1448);
    header.set_csum_start(34);
    header.set_csum_offset(16);
    header
}

fn offloads() -> impl Strategy<Value = Offloads> {
    any::<u64>().prop_map(Offloads::of_device)
}

proptest! {
    #[test]
    fn an_accepted_header_fits_its_frame_and_what_was_negotiated(
        bytes in any::<[u8; HEADER_LEN]>(),
        // Small numbers, so that many headers are accepted.
        fields in any::<(u8, u8, u8, u8)>(),
        narrow in any::<bool>(),
        len in ETHERNET_LEN..4096,
        offloads in offloads(),
    ) {
        let mut header = Header(bytes);
        if narrow {
            let (flags, kind, start, offset) = fields;
            header.set_flags(flags & 3);
            header.set_gso_type([0, 1, 4, 3, 5, 0x80, 0x81, 0x84][usize::from(kind % 8)]);
            header.set_csum_start(start.into());
            header.set_csum_offset(offset.into());
            header.set_hdr_len(kind.into());
        }
        let Ok(repr) = Repr::parse(&header, len, offloads) else {
            return Ok(());
        };
        if let Checksum::Partial { start, offset } = repr.checksum {
            prop_assert!(offloads.csum);
            prop_assert!(usize::from(start) >= ETHERNET_LEN);
            prop_assert!(usize::from(start) + usize::from(offset) + 2 <= len);
        }
        if let Some(gso) = repr.gso {
            let partial = matches!(repr.checksum, Checksum::Partial { .. });
            prop_assert!(partial && gso.size > 0 && usize::from(gso.hdr_len) <= len);
            prop_assert!(!gso.ecn || offloads.ecn);
            let negotiated = match gso.kind {
                Segments::Tcp4 => offloads.tso4,
                Segments::Tcp6 => offloads.tso6,
            };
            prop_assert!(negotiated);
        }
        // Emitting keeps the meaning, and nothing else.
        let again = repr.emit();
        prop_assert_eq!(Repr::parse(&again, len, offloads), Ok(repr));
        prop_assert_eq!(again.num_buffers(), 0);
        prop_assert_eq!(again.flags() & !(NEEDS_CSUM | DATA_VALID), 0);
    }

    #[test]
    fn commands_of_any_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..=COMMAND_LEN), len in 0usize..100) {
        let known = Command::parse(&bytes, len);
        if let Some(Command::QueuePairs(pairs)) = known {
            prop_assert!(pairs > 0);
        }
    }
}

#[test]
fn fields_are_at_the_offsets_of_the_specification() {
    let mut header = tso();
    header.set_num_buffers(0x0302);
    assert_eq!(header.0, [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 2, 3]);
}

#[test]
fn each_lie_is_refused_with_its_reason() {
    let parse = |change: fn(&mut Header), len, offloads| {
        let mut header = tso();
        change(&mut header);
        Repr::parse(&header, len, offloads)
    };
    assert!(parse(|_| {}, 3000, ALL).is_ok());
    let outside = |start, offset, len| HeaderError::ChecksumOutside { start, offset, len };
    let refused = [
        (
            parse(|h| h.set_csum_start(13), 3000, ALL),
            outside(13, 16, 3000),
        ),
        (
            parse(|h| h.set_csum_start(2983), 3000, ALL),
            outside(2983, 16, 3000),
        ),
        (
            parse(|h| h.set_csum_offset(u16::MAX), 3000, ALL),
            outside(34, u16::MAX, 3000),
        ),
        (
            parse(|h| h.set_gso_size(0), 3000, ALL),
            HeaderError::GsoSize,
        ),
        (
            parse(|h| h.set_hdr_len(3001), 3000, ALL),
            HeaderError::HeadersTooLong(3001, 3000),
        ),
        (
            parse(|h| h.set_flags(0), 3000, ALL),
            HeaderError::GsoWithoutChecksum,
        ),
        // Where UDP has it: found by the fuzz target `frame`.
        (
            parse(|h| h.set_csum_offset(6), 3000, ALL),
            HeaderError::GsoChecksum(6),
        ),
        (
            parse(|h| h.set_gso_type(3), 3000, ALL),
            HeaderError::GsoNotNegotiated(3),
        ),
        (
            parse(|h| h.set_gso_type(GSO_ECN), 3000, ALL),
            HeaderError::GsoNotNegotiated(GSO_ECN),
        ),
    ];
    for (result, error) in refused {
        assert_eq!(result, Err(error));
    }
    // The last place where both bytes of a checksum fit.
    assert!(parse(|h| h.set_csum_start(2982), 3000, ALL).is_ok());
    let without = |offloads| parse(|_| {}, 3000, offloads);
    assert_eq!(
        without(Offloads { csum: false, ..ALL }),
        Err(HeaderError::ChecksumNotNegotiated)
    );
    assert_eq!(
        without(Offloads { tso4: false, ..ALL }),
        Err(HeaderError::GsoNotNegotiated(GSO_TCPV4))
    );
    let ecn = parse(
        |h| h.set_gso_type(GSO_TCPV6 | GSO_ECN),
        3000,
        Offloads { ecn: false, ..ALL },
    );
    assert_eq!(ecn, Err(HeaderError::GsoNotNegotiated(GSO_TCPV6 | GSO_ECN)));
}

#[test]
fn unknown_flags_and_fields_without_a_meaning_are_dropped() {
    let mut header = tso();
    header.set_flags(0xfc);
    header.set_gso_type(GSO_NONE);
    let repr = Repr::parse(&header, 60, Offloads::default()).unwrap();
    assert_eq!((repr.checksum, repr.gso), (Checksum::Complete, None));
    assert_eq!(repr.emit(), Header::default());
}

#[test]
fn tso_without_checksums_and_ecn_without_tso_do_not_count() {
    let driver = |features| Offloads::of_driver(features);
    assert_eq!(
        driver(F_GUEST_TSO4 | F_GUEST_TSO6 | F_GUEST_ECN),
        Offloads::default()
    );
    assert!(!driver(F_GUEST_CSUM | F_GUEST_ECN).ecn);
    assert_eq!(
        driver(F_GUEST_CSUM | F_GUEST_TSO4 | F_GUEST_TSO6 | F_GUEST_ECN),
        ALL
    );
    assert_eq!(
        Offloads::of_device(F_CSUM | F_HOST_TSO4 | F_HOST_TSO6 | F_HOST_ECN),
        ALL
    );
}

#[test]
fn commands_are_known_by_class_number_and_length() {
    assert_eq!(Command::parse(&[0, 0, 1], 3), Some(Command::ReceiveMode));
    assert_eq!(Command::parse(&[0, 1, 0], 3), Some(Command::ReceiveMode));
    assert_eq!(Command::parse(&[3, 0], 2), Some(Command::AnnounceAck));
    assert_eq!(
        Command::parse(&[4, 0, 2, 0], 4),
        Some(Command::QueuePairs(2))
    );
    assert_eq!(
        Command::parse(&[1, 0, 1, 0], 2 + 4 + 6 + 4),
        Some(Command::MacTable)
    );
    for (bytes, len) in [
        (&[0, 2, 1][..], 3),
        (&[0, 0, 2], 3),
        (&[0, 0], 2),
        (&[3, 0], 3),
        (&[3, 1], 2),
        (&[4, 0, 0, 0], 4),
        (&[4, 0, 1, 0], 5),
        (&[1, 0, 1, 0], 2 + 4 + 5 + 4),
        (&[1, 1, 0, 0], 8),
        (&[], 0),
    ] {
        assert_eq!(Command::parse(bytes, len), None, "{bytes:?}");
    }
}

#[test]
fn addresses_are_read_and_written() {
    let mac: Mac = "52:54:00:12:34:5F".parse().unwrap();
    assert_eq!(mac.to_string(), "52:54:00:12:34:5f");
    for text in [
        "",
        "52:54:00:12:34",
        "52:54:00:12:34:5f:00",
        "53:54:00:12:34:5f",
        "00:00:00:00:00:00",
        "52:54:0:12:34:56",
        "+2:54:00:12:34:56",
    ] {
        assert!(text.parse::<Mac>().is_err(), "{text}");
    }
    let config = Config {
        mac,
        link_up: true,
        announce: false,
        max_queue_pairs: 2,
        mtu: 1500,
    };
    assert_eq!(
        config.emit(),
        [0x52, 0x54, 0, 0x12, 0x34, 0x5f, 1, 0, 2, 0, 0xdc, 5]
    );
    let config = Config {
        announce: true,
        ..config
    };
    assert_eq!(config.emit()[Config::STATUS], [3, 0]);
    assert_eq!(Config::parse(&config.emit()), config);
}
