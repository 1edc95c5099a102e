//! A guest on a TAP: the traffic of every day, and the ends of guests and interfaces.

use std::io::Read;
use std::net::TcpListener;

use zerosock_cli::vm::pattern::sha256;

use super::guest::{Card, Image, Vm};
use super::lab::{Daemon, ip, isolate, run, wait_until};
use super::traffic::{dhcp, iperf3, ping, tcp_by_guest, tcp_to_guest};
use crate::lab::{STEP, Skipped};

const MAC: &str = "52:54:00:12:34:56";
const HOST: &str = "10.77.0.1";
const GUEST: &str = "10.77.0.2";

/// A daemon with the interface `tap`, which has an address.
fn daemon() -> Daemon {
    let daemon = Daemon::start(&format!("--socket @/net --tap tap --mac {MAC}"));
    ip("addr add 10.77.0.1/24 dev tap");
    daemon
}

fn check_mac(vm: &Vm) {
    let text = vm.sh("cat /sys/class/net/eth0/address");
    assert_eq!(text.trim(), MAC);
}

fn has_carrier() -> bool {
    !run("ip", "-o link show dev tap").contains("NO-CARRIER")
}

/// A guest is configured by DHCP, and moves bytes. It is killed, and the next guest does the same. The
/// interface is removed under it, which ends the daemon.
pub(crate) fn user_mode() -> Result<(), Skipped> {
    let image = Image::user_mode()?;
    isolate()?;
    let mut daemon = daemon();
    assert!(!has_carrier());
    let boot = || {
        let vm = image.boot_user_mode(&daemon.path("net"));
        check_mac(&vm);
        dhcp(&vm, &daemon, "tap", HOST, GUEST);
        ping(&vm, HOST);
        tcp_by_guest(&vm, HOST, 4 << 20);
        assert!(has_carrier());
        vm
    };
    let vm = boot();
    tcp_to_guest(&vm, GUEST, 4 << 20);
    iperf3(&vm, HOST, "user_mode_over_a_tap");
    drop(vm);
    wait_until("the carrier to go", || !has_carrier());

    let _vm = boot();
    ip("link del tap");
    assert_eq!(daemon.wait().code(), Some(1), "{}", daemon.log.tail(15));
    let said = daemon.log.tail(15);
    assert!(said.contains("the interface was removed"), "{said}");
    Ok(())
}

/// A guest is configured by DHCP, moves bytes, loses its link while it sends, and reboots.
pub(crate) fn qemu() -> Result<(), Skipped> {
    let image = Image::debian("6.12")?;
    isolate()?;
    let daemon = daemon();
    let vm = image.boot_qemu(&Card::new(&daemon.path("net"), MAC));
    check_mac(&vm);
    dhcp(&vm, &daemon, "tap", HOST, GUEST);
    ping(&vm, HOST);
    tcp_by_guest(&vm, HOST, 2 << 20);
    tcp_to_guest(&vm, GUEST, 2 << 20);
    iperf3(&vm, HOST, "qemu_over_a_tap");
    link_down_under_traffic(&vm, &daemon);

    vm.reboot();
    vm.configure(GUEST);
    ping(&vm, HOST);
    tcp_by_guest(&vm, HOST, 2 << 20);
    drop(vm);
    daemon.stop();
    Ok(())
}

/// The interface goes down while the guest sends, and comes up when frames were dropped: all bytes
/// arrive.
fn link_down_under_traffic(vm: &Vm, daemon: &Daemon) {
    let listener = TcpListener::bind((HOST, 0)).expect("a listener");
    let port = listener.local_addr().expect("an address").port();
    let sending = vm.start(&format!(
        "dd if=/dev/urandom of=/tmp/f bs=1M count=2 2>/dev/null; sha256sum </tmp/f; nc {HOST} {port} </tmp/f"
    ));
    let (mut stream, _) = listener.accept().expect("the guest's connection");
    stream.set_read_timeout(Some(STEP)).expect("a deadline");
    let mut received = vec![0; 64 << 10];
    stream.read_exact(&mut received).expect("the first bytes");
    ip("link set tap down");
    // The guest repeats what is not acknowledged, and asks for the window when it is closed.
    wait_until("frames without a link", || {
        daemon.counter("tap", "tx_link_down") > 0
    });
    ip("link set tap up");
    stream.read_to_end(&mut received).expect("the other bytes");
    drop(stream);
    let (_, text) = vm.outcome(sending);
    assert!(text.starts_with(&sha256(&received)), "{text}");
}
