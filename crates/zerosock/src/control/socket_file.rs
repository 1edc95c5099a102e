//! The listening sockets of hosts and processes, made by [`zerosock_sys::socket_file`].

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Gid, Mode};
use rustix::net::SocketType;
use zerosock_sys::socket_file::{self, SocketFileOptions};

pub(crate) use zerosock_sys::socket_file::SocketFile;

/// Binds a listener at `path`, with this mode; `None`: 0600, or 0660 with a group. Replaces a socket file
/// that no process listens on. Never blocks.
///
/// # Errors
/// `AddrInUse` if a process listens there, or if the file is not a socket.
pub(crate) fn bind(
    path: &Path,
    kind: SocketKind,
    mode: Option<u32>,
    group: Option<u32>,
) -> io::Result<(OwnedFd, SocketFile)> {
    let options = SocketFileOptions {
        kind: match kind {
            SocketKind::Frontend | SocketKind::Program => SocketType::STREAM,
            SocketKind::Packets => SocketType::SEQPACKET,
        },
        mode: mode.map(Mode::from_raw_mode),
        gid: group.map(Gid::from_raw),
        backlog: BACKLOG,
        refuse_rights: !matches!(kind, SocketKind::Frontend),
        reserved: true,
        lock_wait: Duration::ZERO,
    };
    Ok(socket_file::bind(path, options)?)
}

/// The protocol of a listening socket.
#[derive(Copy, Clone, Debug)]
pub(crate) enum SocketKind {
    /// vhost-user messages, with descriptors.
    Frontend,
    /// Connections of the hybrid vsock convention.
    Program,
    /// Requests to attach (SOCK_SEQPACKET).
    Packets,
}

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

#[cfg(test)]
#[path = "socket_file_tests.rs"]
mod tests;
