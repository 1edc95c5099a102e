//! PROXY protocol version 2: the header that tells a target where a relayed connection came from.

use std::net::SocketAddr;

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
    /// A client of a TCP listener, and the address that it connected to if the caller of [`header`]
    /// gives no other.
    Ip(SocketAddr),
    /// A Unix socket, which has no address worth sending.
    Local,
}

/// The header for a connection from `source`. `destination` is the address that an IP client connected
/// to.
pub fn header(_source: Source, _destination: Option<SocketAddr>) -> Vec<u8> {
    unimplemented!()
}
