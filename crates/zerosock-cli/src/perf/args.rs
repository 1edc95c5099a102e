//! Flags of `zerosock perf`: those of `vsock_rx_perf`, and where to connect.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueEnum};

use crate::number;

/// Measure receiving: a server sends, a client receives, both print the time
///
/// This is `vsock_rx_perf` of the kernel patch set for zero-copy receive, with its options,
/// defaults and figures. The client connects to the server; the server sends the given number of
/// megabytes; the client dequeues them in one of three ways (-z).
///
/// Either side is a process attached to `zerosock serve`, or a host with devices of its own
/// (--host), or a program in a guest, which uses its kernel's AF_VSOCK.
#[derive(Debug, Args)]
#[command(
    after_long_help = AFTER_HELP,
    group(ArgGroup::new("role").required(true).args(["server", "cid"])),
    group(ArgGroup::new("place").args(["attach", "device", "host"]))
)]
pub(crate) struct PerfArgs {
    /// The CID of the server to connect to: makes this the client
    #[arg(short, long, value_parser = number::parse::<u32>, value_name = "CID")]
    pub(super) cid: Option<u32>,

    /// Run as the server, which sends
    #[arg(short, long)]
    pub(super) server: bool,

    /// Megabytes to send, of 1048576 bytes; for the server
    #[arg(short, long, value_parser = number::parse::<u32>, value_name = "MEGABYTES", default_value = "2048")]
    pub(super) megabytes: u32,

    /// Size of the buffer, or of the mapping, in pages of 4096 bytes: what one write sends, or one
    /// dequeue takes at most [default: 4096 for the server, which is 16 MiB; 32 for the client]
    #[arg(short, long, value_parser = number::parse::<u32>, value_name = "PAGES")]
    pub(super) buffer: Option<u32>,

    /// Bytes that must be available before the client wakes up, as SO_RCVLOWAT [default: the size
    /// of its buffer]
    #[arg(short = 'r', long, value_parser = number::parse::<u32>, value_name = "BYTES", conflicts_with = "server")]
    pub(super) low_water: Option<u32>,

    /// Unread bytes in flight to the client: the credit that it gives the server
    #[arg(
        short = 'v',
        long,
        value_parser = number::parse::<u32>,
        value_name = "BYTES",
        default_value = "2147483648",
        conflicts_with = "server"
    )]
    pub(super) credit: u32,

    /// How the client dequeues
    #[arg(
        short = 'z',
        long = "zero-copy",
        value_enum,
        default_value = "n",
        conflicts_with = "server"
    )]
    pub(super) mode: ModeArg,

    /// The server's port
    #[arg(short, long, value_parser = number::parse::<u32>, value_name = "PORT", default_value = "1234")]
    pub(super) port: u32,

    /// Attach at this attach socket of `zerosock serve`, with any free CID
    #[arg(long, value_name = "SOCKET", help_heading = "Where")]
    pub(super) attach: Option<PathBuf>,

    /// Be the guest of this vhost-user socket of `zerosock serve`
    #[arg(long, value_name = "SOCKET", help_heading = "Where")]
    pub(super) device: Option<PathBuf>,

    /// Be the host, CID 2, with the devices in this process: for VMs by --vm-socket, for processes
    /// by --attach-socket
    #[arg(long, help_heading = "Where")]
    pub(super) host: bool,

    /// With --host: the vhost-user socket for a VM, made here
    #[arg(long, value_name = "SOCKET", requires = "host", help_heading = "Where")]
    pub(super) vm_socket: Option<PathBuf>,

    /// With --vm-socket: the CID of the VM
    #[arg(
        long,
        value_parser = number::parse::<u32>,
        value_name = "CID",
        default_value = "3",
        help_heading = "Where"
    )]
    pub(super) vm_cid: u32,

    /// With --host: the socket at which processes attach, made here
    #[arg(long, value_name = "SOCKET", requires = "host", help_heading = "Where")]
    pub(super) attach_socket: Option<PathBuf>,

    /// Read every byte that was received, outside of the dequeue calls
    #[arg(long, conflicts_with = "server")]
    pub(super) touch: bool,

    /// Check every byte that was received, outside of the dequeue calls
    #[arg(long, conflicts_with = "server")]
    pub(super) verify: bool,
}

/// Values of -z.
#[derive(Copy, Clone, Debug, Eq, PartialEq, ValueEnum)]
pub(super) enum ModeArg {
    /// Copy: read()
    N,
    /// In place: fill and release a receive map, and sleep in between
    Y,
    /// In place, and poll the map's poll value instead of sleeping
    U,
}

const AFTER_HELP: &str = "\
Between two processes:
  zerosock serve --attach-socket /tmp/attach
  zerosock perf -s --attach /tmp/attach                   says its CID
  zerosock perf -c CID -z y --attach /tmp/attach

Between two processes, of which one is the host:
  zerosock perf -s --host --attach-socket /tmp/attach     is CID 2
  zerosock perf -c 2 -z y --attach /tmp/attach

Between a guest and the host:
  host$   zerosock perf -s --host --vm-socket /tmp/vm3    and a VMM that connects to /tmp/vm3
  guest$  zerosock perf -c 2
  guest$  zerosock perf -s
  host$   zerosock perf -c 3 -z y --host --vm-socket /tmp/vm3

Between a guest and a process (the VM's device is the same `serve`):
  guest$  zerosock perf -s
  host$   zerosock perf -c 3 -z y --attach /tmp/attach    3 is the guest's CID
  host$   zerosock perf -s --attach /tmp/attach
  guest$  zerosock perf -c CID

Without --attach, --device or --host the kernel's AF_VSOCK is used, as in a guest. There is -z n only: no
kernel has the other two without the patch set.

Exit codes: 0 all was sent or received, 1 it was not, 2 an option is wrong.";
