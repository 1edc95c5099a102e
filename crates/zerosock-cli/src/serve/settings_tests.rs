//! Tests of every flag, and of every spelling of a VM.

use clap::Parser;
use rustix::fs::{Gid, Mode};
use zerosock::daemon::{CONNECT_TIMEOUT, STOPPED_TIMEOUT};

use super::*;
use crate::args::{Cli, Command};
use crate::mode::parse_mode;
use crate::serve::attach::Hybrid;

#[path = "settings_error_tests.rs"]
mod errors;

fn parse(words: &str) -> Result<ServeArgs, clap::Error> {
    let words = ["zerosock", "serve"]
        .into_iter()
        .chain(words.split_whitespace());
    Cli::try_parse_from(words).map(|cli| match cli.command {
        Command::Serve(args) => *args,
        other => panic!("{other:?}"),
    })
}

fn settings(words: &str) -> Settings {
    Settings::new(parse(words).unwrap()).unwrap()
}

/// The error of clap or of the settings for a command line, on one line.
fn complaint(words: &str) -> String {
    let said = match parse(words) {
        Err(error) => {
            assert_eq!(error.exit_code(), 2, "{error}");
            error.to_string()
        }
        Ok(args) => Settings::new(args).unwrap_err().to_string(),
    };
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}

const VM: &str = "--socket /run/a --uds-path /run/b";

#[test]
fn the_required_flags_alone_give_the_defaults() {
    let settings = settings(VM);
    assert_eq!(
        settings.vms,
        [Vm {
            cid: 3,
            socket: "/run/a".into(),
            host: Host::Hybrid {
                path: "/run/b".into(),
                messages: None,
            },
            tx_buffer_size: 262144,
            queue_size: 1024,
            groups: vec!["default".into()],
            require_sealed_memory: false,
            stopped_timeout: Some(STOPPED_TIMEOUT),
            guest_endpoints: None,
        }]
    );
    assert_eq!(settings.connect_timeout, CONNECT_TIMEOUT);
    assert_eq!(settings.ok_port, OkPort::Guest);
    assert_eq!(settings.access.mode, None);
    assert_eq!(settings.access.gid, None);
    assert_eq!(settings.workers, 1);
    assert_eq!(settings.cpus, [] as [usize; 0]);
    assert_eq!(settings.max_connections, None);
    assert_eq!(settings.max_memory, 1 << 40);
    assert_eq!(settings.max_memory_total, 64 << 40);
}

#[test]
fn every_flag_of_a_vm_is_parsed() {
    let settings = settings(
        "--guest-cid 0x2a --socket s --forward-cid local --forward-listen 9001+0x5 --tx-buffer-size=65536 \
         --queue-size=256 --groups a+b+a",
    );
    assert_eq!(
        settings.vms,
        [Vm {
            cid: 42,
            socket: "s".into(),
            host: Host::Forward {
                cid: 1,
                listen: vec![9001, 5]
            },
            tx_buffer_size: 65536,
            queue_size: 256,
            groups: vec!["a".into(), "b".into()],
            require_sealed_memory: false,
            stopped_timeout: Some(STOPPED_TIMEOUT),
            guest_endpoints: None,
        }]
    );
}

#[test]
fn every_flag_of_the_daemon_is_parsed() {
    let settings = settings(&format!(
        "{VM} --ok-port host --socket-mode 0660 --socket-group 77 --max-connections 5 \
         --max-memory 3G --max-memory-total 5T --queue-pairs 4 --spin-us 50 \
         --connect-timeout 0.5 --workers 9 \
         --cpus 0 --log-level debug --log-format json"
    ));
    assert_eq!(settings.ok_port, OkPort::Host);
    assert_eq!(settings.access.mode, Some(Mode::from_raw_mode(0o660)));
    assert_eq!(settings.access.gid, Some(Gid::from_raw(77)));
    assert_eq!(settings.max_connections, Some(5));
    assert_eq!(settings.max_memory, 3 << 30);
    assert_eq!(settings.max_memory_total, 5 << 40);
    assert_eq!(settings.queue_pairs, 4);
    assert_eq!(settings.spin, Duration::from_micros(50));
    assert_eq!(settings.connect_timeout, Duration::from_millis(500));
    assert_eq!(settings.workers, 1, "never more than VMs");
    assert_eq!(settings.cpus, [0]);
}

