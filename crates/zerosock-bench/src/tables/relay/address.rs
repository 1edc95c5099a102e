//! Addresses of sockets of the table `relay`, and whether a program has a socket there.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};

use crate::peers::Contestant;

/// Ports for listeners: below those that connecting sockets get.
const PORTS: std::ops::Range<u16> = 2000..10_000;
/// Ports of connecting sockets in a namespace of the bench: enough for 10 000 connections to one
/// port beside those that have just ended.
pub(super) const CONNECTING_PORTS: &str = "10000 65000";

/// A kind of socket.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Tcp,
    Unix,
    Udp,
}

/// Where a program listens, or a datagram socket is bound.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
    Udp(SocketAddr),
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Tcp => "TCP",
            Kind::Unix => "Unix",
            Kind::Udp => "UDP",
        }
    }

    /// The programs that use such sockets.
    pub(super) fn contestant(self) -> Contestant {
        match self {
            Kind::Tcp => Contestant::Tcp,
            Kind::Unix => Contestant::Unix,
            Kind::Udp => Contestant::PacedUdp,
        }
    }

    /// An address in the form in which those programs announce it.
    pub(super) fn parse(self, text: &str) -> Result<Address, String> {
        let socket = || text.parse().map_err(|error| format!("{text}: {error}"));
        Ok(match self {
            Kind::Tcp => Address::Tcp(socket()?),
            Kind::Udp => Address::Udp(socket()?),
            Kind::Unix => Address::Unix(text.into()),
        })
    }

    /// An address that is free: a port of the loopback device, or a path in `dir`.
    pub(super) fn free(self, dir: &Path) -> Result<Address, String> {
        Ok(match self {
            Kind::Tcp => Address::Tcp(free_port(|at| TcpListener::bind(at).is_ok())?),
            Kind::Udp => Address::Udp(free_port(|at| UdpSocket::bind(at).is_ok())?),
            Kind::Unix => Address::Unix(dir.join("relay")),
        })
    }
}

/// The next port that a socket can be bound to. Each port is tried once only, so that a connection
/// of an earlier measurement that has not quite ended is in no relay's way.
fn free_port(can_bind: impl Fn(SocketAddr) -> bool) -> Result<SocketAddr, String> {
    static TRIED: AtomicU16 = AtomicU16::new(0);
    // Two runs at a time without namespaces should not try the same ports.
    let first = std::process::id() as u16;
    for _ in PORTS {
        let nth = first.wrapping_add(TRIED.fetch_add(1, Ordering::Relaxed));
        let port = PORTS.start + nth % (PORTS.end - PORTS.start);
        let at = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if can_bind(at) {
            return Ok(at);
        }
    }
    Err(format!("no port of {PORTS:?} is free"))
}

impl Address {
    /// As the programs at the ends take it.
    pub(super) fn text(&self) -> String {
        match self {
            Address::Tcp(address) | Address::Udp(address) => address.to_string(),
            Address::Unix(path) => path.to_string_lossy().into_owned(),
        }
    }

    /// Whether a socket of this process listens there, or is bound in the case of UDP. To connect in
    /// order to see that would be a connection that the relay passes on.
    pub(super) fn is_open(&self, process: u32) -> Result<bool, String> {
        let table = match self {
            Address::Tcp(_) => "tcp",
            Address::Udp(_) => "udp",
            Address::Unix(path) if !path.exists() => return Ok(false),
            Address::Unix(_) => "unix",
        };
        let sockets = match self {
            Address::Tcp(_) | Address::Udp(_) => Vec::new(),
            Address::Unix(_) => sockets(process)?,
        };
        // The namespace of this thread, not that of the process's first one.
        let table = format!("/proc/thread-self/net/{table}");
        let text = fs::read_to_string(&table).map_err(|error| format!("{table}: {error}"))?;
        Ok(text.lines().any(|line| match self {
            Address::Tcp(address) => is_inet(line, *address, TCP_LISTEN),
            Address::Udp(address) => is_inet(line, *address, UDP_UNCONNECTED),
            Address::Unix(_) => is_unix_listener(line, &sockets),
        }))
    }
}

