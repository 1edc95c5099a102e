//! Validated settings of the attach socket.

use std::fmt;
use std::path::{Path, PathBuf};

use rustix::fs::Mode;

use super::attach_flags::RawAttach;
use super::validate::{OptionSource, SettingsError, parse_groups, wrong};
use crate::mode::parse_mode;
use crate::sockets;

/// Validated settings of the attach socket.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Attach {
    pub(crate) socket: PathBuf,
    /// `None`: as for the other sockets.
    pub(crate) mode: Option<Mode>,
    /// Users allowed to attach. Empty: only the user of this process.
    pub(crate) uids: Vec<u32>,
    pub(crate) groups: Vec<String>,
    /// From 1 to [`MAX_PROCESSES`].
    pub(crate) max: usize,
    /// Hybrid sockets of attached processes, if any.
    pub(crate) hybrid: Option<Hybrid>,
    /// Users allowed to attach host services. Empty: only the user of this process.
    pub(crate) service_uids: Vec<u32>,
    /// Up to [`MAX_PROCESSES`].
    pub(crate) service_max: usize,
}

/// Hybrid sockets of attached processes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Hybrid {
    /// All connect to the sockets around this path; host programs cannot connect to them.
    Shared(PathBuf),
    /// Each has sockets of its own; the path contains `{cid}`.
    Each(PathBuf),
}

/// Placeholder of the CID.
const CID: &str = "{cid}";
const DEFAULT_SERVICES: u64 = 64;

const DEFAULT_GROUP: &str = "default";
const DEFAULT_MAX: u64 = 256;
/// Each uses about ten descriptors here, and its memory is mapped.
const MAX_PROCESSES: u64 = 16384;

impl Attach {
    pub(super) fn new(source: OptionSource<'_>, raw: RawAttach) -> Result<Attach, SettingsError> {
        let socket = raw.socket.ok_or_else(|| SettingsError::Missing {
            option: source.attach_option("socket"),
            fix: "name the Unix socket on which processes ask to attach",
        })?;
        let wrong = |key: &str, value: &dyn fmt::Display, fix: &dyn fmt::Display| {
            wrong(source.attach_option(key), value, fix.to_string())
        };
        sockets::check_path(&socket)
            .map_err(|reason| wrong("socket", &socket.display(), &reason))?;
        let mode = match &raw.mode {
            None => None,
            Some(text) => Some(parse_mode(text).ok_or_else(|| {
                let fix = "give permission bits in octal, 0 to 0777, such as 0660";
                wrong("mode", text, &fix)
            })?),
        };
        for (key, uids) in [("uid", &raw.uid), ("service-uid", &raw.service_uid)] {
            if uids.contains(&u32::MAX) {
                let fix = "no user has this number; give one from 0 to 4294967294";
                return Err(wrong(key, &u32::MAX, &fix));
            }
        }
        let groups = raw.groups.as_deref().unwrap_or(DEFAULT_GROUP);
        let groups = parse_groups(groups).map_err(|fix| wrong("groups", &groups, &fix))?;
        let max = raw.max.unwrap_or(DEFAULT_MAX);
        if !(1..=MAX_PROCESSES).contains(&max) {
            let fix = format_args!("give a number from 1 to {MAX_PROCESSES}");
            return Err(wrong("max", &max, &fix));
        }
        let service_max = raw.service_max.unwrap_or(DEFAULT_SERVICES);
        if service_max > MAX_PROCESSES {
            let fix = format_args!("give a number from 0 to {MAX_PROCESSES}");
            return Err(wrong("service-max", &service_max, &fix));
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
            // At most 16384, checked above.
            max: max as usize,
            hybrid,
            service_uids: raw.service_uid,
            service_max: service_max as usize,
        })
    }
}

impl Hybrid {
    /// The path with its placeholder.
    pub(super) fn path(&self) -> &Path {
        match self {
            Hybrid::Shared(path) | Hybrid::Each(path) => path,
        }
    }

    fn new(source: OptionSource<'_>, path: PathBuf) -> Result<Hybrid, SettingsError> {
        let wrong = |fix: String| wrong(source.attach_option("uds-path"), path.display(), fix);
        let text = path.to_str();
        let text = text.ok_or_else(|| wrong("a path of other characters than UTF-8's".into()))?;
        // The longest CID.
        let longest = PathBuf::from(text.replace(CID, "4294967294"));
        sockets::check_path(&longest).map_err(|reason| wrong(reason.to_string()))?;
        Ok(match text.contains(CID) {
            true => Hybrid::Each(path),
            false => Hybrid::Shared(path),
        })
    }
}
