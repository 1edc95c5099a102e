//! Unit tests of `vm`.

use super::*;
use zerosock::Port;

#[test]
fn every_key_is_read_with_either_spelling() {
    let dashes = "guest-cid=0x7,socket=/a,uds-path=/b,uds-path=9=/d,uds-path-seqpacket=/c,forward-cid=local,forward-listen=5+6,\
                      tx-buffer-size=4096,queue-size=256,groups=x+y,require-sealed-memory=true,\
                      stopped-timeout=0.5,guest-endpoints=/k";
    let wanted = RawVm {
        guest_cid: Some(Cid::new(7)),
        socket: Some("/a".into()),
        uds_path: UdsPaths {
            base: Some("/b".into()),
            ports: [(Port::new(9), "/d".into())].into(),
        },
        uds_path_seqpacket: Some("/c".into()),
        forward_cid: Some(Cid::LOCAL),
        forward_listen: Some("5+6".into()),
        tx_buffer_size: Some(4096),
        queue_size: Some(256),
        groups: Some("x+y".into()),
        require_sealed_memory: Some(true),
        stopped_timeout: Some(Duration::from_millis(500)),
        guest_endpoints: Some(RawGuestEndpoints::Key("/k".into())),
    };
    assert_eq!(parse_vm(dashes), Ok(wanted.clone()));
    assert_eq!(parse_vm(&dashes.replace('-', "_")), Ok(wanted));
}

#[test]
fn a_value_may_contain_an_equals_sign() {
    let vm = parse_vm("socket=/tmp/a=b").unwrap();
    assert_eq!(vm.socket, Some("/tmp/a=b".into()));
}

#[test]
fn the_error_names_the_invalid_key_or_value() {
    for (text, wanted) in [
        ("", "`` has no value: write =VALUE"),
        ("socket", "`socket` has no value: write socket=VALUE"),
        ("group=a", "unknown key `group`"),
        ("socket=a,socket=b", "socket is given twice: leave one"),
        ("guest-cid=x", "guest-cid=x is not a CID; give a number"),
        (
            "forward_cid=4294967296",
            "forward-cid=4294967296 is not a CID; give a number from 0 to 4294967294",
        ),
        (
            "require-sealed-memory=yes",
            "require-sealed-memory=yes is neither true nor false",
        ),
        ("stopped-timeout=-1", "stopped-timeout=-1 is no time"),
        (
            "tx-buffer-size=-1",
            "tx-buffer-size=-1 is not a whole number",
        ),
    ] {
        let said = parse_vm(text).unwrap_err().to_string();
        assert!(said.starts_with(wanted), "{text:?}: {said}");
    }
}
