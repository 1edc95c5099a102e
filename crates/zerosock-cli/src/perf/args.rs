//! Flags of `zerosock perf`: those of `vsock_rx_perf`, and where to connect.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueEnum};
use zerosock::{Cid, Port};

use crate::number;

/// Measure how fast a client receives what a server sends
///
/// This is `vsock_rx_perf` of the kernel patch set for zero-copy receive, with its options,
/// defaults and figures. The client connects to the server; the server sends the given number of
/// megabytes; the client dequeues them in one of three ways (-z).
///
/// Either side is a process attached to `zerosock serve`, or a host with devices of its own
/// (--host), or a program in a guest, which uses its kernel's AF_VSOCK.
#[derive(Debug, Args)]
#[command(
    after_long_help = crate::help::text(AFTER_HELP),
    group(ArgGroup::new("role").required(true).args(["server", "cid"])),
    group(ArgGroup::new("place").args(["attach", "device", "host"]))
)]
pub(crate) struct PerfArgs {
    /// The CID of the server to connect to: makes this the client
    #[arg(short, long, value_parser = number::cid, value_name = "CID")]
    pub(super) cid: Option<Cid>,

    /// Run as the server, which sends
    #[arg(short, long)]
    pub(super) server: bool,

    /// Megabytes to send, of 1048576 bytes; for the server
    #[arg(short, long, value_parser = number::parse::<u32>, value_name = "MEGABYTES", default_value = "2048")]
    pub(super) megabytes: u32,

    /// Size of the buffer or mapping in pages of 4096 bytes: the bytes of one write, or the most
    /// bytes of one dequeue [default: 4096 (16 MiB) for the server, 32 for the client]
    #[arg(short, long, value_parser = number::parse::<u32>, value_name = "PAGES")]
    pub(super) buffer: Option<u32>,

    /// Bytes that must be available before the client wakes up, as SO_RCVLOWAT [default: the size
    /// of its buffer]
    #[arg(short = 'r', long, value_parser = number::parse::<u32>, value_name = "BYTES", conflicts_with = "server")]
    pub(super) low_water: Option<u32>,

    /// Most unread bytes that the server may send: the credit that the client grants
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
    pub(super) mode: Mode,

    /// The server's port
    #[arg(short, long, value_parser = number::port, value_name = "PORT", default_value = "1234")]
    pub(super) port: Port,

    /// Attach at this attach socket of `zerosock serve`, in a guest of `zerosock guest`, with any free CID
    #[arg(long, value_name = "SOCKET", help_heading = "Where")]
    pub(super) attach: Option<PathBuf>,

    /// Act as the guest at this vhost-user socket of `zerosock serve`
    #[arg(long, value_name = "SOCKET", help_heading = "Where")]
    pub(super) device: Option<PathBuf>,

    /// Act as the host (CID 2), with devices in this process: for a VM with --vm-socket, for
    /// processes with --attach-socket
    #[arg(long, help_heading = "Where")]
    pub(super) host: bool,

    /// With --host: create a vhost-user socket for a VM at this path
    #[arg(long, value_name = "SOCKET", requires = "host", help_heading = "Where")]
    pub(super) vm_socket: Option<PathBuf>,

    /// With --vm-socket: the CID of the VM
    #[arg(
        long,
        value_parser = number::cid,
        value_name = "CID",
        default_value = "3",
        help_heading = "Where"
    )]
    pub(super) vm_cid: Cid,

    /// With --host: create a socket at this path at which processes attach
    #[arg(long, value_name = "SOCKET", requires = "host", help_heading = "Where")]
    pub(super) attach_socket: Option<PathBuf>,

    /// Read every received byte, outside of the timed dequeue calls
    #[arg(long, conflicts_with = "server")]
    pub(super) touch: bool,

    /// Check every received byte, outside of the timed dequeue calls
    #[arg(long, conflicts_with = "server")]
    pub(super) verify: bool,

    /// Print the figures as one JSON object; the lines before the transfer go to standard error
    #[arg(long)]
    pub(super) json: bool,
}

/// How a client dequeues.
#[derive(Copy, Clone, Debug, Eq, PartialEq, ValueEnum)]
pub(super) enum Mode {
    /// Copy: read()
    #[value(name = "n")]
    Copy,
    /// In place: fill and release a receive map; sleep while no data is available
    #[value(name = "y")]
    InPlace,
    /// In place: fill and release a receive map; poll the map's poll value instead of sleeping
    #[value(name = "u")]
    InPlacePolling,
}

const AFTER_HELP: &str = "\
Between two processes:
  zerosock serve --attach-socket /tmp/attach
  zerosock perf -s --attach /tmp/attach                   prints its CID
  zerosock perf -c CID -z y --attach /tmp/attach

Between two processes, of which one is the host:
  zerosock perf -s --host --attach-socket /tmp/attach     has CID 2
  zerosock perf -c 2 -z y --attach /tmp/attach

Between a guest and the host:
  host$   zerosock perf -s --host --vm-socket /tmp/vm3    the VMM connects to /tmp/vm3
  guest$  zerosock perf -c 2
  guest$  zerosock perf -s
  host$   zerosock perf -c 3 -z y --host --vm-socket /tmp/vm3

Between a guest and a process (the VM's device is the same `serve`):
  guest$  zerosock perf -s
  host$   zerosock perf -c 3 -z y --attach /tmp/attach    3 is the guest's CID
  host$   zerosock perf -s --attach /tmp/attach
  guest$  zerosock perf -c CID

Without --attach, --device or --host, perf uses the kernel's AF_VSOCK, as in a guest. Only -z n works
there: stock kernels lack the patch set for the other two.

Exit codes: 0 everything was sent or received, 1 it was not, 2 an option is wrong.";
