//! Addresses as the kernel has them.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// The address of an Internet or Unix socket, or none.
#[derive(Clone, Copy)]
pub struct KernelAddress {
    pub(super) storage: Storage,
    pub(super) length: libc::socklen_t,
}

/// As large as an address of any of these families, and aligned for them.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Storage(pub(super) [u8; STORAGE]);

pub(super) const STORAGE: usize = 112;
const _: () = assert!(STORAGE >= size_of::<libc::sockaddr_un>());
const _: () = assert!(STORAGE >= size_of::<libc::sockaddr_in6>());

impl KernelAddress {
    /// No address: an unnamed socket.
    pub const NONE: KernelAddress = KernelAddress {
        storage: Storage([0; STORAGE]),
        length: 0,
    };

    fn bytes(&self) -> &[u8] {
        &self.storage.0[..(self.length as usize).min(STORAGE)]
    }

    fn family(&self) -> Option<libc::c_int> {
        let bytes = self.bytes().first_chunk::<2>()?;
        Some(u16::from_ne_bytes(*bytes).into())
    }

    /// Whether messages can be sent to it.
    pub fn is_named(&self) -> bool {
        self.length as usize > size_of::<libc::sa_family_t>()
    }

    /// The address as one of the Internet, if it is one.
    pub fn ip(&self) -> Option<SocketAddr> {
        let bytes = self.bytes();
        let port = u16::from_be_bytes(*bytes.get(2..)?.first_chunk()?);
        match self.family()? {
            libc::AF_INET => {
                let address: [u8; 4] = *bytes.get(4..)?.first_chunk()?;
                Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::from(address)), port))
            }
            libc::AF_INET6 => {
                let flow = u32::from_be_bytes(*bytes.get(4..)?.first_chunk()?);
                let address: [u8; 16] = *bytes.get(8..)?.first_chunk()?;
                let scope = u32::from_ne_bytes(*bytes.get(24..)?.first_chunk()?);
                let address = Ipv6Addr::from(address);
                Some(SocketAddrV6::new(address, port, flow, scope).into())
            }
            _ => None,
        }
    }
}

impl PartialEq for KernelAddress {
    fn eq(&self, other: &KernelAddress) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for KernelAddress {}

impl Hash for KernelAddress {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes().hash(state);
    }
}

impl fmt::Debug for KernelAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for KernelAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(address) = self.ip() {
            return address.fmt(f);
        }
        match self.bytes().get(size_of::<libc::sa_family_t>()..) {
            None | Some([]) => f.write_str("unnamed"),
            Some([0, name @ ..]) => write!(f, "@{}", name.escape_ascii()),
            Some(path) => {
                let path = path.strip_suffix(&[0]).unwrap_or(path);
                write!(f, "{}", path.escape_ascii())
            }
        }
    }
}
