//! The values of `--uds-path`: the path of the hybrid sockets, and sockets of single ports.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, de};
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

/// Why values do not fit together.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum UdsPathError {
    #[error("{0} is given twice: leave one, and write PORT=PATH for the socket of one port")]
    Twice(&'static str),
    #[error("port {0} has two paths: leave one")]
    PortTwice(Port),
}

impl UdsPath {
    /// `PATH`, or `PORT=PATH`. A path that begins with digits and `=` is written `./1=PATH`.
    pub(crate) fn parse(text: &OsStr) -> UdsPath {
        let bytes = text.as_bytes();
        let port = bytes.iter().position(|&byte| byte == b'=').and_then(|at| {
            let port = std::str::from_utf8(&bytes[..at]).ok()?.parse().ok()?;
            let path = OsStr::from_bytes(&bytes[at + 1..]).into();
            (port != Port::ANY).then_some((port, path))
        });
        match port {
            Some((port, path)) => UdsPath::Port(port, path),
            None => UdsPath::Base(text.into()),
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
    /// One text, or a list.
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<UdsPaths, D::Error> {
        struct Values;
        impl<'de> de::Visitor<'de> for Values {
            type Value = UdsPaths;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a path, or a list of a path and of PORT=PATH")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<UdsPaths, E> {
                UdsPaths::of([UdsPath::parse(text.as_ref())]).map_err(E::custom)
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, mut items: A) -> Result<UdsPaths, A::Error> {
                let mut paths = UdsPaths::default();
                while let Some(item) = items.next_element::<String>()? {
                    paths
                        .add(UdsPath::parse(item.as_ref()))
                        .map_err(de::Error::custom)?;
                }
                Ok(paths)
            }
        }
        input.deserialize_any(Values)
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
mod tests {
    use super::*;

    fn of(values: &[&str]) -> Result<UdsPaths, UdsPathError> {
        UdsPaths::of(values.iter().map(|value| UdsPath::parse(value.as_ref())))
    }

    #[test]
    fn a_value_with_a_port_is_the_socket_of_that_port() {
        let paths = of(&["/run/3.vsock", "1234=/run/agent.sock", "0x16=/run/ssh=1"]).unwrap();
        assert_eq!(paths.base, Some("/run/3.vsock".into()));
        let ports: Vec<_> = paths.ports.into_iter().collect();
        let wanted = [(22, "/run/ssh=1"), (1234, "/run/agent.sock")];
        assert_eq!(
            ports,
            wanted.map(|(port, path)| (Port::new(port), path.into()))
        );
        for base in ["./1=a", "a=b", "4294967296=a", "4294967295=/a", "/run/1=2"] {
            assert_eq!(of(&[base]).unwrap(), UdsPaths::from(base));
        }
    }

    #[test]
    fn a_path_and_a_port_are_given_once() {
        assert_eq!(of(&["/a", "/b"]), Err(UdsPathError::Twice("uds-path")));
        let port = Port::new(7);
        assert_eq!(of(&["7=/a", "7=/a"]), Err(UdsPathError::PortTwice(port)));
    }

    #[test]
    fn the_file_has_a_path_or_a_list() {
        let one: UdsPaths = serde_yaml_ng::from_str("/run/3.vsock").unwrap();
        assert_eq!(one, UdsPaths::from("/run/3.vsock"));
        let list: UdsPaths =
            serde_yaml_ng::from_str("[/run/3.vsock, 1234=/run/agent.sock]").unwrap();
        assert_eq!(list, of(&["/run/3.vsock", "1234=/run/agent.sock"]).unwrap());
        let error = serde_yaml_ng::from_str::<UdsPaths>("[1=/a, 1=/b]").unwrap_err();
        assert!(
            error.to_string().contains("port 1 has two paths"),
            "{error}"
        );
    }
}
