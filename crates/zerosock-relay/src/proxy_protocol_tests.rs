//! The header byte for byte, as section 2.2 of the specification of the PROXY protocol lays it out.

use super::*;

/// What a reader that follows the specification finds in a header.
#[derive(Debug, Eq, PartialEq)]
struct Read {
    command: u8,
    family: u8,
    addresses: Vec<u8>,
    tlvs: Vec<(u8, Vec<u8>)>,
}

/// Reads a header; fails if it does not end where it says.
fn read(header: &[u8]) -> Read {
    let (signature, rest) = header.split_at(12);
    assert_eq!(
        signature,
        [
            0x0d, 0x0a, 0x0d, 0x0a, 0x00, 0x0d, 0x0a, 0x51, 0x55, 0x49, 0x54, 0x0a
        ]
    );
    let &[version_command, family, high, low, ref body @ ..] = rest else {
        panic!("a header of {} bytes", header.len());
    };
    assert_eq!(version_command >> 4, 2);
    assert_eq!(usize::from(high) << 8 | usize::from(low), body.len());
    // Section 2.2: the length of the addresses by family; TLVs follow.
    let length = match family {
        0x00 => 0,
        0x11 => 12,
        0x21 => 36,
        other => panic!("family {other:#x}"),
    };
    let (addresses, mut rest) = body.split_at(length);
    let mut tlvs = Vec::new();
    while let [kind, high, low, value @ ..] = rest {
        let (value, after) = value.split_at(usize::from(*high) << 8 | usize::from(*low));
        tlvs.push((*kind, value.to_vec()));
        rest = after;
    }
    assert!(rest.is_empty());
    Read {
        command: version_command & 0xf,
        family,
        addresses: addresses.to_vec(),
        tlvs,
    }
}

#[test]
fn a_vsock_source_is_a_tlv_behind_no_address() {
    let source = Source::Vsock {
        cid: 0x0102_0304,
        port: 0xfffe_fdfc,
        to_port: 8080,
    };
    let header = header(source, Some("10.0.0.1:80".parse().unwrap()));
    #[rustfmt::skip]
    let expected = [
        0x0d, 0x0a, 0x0d, 0x0a, 0x00, 0x0d, 0x0a, 0x51, 0x55, 0x49, 0x54, 0x0a,
        0x21, 0x00, 0x00, 0x0f,
        0xe0, 0x00, 0x0c, 0x01, 0x02, 0x03, 0x04, 0xff, 0xfe, 0xfd, 0xfc, 0x00, 0x00, 0x1f, 0x90,
    ];
    assert_eq!(header, expected);
    let found = read(&header);
    assert_eq!((found.command, found.family), (1, 0));
    assert_eq!(found.tlvs, [(0xe0, expected[19..].to_vec())]);
}

#[test]
fn ipv4_clients_have_the_block_of_af_inet() {
    let found = read(&header(
        Source::Ip("192.0.2.1:50000".parse().unwrap()),
        Some("198.51.100.7:443".parse().unwrap()),
    ));
    assert_eq!(
        found,
        Read {
            command: 1,
            family: 0x11,
            addresses: vec![192, 0, 2, 1, 198, 51, 100, 7, 0xc3, 0x50, 0x01, 0xbb],
            tlvs: Vec::new(),
        }
    );
}

#[test]
fn ipv6_clients_have_the_block_of_af_inet6() {
    let found = read(&header(
        Source::Ip("[2001:db8::1]:1".parse().unwrap()),
        Some("[2001:db8::2]:65535".parse().unwrap()),
    ));
    let mut expected = vec![0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    expected.extend([0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
    expected.extend([0, 1, 0xff, 0xff]);
    assert_eq!((found.command, found.family), (1, 0x21));
    assert_eq!(found.addresses, expected);
}

#[test]
fn mapped_addresses_are_ipv4_and_mixed_families_are_mapped() {
    let listener = "[::]:80".parse().unwrap();
    let mapped = Source::Ip("[::ffff:192.0.2.1]:7".parse().unwrap());
    let both = read(&header(
        mapped,
        Some("[::ffff:192.0.2.2]:80".parse().unwrap()),
    ));
    assert_eq!(both.family, 0x11);
    assert_eq!(both.addresses, [192, 0, 2, 1, 192, 0, 2, 2, 0, 7, 0, 80]);

    let mixed = read(&header(mapped, Some(listener)));
    assert_eq!(mixed.family, 0x21);
    let mut expected = vec![0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1];
    expected.extend([0; 16]);
    expected.extend([0, 7, 0, 80]);
    assert_eq!(mixed.addresses, expected);
}

#[test]
fn an_unknown_destination_is_unspecified_in_the_family_of_the_client() {
    let v4 = read(&header(Source::Ip("192.0.2.1:7".parse().unwrap()), None));
    assert_eq!(v4.family, 0x11);
    assert_eq!(v4.addresses, [192, 0, 2, 1, 0, 0, 0, 0, 0, 7, 0, 0]);
    let v6 = read(&header(
        Source::Ip("[2001:db8::1]:7".parse().unwrap()),
        None,
    ));
    assert_eq!((v6.family, v6.addresses.len()), (0x21, 36));
}

#[test]
fn a_local_source_has_the_command_local_and_nothing_else() {
    let found = read(&header(Source::Local, None));
    assert_eq!((found.command, found.family), (0, 0));
    assert!(found.addresses.is_empty() && found.tlvs.is_empty());
}
