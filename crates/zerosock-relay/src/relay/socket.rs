//! A socket of a pair: its kind, and how it ends.
//!
//! # Invariants
//! - Every socket is non-blocking.
//! - No call here waits for a peer. Closing a Unix socket into which a peer can queue descriptors may
//!   wait, so the reaper closes those; where the kernel can refuse descriptors (Linux 6.16), it does.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, sockopt};
use zerosock_sys::mmsg::{Batch, KernelAddress, coalesce_datagrams};
use zerosock_sys::{PeerFd, fd_passing, reaper};

use crate::connector::RIGHTS;

/// What a socket is, as far as moving its bytes depends on it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum SocketKind {
    Tcp,
    /// A Unix stream socket.
    Unix,
    /// A stream of the kernel's AF_VSOCK.
    Vsock,
    Udp,
    /// SOCK_SEQPACKET.
    UnixPackets,
    UnixDatagrams,
}

impl SocketKind {
    /// Whether the socket keeps the bounds of messages.
    pub(super) fn keeps_messages(self) -> bool {
        matches!(
            self,
            SocketKind::Udp | SocketKind::UnixPackets | SocketKind::UnixDatagrams
        )
    }

    /// Whether splice(2) avoids a copy. The kernel would accept vsock sockets, and copy.
    pub(super) fn can_splice(self) -> bool {
        matches!(self, SocketKind::Tcp | SocketKind::Unix)
    }

    /// Whether the socket has a peer that ends: not so for datagrams.
    pub(super) fn has_end(self) -> bool {
        !matches!(self, SocketKind::Udp | SocketKind::UnixDatagrams)
    }

    /// Whether a socket that takes no message now will say when it does, soon and without loss. UDP
    /// loses datagrams anyway.
    pub(super) fn has_room_events(self) -> bool {
        matches!(self, SocketKind::UnixPackets | SocketKind::UnixDatagrams)
    }

    pub(super) fn is_unix(self) -> bool {
        matches!(
            self,
            SocketKind::Unix | SocketKind::UnixPackets | SocketKind::UnixDatagrams
        )
    }
}

/// A socket.
#[derive(Debug)]
pub(super) struct Socket {
    /// `None` only for a socket that does not exist yet, and during drop.
    fd: Option<OwnedFd>,
    kind: SocketKind,
    /// A peer can send descriptors.
    carries_rights: bool,
    /// Datagrams come many at once: see [`Socket::coalesce`].
    coalesces: bool,
}

impl Socket {
    /// The socket, of which it is known whether it refuses descriptors.
    pub(super) fn new(fd: OwnedFd, kind: SocketKind, refuses_rights: bool) -> Socket {
        let carries_rights = kind.is_unix() && !refuses_rights;
        if carries_rights && kind == SocketKind::Unix {
            // An out-of-band byte would be skipped, and its descriptors closed by this thread. The option
            // fails for no Unix socket.
            let _ = fd_passing::receive_urgent_inline(&fd);
        }
        Socket {
            fd: Some(fd),
            kind,
            carries_rights,
            coalesces: false,
        }
    }

    /// A socket that was made here: it is made to refuse descriptors if the kernel can do that.
    pub(super) fn refusing_rights(fd: PeerFd, kind: SocketKind) -> io::Result<Socket> {
        let refuses = !kind.is_unix() || fd_passing::refuse_rights(&fd)?;
        Ok(Socket::new(fd.into_trusted(), kind, refuses))
    }

    /// The place of a socket that is not connected yet.
    pub(super) fn absent(kind: SocketKind) -> Socket {
        Socket {
            fd: None,
            kind,
            carries_rights: false,
            coalesces: false,
        }
    }

    pub(super) fn kind(&self) -> SocketKind {
        self.kind
    }

    pub(super) fn is_absent(&self) -> bool {
        self.fd.is_none()
    }

    /// Takes the descriptor away, for a [`Joined`](super::joined::Joined) pair.
    pub(super) fn take(&mut self) -> Option<OwnedFd> {
        self.fd.take()
    }

    /// The opposite of [`take`](Self::take).
    pub(super) fn put(&mut self, fd: OwnedFd) {
        self.fd = Some(fd);
    }

