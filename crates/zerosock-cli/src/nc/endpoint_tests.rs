//! Unit tests of `endpoint`.

use super::*;

#[test]
fn every_form_is_parsed_and_displayed_unchanged() {
    for text in [
        "vsock:2:1234",
        "vsock-listen:1234",
        "unix:/tmp/a:b",
        "unix-listen:a",
        "hybrid:/tmp/a:b:7",
        "attach:/run/a:3:7",
        "attach-listen:/run/a:7",
        "service:/run/a:b:db-1:7",
        "service-listen:/run/a:7",
    ] {
        let parsed = parse(text).unwrap();
        assert_eq!(parsed.to_string(), text);
        assert_eq!(text.parse(), Ok(parsed));
    }
    for text in ["vsock:any:22", "vsock:-1:22", "vsock::22", "vsock:2:any"] {
        assert!(parse(text).is_err(), "{text}");
    }
}

#[test]
fn the_error_names_the_part_that_does_not_parse() {
    let tcp = |end: &str| NcEndpointError::Tcp(end.into());
    let listen = |end: &str| NcEndpointError::TcpListen(end.into());
    let fault = |said: String| NcEndpointError::Fault(said);
    let missing = |what: &str, form: &str| fault(format!("{what} is missing; give {form}"));
    let cids = "a number from 0 to 4294967294, also as 0x3, or hypervisor, local or host (2)";
    let cid = |text: &str| fault(format!("`{text}` is not a CID; give {cids}"));
    let peer = |text: &str| {
        let is_no = "is neither a CID nor the name of a process";
        fault(format!("`{text}` {is_no}; for a CID give {cids}"))
    };
    let port = |text: &str| {
        let ports = "a number from 0 to 4294967294, also as 0x16";
        fault(format!("`{text}` is not a port; give {ports}"))
    };
    for (text, wanted) in [
        ("", NcEndpointError::Form),
        ("nonsense", NcEndpointError::Form),
        ("nonsense:/x", NcEndpointError::Form),
        ("unix-dgram:/x", NcEndpointError::Form),
        ("tcp:localhost:80", tcp("tcp:localhost:80")),
        ("localhost:80", tcp("tcp:localhost:80")),
        ("127.0.0.1:80", tcp("tcp:127.0.0.1:80")),
        ("[::1]:80", tcp("tcp:[::1]:80")),
        ("TCP:host:80,nodelay", tcp("tcp:HOST:PORT")),
        ("tcp-listen:[::]:80", listen("tcp-listen:[::]:80")),
        ("TCP-LISTEN:80", listen("tcp-listen:ADDRESS:PORT")),
        ("udp:localhost:53", NcEndpointError::Udp),
        (
            "vsock:1234",
            missing("the CID or the port", "vsock:CID:PORT"),
        ),
        ("hybrid:/tmp/a", missing("the port", "hybrid:PATH:PORT")),
        (
            "attach:/tmp/a",
            missing("the CID or the port", "attach:PATH:CID:PORT"),
        ),
        (
            "service-listen:/a",
            missing("the port", "service-listen:PATH:PORT"),
        ),
        ("vsock:x:1", cid("x")),
        ("vsock:4294967295:1", cid("4294967295")),
        ("vsock:2:", port("")),
        ("vsock:2:4294967295", port("4294967295")),
        ("vsock-listen:-1", port("-1")),
        ("hybrid:/tmp/a:b", port("b")),
        (
            "attach:/tmp/a:7",
            missing("the CID or the port", "attach:PATH:CID:PORT"),
        ),
        ("attach:/tmp/a:4294967295:7", peer("4294967295")),
        ("service:/tmp/a:a b:7", peer("a b")),
        ("service-listen:/tmp/a:x", port("x")),
    ] {
        assert_eq!(parse(text), Err(wanted), "{text:?}");
    }
    let long = format!("unix:/{}", "x".repeat(107));
    let error = parse(&long).unwrap_err().to_string();
    assert!(error.contains("108 bytes"), "{error}");
    assert!(parse("hybrid::5").is_err());
    let error = parse("unix-listen:@a").unwrap_err().to_string();
    assert!(error.contains("abstract socket"), "{error}");
}
