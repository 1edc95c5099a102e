//! Kernel vsock sockets (vsock(7)): for the command-line tool inside a guest, and for forwarding on
//! a host.
//!
//! Their tests run inside guests only.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use libc::c_int;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketFlags, SocketType, acceptfrom_with, socket_with,
};

use crate::ready::wait_ready;
use crate::socket_option::{get, set, set_int};

/// SO_VM_SOCKETS_BUFFER_SIZE.
const SIZE: c_int = 0;
/// SO_VM_SOCKETS_BUFFER_MAX_SIZE.
const MAX_SIZE: c_int = 2;
/// SO_VM_SOCKETS_CONNECT_TIMEOUT, a `struct timeval`.
const CONNECT_TIMEOUT: c_int = 6;

/// The CID that stands for any, to listen on.
pub const CID_ANY: u32 = u32::MAX;

/// Starts a non-blocking connection to `cid` and `port`. It may not be established yet: wait until
/// the socket is writable, then call [`connect_result`].
///
/// # Errors
/// Errors of socket(2) and connect(2): ENODEV or EAFNOSUPPORT where the kernel has no vsock.
pub fn connect(cid: u32, port: u32) -> io::Result<OwnedFd> {
    connect_type(SocketType::STREAM, cid, port)
}

/// As [`connect`], with a socket of messages (SOCK_SEQPACKET).
///
/// # Errors
/// As [`connect`]; ESOCKTNOSUPPORT if the transport of the kernel does not support them.
pub fn connect_seqpacket(cid: u32, port: u32) -> io::Result<OwnedFd> {
    connect_type(SocketType::SEQPACKET, cid, port)
}

fn connect_type(kind: SocketType, cid: u32, port: u32) -> io::Result<OwnedFd> {
    let fd = socket(kind, SocketFlags::NONBLOCK)?;
    match connect_socket(&fd, cid, port) {
        Err(error) if Errno::from_io_error(&error) != Some(Errno::INPROGRESS) => Err(error),
        _ => Ok(fd),
    }
}

/// Connects a socket; waits for the result if it is blocking.
///
/// # Errors
/// Errors of connect(2): EINPROGRESS if the socket does not block.
pub fn connect_socket(fd: impl AsFd, cid: u32, port: u32) -> io::Result<()> {
    Ok(rustix::net::connect(fd, &VsockAddress { cid, port })?)
}

/// The result of a non-blocking connect. Call it once, when the socket is writable.
///
/// # Errors
/// The error of the connection: ECONNRESET or ECONNREFUSED if the peer refused it, ETIMEDOUT.
pub fn connect_result(fd: impl AsFd) -> io::Result<()> {
    Ok(rustix::net::sockopt::socket_error(&fd)??)
}

/// Connects, and waits at most `timeout`. The socket is blocking.
///
/// # Errors
/// `TimedOut`, and those of [`connect`] and [`connect_result`].
pub fn connect_blocking(cid: u32, port: u32, timeout: Duration) -> io::Result<OwnedFd> {
    let fd = socket(SocketType::STREAM, SocketFlags::NONBLOCK)?;
    connect_within(fd, cid, port, timeout)
}

/// Connects a non-blocking socket, and makes it a blocking one.
fn connect_within(fd: OwnedFd, cid: u32, port: u32, timeout: Duration) -> io::Result<OwnedFd> {
    // The kernel's own limit is two seconds, in which a busy host may not answer.
    let limit = [timeout.as_secs(), timeout.subsec_micros().into()].map(|it| it as libc::c_long);
    let [seconds, micros] = limit.map(libc::c_long::to_ne_bytes);
    set(
        &fd,
        libc::AF_VSOCK,
        CONNECT_TIMEOUT,
        &[seconds, micros].concat(),
    )?;
    match connect_socket(&fd, cid, port) {
        Err(error) if Errno::from_io_error(&error) != Some(Errno::INPROGRESS) => return Err(error),
        _ => {}
    }
    if wait_ready(&fd, PollFlags::OUT, Some(timeout))?.is_empty() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    connect_result(&fd)?;
    rustix::io::ioctl_fionbio(&fd, false)?;
    Ok(fd)
}

