//! `--config FILE`: a YAML file with a list `vms`, one entry per VM, and optionally `attach`, `access`,
//! `forward`, `listen` and `net`.

use std::fs;
use std::path::Path;

use serde::Deserialize;

use super::access::AccessEntry;
use super::attach_flags::RawAttach;
use super::forward::{Forward, Listen};
use super::vm::RawVm;
use crate::net::network::Network;
use crate::size;

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error("--config {path}: cannot be read: {source}")]
    Unreadable {
        path: String,
        source: std::io::Error,
    },
    #[error("--config {path}: {reason}")]
    Malformed {
        path: String,
        reason: serde_yaml_ng::Error,
    },
    #[error(
        "--config {path}: the list `vms` is empty: add an entry with socket and uds_path, or the \
         key `attach` with socket, or a network under `net`"
    )]
    Empty { path: String },
}

#[derive(Debug, Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "expected a list `vms` with one entry per VM"
)]
pub(crate) struct File {
    #[serde(default)]
    pub(crate) vms: Vec<RawVm>,
    pub(crate) attach: Option<RawAttach>,
    #[serde(default)]
    pub(crate) access: Vec<AccessEntry>,
    #[serde(default)]
    pub(crate) forward: Vec<Forward>,
    #[serde(default)]
    pub(crate) listen: Vec<Listen>,
    #[serde(default)]
    pub(crate) net: Vec<Network>,
    pub(crate) spin_us: Option<u64>,
    #[serde(default, deserialize_with = "size::deserialize")]
    pub(crate) max_memory: Option<u64>,
    #[serde(default, deserialize_with = "size::deserialize")]
    pub(crate) max_memory_total: Option<u64>,
}

/// Contents of the file: at least one VM or network, or the attach socket.
pub(crate) fn read(path: &Path) -> Result<File, FileError> {
    let name = || path.display().to_string();
    let text = fs::read_to_string(path).map_err(|source| FileError::Unreadable {
        path: name(),
        source,
    })?;
    let file: File = serde_yaml_ng::from_str(&text).map_err(|reason| FileError::Malformed {
        path: name(),
        reason,
    })?;
    if file.vms.is_empty() && file.attach.is_none() && file.net.is_empty() {
        return Err(FileError::Empty { path: name() });
    }
    Ok(file)
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
