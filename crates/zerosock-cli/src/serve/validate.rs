//! Errors and checks shared by the settings of VMs and of the attach socket.

use std::fmt;
use std::path::Path;

use crate::sockets;

/// Errors of the options.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SettingsError {
    #[error(
        "no virtual machine is named: give --socket and --uds-path, or --vm, or --config, or \
         --attach-socket (`zerosock serve --help` has examples)"
    )]
    NoVm,
    #[error(transparent)]
    File(#[from] super::file::FileError),
    #[error("--uds-path: {0}")]
    UdsPath(#[from] super::uds_paths::UdsPathError),
    #[error("{option} is missing: {fix}")]
    Missing { option: String, fix: &'static str },
    #[error("{option} {value}: {fix}")]
    Wrong {
        option: String,
        value: String,
        fix: String,
    },
    #[error("{option} {value}: already used by {other}; every VM needs its own")]
    Duplicate {
        option: String,
        value: String,
        other: String,
    },
    /// Names the key.
    #[error("{0}")]
    Network(String),
    #[error("{place}{error}")]
    Rules {
        /// The file, with a colon.
        place: String,
        error: zerosock::forward::RuleError,
    },
    #[error("{option} and {other} exclude each other: keep one")]
    Both { option: String, other: String },
}

/// Where a VM was written: errors show the option in the same form.
#[derive(Clone, Copy)]
pub(super) enum OptionSource<'a> {
    Flags,
    Vm,
    File { path: &'a Path, index: usize },
}

impl OptionSource<'_> {
    /// `key` has dashes, as in a flag.
    pub(super) fn option(self, key: &str) -> String {
        match self {
            OptionSource::Flags => format!("--{key}"),
            OptionSource::Vm => format!("--vm {key}"),
            OptionSource::File { path, index } => {
                format!("{}: vms[{index}].{}", path.display(), key.replace('-', "_"))
            }
        }
    }

    /// A key of the attach socket or of host services, with dashes, as it was written.
    pub(super) fn attach_option(self, key: &str) -> String {
        match self {
            OptionSource::File { path, .. } => {
                format!("{}: attach.{}", path.display(), key.replace('-', "_"))
            }
            _ if key.starts_with("service-") => format!("--{key}"),
            OptionSource::Flags | OptionSource::Vm => format!("--attach-{key}"),
        }
    }

    pub(super) fn wrong(
        self,
        key: &str,
        value: impl fmt::Display,
        fix: impl Into<String>,
    ) -> SettingsError {
        wrong(self.option(key), value, fix)
    }
}

/// The error of an option with a value that is not valid.
pub(super) fn wrong(
    option: impl Into<String>,
    value: impl fmt::Display,
    fix: impl Into<String>,
) -> SettingsError {
    SettingsError::Wrong {
        option: option.into(),
        value: value.to_string(),
        fix: fix.into(),
    }
}

pub(super) fn check_path(
    source: OptionSource<'_>,
    key: &str,
    path: &Path,
) -> Result<(), SettingsError> {
    sockets::check_path(path)
        .map_err(|reason| source.wrong(key, path.display(), reason.to_string()))
}

/// Parses names joined by `+`; the error is the fix.
pub(super) fn parse_groups(text: &str) -> Result<Vec<String>, &'static str> {
    let mut groups: Vec<String> = Vec::new();
    for name in text.trim().split('+') {
        if name.is_empty() {
            return Err("a name is empty; give names joined by `+`, such as web+db");
        }
        if !groups.iter().any(|known| known == name) {
            groups.push(name.to_string());
        }
    }
    Ok(groups)
}

/// What comes before the name of a key of the file in an error.
pub(super) fn place_of(file: Option<&Path>) -> String {
    file.map_or_else(String::new, |path| format!("{}: ", path.display()))
}
