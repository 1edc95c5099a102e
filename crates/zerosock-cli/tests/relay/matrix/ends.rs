//! The ends of the matrix, and what the test has at the other side of each.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketType, accept, bind, connect, listen, socket,
};
use zerosock::vsock::{Endpoint, Listener};
use zerosock::{Address, Cid, Port};

use super::messages::{Peer, wait_readable};
use super::streams::Sock;
use crate::process::{DEADLINE, Running};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    TcpListen,
    UnixListen,
    AttachListen,
    ServiceListen,
    Tcp,
    Unix,
    Hybrid,
    Attach,
    Service,
    UdpListen,
    DatagramListen,
    PacketListen,
    Udp,
    Datagram,
    Packet,
}

use Kind::{
    Attach, AttachListen, Datagram, DatagramListen, Hybrid, Packet, PacketListen, Service,
    ServiceListen, Tcp, TcpListen, Udp, UdpListen, Unix, UnixListen,
};

pub(super) const KINDS: [Kind; 15] = [
    TcpListen,
    UnixListen,
    AttachListen,
    ServiceListen,
    Tcp,
    Unix,
    Hybrid,
    Attach,
    Service,
    UdpListen,
    DatagramListen,
    PacketListen,
    Udp,
    Datagram,
    Packet,
];

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            TcpListen => "tcp-listen",
            UnixListen => "unix-listen",
            AttachListen => "attach-listen",
            ServiceListen => "service-listen",
            Tcp => "tcp",
            Unix => "unix",
            Hybrid => "hybrid",
            Attach => "attach",
            Service => "service",
            UdpListen => "udp-listen",
            DatagramListen => "unix-dgram-listen",
            PacketListen => "unix-seqpacket-listen",
            Udp => "udp",
            Datagram => "unix-dgram",
            Packet => "unix-seqpacket",
        }
    }

    pub(super) fn listens(self) -> bool {
        self.name().ends_with("-listen")
    }

    pub(super) fn is_attached(self) -> bool {
        matches!(self, Attach | AttachListen | Service | ServiceListen)
    }

    pub(super) fn is_tcp(self) -> bool {
        matches!(self, Tcp | TcpListen)
    }

    pub(super) fn is_udp(self) -> bool {
        matches!(self, Udp | UdpListen)
    }

    /// Whether the relay's socket is a Unix socket, over which a peer could send descriptors.
    pub(super) fn is_unix(self) -> bool {
        matches!(self, Hybrid) || self.name().starts_with("unix")
    }

    pub(super) fn is_packet(self) -> bool {
        matches!(self, Packet | PacketListen)
    }

    pub(super) fn is_datagram(self) -> bool {
        self.is_udp() || matches!(self, Datagram | DatagramListen)
    }

    pub(super) fn keeps_messages(self) -> bool {
        self.is_datagram() || self.is_packet()
    }
}

/// What all combinations share: a folder, and a daemon with an attached process.
pub(super) struct World {
    dir: tempfile::TempDir,
    attach: String,
    process: Endpoint,
    /// Names and ports that were given out.
    count: AtomicU32,
    _daemon: Running,
}

impl World {
    pub(super) fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let (daemon, attach) = crate::serve(dir.path());
        World {
            process: Endpoint::attach(&attach).unwrap(),
            dir,
            attach,
            count: AtomicU32::new(1000),
            _daemon: daemon,
        }
    }

    fn number(&self) -> u32 {
        self.count.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn path(&self) -> PathBuf {
        self.dir.path().join(self.number().to_string())
    }

    /// An end of a relay, with a listener of the test's if the relay connects to it.
    pub(super) fn end(&self, kind: Kind) -> End {
        let (path, port) = (self.path(), self.number());
        let (name, shown, attach) = (kind.name(), path.display(), &self.attach);
        let cid = self.process.cid();
        let text = match kind {
            TcpListen | UdpListen => format!("{name}:127.0.0.1:0"),
            AttachListen | ServiceListen => format!("{name}:{attach}:{port}"),
            Attach | Service => format!("{name}:{attach}:{cid}:{port}"),
            Hybrid => format!("{name}:{shown}:{port}"),
            _ => format!("{name}:{shown}"),
        };
        let mut end = End {
            kind,
            text,
            path,
            port,
            place: Place::Relay(None),
        };
        let path = &end.path;
        end.place = match kind {
            Tcp => Place::Tcp(TcpListener::bind("127.0.0.1:0").unwrap()),
            Unix | Hybrid => Place::Unix(UnixListener::bind(path).unwrap()),
            Attach | Service => Place::Vsock(self.process.listen(Port::new(port), 8).unwrap()),
            Udp => Place::Datagrams(UdpSocket::bind("127.0.0.1:0").unwrap().into()),
            Datagram => Place::Datagrams(UnixDatagram::bind(path).unwrap().into()),
            Packet => {
                let socket = packet_socket();
                bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
                listen(&socket, 8).unwrap();
                Place::Packets(socket)
            }
            _ => return end,
        };
        let address = match &end.place {
            Place::Tcp(listener) => listener.local_addr().unwrap(),
            Place::Datagrams(fd) if kind == Udp => {
                rustix::net::getsockname(fd).unwrap().try_into().unwrap()
            }
            _ => return end,
        };
        end.text = format!("{name}:{address}");
        end
    }
}

