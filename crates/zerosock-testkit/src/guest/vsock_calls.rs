//! Single calls on kernel vsock sockets, for tests of their behaviour inside guests.
#![allow(unsafe_code)]

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

use libc::{c_int, c_void, iovec, msghdr, socklen_t};

/// SO_VM_SOCKETS_BUFFER_SIZE.
const SIZE: c_int = 0;
/// SO_VM_SOCKETS_BUFFER_MIN_SIZE.
const MIN_SIZE: c_int = 1;
/// SO_VM_SOCKETS_BUFFER_MAX_SIZE.
const MAX_SIZE: c_int = 2;
/// SO_VM_SOCKETS_CONNECT_TIMEOUT with a 64-bit time.
const CONNECT_TIMEOUT: c_int = 8;
/// SIOCINQ: number of unread bytes.
const SIOCINQ: libc::c_ulong = 0x541b;
/// SIOCOUTQ: number of unsent bytes.
const SIOCOUTQ: libc::c_ulong = 0x5411;

/// A part of a message to send.
#[derive(Copy, Clone, Debug)]
pub(super) enum Part<'a> {
    /// Bytes.
    Bytes(&'a [u8]),
    /// This many bytes at addresses without memory.
    Unmapped(usize),
}

/// Sets the size of the receive buffer in bytes, within its bounds (SO_VM_SOCKETS_BUFFER_SIZE).
///
/// # Errors
/// Errors of setsockopt(2).
pub(super) fn set_buffer_size(fd: impl AsFd, bytes: u64) -> io::Result<()> {
    set(&fd, libc::AF_VSOCK, SIZE, &bytes.to_ne_bytes())
}

/// Sets the bounds of the receive buffer (SO_VM_SOCKETS_BUFFER_MIN_SIZE and _MAX_SIZE).
///
/// # Errors
/// Errors of setsockopt(2).
pub(super) fn set_buffer_bounds(fd: impl AsFd, min: u64, max: u64) -> io::Result<()> {
    set(&fd, libc::AF_VSOCK, MIN_SIZE, &min.to_ne_bytes())?;
    set(&fd, libc::AF_VSOCK, MAX_SIZE, &max.to_ne_bytes())
}

/// Sets the timeout of connect(2) (SO_VM_SOCKETS_CONNECT_TIMEOUT_NEW).
///
/// # Errors
/// Errors of setsockopt(2).
pub(super) fn set_connect_timeout(fd: impl AsFd, milliseconds: u32) -> io::Result<()> {
    let seconds = i64::from(milliseconds / 1000);
    let micros = i64::from(milliseconds % 1000) * 1000;
    let time = [seconds.to_ne_bytes(), micros.to_ne_bytes()].concat();
    set(&fd, libc::AF_VSOCK, CONNECT_TIMEOUT, &time)
}

/// Permits zero-copy sends (SO_ZEROCOPY).
///
/// # Errors
/// Errors of setsockopt(2): EOPNOTSUPP before Linux 6.7.
pub(super) fn set_zero_copy(fd: impl AsFd) -> io::Result<()> {
    set(
        &fd,
        libc::SOL_SOCKET,
        libc::SO_ZEROCOPY,
        &1_i32.to_ne_bytes(),
    )
}

/// Number of bytes that were sent and that the device has not taken (SIOCOUTQ).
///
/// # Errors
/// Errors of ioctl(2): ENOTTY before Linux 6.11.
pub(super) fn unsent(fd: impl AsFd) -> io::Result<u32> {
    ask(&fd, SIOCOUTQ)
}

/// Number of bytes that can be read (SIOCINQ).
///
/// # Errors
/// Errors of ioctl(2): ENOTTY before Linux 6.17.
pub(super) fn unread(fd: impl AsFd) -> io::Result<u32> {
    ask(&fd, SIOCINQ)
}

