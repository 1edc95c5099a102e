//! Guests on a switch with an uplink: one under QEMU and one under user-mode Linux.

use super::guest::{Card, Image, Vm};
use super::lab::{Daemon, ip, isolate, run};
use super::traffic::{
    IPERF3_BYTES, iperf3_between, ping, scp, tcp_between, tcp_by_guest, tcp_to_guest,
};
use crate::lab::Skipped;

const HOST: &str = "10.77.0.1";
const A: &str = "10.77.0.2";
const B: &str = "10.77.0.3";
const MAC_A: &str = "52:54:00:00:00:0a";
const MAC_B: &str = "52:54:00:00:00:0b";

/// The driver takes neither partial checksums nor segments, and has no mergeable buffers.
const NO_OFFLOADS: &str =
    ",mrg_rxbuf=off,guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off";

/// The guests reach each other and the host. One takes another address, and is heard by none until it
/// has its own again.
pub(crate) fn guests() -> Result<(), Skipped> {
    let (user_mode, debian) = (Image::user_mode()?, Image::debian("6.12")?);
    isolate()?;
    let daemon = Daemon::start(&format!(
        "--socket @/a,mac={MAC_A},mac-filter --socket @/b,mac={MAC_B},mac-filter --tap tap"
    ));
    ip("addr add 10.77.0.1/24 dev tap");
    let a = user_mode.boot_user_mode(&daemon.path("a"));
    let socket = daemon.path("b");
    let b = debian.boot_qemu(&Card {
        properties: NO_OFFLOADS,
        ..Card::new(&socket, MAC_B)
    });
    a.configure(A);
    b.configure(B);
    ping(&a, B);
    ping(&b, A);
    tcp_between(&a, &b, B, 4);
    tcp_between(&b, &a, A, 4);
    for (vm, address) in [(&a, A), (&b, B)] {
        ping(vm, HOST);
        tcp_by_guest(vm, HOST, 2 << 20);
        tcp_to_guest(vm, address, 2 << 20);
    }

    assert_eq!(daemon.counter("/b", "tx_spoofed"), 0);
    set_mac(&b, "52:54:00:00:00:0c");
    for address in [A, HOST] {
        let (status, text) = b.try_sh(&format!("ping -c 2 -i 0.2 -W 1 {address}"));
        assert!(
            status != 0 && text.contains(" 0 packets received"),
            "{text}"
        );
    }
    assert!(daemon.counter("/b", "tx_spoofed") > 0);
    assert!(!run("ip", "neigh show dev tap").contains("00:0c"));
    set_mac(&b, MAC_B);
    ping(&b, A);
    ping(&b, HOST);
    drop((a, b));
    daemon.stop();
    Ok(())
}

/// iperf3 and scp between two guests: their frames are copied once, from guest to guest.
pub(crate) fn offloads() -> Result<(), Skipped> {
    const NAME: &str = "guests_with_offloads_on_a_switch";
    let (user_mode, debian) = (Image::user_mode()?, Image::debian("6.1")?);
    let daemon = Daemon::start("--socket @/a --socket @/b");
    let a = user_mode.boot_user_mode(&daemon.path("a"));
    let b = debian.boot_qemu(&Card::new(&daemon.path("b"), MAC_B));
    a.configure(A);
    b.configure(B);
    ping(&a, B);
    if iperf3_between(&a, &b, B, NAME) {
        for port in ["/a", "/b"] {
            let [sent, received, copied] =
                ["tx_bytes", "rx_bytes", "rx_copied"].map(|name| daemon.counter(port, name));
            assert!(sent > IPERF3_BYTES / 2 && received > IPERF3_BYTES / 2);
            // Frames of which the head alone had found room are copied twice.
            assert!(copied < received / 4, "{port}: {copied} of {received}");
        }
    }
    scp(&a, &b, B, NAME);
    drop((a, b));
    daemon.stop();
    Ok(())
}

fn set_mac(vm: &Vm, mac: &str) {
    vm.sh(&format!(
        "ip link set eth0 down; ip link set eth0 address {mac} && ip link set eth0 up"
    ));
}
