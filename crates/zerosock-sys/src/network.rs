//! Networks for tests: a thread in a network namespace of its own, and TCP with kernel TLS.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

const SOL_TLS: libc::c_int = 282;
const TLS_TX: libc::c_int = 1;
const TLS_RX: libc::c_int = 2;

/// Moves the calling thread into a new network namespace, with a loopback device that is down and
/// nothing else. Existing sockets stay in the old namespace; later sockets and child processes of
/// the thread are in the new one. The kernel removes the namespace with its last user.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN; ENOSPC if the limit of namespaces is reached.
pub fn isolate_thread() -> io::Result<()> {
    // SAFETY: the call affects later sockets of the calling thread, and touches no memory.
    match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has the kernel cut each send of a UDP socket into datagrams of `size` bytes (UDP_SEGMENT).
///
/// # Errors
/// ENOPROTOOPT before Linux 4.18.
pub fn set_segment_size(socket: impl AsFd, size: u16) -> io::Result<()> {
    let size = libc::c_int::from(size).to_ne_bytes();
    set(socket, libc::SOL_UDP, libc::UDP_SEGMENT, &size)
}

/// Sets the upper-layer protocol of a connected TCP socket (TCP_ULP).
///
/// # Errors
/// ENOENT if the kernel has no protocol of this name, EOPNOTSUPP if user space may not set it.
pub fn set_upper_layer(socket: impl AsFd, name: &str) -> io::Result<()> {
    set(socket, libc::SOL_TCP, libc::TCP_ULP, name.as_bytes())
}

/// Makes the kernel encrypt (TLS 1.3) bytes sent over a TCP socket with the protocol "tls". The
/// keys are constants, which [`decrypt`] uses as well.
///
/// # Errors
/// ENOENT if the kernel does not have the cipher, AES-128-GCM.
pub fn encrypt(socket: impl AsFd) -> io::Result<()> {
    set_keys(socket, TLS_TX)
}

/// Makes the kernel decrypt bytes received over a TCP socket with the protocol "tls", which the
/// other end sent after [`encrypt`].
///
/// # Errors
/// As there.
pub fn decrypt(socket: impl AsFd) -> io::Result<()> {
    set_keys(socket, TLS_RX)
}

fn set_keys(socket: impl AsFd, direction: libc::c_int) -> io::Result<()> {
    // `struct tls12_crypto_info_aes_gcm_128`: the version (1.3) and the cipher as u16, then 8 bytes
    // of the IV, 16 of the key, 4 of the salt, and 8 of the first record's number.
    let mut keys = [0; 40];
    keys[..2].copy_from_slice(&0x0304_u16.to_ne_bytes());
    keys[2..4].copy_from_slice(&51_u16.to_ne_bytes());
    keys[4..12].fill(1);
    keys[12..28].fill(2);
    keys[28..32].fill(3);
    set(socket, SOL_TLS, direction, &keys)
}

fn set(socket: impl AsFd, level: libc::c_int, option: libc::c_int, value: &[u8]) -> io::Result<()> {
    let len = value.len() as libc::socklen_t;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel reads `len` bytes, the length of the slice.
    match unsafe { libc::setsockopt(socket, level, option, value.as_ptr().cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
