//! Connects to the targets of rules that need neither a name server nor a wait.
//!
//! # Invariants
//! - No call blocks: a TCP connect is in progress afterwards, and UDP and Unix sockets connect at once, if
//!   their paths are known to lead through local file systems only.

use super::{Attempt, HostSocket, hybrid};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;
use zerosock_relay::target::{Host, Target};
use zerosock_sys::account::{Account, Permit};

/// TCP keepalive probes without an answer after which a connection has failed.
const PROBES: u32 = 4;

/// Starts a connect to `target`. `None`: the target has a name, which has to be resolved first.
pub(crate) fn connect(
    target: &Target,
    keepalive: Option<Duration>,
    account: &Account,
) -> Option<Attempt> {
    let unix = |path: &Path, socket_type| hybrid::connect_to(path, socket_type, account);
    let attempt = match target {
        Target::Tcp {
            host: Host::Address(address),
            port,
        } => tcp(SocketAddr::new(*address, port.get()), keepalive, account),
        Target::Udp {
            host: Host::Address(address),
            port,
        } => udp(SocketAddr::new(*address, port.get()), account),
        Target::Unix(path) => unix(path, SocketType::STREAM),
        Target::UnixSeqpacket(path) => unix(path, SocketType::SEQPACKET),
        Target::UnixDatagram(path) => unix(path, SocketType::DGRAM),
        Target::Tcp { .. } | Target::Udp { .. } => return None,
    };
    Some(attempt.unwrap_or_else(Attempt::Refused))
}

fn tcp(to: SocketAddr, keepalive: Option<Duration>, account: &Account) -> io::Result<Attempt> {
    let (fd, permit) = socket(to.ip(), SocketType::STREAM, account)?;
    configure_tcp(&fd, keepalive);
    let connected = net::connect(&fd, &to);
    let socket = HostSocket::tcp(fd, permit);
    match connected {
        Ok(()) => Ok(Attempt::Ready(socket)),
        // The kernel continues after an interruption.
        Err(Errno::INPROGRESS | Errno::INTR) => Ok(Attempt::InProgress(socket)),
        Err(error) => Err(error.into()),
    }
}

fn udp(to: SocketAddr, account: &Account) -> io::Result<Attempt> {
    let (fd, permit) = socket(to.ip(), SocketType::DGRAM, account)?;
    net::connect(&fd, &to)?;
    Ok(Attempt::Ready(HostSocket::udp(fd, permit)))
}

fn socket(to: IpAddr, kind: SocketType, account: &Account) -> io::Result<(OwnedFd, Permit)> {
    let permit = account.take_descriptors(1).map_err(io::Error::other)?;
    let family = match to {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    match net::socket_with(family, kind, flags, None) {
        Ok(fd) => Ok((fd, permit)),
        Err(Errno::AFNOSUPPORT) => {
            let text = "the system or the unit of the daemon does not permit this address family \
                        (RestrictAddressFamilies=, docs/forward.md)";
            Err(io::Error::new(io::ErrorKind::Unsupported, text))
        }
        Err(error) => Err(error.into()),
    }
}

/// Sets the options of a TCP socket, or of those that a listening one accepts, as far as the system has them.
pub(crate) fn configure_tcp(socket: &OwnedFd, keepalive: Option<Duration>) {
    // Packets of the guest are passed on as they come: they are as large as it made them.
    let _ = sockopt::set_tcp_nodelay(socket, true);
    let _ = sockopt::set_socket_keepalive(socket, keepalive.is_some());
    if let Some(interval) = keepalive {
        // The options have whole seconds from 1 to 32767.
        let interval = interval.clamp(Duration::from_secs(1), Duration::from_secs(32_767));
        let _ = sockopt::set_tcp_keepidle(socket, interval);
        let _ = sockopt::set_tcp_keepintvl(socket, interval);
        let _ = sockopt::set_tcp_keepcnt(socket, PROBES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, UdpSocket};
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::UnixDatagram;
    use zerosock_sys::account::Budget;

    fn attempt(target: &str) -> Option<Attempt> {
        let account = Budget::unlimited().account();
        connect(&target.parse().unwrap(), None, &account)
    }

    #[test]
    fn names_are_left_to_the_connector_and_addresses_are_not() {
        assert!(attempt("tcp:example.com:80").is_none());
        assert!(attempt("udp:example.com:53").is_none());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = format!("tcp:{}", listener.local_addr().unwrap());
        match attempt(&to) {
            Some(Attempt::InProgress(socket) | Attempt::Ready(socket)) => {
                assert!(socket.is_tcp() && !socket.has_datagrams());
                assert_eq!(sockopt::tcp_nodelay(&socket), Ok(true));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn keepalive_is_set_as_the_rule_says() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = format!("tcp:{}", listener.local_addr().unwrap());
        let account = Budget::unlimited().account();
        let interval = Some(Duration::from_secs(7));
        let attempt = connect(&target.parse().unwrap(), interval, &account);
        let Some(Attempt::InProgress(socket) | Attempt::Ready(socket)) = attempt else {
            panic!("{attempt:?}");
        };
        assert_eq!(sockopt::socket_keepalive(&socket), Ok(true));
        assert_eq!(sockopt::tcp_keepidle(&socket).ok(), interval);
        assert_eq!(sockopt::tcp_keepintvl(&socket).ok(), interval);
    }

    #[test]
    fn datagram_sockets_are_connected_at_once_and_can_be_answered() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = format!("udp:{}", server.local_addr().unwrap());
        let Some(Attempt::Ready(socket)) = attempt(&to) else {
            panic!("not connected")
        };
        assert!(socket.has_datagrams());

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let server = UnixDatagram::bind(&path).unwrap();
        let target = format!("unix-dgram:{}", path.display());
        // A mount that comes or goes anywhere in the system leaves it to the connector.
        let socket = (0..100).find_map(|_| {
            zerosock_sys::socket_path::learn_mounts().unwrap();
            match attempt(&target) {
                Some(Attempt::Ready(socket)) => Some(socket),
                Some(Attempt::NeedsConnector) => None,
                other => panic!("{other:?}"),
            }
        });
        let Some(socket) = socket else {
            return println!("SKIPPED: the temporary directory is not on a local file system");
        };
        net::send(&socket, b"ping", net::SendFlags::empty()).unwrap();
        let mut bytes = [0; 8];
        let (n, from) = server.recv_from(&mut bytes).unwrap();
        assert_eq!(&bytes[..n], b"ping");
        let answer = rustix::net::sendto(
            &server,
            b"pong",
            net::SendFlags::empty(),
            &net::SocketAddrUnix::new_abstract_name(from.as_abstract_name().unwrap()).unwrap(),
        );
        assert_eq!(answer, Ok(4));
        assert_eq!(socket.recv(&mut bytes), Ok(4));
    }

    #[test]
    fn a_target_that_does_not_exist_is_refused() {
        match attempt("unix:/nonexistent/socket") {
            Some(Attempt::Refused(error)) => assert_eq!(error.kind(), io::ErrorKind::NotFound),
            other => panic!("{other:?}"),
        }
    }
}
