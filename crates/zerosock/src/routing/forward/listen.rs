//! Where rules listen, and what they connect a client to.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use zerosock_proto::{Cid, Port};
use zerosock_relay::networks::Network;

use super::parse_error::ParseRuleError;
use super::zero_copy::ZeroCopy;
use crate::routing::name::{Name, RuleName};

/// An address that clients outside connect to: `tcp:ADDRESS:PORT`, `unix:PATH` or
/// `unix-seqpacket:PATH`.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum ListenAddress {
    /// A TCP socket. `[::]` accepts IPv4 clients too, unless the system is configured otherwise.
    Tcp(SocketAddr),
    /// A Unix stream socket.
    Unix(PathBuf),
    /// A Unix socket of type SOCK_SEQPACKET: each message is one packet.
    UnixSeqpacket(PathBuf),
}

/// What the clients of a [`ListenRule`] are connected to: `CID:PORT`, `name:NAME:PORT` or `host:PORT`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Destination {
    /// A port of a VM or process.
    Cid(Cid, Port),
    /// A port of the attached process that has this name at the time.
    Name(Name, Port),
    /// The service that has claimed this port of the host at the time.
    Service(Port),
}

/// Connections from outside to a VM, process or service.
#[derive(Debug)]
pub struct ListenRule {
    /// Shown by logs and counters instead of the rule.
    pub name: Option<RuleName>,
    /// The address that clients connect to.
    pub on: ListenAddress,
    /// The bound and listening socket. `None` in a reload: the one that the daemon has for this address.
    pub socket: Option<OwnedFd>,
    /// What clients are connected to.
    pub to: Destination,
    /// Networks that TCP clients may come from; empty: any.
    pub allow: Vec<Network>,
    /// Networks that TCP clients may not come from. Goes before `allow`.
    pub deny: Vec<Network>,
    /// A connection on which no byte passes for this time (up to half as long again) is reset.
    pub idle_timeout: Option<Duration>,
    /// Idle time before the first TCP keepalive probe, and interval of the probes; `None`: none.
    pub keepalive: Option<Duration>,
    /// Send the endpoint a header of the PROXY protocol version 2 first, with the addresses of a TCP
    /// client.
    pub proxy_protocol: bool,
    /// Most connections at once.
    pub max_connections: Option<u32>,
    /// When bytes to a TCP client are sent without a copy.
    pub zero_copy: ZeroCopy,
}

impl ListenRule {
    /// A rule with the default limits: TCP keepalive after 60 s, everything else unlimited.
    pub fn new(on: ListenAddress, socket: OwnedFd, to: Destination) -> ListenRule {
        ListenRule {
            name: None,
            on,
            socket: Some(socket),
            to,
            allow: Vec::new(),
            deny: Vec::new(),
            idle_timeout: None,
            keepalive: Some(super::rule::KEEPALIVE),
            proxy_protocol: false,
            max_connections: None,
            zero_copy: ZeroCopy::Auto,
        }
    }

    /// The same rule with a name.
    pub fn name(mut self, name: RuleName) -> ListenRule {
        self.name = Some(name);
        self
    }

    /// The rule in logs and counters: its name, or its text.
    pub(crate) fn text(&self) -> String {
        match &self.name {
            Some(name) => format!("listen {name}"),
            None => format!("listen {} to {}", self.on, self.to),
        }
    }

    /// Whether two rules differ in nothing but the socket and the name.
    pub(crate) fn is_same(&self, other: &ListenRule) -> bool {
        self.on == other.on
            && self.to == other.to
            && self.allow == other.allow
            && self.deny == other.deny
            && self.idle_timeout == other.idle_timeout
            && self.keepalive == other.keepalive
            && self.proxy_protocol == other.proxy_protocol
            && self.max_connections == other.max_connections
            && self.zero_copy == other.zero_copy
    }
}

impl FromStr for ListenAddress {
    type Err = ParseRuleError;