/// As [`connect_blocking`], from a port below 1024, which shows the peer that this process may bind one.
///
/// # Errors
/// As there, and those of bind(2): EACCES without CAP_NET_BIND_SERVICE, EADDRINUSE if no such port is free.
pub fn connect_from_privileged_port(cid: u32, port: u32, timeout: Duration) -> io::Result<OwnedFd> {
    let fd = socket(SocketType::STREAM, SocketFlags::NONBLOCK)?;
    // As rresvport(3): from the last one down, and not the low ones, which services have.
    bind_first_free((512..1024).rev(), |source| bind(&fd, CID_ANY, source))?;
    connect_within(fd, cid, port, timeout)
}

/// Binds to the first of these ports that is not taken.
fn bind_first_free(
    ports: impl Iterator<Item = u32>,
    mut bind: impl FnMut(u32) -> io::Result<()>,
) -> io::Result<()> {
    let mut taken = io::ErrorKind::AddrInUse.into();
    for port in ports {
        match bind(port) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => taken = error,
            result => return result,
        }
    }
    Err(taken)
}

/// A non-blocking listener on `cid` ([`CID_ANY`] for all) and `port`.
///
/// # Errors
/// Errors of socket(2), bind(2) and listen(2): EADDRINUSE, EACCES for ports below 1024.
pub fn listen(cid: u32, port: u32, backlog: i32) -> io::Result<OwnedFd> {
    listen_type(SocketType::STREAM, cid, port, backlog)
}

/// As [`listen`], with a socket of messages (SOCK_SEQPACKET).
///
/// # Errors
/// As [`listen`].
pub fn listen_seqpacket(cid: u32, port: u32, backlog: i32) -> io::Result<OwnedFd> {
    listen_type(SocketType::SEQPACKET, cid, port, backlog)
}

fn listen_type(kind: SocketType, cid: u32, port: u32, backlog: i32) -> io::Result<OwnedFd> {
    let fd = socket(kind, SocketFlags::NONBLOCK)?;
    bind(&fd, cid, port)?;
    rustix::net::listen(&fd, backlog)?;
    Ok(fd)
}

/// Binds to a port of a CID. [`u32::MAX`] stands for any local CID, or any free port.
///
/// # Errors
/// Errors of bind(2).
pub fn bind(fd: impl AsFd, cid: u32, port: u32) -> io::Result<()> {
    Ok(rustix::net::bind(fd, &VsockAddress { cid, port })?)
}

/// Accepts a connection. Returns a non-blocking socket, and CID and port of the peer.
///
/// # Errors
/// `WouldBlock` when the listener does not block and none is there; errors of accept4(2).
pub fn accept(fd: impl AsFd) -> io::Result<(OwnedFd, u32, u32)> {
    accept_with(fd, SocketFlags::NONBLOCK)
}

/// As [`accept`], but waits for a connection, and the new socket is blocking.
///
/// # Errors
/// Errors of poll(2) and accept4(2).
pub fn accept_blocking(fd: impl AsFd) -> io::Result<(OwnedFd, u32, u32)> {
    loop {
        match accept_with(&fd, SocketFlags::empty()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait_ready(&fd, PollFlags::IN, None)?;
            }
            result => return result,
        }
    }
}

/// The CID and port that the socket is bound to.
///
/// # Errors
/// Errors of getsockname(2).
pub fn local_address(fd: impl AsFd) -> io::Result<(u32, u32)> {
    Ok(cid_and_port(&rustix::net::getsockname(fd)?))
}

/// Sets the size of the receive buffer in bytes, which is the credit that the kernel grants, and
/// its upper bound (SO_VM_SOCKETS_BUFFER_SIZE and _MAX_SIZE).
///
/// # Errors
/// Errors of setsockopt(2).
pub fn set_buffer_size(fd: impl AsFd, bytes: u64) -> io::Result<()> {
    let bytes = bytes.to_ne_bytes();
    set(&fd, libc::AF_VSOCK, MAX_SIZE, &bytes)?;
    set(&fd, libc::AF_VSOCK, SIZE, &bytes)
}

