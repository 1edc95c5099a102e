//! The socket between the device and a host program, or a host on the network.
//!
//! # Invariants
//! - Closing and receiving never wait for the program. A Unix socket that [refuses
//!   descriptors](fd_passing::refuse_rights) holds no objects of the program; any other is closed by
//!   the reaper, and descriptors that come on it are received and closed there too. TCP and UDP
//!   sockets carry no descriptors.
//! - It counts against the guest's descriptor budget until it is closed.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SocketFlags, SocketType};
use std::io;
use std::time::Duration;
use zerosock_ring::GuestSlice;
use zerosock_sys::account::{Account, Permit};
use zerosock_sys::{PeerFd, ReceivedBytes, fd_passing};

/// A socket to a host program: see the module.
#[derive(Debug)]
pub(crate) struct HostSocket(Kind);

#[derive(Debug)]
enum Kind {
    /// Carries no descriptors of the program.
    Plain {
        fd: OwnedFd,
        _permit: Permit,
        class: Class,
    },
    /// May carry descriptors: the kernel has no SO_PASSRIGHTS, or the program connected before the
    /// listener refused them.
    TakesRights { fd: PeerFd, class: Class },
}

/// What an error or an empty read of a socket means.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Class {
    /// A connected Unix or AF_VSOCK socket: an empty read is the end of the stream.
    Connected,
    /// A TCP socket: as `Connected`, and it can be reset.
    Tcp,
    /// A socket of datagrams: an empty read is an empty datagram, and errors are not final.
    Datagrams,
}

impl HostSocket {
    /// A Unix socket of this type that is not connected yet.
    pub(super) fn unconnected(
        socket_type: SocketType,
        account: &Account,
    ) -> io::Result<HostSocket> {
        let permit = account.take_descriptors(1).map_err(io::Error::other)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = net::socket_with(AddressFamily::UNIX, socket_type, flags, None)?;
        let class = Class::of(socket_type);
        Ok(match fd_passing::refuse_rights(&fd)? {
            true => HostSocket(Kind::Plain {
                fd,
                _permit: permit,
                class,
            }),
            false => HostSocket::taking_rights(fd, permit, class),
        })
    }

    /// A Unix socket accepted from a listener.
    pub(crate) fn accepted(fd: OwnedFd, permit: Permit) -> HostSocket {
        HostSocket::unix(fd, permit, SocketType::STREAM)
    }

    /// A connected Unix socket. Its peer may have sent descriptors already.
    pub(crate) fn unix(fd: OwnedFd, permit: Permit, socket_type: SocketType) -> HostSocket {
        let class = Class::of(socket_type);
        match fd_passing::refuses_rights(&fd) {
            true => HostSocket(Kind::Plain {
                fd,
                _permit: permit,
                class,
            }),
            false => HostSocket::taking_rights(fd, permit, class),
        }
    }

    /// A Unix socket that may carry descriptors.
    fn taking_rights(fd: OwnedFd, permit: Permit, class: Class) -> HostSocket {
        // An out-of-band byte would be skipped, and its descriptors closed by this thread. The
        // option fails for no Unix socket.
        let _ = fd_passing::receive_urgent_inline(&fd);
        let fd = PeerFd::from(fd).with_permit(permit);
        HostSocket(Kind::TakesRights { fd, class })
    }

    /// An AF_VSOCK socket, which carries no descriptors.
    pub(crate) fn vsock(fd: OwnedFd, permit: Permit) -> HostSocket {
        let class = Class::Connected;
        HostSocket(Kind::Plain {
            fd,
            _permit: permit,
            class,
        })
    }

    /// A TCP socket.
    pub(crate) fn tcp(fd: OwnedFd, permit: Permit) -> HostSocket {
        let class = Class::Tcp;
        HostSocket(Kind::Plain {
            fd,
            _permit: permit,
            class,
        })
    }

    /// A connected socket that another process has had. `None`: it is of another kind.
    pub(crate) fn restored(fd: OwnedFd, permit: Permit) -> Option<HostSocket> {
        let kind = net::sockopt::socket_domain(&fd).and_then(|domain| {
            let socket_type = net::sockopt::socket_type(&fd)?;
            Ok((domain, socket_type))
        });
        Some(match kind {
            Ok((
                AddressFamily::UNIX,
                socket_type @ (SocketType::STREAM | SocketType::SEQPACKET | SocketType::DGRAM),
            )) => HostSocket::unix(fd, permit, socket_type),
            Ok((AddressFamily::INET | AddressFamily::INET6, SocketType::STREAM)) => {
                HostSocket::tcp(fd, permit)
            }
            Ok((AddressFamily::INET | AddressFamily::INET6, SocketType::DGRAM)) => {
                HostSocket::udp(fd, permit)
            }
            Ok((AddressFamily::VSOCK, SocketType::STREAM)) => HostSocket::vsock(fd, permit),
            _ => {
                drop(PeerFd::from(fd).with_permit(permit));
                return None;
            }
        })
    }

