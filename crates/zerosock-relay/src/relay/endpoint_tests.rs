//! Unit tests of `endpoint`.

use super::*;

#[test]
fn every_form_is_read_and_shown_the_same() {
    for text in [
        "tcp:example.com:80",
        "tcp:[::1]:80",
        "tcp-listen:127.0.0.1:0",
        "tcp-listen:[::]:80",
        "udp:127.0.0.1:53",
        "udp-listen:127.0.0.1:53",
        "unix:/run/a:b",
        "unix-listen:a",
        "unix-dgram:/run/log",
        "unix-dgram-listen:/run/log",
        "unix-seqpacket:/run/s",
        "unix-seqpacket-listen:/run/s",
        "hybrid:/tmp/a:b:7",
        "vsock:3:22",
        "vsock-listen:1234",
    ] {
        let endpoint: KernelEndpoint = text.parse().unwrap();
        assert_eq!(endpoint.to_string(), text);
        assert_eq!(endpoint.listens(), text.contains("listen"), "{text}");
    }
}

#[test]
fn cids_and_ports_have_other_forms() {
    for (text, shown) in [
        ("vsock:host:0x16", "vsock:2:22"),
        ("vsock:local:22", "vsock:1:22"),
        ("vsock:0x3:22", "vsock:3:22"),
        ("vsock-listen:0x16", "vsock-listen:22"),
        ("hybrid:/a:0x16", "hybrid:/a:22"),
    ] {
        let endpoint: KernelEndpoint = text.parse().unwrap();
        assert_eq!(endpoint.to_string(), shown, "{text}");
    }
}

#[test]
fn what_is_wrong_is_named() {
    for (text, named) in [
        ("", "is no endpoint"),
        ("8080", "is no endpoint"),
        ("http://x", "is no endpoint"),
        ("tcp-listen:8080", "tcp-listen:127.0.0.1:8080"),
        ("tcp-listen:localhost:8080", "tcp-listen:127.0.0.1:8080"),
        ("tcp:localhost", "has no port"),
        ("unix-listen:", "has no path"),
        ("unix-listen:@x", "`unix:@x` names an abstract socket"),
        ("hybrid:@x:1", "abstract socket"),
        ("tcp-listen:127.0.0.1:65536", "number from 0 to 65535"),
        ("udp-listen:[::]:x", "`x` is no port in `udp-listen:[::]:x`"),
        ("tcp:127.0.0.1:0", "number from 1 to 65535"),
        (
            "hybrid:/tmp/a",
            "the port is missing; give hybrid:PATH:PORT",
        ),
        ("vsock:22", "port is missing; give vsock:CID:PORT"),
        ("TCP-LISTEN:80,fork", "as tcp-listen:ADDRESS:PORT"),
        ("TCP4-LISTEN:80", "write `tcp-listen` in lower case"),
        ("TCP:host:80", "as tcp:HOST:PORT"),
        ("UNIX-CONNECT:/s", "as unix:PATH"),
        ("VSOCK-CONNECT:2:80", "as vsock:CID:PORT"),
        ("OPENSSL:host:443", "give one of tcp:HOST:PORT"),
        ("hybrid:/tmp/a:x", "`x` is not a port"),
        ("vsock:4294967295:1", "is not a CID"),
        ("vsock:any:1", "local or host"),
        ("vsock:2:any", "is not a port"),
        ("vsock-listen:-1", "is not a port"),
    ] {
        let said = text.parse::<KernelEndpoint>().unwrap_err().to_string();
        assert!(said.contains(named), "{text:?}: {said}");
    }
    let long = format!("unix-listen:/{}", "x".repeat(107));
    let said = long.parse::<KernelEndpoint>().unwrap_err().to_string();
    assert!(said.contains("107"), "{said}");
}
