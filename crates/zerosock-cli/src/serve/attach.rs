//! The attach socket as it was written, by flags or in a file, and what it means.

use std::path::{Path, PathBuf};

use clap::Args;
use rustix::fs::Mode;
use serde::Deserialize;

use super::settings::{SettingsError, Source, parse_groups, parse_mode};
use super::vm::joined_by_plus;
use crate::number;
use crate::sockets;

/// The flags about processes that attach without a VM.
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

    /// A user, by number, whose processes may attach; repeat for more [default: the user of this
    /// process; root is no exception]
    #[arg(long, value_parser = number::parse::<u32>, value_name = "UID")]
    attach_uid: Vec<u32>,

    /// The groups of attached processes, joined by `+`, as --groups for VMs [default: default]
    #[arg(long, value_name = "NAME+NAME")]
    attach_groups: Option<String>,

    /// Processes that may be attached at once [default: 256]
    #[arg(long, value_parser = number::parse::<u64>, value_name = "N")]
    attach_max: Option<u64>,

    /// The hybrid sockets of attached processes, `{cid}` standing for the CID of each: host
    /// programs connect there, its own connections to the host go to PATH_PORT. Without `{cid}`
    /// the latter only, from all of them to the same [default: processes do not meet the host's
    /// sockets]
    #[arg(long, value_name = "PATH")]
    attach_uds_path: Option<PathBuf>,

    /// A user, by number, whose processes may be host services: claim ports of CID 2 on the attach
    /// socket, before the --uds-path of every VM; repeat for more [default: the user of this
    /// process; root is no exception]
    #[arg(long, value_parser = number::parse::<u32>, value_name = "UID")]
    service_uid: Vec<u32>,

    /// Host services that may be attached at once; 0 for none [default: 64]
    #[arg(long, value_parser = number::parse::<u64>, value_name = "N")]
    service_max: Option<u64>,
}

/// The keys of `attach` with the values that were given.
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
    /// What the flags say, if any of them was given at all.
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

/// An attach socket about which nothing illegal can be said any more.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Attach {
    pub(crate) socket: PathBuf,
    /// `None`: as for the other sockets.
    pub(crate) mode: Option<Mode>,
    /// Empty: the user of this process alone.
    pub(crate) uids: Vec<u32>,
    pub(crate) groups: Vec<String>,
    /// From 1 to [`MAX_PROCESSES`].
    pub(crate) max: usize,
    /// Where processes meet the host's sockets, if they do.
    pub(crate) hybrid: Option<Hybrid>,
    /// Whose processes may be services. Empty: the user of this process alone.
    pub(crate) service_uids: Vec<u32>,
    /// Up to [`MAX_PROCESSES`].
    pub(crate) service_max: usize,
}

/// Where processes meet the host's sockets.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Hybrid {
    /// All of them connect to the sockets around this path, and are not called.
    Shared(PathBuf),
    /// Each has sockets of its own; the path has `{cid}` in it.
    Each(PathBuf),
}

/// What stands for the CID.
const CID: &str = "{cid}";
const DEFAULT_SERVICES: u64 = 64;

const DEFAULT_GROUP: &str = "default";
const DEFAULT_MAX: u64 = 256;
/// Each has some ten descriptors here, and its memory mapped.
const MAX_PROCESSES: u64 = 16384;

impl Attach {
    pub(super) fn new(source: Source<'_>, raw: RawAttach) -> Result<Attach, SettingsError> {
        let socket = raw.socket.ok_or_else(|| SettingsError::Missing {
            option: source.attach_option("socket"),
            fix: "name the Unix socket on which processes ask to attach",
        })?;
        sockets::check_path(&socket).map_err(|reason| {
            source.wrong_attach("socket", socket.display(), reason.to_string())
        })?;
        let mode = match &raw.mode {
            None => None,
            Some(text) => Some(parse_mode(text).ok_or_else(|| {
                let fix = "give permission bits in octal, 0 to 0777, such as 0660";
                source.wrong_attach("mode", text, fix)
            })?),
        };
        if let Some(&uid) = raw.uid.iter().find(|&&uid| uid == u32::MAX) {
            let fix = "no user has this number; give one from 0 to 4294967294";
            return Err(source.wrong_attach("uid", uid, fix));
        }
        let groups = raw.groups.as_deref().unwrap_or(DEFAULT_GROUP);
        let groups =
            parse_groups(groups).map_err(|fix| source.wrong_attach("groups", groups, fix))?;
        let max = raw.max.unwrap_or(DEFAULT_MAX);
        if !(1..=MAX_PROCESSES).contains(&max) {
            let fix = format!("give a number from 1 to {MAX_PROCESSES}");
            return Err(source.wrong_attach("max", max, fix));
        }
        if let Some(&uid) = raw.service_uid.iter().find(|&&uid| uid == u32::MAX) {
            let fix = "no user has this number; give one from 0 to 4294967294";
            return Err(source.wrong_service("uid", uid, fix));
        }
        let service_max = raw.service_max.unwrap_or(DEFAULT_SERVICES);
        if service_max > MAX_PROCESSES {
            let fix = format!("give a number from 0 to {MAX_PROCESSES}");
            return Err(source.wrong_service("max", service_max, fix));
        }
        let hybrid = match raw.uds_path {
            None => None,
            Some(path) => Some(Hybrid::new(source, path)?),
        };
        Ok(Attach {
            socket,
            mode,
            uids: raw.uid,
            groups,
            // At most 16384, just checked.
            max: max as usize,
            hybrid,
            service_uids: raw.service_uid,
            service_max: service_max as usize,
        })
    }
}

impl Hybrid {
    /// As it was written.
    pub(super) fn path(&self) -> &Path {
        match self {
            Hybrid::Shared(path) | Hybrid::Each(path) => path,
        }
    }

    fn new(source: Source<'_>, path: PathBuf) -> Result<Hybrid, SettingsError> {
        let wrong = |fix: String| source.wrong_attach("uds-path", path.display(), fix);
        let text = path.to_str();
        let text = text.ok_or_else(|| wrong("a path of other characters than UTF-8's".into()))?;
        // The longest CID there is.
        let longest = PathBuf::from(text.replace(CID, "4294967294"));
        sockets::check_path(&longest).map_err(|reason| wrong(reason.to_string()))?;
        Ok(match text.contains(CID) {
            true => Hybrid::Each(path),
            false => Hybrid::Shared(path),
        })
    }
}