fn packet_socket() -> OwnedFd {
    socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap()
}

pub(super) struct End {
    pub(super) kind: Kind,
    /// The argument of the relay.
    pub(super) text: String,
    path: PathBuf,
    port: u32,
    place: Place,
}

/// Where the test meets the relay.
enum Place {
    /// At the relay's listener, with its address or CID.
    Relay(Option<String>),
    Tcp(TcpListener),
    Unix(UnixListener),
    Vsock(Listener),
    Datagrams(OwnedFd),
    Packets(OwnedFd),
}

impl End {
    /// Takes the address or CID from a line of the log.
    pub(super) fn learn(&mut self, line: &str) {
        let value = |name| {
            let (_, rest) = line.split_once(name)?;
            rest.split_whitespace().next().map(str::to_owned)
        };
        self.place = Place::Relay(value(" address=").or(value(" cid=")));
    }

    fn address(&self) -> SocketAddr {
        match &self.place {
            Place::Relay(Some(address)) => address.parse().unwrap(),
            _ => panic!("{} has no address", self.text),
        }
    }

    /// The test's end of the next connection.
    pub(super) fn stream(&self, world: &World) -> Sock {
        let sock = match &self.place {
            Place::Relay(said) => match self.kind {
                TcpListen => Sock::Tcp(TcpStream::connect(self.address()).unwrap()),
                UnixListen => Sock::Unix(UnixStream::connect(&self.path).unwrap()),
                _ => {
                    let cid = said.as_ref().unwrap().parse().unwrap();
                    let to = Address::new(Cid::new(cid), Port::new(self.port));
                    Sock::Attached(world.process.connect(to).unwrap())
                }
            },
            Place::Tcp(listener) => {
                wait_readable(listener.as_fd());
                Sock::Tcp(listener.accept().unwrap().0)
            }
            Place::Unix(listener) => {
                wait_readable(listener.as_fd());
                let (mut unix, _) = listener.accept().unwrap();
                if self.kind == Hybrid {
                    let mut line = String::new();
                    BufReader::with_capacity(1, &unix)
                        .read_line(&mut line)
                        .unwrap();
                    assert_eq!(line, format!("CONNECT {}\n", self.port));
                    unix.write_all(b"OK 1\n").unwrap();
                }
                Sock::Unix(unix)
            }
            Place::Vsock(listener) => Sock::Attached(listener.accept_timeout(DEADLINE).unwrap().0),
            Place::Datagrams(_) | Place::Packets(_) => panic!("{} has messages", self.text),
        };
        sock.limit();
        sock
    }

    /// A client of the relay's listener.
    pub(super) fn client(&self, world: &World) -> Peer {
        let fd: OwnedFd = match self.kind {
            UdpListen => {
                let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
                socket.connect(self.address()).unwrap();
                socket.into()
            }
            DatagramListen => {
                let socket = UnixDatagram::bind(world.path()).unwrap();
                socket.connect(&self.path).unwrap();
                socket.into()
            }
            _ => {
                let socket = packet_socket();
                connect(&socket, &SocketAddrUnix::new(&self.path).unwrap()).unwrap();
                socket
            }
        };
        Peer::new(fd)
    }

    /// Whether a connection waits at the test's listener, or comes soon.
    pub(super) fn has_connection(&self) -> bool {
        let Place::Packets(listener) = &self.place else {
            return false;
        };
        let soon = Timespec::try_from(Duration::from_millis(20)).unwrap();
        poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&soon)) == Ok(1)
    }

    /// What the relay has connected, or will send its first datagram to.
    pub(super) fn target(&self) -> Peer {
        match &self.place {
            Place::Datagrams(fd) => Peer::new(fd.try_clone().unwrap()),
            Place::Packets(listener) => {
                wait_readable(listener.as_fd());
                Peer::new(accept(listener).unwrap())
            }
            _ => panic!("{} is no target of messages", self.text),
        }
    }
}
