//! The command line, and how the command ends.

use std::io::Write;
use std::net::TcpListener;

use crate::process::Running;
use crate::{read_all, relay};

#[test]
fn a_pair_without_a_listener_ends_the_command() {
    let [one, two] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let ends = [&one, &two].map(|one| format!("tcp:{}", one.local_addr().unwrap()));
    let running = Running::start(&mut relay(&[&ends[0], &ends[1]]));
    let (mut first, second) = (one.accept().unwrap().0, two.accept().unwrap().0);
    first.write_all(b"all").unwrap();
    drop(first);
    assert_eq!(read_all(&second), b"all");
    drop(second);
    assert_eq!(running.finish().code, Some(0));
    drop((one, two));
    let ended = Running::start(&mut relay(&[&ends[0], &ends[1]])).finish();
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("Connection refused"),
        "{}",
        ended.stderr
    );
}

#[test]
fn what_is_wrong_is_said_with_the_fix() {
    for (words, code, part) in [
        (
            &["tcp-listen:8080", "tcp:x:1"][..],
            2,
            "tcp-listen:127.0.0.1:8080",
        ),
        (&["http:x", "tcp:x:1"], 2, "service-listen:PATH:PORT"),
        (
            &["TCP-LISTEN:80,fork", "tcp:x:1"],
            2,
            "in lower case and without options of socat, as tcp-listen:ADDRESS:PORT",
        ),
        (
            &["tcp-listen:127.0.0.1:65536", "tcp:x:1"],
            2,
            "from 0 to 65535",
        ),
        (
            &["unix-listen:@name", "tcp:x:1"],
            2,
            "names an abstract socket",
        ),
        (
            &["udp-listen:127.0.0.1:0", "tcp:127.0.0.1:1"],
            2,
            "is a stream",
        ),
        (
            &["tcp-listen:127.0.0.1:0", "tcp:127.0.0.1:1", "--way", "fast"],
            2,
            "splice",
        ),
        (
            &["tcp-listen:127.0.0.1:0", "tcp:127.0.0.1:1", "--buffer", "1"],
            2,
            "4K to 16M",
        ),
        (
            &[
                "tcp-listen:127.0.0.1:0",
                "tcp:127.0.0.1:1",
                "--workers",
                "0",
            ],
            2,
            "at least 1",
        ),
        (
            &[
                "tcp-listen:127.0.0.1:0",
                "tcp:127.0.0.1:1",
                "--idle-timeout",
                "0",
            ],
            2,
            "more than 0",
        ),
        (
            &["unix-listen:/nonexistent/x", "tcp:127.0.0.1:1"],
            1,
            "cannot listen",
        ),
    ] {
        let ended = Running::start(&mut relay(words)).finish();
        assert_eq!(ended.code, Some(code), "{words:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(part), "{words:?}: {}", ended.stderr);
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = format!("tcp-listen:{}", taken.local_addr().unwrap());
    let ended = Running::start(&mut relay(&[&from, "tcp:127.0.0.1:1"])).finish();
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("in use"), "{}", ended.stderr);
}

#[test]
fn the_help_lists_every_kind_of_end() {
    let ended = Running::start(&mut relay(&["--help"])).finish();
    assert_eq!(ended.code, Some(0));
    let said = String::from_utf8(ended.stdout).unwrap();
    for kind in [
        "tcp",
        "tcp-listen",
        "udp",
        "udp-listen",
        "unix",
        "unix-listen",
        "unix-dgram",
        "unix-dgram-listen",
        "unix-seqpacket",
        "unix-seqpacket-listen",
        "hybrid",
        "attach",
        "attach-listen",
        "service",
        "service-listen",
        "vsock",
        "vsock-listen",
    ] {
        assert!(said.contains(&format!("{kind}:")), "{kind}");
    }
}
