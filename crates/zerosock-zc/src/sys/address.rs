//! The destination of a datagram, in the form that the kernel reads.
#![allow(unsafe_code)]

use rustix::net::addr::SocketAddrArg;

/// Room for the longest address, in bytes: `sockaddr_in6` has 28, `sockaddr_ll` 20.
const ROOM: usize = 32;

/// A destination address (IPv4, IPv6, packet or vsock) in the form of the kernel.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[repr(C, align(8))]
pub struct SocketAddress {
    bytes: [u8; ROOM],
    len: u32,
}

impl SocketAddress {
    /// The kernel's form of `address`, or none if it is longer than those of the internet, packet
    /// and vsock families (a Unix path).
    #[must_use]
    pub fn new(address: &impl SocketAddrArg) -> Option<Self> {
        let any = address.as_any();
        let len = any.addr_len();
        let mut bytes = [0; ROOM];
        let count = usize::try_from(len).ok().filter(|&count| count <= ROOM)?;
        // SAFETY: `any` holds an address of `len` initialised bytes at `as_ptr`, at most ROOM of
        // them, which is the length of `bytes`; the two do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(any.as_ptr().cast::<u8>(), bytes.as_mut_ptr(), count);
        }
        Some(Self { bytes, len })
    }

    /// The address of a packet socket: interface index, EtherType in host byte order, and hardware
    /// address.
    #[must_use]
    pub fn on_device(device: u32, protocol: u16, to: [u8; 6]) -> Self {
        // `struct sockaddr_ll`: family, protocol in network order, index, hardware type, packet
        // type, address length, eight bytes of address.
        let mut bytes = [0; ROOM];
        bytes[0..2].copy_from_slice(&(libc::AF_PACKET as u16).to_ne_bytes());
        bytes[2..4].copy_from_slice(&protocol.to_be_bytes());
        bytes[4..8].copy_from_slice(&device.to_ne_bytes());
        bytes[11] = to.len() as u8;
        bytes[12..18].copy_from_slice(&to);
        let len = size_of::<libc::sockaddr_ll>() as u32;
        Self { bytes, len }
    }

    /// The address for a system call.
    pub(super) fn as_ptr(&self) -> *const libc::sockaddr {
        self.bytes.as_ptr().cast()
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> u32 {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    #[test]
    fn an_internet_address_has_the_kernels_layout() {
        let four: SocketAddr = "127.0.0.1:258".parse().expect("an address");
        let address = SocketAddress::new(&four).expect("it is short");
        assert_eq!(address.len(), 16);
        assert_eq!(&address.bytes[2..8], &[1, 2, 127, 0, 0, 1]);
        let six: SocketAddr = "[::1]:258".parse().expect("an address");
        assert_eq!(SocketAddress::new(&six).expect("it is short").len(), 28);
    }

    #[test]
    fn a_unix_path_is_refused() {
        let path = rustix::net::SocketAddrUnix::new("/a/path/that/is/long/enough/to/be/told/apart");
        assert_eq!(SocketAddress::new(&path.expect("a path")), None);
    }
}
