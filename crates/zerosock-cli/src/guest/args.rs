//! Flags of `zerosock guest`.

use std::path::PathBuf;

use clap::Args;

use crate::logging::LogFlags;
use crate::socket_access::AccessFlags;
use crate::{number, size};

/// Inside a virtual machine: give its programs endpoints on pages of the guest
///
/// Programs attach as on a host, and receive and send in place: what the host writes for them lies in their own memory.
/// The host runs `zerosock serve --guest-endpoints`.
///
/// Needs root, and huge pages: `echo 64 > /proc/sys/vm/nr_hugepages` makes 64 of 2 MiB.
#[derive(Debug, Args)]
pub(crate) struct GuestArgs {
    /// The file with the key that the host has for this virtual machine, of mode 0600
    #[arg(long, value_name = "FILE", required_unless_present = "port_only")]
    pub(super) key: Option<PathBuf>,

    /// There is no key, and the host's side has `port-only`, too: every process here that may bind a port below 1024, as
    /// containers may by default, can read and write all memory of this virtual machine
    #[arg(long, conflicts_with = "key")]
    pub(super) port_only: bool,

    /// Memory that an endpoint may have at most, in whole huge pages of 2 MiB
    #[arg(long, value_parser = size::parse, value_name = "SIZE", default_value = "64M")]
    pub(super) memory: u64,

    /// Endpoints that there may be at once
    #[arg(long, value_parser = number::parse::<u16>, value_name = "N", default_value = "16")]
    pub(super) endpoints: u16,

    /// The Unix socket (SOCK_SEQPACKET) on which programs attach, made here
    #[arg(long, value_name = "PATH", default_value = "/run/zerosock/attach.sock")]
    pub(super) socket: PathBuf,

    /// A user id that may attach; repeat for more [default: the user of this process; root is no exception]
    #[arg(long = "attach-uid", value_parser = number::parse::<u32>, value_name = "UID")]
    pub(super) uids: Vec<u32>,

    #[command(flatten)]
    pub(super) access: AccessFlags,

    #[command(flatten)]
    pub(super) log: LogFlags,
}