#[test]
fn the_flags_for_attaching_are_parsed() {
    let attached = settings(&format!("{VM} --attach-socket /run/c"));
    let wanted = Attach {
        socket: "/run/c".into(),
        mode: None,
        uids: vec![],
        groups: vec!["default".into()],
        max: 256,
        hybrid: None,
        service_uids: vec![],
        service_max: 64,
    };
    assert_eq!(attached.attach, Some(wanted));
    assert_eq!(settings(VM).attach, None);
    // Without a VM, the number of VMs does not limit the workers.
    let alone = settings(
        "--attach-socket c --attach-mode 0660 --attach-uid 0 --attach-uid 1000 \
         --attach-groups a+b --attach-max 5 --workers 4 --attach-uds-path /run/p{cid} \
         --service-uid 7 --service-max 0",
    );
    let wanted = Attach {
        socket: "c".into(),
        mode: Some(Mode::from_raw_mode(0o660)),
        uids: vec![0, 1000],
        groups: vec!["a".into(), "b".into()],
        max: 5,
        hybrid: Some(Hybrid::Each("/run/p{cid}".into())),
        service_uids: vec![7],
        service_max: 0,
    };
    assert_eq!(alone.attach, Some(wanted));
    assert!(alone.vms.is_empty());
    assert_eq!(alone.workers, 4);
    let shared = settings("--attach-socket c --attach-uds-path /run/p").attach;
    let shared = shared.and_then(|attach| attach.hybrid);
    assert_eq!(shared, Some(Hybrid::Shared("/run/p".into())));
    for (flags, wanted) in [
        ("--service-max 16385", "--service-max 16385: give a number"),
        (
            "--service-uid 4294967295",
            "--service-uid 4294967295: no user",
        ),
        ("--attach-uds-path /x{cid}", ""),
    ] {
        let said = format!("--attach-socket c {flags}");
        if wanted.is_empty() {
            settings(&said);
        } else {
            let said = complaint(&said);
            assert!(said.contains(wanted), "{said}");
        }
    }
    // With a CID in it the path would be too long.
    let long = format!(
        "--attach-socket c --attach-uds-path /{}{{cid}}",
        "x".repeat(100)
    );
    let said = complaint(&long);
    assert!(said.contains("--attach-uds-path"), "{said}");
}

#[test]
fn attach_settings_are_in_the_file_or_in_flags_but_not_both() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vms.yaml");
    std::fs::write(&path, "attach: {socket: /run/c, uid: [7]}").unwrap();
    let config = format!("--config {}", path.display());
    let attach = settings(&config).attach.unwrap();
    assert_eq!((attach.socket, attach.uids), ("/run/c".into(), vec![7]));
    let said = complaint(&format!("{config} --attach-socket /run/d"));
    assert!(said.contains("attach exclude each other"), "{said}");
    std::fs::write(&path, "attach: {socket: /run/c, max: 0}").unwrap();
    let said = complaint(&config);
    assert!(said.contains("attach.max 0: give a number"), "{said}");
}

#[test]
fn many_vms_by_option_as_the_peer_writes_them() {
    let settings = settings(
        "--vm socket=/v3,uds_path=/u3 \
         --vm socket=/v4,uds-path=/u4,guest-cid=4,tx_buffer_size=65536,queue_size=1024,groups=g1 \
         --vm groups=g2+g3,guest-cid=5,socket=/v5,forward_cid=1,tx-buffer-size=32768,queue_size=256",
    );
    let [three, four, five] = settings.vms.as_slice() else {
        panic!("{settings:?}")
    };
    assert_eq!((three.cid, four.cid, five.cid), (3, 4, 5));
    assert_eq!(three.tx_buffer_size, 262144);
    assert_eq!(four.tx_buffer_size, 65536);
    assert_eq!(five.groups, ["g2", "g3"]);
    assert_eq!(five.queue_size, 256);
    assert_eq!(
        five.host,
        Host::Forward {
            cid: 1,
            listen: vec![]
        }
    );
}

