//! The endpoint argument of `zerosock nc`, and its parser.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use zerosock::attach::Name;
use zerosock::vsock::{self, EndpointBuilder, OpenError};
use zerosock_relay::relay;

use crate::number::{self, CIDS, PORTS};
use crate::sockets;

/// What `nc` connects to or listens on.
///
/// # Invariants
/// - A path fits a socket address.
/// - CIDs and ports are not 4294967295, which is reserved ("any").
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Endpoint {
    Vsock {
        cid: u32,
        port: u32,
    },
    VsockListen {
        port: u32,
    },
    Unix(PathBuf),
    UnixListen(PathBuf),
    Hybrid {
        path: PathBuf,
        port: u32,
    },
    /// Attaches at `path`, and connects to `port` of `to`.
    Attach {
        role: Role,
        path: PathBuf,
        to: Peer,
        port: u32,
    },
    /// Attaches at `path`, and listens.
    AttachListen {
        role: Role,
        path: PathBuf,
        port: u32,
    },
}

/// Kind of client on the attach socket.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Role {
    /// With a CID of its own.
    Process,
    /// As the host, CID 2.
    Service,
}

impl Role {
    /// Attaches at `path`.
    pub(crate) fn attach(
        self,
        builder: EndpointBuilder,
        path: &Path,
    ) -> Result<vsock::Endpoint, OpenError> {
        match self {
            Role::Process => builder.attach(path),
            Role::Service => builder.attach_as_host(path),
        }
    }
}

/// Destination of an attached process.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Peer {
    Cid(u32),
    Name(Name),
}

/// Why an argument does not parse as an endpoint. clap prints the argument before the error.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum EndpointError {
    #[error("give one of {FORMS}, {ATTACHED_FORMS}")]
    Form,
    /// The kind is known.
    #[error("{0} is missing; give {1}")]
    Missing(&'static str, &'static str),
    /// This end of a relay would connect.
    #[error(
        "nc has no TCP; use relay: `zerosock relay unix-listen:/tmp/s {0}`, and `zerosock nc unix:/tmp/s` \
         beside it. nc has {FORMS}, {ATTACHED_FORMS}"
    )]
    Tcp(String),
    /// This end of a relay would listen.
    #[error(
        "nc has no TCP; use relay: `zerosock relay {0} unix:/tmp/s`, and `zerosock nc unix-listen:/tmp/s` \
         beside it"
    )]
    TcpListen(String),
    #[error("nc has no UDP; use relay, which joins UDP to other sockets with messages")]
    Udp,
    #[error("`{0}` is not a CID; give {CIDS}")]
    Cid(String),
    #[error("`{0}` is neither a CID nor the name of a process; for a CID give {CIDS}")]
    Peer(String),
    #[error("`{0}` is not a port; give {PORTS}")]
    Port(String),
    #[error("{0}")]
    Path(String),
}

/// The forms of an endpoint, for the error text.
const FORMS: &str =
    "vsock:CID:PORT, vsock-listen:PORT, unix:PATH, unix-listen:PATH, hybrid:PATH:PORT";

/// Those of attached processes and services.
pub(crate) const ATTACHED_FORMS: &str = "attach:PATH:CID:PORT, attach-listen:PATH:PORT, \
    service:PATH:CID:PORT, service-listen:PATH:PORT";

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Endpoint, EndpointError> {
        let (kind, rest) = text.split_once(':').ok_or(EndpointError::Form)?;
        let missing = |what, form| EndpointError::Missing(what, form);
        match kind {
            "vsock" => {
                let parts = rest.split_once(':');
                let (cid, port) = parts.ok_or(missing("the CID or the port", "vsock:CID:PORT"))?;
                let cid = parse_cid(cid).ok_or_else(|| EndpointError::Cid(cid.into()))?;
                Ok(Endpoint::Vsock {
                    cid,
                    port: parse_port(port)?,
                })
            }
            "vsock-listen" => Ok(Endpoint::VsockListen {
                port: parse_port(rest)?,
            }),
            "unix" => Ok(Endpoint::Unix(parse_path(rest)?)),
            "unix-listen" => Ok(Endpoint::UnixListen(parse_path(rest)?)),
            "hybrid" => {
                // The path may contain colons, the port may not.
                let (path, port) = path_and_port(rest, "hybrid:PATH:PORT")?;
                Ok(Endpoint::Hybrid { path, port })
            }
            "attach" => attach(Role::Process, rest),
            "attach-listen" => attach_listen(Role::Process, rest),
            "service" => attach(Role::Service, rest),
            "service-listen" => attach_listen(Role::Service, rest),
            _ => Err(unknown(kind, text)),
        }
    }
}

