//! Flags of the attach socket, which are keys of the configuration file too, before validation.

use std::path::PathBuf;

use clap::Args;
use serde::Deserialize;

use super::list::joined_by_plus;
use crate::number;

/// The flags about attached processes, and the keys of `attach` in the file.
#[derive(Clone, Debug, Default, Args, Deserialize, Eq, PartialEq)]
#[command(next_help_heading = "Processes without a virtual machine")]
#[serde(deny_unknown_fields)]
pub(crate) struct RawAttach {
    /// The Unix socket (SOCK_SEQPACKET) on which processes ask to attach, each as an endpoint with
    /// a CID of its own
    #[arg(id = "attach_socket", long = "attach-socket", value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// Permissions of the attach socket, octal [default: those of --socket-mode]
    #[arg(id = "attach_mode", long = "attach-mode", value_name = "MODE")]
    pub(crate) mode: Option<String>,

    /// A user id that may attach; repeat for more [default: the user of this process; root is no
    /// exception]
    #[arg(id = "attach_uid", long = "attach-uid", value_parser = number::parse::<u32>, value_name = "UID")]
    #[serde(default)]
    pub(crate) uid: Vec<u32>,

    /// The groups of attached processes, joined by `+`, as --groups for VMs [default: default]
    #[arg(id = "attach_groups", long = "attach-groups", value_name = "NAME+NAME")]
    #[serde(default, deserialize_with = "joined_by_plus")]
    pub(crate) groups: Option<String>,

    /// Processes that may be attached at once [default: 256]
    #[arg(id = "attach_max", long = "attach-max", value_parser = number::parse::<u64>, value_name = "N")]
    pub(crate) max: Option<u64>,

    /// The hybrid sockets of attached processes, with `{cid}` for the CID of each: host programs
    /// connect there, and connections to the host go to PATH_PORT. Without `{cid}` only the latter,
    /// the same for all processes [default: no hybrid sockets]
    #[arg(id = "attach_uds_path", long = "attach-uds-path", value_name = "PATH")]
    #[serde(alias = "uds-path")]
    pub(crate) uds_path: Option<PathBuf>,

    /// A user id that may attach host services: they claim ports of CID 2 on the attach socket,
    /// which take precedence over the --uds-path of every VM; repeat for more [default: the user of
    /// this process; root is no exception]
    #[arg(long, value_parser = number::parse::<u32>, value_name = "UID")]
    #[serde(default, alias = "service-uid")]
    pub(crate) service_uid: Vec<u32>,

    /// Host services that may be attached at once; 0 for none [default: 64]
    #[arg(long, value_parser = number::parse::<u64>, value_name = "N")]
    #[serde(alias = "service-max")]
    pub(crate) service_max: Option<u64>,
}
