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
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn base(path: impl Into<PathBuf>, is_template: bool) -> PortBase {
        PortBase {
            option: String::new(),
            path: path.into(),
            is_template,
        }
    }

    #[test]
    fn a_derived_name_is_the_path_an_underscore_and_a_port() {
        let plain = base("/d/s3.vsock", false);
        for (name, port) in [
            ("/d/s3.vsock_77", Some(77)),
            ("/d//./s3.vsock_0", Some(0)),
            ("/d/s3.vsock_4294967295", Some(u32::MAX)),
            ("/d/s3.vsock_4294967296", None),
            ("/d/s3.vsock_077", None),
            ("/d/s3.vsock_+7", None),
            ("/d/s3.vsock_", None),
            ("/d/s3.vsock_7x", None),
            ("/d/s3.vsock", None),
            ("/d/s4.vsock_77", None),
            ("/other/s3.vsock_77", None),
        ] {
            assert_eq!(plain.port_of(Path::new(name)), port, "{name}");
        }
        let each = base("/d/p{cid}0.vsock", true);
        for (name, port) in [
            ("/d/p50.vsock_7", Some(7)),
            ("/d/p3000.vsock_7", Some(7)),
            ("/d/p0.vsock_7", None),
            ("/d/p5.vsock_7", None),
            ("/d/p{cid}0.vsock_7", None),
        ] {
            assert_eq!(each.port_of(Path::new(name)), port, "{name}");
        }
        let literal = base("/d/p{cid}", false);
        assert_eq!(literal.port_of(Path::new("/d/p{cid}_7")), Some(7));
    }

    #[test]
    fn directories_are_compared_as_files() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("a")).unwrap();
        symlink("a", dir.path().join("link")).unwrap();
        let at = |name: &str| dir.path().join(name);
        let base = base(at("a/s"), false);
        for name in ["a/s_7", "link/s_7", "a/../a/s_7", "link/../a//s_7"] {
            assert_eq!(base.port_of(&at(name)), Some(7), "{name}");
        }
        assert_eq!(base.port_of(&at("s_7")), None);
    }
}