/// Why a text of no known kind is refused. Other netcats have TCP.
fn unknown(kind: &str, text: &str) -> EndpointError {
    let kind = kind.to_ascii_lowercase();
    let (is_tcp, listens) = (kind.starts_with("tcp"), kind.contains("listen"));
    let whole = match is_tcp {
        true => text.to_owned(),
        false => format!("tcp:{text}"),
    };
    match whole.parse::<relay::Endpoint>() {
        _ if kind.starts_with("udp") => EndpointError::Udp,
        Ok(end) if end.listens() => EndpointError::TcpListen(end.to_string()),
        Ok(end) => EndpointError::Tcp(end.to_string()),
        Err(_) if is_tcp && listens => EndpointError::TcpListen("tcp-listen:ADDRESS:PORT".into()),
        Err(_) if is_tcp => EndpointError::Tcp("tcp:HOST:PORT".into()),
        Err(_) => EndpointError::Form,
    }
}

/// Splits `PATH:PORT`. The path may contain colons, the port may not.
fn path_and_port(text: &str, form: &'static str) -> Result<(PathBuf, u32), EndpointError> {
    let parts = text.rsplit_once(':');
    let (path, port) = parts.ok_or(EndpointError::Missing("the port", form))?;
    Ok((parse_path(path)?, parse_port(port)?))
}

fn attach_listen(role: Role, text: &str) -> Result<Endpoint, EndpointError> {
    let form = match role {
        Role::Process => "attach-listen:PATH:PORT",
        Role::Service => "service-listen:PATH:PORT",
    };
    let (path, port) = path_and_port(text, form)?;
    Ok(Endpoint::AttachListen { role, path, port })
}

/// Parses `PATH:CID:PORT` or `PATH:NAME:PORT`.
fn attach(role: Role, text: &str) -> Result<Endpoint, EndpointError> {
    let form = match role {
        Role::Process => "attach:PATH:CID:PORT",
        Role::Service => "service:PATH:CID:PORT",
    };
    let missing = EndpointError::Missing("the CID or the port", form);
    let (rest, port) = text.rsplit_once(':').ok_or(missing.clone())?;
    let (path, to) = rest.rsplit_once(':').ok_or(missing)?;
    // No endpoint to connect to has these CIDs, but a process may have such a name.
    let number = match to {
        "hypervisor" | "local" => None,
        to => parse_cid(to),
    };
    let to = match (number, to.parse()) {
        (Some(cid), _) => Peer::Cid(cid),
        // Only digits: a number that is too large for a CID, not a name.
        (None, Ok(name)) if !to.bytes().all(|byte| byte.is_ascii_digit()) => Peer::Name(name),
        (None, _) => return Err(EndpointError::Peer(to.into())),
    };
    Ok(Endpoint::Attach {
        role,
        path: parse_path(path)?,
        to,
        port: parse_port(port)?,
    })
}

fn parse_cid(text: &str) -> Option<u32> {
    number::cid(text).ok().map(|cid| cid.get())
}

fn parse_port(text: &str) -> Result<u32, EndpointError> {
    match number::port(text) {
        Ok(port) => Ok(port.get()),
        Err(_) => Err(EndpointError::Port(text.into())),
    }
}

