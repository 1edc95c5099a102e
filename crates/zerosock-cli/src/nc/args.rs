//! Flags of `zerosock nc`.

use std::time::Duration;

use clap::Args;

use super::endpoint;
use crate::duration;
use crate::endpoint::EndpointArg;

/// Netcat for vsock and Unix sockets: join standard input and output to one connection
///
/// Standard input goes to the connection and received bytes go to standard output, at the same
/// time. The end of standard input closes the sending half only; receiving continues until the peer
/// closes the connection.
#[derive(Debug, Args)]
#[command(after_long_help = crate::help::text(AFTER_HELP))]
pub(crate) struct NcArgs {
    /// vsock:CID:PORT, vsock-listen:PORT, unix:PATH, unix-listen:PATH, hybrid:PATH:PORT,
    /// attach:PATH:CID:PORT, attach-listen:PATH:PORT, service:PATH:CID:PORT or
    /// service-listen:PATH:PORT
    #[arg(value_parser = endpoint::parse)]
    pub(crate) endpoint: EndpointArg,

    /// Messages instead of a stream: sockets of type SOCK_SEQPACKET
    ///
    /// One read of standard input gives one message: a line at a terminal, a packet of a
    /// SOCK_SEQPACKET socket, else up to 65536 bytes. Received messages are written to standard
    /// output without separators.
    #[arg(long)]
    pub(crate) seqpacket: bool,

    /// Datagrams instead of a connection, as a process or a service that has attached
    ///
    /// One read of standard input gives one datagram of at most 65536 bytes; an empty datagram
    /// marks the end. When listening, the source of the first datagram becomes the peer. Datagrams
    /// without a receiver are lost without an error.
    #[arg(short = 'u', long, conflicts_with = "seqpacket")]
    pub(crate) dgram: bool,

    /// Give up when connecting (or waiting for a connection) takes longer, and later when no byte
    /// was transferred for this time [default: no limit]
    #[arg(short = 'w', long, value_name = "SECONDS", value_parser = duration::parse)]
    pub(crate) timeout: Option<Duration>,

    /// Repeat failed connects until --timeout: the peer may not have started yet
    #[arg(short, long)]
    pub(crate) retry: bool,

    /// Read nothing from standard input, only receive
    #[arg(short = 'd', long, conflicts_with_all = ["no_shutdown", "quit"])]
    pub(crate) no_stdin: bool,

    /// Accept connections until SIGINT or SIGTERM, not only one
    ///
    /// Without --exec they are received one after the other, and nothing is sent. With --exec up to
    /// 64 are served at once. --timeout is then the longest wait for bytes only.
    #[arg(short, long, conflicts_with_all = ["dgram", "no_shutdown", "quit"])]
    pub(crate) keep_open: bool,

    /// Run this command by /bin/sh with the connection as its standard input and output
    #[arg(
        short,
        long,
        value_name = "COMMAND",
        conflicts_with_all = ["dgram", "no_stdin", "no_shutdown", "quit"]
    )]
    pub(crate) exec: Option<String>,

    /// Keep the sending half open at the end of standard input
    #[arg(long)]
    pub(crate) no_shutdown: bool,

    /// Stop this long after the end of standard input, even when the peer has not closed; with 0 as
    /// soon as everything is sent
    #[arg(short, long, value_name = "SECONDS", value_parser = duration::parse)]
    pub(crate) quit: Option<Duration>,

    /// Close the sending half at the end of standard input: the default, accepted for compatibility
    /// with other netcats
    #[arg(short = 'N', hide = true, conflicts_with = "no_shutdown")]
    pub(crate) shutdown: bool,

    /// Never show progress (shown on long transfers when standard error is a terminal)
    #[arg(long)]
    pub(crate) no_progress: bool,

    /// Report on standard error when listening, when connected, and the bytes transferred
    #[arg(short, long)]
    pub(crate) verbose: bool,
}

const AFTER_HELP: &str = "\
Endpoints:
  vsock:CID:PORT
          connect by the kernel's AF_VSOCK; in a guest, CID 2 is the host
  vsock-listen:PORT
          accept one connection to PORT by the kernel's AF_VSOCK
  unix:PATH
          connect to a Unix stream socket
  unix-listen:PATH
          accept one connection at PATH; a stale socket there is replaced
  hybrid:PATH:PORT
          connect to PORT in a guest, through the --uds-path of `zerosock serve`,
          vhost-device-vsock, Firecracker or cloud-hypervisor (CONNECT and OK); with
          --seqpacket, through the --uds-path-seqpacket of `zerosock serve`
  attach:PATH:CID:PORT, attach-listen:PATH:PORT
          the same as a process with a CID of its own, at the --attach-socket PATH of
          `zerosock serve`, or in a guest at the --socket PATH of `zerosock guest`; the CID
          may be the name of another process, except in a guest
  service:PATH:CID:PORT, service-listen:PATH:PORT
          the same as the host, CID 2: claims PORT there and accepts one connection,
          or connects to a guest or process (with --dgram from PORT, which it claims)
CID and PORT are numbers, decimal or as 0x16; `host` is CID 2. With vsock: `local` is CID 1 and
`hypervisor` CID 0; with attach: and service: these are names of processes.

Examples:
  A file from guest to host:
    host$   zerosock nc unix-listen:/tmp/vm3.vsock_1234 > copy
    guest$  zerosock nc vsock:2:1234 < file
  A file from host to guest:
    guest$  zerosock nc vsock-listen:1234 > copy
    host$   zerosock nc --retry hybrid:/tmp/vm3.vsock:1234 < file
  A shell at port 1234 of a guest, for any number of connections:
    guest$  zerosock nc --keep-open --exec /bin/sh vsock-listen:1234
    host$   echo uname -a | zerosock nc hybrid:/tmp/vm3.vsock:1234
  A host service at port 1234 for all guests of a daemon:
    host$   zerosock nc service-listen:/run/zerosock/attach:1234
    guest$  zerosock nc vsock:2:1234
  Datagrams to a service, each line as it is typed:
    host$   zerosock nc --dgram service-listen:/run/zerosock/attach:514
    host$   zerosock nc --dgram attach:/run/zerosock/attach:2:514

Exit codes: 0 the peer closed and all was delivered, 1 not connected, refused, timed out or not all
delivered, 2 an option is wrong.";
