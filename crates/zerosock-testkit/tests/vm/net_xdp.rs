//! `zerosock net --xdp` with stock guests: the device has one end of a veth pair, the host the other.

use crate::Alone;
use crate::lab::Skipped;
use crate::net::guest::{Card, Image, Vm};
use crate::net::lab::{Daemon, ip, isolate, run};
use crate::net::traffic::{ping, tcp_by_guest, tcp_to_guest};

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
    if let Err(error) = std::process::Command::new("ethtool")
        .arg("--version")
        .output()
    {
        return Err(Skipped(format!("install ethtool: {error}")));
    }
    ip("link add near type veth peer name far");
    ip("link set near up");
    ip("link set far up");
    ip(&format!("addr add {HOST}/24 dev far"));
    // The guest takes only frames with checksums, so the far end must add them.
    run("ethtool", "-K far tx off");
    Ok(Daemon::start(&format!(
        "--socket @/net --xdp near --mac {MAC}"
    )))
}

/// Bytes move both ways, and nearly all of them are neither copied to nor from the guest here.
fn check_traffic(vm: &Vm, daemon: &Daemon, bytes: usize) {
    vm.configure(GUEST);
    ping(vm, HOST);
    let names = ["rx_bytes", "rx_copied", "tx_bytes", "tx_copied"];
    let counters = || names.map(|name| daemon.counter("near:0", name));
    let before = counters();
    tcp_by_guest(vm, HOST, bytes);
    tcp_to_guest(vm, GUEST, bytes);
    let after = counters();
    let [received, received_copied, sent, sent_copied] =
        std::array::from_fn(|index| after[index] - before[index]);
    assert!(received as usize > 2 * bytes && sent as usize > bytes);
    // The buffers that the guest had posted before its memory was known to be usable are copied to.
    let copied = received_copied + sent_copied;
    assert!(
        copied < (received + sent) / 4,
        "{copied} of {received} and {sent}"
    );
}

fn user_mode() -> Result<(), Skipped> {
    let image = Image::user_mode()?;
    let daemon = daemon()?;
    for _ in 0..2 {
        let vm = image.boot_user_mode(&daemon.path("net"));
        check_traffic(&vm, &daemon, 8 << 20);
    }
    daemon.stop();
    Ok(())
}

/// The guest reboots: its memory is registered again.
fn qemu() -> Result<(), Skipped> {
    let image = Image::debian("6.12")?;
    let daemon = daemon()?;
    let vm = image.boot_qemu(&Card::new(&daemon.path("net"), MAC));
    check_traffic(&vm, &daemon, 2 << 20);
    vm.reboot();
    check_traffic(&vm, &daemon, 2 << 20);
    drop(vm);
    daemon.stop();
    Ok(())
}
