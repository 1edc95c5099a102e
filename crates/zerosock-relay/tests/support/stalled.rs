//! Listeners that let nobody connect: their backlog is full, so that Linux drops further SYNs.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept, bind, connect, listen,
    socket_with,
};

/// A TCP listener whose backlog is full.
pub struct StalledTcp {
    pub listener: OwnedFd,
    pub queued: Vec<OwnedFd>,
}

fn socket(family: AddressFamily, kind: SocketType) -> OwnedFd {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    socket_with(family, kind, flags, None).unwrap()
}

/// Fills the backlog of a listener on `address`; an error if the address is taken.
pub fn tcp(address: SocketAddr) -> io::Result<StalledTcp> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let listener = socket(family, SocketType::STREAM);
    bind(&listener, &address)?;
    listen(&listener, 0)?;
    let mut queued = Vec::new();
    loop {
        let client = socket(family, SocketType::STREAM);
        match connect(&client, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        // Over loopback a connection that fits into the backlog is made within the call of connect; the
        // time is for a kernel that finishes it elsewhere.
        let mut events = [PollFd::new(&client, PollFlags::OUT)];
        let time = Timespec::try_from(Duration::from_millis(100)).unwrap();
        let connected = poll(&mut events, Some(&time)).unwrap() > 0;
        if !connected {
            return Ok(StalledTcp { listener, queued });
        }
        queued.push(client);
        assert!(queued.len() < 100, "the backlog is never full");
    }
}

/// A Unix listener whose backlog is full.
pub struct StalledUnix {
    listener: OwnedFd,
    queued: Vec<OwnedFd>,
}

pub fn unix(path: &std::path::Path, kind: SocketType) -> StalledUnix {
    let address = SocketAddrUnix::new(path).unwrap();
    let listener = socket(AddressFamily::UNIX, kind);
    bind(&listener, &address).unwrap();
    listen(&listener, 0).unwrap();
    let mut queued = Vec::new();
    loop {
        let client = socket(AddressFamily::UNIX, kind);
        match connect(&client, &address) {
            Ok(()) => queued.push(client),
            Err(Errno::AGAIN) => return StalledUnix { listener, queued },
            Err(error) => panic!("{error}"),
        }
    }
}

impl StalledUnix {
    /// Accepts one connection, so that another one fits.
    pub fn accept(&self) -> OwnedFd {
        accept(&self.listener).unwrap()
    }
}
