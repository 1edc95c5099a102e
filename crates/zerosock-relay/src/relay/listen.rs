//! Sockets to accept from.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Gid, Mode};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};
use zerosock_sys::socket_file::{self, SocketFile};
use zerosock_sys::{fd_passing, reuseport, vsock};

use super::endpoint::KernelEndpoint;
use super::socket::SocketKind;
use crate::connector::set_tcp_options;

/// Connections that may wait to be accepted; the kernel lowers it to net.core.somaxconn.
const BACKLOG: i32 = 4096;

/// Longest wait for another process that makes a socket in the same directory.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// Bytes of the receive buffer of a socket for many senders; the kernel lowers it to net.core.rmem_max.
const DATAGRAM_BUFFER: usize = 4 << 20;

/// The listening sockets of one endpoint.
#[derive(Debug)]
pub(super) struct Listeners {
    /// One, or one for each worker.
    pub(super) sockets: Vec<OwnedFd>,
    pub(super) kind: SocketKind,
    /// The address that the sockets have, where port 0 was asked for.
    pub(super) address: Option<SocketAddr>,
    /// The kernel refuses descriptors that are sent to accepted sockets.
    pub(super) refuses_rights: bool,
    /// Removes the socket's file in the end.
    pub(super) file: Option<SocketFile>,
}

/// Which users may connect to a Unix socket.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Access {
    /// Permission bits; `None`: 0600, or 0660 with a group.
    pub(super) mode: Option<u32>,
    pub(super) group: Option<u32>,
}

/// Listens at an endpoint, with as many sockets as there are workers if the kernel spreads connections
/// over them.
///
/// # Errors
/// Those of bind(2) and listen(2). `AddrInUse` also if another process shares the port (SO_REUSEPORT).
pub(super) fn listen(
    endpoint: &KernelEndpoint,
    workers: usize,
    keepalive: Option<Duration>,
    access: Access,
) -> io::Result<Listeners> {
    let kind = endpoint.kind();
    match endpoint {
        KernelEndpoint::TcpListen(address) => {
            let (sockets, address) = bind_inet(*address, SocketType::STREAM, workers)?;
            for socket in &sockets {
                // Accepted sockets have the options of their listener.
                set_tcp_options(socket, keepalive)?;
                rustix::net::listen(socket, BACKLOG)?;
            }
            Ok(Listeners::inet(sockets, kind, address))
        }
        KernelEndpoint::UdpListen(address) => {
            let (sockets, address) = bind_inet(*address, SocketType::DGRAM, workers)?;
            for socket in &sockets {
                set_datagram_buffers(socket)?;
            }
            Ok(Listeners::inet(sockets, kind, address))
        }
        KernelEndpoint::UnixListen(path) => unix(path, kind, SocketType::STREAM, access),
        KernelEndpoint::UnixSeqpacketListen(path) => {
            unix(path, kind, SocketType::SEQPACKET, access)
        }
        KernelEndpoint::UnixDatagramListen(path) => unix(path, kind, SocketType::DGRAM, access),
        KernelEndpoint::VsockListen { port } => {
            let socket = vsock::listen(vsock::CID_ANY, *port, BACKLOG)?;
            Ok(Listeners {
                sockets: vec![socket],
                kind,
                address: None,
                refuses_rights: true,
                file: None,
            })
        }
        KernelEndpoint::Connect(_)
        | KernelEndpoint::Hybrid { .. }
        | KernelEndpoint::Vsock { .. } => Err(io::ErrorKind::InvalidInput.into()),
    }
}

impl Listeners {
    fn inet(sockets: Vec<OwnedFd>, kind: SocketKind, address: SocketAddr) -> Listeners {
        Listeners {
            sockets,
            kind,
            address: Some(address),
            refuses_rights: true,
            file: None,
        }
    }
}

