//! File descriptors over Unix sockets (SCM_RIGHTS, unix(7)).
//!
//! If descriptors arrive and are not received, the kernel closes them in the thread that receives
//! the bytes or closes the socket, and that close can wait for objects of the sender. So a socket
//! either [refuses](refuse_rights) descriptors, or [`recv`] receives from it with room for as many
//! as a message can have, and the [reaper](crate::reaper) closes it. A process without free
//! descriptor numbers loses this protection: the kernel then closes descriptors that it cannot
//! install. Callers keep [`RESERVE`] numbers free, or
//! [reserve](crate::account::Account::reserve_message) them for each message.
//!
//! An out-of-band byte (MSG_OOB, since Linux 5.15) can have descriptors too. An ordinary receive
//! call skips that byte, and the kernel closes its descriptors there. So a stream socket on which
//! descriptors can arrive [receives such bytes in order](receive_urgent_inline).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::LazyLock;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrAny, SocketType,
    getpeername, recvmsg, sendmsg, shutdown, sockopt,
};

pub use crate::account::MAX_FDS;
use crate::account::ReservedNumbers;
use crate::peer_fd::PeerFd;
use crate::socket_option;

/// Number of descriptor numbers that a process must keep free to receive descriptors.
pub const RESERVE: u64 = MAX_FDS as u64 + 1;

/// SO_PASSRIGHTS of linux/socket.h, since Linux 6.16.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Environment variable that makes a debug build behave as on a kernel without SO_PASSRIGHTS, for
/// tests. Any value sets it. It is read once, when the option is first needed.
pub const WITHOUT_PASSRIGHTS: &str = "ZEROSOCK_WITHOUT_PASSRIGHTS";

/// Whether this build reads [`WITHOUT_PASSRIGHTS`]. A release build does not: what starts a service
/// must not be able to take a protection of the kernel from it, though what remains is what protects
/// it on Linux before 6.16.
pub const READS_WITHOUT_PASSRIGHTS: bool = cfg!(debug_assertions);

/// Whether SO_PASSRIGHTS is used where the kernel has it.
static USE_PASSRIGHTS: LazyLock<bool> =
    LazyLock::new(|| !READS_WITHOUT_PASSRIGHTS || std::env::var_os(WITHOUT_PASSRIGHTS).is_none());

/// Makes the kernel refuse descriptors that are sent to this Unix socket: sendmsg(2) fails with
/// EPERM. On a listener before listen(2), it holds for all connections, also before they are
/// accepted. Returns whether the kernel can do that, and [`WITHOUT_PASSRIGHTS`] does not prevent it.
///
/// # Errors
/// Errors of setsockopt(2), except ENOPROTOOPT.
pub fn refuse_rights(fd: impl AsFd) -> io::Result<bool> {
    if !*USE_PASSRIGHTS {
        return Ok(false);
    }
    match socket_option::set_int(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, 0) {
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(false),
        result => result.map(|()| true),
    }
}

/// Makes ordinary receive calls return out-of-band bytes in their place, with their descriptors.
/// Call it before the first receive call. It changes nothing for other kinds of sockets.
///
/// # Errors
/// Errors of setsockopt(2).
pub fn receive_urgent_inline(fd: impl AsFd) -> io::Result<()> {
    Ok(sockopt::set_socket_oobinline(fd, true)?)
}

/// Shuts down the receive side of a descriptor that a peer has sent, if it is a connected Unix
/// stream socket with an unnamed other end and an empty receive queue. Returns false for any other
/// descriptor. None of the calls waits for the peer.
///
/// The receive queue can be empty of bytes and still have descriptors: those of an out-of-band byte
/// that was received. So both are checked.
///
/// Afterwards nothing can be queued in the socket, so it holds no object of the peer, such as the
/// peer's end of another connection. The peer's end of a connection to a listener is refused,
/// because its other end has the name of the listener.
pub fn make_send_only(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    let is_unix = sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX);
    if !is_unix || sockopt::socket_type(fd) != Ok(SocketType::STREAM) {
        return false;
    }
    // An unnamed address consists of the family only.
    let is_empty = |name: SocketAddrAny| name.addr_len() as usize <= size_of::<libc::sa_family_t>();
    let unnamed = getpeername(fd).is_ok_and(|name| name.is_none_or(is_empty));
    // Bytes queued before the shutdown stay queued; later ones are refused.
    unnamed
        && shutdown(fd, Shutdown::Read).is_ok()
        && rustix::io::ioctl_fionread(fd).is_ok_and(|bytes| bytes == 0)
        && has_no_queued_rights(fd)
}

/// Whether no descriptors wait in the receive queue of a Unix socket, as the kernel reports since
/// Linux 5.8 (proc(5), fdinfo).
fn has_no_queued_rights(fd: BorrowedFd<'_>) -> bool {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()));
    let count = |info: &str| {
        let mut lines = info.lines();
        let count = lines.find_map(|line| line.strip_prefix("scm_fds:"))?;
        count.trim().parse::<u32>().ok()
    };
    info.is_ok_and(|info| count(&info) == Some(0))
}

/// Whether a Unix socket refuses descriptors. An accepted socket inherits this from its listener.
/// Always false if [`WITHOUT_PASSRIGHTS`] is set and read.
pub fn refuses_rights(fd: impl AsFd) -> bool {
    let on = || socket_option::get_int(fd, libc::SOL_SOCKET, SO_PASSRIGHTS);
    *USE_PASSRIGHTS && on().is_ok_and(|on| on == 0)
}

/// The result of [`recv`].
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct ReceivedRights {
    /// Bytes written to the buffer; 0 at end of file.
    pub bytes: usize,
    /// More descriptors arrived than this process may open. The kernel has closed the others.
    pub truncated_fds: bool,
}

