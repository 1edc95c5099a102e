//! The SOCK_SEQPACKET pair that carries the messages (unix(7)).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, Result, retry_on_intr};
use rustix::net::{self, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::message::{MAX_DATAGRAM, MAX_FDS};

/// Most descriptors that the kernel lets a message have (SCM_MAX_FD). With room for all of them the kernel
/// closes none, which could wait.
const KERNEL_MAX_FDS: usize = 253;

/// Both ends, with send buffers that take the longest message.
pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (a, b) = net::socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
    net::sockopt::set_socket_send_buffer_size(&a, 2 * MAX_DATAGRAM)?;
    net::sockopt::set_socket_send_buffer_size(&b, 2 * MAX_DATAGRAM)?;
    Ok((a, b))
}

/// Sends one message.
pub(crate) fn send(
    socket: impl AsFd,
    datagram: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = net::SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(net::SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let (data, flags) = ([IoSlice::new(datagram)], flags | SendFlags::NOSIGNAL);
    retry_on_intr(|| net::sendmsg(&socket, &data, &mut control, flags)).map(|_| ())
}

/// Receives one message, and returns its length, which is 0 at end of file. `fds` gets its descriptors,
/// close-on-exec. The error for a message that is longer than the buffer, or has more descriptors than
/// this process can have, is MSGSIZE.
pub(crate) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    flags: RecvFlags,
) -> Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNEL_MAX_FDS))];
    let mut control = net::RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let message = loop {
        match net::recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            // CONNRESET: the other process ended with unread messages. What it sent is still to come.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            result => break result?,
        }
    };
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    let truncated = message
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    if truncated {
        Err(Errno::MSGSIZE)
    } else {
        Ok(message.bytes)
    }
}
