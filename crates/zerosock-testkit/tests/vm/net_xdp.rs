//! `zerosock net --xdp` with stock guests: the device has one end of a veth pair, the host the other.

use crate::Alone;
use crate::lab::Skipped;
use crate::net::guest::{Card, Image, Vm};
use crate::net::lab::{Daemon, ip, isolate, needs_ethtool, run};
use crate::net::traffic::{IPERF3_BYTES, iperf3, ping, tcp_by_guest, tcp_to_guest};

/// All of them.
pub(crate) const ALL: &[(&str, Alone)] = &[
    ("user_mode_over_af_xdp", user_mode),
    ("qemu_over_af_xdp", qemu),
];

const MAC: &str = "52:54:00:12:34:56";
const HOST: &str = "10.77.0.1";
const GUEST: &str = "10.77.0.2";

/// A daemon on the interface `near`. The other end, `far`, has the host's address.
fn daemon() -> Result<Daemon, Skipped> {
    isolate()?;
    needs_ethtool()?;
    ip(
        "link add near numtxqueues 1 numrxqueues 1 type veth peer name far numtxqueues 1 numrxqueues 1",
    );
    ip("link set near up");
    ip("link set far up");
    ip(&format!("addr add {HOST}/24 dev far"));
    // The guest takes only frames with checksums, so the far end must add them.
    run("ethtool", "-K far tx off");
    Ok(Daemon::start(&format!(
        "--socket @/net --xdp near --mac {MAC}"
    )))
}

/// Runs `traffic`, nearly all bytes of which are copied neither to nor from the guest here. Returns the
/// numbers of bytes that the guest has received and sent.
fn in_place(daemon: &Daemon, traffic: impl FnOnce()) -> [u64; 2] {
    let names = ["rx_bytes", "rx_copied", "tx_bytes", "tx_copied"];
    let counters = || names.map(|name| daemon.counter("near:0", name));
    let before = counters();
    traffic();
    let after = counters();
    let [received, received_copied, sent, sent_copied] =
        std::array::from_fn(|index| after[index] - before[index]);
    // The buffers that the guest had posted before its memory was known to be usable are copied to.
    let copied = received_copied + sent_copied;
    assert!(
        copied < (received + sent) / 4,
        "{copied} of {received} and {sent}"
    );
    [received, sent]
}

/// Bytes move both ways.
fn check_traffic(vm: &Vm, daemon: &Daemon, bytes: usize) {
    vm.configure(GUEST);
    ping(vm, HOST);
    let [received, sent] = in_place(daemon, || {
        tcp_by_guest(vm, HOST, bytes);
        tcp_to_guest(vm, GUEST, bytes);
    });
    assert!(received as usize > 2 * bytes && sent as usize > bytes);
}

/// iperf3 sends both ways.
fn check_iperf3(vm: &Vm, daemon: &Daemon, name: &str) {
    let mut has_run = false;
    let [received, sent] = in_place(daemon, || has_run = iperf3(vm, HOST, name));
    assert!(!has_run || received > IPERF3_BYTES / 2 && sent > IPERF3_BYTES / 2);
}

fn user_mode() -> Result<(), Skipped> {
    let image = Image::user_mode()?;
    let daemon = daemon()?;
    let vm = image.boot_user_mode(&daemon.path("net"));
    check_traffic(&vm, &daemon, 8 << 20);
    check_iperf3(&vm, &daemon, "user_mode_over_af_xdp");
    drop(vm);
    let vm = image.boot_user_mode(&daemon.path("net"));
    check_traffic(&vm, &daemon, 8 << 20);
    drop(vm);
    daemon.stop();
    Ok(())
}

/// The guest reboots: its memory is registered again.
fn qemu() -> Result<(), Skipped> {
    let image = Image::debian("6.12")?;
    let daemon = daemon()?;
    let vm = image.boot_qemu(&Card::new(&daemon.path("net"), MAC));
    check_traffic(&vm, &daemon, 2 << 20);
    check_iperf3(&vm, &daemon, "qemu_over_af_xdp");
    vm.reboot();
    check_traffic(&vm, &daemon, 2 << 20);
    drop(vm);
    daemon.stop();
    Ok(())
}
