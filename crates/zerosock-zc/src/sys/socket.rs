//! The kind of a socket, whether the kernel sends from it without a copy, and how it is reset.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketType, connect_unspec, send, sockopt};

/// SO_ZEROCOPY, of the level SOL_SOCKET.
const SO_ZEROCOPY: libc::c_int = 60;

/// The kind of a socket.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub enum SocketKind {
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// UDP over IPv4.
    Udp4,
    /// UDP over IPv6.
    Udp6,
    /// Raw IP packets.
    Raw,
    /// Frames of a network device (AF_PACKET).
    Packet,
    /// A vsock stream.
    VsockStream,
    /// vsock messages (SOCK_SEQPACKET): [`ZcSocket`](super::ZcSocket) refuses them. For a send that
    /// does not block, and io_uring makes no other, the kernel sends the part of a message for
    /// which the peer has credit and reports that it took nothing. A retry would append to that
    /// part.
    VsockMessages,
    /// Another stream, such as a Unix socket.
    OtherStream,
    /// Another socket that preserves message boundaries.
    OtherDatagram,
}

impl SocketKind {
    /// Whether the socket has no message boundaries, so that the sender must keep order and
    /// completeness.
    #[must_use]
    pub fn is_stream(self) -> bool {
        matches!(
            self,
            Self::Tcp4 | Self::Tcp6 | Self::VsockStream | Self::OtherStream
        )
    }

    /// The length in bytes from which on a send costs less without a copy, if the device reads it in
    /// place.
    ///
    /// On UDP it is 6 KiB: the times of a send of 4000 and of 8000 bytes, copied and not, are on lines
    /// that meet there (`bench/results/send.md`; the rates without a copy are 0.85 and 1.10 of those with
    /// one). On other sockets it is 16 KiB, above the "around 10 KB" of the kernel's documentation
    /// (`Documentation/networking/msg_zerocopy.rst`): a stream sends several buffers with one request,
    /// which makes copies cheaper.
    #[must_use]
    pub const fn zero_copy_threshold(self) -> usize {
        match self {
            Self::Udp4 | Self::Udp6 => 6 << 10,
            _ => 16 << 10,
        }
    }

    pub(super) fn is_tcp(self) -> bool {
        matches!(self, Self::Tcp4 | Self::Tcp6)
    }
}

/// The kind of `socket`.
///
/// # Errors
/// ENOTSOCK if it is no socket.
pub(crate) fn kind(socket: impl AsFd) -> io::Result<SocketKind> {
    let kind = sockopt::socket_type(&socket)?;
    let family = sockopt::socket_domain(&socket)?;
    let stream = kind == SocketType::STREAM;
    Ok(match family {
        AddressFamily::INET if stream => SocketKind::Tcp4,
        AddressFamily::INET6 if stream => SocketKind::Tcp6,
        AddressFamily::INET if kind == SocketType::DGRAM => SocketKind::Udp4,
        AddressFamily::INET6 if kind == SocketType::DGRAM => SocketKind::Udp6,
        AddressFamily::INET | AddressFamily::INET6 => SocketKind::Raw,
        AddressFamily::PACKET => SocketKind::Packet,
        AddressFamily::VSOCK if stream => SocketKind::VsockStream,
        AddressFamily::VSOCK => SocketKind::VsockMessages,
        _ if stream => SocketKind::OtherStream,
        _ => SocketKind::OtherDatagram,
    })
}

/// Sets SO_ZEROCOPY. Returns whether the kernel sends from this socket without a copy.
///
/// Linux does so for TCP and UDP, from 6.7 on for vsock, and not for raw and packet sockets, nor
/// for TCP under an upper-layer protocol (kernel TLS), which takes SO_ZEROCOPY and then refuses the
/// sends.
///
/// # Errors
/// Errors of setsockopt(2), except EOPNOTSUPP and similar ones, for which the result is false.
pub fn permit_zero_copy(socket: impl AsFd) -> io::Result<bool> {
    if has_upper_layer(&socket) {
        return Ok(false);
    }
    let on: libc::c_int = 1;
    // SAFETY: the option's value is an int that outlives the call, and its length is given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_ZEROCOPY,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOPROTOOPT | libc::EINVAL) => Ok(false),
        _ => Err(error),
    }
}

/// Resets a stream, so that its peer gets an error instead of end of file (TCP: RST). The kernel
/// drops unacknowledged bytes, frees their buffers, and drops received bytes that were not read.
/// Returns whether this kind of stream has a reset: only TCP does.
///
/// The reset is immediate, also if other descriptors refer to the socket. Kernels that refuse this
/// while a thread waits in a call on the socket reset the stream when the last descriptor is
/// closed.
///
/// # Errors
/// Errors of setsockopt(2).
pub(crate) fn reset(socket: impl AsFd) -> io::Result<bool> {
    if !kind(&socket)?.is_tcp() {
        return Ok(false);
    }
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    // Fails if the connection has ended already.
    let _ = connect_unspec(&socket);
    Ok(true)
}

/// Makes a socket drop the pieces of a datagram that it has collected (MSG_MORE): otherwise they
/// would precede the next datagram.
///
/// There is no system call for this. A piece that makes a UDP datagram too long is refused, and the
/// socket drops everything that it had collected.
///
/// # Errors
/// If the socket may still have pieces: `Unsupported` for raw sockets; errors of sendmsg(2).
pub(crate) fn forget_pieces(socket: impl AsFd) -> io::Result<()> {
    // The longest piece that passes the first check of the length; it does not fit into a datagram.
    static TOO_LONG: [u8; 0xffff] = [0; 0xffff];
    match kind(&socket)? {
        SocketKind::Udp4 | SocketKind::Udp6 => {}
        SocketKind::Raw => return Err(io::ErrorKind::Unsupported.into()),
        // Each send is a message of its own.
        _ => return Ok(()),
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match send(&socket, &TOO_LONG, flags) {
        // The other errors are those of a socket that has collected nothing and has no route.
        Err(
            Errno::MSGSIZE
            | Errno::ACCESS
            | Errno::DESTADDRREQ
            | Errno::NETDOWN
            | Errno::NETUNREACH
            | Errno::HOSTUNREACH
            | Errno::PIPE,
        ) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => Err(io::ErrorKind::Other.into()),
    }
}

/// Whether this is a TCP socket with an upper-layer protocol (TCP_ULP).
fn has_upper_layer(socket: impl AsFd) -> bool {
    // TCP_ULP_NAME_MAX. The name is empty without a protocol. Other sockets do not have the option.
    option(socket, libc::SOL_TCP, libc::TCP_ULP, &mut [0; 16]).is_some_and(|len| len > 0)
}

/// Reads an option into `value`. Returns the number of bytes that the kernel has written; none for a
/// socket without the option.
///
/// The callers name no option whose value has an address: the kernel touches the value only.
pub(super) fn option(
    socket: impl AsFd,
    level: libc::c_int,
    option: libc::c_int,
    value: &mut [u8],
) -> Option<usize> {
    let (fd, mut len) = (socket.as_fd().as_raw_fd(), value.len() as libc::socklen_t);
    let to = value.as_mut_ptr().cast();
    // SAFETY: the kernel writes at most `len` bytes, the length of the slice, and the new length.
    let result = unsafe { libc::getsockopt(fd, level, option, to, &mut len) };
    (result == 0).then_some(value.len().min(len as usize))
}

#[cfg(test)]
#[path = "socket_tests.rs"]
mod tests;