/// Sends bytes with descriptors in one sendmsg(2). Does not block and raises no SIGPIPE. Returns
/// the number of bytes sent; the descriptors are attached to the first of them.
///
/// # Errors
/// `WouldBlock` when the socket is full, `InvalidInput` for more than [`MAX_FDS`], otherwise
/// errors of sendmsg(2).
pub fn send(fd: impl AsFd, data: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if fds.len() > MAX_FDS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "{} descriptors in one message: at most {MAX_FDS} are possible",
                fds.len()
            ),
        ));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        match sendmsg(&fd, data, &mut control, flags) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

/// Receives bytes and up to [`MAX_FDS`] descriptors, the most that a message can have, with one
/// recvmsg(2). Does not block. The descriptors are close-on-exec and are appended to `fds`.
///
/// # Errors
/// `WouldBlock` when nothing is there, otherwise errors of recvmsg(2).
pub fn recv(fd: impl AsFd, buf: &mut [u8], fds: &mut Vec<PeerFd>) -> io::Result<ReceivedRights> {
    let (message, _) = recv_from(fd, buf, fds)?;
    Ok(message.rights())
}

/// As [`recv`], and the bytes stay in the socket; it has a duplicate of each descriptor. Begins at
/// the [offset](set_peek_offset), and adds to it.
///
/// If no descriptors belong to the bytes, those of later bytes may be returned: Linux goes on to the
/// next buffer of a stream when it has filled the caller's.
///
/// # Errors
/// As [`recv`].
pub fn peek(fd: impl AsFd, buf: &mut [u8], fds: &mut Vec<PeerFd>) -> io::Result<ReceivedRights> {
    let (message, _) = recv_with(fd, buf, fds, RecvFlags::PEEK)?;
    Ok(message.rights())
}

/// Sets where in the receive queue of a Unix stream socket the next [`peek`] begins (SO_PEEK_OFF,
/// socket(7)). The kernel keeps the offset with the socket, adds what is peeked to it, and subtracts
/// what is received, down to zero.
///
/// # Errors
/// Errors of setsockopt(2).
pub fn set_peek_offset(fd: impl AsFd, offset: u32) -> io::Result<()> {
    let offset = libc::c_int::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    socket_option::set_int(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF, offset)
}

/// How many bytes of a Unix stream socket were peeked and not received since
/// [`set_peek_offset`] with zero; zero if that was never called.
///
/// # Errors
/// Errors of getsockopt(2).
pub fn peek_offset(fd: impl AsFd) -> io::Result<usize> {
    let offset = socket_option::get_int(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF)?;
    Ok(usize::try_from(offset).unwrap_or_default())
}

/// One message, as [`recv_from`] returns it.
pub(crate) struct Message {
    pub(crate) bytes: usize,
    /// The message was longer than the buffer, and its end is lost.
    pub(crate) truncated: bool,
    truncated_fds: bool,
}

impl Message {
    fn rights(&self) -> ReceivedRights {
        ReceivedRights {
            bytes: self.bytes,
            truncated_fds: self.truncated_fds,
        }
    }
}

/// As [`recv`], with the address of the sender.
pub(crate) fn recv_from(
    fd: impl AsFd,
    buf: &mut [u8],
    fds: &mut Vec<PeerFd>,
) -> io::Result<(Message, Option<SocketAddrAny>)> {
    recv_with(fd, buf, fds, RecvFlags::empty())
}

fn recv_with(
    fd: impl AsFd,
    buf: &mut [u8],
    fds: &mut Vec<PeerFd>,
    more: RecvFlags,
) -> io::Result<(Message, Option<SocketAddrAny>)> {
    let mut space =
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS), ScmCredentials(1))];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC | more;
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message = match recvmsg(&fd, &mut [IoSliceMut::new(buf)], &mut control, flags) {
            Err(rustix::io::Errno::INTR) => continue,
            result => result?,
        };
        for message in control.drain() {
            // Sockets receive other kinds only if they request them.
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights.map(PeerFd::from));
            }
        }
        let received = Message {
            bytes: message.bytes,
            truncated: message.flags.contains(ReturnFlags::TRUNC),
            truncated_fds: message.flags.contains(ReturnFlags::CTRUNC),
        };
        return Ok((received, message.address));
    }
}

/// As [`recv`], and the descriptors belong to the peer that the socket [belongs](PeerFd::account)
/// to.
///
/// # Errors
/// As [`recv`]. `ConnectionReset` if the peers have too few descriptor numbers left
/// ([`Account::reserve_message`](crate::account::Account::reserve_message)).
pub fn recv_owned(
    socket: &PeerFd,
    buf: &mut [u8],
    fds: &mut Vec<PeerFd>,
) -> io::Result<ReceivedRights> {
    let _reserved = reserve_numbers(socket)?;
    let mut received = Vec::new();
    let result = recv(socket, buf, &mut received);
    fds.extend(received.into_iter().map(|fd| match socket.account() {
        Some(account) => fd.owned_by(account),
        None => fd,
    }));
    result
}

/// Reserves numbers for the descriptors of a message, if the socket belongs to a peer.
pub(crate) fn reserve_numbers(socket: &PeerFd) -> io::Result<Option<ReservedNumbers>> {
    let Some(account) = socket.account() else {
        return Ok(None);
    };
    let reserved = account.reserve_message();
    reserved
        .ok_or_else(|| io::ErrorKind::ConnectionReset.into())
        .map(Some)
}

#[cfg(test)]
#[path = "fd_passing_tests.rs"]
mod tests;
