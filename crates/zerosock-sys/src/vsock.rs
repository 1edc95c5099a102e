//! Kernel vsock sockets (vsock(7)): for the command-line tool inside a guest, and for forwarding on
//! a host.
//!
//! Their tests run inside guests only.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use libc::{c_int, c_void, sockaddr, sockaddr_vm, socklen_t};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

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
    match call_connect(&fd, cid, port) {
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok(fd),
        Err(error) => Err(error),
        Ok(()) => Ok(fd),
    }
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
    let fd = connect(cid, port)?;
    let limit = Timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    let ready = loop {
        match poll(&mut [PollFd::new(&fd, PollFlags::OUT)], Some(&limit)) {
            Err(rustix::io::Errno::INTR) => {}
            result => break result?,
        }
    };
    if ready == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    connect_result(&fd)?;
    rustix::io::ioctl_fionbio(&fd, false)?;
    Ok(fd)
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
    let address = address(cid, port);
    // SAFETY: `address` is a complete `sockaddr_vm`, its length is given, and it outlives the
    // call, which only reads it.
    let result = unsafe { libc::bind(fd.as_raw_fd(), as_sockaddr(&address), ADDRESS_LEN) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    rustix::net::listen(&fd, backlog)?;
    Ok(fd)
}

/// Accepts a connection. Returns a non-blocking socket, and CID and port of the peer.
///
/// # Errors
/// `WouldBlock` when the listener does not block and none is there; errors of accept4(2).
pub fn accept(fd: impl AsFd) -> io::Result<(OwnedFd, u32, u32)> {
    accept_with(fd, libc::SOCK_NONBLOCK)
}

/// As [`accept`], but waits for a connection, and the new socket is blocking.
///
/// # Errors
/// Errors of poll(2) and accept4(2).
pub fn accept_blocking(fd: impl AsFd) -> io::Result<(OwnedFd, u32, u32)> {
    loop {
        match accept_with(&fd, 0) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                match poll(&mut [PollFd::new(&fd, PollFlags::IN)], None) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
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
    let mut address = MaybeUninit::<sockaddr_vm>::zeroed();
    let mut len = ADDRESS_LEN;
    // SAFETY: `address` has room for `len` bytes; the kernel writes no more than that. It was
    // zeroed and consists of integers, so it is a value whatever the kernel wrote.
    let (result, address) = unsafe {
        let result = libc::getsockname(
            fd.as_fd().as_raw_fd(),
            address.as_mut_ptr().cast::<sockaddr>(),
            &mut len,
        );
        (result, address.assume_init())
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((address.svm_cid, address.svm_port))
}

/// Sets the size of the receive buffer in bytes, which is the credit that the kernel grants, and
/// its upper bound (SO_VM_SOCKETS_BUFFER_SIZE and _MAX_SIZE).
///
/// # Errors
/// Errors of setsockopt(2).
pub fn set_buffer_size(fd: impl AsFd, bytes: u64) -> io::Result<()> {
    const SIZE: c_int = 0;
    const MAX_SIZE: c_int = 2;
    set_option(&fd, libc::AF_VSOCK, MAX_SIZE, &bytes)?;
    set_option(&fd, libc::AF_VSOCK, SIZE, &bytes)
}

/// The size of the receive buffer, in bytes.
///
/// # Errors
/// Errors of getsockopt(2).
pub fn buffer_size(fd: impl AsFd) -> io::Result<u64> {
    const SIZE: c_int = 0;
    get_option(&fd, libc::AF_VSOCK, SIZE)
}

/// Sets the number of bytes from which on the socket is readable (SO_RCVLOWAT).
///
/// # Errors
/// Errors of setsockopt(2).
pub fn set_receive_low_water(fd: impl AsFd, bytes: u32) -> io::Result<()> {
    let bytes = c_int::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    set_option(&fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, &bytes)
}

/// The number of bytes from which on the socket is readable (SO_RCVLOWAT).
///
/// # Errors
/// Errors of getsockopt(2).
pub fn receive_low_water(fd: impl AsFd) -> io::Result<u32> {
    let bytes: c_int = get_option(&fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT)?;
    Ok(u32::try_from(bytes).unwrap_or(0))
}

const ADDRESS_LEN: socklen_t = size_of::<sockaddr_vm>() as socklen_t;

fn socket(kind: SocketType, flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | flags;
    Ok(socket_with(AddressFamily::VSOCK, kind, flags, None)?)
}

fn address(cid: u32, port: u32) -> sockaddr_vm {
    // SAFETY: `sockaddr_vm` consists of integers, for which all zeroes is a value.
    let mut address: sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

fn as_sockaddr(address: &sockaddr_vm) -> *const sockaddr {
    std::ptr::from_ref(address).cast()
}

fn call_connect(fd: &OwnedFd, cid: u32, port: u32) -> io::Result<()> {
    let address = address(cid, port);
    // SAFETY: `address` is a complete `sockaddr_vm`, its length is given, and it outlives the
    // call, which only reads it.
    let result = unsafe { libc::connect(fd.as_raw_fd(), as_sockaddr(&address), ADDRESS_LEN) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn accept_with(fd: impl AsFd, flags: c_int) -> io::Result<(OwnedFd, u32, u32)> {
    use std::os::fd::FromRawFd;
    let mut address = MaybeUninit::<sockaddr_vm>::zeroed();
    loop {
        let mut len = ADDRESS_LEN;
        // SAFETY: `address` has room for `len` bytes; the kernel writes no more than that.
        let accepted = unsafe {
            libc::accept4(
                fd.as_fd().as_raw_fd(),
                address.as_mut_ptr().cast::<sockaddr>(),
                &mut len,
                flags | libc::SOCK_CLOEXEC,
            )
        };
        if accepted < 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        }
        // SAFETY: accept4 has just returned this descriptor, so it is open and nothing else owns
        // it; `address` was zeroed and consists of integers, so it is initialised.
        let (socket, address) = unsafe { (OwnedFd::from_raw_fd(accepted), address.assume_init()) };
        return Ok((socket, address.svm_cid, address.svm_port));
    }
}

fn set_option<T: Copy>(fd: &impl AsFd, level: c_int, name: c_int, value: &T) -> io::Result<()> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes from `value`, an integer of the callers
    // above.
    let result = unsafe {
        libc::setsockopt(
            fd.as_fd().as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(value).cast::<c_void>(),
            size_of::<T>() as socklen_t,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn get_option<T: Copy + Default>(fd: &impl AsFd, level: c_int, name: c_int) -> io::Result<T> {
    let mut value = T::default();
    let mut len = size_of::<T>() as socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `value`, an integer of the callers above,
    // for which all bytes are values.
    let result = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            level,
            name,
            std::ptr::from_mut(&mut value).cast::<c_void>(),
            &mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(value)
}
