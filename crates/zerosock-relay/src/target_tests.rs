//! What is a target, in its one written form, and what is refused with a reason.

use proptest::prelude::*;

use super::*;

fn tcp(host: Host, port: u16) -> Target {
    let port = NonZeroU16::new(port).unwrap();
    Target::Tcp { host, port }
}

fn address(text: &str) -> Host {
    Host::Address(text.parse().unwrap())
}

fn name(text: &str) -> Host {
    Host::Name(text.parse().unwrap())
}

#[test]
fn every_kind_of_target_is_parsed_and_written_in_one_form() {
    let udp = |host, port| match tcp(host, port) {
        Target::Tcp { host, port } => Target::Udp { host, port },
        _ => unreachable!(),
    };
    for (text, target, written) in [
        (
            "tcp:example.com:80",
            tcp(name("example.com"), 80),
            "tcp:example.com:80",
        ),
        (
            "tcp:Example.COM.:80",
            tcp(name("example.com."), 80),
            "tcp:example.com.:80",
        ),
        (
            "tcp:10.0.0.1:65535",
            tcp(address("10.0.0.1"), 65535),
            "tcp:10.0.0.1:65535",
        ),
        ("tcp:[::1]:1", tcp(address("::1"), 1), "tcp:[::1]:1"),
        (
            "tcp:[2001:DB8:0::1]:1",
            tcp(address("2001:db8::1"), 1),
            "tcp:[2001:db8::1]:1",
        ),
        // An IPv4-mapped address is the IPv4 address, also for the policy.
        (
            "tcp:[::ffff:127.0.0.1]:1",
            tcp(address("127.0.0.1"), 1),
            "tcp:127.0.0.1:1",
        ),
        (
            "udp:a_b.example:53",
            udp(name("a_b.example"), 53),
            "udp:a_b.example:53",
        ),
        (
            "unix:/run/x.sock",
            Target::Unix("/run/x.sock".into()),
            "unix:/run/x.sock",
        ),
        ("unix:a:b", Target::Unix("a:b".into()), "unix:a:b"),
        (
            "unix-seqpacket:/run/x",
            Target::UnixSeqpacket("/run/x".into()),
            "unix-seqpacket:/run/x",
        ),
        (
            "unix-dgram:x",
            Target::UnixDatagram("x".into()),
            "unix-dgram:x",
        ),
    ] {
        assert_eq!(text.parse(), Ok(target.clone()), "{text}");
        assert_eq!(target.to_string(), written);
        assert_eq!(written.parse(), Ok(target), "{written}");
    }
}

#[test]
fn refused_targets_say_why() {
    let long_path = format!("unix:/{}", "x".repeat(107));
    for (text, reason) in [
        ("", "is no target"),
        ("example.com", "is no target"),
        ("http:example.com:80", "is no target"),
        ("tcp:example.com", "has no port"),
        ("tcp:example.com:", "is no port"),
        ("tcp:example.com:0", "is no port"),
        ("tcp:example.com:65536", "is no port"),
        ("tcp:example.com:+80", "is no port"),
        ("tcp:example.com:http", "is no port"),
        ("tcp::80", "it is empty"),
        ("tcp:.:80", "it is empty"),
        ("tcp:::1:80", "put an IPv6 address into brackets"),
        ("tcp:[::1:80", "is no IPv6 address"),
        ("tcp:[1.2.3.4]:80", "is no IPv6 address"),
        ("tcp:[fe80::1%eth0]:80", "zone"),
        ("tcp:a..b:80", "is empty"),
        ("tcp:-a.b:80", "begins or ends with `-`"),
        ("tcp:a-.b:80", "begins or ends with `-`"),
        ("tcp:a b:80", "are allowed"),
        ("tcp:a/b:80", "are allowed"),
        ("tcp:b\u{fc}cher.example:80", "xn--"),
        ("unix:", "has no path"),
        ("unix:a\0b", "NUL"),
        ("unix:@name", "abstract socket"),
        ("unix-dgram:@name", "abstract socket"),
        ("unix-seqpacket:@name", "abstract socket"),
        (&long_path, "of 108 bytes"),
    ] {
        let error = text.parse::<Target>().unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
    assert!(long_path[..long_path.len() - 1].parse::<Target>().is_ok());
}

#[test]
fn numbers_that_inet_aton_reads_as_addresses_are_no_names() {
    for text in [
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.01",
        "1.2.3.4.5",
        "256.1.1.1",
        "0X7F.0x1",
        "0x",
        "example.1",
        "127.0.0.1.",
    ] {
        assert!(text.parse::<Host>().is_err(), "{text}");
    }
    for text in ["1.example", "0x7f.example", "127-1", "1e3", "0xg"] {
        assert!(matches!(text.parse(), Ok(Host::Name(_))), "{text}");
    }
}

#[test]
fn names_and_labels_have_the_limits_of_rfc_1035() {
    let label = "a".repeat(63);
    assert!(label.parse::<DomainName>().is_ok());
    assert!(format!("{label}a").parse::<DomainName>().is_err());
    // 3 * 64 + 61 = 253.
    let longest = format!("{label}.{label}.{label}.{}", "a".repeat(61));
    assert!(longest.parse::<DomainName>().is_ok());
    assert!(format!("{longest}.").parse::<DomainName>().is_ok());
    assert!(format!("{longest}a").parse::<DomainName>().is_err());
}

#[test]
fn hosts_are_parsed_with_and_without_brackets() {
    assert_eq!("::1".parse(), Ok(address("::1")));
    assert_eq!("[::1]".parse(), Ok(address("::1")));
    assert_eq!("::ffff:1.2.3.4".parse(), Ok(address("1.2.3.4")));
    assert!(name("LocalHost.").is_localhost());
    assert!(!name("localhost.example").is_localhost());
    assert!(!address("127.0.0.1").is_localhost());
}

#[test]
fn streams_lose_message_bounds_and_the_others_keep_them() {
    for (text, keeps) in [
        ("tcp:a:1", false),
        ("unix:a", false),
        ("udp:a:1", true),
        ("unix-seqpacket:a", true),
        ("unix-dgram:a", true),
    ] {
        assert_eq!(
            text.parse::<Target>().unwrap().keeps_messages(),
            keeps,
            "{text}"
        );
    }
}

proptest! {
    #[test]
    fn what_is_parsed_is_written_and_parsed_again(text in "(tcp|udp|unix)?:?[\\[\\]a-z0-9.:_%-]{0,40}(:[0-9]{1,5})?") {
        if let Ok(target) = text.parse::<Target>() {
            prop_assert_eq!(target.to_string().parse(), Ok(target));
        }
    }
}