/// Sends parts with one call, with MSG_ZEROCOPY if `zero_copy`. Returns the number of bytes taken.
/// With MSG_ZEROCOPY the kernel may read the bytes until [`completions`] reports the send: changes
/// before that can change what is sent.
///
/// # Errors
/// Errors of sendmsg(2): EFAULT for a part that is not mapped.
pub(super) fn send_parts(fd: impl AsFd, parts: &[Part<'_>], zero_copy: bool) -> io::Result<usize> {
    let hole = parts.iter().map(|part| match part {
        Part::Unmapped(len) => *len,
        Part::Bytes(_) => 0,
    });
    let hole = Hole::new(hole.max().unwrap_or(0).max(1))?;
    let mut vectors: Vec<iovec> = parts
        .iter()
        .map(|part| match part {
            Part::Bytes(bytes) => iovec {
                iov_base: bytes.as_ptr().cast_mut().cast::<c_void>(),
                iov_len: bytes.len(),
            },
            Part::Unmapped(len) => iovec {
                iov_base: hole.address,
                iov_len: *len,
            },
        })
        .collect();
    let mut message = empty_message();
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.len() as _;
    let zero_copy = if zero_copy { libc::MSG_ZEROCOPY } else { 0 };
    // SAFETY: `message` has no address and no control data; its vectors name slices that outlive
    // the call, which the kernel only reads, and addresses without memory, for which the call fails
    // with EFAULT. The kernel holds references to pages that it reads after the call.
    checked(unsafe {
        libc::sendmsg(
            fd.as_fd().as_raw_fd(),
            &message,
            libc::MSG_NOSIGNAL | zero_copy,
        )
    })
}

/// Reads the error queue once, without waiting. Returns the number of completed sends.
///
/// # Errors
/// EAGAIN when it is empty; `InvalidData` for a message that is no completion.
pub(super) fn completions(fd: impl AsFd) -> io::Result<u32> {
    /// SOL_VSOCK and VSOCK_RECVERR.
    const VSOCK_RECVERR: (c_int, c_int) = (287, 1);
    /// SO_EE_ORIGIN_ZEROCOPY.
    const ZEROCOPY: u8 = 5;
    let mut control = [0u64; 32];
    let mut message = empty_message();
    message.msg_control = control.as_mut_ptr().cast::<c_void>();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: `message` has no address and no vectors; its control data is `control`, aligned for a
    // header, and the kernel writes within the given length.
    checked(unsafe {
        libc::recvmsg(
            fd.as_fd().as_raw_fd(),
            &mut message,
            libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT,
        )
    })?;
    // SAFETY: the kernel has filled `message` in; its control bytes are still there.
    let header = unsafe { libc::CMSG_FIRSTHDR(&message).as_ref() };
    let odd = || io::Error::new(io::ErrorKind::InvalidData, "no completion");
    let header = header.ok_or_else(odd)?;
    let room = size_of::<libc::sock_extended_err>() + size_of::<libc::cmsghdr>();
    if (header.cmsg_level, header.cmsg_type) != VSOCK_RECVERR || (header.cmsg_len as usize) < room {
        return Err(odd());
    }
    // SAFETY: the header says that so many bytes follow it, and the kernel keeps within `control`;
    // the struct consists of integers, and is read without regard to its alignment.
    let error =
        unsafe { ptr::read_unaligned(libc::CMSG_DATA(header).cast::<libc::sock_extended_err>()) };
    if error.ee_origin != ZEROCOPY || error.ee_errno != 0 {
        return Err(odd());
    }
    // From the first to the last id, both included.
    Ok(error.ee_data.wrapping_sub(error.ee_info).wrapping_add(1))
}

/// A received message.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct ReceivedPacket {
    /// Errors of recvmsg(2): with MSG_TRUNC that may be more than there is room for.
    pub(super) len: usize,
    /// The flags of the message, as MSG_EOR and MSG_TRUNC.
    pub(super) flags: c_int,
}

/// Receives, with the flags of recvmsg(2).
///
/// # Errors
/// Errors of recvmsg(2).
pub(super) fn receive(
    fd: impl AsFd,
    buffer: &mut [u8],
    flags: c_int,
) -> io::Result<ReceivedPacket> {
    let mut vector = iovec {
        iov_base: buffer.as_mut_ptr().cast::<c_void>(),
        iov_len: buffer.len(),
    };
    let mut message = empty_message();
    message.msg_iov = &mut vector;
    message.msg_iovlen = 1;
    // SAFETY: `message` names no address and no control bytes; its one vector names `buffer`, to
    // which the kernel writes at most `buffer.len()` bytes, and which outlives the call.
    let len = checked(unsafe { libc::recvmsg(fd.as_fd().as_raw_fd(), &mut message, flags) })?;
    Ok(ReceivedPacket {
        len,
        flags: message.msg_flags,
    })
}

/// Receives to addresses at which there is no memory.
///
/// # Errors
/// EFAULT, or another error of the kernel.
pub(super) fn receive_nowhere(fd: impl AsFd, len: usize) -> io::Result<usize> {
    let hole = Hole::new(len.max(1))?;
    // SAFETY: `len` bytes from the hole's address on are reserved and have no memory: the kernel
    // finds that it cannot write there.
    checked(unsafe { libc::recv(fd.as_fd().as_raw_fd(), hole.address, len, 0) })
}

/// Addresses without memory.
struct Hole {
    address: *mut c_void,
    len: usize,
}

impl Hole {
    fn new(len: usize) -> io::Result<Hole> {
        // SAFETY: a new mapping at an address that the kernel chooses replaces no other mapping.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Hole { address, len })
    }
}

impl Drop for Hole {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made; nothing else uses the address.
        unsafe { libc::munmap(self.address, self.len) };
    }
}

fn set(fd: &impl AsFd, level: c_int, option: c_int, value: &[u8]) -> io::Result<()> {
    let (fd, len) = (fd.as_fd().as_raw_fd(), value.len() as socklen_t);
    // SAFETY: the kernel reads `len` bytes, the length of the slice; no option that is set here has an address
    // in its value.
    let result = unsafe { libc::setsockopt(fd, level, option, value.as_ptr().cast(), len) };
    checked(result as isize).map(drop)
}

fn ask(fd: &impl AsFd, request: libc::c_ulong) -> io::Result<u32> {
    let mut bytes: c_int = 0;
    // SAFETY: both requests write one `int` to the address.
    let result = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as _, &mut bytes) };
    checked(result as isize)?;
    Ok(u32::try_from(bytes).unwrap_or(0))
}

fn empty_message() -> msghdr {
    // SAFETY: `msghdr` consists of integers and of pointers that may be null.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

fn checked(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
