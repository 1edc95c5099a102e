//! Forwarding to the machine's own AF_VSOCK, for a daemon in a virtual machine with a host that
//! serves the nested guest, or for use with `vsock_loopback`.
//!
//! A guest's connection to port P of CID 2 becomes one to port P of the configured CID; a
//! connection to one of the listed ports here becomes one to the same port of the guest.

use super::{Attempt, HostSocket};
use rustix::fd::OwnedFd;
use std::io;
use zerosock_proto::Port;
use zerosock_sys::account::Account;
use zerosock_sys::vsock;

/// Connects to `port` of `cid`.
pub(crate) fn connect(cid: u32, port: Port, account: &Account) -> Attempt {
    let permit = match account.take_descriptors(1) {
        Ok(permit) => permit,
        Err(e) => return Attempt::Refused(io::Error::other(e)),
    };
    match vsock::connect(cid, port.get()) {
        Ok(socket) => Attempt::InProgress(HostSocket::vsock(socket, permit)),
        Err(e) => Attempt::Refused(e),
    }
}

/// Listens on `port` for connections from any CID.
pub(crate) fn listen(port: u32) -> io::Result<OwnedFd> {
    const ANY: u32 = u32::MAX;
    vsock::listen(ANY, port, 128)
}
