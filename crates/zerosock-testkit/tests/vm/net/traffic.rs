//! What guests send and receive: the steps of the scenarios.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;

use zerosock_cli::vm::children::{self, Guarded, Log};
use zerosock_cli::vm::pattern::{Pattern, sha256};

use super::guest::Vm;
use super::lab::{Daemon, wait_until};
use crate::lab::{STEP, zerosock};

/// The guest pings this address.
pub(crate) fn ping(vm: &Vm, address: &str) {
    let text = vm.sh(&format!("ping -c 3 -i 0.2 -W 5 {address}"));
    assert!(text.contains("3 packets received"), "{text}");
}

/// The guest connects to this machine at `host`, receives bytes, and sends them back over a second
/// connection.
pub(crate) fn tcp_by_guest(vm: &Vm, host: &str, bytes: usize) {
    let listener = TcpListener::bind((host, 0)).expect("a listener");
    let port = listener.local_addr().expect("an address").port();
    let bytes = Pattern::bytes(7, bytes);
    let server = std::thread::spawn(move || {
        let (mut first, _) = listener.accept().expect("the guest's connection");
        first.set_write_timeout(Some(STEP)).expect("a deadline");
        first.write_all(&bytes).expect("sent");
        first.shutdown(Shutdown::Write).expect("shut down");
        let (mut second, _) = listener.accept().expect("the guest's connection");
        second.set_read_timeout(Some(STEP)).expect("a deadline");
        let mut received = Vec::new();
        second.read_to_end(&mut received).expect("received");
        [sha256(&bytes), sha256(&received)]
    });
    let text = vm.sh(&format!(
        "nc {host} {port} </dev/null >/tmp/f; sha256sum /tmp/f; nc {host} {port} </tmp/f; rm /tmp/f"
    ));
    let in_guest = text.split_whitespace().next().unwrap_or_default();
    let [sent, received] = server.join().expect("the server");
    assert_eq!(in_guest, sent, "what the guest received: {text}");
    assert_eq!(received, sent, "what the guest sent");
}

/// This machine connects to the guest at `address` and copies a file to it.
pub(crate) fn tcp_to_guest(vm: &Vm, address: &str, bytes: usize) {
    let receiving = vm.start("nc -l -p 5000 </dev/null >/tmp/f; sha256sum /tmp/f; rm /tmp/f");
    let bytes = Pattern::bytes(8, bytes);
    let mut stream = None;
    // Nothing else tells that the guest listens.
    wait_until("the guest to listen", || {
        stream = TcpStream::connect((address, 5000)).ok();
        stream.is_some()
    });
    let mut stream = stream.expect("a connection");
    stream.set_write_timeout(Some(STEP)).expect("a deadline");
    stream.write_all(&bytes).expect("sent");
    drop(stream);
    let (_, text) = vm.outcome(receiving);
    assert!(text.starts_with(&sha256(&bytes)), "{text}");
}

/// The guest asks a DHCP server on the interface of this machine, and gets `address`. The server's
/// interface has the address `host`.
pub(crate) fn dhcp(vm: &Vm, daemon: &Daemon, interface: &str, host: &str, address: &str) {
    let (file, leases) = (daemon.path("udhcpd.conf"), daemon.path("leases"));
    let [leases, pid] = [leases, daemon.path("udhcpd.pid")].map(|path| path.display().to_string());
    std::fs::write(&leases, "").expect("a file");
    let settings = format!(
        "interface {interface}\nstart {address}\nend {address}\nmax_leases 1\nlease_file {leases}\n\
         pidfile {pid}\noption subnet 255.255.255.0\noption router {host}\noption lease 600\n"
    );
    std::fs::write(&file, settings).expect("a file");
    let mut server = children::with_parent_watchdog(zerosock(), Path::new("/bin/busybox"));
    // It looks for 100 ms whether the address is in use.
    server.args(["udhcpd", "-f", "-a", "100"]).arg(&file);
    server.stdin(Stdio::null()).stderr(Stdio::null());
    let _server = Guarded::spawn(&mut server).expect("a DHCP server");
    let text = dhcp_client(vm);
    assert!(text.contains(&format!("inet {address}/24 ")), "{text}");
    assert!(text.contains(&format!("default via {host} ")), "{text}");
}

/// The guest gets its address and its route by DHCP. Returns both as `ip` shows them.
pub(crate) fn dhcp_client(vm: &Vm) -> String {
    vm.sh(
        "printf '#!/bin/sh\\n[ \"$1\" = bound ] || exit 0\\nip addr add $ip/$mask dev eth0\\n\
         ip route add default via $router\\n' >/tmp/dhcp; chmod +x /tmp/dhcp; ip link set eth0 up\n\
         udhcpc -i eth0 -f -q -n -t 20 -T 1 -s /tmp/dhcp 2>&1 && ip addr show eth0 && ip route",
    )
}

