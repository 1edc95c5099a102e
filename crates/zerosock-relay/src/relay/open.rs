//! Connecting to the target of a connection, on the worker itself where nothing has to be waited for.
//!
//! # Invariants
//! - A worker connects through a path only if that waits for no file system
//!   ([`find_cached`](socket_path::find_cached)); the connector takes the others.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with,
};
use zerosock_sys::{PeerFd, socket_path, vsock};

use super::endpoint::KernelEndpoint;
use super::listen::set_datagram_buffers;
use super::pair::SocketStage;
use super::socket::{Socket, SocketKind};
use crate::connector::set_tcp_options;
use crate::target::{Host, Target};

/// An endpoint that connects, with all that is the same for each connection.
#[derive(Clone, Debug)]
pub(super) struct Destination {
    kind: SocketKind,
    how: TargetAddress,
    /// What the connector is asked for: always for a name; for a path with links or on a file system that
    /// is not known to be local; and when a Unix listener's backlog is full.
    target: Option<Target>,
    keepalive: Option<Duration>,
    /// UDP sockets get many datagrams at once.
    coalesces: bool,
}

#[derive(Clone, Debug)]
enum TargetAddress {
    Inet(SocketAddr),
    Unix(PathBuf),
    Hybrid(PathBuf, u32),
    Vsock(u32, u32),
    /// By the connector.
    Named,
}

/// What [`Destination::open`] has reached.
pub(super) enum Opened {
    Socket(Socket, SocketStage),
    /// The connector has to connect to this.
    Ask(Target),
}

impl Destination {
    /// # Errors
    /// The path does not fit into a socket address, or the endpoint listens.
    pub(super) fn new(
        endpoint: &KernelEndpoint,
        keepalive: Option<Duration>,
        coalesces: bool,
    ) -> Result<Destination, Errno> {
        // A path that does not fit into an address is refused as by other programs.
        let checked = |path: &PathBuf| SocketAddrUnix::new(path.as_path()).map(|_| path.clone());
        let inet = |host: &Host, port: u16| match host {
            Host::Address(ip) => TargetAddress::Inet(SocketAddr::new(*ip, port)),
            Host::Name(_) => TargetAddress::Named,
        };
        let (how, target) = match endpoint {
            KernelEndpoint::Connect(target) => {
                let how = match target {
                    Target::Tcp { host, port } | Target::Udp { host, port } => {
                        inet(host, port.get())
                    }
                    Target::Unix(path)
                    | Target::UnixSeqpacket(path)
                    | Target::UnixDatagram(path) => TargetAddress::Unix(checked(path)?),
                };
                (how, Some(target.clone()))
            }
            KernelEndpoint::Hybrid { path, port } => {
                let path = checked(path)?;
                (
                    TargetAddress::Hybrid(path.clone(), *port),
                    Some(Target::Unix(path)),
                )
            }
            KernelEndpoint::Vsock { cid, port } => (TargetAddress::Vsock(*cid, *port), None),
            _ => return Err(Errno::INVAL),
        };
        Ok(Destination {
            kind: endpoint.kind(),
            how,
            target,
            keepalive,
            coalesces,
        })
    }

    pub(super) fn kind(&self) -> SocketKind {
        self.kind
    }

    /// Whether a connector may be needed.
    pub(super) fn needs_connector(&self) -> bool {
        self.target.is_some() && !matches!(self.how, TargetAddress::Inet(_))
    }

    /// What the connector is asked for.
    pub(super) fn target(&self) -> Option<Target> {
        self.target.clone()
    }

