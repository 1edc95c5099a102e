//! Unit tests of `target`.

use super::*;

fn resolved(text: &str, port: u32) -> Option<String> {
    let target: TargetTemplate = text.parse().unwrap();
    let target = target.resolve(Cid::new(7), Port::new(port));
    target.map(|target| target.to_string())
}

#[test]
fn port_and_path_come_from_the_connection_where_the_rule_leaves_them_open() {
    for (text, port, wanted) in [
        ("tcp:127.0.0.1:80", 9, Some("tcp:127.0.0.1:80")),
        ("tcp:127.0.0.1", 9, Some("tcp:127.0.0.1:9")),
        ("tcp:[::1]", 9, Some("tcp:[::1]:9")),
        ("udp:example.com", 53, Some("udp:example.com:53")),
        ("tcp:127.0.0.1", 65_536, None),
        ("tcp:127.0.0.1", 0, None),
        ("unix:/run/{cid}/{port}.s", 9, Some("unix:/run/7/9.s")),
        ("unix-seqpacket:/a", 9, Some("unix-seqpacket:/a")),
        ("unix-dgram:/{port}", 70_000, Some("unix-dgram:/70000")),
    ] {
        assert_eq!(resolved(text, port).as_deref(), wanted, "{text}");
    }
}

#[test]
fn errors_name_what_is_wrong() {
    for text in [
        "",
        "tcp",
        "tcp:",
        "tcp:a:0",
        "tcp:a:65536",
        "http:a:1",
        "unix:",
    ] {
        assert!(text.parse::<TargetTemplate>().is_err(), "{text:?}");
    }
}

#[test]
fn streams_go_to_streams_and_messages_to_messages() {
    let of = |text: &str| text.parse::<TargetTemplate>().unwrap();
    for text in ["tcp:a:1", "unix:/a"] {
        assert_eq!(of(text).socket_type(), SocketType::Stream);
    }
    for text in ["udp:a:1", "unix-seqpacket:/a", "unix-dgram:/a"] {
        assert_eq!(of(text).socket_type(), SocketType::SeqPacket);
    }
    assert!(of("udp:a:1").is_datagram() && !of("unix-seqpacket:/a").is_datagram());
}
