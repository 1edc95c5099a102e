//! One VM, before validation (the same keys as flags, in `--vm` and in a file) and after.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use zerosock::Cid;
use zerosock::daemon::GuestEndpoints;

use super::forward::Seconds;
use super::guest_endpoints::RawGuestEndpoints;
use super::list::joined_by_plus;
use super::uds_paths::{UdsPath, UdsPathError, UdsPaths};
use crate::number::Whole;
use crate::{duration, number};

/// One VM after validation.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Vm {
    pub(crate) cid: u32,
    pub(crate) socket: PathBuf,
    pub(crate) host: Host,
    /// Bytes in flight per connection, 128 to 1 GiB.
    pub(crate) tx_buffer_size: u32,
    /// A power of two up to 32768.
    pub(crate) queue_size: u16,
    /// No empty names, no duplicates.
    pub(crate) groups: Vec<String>,
    /// Refuse memory that can shrink.
    pub(crate) require_sealed_memory: bool,
    /// The longest pause that connections outlast; zero: any. Set for each VM.
    pub(crate) stopped_timeout: Option<Duration>,
    /// Which endpoints the guest may have; `None`: none.
    pub(crate) guest_endpoints: Option<GuestEndpoints>,
}

/// Destination of a VM's connections to the host.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Host {
    /// Unix sockets around this path, by the hybrid convention.
    Hybrid {
        path: PathBuf,
        /// The same for SOCK_SEQPACKET.
        messages: Option<PathBuf>,
    },
    /// The AF_VSOCK of the host's own kernel.
    Forward { cid: u32, listen: Vec<u32> },
}

/// The flags that describe one VM. Each excludes --vm and --config.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "One virtual machine")]
pub(crate) struct VmFlags {
    /// The guest's address: a number from 3 to 4294967294 that no other VM here has [default: 3]
    #[arg(long, value_parser = number::cid, value_name = "CID", conflicts_with_all = ["vm", "config"])]
    pub(crate) guest_cid: Option<Cid>,

    /// The Unix socket to which the virtual machine monitor connects (vhost-user)
    #[arg(long, value_name = "PATH", conflicts_with_all = ["vm", "config"])]
    pub(crate) socket: Option<PathBuf>,

    /// The Unix socket to which host programs connect; the guest's own connections go to PATH_PORT,
    /// and with PORT=PATH those to PORT to the socket at PATH; repeat for more
    #[arg(
        long,
        value_name = "PATH|PORT=PATH",
        value_parser = OsStringValueParser::new().try_map(|text| UdsPath::parse(&text)),
        conflicts_with_all = ["forward_cid", "forward_listen", "vm", "config"]
    )]
    pub(crate) uds_path: Vec<UdsPath>,

    /// With --uds-path: the same for messages, over sockets of type SOCK_SEQPACKET
    #[arg(
        long,
        value_name = "PATH",
        conflicts_with_all = ["forward_cid", "forward_listen", "vm", "config"]
    )]
    pub(crate) uds_path_seqpacket: Option<PathBuf>,

    /// Instead of --uds-path: forward the guest's connections to this CID of the host's own
    /// AF_VSOCK, same port
    #[arg(long, value_parser = number::cid, value_name = "CID", conflicts_with_all = ["vm", "config"])]
    pub(crate) forward_cid: Option<Cid>,

    /// With --forward-cid: AF_VSOCK ports of the host that are forwarded to the guest, same port,
    /// joined by `+`
    #[arg(long, value_name = "PORT+PORT", conflicts_with_all = ["vm", "config"])]
    pub(crate) forward_listen: Option<String>,

    /// Unread bytes in flight from the guest per connection, at most [default: 262144]
    ///
    /// The buf_alloc announced to the guest, 128 to 1073741824. vhost-device-vsock's default is
    /// 65536; the larger one here is Linux's own for vsock.
    #[arg(long, value_parser = number::parse::<u32>, value_name = "BYTES", conflicts_with_all = ["vm", "config"])]
    pub(crate) tx_buffer_size: Option<u32>,

    /// The largest virtqueue that the monitor may set up: a power of two up to 32768
    /// [default: 1024]
    #[arg(long, value_parser = number::parse::<u64>, value_name = "ENTRIES", conflicts_with_all = ["vm", "config"])]
    pub(crate) queue_size: Option<u64>,

    /// The groups of this VM, joined by `+`: VMs with a group in common reach each other by CID
    /// [default: default]
    #[arg(long, value_name = "NAME+NAME", conflicts_with_all = ["vm", "config"])]
    pub(crate) groups: Option<String>,

    /// Let the guest have endpoints on its pages, for an agent with the key in this file, mode 0600
    /// [default: no endpoints]
    ///
    /// The agent is `zerosock guest`, run by root in the guest, with a file of the same bytes, at least 16 and
    /// random. With `port-only` in the place of the file there is no key: then every process in the guest that
    /// may bind a port below 1024, as processes in containers may by default, can read and write ALL memory of
    /// the guest. The file of --config also has the number of endpoints, their memory and their names.
    #[arg(long, value_name = "FILE|port-only", conflicts_with_all = ["vm", "config"])]
    pub(crate) guest_endpoints: Option<PathBuf>,
}

