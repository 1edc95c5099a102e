//! Back-ends between one guest and one TAP interface of the host.

use std::path::Path;

use tempfile::TempDir;
use zerosock_testkit::uml;

use super::daemon::{Daemon, start, watched, zerosock};
use super::guest::Vm;
use super::link::Link;
use super::{iperf, passt};
use crate::binary::Binary;
use crate::image::{Image, short_dir};
use crate::namespace::{ip, set};
use crate::pair::Cores;
use crate::peers::dpdk;
use crate::processes::starting_on;

/// A back-end for a guest under QEMU.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Backend {
    Zerosock(Binary),
    QemuTap,
    Dpdk,
    Passt,
}

/// zerosock first, then its peers.
pub(super) const BACKENDS: [Backend; 4] = [
    Backend::Zerosock(Binary::OWN),
    Backend::QemuTap,
    Backend::Dpdk,
    Backend::Passt,
];

impl Backend {
    /// Name in the tables.
    pub(super) fn title(self) -> String {
        match self {
            Backend::Zerosock(binary) => binary.title().to_owned(),
            Backend::QemuTap => "QEMU tap".to_owned(),
            Backend::Dpdk => format!("{} vhost, TAP PMD", dpdk::title()),
            Backend::Passt => "passt --vhost-user".to_owned(),
        }
    }

    /// Boots a guest behind it, with an iperf3 server on the host.
    pub(super) fn link(self, image: &Image, cores: Cores) -> Result<Link, String> {
        let number = match self {
            Backend::Zerosock(binary) => binary.number + 4,
            Backend::QemuTap => 1,
            Backend::Dpdk => 2,
            Backend::Passt => 3,
        };
        let lan = Lan::new(number)?;
        let (tap, here) = (&lan.tap, &lan.here);
        let socket = lan.dir.path().join("net");
        let mut daemons = Vec::new();
        let devices = match self {
            Backend::Zerosock(binary) => {
                make_tap(tap, here)?;
                daemons.push(zerosock_on(binary, tap, &socket, cores)?);
                vhost_user(&socket, number)
            }
            Backend::QemuTap => {
                make_tap(tap, here)?;
                let netdev = format!("tap,id=n0,ifname={tap},script=no,downscript=no,vhost=off");
                device(&netdev, number)
            }
            Backend::Dpdk => {
                let vhost = format!("net_vhost0,iface={},queues=1", socket.display());
                let interface = format!("net_tap0,iface={tap}");
                let devices = [vhost.as_str(), &interface];
                let (program, arguments) = dpdk::command("forward", cores.receiver, &devices)?;
                let mut command = watched(&program)?;
                command.args(arguments).arg("forward");
                let is_ready = || socket.exists() && ip(&format!("link show {tap}")).is_ok();
                daemons.push(Daemon {
                    process: starting_on(cores.receiver, || start(&mut command, is_ready))??,
                    polls: true,
                });
                set_address(tap, here)?;
                vhost_user(&socket, number)
            }
            Backend::Passt => {
                let mut command = watched(&passt::find()?)?;
                // For ping: it sends echo requests of its own.
                set("ipv4/ping_group_range", "0 0")?;
                // It wants an interface with an address, and opens no TAP.
                make_tap(tap, &format!("10.78.{number}.1"))?;
                command.args(passt::arguments(&socket, tap, here, &lan.there));
                let is_ready = || socket.exists();
                daemons.push(Daemon {
                    process: starting_on(cores.receiver, || start(&mut command, is_ready))??,
                    polls: false,
                });
                vhost_user(&socket, number)
            }
        };
        let link = lan.link(daemons, cores, || Vm::boot(image, &devices))?;
        link.rest()?;
        Ok(link)
    }
}

/// The network of one guest and the host, by its number.
struct Lan {
    tap: String,
    port: u16,
    /// Addresses of the host, and of the guest.
    here: String,
    there: String,
    dir: TempDir,
}

impl Lan {
    fn new(number: u8) -> Result<Lan, String> {
        Ok(Lan {
            tap: format!("tap{number}"),
            port: 5200 + u16::from(number),
            here: format!("10.77.{number}.1"),
            there: format!("10.77.{number}.2"),
            dir: short_dir()?,
        })
    }

    /// Boots the guest, with an iperf3 server on the host.
    fn link(
        self,
        daemons: Vec<Daemon>,
        cores: Cores,
        boot: impl FnOnce() -> Result<Vm, String>,
    ) -> Result<Link, String> {
        let server = starting_on(cores.host, || iperf::serve(self.port))??;
        let client = starting_on(cores.sender, boot)??;
        client.set_up(&self.there, &self.here)?;
        Ok(Link {
            client,
            server: None,
            _host_server: Some(server),
            daemons,
            to: self.here,
            port: self.port,
            _dir: self.dir,
        })
    }
}

/// A driver of user-mode Linux on a TAP interface.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum UserMode {
    Zerosock(Binary),
    Vector,
}

/// Names in the tables: zerosock first, then its peer.
pub(super) const USER_MODE: [(&str, UserMode); 2] = [
    ("zerosock", UserMode::Zerosock(Binary::OWN)),
    ("vector driver on TAP", UserMode::Vector),
];

impl UserMode {
    /// Boots a guest, with an iperf3 server on the host.
    pub(super) fn link(self, image: &Image, cores: Cores) -> Result<Link, String> {
        let lan = Lan::new(match self {
            UserMode::Zerosock(binary) => binary.number + 12,
            UserMode::Vector => 11,
        })?;
        let tap = &lan.tap;
        let socket = lan.dir.path().join("net");
        make_tap(tap, &lan.here)?;
        let mut daemons = Vec::new();
        let machine = match self {
            UserMode::Zerosock(binary) => {
                daemons.push(zerosock_on(binary, tap, &socket, cores)?);
                uml::device(&socket, uml::NET)
            }
            UserMode::Vector => vec![
                "mem=256M".to_owned(),
                format!("vec0:transport=tap,ifname={tap},depth=128,gro=1"),
            ],
        };
        lan.link(daemons, cores, || Vm::boot_user_mode(image, &machine))
    }
}

/// `zerosock net` on an interface.
fn zerosock_on(binary: Binary, tap: &str, socket: &Path, cores: Cores) -> Result<Daemon, String> {
    starting_on(cores.receiver, || {
        zerosock(binary, &["--tap", tap], &[socket])
    })?
}

/// QEMU's options for a network device behind a vhost-user socket.
pub(super) fn vhost_user(socket: &Path, number: u8) -> Vec<String> {
    let chardev = format!("socket,id=c0,path={}", socket.display());
    let mut options = vec!["-chardev".to_owned(), chardev];
    options.extend(device("vhost-user,id=n0,chardev=c0", number));
    options
}

/// QEMU's options for a network device with this back-end. Without KVM, QEMU 7.2 crashes with
/// vhost-user and interrupt vectors.
pub(super) fn device(netdev: &str, number: u8) -> Vec<String> {
    let device =
        format!("virtio-net-pci,netdev=n0,mac=52:54:00:00:00:{number:02x},vectors=0,romfile=");
    ["-netdev", netdev, "-device", &device]
        .map(str::to_owned)
        .into()
}

/// Makes a TAP interface that stays.
fn make_tap(name: &str, address: &str) -> Result<(), String> {
    ip(&format!("tuntap add dev {name} mode tap"))?;
    set_address(name, address)
}

fn set_address(interface: &str, address: &str) -> Result<(), String> {
    ip(&format!("addr add {address}/24 dev {interface}"))?;
    ip(&format!("link set {interface} up"))
}
