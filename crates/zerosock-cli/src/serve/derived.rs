//! Sockets of our own that a guest would reach by the name of one of its ports.
//!
//! What a guest sends to port P of the host goes to the socket at `PATH_P` of its `uds-path`. A socket of this
//! process there would give the guest the rights of a host program against another VM, or of its VMM.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use zerosock::Port;
use zerosock_sys::socket_path;

/// Stands for the CID of an attached process in a path.
const CID: &str = "{cid}";

/// A path from which the paths of ports are made.
#[derive(Clone, Debug)]
pub(super) struct PortBase {
    /// The option that names it.
    pub(super) option: String,
    pub(super) path: PathBuf,
    /// [`CID`] in the path stands for any number.
    pub(super) is_template: bool,
}

/// A single socket that a guest reaches by a port.
#[derive(Clone, Debug)]
pub(super) struct PortPath {
    pub(super) option: String,
    pub(super) port: Port,
    pub(super) path: PathBuf,
}

impl PortBase {
    /// The port that `path` belongs to.
    pub(super) fn port_of(&self, path: &Path) -> Option<u32> {
        let (base, name) = (self.path.file_name()?, path.file_name()?);
        let port = self.port_of_name(base.as_bytes(), name.as_bytes())?;
        is_same_directory(&self.path, path).then_some(port)
    }

    fn port_of_name(&self, base: &[u8], name: &[u8]) -> Option<u32> {
        let at = base
            .windows(CID.len())
            .position(|window| window == CID.as_bytes());
        let Some(at) = at.filter(|_| self.is_template) else {
            return port(name.strip_prefix(base)?);
        };
        let rest = name.strip_prefix(&base[..at])?;
        let behind = &base[at + CID.len()..];
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        (1..=digits).find_map(|digits| port(rest[digits..].strip_prefix(behind)?))
    }
}

impl PortPath {
    /// Whether this is the socket at `path`.
    pub(super) fn matches(&self, path: &Path) -> bool {
        self.path.file_name() == path.file_name() && is_same_directory(&self.path, path)
    }
}

/// The port that `_PORT` names.
fn port(suffix: &[u8]) -> Option<u32> {
    let digits = std::str::from_utf8(suffix.strip_prefix(b"_")?).ok()?;
    let port: u32 = digits.parse().ok()?;
    (port.to_string() == digits).then_some(port)
}

/// Whether two paths are in one directory, however they are written.
fn is_same_directory(a: &Path, b: &Path) -> bool {
    let [a, b] = [a, b].map(|path| std::path::absolute(path).unwrap_or_else(|_| path.into()));
    let (Some(a), Some(b)) = (a.parent(), b.parent()) else {
        return false;
    };
    let file = |path| socket_path::directory_identity(path).ok();
    a == b || file(a).is_some_and(|identity| file(b) == Some(identity))
}

/// A path with a number in the place of [`CID`].
pub(super) fn example(path: &Path) -> PathBuf {
    match path.to_str() {
        Some(text) => text.replace(CID, "3").into(),
        None => path.into(),
    }
}

#[cfg(test)]
#[path = "derived_tests.rs"]
mod tests;
