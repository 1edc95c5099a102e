//! What rules, command lines and host programs name: targets, listeners, domain names, networks, addresses, endpoints
//! and the CONNECT line.
//!
//! A text that is accepted is written such that the same value is read. The policy for guests denies an address that
//! embeds one which it denies. The path of a target lies in the directory of its template.
#![no_main]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use zerosock::attach::Name;
use zerosock::forward::{Destination, ListenAddress, RuleName, TargetTemplate};
use zerosock::fuzz::connect_line;
use zerosock::{Address, Cid, Port};
use zerosock_fuzz::round_trip;
use zerosock_relay::networks::{AddressPolicy, Network};
use zerosock_relay::target::{DomainName, Host, Target};

fn text(text: &str) {
    round_trip::<Target>(text);
    round_trip::<Host>(text);
    if let Some(name) = round_trip::<DomainName>(text) {
        assert!(!name.as_str().is_empty() && name.as_str().len() <= 255);
        assert!(
            name.as_str().parse::<IpAddr>().is_err(),
            "an address is no name"
        );
    }
    if let Some(network) = round_trip::<Network>(text) {
        let first = text.split('/').next().and_then(|it| it.parse().ok());
        assert!(first.is_none_or(|first| network.contains(first)));
    }
    round_trip::<ListenAddress>(text);
    round_trip::<Destination>(text);
    if let Some(template) = round_trip::<TargetTemplate>(text) {
        let path = |cid, port| template.path(Cid::new(cid), Port::new(port));
        let (first, second) = (path(3, 7), path(u32::MAX - 1, 0));
        assert_eq!(first.is_some(), second.is_some());
        if let (Some(first), Some(second)) = (first, second) {
            assert_eq!(first.components().count(), second.components().count());
        }
    }
    round_trip::<Name>(text);
    round_trip::<RuleName>(text);
    round_trip::<Cid>(text);
    round_trip::<Port>(text);
    round_trip::<Address>(text);
}

/// The addresses that embed this one.
fn embedding(v4: Ipv4Addr, at: u8) -> Ipv6Addr {
    let [a, b, c, d] = v4.octets().map(u16::from);
    let (high, low) = (a << 8 | b, c << 8 | d);
    match at % 7 {
        0 => Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, high, low),
        1 => Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
        2 => Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1),
        3 => Ipv6Addr::new(0x2001, 0, high, low, 0, 0, !0x0102, !0x0304),
        4 => Ipv6Addr::new(0x2001, 0, 0x0102, 0x0304, 0, 0, !high, !low),
        5 => Ipv6Addr::new(0xfd01, 2, 3, 4, 0x0200, 0x5efe, high, low),
        _ => Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, high, low),
    }
}

fn policy(u: &mut Unstructured<'_>) -> Result<()> {
    let mut network = || {
        let (bits, prefix) = (u.arbitrary::<u32>()?, u.int_in_range(0..=32u8)?);
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
        let address = IpAddr::V4(Ipv4Addr::from_bits(bits & mask));
        Ok(Network::new(address, prefix).unwrap())
    };
    let policy = AddressPolicy::for_guests(vec![], vec![network()?]);
    let v4 = Ipv4Addr::from_bits(match u.arbitrary()? {
        0u8 => 0x7f00_0001,
        1 => 0xa9fe_a9fe,
        2 => 0xa83f_8110,
        _ => u.arbitrary()?,
    });
    let v6 = embedding(v4, u.arbitrary()?);
    if policy.check(IpAddr::V4(v4)).is_err() {
        assert!(policy.check(IpAddr::V6(v6)).is_err(), "{v6} leads to {v4}");
    }
    if policy.check_literal(IpAddr::V4(v4)).is_err() {
        assert!(
            policy.check_literal(IpAddr::V6(v6)).is_err(),
            "{v6} leads to {v4}"
        );
    }
    Ok(())
}

const PREFIXES: [&str; 12] = [
    "",
    "tcp:",
    "udp:",
    "unix:",
    "unix-seqpacket:",
    "unix-dgram:",
    "name:",
    "tcp:[",
    "tcp:127.0.0.1:",
    "unix:/a/",
    "vsock:",
    "host:",
];

fuzz_target!(|bytes: &[u8]| {
    connect_line(bytes);
    connect_line(&[b"CONNECT ", bytes].concat());
    let mut u = Unstructured::new(bytes);
    let _ = policy(&mut u);
    let Some((first, rest)) = bytes.split_first() else {
        return;
    };
    let prefix = PREFIXES[usize::from(*first) % PREFIXES.len()];
    if let Ok(rest) = std::str::from_utf8(rest) {
        text(&[prefix, rest].concat());
    }
});
