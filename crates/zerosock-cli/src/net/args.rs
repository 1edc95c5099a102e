//! Flags of `zerosock net`.

use clap::Args;
use zerosock_proto::wire::net::Mac;
use zerosock_sys::tun::InterfaceName;

use super::network::Guest;
use super::xdp::XdpQueue;
use crate::logging::LogFlags;
use crate::sandbox::SandboxFlags;
use crate::socket_access::AccessFlags;
use crate::{number, size};

/// Serve virtual machines: vhost-user network devices on a TAP interface, or on a switch
///
/// One guest: frames go directly between the interface and the guest's memory, with checksum and segmentation
/// offloads: a segment of 64 KiB crosses as one frame.
///
/// Several guests: a switch passes frames between them by MAC address, with one copy from memory to memory. An
/// interface is not needed; it is the uplink of the switch.
#[derive(Debug, Args)]
#[command(after_long_help = crate::help::text(AFTER_HELP))]
pub(crate) struct NetArgs {
    /// The vhost-user socket of a guest, made here; given several times, the guests are joined by a switch
    ///
    /// mac=MAC is as --mac, mac-filter as --mac-filter.
    #[arg(long, value_name = "PATH[,mac=MAC][,mac-filter]", required = true)]
    pub(super) socket: Vec<Guest>,

    /// The TAP interface: taken if it exists, else created, and removed at the end
    ///
    /// If it is made for several queues and has no owner, the user of this process becomes its owner.
    #[arg(long, value_name = "NAME")]
    pub(super) tap: Option<InterfaceName>,

    /// Descriptor of an open TAP (IFF_NO_PI, IFF_VNET_HDR); one for each queue, joined by commas
    ///
    /// The program that has opened it sets up the interface: its owner, state, MTU and bridge.
    #[arg(long, value_name = "N,...", value_delimiter = ',', conflicts_with_all = ["tap", "bridge", "queues"])]
    pub(super) tap_fd: Vec<i32>,

    /// Let other programs have queues of the TAP, if it is made for several (multi_queue): each gets a part of the
    /// frames [default: a TAP that is open elsewhere, or that another user may open, is refused]
    #[arg(long, requires = "tap")]
    pub(super) share_tap: bool,

    /// Instead of a TAP: queues of this interface, by AF_XDP, the first one or QUEUE and --queues in all
    ///
    /// Frames go between the interface and the guest's memory without its stack: docs/xdp.md. The guest has no
    /// offloads, and frames of at most 1524 bytes.
    #[arg(long, value_name = "IFACE[:QUEUE]", conflicts_with_all = ["tap", "tap_fd", "bridge"])]
    pub(super) xdp: Option<XdpQueue>,

    /// Drop received frames of more than 1524 bytes [default: the host's network stack gets them]
    #[arg(long, requires = "xdp")]
    pub(super) xdp_drop_long: bool,

    /// Copy all received frames [default: only where the driver of the interface makes it necessary]
    #[arg(long, requires = "xdp")]
    pub(super) xdp_copy: bool,

    /// Make the interface a port of this bridge
    #[arg(long, value_name = "NAME")]
    pub(super) bridge: Option<InterfaceName>,

    /// The guest's MAC address, where the front-end asks for it: user-mode Linux does, QEMU has its own
    /// [default: the guest chooses]
    #[arg(long, value_name = "MAC")]
    pub(super) mac: Option<Mac>,

    /// Drop frames of the guest with another source address than --mac
    #[arg(long, requires = "mac")]
    pub(super) mac_filter: bool,

    /// MTU of the interface and of the guest, from 68 to 65521, with --xdp to 1510; longer frames of the guest are
    /// dropped [default: that of the interface, not told to the guest]
    ///
    /// A guest of QEMU learns it from host_mtu=BYTES at its -device only; otherwise it keeps 1500.
    #[arg(long, value_name = "BYTES", value_parser = number::parse::<u16>)]
    pub(super) mtu: Option<u16>,

    /// Queue pairs, 1 to 16
    #[arg(long, value_name = "N", value_parser = number::parse::<u16>, default_value = "1")]
    pub(super) queues: u16,

    #[command(flatten)]
    pub(super) sockets: AccessFlags,

    /// Bytes of memory that the guest may have mapped here, with K, M, G or T
    #[arg(long, value_parser = size::parse, value_name = "BYTES", default_value = "1T")]
    pub(super) max_memory: u64,

    /// Refuse guest memory that can shrink: each region must be a memfd with F_SEAL_SHRINK
    #[arg(long)]
    pub(super) require_sealed_memory: bool,

    /// Microseconds that the worker polls for more work before it sleeps
    #[arg(long, value_parser = number::parse::<u64>, value_name = "N", default_value = "0")]
    pub(super) spin_us: u64,

    #[command(flatten)]
    pub(super) sandbox: SandboxFlags,

    #[command(flatten)]
    pub(super) log: LogFlags,
}

const AFTER_HELP: &str = "\
Creating an interface, bringing it up, --mtu and --bridge need CAP_NET_ADMIN, which is dropped after that. An
existing TAP of the calling user (`ip tuntap add dev NAME mode tap user USER`, up, with its MTU) needs none.

Example:
  ip link add br0 type bridge && ip link set br0 up
  zerosock net --socket /tmp/vm3.net --tap tap3 --bridge br0
Two guests on a switch, which is joined to the bridge:
  zerosock net --socket /tmp/vm3.net --socket /tmp/vm4.net --tap up0 --bridge br0
Queue 3 of a network card for a guest (docs/xdp.md):
  ethtool -N eth1 flow-type ether dst 52:54:00:12:34:56 action 3
  zerosock net --socket /tmp/vm3.net --xdp eth1:3

QEMU (the guest's memory must be shared; `vectors=0` without KVM, because QEMU 7.2 crashes otherwise):
  qemu-system-x86_64 -m 512M \\
    -object memory-backend-memfd,id=mem,size=512M,share=on -numa node,memdev=mem \\
    -chardev socket,id=c0,path=/tmp/vm3.net,reconnect=1 -netdev vhost-user,id=n0,chardev=c0 \\
    -device virtio-net-pci,netdev=n0,mac=52:54:00:12:34:56,vectors=0 ...
User-mode Linux (1 is the number of network devices):
  linux mem=256M virtio_uml.device=/tmp/vm3.net:1 ...

Signals: SIGUSR1 logs the counters. SIGINT and SIGTERM end the service. If the interface is removed, the
service ends with an error.";