/// The size of the receive buffer, in bytes.
///
/// # Errors
/// Errors of getsockopt(2).
pub fn buffer_size(fd: impl AsFd) -> io::Result<u64> {
    let mut bytes = [0; size_of::<u64>()];
    get(&fd, libc::AF_VSOCK, SIZE, &mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Sets the number of bytes from which on the socket is readable (SO_RCVLOWAT).
///
/// # Errors
/// Errors of setsockopt(2).
pub fn set_receive_low_water(fd: impl AsFd, bytes: u32) -> io::Result<()> {
    let bytes = c_int::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    set_int(&fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes)
}

/// A blocking socket with `flags`.
///
/// # Errors
/// Errors of socket(2).
pub fn socket(kind: SocketType, flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | flags;
    Ok(socket_with(AddressFamily::VSOCK, kind, flags, None)?)
}

/// An address of AF_VSOCK.
struct VsockAddress {
    cid: u32,
    port: u32,
}

// SAFETY: the closure is given a whole `sockaddr_vm`, with its length, which lives until it returns.
unsafe impl SocketAddrArg for VsockAddress {
    unsafe fn with_sockaddr<R>(
        &self,
        call: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R,
    ) -> R {
        // SAFETY: a `sockaddr_vm` consists of integers, for which all zeroes is a value.
        let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
        address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
        (address.svm_cid, address.svm_port) = (self.cid, self.port);
        call(
            (&raw const address).cast(),
            size_of_val(&address) as SocketAddrLen,
        )
    }
}

/// CID and port of an address that the kernel has returned.
fn cid_and_port(address: &SocketAddrAny) -> (u32, u32) {
    // SAFETY: the address has `addr_len` initialised bytes, for as long as it is borrowed.
    let bytes = unsafe {
        std::slice::from_raw_parts(address.as_ptr().cast::<u8>(), address.addr_len() as usize)
    };
    // `struct sockaddr_vm`: family and a reserved field as u16, then port and CID.
    let field = |at: usize| bytes.get(at..).and_then(<[u8]>::first_chunk);
    let [port, cid] = [4, 8].map(|at| field(at).map_or(0, |bytes| u32::from_ne_bytes(*bytes)));
    (cid, port)
}

fn accept_with(fd: impl AsFd, flags: SocketFlags) -> io::Result<(OwnedFd, u32, u32)> {
    loop {
        match acceptfrom_with(&fd, SocketFlags::CLOEXEC | flags) {
            Ok((socket, address)) => {
                let (cid, port) = address.as_ref().map_or((0, 0), cid_and_port);
                return Ok((socket, cid, port));
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_the_kernels_layout() {
        let address = VsockAddress {
            cid: 3,
            port: 0x1234,
        }
        .as_any();
        assert_eq!(address.address_family(), AddressFamily::VSOCK);
        assert_eq!(address.addr_len() as usize, size_of::<libc::sockaddr_vm>());
        assert_eq!(cid_and_port(&address), (3, 0x1234));
    }

    #[test]
    fn the_first_port_that_is_free_is_bound() {
        let in_use = || io::Error::from(io::ErrorKind::AddrInUse);
        let mut tried = Vec::new();
        let bound = bind_first_free((512..1024).rev(), |port| {
            tried.push(port);
            if port > 1020 { Err(in_use()) } else { Ok(()) }
        });
        bound.unwrap();
        assert_eq!(tried, [1023, 1022, 1021, 1020]);
        let none = bind_first_free(512..514, |_| Err(in_use())).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::AddrInUse);
        let mut calls = 0;
        let refused = bind_first_free(512..514, |_| {
            calls += 1;
            Err(io::ErrorKind::PermissionDenied.into())
        });
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(calls, 1);
    }
}
