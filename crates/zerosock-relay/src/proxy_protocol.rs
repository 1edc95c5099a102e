//! PROXY protocol version 2: the header that tells a target where a relayed connection came from.
//!
//! The header is the first thing that a target receives. Its layout is that of section 2.2 of
//! <https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt>, all numbers in network byte order:
//!
//! | bytes | content |
//! |---|---|
//! | 0 to 11 | the signature |
//! | 12 | version 2 in the upper half; command in the lower half: 0 LOCAL, 1 PROXY |
//! | 13 | address family in the upper half: 0 UNSPEC, 1 INET, 2 INET6; lower half: 0, or 1 for STREAM |
//! | 14, 15 | length of what follows |
//! | from 16 | source address, destination address, source port, destination port (INET: 12 bytes, INET6: 36), then the TLVs |
//!
//! The protocol has no address family for vsock. The header of a vsock connection has the command PROXY,
//! the family UNSPEC and one TLV of the range for applications:
//!
//! | bytes of the TLV | content |
//! |---|---|
//! | 0 | type, 0xE0 (PP2_TYPE_MIN_CUSTOM) |
//! | 1, 2 | length of the value, 12 |
//! | 3 to 6 | CID of the caller |
//! | 7 to 10 | port of the caller |
//! | 11 to 14 | port that the caller connected to |

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Type of the TLV with the numbers of a vsock connection.
pub const VSOCK_TLV: u8 = 0xe0;

const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
const VERSION_2: u8 = 0x20;
const LOCAL: u8 = 0;
const PROXY: u8 = 1;
const UNSPEC: u8 = 0;
const INET_STREAM: u8 = 0x11;
const INET6_STREAM: u8 = 0x21;

/// Where a relayed connection came from.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Source {
    /// A vsock connection.
    Vsock {
        /// CID of the caller.
        cid: u32,
        /// Port of the caller.
        port: u32,
        /// Port that it connected to.
        to_port: u32,
    },
    /// A client of a TCP listener.
    Ip(SocketAddr),
    /// No address that means anything to the target, such as a Unix socket. The header has the command
    /// LOCAL, at which a target uses the addresses of its own connection.
    Local,
}

/// The header for a connection from `source`. `destination` is the address that an IP client connected
/// to; without it the header has the unspecified address and port 0. Other sources do not use it.
pub fn header(source: Source, destination: Option<SocketAddr>) -> Vec<u8> {
    let mut body = Vec::with_capacity(36);
    let (command, family) = match source {
        Source::Local => (LOCAL, UNSPEC),
        Source::Vsock { cid, port, to_port } => {
            body.push(VSOCK_TLV);
            body.extend(12_u16.to_be_bytes());
            for number in [cid, port, to_port] {
                body.extend(number.to_be_bytes());
            }
            (PROXY, UNSPEC)
        }
        Source::Ip(source) => (PROXY, addresses(source, destination, &mut body)),
    };
    let mut header = Vec::with_capacity(16 + body.len());
    header.extend(SIGNATURE);
    header.extend([VERSION_2 | command, family]);
    header.extend((body.len() as u16).to_be_bytes());
    header.extend(body);
    header
}

/// Appends the block of addresses and returns its family: INET if both are IPv4, otherwise INET6 with
/// IPv4 addresses mapped.
fn addresses(source: SocketAddr, destination: Option<SocketAddr>, to: &mut Vec<u8>) -> u8 {
    let from = source.ip().to_canonical();
    let unspecified = match from {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
    };
    let at = destination.map_or(unspecified, |address| address.ip().to_canonical());
    let family = match (from, at) {
        (IpAddr::V4(from), IpAddr::V4(at)) => {
            to.extend(from.octets());
            to.extend(at.octets());
            INET_STREAM
        }
        _ => {
            to.extend(as_ipv6(from).octets());
            to.extend(as_ipv6(at).octets());
            INET6_STREAM
        }
    };
    to.extend(source.port().to_be_bytes());
    to.extend(
        destination
            .map_or(0, |address| address.port())
            .to_be_bytes(),
    );
    family
}

fn as_ipv6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

#[cfg(test)]
#[path = "proxy_protocol_tests.rs"]
mod tests;
