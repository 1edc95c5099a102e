//! Tests of the errors of settings: each names the option, the value and the fix.

use super::*;

#[test]
fn errors_of_the_file_name_the_entry() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vms.yaml");
    let config = format!("--config {}", path.display());
    std::fs::write(
        &path,
        "vms: [{socket: /a, uds_path: /b}, {guest_cid: 4, socket: /c, uds-path: /d}]",
    )
    .unwrap();
    assert_eq!(settings(&config).vms.len(), 2);
    std::fs::write(
        &path,
        "vms: [{socket: /a, uds_path: /b}, {guest_cid: 2, socket: /c, uds-path: /d}]",
    )
    .unwrap();
    let said = complaint(&config);
    assert!(
        said.ends_with(
            "vms.yaml: vms[1].guest_cid 2: CID 2 is reserved; a guest's CID is 3 or more and below \
             4294967295"
        ),
        "{said}"
    );
}

#[test]
fn ways_of_naming_vms_exclude_each_other() {
    for words in [
        format!("{VM} --vm socket=/a,uds-path=/b"),
        format!("{VM} --config f"),
        "--vm socket=/a,uds-path=/b --config f".to_string(),
        "--guest-cid 3 --config f".to_string(),
        "--groups a --vm socket=/a,uds-path=/b".to_string(),
        "--queue-size 2 --config f".to_string(),
        "--tx-buffer-size 200 --config f".to_string(),
        format!("{VM} --forward-cid 1"),
        format!("{VM} --forward-listen 1"),
    ] {
        let said = complaint(&words);
        assert!(said.contains("cannot be used with"), "{words}: {said}");
    }
    let messages = settings(&format!("{VM} --uds-path-seqpacket /run/c"));
    assert_eq!(
        messages.vms[0].host,
        Host::Hybrid {
            path: "/run/b".into(),
            messages: Some("/run/c".into()),
        }
    );
    let said = complaint("--socket /run/a --forward-cid 1 --vm uds-path-seqpacket=/c");
    assert!(!said.is_empty());
    let said = complaint("--vm socket=/a,forward-cid=1,uds-path-seqpacket=/c");
    assert!(said.contains("uds-path-seqpacket needs it"), "{said}");
    let said = complaint(&format!("{VM} --uds-path-seqpacket /run/b"));
    assert!(said.contains("uds-path-seqpacket"), "{said}");
    let said = complaint("--vm socket=/a,uds-path=/b,forward-cid=1");
    assert_eq!(
        said,
        "--vm uds-path and --vm forward-cid exclude each other: keep one"
    );
    let said = complaint("--vm socket=/a,uds-path=/b,forward-listen=1");
    assert_eq!(
        said,
        "--vm uds-path and --vm forward-listen exclude each other: keep one"
    );
}

