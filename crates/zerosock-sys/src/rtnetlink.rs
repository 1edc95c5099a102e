//! Requests about network interfaces, rtnetlink(7), in the network namespace of the calling thread.
//!
//! # Invariants
//! The lengths in an answer are checked against the bytes that arrived, though the kernel is trusted.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Bytes of `struct nlmsghdr` and of `struct ifinfomsg`.
const HEADER: usize = 16;
const LINK: usize = 16;
/// Types of messages.
const NEW_LINK: u16 = 16;
const GET_LINK: u16 = 18;
const ERROR: u16 = 2;
const REQUEST: u16 = 1;
const IFLA_IFNAME: u16 = 3;
/// More than the kernel tells about an interface without virtual functions.
const MAX_ANSWER: usize = 1 << 15;
/// Bits of an attribute's type beside the type: NLA_F_NESTED and NLA_F_NET_BYTEORDER.
const TYPE_FLAGS: u16 = 0xc000;

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

/// The attributes of an interface.
///
/// # Errors
/// ENODEV if there is none of this name.
pub(crate) fn get_link(name: &str) -> io::Result<Vec<u8>> {
    let name = attribute(IFLA_IFNAME, format!("{name}\0").as_bytes());
    let socket = send(GET_LINK, REQUEST, &[vec![0; LINK], name].concat())?;
    let mut answer = vec![0; MAX_ANSWER];
    let (_, len) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::TRUNC)?;
    if len > answer.len() {
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    answer.truncate(len);
    link_attributes(&answer)
}

/// The attributes in the answer to a request for one interface.
fn link_attributes(answer: &[u8]) -> io::Result<Vec<u8>> {
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    let (head, body) = answer.split_first_chunk::<HEADER>().ok_or_else(malformed)?;
    let [a, b, c, d, low, high, ..] = *head;
    let len = u32::from_ne_bytes([a, b, c, d]) as usize;
    let body = len.checked_sub(HEADER).and_then(|len| body.get(..len));
    let body = body.ok_or_else(malformed)?;
    match u16::from_ne_bytes([low, high]) {
        NEW_LINK => Ok(body.get(LINK..).ok_or_else(malformed)?.to_vec()),
        ERROR => {
            let number = body.first_chunk().ok_or_else(malformed)?;
            let number = i32::from_ne_bytes(*number).wrapping_neg();
            Err(io::Error::from_raw_os_error(number))
        }
        _ => Err(malformed()),
    }
}

/// The attributes in `bytes`, each with its type, up to the first that is malformed.
pub(crate) struct Attributes<'a>(pub(crate) &'a [u8]);

impl<'a> Attributes<'a> {
    /// The value of the first attribute of this type.
    pub(crate) fn find(bytes: &'a [u8], wanted: u16) -> Option<&'a [u8]> {
        let mut all = Attributes(bytes);
        all.find_map(|(kind, value)| (kind == wanted).then_some(value))
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<(u16, &'a [u8])> {
        let [a, b, c, d] = *self.0.first_chunk()?;
        let len = usize::from(u16::from_ne_bytes([a, b]));
        let value = self.0.get(4..len)?;
        self.0 = self.0.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([c, d]) & !TYPE_FLAGS, value))
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

#[cfg(test)]
#[path = "rtnetlink_tests.rs"]
mod tests;