/// The keys of a VM with their values.
///
/// Lists (`forward_listen`, `groups`) are still the text joined by `+`.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawVm {
    #[serde(alias = "guest-cid", default, deserialize_with = "cid")]
    pub(crate) guest_cid: Option<Cid>,
    pub(crate) socket: Option<PathBuf>,
    #[serde(alias = "uds-path", default)]
    pub(crate) uds_path: UdsPaths,
    #[serde(alias = "uds-path-seqpacket")]
    pub(crate) uds_path_seqpacket: Option<PathBuf>,
    #[serde(alias = "forward-cid", default, deserialize_with = "cid")]
    pub(crate) forward_cid: Option<Cid>,
    #[serde(alias = "forward-listen", default, deserialize_with = "joined_by_plus")]
    pub(crate) forward_listen: Option<String>,
    #[serde(alias = "tx-buffer-size")]
    pub(crate) tx_buffer_size: Option<u32>,
    #[serde(alias = "queue-size")]
    pub(crate) queue_size: Option<u64>,
    #[serde(default, deserialize_with = "joined_by_plus")]
    pub(crate) groups: Option<String>,
    #[serde(alias = "require-sealed-memory")]
    pub(crate) require_sealed_memory: Option<bool>,
    #[serde(alias = "stopped-timeout", default, deserialize_with = "seconds")]
    pub(crate) stopped_timeout: Option<Duration>,
    #[serde(alias = "guest-endpoints")]
    pub(crate) guest_endpoints: Option<RawGuestEndpoints>,
}

/// Seconds in the file, if there are any.
fn seconds<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Duration>, D::Error> {
    input.deserialize_any(Seconds).map(Some)
}

/// A CID in the file, if there is one.
fn cid<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Cid>, D::Error> {
    let text = Option::<String>::deserialize(input)?;
    let parse =
        |text: String| cid_of(&text).map_err(|fault| D::Error::custom(format!("`{text}` {fault}")));
    text.map(parse).transpose()
}

impl VmFlags {
    /// The VM described by the flags, if any flag was given.
    pub(crate) fn into_vm(self) -> Result<Option<RawVm>, UdsPathError> {
        let vm = RawVm {
            guest_cid: self.guest_cid,
            socket: self.socket,
            uds_path: UdsPaths::of(self.uds_path)?,
            uds_path_seqpacket: self.uds_path_seqpacket,
            forward_cid: self.forward_cid,
            forward_listen: self.forward_listen,
            tx_buffer_size: self.tx_buffer_size,
            queue_size: self.queue_size,
            groups: self.groups,
            // The flags of these names apply to all VMs.
            require_sealed_memory: None,
            stopped_timeout: None,
            guest_endpoints: self.guest_endpoints.map(RawGuestEndpoints::Key),
        };
        Ok((vm != RawVm::default()).then_some(vm))
    }
}