    /// A UDP socket.
    pub(crate) fn udp(fd: OwnedFd, permit: Permit) -> HostSocket {
        let class = Class::Datagrams;
        HostSocket(Kind::Plain {
            fd,
            _permit: permit,
            class,
        })
    }

    fn class(&self) -> Class {
        match &self.0 {
            Kind::Plain { class, .. } | Kind::TakesRights { class, .. } => *class,
        }
    }

    /// Whether it can be reset, by its peer and by [`abort`](HostSocket::abort).
    pub(crate) fn is_tcp(&self) -> bool {
        self.class() == Class::Tcp
    }

    /// Whether it has datagrams: no end of stream, and errors are not final.
    pub(crate) fn has_datagrams(&self) -> bool {
        self.class() == Class::Datagrams
    }

    /// Makes closing a TCP socket reset the connection. Does nothing to others.
    pub(crate) fn abort(&self) {
        if self.is_tcp() {
            // Fails only if the connection has ended.
            let _ = net::sockopt::set_socket_linger(self, Some(Duration::ZERO));
        }
    }

    /// Takes [`abort`](Self::abort) back.
    pub(crate) fn close_in_order(&self) {
        if self.is_tcp() {
            // Fails only if the connection has ended.
            let _ = net::sockopt::set_socket_linger(self, None);
        }
    }

    /// Counts the socket against another account from now on.
    pub(crate) fn recount(self, permit: Permit) -> HostSocket {
        HostSocket(match self.0 {
            Kind::Plain { fd, class, .. } => Kind::Plain {
                fd,
                _permit: permit,
                class,
            },
            Kind::TakesRights { fd, class } => Kind::TakesRights {
                fd: fd.with_permit(permit),
                class,
            },
        })
    }

    /// Whether the reaper closes it. Such a socket has to leave its poller before it is dropped.
    pub(crate) fn is_closed_later(&self) -> bool {
        matches!(self.0, Kind::TakesRights { .. })
    }

    /// Receives without waiting. Returns 0 at end of file or for an empty packet.
    pub(crate) fn recv(&self, buf: &mut [u8]) -> Result<usize, Errno> {
        match &self.0 {
            Kind::Plain { fd, .. } => net::recv(fd, buf, RecvFlags::DONTWAIT).map(|(_, n)| n),
            Kind::TakesRights { fd, .. } if fd.account().is_some_and(Account::is_clogged) => {
                Err(Errno::CONNRESET)
            }
            Kind::TakesRights { fd, .. } => {
                let received = fd_passing::recv_owned(fd, buf, &mut Vec::new());
                let received = received.map(|received| received.bytes);
                received.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
            }
        }
    }

