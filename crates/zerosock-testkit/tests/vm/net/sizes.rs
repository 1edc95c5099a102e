//! Large frames, and several queue pairs.

use super::guest::{Card, Image, Vm};
use super::lab::{Daemon, ip, isolate, run};
use super::traffic::{ping, tcp_by_guest, tcp_to_guest};
use crate::lab::Skipped;

const MAC: &str = "52:54:00:12:34:56";
const HOST: &str = "10.77.0.1";
const GUEST: &str = "10.77.0.2";
/// Bytes of a large ping: with 9000 bytes of MTU it is one frame, with 1500 it is seven.
const LARGE: &str = "8900";

/// Pings with large packets, each of which crosses as one frame, there and back.
fn ping_large(vm: &Vm, daemon: &Daemon) {
    let frames = || ["tx_frames", "rx_frames"].map(|name| daemon.counter("tap", name));
    let before = frames();
    let text = vm.sh(&format!("ping -c 4 -i 0.2 -W 5 -s {LARGE} {HOST}"));
    assert!(text.contains("4 packets received"), "{text}");
    for (after, before) in frames().into_iter().zip(before) {
        // A few more are of ARP and IPv6.
        assert!((4..20).contains(&(after - before)), "{before} to {after}");
    }
}

fn mtu(vm: &Vm) -> String {
    vm.sh("cat /sys/class/net/eth0/mtu").trim().to_owned()
}

/// The guest learns the MTU from the device. The host's end gets a smaller MTU, and a larger one, while
/// the guest runs.
pub(crate) fn user_mode() -> Result<(), Skipped> {
    let image = Image::user_mode()?;
    isolate()?;
    let daemon = Daemon::start("--socket @/net --tap tap --mtu 9000");
    ip("addr add 10.77.0.1/24 dev tap");
    let vm = image.boot_user_mode(&daemon.path("net"));
    assert_eq!(mtu(&vm), "9000");
    vm.configure(GUEST);
    ping_large(&vm, &daemon);
    tcp_by_guest(&vm, HOST, 4 << 20);
    ip("link set tap mtu 1400");
    ping(&vm, HOST);
    tcp_by_guest(&vm, HOST, 4 << 20);
    // Beyond the guest's MTU: the kernel there takes what its buffers hold.
    vm.sh("ip link set eth0 mtu 1500");
    ip("link set tap mtu 9000");
    let text = run(
        "/bin/busybox",
        &format!("ping -c 3 -W 5 -s {LARGE} {GUEST}"),
    );
    assert!(text.contains("3 packets received"), "{text}");
    tcp_to_guest(&vm, GUEST, 4 << 20);
    drop(vm);
    daemon.stop();
    Ok(())
}

/// Two queue pairs carry large frames, also when the guest changes their use. Its driver starts again.
pub(crate) fn qemu() -> Result<(), Skipped> {
    let image = Image::debian("6.12")?;
    isolate()?;
    let daemon = Daemon::start(
        "--socket @/net --tap tap --mtu 9000 --queues 2 --spin-us 50 --require-sealed-memory",
    );
    ip("addr add 10.77.0.1/24 dev tap");
    let socket = daemon.path("net");
    let vm = image.boot_qemu(&Card {
        queues: 2,
        properties: ",host_mtu=9000,event_idx=off,indirect_desc=off",
        ..Card::new(&socket, MAC)
    });
    assert_eq!(mtu(&vm), "9000");
    vm.configure(GUEST);
    assert_eq!(
        vm.sh("ls -d /sys/class/net/eth0/queues/tx-*")
            .lines()
            .count(),
        2
    );
    ping_large(&vm, &daemon);
    tcp_by_guest(&vm, HOST, 4 << 20);
    if vm.has("ethtool") {
        both_queues(&vm);
        // The device has no reset of single queues, which QEMU would not pass on.
        vm.try_sh("/bin/ethtool -G eth0 rx 64 tx 64");
        ping(&vm, HOST);
        vm.sh("/bin/ethtool -K eth0 tso off tx off");
        tcp_by_guest(&vm, HOST, 2 << 20);
    } else {
        println!("SKIPPED both queues in qemu_with_large_frames_on_two_queues: install ethtool");
    }
    vm.sh("cd /sys/bus/virtio/drivers/virtio_net; it=$(ls -d virtio*); echo $it >unbind; echo $it >bind");
    vm.configure(GUEST);
    ping_large(&vm, &daemon);
    drop(vm);
    daemon.stop();
    Ok(())
}

/// Each processor sends by its own queue. The guest gives up the second pair, and takes it again.
fn both_queues(vm: &Vm) {
    for processor in 0..2 {
        let before = kicks(vm);
        vm.sh(&format!(
            "taskset -c {processor} ping -c 3 -i 0.2 -W 5 {HOST}"
        ));
        let after = kicks(vm);
        assert!(after[processor] > before[processor], "{before:?} {after:?}");
    }
    for pairs in [1, 2] {
        vm.sh(&format!("/bin/ethtool -L eth0 combined {pairs}"));
        ping(vm, HOST);
        tcp_by_guest(vm, HOST, 2 << 20);
    }
}

/// Notifications of the device by each transmit queue, as the driver counts them.
fn kicks(vm: &Vm) -> [u64; 2] {
    let text = vm.sh("/bin/ethtool -S eth0");
    [0, 1].map(|queue| {
        let name = format!("tx{queue}_kicks:");
        let count = text
            .split_whitespace()
            .skip_while(|word| *word != name)
            .nth(1);
        count.and_then(|count| count.parse().ok()).expect(&text)
    })
}
