//! Socket options that rustix does not have.
//!
//! # Invariants
//! No option that is named here has an address in its value: the kernel touches the value only.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use libc::{c_int, socklen_t};

/// Sets an option to the bytes of `value`.
pub(crate) fn set(socket: impl AsFd, level: c_int, option: c_int, value: &[u8]) -> io::Result<()> {
    let (fd, len) = (socket.as_fd().as_raw_fd(), value.len() as socklen_t);
    // SAFETY: the kernel reads `len` bytes, the length of the slice.
    check(unsafe { libc::setsockopt(fd, level, option, value.as_ptr().cast(), len) })
}

/// Sets an option whose value is an `int`.
pub(crate) fn set_int(
    socket: impl AsFd,
    level: c_int,
    option: c_int,
    value: c_int,
) -> io::Result<()> {
    set(socket, level, option, &value.to_ne_bytes())
}

/// Reads an option into `value`. Returns the number of bytes that the kernel has written.
pub(crate) fn get(
    socket: impl AsFd,
    level: c_int,
    option: c_int,
    value: &mut [u8],
) -> io::Result<usize> {
    let (fd, mut len) = (socket.as_fd().as_raw_fd(), value.len() as socklen_t);
    let to = value.as_mut_ptr().cast();
    // SAFETY: the kernel writes at most `len` bytes, the length of the slice, and the new length.
    check(unsafe { libc::getsockopt(fd, level, option, to, &raw mut len) })?;
    Ok(value.len().min(len as usize))
}

/// Reads an option whose value is an `int`.
pub(crate) fn get_int(socket: impl AsFd, level: c_int, option: c_int) -> io::Result<c_int> {
    let mut value = [0; size_of::<c_int>()];
    get(socket, level, option, &mut value)?;
    Ok(c_int::from_ne_bytes(value))
}

/// The error of a call that has returned a negative number.
pub(crate) fn check(returned: c_int) -> io::Result<()> {
    match returned {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
