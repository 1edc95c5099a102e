//! Notices when interfaces change, come and go.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};

/// RTMGRP_LINK.
const LINKS: u32 = 1;

/// A descriptor that becomes readable when an interface in the network namespace of the thread that made it
/// changes: it is removed, goes up or down. An AF_XDP socket itself is not reported as readable then.
#[derive(Debug)]
pub struct LinkWatch(OwnedFd);

impl LinkWatch {
    /// Begins to watch. Needs no capability.
    ///
    /// # Errors
    /// Errors of socket(2) and bind(2).
    pub fn new() -> io::Result<LinkWatch> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        bind(&socket, &SocketAddrNetlink::new(0, LINKS))?;
        Ok(LinkWatch(socket))
    }

    /// Whether an interface has changed since the last call. What has changed is for the caller to find out.
    pub fn changed(&self) -> bool {
        let mut changed = false;
        // Several times if the kernel had no room for all messages (ENOBUFS), which is a change as well.
        while !matches!(
            recv(&self.0, &mut [0; 8][..], RecvFlags::DONTWAIT),
            Err(rustix::io::Errno::AGAIN)
        ) {
            changed = true;
        }
        changed
    }
}

impl AsFd for LinkWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
