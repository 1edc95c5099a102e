//! What a relay or a rule connects to: an address or a name with a port, or the path of a Unix socket.
//!
//! # Invariants
//! - A port is never 0, and a path fits into a socket address.
//! - A [`DomainName`] cannot be read as an IPv4 address in any notation (`127.1`, `0x7f.1`), so that a
//!   policy and a resolver agree about what is a name.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::str::FromStr;

/// Bytes of a path that fit into a Unix socket address with the NUL byte at its end.
pub const MAX_PATH: usize = 107;
/// Bytes of a domain name without the trailing dot, and of one of its labels (RFC 1035, 2.3.4).
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// What to connect to.
///
/// # Examples
/// ```
/// use zerosock_relay::Target;
///
/// let target: Target = "tcp:[2001:db8::1]:443".parse()?;
/// assert_eq!(target.to_string(), "tcp:[2001:db8::1]:443");
/// assert!("tcp:example.com:0".parse::<Target>().is_err());
/// # Ok::<(), zerosock_relay::target::ParseTargetError>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq, Hash)]
pub enum Target {
    /// `tcp:HOST:PORT`
    Tcp {
        /// The address or name.
        host: Host,
        /// The port.
        port: NonZeroU16,
    },
    /// `udp:HOST:PORT`
    Udp {
        /// The address or name.
        host: Host,
        /// The port.
        port: NonZeroU16,
    },
    /// `unix:PATH`: a stream socket.
    Unix(PathBuf),
    /// `unix-seqpacket:PATH`
    UnixSeqpacket(PathBuf),
    /// `unix-dgram:PATH`
    UnixDatagram(PathBuf),
}

/// An IP address or a name to resolve.
#[derive(Clone, Debug, Eq, PartialEq, Hash)]
pub enum Host {
    /// A literal address. IPv4-mapped IPv6 addresses are normalised to IPv4.
    Address(IpAddr),
    /// A name.
    Name(DomainName),
}

/// A host name by RFC 1123 with `_` allowed, in lower case: at most 253 bytes in labels of at most 63.
/// A trailing dot is kept; it keeps the resolver from trying search domains.
#[derive(Clone, Debug, Eq, PartialEq, Hash)]
pub struct DomainName(Box<str>);

/// Why a text is no target, host or name.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct ParseTargetError(String);

impl Target {
    /// Whether message bounds are kept: every kind but `tcp` and `unix`.
    pub fn keeps_messages(&self) -> bool {
        !matches!(self, Target::Tcp { .. } | Target::Unix(_))
    }
}

impl FromStr for Target {
    type Err = ParseTargetError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (kind, rest) = text.split_once(':').ok_or_else(|| unknown_kind(text))?;
        match kind {
            "tcp" => host_and_port(text, rest).map(|(host, port)| Target::Tcp { host, port }),
            "udp" => host_and_port(text, rest).map(|(host, port)| Target::Udp { host, port }),
            "unix" => path(text, rest).map(Target::Unix),
            "unix-seqpacket" => path(text, rest).map(Target::UnixSeqpacket),
            "unix-dgram" => path(text, rest).map(Target::UnixDatagram),
            _ => Err(unknown_kind(text)),
        }
    }
}

fn unknown_kind(text: &str) -> ParseTargetError {
    ParseTargetError(format!(
        "`{text}` is no target: give tcp:HOST:PORT, udp:HOST:PORT, unix:PATH, unix-seqpacket:PATH or \
         unix-dgram:PATH"
    ))
}

fn host_and_port(whole: &str, text: &str) -> Result<(Host, NonZeroU16), ParseTargetError> {
    let (host, port) = text.rsplit_once(':').ok_or_else(|| {
        ParseTargetError(format!(
            "`{whole}` has no port: give HOST:PORT behind the kind"
        ))
    })?;
    if host.contains(':') && !host.starts_with('[') {
        return Err(ParseTargetError(format!(
            "`{whole}` is ambiguous: put an IPv6 address into brackets, as in tcp:[::1]:80"
        )));
    }
    // `u16::from_str` takes a leading `+`.
    let number = port.bytes().all(|byte| byte.is_ascii_digit());
    match port.parse() {
        Ok(port) if number => Ok((host.parse()?, port)),
        _ => Err(ParseTargetError(format!(
            "`{port}` is no port in `{whole}`: give a number from 1 to 65535"
        ))),
    }
}