#[test]
fn workers_follow_the_pinned_cpus() {
    let two = "--vm socket=/a,uds-path=/b --vm guest-cid=4,socket=/c,uds-path=/d";
    assert_eq!(settings(&format!("{two} --cpus 0")).workers, 1);
    assert_eq!(settings(&format!("{two} --cpus 0 --workers 2")).workers, 2);
}

#[test]
fn the_path_of_a_port_conflicts_with_a_forwarding_rule() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vms.yaml");
    let config = format!("--config {}", path.display());
    let write = |from: &str| {
        let vms = "vms: [{socket: /a, uds_path: /b}, \
                   {guest_cid: 4, socket: /c, uds_path: [/d, 22=/e, 80=/f]}]";
        let rules = format!("forward: [{{from: {from}, port: 80-90, to: 'unix:/g'}}]");
        std::fs::write(&path, format!("{vms}\n{rules}\n")).unwrap();
    };
    write("any");
    assert_eq!(settings(&config).forward.len(), 3);
    write("4");
    let said = complaint(&config);
    let wanted = "vms.yaml: vms[1].uds_path 80=/f: forward[0] matches the same connections";
    assert!(said.contains(wanted), "{said}");
}

#[test]
fn a_name_belongs_to_one_rule_of_its_kind() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vms.yaml");
    let config = format!("--config {}", path.display());
    let write = |name: &str| {
        let of = |kind: &str| match name.strip_prefix(kind) {
            Some(name) => name.to_owned(),
            None => format!("x-{}", kind.trim()),
        };
        let (access, forward, listen) = (of("access "), of("forward "), of("listen "));
        let file = format!(
            "vms: [{{socket: /a, uds_path: /b}}]
access: [deny: {{name: web, from: 9, to: any}}, deny: {{name: {access}, from: 8, to: any}}]
forward: [{{name: web, port: 1, to: 'unix:/c'}}, {{name: {forward}, port: 2, to: 'unix:/c'}}]
listen: [{{name: web, on: 'unix:/d', to: '3:1'}}, {{name: {listen}, on: 'unix:/e', to: '3:1'}}]"
        );
        std::fs::write(&path, file).unwrap();
    };
    write("");
    settings(&config);
    for kind in ["access", "forward", "listen"] {
        write(&format!("{kind} web"));
        let said = complaint(&config);
        let wanted =
            format!("vms.yaml: {kind}[0] and {kind}[1]: both have the name web; change one");
        assert!(said.ends_with(&wanted), "{said}");
        for name in ["''", "a b", "a/b", "'é'", &"a".repeat(33)] {
            write(&format!("{kind} {name}"));
            let said = complaint(&config);
            let text = name.trim_matches('\'');
            let wanted =
                format!("name: `{text}`: the name of a rule has 1 to 32 of the characters");
            assert!(said.contains(&wanted), "{said}");
            assert!(said.contains(&format!("{kind}[1]")), "{said}");
        }
    }
}

/// What a guest sends to port 77 of the host goes to `PATH_77`.
#[test]
fn no_socket_of_ours_is_at_the_path_of_a_port() {
    let three = "--vm guest-cid=3,socket=/d/3,uds-path=/d/s3.vsock";
    for (more, option) in [
        (
            "--vm guest-cid=4,socket=/d/4,uds-path=/d/s3.vsock_77",
            "--vm uds-path of the VM with CID 4 /d/s3.vsock_77",
        ),
        (
            "--vm guest-cid=4,socket=/d//./s3.vsock_77,uds-path=/d/4",
            "--vm socket of the VM with CID 4 /d/s3.vsock_77",
        ),
        (
            "--attach-socket /d/s3.vsock_77",
            "--attach-socket /d/s3.vsock_77",
        ),
        (
            "--listen unix:/d/s3.vsock_77=3:80",
            "listen[0]: on /d/s3.vsock_77",
        ),
        (
            "--attach-socket /d/a --attach-uds-path /d/s3.vsock_{cid}",
            "--attach-uds-path /d/s3.vsock_3",
        ),
    ] {
        let text = complaint(&format!("{three} {more}"));
        assert!(
            text.starts_with(&format!("{option}: this is port ")),
            "{text}"
        );
        let by = "--vm uds-path of the VM with CID 3 /d/s3.vsock: the guest would reach";
        assert!(text.contains(by), "{text}");
    }
    let text = complaint(
        "--vm guest-cid=3,socket=/d/p5.vsock_9,uds-path=/d/3 --attach-socket /d/a \
         --attach-uds-path /d/p{cid}.vsock",
    );
    let by = "this is port 9 of the host for --attach-uds-path /d/p{cid}.vsock: ";
    assert!(text.contains(by), "{text}");
    // The guest's own device, by the socket of a single port.
    let text = complaint("--socket /d/3 --uds-path /d/u --uds-path 22=/d/3");
    assert!(
        text.starts_with("--socket of the VM with CID 3 /d/3: this is port 22"),
        "{text}"
    );
    for more in ["_", "_x", "_077", "x_77"] {
        settings(&format!(
            "{three} --vm guest-cid=4,socket=/d/4,uds-path=/d/s3.vsock{more}"
        ));
    }
}

