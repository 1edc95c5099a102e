//! The values of `--uds-path`: the path of the hybrid sockets, and sockets of single ports.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use zerosock::Port;
use zerosock::access::{Cids, Party};
use zerosock::forward::{ForwardRule, ParseRuleError};

/// Where the Unix sockets of host programs are.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct UdsPaths {
    /// Programs connect to the guest here, and the guest's connections to port P go to `base_P`.
    pub(crate) base: Option<PathBuf>,
    /// The sockets for the guest's connections to single ports. None is [`Port::ANY`].
    pub(crate) ports: BTreeMap<Port, PathBuf>,
}

/// One value.
#[derive(Clone, Debug)]
pub(crate) enum UdsPath {
    Base(PathBuf),
    Port(Port, PathBuf),
}

/// Why a value is wrong, or values do not fit together.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum UdsPathError {
    #[error("{0} is given twice: leave one, and write PORT=PATH for the socket of one port")]
    Twice(&'static str),
    #[error("port {0} has two paths: leave one")]
    PortTwice(Port),
    #[error(
        "`{0}` is not a port: give a number from 0 to 4294967294; a path with = after digits is \
         written ./{0}=..."
    )]
    Port(String),
    #[error("{}: the path of a port has to be UTF-8", .0.display())]
    NotUtf8(PathBuf),
}

impl UdsPath {
    /// `PATH`, or `PORT=PATH`. A path that begins with digits and `=` is written `./1=PATH`.
    pub(crate) fn parse(text: &OsStr) -> Result<UdsPath, UdsPathError> {
        let bytes = text.as_bytes();
        let at = bytes.iter().position(|&byte| byte == b'=');
        let prefix = at.and_then(|at| Some((at, std::str::from_utf8(&bytes[..at]).ok()?)));
        let Some((at, prefix)) = prefix else {
            return Ok(UdsPath::Base(text.into()));
        };
        let is_number = match prefix.strip_prefix("0x") {
            Some(digits) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
            None => !prefix.is_empty() && prefix.bytes().all(|byte| byte.is_ascii_digit()),
        };
        match prefix.parse() {
            Ok(Port::ANY) => Err(UdsPathError::Port(prefix.into())),
            Err(_) if is_number => Err(UdsPathError::Port(prefix.into())),
            Err(_) => Ok(UdsPath::Base(text.into())),
            Ok(port) => {
                // The target of a rule is text.
                let path = OsStr::from_bytes(&bytes[at + 1..]);
                let utf8 = path.to_str();
                let path = utf8.ok_or_else(|| UdsPathError::NotUtf8(path.into()))?;
                Ok(UdsPath::Port(port, path.into()))
            }
        }
    }
}

impl UdsPaths {
    pub(crate) fn add(&mut self, value: UdsPath) -> Result<(), UdsPathError> {
        match value {
            UdsPath::Base(path) => match self.base.replace(path) {
                None => Ok(()),
                Some(_) => Err(UdsPathError::Twice("uds-path")),
            },
            UdsPath::Port(port, path) => match self.ports.insert(port, path) {
                None => Ok(()),
                Some(_) => Err(UdsPathError::PortTwice(port)),
            },
        }
    }

    pub(crate) fn of(values: impl IntoIterator<Item = UdsPath>) -> Result<UdsPaths, UdsPathError> {
        let mut paths = UdsPaths::default();
        values.into_iter().try_for_each(|value| paths.add(value))?;
        Ok(paths)
    }
}

/// The rule by which connections of these VMs to `port` go to the socket at `path`. `{cid}` and `{port}` stand for
/// those of the connection.
pub(super) fn rule(vm: Cids, port: Port, path: &Path) -> Result<ForwardRule, ParseRuleError> {
    let target = format!("unix:{}", path.display()).parse()?;
    let mut rule = ForwardRule::new(port..=port, target);
    rule.from = vec![Party::Cids(vm)];
    Ok(rule)
}

impl<'de> Deserialize<'de> for UdsPaths {
    /// One text, a list, or no value.
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<UdsPaths, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "expected a path, or a list of a path and of PORT=PATH"
        )]
        enum Written {
            One(String),
            Many(Vec<String>),
        }
        let values = match Option::deserialize(input)? {
            None => Vec::new(),
            Some(Written::One(value)) => vec![value],
            Some(Written::Many(values)) => values,
        };
        let values = values.iter().map(|value| UdsPath::parse(value.as_ref()));
        let values = values
            .collect::<Result<Vec<_>, _>>()
            .map_err(D::Error::custom)?;
        UdsPaths::of(values).map_err(D::Error::custom)
    }
}

#[cfg(test)]
impl From<&str> for UdsPaths {
    fn from(base: &str) -> UdsPaths {
        UdsPaths {
            base: Some(base.into()),
            ports: BTreeMap::new(),
        }
    }
}

#[cfg(test)]
#[path = "uds_paths_tests.rs"]
mod tests;
