//! Unit tests of `file`.

use super::*;
use zerosock::Cid;

fn read_text(text: &str) -> Result<Vec<RawVm>, FileError> {
    read_file(text).map(|file| file.vms)
}

fn read_file(text: &str) -> Result<File, FileError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vms.yaml");
    fs::write(&path, text).unwrap();
    read(&path)
}

#[test]
fn a_file_of_vhost_device_vsock_reads_the_same() {
    // After the example in the manual of vhost-device-vsock, which mixes `_` and `-`.
    let vms = read_text(
        "vms:
                - guest_cid: 3
                  socket: /tmp/vhost3.socket
                  uds_path: /tmp/vm3.sock
                  tx_buffer_size: 65536
                  queue_size: 1024
                  groups: group1+groupA
                - guest_cid: 5
                  socket: /tmp/vhost5.socket
                  forward-cid: 1
                  forward-listen: 9001+9002",
    )
    .unwrap();
    let [first, second] = vms.as_slice() else {
        panic!("{vms:?}")
    };
    assert_eq!(
        *first,
        RawVm {
            guest_cid: Some(Cid::new(3)),
            socket: Some("/tmp/vhost3.socket".into()),
            uds_path: "/tmp/vm3.sock".into(),
            tx_buffer_size: Some(65536),
            queue_size: Some(1024),
            groups: Some("group1+groupA".into()),
            ..RawVm::default()
        }
    );
    assert_eq!(second.forward_cid, Some(Cid::LOCAL));
    assert_eq!(second.forward_listen.as_deref(), Some("9001+9002"));
}

#[test]
fn a_cid_is_a_number_or_a_name() {
    for (text, cid) in [
        ("0x3", Some(Cid::new(3))),
        ("'0x3'", Some(Cid::new(3))),
        ("'4'", Some(Cid::new(4))),
        ("host", Some(Cid::HOST)),
        ("", None),
    ] {
        let vms = read_text(&format!(
            "vms:\n  - forward_cid: {text}\n    guest_cid: {text}"
        ));
        let vms = vms.unwrap();
        assert_eq!((vms[0].forward_cid, vms[0].guest_cid), (cid, cid), "{text}");
    }
}

#[test]
fn lists_may_be_lists_and_one_port_a_number() {
    let vms = read_text("vms: [{socket: a, forward_cid: 1, forward_listen: 9001, groups: [a, b]}]")
        .unwrap();
    assert_eq!(vms[0].forward_listen.as_deref(), Some("9001"));
    assert_eq!(vms[0].groups.as_deref(), Some("a+b"));
}

#[test]
fn the_attach_socket_has_keys_of_its_own() {
    let file = read_file(
        "attach: {socket: /run/a, mode: '0660', uid: [0, 1000], groups: [a, b], max: 5, \
              uds_path: '/run/{cid}', service_uid: [7], service-max: 3}",
    );
    let wanted = RawAttach {
        socket: Some("/run/a".into()),
        mode: Some("0660".into()),
        uid: vec![0, 1000],
        groups: Some("a+b".into()),
        max: Some(5),
        uds_path: Some("/run/{cid}".into()),
        service_uid: vec![7],
        service_max: Some(3),
    };
    let file = file.unwrap();
    assert!(file.vms.is_empty());
    assert_eq!(file.attach, Some(wanted));
}

#[test]
fn errors_name_the_file_and_the_invalid_key_or_value() {
    for (text, wanted) in [
        ("vms: []", "the list `vms` is empty"),
        ("vm: []", "unknown field `vm`"),
        ("attach: {sockets: a}", "attach: unknown field `sockets`"),
        (
            "vms:\n  - socket: a\naccess:\n  - deny: {from: x, to: any}",
            "access[0].deny: `x` names no endpoint",
        ),
        ("vms:\n  - sockets: a", "unknown field `sockets`"),
        (
            "vms:\n  - guest_cid: three",
            "`three` is not a CID; give a number",
        ),
        (
            "vms:\n  - groups: {a: b}",
            "expected one text joined by `+`, or a list",
        ),
        ("", "--config"),
    ] {
        let said = read_text(text).unwrap_err().to_string();
        assert!(said.contains(wanted), "{text:?}: {said}");
        assert!(said.contains("vms.yaml"), "{text:?}: {said}");
    }
    let said = read(Path::new("/nonexistent/vms.yaml"))
        .unwrap_err()
        .to_string();
    assert!(
        said.contains("/nonexistent/vms.yaml: cannot be read"),
        "{said}"
    );
}
