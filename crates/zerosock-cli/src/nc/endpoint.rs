//! What `zerosock nc` talks to, parsed once.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::sockets;

/// One end of a connection. Paths fit a socket address, CIDs and ports can be connected to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Endpoint {
    Vsock { cid: u32, port: u32 },
    VsockListen { port: u32 },
    Unix(PathBuf),
    UnixListen(PathBuf),
    Hybrid { path: PathBuf, port: u32 },
}

/// Why a text names no endpoint. clap puts the text itself in front.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum EndpointError {
    #[error("give one of {FORMS}")]
    Form,
    #[error("`{0}` is no CID; give a number from 0 to 4294967294 (2 is the host)")]
    Cid(String),
    #[error("`{0}` is no port; give a number from 0 to 4294967294")]
    Port(String),
    #[error("{0}")]
    Path(String),
}

const FORMS: &str =
    "vsock:CID:PORT, vsock-listen:PORT, unix:PATH, unix-listen:PATH, hybrid:PATH:PORT";

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Endpoint, EndpointError> {
        let (kind, rest) = text.split_once(':').ok_or(EndpointError::Form)?;
        match kind {
            "vsock" => {
                let (cid, port) = rest.split_once(':').ok_or(EndpointError::Form)?;
                let cid = parse_number(cid).ok_or_else(|| EndpointError::Cid(cid.into()))?;
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
                let (path, port) = rest.rsplit_once(':').ok_or(EndpointError::Form)?;
                Ok(Endpoint::Hybrid {
                    path: parse_path(path)?,
                    port: parse_port(port)?,
                })
            }
            _ => Err(EndpointError::Form),
        }
    }
}

/// 4294967295 stands for "any" in both CIDs and ports.
fn parse_number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|&number| number != u32::MAX)
}

fn parse_port(text: &str) -> Result<u32, EndpointError> {
    parse_number(text).ok_or_else(|| EndpointError::Port(text.into()))
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read_and_shown_the_same() {
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
        ] {
            assert_eq!(text.parse(), Ok(wanted.clone()));
            assert_eq!(wanted.to_string(), text);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, wanted) in [
            ("", EndpointError::Form),
            ("tcp:localhost:80", EndpointError::Form),
            ("vsock:1234", EndpointError::Form),
            ("hybrid:/tmp/a", EndpointError::Form),
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
        ] {
            assert_eq!(text.parse::<Endpoint>(), Err(wanted), "{text:?}");
        }
        let long = format!("unix:/{}", "x".repeat(107));
        let said = long.parse::<Endpoint>().unwrap_err().to_string();
        assert!(said.contains("108 bytes"), "{said}");
        assert!("hybrid::5".parse::<Endpoint>().is_err());
    }
}