    /// The address, if it is known before a connection is made.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        match self.how {
            TargetAddress::Inet(address) => Some(address),
            _ => None,
        }
    }

    /// The line that a hybrid socket is sent after connecting.
    pub(super) fn greeting(&self) -> Option<String> {
        match self.how {
            TargetAddress::Hybrid(_, port) => Some(format!("CONNECT {port}\n")),
            _ => None,
        }
    }

    /// Makes a socket and begins to connect it. Does not wait.
    ///
    /// # Errors
    /// Those of socket(2) and connect(2).
    pub(super) fn open(&self) -> Result<Opened, Errno> {
        let path = match &self.how {
            TargetAddress::Inet(address) => return self.open_inet(*address),
            TargetAddress::Named => return self.ask(Errno::HOSTUNREACH),
            TargetAddress::Vsock(cid, port) => {
                let socket = vsock::connect(*cid, *port)
                    .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
                return Ok(Opened::Socket(
                    Socket::new(socket, self.kind, true),
                    SocketStage::Connecting,
                ));
            }
            TargetAddress::Unix(path) | TargetAddress::Hybrid(path, _) => path,
        };
        let Some(found) = socket_path::find_cached(path).map_err(errno_of)? else {
            return self.ask(Errno::HOSTUNREACH);
        };
        let socket = self.unix_socket()?;
        match connect(socket.fd()?, found.address()) {
            Ok(()) if matches!(self.how, TargetAddress::Hybrid(..)) => {
                Ok(Opened::Socket(socket, SocketStage::Greeting))
            }
            Ok(()) => Ok(Opened::Socket(socket, SocketStage::Connected)),
            // The backlog is full: the connector tries again.
            Err(Errno::AGAIN) => self.ask(Errno::AGAIN),
            Err(errno) => Err(errno),
        }
    }

    fn ask(&self, otherwise: Errno) -> Result<Opened, Errno> {
        self.target.clone().map(Opened::Ask).ok_or(otherwise)
    }

    fn open_inet(&self, address: SocketAddr) -> Result<Opened, Errno> {
        let family = match address.ip() {
            IpAddr::V4(_) => AddressFamily::INET,
            IpAddr::V6(_) => AddressFamily::INET6,
        };
        if self.kind == SocketKind::Udp {
            let fd = socket_with(family, SocketType::DGRAM, FLAGS, None)?;
            set_datagram_buffers(&fd).map_err(errno_of)?;
            connect(&fd, &address)?;
            let mut socket = Socket::new(fd, self.kind, true);
            if self.coalesces {
                socket.coalesce();
            }
            return Ok(Opened::Socket(socket, SocketStage::Connected));
        }
        let fd = socket_with(family, SocketType::STREAM, FLAGS, None)?;
        set_tcp_options(&fd, self.keepalive).map_err(errno_of)?;
        match connect(&fd, &address) {
            // Also when it is established at once, it shows as an edge.
            Ok(()) | Err(Errno::INPROGRESS) => Ok(Opened::Socket(
                Socket::new(fd, self.kind, true),
                SocketStage::Connecting,
            )),
            Err(errno) => Err(errno),
        }
    }

    fn unix_socket(&self) -> Result<Socket, Errno> {
        let kind = match self.kind {
            SocketKind::UnixPackets => SocketType::SEQPACKET,
            SocketKind::UnixDatagrams => SocketType::DGRAM,
            _ => SocketType::STREAM,
        };
        let fd = socket_with(AddressFamily::UNIX, kind, FLAGS, None)?;
        if kind == SocketType::DGRAM {
            // A name of the kernel's choice, so that the peer can answer.
            bind(&fd, &SocketAddrUnix::new_unnamed())?;
        }
        Socket::refusing_rights(fd.into(), self.kind).map_err(errno_of)
    }

    /// A socket that the connector has made.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub(super) fn adopt(&self, fd: PeerFd) -> Result<(Socket, SocketStage), Errno> {
        let stage = match self.how {
            TargetAddress::Hybrid(..) => SocketStage::Greeting,
            _ => SocketStage::Connected,
        };
        let mut socket = Socket::refusing_rights(fd, self.kind).map_err(errno_of)?;
        if self.coalesces {
            socket.coalesce();
        }
        Ok((socket, stage))
    }
}

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

fn errno_of(error: std::io::Error) -> Errno {
    match error.kind() {
        std::io::ErrorKind::ConnectionRefused => Errno::CONNREFUSED,
        _ => Errno::from_io_error(&error).unwrap_or(Errno::IO),
    }
}