fn path(whole: &str, text: &str) -> Result<PathBuf, ParseTargetError> {
    let problem = match text.len() {
        0 => "has no path".to_owned(),
        _ if text.starts_with('@') => {
            "names an abstract socket, which has no owner or mode: give a path (./@ for a file of this name)"
                .to_owned()
        }
        _ if text.contains('\0') => "has a NUL byte in its path".to_owned(),
        length if length > MAX_PATH => {
            format!("has a path of {length} bytes: a socket address has room for {MAX_PATH}")
        }
        _ => return Ok(PathBuf::from(text)),
    };
    Err(ParseTargetError(format!("`{whole}` {problem}")))
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Target::Udp { host, port } => write!(f, "udp:{host}:{port}"),
            Target::Unix(path) => write!(f, "unix:{}", path.display()),
            Target::UnixSeqpacket(path) => write!(f, "unix-seqpacket:{}", path.display()),
            Target::UnixDatagram(path) => write!(f, "unix-dgram:{}", path.display()),
        }
    }
}

impl Host {
    /// Whether the host is the name `localhost`, which means the loopback addresses and is never asked
    /// of a name server (RFC 6761, 6.3).
    pub fn is_localhost(&self) -> bool {
        matches!(self, Host::Name(name) if name.is_localhost())
    }
}

impl FromStr for Host {
    type Err = ParseTargetError;

    /// Parses a name, an IPv4 address, or an IPv6 address with or without brackets.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bracketed = text
            .strip_prefix('[')
            .and_then(|text| text.strip_suffix(']'));
        if let Some(inside) = bracketed {
            let address = inside.parse::<Ipv6Addr>();
            return match address {
                Ok(address) => Ok(Host::Address(IpAddr::from(address).to_canonical())),
                Err(_) => Err(no_ipv6_address(inside)),
            };
        }
        match text.parse::<IpAddr>() {
            Ok(address) => Ok(Host::Address(address.to_canonical())),
            Err(_) if text.contains([':', '%', '[', ']']) => Err(no_ipv6_address(text)),
            Err(_) => text.parse().map(Host::Name),
        }
    }
}

fn no_ipv6_address(text: &str) -> ParseTargetError {
    ParseTargetError(match text.contains('%') {
        true => format!("`{text}`: IPv6 addresses with a zone are not supported"),
        false => format!("`{text}` is no IPv6 address"),
    })
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Address(IpAddr::V4(address)) => address.fmt(f),
            Host::Address(IpAddr::V6(address)) => write!(f, "[{address}]"),
            Host::Name(name) => name.fmt(f),
        }
    }
}

impl DomainName {
    /// The name, with its trailing dot if it has one.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this is `localhost`.
    pub fn is_localhost(&self) -> bool {
        matches!(&*self.0, "localhost" | "localhost.")
    }
}

impl FromStr for DomainName {
    type Err = ParseTargetError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refused = |why: &str| Err(ParseTargetError(format!("`{text}` is no host name: {why}")));
        let name = text.strip_suffix('.').unwrap_or(text);
        if !text.is_ascii() {
            return refused(
                "give a name with other than ASCII letters in its ASCII form (xn--...)",
            );
        }
        if name.is_empty() {
            return refused("it is empty");
        }
        if name.len() > MAX_NAME {
            return refused("it has more than 253 bytes");
        }
        let mut last = "";
        for label in name.split('.') {
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
            if label.is_empty() {
                return refused("a part between dots is empty");
            }
            if label.len() > MAX_LABEL {
                return refused("a part between dots has more than 63 bytes");
            }
            if !label.bytes().all(allowed) {
                return refused("letters, digits, `-`, `_` and dots are allowed");
            }
            if label.starts_with('-') || label.ends_with('-') {
                return refused("a part between dots begins or ends with `-`");
            }
            last = label;
        }
        // `inet_aton` reads `127.1`, `2130706433` and `0x7f.1` as addresses. No top-level domain is a
        // number (RFC 3696, 2).
        let hex = last.strip_prefix("0x").or_else(|| last.strip_prefix("0X"));
        if last.bytes().all(|byte| byte.is_ascii_digit())
            || hex.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
        {
            return refused("its last part is a number; an IPv4 address has four decimal numbers");
        }
        Ok(DomainName(text.to_ascii_lowercase().into()))
    }
}

impl fmt::Display for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
#[path = "target_tests.rs"]
mod tests;
