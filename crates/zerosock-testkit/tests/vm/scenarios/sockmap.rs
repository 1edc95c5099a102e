//! Redirection inside the guest's kernel (sockmap) between its own AF_VSOCK sockets and others, over
//! virtio and over the loopback CID. `zerosock-bench relay --vm` measures it.

use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use zerosock_cli::vm::hybrid;
use zerosock_cli::vm::pattern::Pattern;
use zerosock_testkit::datagrams::foreign_bytes;
use zerosock_testkit::protocol::Command;
use zerosock_testkit::remote::Pending;

use crate::lab::{Lab, STEP, deadlines, expected, port, write};

/// What one relay in the guest does.
#[derive(Copy, Clone)]
struct Run {
    way: &'static str,
    kind: &'static str,
    cid: u32,
    back: bool,
    bytes: u64,
    chunk: usize,
    /// Microseconds after each datagram.
    pause: u64,
    /// Receive buffer of the vsock socket, if not the default.
    buffer: Option<u64>,
}

impl Run {
    fn new(way: &'static str, kind: &'static str, cid: u32) -> Run {
        Run {
            way,
            kind,
            cid,
            back: false,
            bytes: 3 << 20,
            chunk: 65536,
            pause: 0,
            buffer: None,
        }
    }

    /// As many datagrams as all buffers hold.
    fn datagrams(way: &'static str, cid: u32) -> Run {
        Run {
            bytes: 1400 * 100,
            chunk: 1400,
            pause: 200,
            ..Run::new(way, "udp", cid)
        }
    }

    /// From vsock to TCP.
    fn back(cid: u32) -> Run {
        Run {
            back: true,
            bytes: 1 << 20,
            ..Run::new("sockmap", "tcp", cid)
        }
    }

    fn start(self, lab: &Lab, port: u32) -> Pending {
        let mut argv = format!(
            "/bin/zerosock test-guest sockmap --way {} --kind {} --cid {} --port {port} --bytes {} \
             --chunk {} --pause {}",
            self.way, self.kind, self.cid, self.bytes, self.chunk, self.pause
        );
        if self.back {
            argv += " --back";
        }
        if let Some(bytes) = self.buffer {
            argv += &format!(" --buffer {bytes}");
        }
        let argv = argv.split_whitespace().map(str::to_owned).collect();
        lab.a.start(Command::Run { argv })
    }
}

/// The value of `name=value` in the output.
fn value<'a>(said: &'a str, name: &str) -> &'a str {
    said.split_whitespace()
        .filter_map(|word| word.split_once('='))
        .find_map(|(key, value)| (key == name).then_some(value))
        .unwrap_or_else(|| panic!("no {name}: {said}"))
}

fn number(said: &str, name: &str) -> u64 {
    value(said, name).parse().expect("a number")
}

fn finished(running: Pending) -> String {
    let done = running.wait(STEP).expect("an end");
    let said = done.text.unwrap_or_default();
    assert_eq!(done.bytes, 0, "{said}");
    said
}

/// Whether the guest's kernel has sockmap for vsock.
pub(super) fn has_sockmap_for_vsock(lab: &Lab) -> bool {
    let mut numbers = lab.release.split('.').map(str::parse::<u32>);
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or(0);
    (next(), next()) >= (6, 4)
}

/// The same. If not, checks that this is said.
fn has_vsock(lab: &Lab) -> bool {
    if has_sockmap_for_vsock(lab) {
        return true;
    }
    let port = port();
    let _listener = lab.a.host_listener(port);
    let running = Run::datagrams("sockmap", 2).start(lab, port);
    let done = running.wait(STEP).expect("an end");
    let said = done.text.unwrap_or_default();
    assert_ne!(done.bytes, 0, "{said}");
    assert!(said.contains("cannot redirect socket B"), "{said}");
    println!(
        "Linux {} has no sockmap for vsock (6.4 or later has): refused by name",
        lab.release
    );
    false
}