/// Why the text of a `--vm` describes no VM. clap prints the option and the whole value in front.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum VmTextError {
    #[error("`{0}` has no value: write {0}=VALUE")]
    NoValue(String),
    #[error("unknown key `{0}`: the keys are {KEYS}")]
    UnknownKey(String),
    #[error("{0} is given twice: leave one")]
    Twice(&'static str),
    #[error(transparent)]
    UdsPath(#[from] UdsPathError),
    #[error("{key}={value} {fault}")]
    Wrong {
        key: &'static str,
        value: String,
        fault: String,
    },
}

const KEYS: &str = "guest-cid, socket, uds-path, uds-path-seqpacket, forward-cid, forward-listen, \
                    tx-buffer-size, queue-size, groups, require-sealed-memory, stopped-timeout, \
                    guest-endpoints";

/// Reads `guest-cid=3,socket=PATH,...`; a key may be written with `-` or `_`.
pub(crate) fn parse_vm(text: &str) -> Result<RawVm, VmTextError> {
    let mut vm = RawVm::default();
    for pair in text.trim().split(',') {
        let (key, value) = pair
            .split_once('=')
            .ok_or_else(|| VmTextError::NoValue(pair.to_string()))?;
        match key.replace('_', "-").as_str() {
            "guest-cid" => set_parsed(&mut vm.guest_cid, "guest-cid", value, cid_of)?,
            "socket" => set(&mut vm.socket, "socket", PathBuf::from(value))?,
            "uds-path" => vm.uds_path.add(UdsPath::parse(value.as_ref())?)?,
            "uds-path-seqpacket" => {
                let key = "uds-path-seqpacket";
                set(&mut vm.uds_path_seqpacket, key, PathBuf::from(value))?;
            }
            "forward-cid" => set_parsed(&mut vm.forward_cid, "forward-cid", value, cid_of)?,
            "forward-listen" => set(&mut vm.forward_listen, "forward-listen", value.to_string())?,
            "tx-buffer-size" => {
                set_parsed(&mut vm.tx_buffer_size, "tx-buffer-size", value, whole)?;
            }
            "queue-size" => set_parsed(&mut vm.queue_size, "queue-size", value, whole)?,
            "groups" => set(&mut vm.groups, "groups", value.to_string())?,
            "require-sealed-memory" => {
                let parse = |text: &str| text.parse().map_err(|_| "is neither true nor false");
                let key = "require-sealed-memory";
                set_parsed(&mut vm.require_sealed_memory, key, value, parse)?;
            }
            "stopped-timeout" => {
                let parse =
                    |text: &str| duration::parse(text).map_err(|fix| format!("is no time: {fix}"));
                set_parsed(&mut vm.stopped_timeout, "stopped-timeout", value, parse)?;
            }
            "guest-endpoints" => {
                let value = RawGuestEndpoints::Key(value.into());
                set(&mut vm.guest_endpoints, "guest-endpoints", value)?;
            }
            _ => return Err(VmTextError::UnknownKey(key.to_string())),
        }
    }
    Ok(vm)
}

fn set<T>(slot: &mut Option<T>, key: &'static str, value: T) -> Result<(), VmTextError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(VmTextError::Twice(key)),
    }
}

fn set_parsed<T, E: Into<String>>(
    slot: &mut Option<T>,
    key: &'static str,
    value: &str,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<(), VmTextError> {
    let parsed = parse(value).map_err(|fault| VmTextError::Wrong {
        key,
        value: value.to_string(),
        fault: fault.into(),
    })?;
    set(slot, key, parsed)
}

fn cid_of(text: &str) -> Result<Cid, String> {
    number::cid(text).map_err(|fix| format!("is not a CID; {fix}"))
}

fn whole<T: Whole>(text: &str) -> Result<T, String> {
    let largest = T::LARGEST;
    text.parse()
        .map_err(|_| format!("is not a whole number from 0 to {largest}"))
}

#[cfg(test)]
#[path = "vm_tests.rs"]
mod tests;