/// Large socket buffers for bursts, as far as the system allows.
pub(super) fn set_datagram_buffers(socket: &OwnedFd) -> io::Result<()> {
    sockopt::set_socket_recv_buffer_size(socket, DATAGRAM_BUFFER)?;
    Ok(sockopt::set_socket_send_buffer_size(
        socket,
        DATAGRAM_BUFFER,
    )?)
}

/// Allows [`connected_beside`] for a listener with one socket, which goes on to receive what comes from
/// all other senders.
pub(super) fn allow_connected(socket: impl AsFd, address: SocketAddr) -> io::Result<()> {
    sockopt::set_socket_reuseport(&socket, true)?;
    // The kernel makes the group when a second socket is bound.
    drop(beside(address)?);
    reuseport::deliver_to_first(socket)
}

/// A socket with the address of a listener, which receives the datagrams of one sender from now on.
pub(super) fn connected_beside(address: SocketAddr, sender: SocketAddr) -> io::Result<OwnedFd> {
    let socket = beside(address)?;
    set_datagram_buffers(&socket)?;
    rustix::net::connect(&socket, &sender)?;
    Ok(socket)
}

fn beside(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::DGRAM, flags, None)?;
    sockopt::set_socket_reuseport(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    Ok(socket)
}

/// Sockets that share an address, over which the kernel spreads connections or senders.
fn bind_inet(
    address: SocketAddr,
    kind: SocketType,
    count: usize,
) -> io::Result<(Vec<OwnedFd>, SocketAddr)> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // The first one without SO_REUSEPORT: otherwise two relays would silently share a port.
    let first = socket_with(family, kind, flags, None)?;
    if kind == SocketType::STREAM {
        // A port whose last connections are in TIME_WAIT can be used.
        sockopt::set_socket_reuseaddr(&first, true)?;
    }
    rustix::net::bind(&first, &address)?;
    let bound = rustix::net::getsockname(&first)?;
    let address = SocketAddr::try_from(bound).map_err(io::Error::from)?;
    let mut sockets = vec![first];
    if count > 1 {
        sockopt::set_socket_reuseport(&sockets[0], true)?;
    }
    for _ in 1..count {
        let socket = socket_with(family, kind, flags, None)?;
        if kind == SocketType::STREAM {
            sockopt::set_socket_reuseaddr(&socket, true)?;
        }
        sockopt::set_socket_reuseport(&socket, true)?;
        rustix::net::bind(&socket, &address)?;
        sockets.push(socket);
    }
    Ok((sockets, address))
}

fn unix(
    path: &Path,
    kind: SocketKind,
    socket_type: SocketType,
    access: Access,
) -> io::Result<Listeners> {
    let options = socket_file::SocketFileOptions {
        kind: socket_type,
        mode: access.mode.map(Mode::from_raw_mode),
        gid: access.group.map(Gid::from_raw),
        backlog: BACKLOG,
        refuse_rights: true,
        reserved: false,
        lock_wait: LOCK_WAIT,
    };
    let (socket, file) = socket_file::bind(path, options)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok(Listeners {
        // The listener refuses descriptors already; this asks whether the kernel can.
        refuses_rights: fd_passing::refuse_rights(&socket)?,
        sockets: vec![socket],
        kind,
        address: None,
        file: Some(file),
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn tcp(address: SocketAddr, workers: usize) -> io::Result<Listeners> {
        let endpoint = KernelEndpoint::TcpListen(address);
        listen(&endpoint, workers, None, Access::default())
    }

    #[test]
    fn a_port_is_shared_by_the_workers_and_with_no_other_process() {
        let any = "127.0.0.1:0".parse().unwrap();
        let ours = tcp(any, 3).unwrap();
        assert_eq!(ours.sockets.len(), 3);
        let address = ours.address.unwrap();
        assert_ne!(address.port(), 0);
        for workers in [1, 3] {
            let error = tcp(address, workers).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{workers}");
        }
        let error = TcpListener::bind(address).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(ours);
        tcp(address, 2).unwrap();
    }

    #[test]
    fn a_port_of_another_listener_is_refused() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = tcp(other.local_addr().unwrap(), 2).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
