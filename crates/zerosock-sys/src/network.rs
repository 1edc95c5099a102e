//! Networks for tests: a thread that is alone with its devices, and TCP under another protocol.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

const SOL_TLS: libc::c_int = 282;
const TLS_TX: libc::c_int = 1;
const TLS_RX: libc::c_int = 2;

/// Moves the calling thread into a network namespace of its own, with a loopback device that is
/// down and nothing else. Sockets that it has stay where they are; those that it makes from now on,
/// and the programs that it starts, are there. The namespace ends with the last of them.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN; ENOSPC where no more are allowed.
pub fn isolate_thread() -> io::Result<()> {
    // SAFETY: only the calling thread's later sockets are concerned; no memory is touched.
    match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Puts a connected TCP socket under the upper-layer protocol of this name (TCP_ULP).
///
/// # Errors
/// ENOENT where the kernel has none of that name, EOPNOTSUPP if it is none for programs.
pub fn set_upper_layer(socket: impl AsFd, name: &str) -> io::Result<()> {
    set(socket, libc::SOL_TCP, libc::TCP_ULP, name.as_bytes())
}

/// Lets the kernel encrypt (TLS 1.3) what is sent over a TCP socket that is under "tls", with keys
/// that everybody knows, as [`decrypt`] does.
///
/// # Errors
/// ENOENT where the kernel does not have the cipher, AES-128-GCM.
pub fn encrypt(socket: impl AsFd) -> io::Result<()> {
    set_keys(socket, TLS_TX)
}

/// Lets the kernel decrypt what is received over a TCP socket that is under "tls": what the other end
/// has sent since it has had [`encrypt`] called.
///
/// # Errors
/// As there.
pub fn decrypt(socket: impl AsFd) -> io::Result<()> {
    set_keys(socket, TLS_RX)
}

fn set_keys(socket: impl AsFd, direction: libc::c_int) -> io::Result<()> {
    // `struct tls12_crypto_info_aes_gcm_128`: the version (1.3) and the cipher as u16, then 8 bytes of
    // the IV, 16 of the key, 4 of the salt, and 8 of the first record's number.
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
    // SAFETY: the kernel reads as many bytes as it is told of, all of them the slice's.
    match unsafe { libc::setsockopt(socket, level, option, value.as_ptr().cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
