//! Networks between two guests.

use super::daemon;
use super::guest::Vm;
use super::lan::{device, vhost_user};
use super::link::Link;
use crate::binary::Binary;
use crate::image::{Image, short_dir};
use crate::namespace::{ip, set};
use crate::pair::Cores;
use crate::processes::starting_on;

/// The port of iperf3 in the guest that serves.
const PORT: u16 = 5201;

/// A network between two guests under QEMU.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Network {
    /// The switch of `zerosock net`.
    Zerosock(Binary),
    /// A TCP connection between the two QEMUs.
    QemuSocket,
    /// Two TAP interfaces of QEMU on a bridge of the kernel.
    Bridge,
}

/// Names in the tables: zerosock first, then its peers.
pub(super) const NETWORKS: [(&str, Network); 3] = [
    ("zerosock", Network::Zerosock(Binary::OWN)),
    ("QEMU -netdev socket", Network::QemuSocket),
    ("QEMU tap, bridge", Network::Bridge),
];

impl Network {
    /// Boots two guests; the second one serves.
    pub(super) fn link(self, image: &Image, cores: Cores) -> Result<Link, String> {
        let number = match self {
            Network::Zerosock(binary) => binary.number + 23,
            Network::QemuSocket => 21,
            Network::Bridge => 22,
        };
        let addresses = [1, 2].map(|host| format!("10.77.{number}.{host}"));
        let dir = short_dir()?;
        let sockets = ["a", "b"].map(|name| dir.path().join(name));
        let mut daemons = Vec::new();
        // Numbers of MAC addresses.
        let macs = [2 * number, 2 * number + 1];
        let devices = match self {
            Network::Zerosock(binary) => {
                let sockets = [sockets[0].as_path(), &sockets[1]];
                let start = || daemon::zerosock(binary, &[], &sockets);
                daemons.push(starting_on(cores.receiver, start)??);
                [
                    vhost_user(sockets[0], macs[0]),
                    vhost_user(sockets[1], macs[1]),
                ]
            }
            Network::QemuSocket => {
                // The namespace is the bench's own: the port is free.
                let end = |kind| format!("socket,id=n0,{kind}=127.0.0.1:5300");
                [
                    device(&end("listen"), macs[0]),
                    device(&end("connect"), macs[1]),
                ]
            }
            Network::Bridge => {
                let (bridge, taps) = (
                    format!("br{number}"),
                    [1, 2].map(|n| format!("tap{number}{n}")),
                );
                // Otherwise the kernel may pass the frames to the host's packet filter, which drops
                // them. A kernel without that filter has no such settings.
                for table in ["iptables", "ip6tables", "arptables"] {
                    let _ = set(&format!("bridge/bridge-nf-call-{table}"), "0");
                }
                ip(&format!("link add {bridge} type bridge"))?;
                ip(&format!("link set {bridge} up"))?;
                for tap in &taps {
                    ip(&format!("tuntap add dev {tap} mode tap"))?;
                    ip(&format!("link set {tap} master {bridge} up"))?;
                }
                let netdev =
                    |tap: &str| format!("tap,id=n0,ifname={tap},script=no,downscript=no,vhost=off");
                [
                    device(&netdev(&taps[0]), macs[0]),
                    device(&netdev(&taps[1]), macs[1]),
                ]
            }
        };
        let server = starting_on(cores.host, || Vm::boot(image, &devices[0]))??;
        let client = starting_on(cores.sender, || Vm::boot(image, &devices[1]))??;
        server.set_address(&addresses[0])?;
        server.serve(PORT)?;
        client.set_up(&addresses[1], &addresses[0])?;
        let [to, _] = addresses;
        Ok(Link {
            client,
            server: Some(server),
            _host_server: None,
            daemons,
            to,
            port: PORT,
            _dir: dir,
        })
    }
}
