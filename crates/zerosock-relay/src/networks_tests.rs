//! Networks as text, and the matrix of policies: each denied network with its first and last address and
//! the addresses around it, in every form that leads to it.

use super::*;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn networks(texts: &[&str]) -> Vec<Network> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
fn networks_are_parsed_and_written_in_one_form() {
    for (text, written) in [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.0.0.1", "10.0.0.1/32"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("::/0", "::/0"),
        ("2001:db8::1", "2001:db8::1/128"),
        ("FE80::/10", "fe80::/10"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("::ffff:10.0.0.1", "10.0.0.1/32"),
        ("::ffff:0:0/96", "0.0.0.0/0"),
    ] {
        let network: Network = text.parse().unwrap();
        assert_eq!(network.to_string(), written);
        assert_eq!(written.parse(), Ok(network));
    }
    for (text, reason) in [
        ("", "is no network"),
        ("example.com", "is no network"),
        ("10.0.0.0/", "is no prefix"),
        ("10.0.0.0/+8", "is no prefix"),
        ("10.0.0.0/-1", "is no prefix"),
        ("10.0.0.0/256", "is no prefix"),
        ("10.0.0.0/33", "more than 32 bits"),
        ("::/129", "more than 128 bits"),
        ("10.0.0.1/8", "write 10.0.0.0/8"),
        ("2001:db8::1/64", "write 2001:db8::/64"),
        ("1.0.0.0/0", "write 0.0.0.0/0"),
        // Neither an IPv4 network nor free of bits behind the prefix.
        ("::ffff:0:0/90", "bits behind its prefix"),
    ] {
        let error = text.parse::<Network>().unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
}

#[test]
fn networks_contain_their_first_to_their_last_address() {
    for (network, inside, outside) in [
        (
            "10.0.0.0/8",
            ["10.0.0.0", "10.255.255.255"],
            ["9.255.255.255", "11.0.0.0"],
        ),
        (
            "10.1.2.3",
            ["10.1.2.3", "::ffff:10.1.2.3"],
            ["10.1.2.2", "10.1.2.4"],
        ),
        ("0.0.0.0/0", ["0.0.0.0", "255.255.255.255"], ["::", "::1"]),
        ("::/0", ["::", "ffff::ffff"], ["0.0.0.0", "::ffff:1.2.3.4"]),
        (
            "fc00::/7",
            ["fc00::", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"],
            ["fbff::", "fe00::"],
        ),
        (
            "2001:db8::/33",
            ["2001:db8::", "2001:db8:7fff::"],
            ["2001:db8:8000::", "2001:db7::"],
        ),
    ] {
        let parsed: Network = network.parse().unwrap();
        for address in inside {
            assert!(parsed.contains(ip(address)), "{address} in {network}");
        }
        for address in outside {
            assert!(!parsed.contains(ip(address)), "{address} not in {network}");
        }
    }
}

/// A network that guests are denied by default: its name, first and last address, and the reason.
const DENIED: [(&str, &str, &str, DenyReason); 13] = [
    (
        "127.0.0.0/8",
        "127.0.0.0",
        "127.255.255.255",
        DenyReason::Loopback,
    ),
    ("::1", "::1", "::1", DenyReason::Loopback),
    (
        "0.0.0.0/8",
        "0.0.0.0",
        "0.255.255.255",
        DenyReason::Unspecified,
    ),
    ("::", "::", "::", DenyReason::Unspecified),
    (
        "169.254.0.0/16",
        "169.254.0.0",
        "169.254.255.255",
        DenyReason::LinkLocal,
    ),
    (
        "fe80::/10",
        "fe80::",
        "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        DenyReason::LinkLocal,
    ),
    (
        "168.63.129.16",
        "168.63.129.16",
        "168.63.129.16",
        DenyReason::Metadata,
    ),
    (
        "100.100.100.200",
        "100.100.100.200",
        "100.100.100.200",
        DenyReason::Metadata,
    ),
    (
        "fd00:ec2::254",
        "fd00:ec2::254",
        "fd00:ec2::254",
        DenyReason::Metadata,
    ),
    (
        "fd20:ce::254",
        "fd20:ce::254",
        "fd20:ce::254",
        DenyReason::Metadata,
    ),
    (
        "224.0.0.0/4",
        "224.0.0.0",
        "239.255.255.255",
        DenyReason::Multicast,
    ),
    (
        "ff00::/8",
        "ff00::",
        "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        DenyReason::Multicast,
    ),
    (
        "255.255.255.255",
        "255.255.255.255",
        "255.255.255.255",
        DenyReason::Broadcast,
    ),
];

/// All IPv6 addresses that lead to an IPv4 address.
fn ipv6_forms(address: Ipv4Addr) -> Vec<Ipv6Addr> {
    let [a, b, c, d] = address.octets();
    let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
    vec![
        address.to_ipv6_mapped(),
        Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, high, low),
        Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
        Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 0),
        Ipv6Addr::new(0x2002, high, low, 1, 2, 3, 4, 5),
        Ipv6Addr::new(0x2001, 0, 0x4136, 0xe378, 0x8000, 0x63bf, !high, !low),
        // The server of Teredo, whose client is 8.8.8.8.
        Ipv6Addr::new(0x2001, 0, high, low, 0, 0, !0x808, !0x808),
        Ipv6Addr::new(0x2003, 1, 2, 3, 0, 0x5efe, high, low),
        Ipv6Addr::new(0x2003, 1, 2, 3, 0x200, 0x5efe, high, low),
    ]
}

#[test]
fn guests_are_denied_each_network_from_its_first_to_its_last_address_in_every_form() {
    let policy = AddressPolicy::for_guests(Vec::new(), Vec::new());
    for (network, first, last, reason) in DENIED {
        for address in [ip(first), ip(last)] {
            assert_eq!(
                policy.check(address),
                Err(Denied { address, reason }),
                "{network}"
            );
            let IpAddr::V4(v4) = address else { continue };
            for form in ipv6_forms(v4).into_iter().map(IpAddr::V6) {
                let denied = policy.check(form).unwrap_err();
                assert_eq!((denied.address, denied.reason), (form, reason), "{network}");
            }
        }
    }
    // IPv4-compatible, where `::` and `::1` are addresses of their own.
    for (address, reason) in [
        ("::127.0.0.1", DenyReason::Loopback),
        ("::169.254.169.254", DenyReason::LinkLocal),
        ("::0.0.0.2", DenyReason::Unspecified),
        ("64:ff9b:1::", DenyReason::LocalNat64),
        ("64:ff9b:1:ffff:ffff:ffff:ffff:ffff", DenyReason::LocalNat64),
    ] {
        assert_eq!(
            policy.check(ip(address)).unwrap_err().reason,
            reason,
            "{address}"
        );
    }
}

#[test]
fn guests_may_reach_the_addresses_before_and_behind_each_denied_network() {
    let policy = AddressPolicy::for_guests(Vec::new(), Vec::new());
    for address in [
        "126.255.255.255",
        "128.0.0.0",
        "1.0.0.0",
        "169.253.255.255",
        "169.255.0.0",
        "168.63.129.15",
        "168.63.129.17",
        "100.100.100.199",
        "100.100.100.201",
        "223.255.255.255",
        "240.0.0.0",
        "255.255.255.254",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.0.1",
        "8.8.8.8",
    ] {
        assert_eq!(policy.check(ip(address)), Ok(()), "{address}");
        let IpAddr::V4(v4) = ip(address) else {
            unreachable!()
        };
        for form in ipv6_forms(v4) {
            assert_eq!(policy.check(form.into()), Ok(()), "{form}");
        }
    }
    for address in [
        "fe7f:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        "fec0::",
        "feff::",
        "fd00:ec2::253",
        "fd00:ec2::255",
        "fd20:ce::253",
        "2001:db8::1",
        "fc00::1",
        "64:ff9b:2::",
        "64:ff9a:ffff::7f00:1",
        "2001:1::7f00:1",
        "2003:7f00:1::",
    ] {
        assert_eq!(policy.check(ip(address)), Ok(()), "{address}");
    }
}

#[test]
fn deny_comes_before_allow_and_allow_before_the_default() {
    let policy = AddressPolicy::for_guests(
        networks(&["127.0.0.0/8", "10.0.0.0/8", "fd00:ec2::254"]),
        networks(&["127.0.0.2", "10.9.0.0/16", "2001:db8::/32"]),
    );
    let listed = |text: &str| DenyReason::Listed(text.parse().unwrap());
    for (address, reason) in [
        ("127.0.0.1", None),
        ("127.0.0.2", Some(listed("127.0.0.2"))),
        ("::ffff:127.0.0.2", Some(listed("127.0.0.2"))),
        ("64:ff9b::127.0.0.2", Some(listed("127.0.0.2"))),
        ("64:ff9b::127.0.0.1", Some(DenyReason::Loopback)),
        ("::ffff:127.0.0.1", None),
        ("10.9.0.0", Some(listed("10.9.0.0/16"))),
        ("10.9.255.255", Some(listed("10.9.0.0/16"))),
        ("10.8.0.0", None),
        ("2001:db8::1", Some(listed("2001:db8::/32"))),
        ("fd00:ec2::254", None),
        ("::1", Some(DenyReason::Loopback)),
        ("169.254.169.254", Some(DenyReason::LinkLocal)),
        ("8.8.8.8", None),
    ] {
        let found = policy.check(ip(address)).err().map(|denied| denied.reason);
        assert_eq!(found, reason, "{address}");
    }
}

#[test]
fn a_network_for_an_ipv6_form_decides_about_that_form_only() {
    let allow = AddressPolicy::for_guests(networks(&["64:ff9b::/96"]), Vec::new());
    assert_eq!(allow.check(ip("64:ff9b::127.0.0.1")), Ok(()));
    assert!(allow.check(ip("127.0.0.1")).is_err());
    let deny = AddressPolicy::for_guests(Vec::new(), networks(&["2002::/16"]));
    assert!(deny.check(ip("2002:808:808::")).is_err());
    assert_eq!(deny.check(ip("8.8.8.8")), Ok(()));
}

#[test]
fn an_address_in_the_rule_itself_is_denied_by_deny_only() {
    let policy = AddressPolicy::for_guests(Vec::new(), networks(&["127.0.0.2"]));
    for (_, first, last, _) in DENIED {
        assert_eq!(policy.check_literal(ip(first)), Ok(()));
        assert_eq!(policy.check_literal(ip(last)), Ok(()));
    }
    assert!(policy.check_literal(ip("127.0.0.2")).is_err());
    assert!(policy.check_literal(ip("::ffff:127.0.0.2")).is_err());
}

#[test]
fn clients_need_a_listed_network_if_there_is_a_list() {
    let open = AddressPolicy::for_clients(Vec::new(), networks(&["10.0.0.0/8"]));
    assert_eq!(open.check(ip("127.0.0.1")), Ok(()));
    assert_eq!(open.check(ip("8.8.8.8")), Ok(()));
    assert!(open.check(ip("10.0.0.1")).is_err());

    let listed = AddressPolicy::for_clients(networks(&["10.0.0.0/8"]), networks(&["10.9.0.0/16"]));
    assert_eq!(listed.check(ip("10.0.0.1")), Ok(()));
    assert_eq!(listed.check(ip("::ffff:10.0.0.1")), Ok(()));
    assert!(listed.check(ip("10.9.0.1")).is_err());
    let reason = listed.check(ip("127.0.0.1")).unwrap_err().reason;
    assert_eq!(reason, DenyReason::NotListed);
}

/// The holder of an IPv6 address need not have the IPv4 address in it.
#[test]
fn an_embedded_ipv4_address_permits_no_client() {
    let policy = AddressPolicy::for_clients(networks(&["10.0.0.0/8", "2002:b00::/24"]), Vec::new());
    for (address, is_permitted) in [
        ("10.0.0.1", true),
        ("::ffff:10.0.0.1", true),
        ("::10.0.0.1", false),
        ("::ffff:0:10.0.0.1", false),
        ("2002:a00::", false),
        ("2002:a00:1::1", false),
        ("2002:aff:ffff::", false),
        ("64:ff9b::10.0.0.1", false),
        ("64:ff9b:1::10.0.0.1", false),
        ("64:ff9b:1:a00:0:100::", false),
        // Teredo: the address inverted.
        ("2001::f5ff:fffe", false),
        // Permitted by themselves.
        ("2002:b00:1::1", true),
    ] {
        let found = policy.check(ip(address)).is_ok();
        assert_eq!(found, is_permitted, "{address}");
    }
    // Denials count for both.
    let denied = networks(&["10.9.0.0/16"]);
    let policy = AddressPolicy::for_clients(networks(&["::/0"]), denied);
    assert!(policy.check(ip("2002:a09:1::1")).is_err());
    assert!(policy.check(ip("2002:a08:1::1")).is_ok());
    // Local NAT64: behind prefixes of 48, 56, 64 and 96 bits.
    for address in [
        "64:ff9b:1:a09:1:100::",
        "64:ff9b:1:0a:9:101::",
        "64:ff9b:1:0:a:901:100:0",
        "64:ff9b:1::10.9.1.1",
    ] {
        assert!(policy.check(ip(address)).is_err(), "{address}");
    }
    let policy = AddressPolicy::unrestricted(networks(&["0.0.0.0/8", "10.9.0.0/16"]));
    assert!(policy.check(ip("64:ff9b:1::10.8.1.1")).is_ok());
}

#[test]
fn targets_of_the_operator_are_denied_by_deny_only() {
    let policy = AddressPolicy::unrestricted(networks(&["10.0.0.0/8"]));
    assert_eq!(policy.check(ip("127.0.0.1")), Ok(()));
    assert_eq!(policy.check(ip("169.254.169.254")), Ok(()));
    assert!(policy.check(ip("10.0.0.1")).is_err());
}

#[test]
fn the_error_names_the_address_and_the_reason() {
    let policy = AddressPolicy::for_guests(Vec::new(), networks(&["10.0.0.0/8"]));
    let text = |address| policy.check(ip(address)).unwrap_err().to_string();
    assert_eq!(
        text("10.0.0.1"),
        "10.0.0.1 is denied: `deny` has 10.0.0.0/8"
    );
    assert_eq!(
        text("::1"),
        "::1 is denied: a loopback address; `allow` can permit it"
    );
}
