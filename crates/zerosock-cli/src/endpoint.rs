//! Endpoints of `nc` and `relay`: sockets of the kernel, and those of processes that attach to `zerosock serve`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use zerosock::attach::Name;
use zerosock::vsock::{self, OpenError};
use zerosock::{Address, Cid, Port};
use zerosock_relay::relay::{self, FORMS, ParseEndpointError, path_and_port};

use crate::number::{self, CIDS};

/// What to connect to or to listen on.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum EndpointArg {
    Kernel(relay::KernelEndpoint),
    Attached(Attached),
}

/// A socket of an endpoint that attaches.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Attached {
    pub(crate) role: AttachRole,
    /// The attach socket of the daemon.
    pub(crate) path: PathBuf,
    /// What it connects to; `None`: it listens.
    pub(crate) to: Option<CidOrName>,
    /// The port that it connects to, or at which it listens.
    pub(crate) port: Port,
}

/// Kind of client on the attach socket.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum AttachRole {
    /// With a CID of its own.
    Process,
    /// As the host, CID 2.
    Service,
}

/// Destination of an attached process.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum CidOrName {
    Cid(Cid),
    Name(Name),
}

/// The forms of attached endpoints.
pub(crate) const ATTACHED_FORMS: &str = "attach:PATH:CID:PORT, attach-listen:PATH:PORT, \
    service:PATH:CID:PORT, service-listen:PATH:PORT";

impl FromStr for EndpointArg {
    type Err = String;

    fn from_str(text: &str) -> Result<EndpointArg, String> {
        let (kind, rest) = text.split_once(':').unwrap_or((text, ""));
        let attached = match kind {
            "attach" => Attached::connecting(AttachRole::Process, rest),
            "attach-listen" => Attached::listening(AttachRole::Process, rest),
            "service" => Attached::connecting(AttachRole::Service, rest),
            "service-listen" => Attached::listening(AttachRole::Service, rest),
            _ => {
                return match text.parse() {
                    Ok(end) => Ok(EndpointArg::Kernel(end)),
                    Err(ParseEndpointError::Kind(text)) => Err(format!(
                        "`{text}` is no endpoint: give one of {FORMS}, {ATTACHED_FORMS}"
                    )),
                    Err(error) => Err(error.to_string()),
                };
            }
        };
        attached.map(EndpointArg::Attached)
    }
}

impl Attached {
    /// Parses `PATH:PORT`.
    fn listening(role: AttachRole, text: &str) -> Result<Attached, String> {
        let parts = path_and_port(text, &format!("{role}-listen:PATH:PORT"));
        let (path, port) = parts.map_err(|error| error.to_string())?;
        Ok(Attached {
            role,
            path,
            to: None,
            port: Port::new(port),
        })
    }

    /// Parses `PATH:CID:PORT` or `PATH:NAME:PORT`.
    fn connecting(role: AttachRole, text: &str) -> Result<Attached, String> {
        let form = format!("{role}:PATH:CID:PORT");
        let parts = text.rsplit_once(':');
        let parts = parts.and_then(|(rest, port)| Some((rest.rsplit_once(':')?, port)));
        let missing = || format!("the CID or the port is missing; give {form}");
        let ((path, to), port) = parts.ok_or_else(missing)?;
        Ok(Attached {
            to: Some(to.parse()?),
            ..Attached::listening(role, &format!("{path}:{port}"))?
        })
    }

    /// Attaches, and claims or names `ports`.
    pub(crate) fn attach(
        &self,
        ports: &[Port],
        timeout: Option<Duration>,
    ) -> Result<vsock::Endpoint, OpenError> {
        let mut builder = vsock::Endpoint::builder().ports(ports.iter().copied());
        if let Some(timeout) = timeout {
            builder = builder.connect_timeout(timeout);
        }
        match self.role {
            AttachRole::Process => builder.attach(&self.path),
            AttachRole::Service => builder.attach_as_host(&self.path),
        }
    }
}

impl CidOrName {
    /// The address of a port of it.
    pub(crate) fn port(&self, endpoint: &vsock::Endpoint, port: Port) -> std::io::Result<Address> {
        let cid = match self {
            CidOrName::Cid(cid) => *cid,
            CidOrName::Name(name) => endpoint.resolve(name.as_str())?,
        };
        Ok(Address::new(cid, port))
    }
}

impl FromStr for CidOrName {
    type Err = String;

    fn from_str(text: &str) -> Result<CidOrName, String> {
        // No endpoint to connect to has these CIDs, but a process may have such a name.
        let is_name = matches!(text, "hypervisor" | "local");
        match (number::cid(text), text.parse()) {
            (Ok(cid), _) if !is_name => Ok(CidOrName::Cid(cid)),
            // Only digits: a number that is too large for a CID, not a name.
            (_, Ok(name)) if !text.bytes().all(|byte| byte.is_ascii_digit()) => {
                Ok(CidOrName::Name(name))
            }
            _ => Err(format!(
                "`{text}` is neither a CID nor the name of a process; for a CID give {CIDS}"
            )),
        }
    }
}

impl fmt::Display for EndpointArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EndpointArg::Kernel(endpoint) => endpoint.fmt(f),
            EndpointArg::Attached(endpoint) => endpoint.fmt(f),
        }
    }
}

impl fmt::Display for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (role, path, port) = (self.role, self.path.display(), self.port);
        match &self.to {
            Some(to) => write!(f, "{role}:{path}:{to}:{port}"),
            None => write!(f, "{role}-listen:{path}:{port}"),
        }
    }
}

impl fmt::Display for AttachRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AttachRole::Process => "attach",
            AttachRole::Service => "service",
        })
    }
}

impl fmt::Display for CidOrName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CidOrName::Cid(cid) => cid.get().fmt(f),
            CidOrName::Name(name) => name.fmt(f),
        }
    }
}

#[cfg(test)]
#[path = "endpoint_tests.rs"]
mod tests;
