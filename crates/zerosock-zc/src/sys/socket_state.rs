//! The state of a socket that the back-ends share.

use std::os::fd::OwnedFd;

use super::places::Places;
use super::requests::Requests;
use super::{SendMode, SocketKind};

/// The longest request, in bytes; the kernel takes no more in one call (MAX_RW_COUNT).
const MAX_REQUEST_LEN: usize = 0x7fff_f000;
/// The longest packet of vsock, in bytes (VIRTIO_VSOCK_MAX_PKT_BUF_SIZE). If vsock splits a request
/// into several packets, only the last one holds the notification: if the kernel has no memory for
/// it, the others are sent, and no notification says when they have been read.
const MAX_VSOCK_PACKET: usize = 64 << 10;

/// The socket, its places and its requests.
pub(super) struct SocketState<B> {
    pub(super) socket: OwnedFd,
    pub(super) places: Places<B>,
    pub(super) requests: Requests,
    pub(super) kind: SocketKind,
    /// Number of system calls to send, to poll and to wait.
    pub(super) system_calls: u64,
    /// Number of messages of the error queue that were no notifications.
    pub(super) foreign: u64,
}

impl<B> SocketState<B> {
    /// Length of the longest request, in bytes.
    pub(super) fn longest(&self, mode: SendMode) -> usize {
        match self.kind {
            SocketKind::VsockStream if mode == SendMode::ZeroCopy => MAX_VSOCK_PACKET,
            _ => MAX_REQUEST_LEN,
        }
    }

    /// Whether a request can consist of several places. vsock copies a zero-copy request with more
    /// pages than one packet holds, so each place is a request of its own.
    pub(super) fn gathers(&self, mode: SendMode) -> bool {
        self.kind.is_tcp() || self.kind.is_stream() && mode == SendMode::Copy
    }
}