    fn from_str(text: &str) -> Result<ListenAddress, ParseRuleError> {
        let wrong = |what: &str| {
            Err(ParseRuleError(format!(
                "`{text}` {what}; give tcp:ADDRESS:PORT such as tcp:127.0.0.1:8080 or tcp:[::]:80, \
                 unix:PATH or unix-seqpacket:PATH"
            )))
        };
        match text.split_once(':') {
            Some(("tcp", address)) => match address.parse::<SocketAddr>() {
                Ok(address) => Ok(ListenAddress::Tcp(address)),
                Err(_) => wrong("names no IP address and port"),
            },
            Some(("unix" | "unix-seqpacket", "")) => wrong("names no path"),
            Some(("unix", path)) => Ok(ListenAddress::Unix(path.into())),
            Some(("unix-seqpacket", path)) => Ok(ListenAddress::UnixSeqpacket(path.into())),
            _ => wrong("is no address to listen on"),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Tcp(address) => write!(f, "tcp:{address}"),
            ListenAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            ListenAddress::UnixSeqpacket(path) => write!(f, "unix-seqpacket:{}", path.display()),
        }
    }
}

impl FromStr for Destination {
    type Err = ParseRuleError;

    fn from_str(text: &str) -> Result<Destination, ParseRuleError> {
        let wrong = |what: &str| {
            ParseRuleError(format!(
                "`{text}` {what}; give CID:PORT such as 3:22, name:NAME:PORT, or host:PORT for a \
                 service"
            ))
        };
        let (endpoint, port) = text.rsplit_once(':').ok_or_else(|| wrong("has no port"))?;
        let port = port
            .parse()
            .ok()
            .filter(|&port| port != Port::ANY)
            .ok_or_else(|| wrong("has no port from 0 to 4294967294"))?;
        if endpoint == "host" {
            return Ok(Destination::Service(port));
        }
        if let Some(name) = endpoint.strip_prefix("name:") {
            let name = name
                .parse()
                .map_err(|_| wrong("names no process: a name has 1 to 64 of A-Z a-z 0-9 . _ -"))?;
            return Ok(Destination::Name(name, port));
        }
        let cid = endpoint
            .parse()
            .ok()
            .filter(|cid: &Cid| cid.is_guest())
            .ok_or_else(|| wrong("names no endpoint"))?;
        Ok(Destination::Cid(cid, port))
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Destination::Cid(cid, port) => write!(f, "{cid}:{}", port.get()),
            Destination::Name(name, port) => write!(f, "name:{name}:{}", port.get()),
            Destination::Service(port) => write!(f, "host:{}", port.get()),
        }
    }
}

impl Destination {
    /// The port.
    pub fn port(&self) -> Port {
        match self {
            Destination::Cid(_, port) | Destination::Name(_, port) | Destination::Service(port) => {
                *port
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_destinations_are_read_as_they_are_shown() {
        for text in [
            "tcp:127.0.0.1:80",
            "tcp:[::]:0",
            "unix:/a",
            "unix-seqpacket:b",
        ] {
            assert_eq!(text.parse::<ListenAddress>().unwrap().to_string(), text);
        }
        for text in ["3:22", "name:db-1:5432", "host:0"] {
            assert_eq!(text.parse::<Destination>().unwrap().to_string(), text);
        }
        let hexadecimal = "0x3:0x16".parse::<Destination>().unwrap();
        assert_eq!(hexadecimal.to_string(), "3:22");
        for text in ["", "tcp:80", "tcp:localhost:80", "unix:", "udp:1.2.3.4:5"] {
            assert!(text.parse::<ListenAddress>().is_err(), "{text:?}");
        }
        for text in [
            "",
            "3",
            "2:1",
            "3:4294967295",
            "name:a b:1",
            ":1",
            "3:",
            "+3:1",
            "local:1",
            "any:1",
            "3:any",
        ] {
            assert!(text.parse::<Destination>().is_err(), "{text:?}");
        }
    }
}
