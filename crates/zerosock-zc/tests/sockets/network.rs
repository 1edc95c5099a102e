//! Networks of a test: a sink that reads pages without a copy, and a cable between two namespaces.
//! Where a namespace cannot be created the test prints that it was skipped.

use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerosock_zc::SendBackend;

use crate::alone::skip;

const PATIENCE: Duration = Duration::from_secs(300);

/// All of them: what works with one works with each.
pub(crate) const BACKENDS: [SendBackend; 3] = [
    SendBackend::Uring,
    SendBackend::ErrorQueue,
    SendBackend::Copy,
];

/// Addresses behind the device that drops all packets.
pub(crate) const SINK: [&str; 2] = ["10.9.0.2:9", "[fd09::2]:9"];
/// The addresses of the two ends of the cable.
pub(crate) const CABLE: [[&str; 2]; 2] =
    [["10.8.0.1:0", "10.8.0.2:0"], ["[fd08::1]:0", "[fd08::2]:0"]];

/// Runs `test` on a thread in a network namespace of its own. Sockets that it makes stay there.
fn isolated<T: Send>(name: &str, test: impl FnOnce() -> T + Send) -> Option<T> {
    thread::scope(|scope| {
        let inside = scope.spawn(|| {
            if let Err(why) = zerosock_sys::network::isolate_thread() {
                skip(
                    "network",
                    name,
                    &format_args!("no namespace can be made: {why}"),
                );
                return None;
            }
            ip("link set lo up");
            Some(test())
        });
        match inside.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Runs ip(8) with these words.
pub(crate) fn ip(words: &str) {
    let output = Command::new("ip")
        .args(words.split(' '))
        .output()
        .expect("ip(8)");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "ip {words}: {told}");
}

/// Runs tc(8) with these words.
pub(crate) fn tc(words: &str) {
    let output = Command::new("tc").args(words.split(' ')).output();
    let output = output.expect("tc(8)");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "tc {words}: {told}");
}

/// Limits the cable to 50 kB per millisecond: packets wait in a queue, and their bytes are read
/// late. If a buffer is returned too early and overwritten, the receiver gets the new bytes.
pub(crate) fn slow_down() {
    tc("qdisc replace dev near0 root tbf rate 400mbit burst 20000 limit 8000000");
}

/// A namespace with nothing but its loopback device.
pub(crate) fn with_loopback<T: Send>(name: &str, test: impl FnOnce() -> T + Send) -> Option<T> {
    isolated(name, test)
}

/// A namespace with a sink in it: a device that drops what it is given, without looking at it.
pub(crate) fn with_sink<T: Send>(name: &str, test: impl FnOnce() -> T + Send) -> Option<T> {
    isolated(name, || {
        ip("link add sink0 type ifb");
        ip("addr add 10.9.0.1/24 dev sink0");
        ip("addr add fd09::1/64 dev sink0 nodad");
        ip("link set sink0 mtu 65535 up");
        for address in ["10.9.0.2", "fd09::2"] {
            ip(&format!(
                "neigh add {address} lladdr 02:00:00:00:00:02 dev sink0 nud permanent"
            ));
        }
        test()
    })
}

/// Two namespaces with a cable between them: `near` runs in one and `far` in the other, at the same
/// time; both ends are up before either starts. The cable copies packets; the sending socket does
/// not.
pub(crate) fn with_cable<N: Send, F: Send>(
    name: &str,
    near: impl FnOnce() -> N + Send,
    far: impl FnOnce() -> F + Send,
) -> Option<(N, F)> {
    thread::scope(|scope| {
        let (here, peer) = mpsc::channel::<String>();
        let (ready, is_ready) = mpsc::channel();
        let (up, is_up) = mpsc::channel();
        let far = scope.spawn(move || {
            isolated(name, move || {
                // SAFETY: gettid(2) cannot fail and touches no memory.
                let thread = unsafe { libc::gettid() };
                let path = format!("/proc/{}/task/{thread}/ns/net", std::process::id());
                here.send(path).expect("the near end");
                is_ready.recv().expect("the cable");
                end("far0", ["2", "1"]);
                up.send(()).expect("the near end");
                far()
            })
        });
        let near = isolated(name, move || {
            let peer = peer.recv().ok()?;
            ip("link add near0 type veth peer name far0");
            ip(&format!("link set far0 netns {peer}"));
            end("near0", ["1", "2"]);
            ready.send(()).expect("the far end");
            is_up.recv().ok()?;
            Some(near())
        });
        let far = match far.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        Some((near??, far?))
    })
}

/// Configures an end of the cable: its number and that of the other end. The addresses of the other end are known:
/// on a busy machine the kernel can give up asking for them (3 s) before the answer comes.
fn end(device: &str, [number, other]: [&str; 2]) {
    ip(&format!(
        "link set {device} address 02:00:00:00:00:0{number}"
    ));
    ip(&format!("addr add 10.8.0.{number}/24 dev {device}"));
    ip(&format!("addr add fd08::{number}/64 dev {device} nodad"));
    ip(&format!("link set {device} mtu 9000 up"));
    for address in [format!("10.8.0.{other}"), format!("fd08::{other}")] {
        ip(&format!(
            "neigh add {address} lladdr 02:00:00:00:00:0{other} dev {device} nud permanent"
        ));
    }
}

/// Accepts a connection of the other end, which may have failed.
pub(crate) fn accept(listener: &TcpListener) -> TcpStream {
    let patience = Timespec::try_from(PATIENCE).expect("it fits");
    let mut polled = [PollFd::new(listener, PollFlags::IN)];
    let ready = poll(&mut polled, Some(&patience)).expect("a listener");
    assert_eq!(ready, 1, "nothing connects");
    listener.accept().expect("a stream").0
}

/// The `index`th byte of a stream in which positions are distinguishable.
pub(crate) fn byte(index: u64) -> u8 {
    (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Fills `bytes` with what lies at `from` of that stream.
pub(crate) fn fill(bytes: &mut [u8], from: u64) {
    for (offset, place) in (from..).zip(bytes) {
        *place = byte(offset);
    }
}
