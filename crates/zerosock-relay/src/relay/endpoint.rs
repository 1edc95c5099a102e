//! What a relay joins: the texts `tcp-listen:127.0.0.1:80`, `unix:/run/x.sock` and so on.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use zerosock_proto::{Cid, Port};

use super::socket::SocketKind;
use crate::target::Target;

/// One of the two ends of a relay.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum KernelEndpoint {
    /// `tcp:HOST:PORT`, `udp:HOST:PORT`, `unix:PATH`, `unix-dgram:PATH`, `unix-seqpacket:PATH`
    Connect(Target),
    /// `tcp-listen:ADDRESS:PORT`
    TcpListen(SocketAddr),
    /// `udp-listen:ADDRESS:PORT`
    UdpListen(SocketAddr),
    /// `unix-listen:PATH`
    UnixListen(PathBuf),
    /// `unix-seqpacket-listen:PATH`
    UnixSeqpacketListen(PathBuf),
    /// `unix-dgram-listen:PATH`
    UnixDatagramListen(PathBuf),
    /// `hybrid:PATH:PORT`: a port of a guest, through its hybrid socket.
    Hybrid {
        /// The socket, which is told the port.
        path: PathBuf,
        /// The guest's port.
        port: u32,
    },
    /// `vsock:CID:PORT`, by the kernel's AF_VSOCK
    Vsock {
        /// The CID.
        cid: u32,
        /// The port.
        port: u32,
    },
    /// `vsock-listen:PORT`, by the kernel's AF_VSOCK
    VsockListen {
        /// The port, for all CIDs of this machine.
        port: u32,
    },
}

/// Why a text is no endpoint.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseEndpointError {
    /// It begins with the name of no kind.
    #[error("`{0}` is no endpoint: give one of {FORMS}")]
    Kind(String),
    /// Another fault, with its remedy.
    #[error("{0}")]
    Fault(String),
}

/// The forms of an endpoint.
pub const FORMS: &str = "tcp:HOST:PORT, tcp-listen:ADDRESS:PORT, udp:HOST:PORT, udp-listen:ADDRESS:PORT, \
     unix:PATH, unix-listen:PATH, unix-dgram:PATH, unix-dgram-listen:PATH, unix-seqpacket:PATH, \
     unix-seqpacket-listen:PATH, hybrid:PATH:PORT, vsock:CID:PORT, vsock-listen:PORT";

impl KernelEndpoint {
    /// Whether peers connect to it, rather than it to a peer.
    pub fn listens(&self) -> bool {
        matches!(
            self,
            KernelEndpoint::TcpListen(_)
                | KernelEndpoint::UdpListen(_)
                | KernelEndpoint::UnixListen(_)
                | KernelEndpoint::UnixSeqpacketListen(_)
                | KernelEndpoint::UnixDatagramListen(_)
                | KernelEndpoint::VsockListen { .. }
        )
    }

    /// Whether it receives the datagrams of any number of senders with one socket.
    pub fn receives_datagrams(&self) -> bool {
        matches!(
            self,
            KernelEndpoint::UdpListen(_) | KernelEndpoint::UnixDatagramListen(_)
        )
    }

    /// Whether it keeps the bounds of messages.
    pub fn keeps_messages(&self) -> bool {
        self.kind().keeps_messages()
    }

    pub(super) fn kind(&self) -> SocketKind {
        match self {
            KernelEndpoint::Connect(Target::Tcp { .. }) | KernelEndpoint::TcpListen(_) => {
                SocketKind::Tcp
            }
            KernelEndpoint::Connect(Target::Udp { .. }) | KernelEndpoint::UdpListen(_) => {
                SocketKind::Udp
            }
            KernelEndpoint::Connect(Target::Unix(_))
            | KernelEndpoint::UnixListen(_)
            | KernelEndpoint::Hybrid { .. } => SocketKind::Unix,
            KernelEndpoint::Connect(Target::UnixSeqpacket(_))
            | KernelEndpoint::UnixSeqpacketListen(_) => SocketKind::UnixPackets,
            KernelEndpoint::Connect(Target::UnixDatagram(_))
            | KernelEndpoint::UnixDatagramListen(_) => SocketKind::UnixDatagrams,
            KernelEndpoint::Vsock { .. } | KernelEndpoint::VsockListen { .. } => SocketKind::Vsock,
        }
    }
}

impl FromStr for KernelEndpoint {
    type Err = ParseEndpointError;