#[test]
fn a_complaint_names_the_option_the_value_and_the_fix() {
    let long = "x".repeat(108);
    let cases = [
        (
            "",
            "no virtual machine is named: give --socket and --uds-path, or --vm, or --config",
        ),
        ("--guest-cid 3", "--socket is missing: name the Unix socket"),
        ("--socket /a", "--uds-path is missing: name the Unix socket"),
        (
            "--socket /a --forward-listen 5",
            "--forward-cid is missing: forward-listen needs it",
        ),
        ("--vm uds-path=/a", "--vm socket is missing"),
        (
            &format!("{VM} --guest-cid 0"),
            "--guest-cid 0: CID 0 is reserved",
        ),
        (
            &format!("{VM} --guest-cid 1"),
            "--guest-cid 1: CID 1 is reserved",
        ),
        (
            &format!("{VM} --guest-cid 2"),
            "--guest-cid 2: CID 2 is reserved",
        ),
        (
            &format!("{VM} --guest-cid 4294967295"),
            "error: invalid value '4294967295' for '--guest-cid <CID>': give a number from 0",
        ),
        (
            &format!("{VM} --guest-cid 4294967296"),
            "error: invalid value '4294967296' for '--guest-cid <CID>': give a number from 0",
        ),
        (
            &format!("{VM} --guest-cid x"),
            "error: invalid value 'x' for '--guest-cid <CID>'",
        ),
        (
            &format!("{VM} --queue-size 1000"),
            "--queue-size 1000: give a power of two",
        ),
        (
            &format!("{VM} --queue-size 0"),
            "--queue-size 0: give a power of two",
        ),
        (
            &format!("{VM} --queue-size 65536"),
            "--queue-size 65536: give a power of two",
        ),
        (
            &format!("{VM} --tx-buffer-size 127"),
            "--tx-buffer-size 127: give bytes from 128",
        ),
        (
            &format!("{VM} --tx-buffer-size 1073741825"),
            "--tx-buffer-size 1073741825: give bytes",
        ),
        (
            &format!("{VM} --groups a++b"),
            "--groups a++b: a name is empty; give names joined by",
        ),
        (
            &format!("{VM} --socket-mode 999"),
            "--socket-mode 999: give permission bits in octal",
        ),
        (
            &format!("{VM} --socket-mode 1777"),
            "--socket-mode 1777: give permission bits in octal",
        ),
        (
            &format!("{VM} --socket-mode +66"),
            "--socket-mode +66: give permission bits in octal",
        ),
        (
            &format!("{VM} --socket-group no-such-group"),
            "--socket-group no-such-group: no such group in /etc/group; give a name from there",
        ),
        (
            &format!("{VM} --spin-us 1000001"),
            "--spin-us 1000001: give microseconds from 0 (never) to 1000000",
        ),
        (
            &format!("{VM} --max-connections 0"),
            "--max-connections 0: give a number from 1 to",
        ),
        (
            &format!("{VM} --max-memory 0"),
            "--max-memory 0: no VM works without memory",
        ),
        (
            &format!("{VM} --max-memory 2G --max-memory-total 1G"),
            "--max-memory-total 1073741824: give at least what one VM may have, 2147483648",
        ),
        (
            &format!("{VM} --max-memory 64g"),
            "error: invalid value '64g' for '--max-memory <BYTES>': give a number of bytes, with K",
        ),
        (
            &format!("{VM} --queue-pairs 17"),
            "--queue-pairs 17: give a number from 1 to 16",
        ),
        (
            &format!("{VM} --connect-timeout 0"),
            "--connect-timeout 0: no connection can come",
        ),
        (
            &format!("{VM} --connect-timeout soon"),
            "error: invalid value 'soon' for '--connect-timeout <SECONDS>': give a number of seconds",
        ),
        (&format!("{VM} --workers 0"), "--workers 0: give at least 1"),
        (
            &format!("{VM} --attach-uid 5"),
            "--attach-socket is missing: name the Unix socket",
        ),
        (
            &format!("{VM} --attach-socket /run/a"),
            "--attach-socket /run/a: already used by --socket of the VM with CID 3",
        ),
        (
            "--attach-socket c --attach-mode 9",
            "--attach-mode 9: give permission bits in octal",
        ),
        (
            "--attach-socket c --attach-uid 4294967295",
            "--attach-uid 4294967295: no user has this number",
        ),
        (
            "--attach-socket c --attach-groups a++b",
            "--attach-groups a++b: a name is empty",
        ),
        (
            "--attach-socket c --attach-max 0",
            "--attach-max 0: give a number from 1 to 16384",
        ),
        (
            &format!("{VM} --cpus 0-"),
            "--cpus 0-: `0-` is no CPU or range; give numbers",
        ),
        (
            &format!("{VM} --cpus 1023"),
            "--cpus 1023: this process may not run on CPU 1023; it may on 0",
        ),
        (
            &format!("{VM} --ok-port both"),
            "error: invalid value 'both' for '--ok-port <OK_PORT>'",
        ),
        (
            &format!("{VM} --log-level loud"),
            "error: invalid value 'loud' for '--log-level <LEVEL>'",
        ),
        (
            &format!("{VM} --log-format xml"),
            "error: invalid value 'xml' for '--log-format <FORMAT>'",
        ),
        (
            "--socket /a --forward-cid 0",
            "--forward-cid 0: give a CID that can be connected to",
        ),
        (
            "--socket /a --forward-cid 1 --forward-listen 5+x",
            "--forward-listen 5+x: `x` is not a port; give numbers",
        ),
        (
            "--socket /a --forward-cid 1 --forward-listen 5+5",
            "--forward-listen 5+5: port 5 is named twice: leave one",
        ),
        (
            &format!("--socket {long} --uds-path /b"),
            &format!(
                "--socket {long}: the path has 108 bytes, and a Unix socket address holds 108"
            ),
        ),
        (
            &format!("--socket /a --uds-path {long}"),
            &format!("--uds-path {long}: the path has 108"),
        ),
        (
            "--vm socket=,uds-path=/b",
            "--vm socket : the path is empty; name a file",
        ),
        (
            "--vm sock=/a",
            "error: invalid value 'sock=/a' for '--vm <KEY=VALUE,...>': unknown key `sock`",
        ),
        (
            "--vm socket=/a,uds-path=/b --vm socket=/c,uds-path=/d",
            "--vm guest-cid 3: already used by the VM at /a; every VM needs its own",
        ),
        (
            "--vm socket=/a,uds-path=/b --vm guest-cid=4,socket=/a,uds-path=/d",
            "--vm socket /a: already used by --vm socket of the VM with CID 3; every VM needs",
        ),
        (
            "--vm socket=/a,uds-path=/b --vm guest-cid=4,socket=/c,uds-path=/./b",
            "--vm uds-path /./b: already used by --vm uds-path of the VM with CID 3",
        ),
        (
            "--socket /a --uds-path /a",
            "--uds-path /a: already used by --socket of the VM with CID 3",
        ),
        (
            "--vm socket=/a,forward-cid=1,forward-listen=7 \
             --vm guest-cid=4,socket=/b,forward-cid=1,forward-listen=7",
            "--vm forward-listen 7: already used by --vm forward-listen of the VM with CID 3",
        ),
        (
            "--config /nonexistent.yaml",
            "--config /nonexistent.yaml: cannot be read",
        ),
    ];
    for (words, wanted) in cases {
        let said = complaint(words);
        assert!(
            said.starts_with(wanted),
            "{words}\n   said: {said}\n wanted: {wanted}"
        );
    }
}