/// States in /proc/net/tcp and /proc/net/udp.
const TCP_LISTEN: &str = "0A";
const UDP_UNCONNECTED: &str = "07";

/// Recognises `SL: ADDRESS:PORT REMOTE STATE ...`, with the address as a number in the machine's
/// byte order.
fn is_inet(line: &str, address: SocketAddr, state: &str) -> bool {
    let SocketAddr::V4(address) = address else {
        return false;
    };
    let bits = u32::from_ne_bytes(address.ip().octets());
    let wanted = format!("{bits:08X}:{:04X}", address.port());
    let mut words = line.split_whitespace().skip(1);
    words.next() == Some(&wanted) && words.nth(1) == Some(state)
}

/// Recognises `NUM: REFS PROTOCOL FLAGS TYPE STATE INODE PATH` of a listening socket, one of
/// `sockets`. The path does not tell: a relay may bind the socket to another one and rename the file.
fn is_unix_listener(line: &str, sockets: &[String]) -> bool {
    const ACCEPTS: &str = "00010000";
    let mut words = line.split_whitespace();
    let accepts = words.nth(3) == Some(ACCEPTS);
    let inode = words.nth(2);
    accepts && inode.is_some_and(|inode| sockets.iter().any(|socket| socket == inode))
}

/// Numbers of the sockets that a process has open.
fn sockets(process: u32) -> Result<Vec<String>, String> {
    let dir = format!("/proc/{process}/fd");
    let entries = fs::read_dir(&dir).map_err(|error| format!("{dir}: {error}"))?;
    // A descriptor may have been closed meanwhile.
    let links = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let number = |link: PathBuf| {
        let link = link.to_str()?.strip_prefix("socket:[")?;
        Some(link.strip_suffix(']')?.to_owned())
    };
    Ok(links.filter_map(number).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_socket_is_open_from_listen_to_close() {
        let dir = tempfile::tempdir().unwrap();
        let process = std::process::id();
        for kind in [Kind::Tcp, Kind::Udp, Kind::Unix] {
            let address = kind.free(dir.path()).unwrap();
            assert!(!address.is_open(process).unwrap(), "{address:?}");
            let socket: Box<dyn std::any::Any> = match &address {
                Address::Tcp(at) => Box::new(TcpListener::bind(at).unwrap()),
                Address::Udp(at) => Box::new(UdpSocket::bind(at).unwrap()),
                Address::Unix(path) => {
                    let listener = UnixListener::bind(path).unwrap();
                    let stream = UnixStream::connect(path).unwrap();
                    Box::new((listener, stream))
                }
            };
            assert!(address.is_open(process).unwrap(), "{address:?}");
            assert_eq!(kind.parse(&address.text()), Ok(address.clone()));
            drop(socket);
            // Another test's listener may be the process's one on a Unix socket.
            if kind != Kind::Unix {
                assert!(!address.is_open(process).unwrap(), "{address:?}");
            }
        }
    }

    #[test]
    fn a_unix_socket_is_known_by_its_number_and_as_a_listener() {
        let sockets = ["77".to_owned(), "1234".to_owned()];
        for (line, wanted) in [
            (
                "0000: 00000002 00000000 00010000 0001 01 1234 /run/x.5.tmp",
                true,
            ),
            (
                "0000: 00000003 00000000 00000000 0001 03 1234 /run/x",
                false,
            ),
            (
                "0000: 00000002 00000000 00010000 0001 01 12345 /run/x",
                false,
            ),
            (
                "Num       RefCount Protocol Flags    Type St Inode Path",
                false,
            ),
        ] {
            assert_eq!(is_unix_listener(line, &sockets), wanted, "{line}");
        }
    }
}
