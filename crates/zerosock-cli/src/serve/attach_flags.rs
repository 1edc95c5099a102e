//! Flags of the attach socket, and the same keys in the configuration file, before validation.

use std::path::PathBuf;

use clap::Args;
use serde::Deserialize;

use super::list::joined_by_plus;
use crate::number;

/// The flags about attached processes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Processes without a virtual machine")]
pub(crate) struct AttachFlags {
    /// The Unix socket (SOCK_SEQPACKET) on which processes ask to attach, each as an endpoint with
    /// a CID of its own
    #[arg(long, value_name = "PATH")]
    attach_socket: Option<PathBuf>,

    /// Permissions of the attach socket, octal [default: those of --socket-mode]
    #[arg(long, value_name = "MODE")]
    attach_mode: Option<String>,

    /// A user id that may attach; repeat for more [default: the user of this process; root is no
    /// exception]
    #[arg(long, value_parser = number::parse::<u32>, value_name = "UID")]
    attach_uid: Vec<u32>,

    /// The groups of attached processes, joined by `+`, as --groups for VMs [default: default]
    #[arg(long, value_name = "NAME+NAME")]
    attach_groups: Option<String>,

    /// Processes that may be attached at once [default: 256]
    #[arg(long, value_parser = number::parse::<u64>, value_name = "N")]
    attach_max: Option<u64>,

    /// The hybrid sockets of attached processes, with `{cid}` for the CID of each: host programs
    /// connect there, and connections to the host go to PATH_PORT. Without `{cid}` only the latter,
    /// the same for all processes [default: no hybrid sockets]
    #[arg(long, value_name = "PATH")]
    attach_uds_path: Option<PathBuf>,

    /// A user id that may attach host services: they claim ports of CID 2 on the attach socket,
    /// which take precedence over the --uds-path of every VM; repeat for more [default: the user of
    /// this process; root is no exception]
    #[arg(long, value_parser = number::parse::<u32>, value_name = "UID")]
    service_uid: Vec<u32>,

    /// Host services that may be attached at once; 0 for none [default: 64]
    #[arg(long, value_parser = number::parse::<u64>, value_name = "N")]
    service_max: Option<u64>,
}

/// The keys of `attach` with their values.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawAttach {
    pub(crate) socket: Option<PathBuf>,
    pub(crate) mode: Option<String>,
    #[serde(default)]
    pub(crate) uid: Vec<u32>,
    #[serde(default, deserialize_with = "joined_by_plus")]
    pub(crate) groups: Option<String>,
    pub(crate) max: Option<u64>,
    #[serde(alias = "uds-path")]
    pub(crate) uds_path: Option<PathBuf>,
    #[serde(default, alias = "service-uid")]
    pub(crate) service_uid: Vec<u32>,
    #[serde(alias = "service-max")]
    pub(crate) service_max: Option<u64>,
}

impl AttachFlags {
    /// The flags as keys, if any flag was given.
    pub(crate) fn into_raw(self) -> Option<RawAttach> {
        let raw = RawAttach {
            socket: self.attach_socket,
            mode: self.attach_mode,
            uid: self.attach_uid,
            groups: self.attach_groups,
            max: self.attach_max,
            uds_path: self.attach_uds_path,
            service_uid: self.service_uid,
            service_max: self.service_max,
        };
        (raw != RawAttach::default()).then_some(raw)
    }
}