    /// Receives into guest memory without waiting.
    #[inline]
    pub(crate) fn recv_slices(&self, slices: &[GuestSlice<'_>]) -> io::Result<ReceivedBytes> {
        match &self.0 {
            Kind::Plain { fd, .. } => zerosock_sys::recv_slices(fd.as_fd(), slices),
            Kind::TakesRights { fd, .. } if fd.account().is_some_and(Account::is_clogged) => {
                Err(Errno::CONNRESET.into())
            }
            Kind::TakesRights { fd, .. } => zerosock_sys::recv_slices_and_rights(fd, slices),
        }
    }

    /// As [`recv_slices`](Self::recv_slices), one packet of a socket of type SOCK_SEQPACKET.
    pub(crate) fn recv_packet(&self, slices: &[GuestSlice<'_>]) -> io::Result<ReceivedBytes> {
        match &self.0 {
            Kind::TakesRights { fd, .. } if !fd.account().is_some_and(Account::is_clogged) => {
                zerosock_sys::recv_packet_and_rights(fd, slices)
            }
            _ => self.recv_slices(slices),
        }
    }
}

impl Class {
    /// The class of a Unix socket.
    fn of(socket_type: SocketType) -> Class {
        match socket_type {
            SocketType::DGRAM => Class::Datagrams,
            _ => Class::Connected,
        }
    }
}

impl AsFd for HostSocket {
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Kind::Plain { fd, .. } => fd.as_fd(),
            Kind::TakesRights { fd, .. } => fd.as_fd(),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::io::IoSlice;
    use std::net::TcpStream;
    use std::os::unix::net::UnixStream;
    use zerosock_sys::account::Budget;

    use crate::lingering::{lingering_socket, without_waiting};

    /// An accepted socket, and the program's end.
    pub(crate) fn pair() -> (HostSocket, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let permit = Budget::unlimited().account().take_descriptors(1).unwrap();
        (HostSocket::accepted(ours.into(), permit), theirs)
    }

    #[test]
    fn received_descriptors_are_closed_by_the_reaper() {
        let (socket, program) = pair();
        assert!(matches!(socket.0, Kind::TakesRights { .. }));
        let (passed, other) = UnixStream::pair().unwrap();
        fd_passing::send(&program, &[IoSlice::new(b"hello")], &[passed.as_fd()]).unwrap();
        drop(passed);
        let mut bytes = [0; 8];
        assert_eq!(socket.recv(&mut bytes), Ok(5));
        // The reaper closes it.
        let mut fds = [rustix::event::PollFd::new(
            &other,
            rustix::event::PollFlags::IN,
        )];
        let limit = rustix::event::Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        assert_eq!(rustix::event::poll(&mut fds, Some(&limit)), Ok(1));
    }

    /// Sends a byte and a descriptor that takes to close until the returned socket is dropped.
    fn send_lingering(program: impl AsFd) -> TcpStream {
        let (fd, receiver) = lingering_socket();
        fd_passing::send(program, &[IoSlice::new(b"x")], &[fd.as_fd()]).unwrap();
        receiver
    }

    #[test]
    fn dropping_unread_bytes_does_not_wait_for_their_descriptors() {
        for stop in [
            super::super::stop_reading,
            super::super::leave_nothing_unread,
        ] {
            let (socket, program) = pair();
            let _receivers: Vec<_> = (0..3).map(|_| send_lingering(&program)).collect();
            without_waiting(move || {
                stop(&socket);
                let left = net::recv(&socket, &mut [0][..], RecvFlags::DONTWAIT);
                assert_eq!(left.map(|(_, n)| n), Ok(0), "all bytes are read");
            });
        }
    }

    /// An ordinary receive call skips an out-of-band byte, and the kernel closes its descriptors.
    #[test]
    fn out_of_band_byte_is_received_in_order_without_waiting_for_its_descriptor() {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
        use std::mem::MaybeUninit;
        let (socket, program) = pair();
        let (fd, _receiver) = lingering_socket();
        let fds = [fd.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let byte = [IoSlice::new(b"u")];
        if net::sendmsg(&program, &byte, &mut control, SendFlags::OOB).is_err() {
            return println!("SKIPPED: no MSG_OOB for Unix sockets (CONFIG_AF_UNIX_OOB)");
        }
        drop(fd);
        fd_passing::send(&program, &[IoSlice::new(b"v")], &[]).unwrap();
        let received = without_waiting(move || {
            let (mut all, mut part) = (Vec::new(), [0; 2]);
            while all.len() < 2 {
                let bytes = socket.recv(&mut part).unwrap();
                all.extend_from_slice(&part[..bytes]);
            }
            all
        });
        assert_eq!(received, b"uv");
    }

    #[test]
    fn packets_are_received_without_waiting_for_their_descriptors() {
        let flags = SocketFlags::CLOEXEC;
        let ends = net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (ours, program) = ends.unwrap();
        let permit = Budget::unlimited().account().take_descriptors(1).unwrap();
        let socket = HostSocket::accepted(ours, permit);
        let _receiver = send_lingering(&program);
        let received = without_waiting(move || socket.recv_packet(&[]).unwrap());
        assert!(received.cut);
    }

    #[test]
    fn unconnected_socket_refuses_descriptors_if_the_kernel_can() {
        let account = Budget::unlimited().account();
        let socket = HostSocket::unconnected(SocketType::STREAM, &account).unwrap();
        let refuses = fd_passing::refuses_rights(&socket);
        assert_eq!(matches!(socket.0, Kind::Plain { .. }), refuses);
        assert_eq!(account.descriptors(), 1);
        drop(socket);
    }
}