/// The guest's loopback device.
pub(super) fn loopback_up(lab: &Lab) {
    let argv = ["/bin/busybox", "ifconfig", "lo", "127.0.0.1", "up"];
    let argv = argv.map(str::to_owned).to_vec();
    let up = lab.a.run(Command::Run { argv });
    assert_eq!(up.bytes, 0, "{:?}", up.text);
}

/// The far end is on this machine.
pub(crate) fn contents_virtio(lab: &Lab) {
    loopback_up(lab);
    if !has_vsock(lab) {
        return;
    }
    let run = Run::datagrams("sockmap", 2);
    let (running, stream) = accepted(lab, run);
    let mut received = Vec::new();
    (&stream).read_to_end(&mut received).expect("its end");
    drop(stream);
    let said = finished(running);
    println!("udp to vsock: {}", said.trim());
    let sent = Pattern::bytes(1, run.bytes as usize);
    assert_eq!(received.len(), sent.len(), "{said}");
    assert_eq!(foreign_bytes(&sent, &received, run.chunk), 0, "{said}");
    // Datagrams that pass by hand may overtake others (docs/sockmap.md).
    assert!(received == sent || number(&said, "by_hand") > 0, "{said}");
    assert!(number(&said, "redirected") > 0, "{said}");

    let run = Run::back(2);
    until_redirected(|| {
        let (running, stream) = accepted(lab, run);
        let digest = write(&stream, 1, run.bytes, &[65536]);
        stream.shutdown(Shutdown::Write).expect("shut down");
        let said = finished(running);
        println!("vsock to tcp: {}", said.trim());
        assert_eq!(value(&said, "client_sha256"), digest);
        number(&said, "redirected")
    });
}

/// What is queued before the relay begins passes by hand, and so do bytes that follow without a gap:
/// the other end may deliver all of them before. Tries again until some are redirected: one in eight
/// attempts may be enough for that on a slow machine.
fn until_redirected(mut run: impl FnMut() -> u64) {
    let redirected = (0..150).any(|_| run() > 0);
    assert!(redirected, "all bytes passed by hand, each time");
}

/// Both ends are in the guest.
pub(crate) fn contents_loopback(lab: &Lab) {
    loopback_up(lab);
    if !has_vsock(lab) {
        return;
    }
    let run = Run::datagrams("sockmap", 1);
    let said = finished(run.start(lab, port()));
    println!("udp to vsock loopback: {}", said.trim());
    assert_eq!(number(&said, "far_bytes"), run.bytes, "{said}");
    assert_eq!(number(&said, "far_foreign"), 0, "{said}");
    if number(&said, "by_hand") == 0 {
        let digest = expected(1, run.bytes);
        assert_eq!(value(&said, "far_sha256"), digest, "{said}");
    }
    assert!(number(&said, "redirected") > 0, "{said}");

    let run = Run::back(1);
    until_redirected(|| {
        let said = finished(run.start(lab, port()));
        println!("vsock loopback to tcp: {}", said.trim());
        let digest = expected(1, run.bytes);
        assert_eq!(value(&said, "client_sha256"), digest, "{said}");
        number(&said, "redirected")
    });
    // The kernel would lose bytes of a Unix stream, repeat some of TCP, and redirect what was read in part of
    // a buffer that one read does not take.
    let larger = Run {
        buffer: Some((256 << 10) + 1),
        ..Run::back(1)
    };
    for (run, reason) in [
        (Run::new("sockmap", "unix", 1), "Unix stream"),
        (Run::new("sockmap", "tcp", 1), "TCP, which can be no source"),
        (larger, "has a receive buffer of 262145 bytes"),
    ] {
        let done = run.start(lab, port()).wait(STEP).expect("an end");
        let said = done.text.unwrap_or_default();
        assert!(done.bytes != 0 && said.contains(reason), "{said}");
    }
}

/// Starts a relay whose far end is on this machine.
fn accepted(lab: &Lab, run: Run) -> (Pending, UnixStream) {
    let port = port();
    let listener = lab.a.host_listener(port);
    let running = run.start(lab, port);
    let stream = hybrid::accept(&listener, STEP).expect("the relay");
    deadlines(&stream);
    (running, stream)
}