    fn from_str(text: &str) -> Result<KernelEndpoint, ParseEndpointError> {
        let (kind, rest) = text.split_once(':').ok_or_else(|| no_kind(text))?;
        Ok(match kind {
            "tcp-listen" => KernelEndpoint::TcpListen(address(kind, rest)?),
            "udp-listen" => KernelEndpoint::UdpListen(address(kind, rest)?),
            "unix-listen" => KernelEndpoint::UnixListen(path(rest)?),
            "unix-seqpacket-listen" => KernelEndpoint::UnixSeqpacketListen(path(rest)?),
            "unix-dgram-listen" => KernelEndpoint::UnixDatagramListen(path(rest)?),
            "hybrid" => {
                let (path, port) = path_and_port(rest, "hybrid:PATH:PORT")?;
                KernelEndpoint::Hybrid { path, port }
            }
            "vsock" => {
                let parts = rest.split_once(':');
                let (cid, port) = parts
                    .ok_or_else(|| fault("the CID or the port is missing; give vsock:CID:PORT"))?;
                KernelEndpoint::Vsock {
                    cid: self::cid(cid)?,
                    port: self::port(port)?,
                }
            }
            "vsock-listen" => KernelEndpoint::VsockListen { port: port(rest)? },
            "tcp" | "udp" | "unix" | "unix-dgram" | "unix-seqpacket" => {
                let target = text.parse::<Target>();
                KernelEndpoint::Connect(target.map_err(fault)?)
            }
            _ => return Err(no_kind(text)),
        })
    }
}

fn fault(text: impl fmt::Display) -> ParseEndpointError {
    ParseEndpointError::Fault(text.to_string())
}

/// A text of no known kind. Those of socat are in upper case, as `TCP-LISTEN:80,fork` or `UNIX-CONNECT:/s`.
fn no_kind(text: &str) -> ParseEndpointError {
    let kind = text.split(':').next().unwrap_or_default();
    let lower = kind.to_ascii_lowercase().replace(['4', '6'], "");
    let lower = lower.strip_suffix("-connect").unwrap_or(&lower);
    let mut forms = FORMS.split(", ");
    let form = forms.find(|form| form.split(':').next() == Some(lower));
    match form.filter(|_| kind != lower) {
        Some(form) => fault(format_args!(
            "`{text}` is no endpoint: write `{lower}` in lower case and without options of socat, as {form}"
        )),
        None => ParseEndpointError::Kind(text.into()),
    }
}

/// Splits `PATH:PORT`. The path may contain colons, the port may not.
///
/// # Errors
/// What is wrong; `form` is how to write it.
pub fn path_and_port(text: &str, form: &str) -> Result<(PathBuf, u32), ParseEndpointError> {
    let parts = text.rsplit_once(':');
    let missing = || fault(format_args!("the port is missing; give {form}"));
    let (path, port) = parts.ok_or_else(missing)?;
    Ok((self::path(path)?, self::port(port)?))
}

fn address(kind: &str, text: &str) -> Result<SocketAddr, ParseEndpointError> {
    let (host, port) = text.rsplit_once(':').unwrap_or_default();
    let is_host = format!("{host}:0").parse::<SocketAddr>().is_ok();
    text.parse().map_err(|_| match is_host {
        true => fault(format_args!(
            "`{port}` is no port in `{kind}:{text}`: give a number from 0 to 65535 (0 is a free one)"
        )),
        false => fault(format_args!(
            "`{text}` is no address to listen on: give an IP address and a port, such as \
             {kind}:127.0.0.1:8080 or {kind}:[::]:8080 (all addresses of this machine)"
        )),
    })
}

/// A path that fits into a socket address, by the rules of a target's.
fn path(text: &str) -> Result<PathBuf, ParseEndpointError> {
    match format!("unix:{text}").parse() {
        Ok(Target::Unix(path)) => Ok(path),
        Ok(_) => Err(no_kind(text)),
        Err(error) => Err(fault(error)),
    }
}

/// Any CID is none to connect to.
fn cid(text: &str) -> Result<u32, ParseEndpointError> {
    let cid = text.parse().ok().filter(|&cid| cid != Cid::ANY);
    cid.map(Cid::get).ok_or_else(|| {
        fault(format_args!(
            "`{text}` is not a CID; give a number from 0 to 4294967294, also as 0x3, or hypervisor, \
             local or host (2)"
        ))
    })
}

/// Any port is none to connect to.
fn port(text: &str) -> Result<u32, ParseEndpointError> {
    let port = text.parse().ok().filter(|&port| port != Port::ANY);
    port.map(Port::get).ok_or_else(|| {
        fault(format_args!(
            "`{text}` is not a port; give a number from 0 to 4294967294, also as 0x16"
        ))
    })
}

impl fmt::Display for KernelEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KernelEndpoint::Connect(target) => target.fmt(f),
            KernelEndpoint::TcpListen(address) => write!(f, "tcp-listen:{address}"),
            KernelEndpoint::UdpListen(address) => write!(f, "udp-listen:{address}"),
            KernelEndpoint::UnixListen(path) => write!(f, "unix-listen:{}", path.display()),
            KernelEndpoint::UnixSeqpacketListen(path) => {
                write!(f, "unix-seqpacket-listen:{}", path.display())
            }
            KernelEndpoint::UnixDatagramListen(path) => {
                write!(f, "unix-dgram-listen:{}", path.display())
            }
            KernelEndpoint::Hybrid { path, port } => write!(f, "hybrid:{}:{port}", path.display()),
            KernelEndpoint::Vsock { cid, port } => write!(f, "vsock:{cid}:{port}"),
            KernelEndpoint::VsockListen { port } => write!(f, "vsock-listen:{port}"),
        }
    }
}

#[cfg(test)]
#[path = "endpoint_tests.rs"]
mod tests;
