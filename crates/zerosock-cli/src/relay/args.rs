//! Flags of `zerosock relay`.

use std::time::Duration;

use clap::Args;
use zerosock_relay::relay::Way;

use crate::endpoint::EndpointArg;
use crate::logging::LogFlags;
use crate::sandbox::SandboxFlags;
use crate::socket_access::AccessFlags;
use crate::{duration, number, size};

/// Join sockets: TCP, UDP, Unix, hybrid vsock, attached endpoints and the kernel's vsock
///
/// Each connection to the listening end is joined to a new connection to the other end, for any number of
/// connections at once. Without a listening end, one pair is joined and the command ends with it. If both
/// ends listen, the connections of one are joined to those of the other in the order in which they come.
#[derive(Debug, Args)]
#[command(after_long_help = crate::help::text(AFTER_HELP))]
pub(crate) struct RelayArgs {
    /// One end: tcp-listen:ADDRESS:PORT, tcp:HOST:PORT, unix:PATH ... (--help lists all)
    #[arg(value_name = "A")]
    pub(super) first: EndpointArg,

    /// The other end
    #[arg(value_name = "B")]
    pub(super) second: EndpointArg,

    /// How bytes are moved: auto, splice, copy or sockmap
    ///
    /// auto splices into Unix sockets, copies with large buffers into TCP, and moves datagrams in
    /// batches. sockmap has the kernel redirect between UDP sockets, or from vsock to TCP; it needs CAP_BPF
    /// and CAP_NET_ADMIN at the start. The others are for measurements; where one is not possible the log
    /// says why, and auto is used.
    #[arg(long, value_name = "WAY", default_value = "auto")]
    pub(super) way: Way,

    /// Threads [default: one for each processor, at most 8]
    #[arg(long, value_name = "N", value_parser = number::parse::<u32>)]
    pub(super) workers: Option<u32>,

    /// Most connections at once; further ones are closed. A further sender of datagrams replaces the longest idle
    #[arg(long, value_name = "N", value_parser = number::parse::<u32>, default_value = "65536", help_heading = "Limits")]
    pub(super) max_connections: u32,

    /// Time to resolve a name and to connect
    #[arg(long, value_name = "SECONDS", value_parser = duration::parse, default_value = "10", help_heading = "Limits")]
    pub(super) connect_timeout: Duration,

    /// End connections when no byte was moved for this time [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = duration::parse, help_heading = "Limits")]
    pub(super) idle_timeout: Option<Duration>,

    /// Interval of TCP keepalive probes, which find dead peers; 0 for none
    #[arg(long, value_name = "SECONDS", value_parser = duration::parse, default_value = "60", help_heading = "Limits")]
    pub(super) keepalive: Duration,

    /// Forget the sender of datagrams when none was relayed for this time
    #[arg(long, value_name = "SECONDS", value_parser = duration::parse, default_value = "60", help_heading = "Limits")]
    pub(super) udp_timeout: Duration,

    /// Bytes that one call reads, with K or M; from 4K to 16M
    #[arg(long, value_name = "BYTES", value_parser = size::parse, default_value = "256K", help_heading = "Limits")]
    pub(super) buffer: u64,

    /// Most pipes of each worker for splice; connections beyond are copied
    ///
    /// A pipe is in use only while bytes are in it. The kernel makes the pipes of an unprivileged user
    /// small when they have more than fs.pipe-user-pages-soft pages together.
    #[arg(long, value_name = "N", value_parser = number::parse::<u32>, default_value = "64", help_heading = "Limits")]
    pub(super) pipes: u32,

    /// Begin each connection to B with a PROXY protocol header (version 2) that names the client
    #[arg(long)]
    pub(super) proxy_protocol: bool,

    #[command(flatten)]
    pub(super) sockets: AccessFlags,

    #[command(flatten)]
    pub(super) sandbox: SandboxFlags,

    #[command(flatten)]
    pub(super) log: LogFlags,
}

const AFTER_HELP: &str = "\
Ends:
  tcp:HOST:PORT, tcp-listen:ADDRESS:PORT
          TCP; a name is resolved for each connection, and both address families are tried
  unix:PATH, unix-listen:PATH
          a Unix stream socket; a stale socket of a listener is replaced
  hybrid:PATH:PORT
          PORT in a guest, through the --uds-path of `zerosock serve`, vhost-device-vsock,
          Firecracker or cloud-hypervisor (CONNECT and OK)
  attach:PATH:CID:PORT, attach-listen:PATH:PORT, service:PATH:CID:PORT, service-listen:PATH:PORT
          as a process, or as the host, at the --attach-socket PATH of `zerosock serve`
  vsock:CID:PORT, vsock-listen:PORT
          the kernel's AF_VSOCK, in a guest: CID 2 is the host
 With messages, whose bounds are kept; both ends have to be of these:
  udp:HOST:PORT, udp-listen:ADDRESS:PORT
  unix-dgram:PATH, unix-dgram-listen:PATH
  unix-seqpacket:PATH, unix-seqpacket-listen:PATH

CID and vsock PORT are numbers, decimal or as 0x16; `host` is CID 2. With vsock: `local` is CID 1 and
`hypervisor` CID 0; with attach: and service: these are names of processes.

An address with port 0 gets a free port; the log names it.

Signals: SIGUSR1 logs the counters. SIGINT and SIGTERM end the relay; TCP peers of connections that
have not ended get a reset, so that they do not take a part for the whole.

Examples:
  A web server in a guest, for the network:
    zerosock relay tcp-listen:0.0.0.0:8080 hybrid:/tmp/vm3.vsock:80
  A database on the host's TCP port, for a guest's CID 2, port 5432:
    zerosock relay unix-listen:/tmp/vm3.vsock_5432 tcp:127.0.0.1:5432
  The same, the other way round, in a guest without zerosock on the host's side:
    guest$  zerosock relay tcp-listen:127.0.0.1:5432 vsock:2:5432
  Syslog datagrams from the network into a Unix socket:
    zerosock relay udp-listen:0.0.0.0:514 unix-dgram:/dev/log

Exit codes: 0 ended by a signal, or the only pair was relayed to its end; 1 it could not be done, 2 an
option is wrong.";