fn parse_path(text: &str) -> Result<PathBuf, EndpointError> {
    let path = Path::new(text);
    sockets::check_path(path).map_err(|reason| EndpointError::Path(reason.to_string()))?;
    Ok(path.to_path_buf())
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Vsock { cid, port } => write!(f, "vsock:{cid}:{port}"),
            Endpoint::VsockListen { port } => write!(f, "vsock-listen:{port}"),
            Endpoint::Unix(path) => write!(f, "unix:{}", path.display()),
            Endpoint::UnixListen(path) => write!(f, "unix-listen:{}", path.display()),
            Endpoint::Hybrid { path, port } => write!(f, "hybrid:{}:{port}", path.display()),
            Endpoint::Attach {
                role,
                path,
                to,
                port,
            } => write!(f, "{role}:{}:{to}:{port}", path.display()),
            Endpoint::AttachListen { role, path, port } => {
                write!(f, "{role}-listen:{}:{port}", path.display())
            }
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Process => "attach",
            Role::Service => "service",
        })
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::Cid(cid) => cid.fmt(f),
            Peer::Name(name) => name.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_parsed_and_displayed_unchanged() {
        for (text, wanted) in [
            ("vsock:2:1234", Endpoint::Vsock { cid: 2, port: 1234 }),
            ("vsock-listen:1234", Endpoint::VsockListen { port: 1234 }),
            ("unix:/tmp/a:b", Endpoint::Unix("/tmp/a:b".into())),
            ("unix-listen:a", Endpoint::UnixListen("a".into())),
            (
                "hybrid:/tmp/a:b:7",
                Endpoint::Hybrid {
                    path: "/tmp/a:b".into(),
                    port: 7,
                },
            ),
            (
                "attach:/run/a:3:7",
                Endpoint::Attach {
                    role: Role::Process,
                    path: "/run/a".into(),
                    to: Peer::Cid(3),
                    port: 7,
                },
            ),
            (
                "attach-listen:/run/a:7",
                Endpoint::AttachListen {
                    role: Role::Process,
                    path: "/run/a".into(),
                    port: 7,
                },
            ),
            (
                "service:/run/a:b:db-1:7",
                Endpoint::Attach {
                    role: Role::Service,
                    path: "/run/a:b".into(),
                    to: Peer::Name("db-1".parse().unwrap()),
                    port: 7,
                },
            ),
            (
                "service-listen:/run/a:7",
                Endpoint::AttachListen {
                    role: Role::Service,
                    path: "/run/a".into(),
                    port: 7,
                },
            ),
        ] {
            assert_eq!(text.parse(), Ok(wanted.clone()));
            assert_eq!(wanted.to_string(), text);
        }
    }

    #[test]
    fn cids_and_ports_have_other_forms() {
        let name = |name: &str| Peer::Name(name.parse().unwrap());
        let attach = |to| Endpoint::Attach {
            role: Role::Process,
            path: "/a".into(),
            to,
            port: 22,
        };
        for (text, wanted) in [
            ("vsock:host:0x16", Endpoint::Vsock { cid: 2, port: 22 }),
            ("vsock:local:22", Endpoint::Vsock { cid: 1, port: 22 }),
            ("vsock-listen:0x16", Endpoint::VsockListen { port: 22 }),
            ("attach:/a:0x3:22", attach(Peer::Cid(3))),
            ("attach:/a:host:22", attach(Peer::Cid(2))),
            // Processes with these names.
            ("attach:/a:local:22", attach(name("local"))),
            ("attach:/a:hypervisor:22", attach(name("hypervisor"))),
            ("attach:/a:any:22", attach(name("any"))),
        ] {
            assert_eq!(text.parse(), Ok(wanted), "{text}");
        }
        for text in ["vsock:any:22", "vsock:-1:22", "vsock::22", "vsock:2:any"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_error_names_the_part_that_does_not_parse() {
        let tcp = |end: &str| EndpointError::Tcp(end.into());
        let listen = |end: &str| EndpointError::TcpListen(end.into());
        let missing = EndpointError::Missing;
        for (text, wanted) in [
            ("", EndpointError::Form),
            ("nonsense", EndpointError::Form),
            ("nonsense:/x", EndpointError::Form),
            ("tcp:localhost:80", tcp("tcp:localhost:80")),
            ("localhost:80", tcp("tcp:localhost:80")),
            ("127.0.0.1:80", tcp("tcp:127.0.0.1:80")),
            ("[::1]:80", tcp("tcp:[::1]:80")),
            ("TCP:host:80,nodelay", tcp("tcp:HOST:PORT")),
            ("tcp-listen:[::]:80", listen("tcp-listen:[::]:80")),
            ("TCP-LISTEN:80", listen("tcp-listen:ADDRESS:PORT")),
            ("udp:localhost:53", EndpointError::Udp),
            (
                "vsock:1234",
                missing("the CID or the port", "vsock:CID:PORT"),
            ),
            ("hybrid:/tmp/a", missing("the port", "hybrid:PATH:PORT")),
            (
                "attach:/tmp/a",
                missing("the CID or the port", "attach:PATH:CID:PORT"),
            ),
            (
                "service-listen:/a",
                missing("the port", "service-listen:PATH:PORT"),
            ),
            ("vsock:x:1", EndpointError::Cid("x".into())),
            (
                "vsock:4294967295:1",
                EndpointError::Cid("4294967295".into()),
            ),
            ("vsock:2:", EndpointError::Port("".into())),
            (
                "vsock:2:4294967295",
                EndpointError::Port("4294967295".into()),
            ),
            ("vsock-listen:-1", EndpointError::Port("-1".into())),
            ("hybrid:/tmp/a:b", EndpointError::Port("b".into())),
            (
                "attach:/tmp/a:7",
                missing("the CID or the port", "attach:PATH:CID:PORT"),
            ),
            (
                "attach:/tmp/a:4294967295:7",
                EndpointError::Peer("4294967295".into()),
            ),
            ("service:/tmp/a:a b:7", EndpointError::Peer("a b".into())),
            ("service-listen:/tmp/a:x", EndpointError::Port("x".into())),
        ] {
            assert_eq!(text.parse::<Endpoint>(), Err(wanted), "{text:?}");
        }
        let long = format!("unix:/{}", "x".repeat(107));
        let error = long.parse::<Endpoint>().unwrap_err().to_string();
        assert!(error.contains("108 bytes"), "{error}");
        assert!("hybrid::5".parse::<Endpoint>().is_err());
        let error = "unix-listen:@a"
            .parse::<Endpoint>()
            .unwrap_err()
            .to_string();
        assert!(error.contains("abstract socket"), "{error}");
    }
}