/// Bytes that iperf3 sends in each direction. It ends when the last ones are in the sender's buffer.
pub(crate) const IPERF3_BYTES: u64 = 16 << 20;

/// Whether the guest has a program. If not, tells what to do for it to be in the scenario `name`.
fn has(vm: &Vm, program: &str, name: &str, fix: &str) -> bool {
    let has = vm.has(program);
    if !has {
        println!("SKIPPED {program} in {name}: {fix}");
    }
    has
}

/// The guest runs iperf3 with a server on this machine, in both directions. `name` is that of the
/// scenario. Returns whether the guest has iperf3.
pub(crate) fn iperf3(vm: &Vm, host: &str, name: &str) -> bool {
    if !has(vm, "iperf3", name, "install iperf3") {
        return false;
    }
    let mut server = children::with_parent_watchdog(zerosock(), Path::new("iperf3"));
    server.args(["-s", "--forceflush", "-B", host]);
    server.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut server = Guarded::spawn(&mut server).expect("a server");
    let log = Log::default();
    log.follow(server.child().stdout.take().expect("a pipe"), None);
    assert!(log.wait_for("Server listening", STEP).is_some(), "iperf3");
    iperf3_client(vm, host, name);
    true
}

/// The same with a server in the guest `to`.
pub(crate) fn iperf3_between(vm: &Vm, to: &Vm, address: &str, name: &str) -> bool {
    if !has(vm, "iperf3", name, "install iperf3") {
        return false;
    }
    // Only the kernel tells that the server listens: on port 5201.
    to.sh("/bin/iperf3 -s -D; until grep -q :1451 /proc/net/tcp*; do usleep 10000; done");
    iperf3_client(vm, address, name);
    true
}

fn iperf3_client(vm: &Vm, host: &str, name: &str) {
    for direction in ["", "-R"] {
        let text = vm.sh(&format!(
            "/bin/iperf3 -c {host} -n {IPERF3_BYTES} -f M {direction}"
        ));
        // "[  5]   0.00-0.16   sec  16.0 MBytes   100 MBytes/sec        receiver"
        let total = text.lines().find(|line| line.ends_with("receiver"));
        let words: Vec<_> = total.expect(&text).split_whitespace().collect();
        let number = |unit| {
            let at = words.iter().position(|word| *word == unit);
            let number: Option<f64> = at.and_then(|at| words[at - 1].parse().ok());
            number.expect(&text)
        };
        assert!(number("MBytes") > 0.0, "{text}");
        println!("{name}: iperf3 {direction} {} MB/s", number("MBytes/sec"));
    }
}

/// A guest copies a file by scp to the guest at `address`, and back.
pub(crate) fn scp(from: &Vm, to: &Vm, address: &str, name: &str) {
    let fix = "its package could not be downloaded";
    let programs = ["scp", "dbclient"];
    if !programs.iter().all(|program| has(from, program, name, fix)) {
        return;
    }
    let user = "mkdir -p /etc/dropbear /root; echo root::0:0::/root:/bin/sh >/etc/passwd";
    // Makes its key for the first client. It listens when this returns.
    to.sh(&format!("{user}; dropbear -R -B"));
    // dbclient does not know the options that scp gives.
    let text = from.sh(&format!(
        r#"{user}
        printf '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift\nexec dbclient -yy root@"$@"\n' >/tmp/ssh
        chmod +x /tmp/ssh; dd if=/dev/urandom of=/tmp/f bs=1M count=2 2>/dev/null
        scp -O -S /tmp/ssh /tmp/f root@{address}:/tmp/g && scp -O -S /tmp/ssh root@{address}:/tmp/g /tmp/h &&
        sha256sum </tmp/f && sha256sum </tmp/h && rm /tmp/f /tmp/h"#
    ));
    let there = to.sh("sha256sum </tmp/g; rm /tmp/g");
    let sums: Vec<_> = text.lines().filter(|line| line.ends_with(" -")).collect();
    assert_eq!(sums, [there.trim(); 2], "{text}");
}

/// Two guests of one network: `to` listens at `address`, and `from` connects and sends a file.
pub(crate) fn tcp_between(from: &Vm, to: &Vm, address: &str, mib: u32) {
    let receiving = to.start("nc -l -p 5001 -e sh -c 'cat >/tmp/g'; sha256sum </tmp/g; rm /tmp/g");
    let text = from.sh(&format!(
        "dd if=/dev/urandom of=/tmp/f bs=1M count={mib} 2>/dev/null; sha256sum </tmp/f\n\
         until nc {address} 5001 </tmp/f; do sleep 0.1; done; rm /tmp/f"
    ));
    let (_, received) = to.outcome(receiving);
    assert_eq!(received.trim(), text.lines().next().unwrap_or_default());
}
