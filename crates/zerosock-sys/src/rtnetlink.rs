//! Requests about network interfaces, rtnetlink(7), in the network namespace of the calling thread.
//!
//! # Invariants
//! The lengths in an answer are checked against the bytes that arrived, though the kernel is trusted.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;

/// A netlink attribute, padded.
pub(crate) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = (4 + value.len()) as u16;
    let mut bytes = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Sends a request about interfaces, and waits for its acknowledgement.
pub(crate) fn change_link(kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    let socket = send(kind, flags, body)?;
    // `struct nlmsghdr`, then the negated error number.
    let mut answer = [0_u8; 64];
    rustix::net::recv(&socket, &mut answer, RecvFlags::empty())?;
    let [.., a, b, c, d] = *answer.first_chunk::<20>().expect("20 of 64 bytes");
    match i32::from_ne_bytes([a, b, c, d]) {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// Sends a request. The kernel queues its answer before this returns.
fn send(kind: u16, flags: u16, body: &[u8]) -> io::Result<OwnedFd> {
    let (family, raw) = (AddressFamily::NETLINK, SocketType::RAW);
    let socket = rustix::net::socket_with(family, raw, SocketFlags::CLOEXEC, None)?;
    // `struct nlmsghdr`: length, type, flags, two numbers.
    let mut request = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
    request.extend(kind.to_ne_bytes());
    request.extend(flags.to_ne_bytes());
    request.extend([0; 8]);
    request.extend(body);
    rustix::net::send(&socket, &request, SendFlags::empty())?;
    Ok(socket)
}