#[test]
fn the_time_to_look_for_work_is_in_the_file_or_in_a_flag() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vms.yaml");
    std::fs::write(&path, "vms: [{socket: /s, uds_path: /u}]\nspin_us: 70\n").unwrap();
    let line = format!("--config {}", path.display());
    assert_eq!(settings(&line).spin, Duration::from_micros(70));
    let said = complaint(&format!("{line} --spin-us 50"));
    assert!(
        said.contains("--spin-us and") && said.contains("spin_us exclude each other"),
        "{said}"
    );
    assert_eq!(settings(VM).spin, Duration::ZERO);
}

#[test]
fn limits_on_memory_are_in_the_file_or_in_flags() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vms.yaml");
    let vms = "vms: [{socket: /s, uds_path: /u}]";
    let text = format!("{vms}\nmax_memory: 3G\nmax_memory_total: 4294967296\n");
    std::fs::write(&path, text).unwrap();
    let line = format!("--config {}", path.display());
    let read = settings(&line);
    assert_eq!(read.max_memory, 3 << 30);
    assert_eq!(read.max_memory_total, 4 << 30);
    let said = complaint(&format!("{line} --max-memory-total 5G"));
    assert!(
        said.contains("max_memory_total exclude each other"),
        "{said}"
    );
    std::fs::write(&path, format!("{vms}\nmax_memory: 3Q\n")).unwrap();
    let said = complaint(&line);
    assert!(said.contains("K, M, G or T"), "{said}");
    // The limit of one VM may exceed the default total.
    let large = settings(&format!("{VM} --max-memory 100T"));
    assert_eq!(large.max_memory_total, 100 << 40);
}

#[test]
fn the_mode_may_be_written_in_the_usual_ways() {
    for (text, bits) in [
        ("660", 0o660),
        ("0660", 0o660),
        ("0o600", 0o600),
        ("0", 0),
        ("777", 0o777),
    ] {
        assert_eq!(parse_mode(text), Some(Mode::from_raw_mode(bits)), "{text}");
    }
}

#[test]
fn sealed_memory_is_required_of_single_vms_or_of_all() {
    let of = |line: &str| -> Vec<bool> {
        let vms = settings(line).vms;
        vms.iter().map(|vm| vm.require_sealed_memory).collect()
    };
    let two = "--vm guest-cid=3,socket=/a,uds-path=/b \
               --vm guest-cid=4,socket=/c,uds-path=/d,require-sealed-memory=true";
    assert_eq!(of(VM), [false]);
    assert_eq!(of(&format!("{VM} --require-sealed-memory")), [true]);
    assert_eq!(of(two), [false, true]);
    assert_eq!(of(&format!("{two} --require-sealed-memory")), [true, true]);
}

#[test]
fn the_longest_pause_is_that_of_the_vm_or_of_the_flag() {
    let of = |line: &str| -> Vec<f64> {
        let vms = settings(line).vms;
        let spans = vms.iter().map(|vm| vm.stopped_timeout.unwrap());
        spans.map(|span| span.as_secs_f64()).collect()
    };
    let two = "--vm guest-cid=3,socket=/a,uds-path=/b \
               --vm guest-cid=4,socket=/c,uds-path=/d,stopped-timeout=0";
    assert_eq!(of(two), [300.0, 0.0]);
    assert_eq!(of(&format!("{two} --stopped-timeout 1.5")), [1.5, 0.0]);
}