    /// Whether a receive must have room for descriptors.
    pub(super) fn carries_rights(&self) -> bool {
        self.carries_rights
    }

    /// The descriptor.
    ///
    /// # Errors
    /// ENOTCONN for a socket that does not exist yet.
    #[inline]
    pub(super) fn fd(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.fd.as_ref().map(AsFd::as_fd).ok_or(Errno::NOTCONN)
    }

    /// Receives bytes of a stream; 0 at its end.
    #[inline]
    pub(super) fn receive(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        if self.carries_rights {
            return self.receive_and_rights(buffer);
        }
        loop {
            match rustix::net::recv(self.fd()?, &mut *buffer, RecvFlags::empty()) {
                Ok((got, _)) => return Ok(got),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// As [`receive`](Self::receive), and the reaper closes the descriptors that a peer has sent.
    #[cold]
    fn receive_and_rights(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        let mut rights = Vec::new();
        let received = fd_passing::recv(self.fd()?, buffer, &mut rights);
        for fd in rights {
            drop(fd.owned_by(&RIGHTS));
        }
        match received {
            Ok(received) => Ok(received.bytes),
            Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
        }
    }

    /// Receives messages, at most `most`; the reaper closes the descriptors that peers have sent.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is there; otherwise errors of recvmmsg(2) and recvmsg(2).
    pub(super) fn receive_batch(&self, batch: &mut Batch, most: usize) -> io::Result<usize> {
        if self.coalesces {
            return batch.receive_coalesced(self.fd()?, most);
        }
        if !self.carries_rights {
            return batch.receive(self.fd()?, most);
        }
        let mut rights = Vec::new();
        let received = batch.receive_with_rights(self.fd()?, &mut rights);
        for fd in rights {
            drop(fd.owned_by(&RIGHTS));
        }
        received
    }

    /// Sends a run of messages, to `to` or to the socket's peer; returns how many the socket took.
    ///
    /// # Errors
    /// `WouldBlock` when it takes none now; otherwise errors of sendmmsg(2) for the first message.
    pub(super) fn send_batch(
        &self,
        batch: &Batch,
        messages: Range<usize>,
        to: Option<&KernelAddress>,
    ) -> io::Result<usize> {
        match self.kind {
            SocketKind::Udp => batch.send_coalesced(self.fd()?, messages, to),
            _ => batch.send(self.fd()?, messages, to),
        }
    }

    /// Has the kernel pass many datagrams at once to [`receive_batch`](Self::receive_batch). Not for
    /// sockets that a BPF program redirects from: it would pass them on as one datagram.
    pub(super) fn coalesce(&mut self) {
        if self.kind == SocketKind::Udp
            && let Ok(fd) = self.fd()
        {
            // A kernel before 5.0 cannot do it.
            self.coalesces = coalesce_datagrams(fd).is_ok();
        }
    }

    /// Sends bytes, or one message; returns how many bytes the socket took.
    #[inline]
    pub(super) fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        loop {
            match rustix::net::send(self.fd()?, bytes, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                result => return result,
            }
        }
    }

    /// Tells the peer that no more bytes follow.
    pub(super) fn finish_sending(&self) {
        if let Ok(fd) = self.fd()
            && self.kind.has_end()
        {
            // An error means that the peer is gone, which the next read shows.
            let _ = rustix::net::shutdown(fd, Shutdown::Write);
        }
    }

    /// The pending error of the socket.
    pub(super) fn take_error(&self) -> Option<Errno> {
        match sockopt::socket_error(self.fd().ok()?) {
            Ok(Ok(())) => None,
            Ok(Err(errno)) | Err(errno) => Some(errno),
        }
    }

    /// Makes the close of a TCP socket a reset: the peer must not take what it has received for
    /// everything.
    pub(super) fn reset_on_close(&self) {
        if self.kind == SocketKind::Tcp
            && let Ok(fd) = self.fd()
        {
            let _ = sockopt::set_socket_linger(fd, Some(Duration::ZERO));
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.carries_rights
            && let Some(fd) = self.fd.take()
        {
            reaper::close(fd, Some(RIGHTS.take_nothing()));
        }
    }
}
