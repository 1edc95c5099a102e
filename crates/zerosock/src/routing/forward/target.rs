//! The target of a rule: a [`Target`] in which the port, or parts of the path, come from the connection.
//!
//! # Invariants
//! - A target without a port of its own is only used for ports from 1 to 65535
//!   ([`TargetTemplate::takes_own_port`]).

use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::str::FromStr;

use super::parse_error::ParseRuleError;
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Cid, Port};
use zerosock_relay::target::{Host, Target};

/// Where a rule forwards connections to.
///
/// `tcp:HOST:PORT`, `udp:HOST:PORT`, `unix:PATH`, `unix-seqpacket:PATH` or `unix-dgram:PATH`. Without
/// `:PORT` the port is the one that the guest connects to. `{port}` and `{cid}` in a path stand for that
/// port and for the guest's CID.
///
/// ```
/// use zerosock::forward::TargetTemplate;
///
/// for text in ["tcp:example.com:80", "tcp:[::1]", "unix:/run/app/{cid}_{port}.sock"] {
///     let target: TargetTemplate = text.parse()?;
///     assert_eq!(target.to_string(), text);
/// }
/// assert!("tcp:".parse::<TargetTemplate>().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TargetTemplate {
    target: Target,
    /// The port is that of the connection, not that of `target`.
    own_port: bool,
}

impl TargetTemplate {
    /// Whether the port is the one that the guest connects to.
    pub fn takes_own_port(&self) -> bool {
        self.own_port
    }

    /// The path of the socket for a connection of the endpoint `cid` to `port`, if it is a Unix socket.
    pub fn path(&self, cid: Cid, port: Port) -> Option<PathBuf> {
        match self.resolve(cid, port)? {
            Target::Unix(path) | Target::UnixSeqpacket(path) | Target::UnixDatagram(path) => {
                Some(path)
            }
            Target::Tcp { .. } | Target::Udp { .. } => None,
        }
    }

    /// The address, if it is a literal one.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        match &self.target {
            Target::Tcp {
                host: Host::Address(address),
                ..
            }
            | Target::Udp {
                host: Host::Address(address),
                ..
            } => Some(*address),
            _ => None,
        }
    }

    /// Whether it is a datagram socket, which has no end of stream.
    pub(crate) fn is_datagram(&self) -> bool {
        matches!(self.target, Target::Udp { .. } | Target::UnixDatagram(_))
    }

    /// The type of the connections that can be forwarded to it.
    pub(crate) fn socket_type(&self) -> SocketType {
        match self.target.keeps_messages() {
            true => SocketType::SeqPacket,
            false => SocketType::Stream,
        }
    }

    /// Whether connections of this type, or datagrams, can be forwarded to it.
    pub(crate) fn takes(&self, socket_type: SocketType) -> bool {
        match socket_type {
            SocketType::Datagram => self.is_datagram(),
            _ => self.socket_type() == socket_type,
        }
    }

    /// The target of a connection of the endpoint `cid` to `port`. `None`: the port is no TCP or UDP
    /// port.
    pub(crate) fn resolve(&self, cid: Cid, port: Port) -> Option<Target> {
        let path = |path: &PathBuf| match path.to_str() {
            Some(text) if text.contains('{') => {
                let text = text.replace("{port}", &port.get().to_string());
                PathBuf::from(text.replace("{cid}", &cid.get().to_string()))
            }
            _ => path.clone(),
        };
        let own = || {
            let port = u16::try_from(port.get()).ok()?;
            NonZeroU16::new(port)
        };
        Some(match &self.target {
            Target::Tcp { host, .. } if self.own_port => Target::Tcp {
                host: host.clone(),
                port: own()?,
            },
            Target::Udp { host, .. } if self.own_port => Target::Udp {
                host: host.clone(),
                port: own()?,
            },
            Target::Unix(named) => Target::Unix(path(named)),
            Target::UnixSeqpacket(named) => Target::UnixSeqpacket(path(named)),
            Target::UnixDatagram(named) => Target::UnixDatagram(path(named)),
            target => target.clone(),
        })
    }
}

impl From<Target> for TargetTemplate {
    fn from(target: Target) -> TargetTemplate {
        TargetTemplate {
            target,
            own_port: false,
        }
    }
}

impl FromStr for TargetTemplate {
    type Err = ParseRuleError;

    fn from_str(text: &str) -> Result<TargetTemplate, ParseRuleError> {
        let port = NonZeroU16::MIN;
        let without_port = text.split_once(':').and_then(|(kind, host)| match kind {
            "tcp" => Some(Target::Tcp {
                host: host.parse().ok()?,
                port,
            }),
            "udp" => Some(Target::Udp {
                host: host.parse().ok()?,
                port,
            }),
            _ => None,
        });
        if let Some(target) = without_port {
            let own_port = true;
            return Ok(TargetTemplate { target, own_port });
        }
        let target: Target =
            text.parse()
                .map_err(|error: zerosock_relay::target::ParseTargetError| {
                    ParseRuleError(error.to_string())
                })?;
        Ok(TargetTemplate::from(target))
    }
}

impl fmt::Display for TargetTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bracketed = |host: &Host| match host {
            Host::Address(IpAddr::V6(address)) => format!("[{address}]"),
            host => host.to_string(),
        };
        match &self.target {
            Target::Tcp { host, .. } if self.own_port => write!(f, "tcp:{}", bracketed(host)),
            Target::Udp { host, .. } if self.own_port => write!(f, "udp:{}", bracketed(host)),
            target => target.fmt(f),
        }
    }
}

#[cfg(test)]
#[path = "target_tests.rs"]
mod tests;
