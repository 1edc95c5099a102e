//! Moves bytes between a socket or file and guest memory, without an intermediate buffer.

use std::io;
use std::mem::{MaybeUninit, align_of, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use zerosock_ring::GuestSlice;

use crate::account::Account;
use crate::fd_passing::{MAX_FDS, reserve_numbers};
use crate::peer_fd::PeerFd;

/// The most slices that one call uses (UIO_MAXIOV); later slices are left for the next call.
pub const MAX_SLICES: usize = 1024;

// A slice of `GuestSlice` is handed to the kernel as an array of `struct iovec`. The order of the
// fields, pointer then length, is checked by a test: both are words.
const _: () = assert!(size_of::<GuestSlice<'_>>() == size_of::<libc::iovec>());
const _: () = assert!(align_of::<GuestSlice<'_>>() == align_of::<libc::iovec>());

/// Sends from guest memory with one sendmsg(2). Does not block and raises no SIGPIPE. Returns the
/// number of bytes that the socket took, possibly fewer than there are.
///
/// # Errors
/// `WouldBlock` when it takes none now. EFAULT (`raw_os_error`) when the memory has vanished:
/// the kernel reports this instead of raising SIGBUS. Otherwise errors of sendmsg(2).
pub fn send_slices(fd: BorrowedFd<'_>, slices: &[GuestSlice<'_>]) -> io::Result<usize> {
    send_with(fd, slices, 0)
}

/// As [`send_slices`], with MSG_ZEROCOPY: the kernel pins the pages and may read them until it reports
/// the send in the error queue of the socket. Bytes that change until then are sent changed.
///
/// # Errors
/// As [`send_slices`]. ENOBUFS (`raw_os_error`) when the process may lock no more memory, or too many
/// sends of the socket are unreported.
pub fn send_slices_zero_copy(fd: BorrowedFd<'_>, slices: &[GuestSlice<'_>]) -> io::Result<usize> {
    send_with(fd, slices, libc::MSG_ZEROCOPY)
}

fn send_with(
    fd: BorrowedFd<'_>,
    slices: &[GuestSlice<'_>],
    flags: libc::c_int,
) -> io::Result<usize> {
    let flags = flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    let message = message(slices);
    loop {
        // SAFETY: `message` names the first `min(len, MAX_SLICES)` elements of `slices`, which
        // have the layout of `struct iovec` (asserted above), and outlives the call. Each names
        // mapped memory for as long as the `GuestSlice` borrow lasts, thus during the call. The
        // kernel only reads there; others may write meanwhile, which the kernel's copy tolerates
        // and which no Rust reference sees, as none is formed. With MSG_ZEROCOPY it reads later
        // too, from pages that it has pinned, whether or not they are still mapped.
        let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &message, flags) };
        if let Some(result) = outcome(sent) {
            return result;
        }
    }
}

/// The result of [`recv_slices`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReceivedBytes {
    /// Number of bytes; 0 at end of file, and also when the slices have no room.
    pub bytes: usize,
    /// Control data was received and dropped: on a Unix socket a passed descriptor. A read stops
    /// after it although there may be more bytes.
    pub cut: bool,
}

/// Receives into guest memory with one recvmsg(2). Does not block.
///
/// # Errors
/// `WouldBlock` when nothing is there. EFAULT (`raw_os_error`) when the memory has vanished.
/// Otherwise errors of recvmsg(2).
pub fn recv_slices(fd: BorrowedFd<'_>, slices: &[GuestSlice<'_>]) -> io::Result<ReceivedBytes> {
    recv_with(fd, slices, 0)
}

fn recv_with(
    fd: BorrowedFd<'_>,
    slices: &[GuestSlice<'_>],
    flags: libc::c_int,
) -> io::Result<ReceivedBytes> {
    let flags = flags | libc::MSG_DONTWAIT;
    let mut message = message(slices);
    loop {
        // SAFETY: as in `send_slices`, but the kernel writes, whatever the flags: a `GuestSlice`
        // stands for memory mapped writable and shared, to which no Rust reference exists,
        // so that bytes may change there at any time. `message` has no room for an address
        // or control data, so nothing but the slices and `message` itself is written.
        let received = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message, flags) };
        if let Some(result) = outcome(received) {
            let cut = message.msg_flags & libc::MSG_CTRUNC != 0;
            return result.map(|bytes| ReceivedBytes { bytes, cut });
        }
    }
}

/// As [`recv_slices`], for a Unix socket on which a peer may send descriptors. It receives them and
/// the [reaper](crate::reaper) closes them: a close can wait, and without room for the descriptors
/// the kernel would close them in this thread.
///
/// # Errors
/// As [`recv_slices`]. `ConnectionReset` if the peers have too few descriptor numbers left
/// ([`Account::reserve_message`]).
pub fn recv_slices_and_rights(fd: &PeerFd, slices: &[GuestSlice<'_>]) -> io::Result<ReceivedBytes> {
    // SAFETY: a length computed from a constant.
    const RIGHTS: usize =
        unsafe { libc::CMSG_SPACE((MAX_FDS * size_of::<RawFd>()) as u32) as usize };
    // With SO_PASSCRED the sender's credentials come first.
    // SAFETY: as above.
    const SPACE: usize =
        RIGHTS + unsafe { libc::CMSG_SPACE(size_of::<libc::ucred>() as u32) as usize };
    #[repr(align(8))]
    struct Control(MaybeUninit<[u8; SPACE]>);
    const _: () = assert!(align_of::<Control>() >= align_of::<libc::cmsghdr>());
    let _reserved = reserve_numbers(fd)?;
    let mut control = Control(MaybeUninit::uninit());
    let mut message = message(slices);
    loop {
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = SPACE as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: as in `recv_slices`, and `control` has room for the SPACE bytes that are named.
        let received = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message, flags) };
        let Some(result) = outcome(received) else {
            continue;
        };
        let bytes = result?;
        let rights = close_rights(&message, fd.account());
        let cut = rights || message.msg_flags & libc::MSG_CTRUNC != 0;
        return Ok(ReceivedBytes { bytes, cut });
    }
}

/// As [`recv_slices_and_rights`], for a socket of type SOCK_SEQPACKET.
///
/// A packet that is received into memory that has vanished is freed by this thread, with its
/// descriptors. So it is copied first and taken from the socket by a second call.
///
/// # Errors
/// As [`recv_slices`]; with EFAULT the packet stays in the socket.
pub fn recv_packet_and_rights(fd: &PeerFd, slices: &[GuestSlice<'_>]) -> io::Result<ReceivedBytes> {
    let bytes = recv_with(fd.as_fd(), slices, libc::MSG_PEEK)?.bytes;
    let cut = recv_slices_and_rights(fd, &[])?.cut;
    Ok(ReceivedBytes { bytes, cut })
}

/// Hands the descriptors of a received message to the reaper, for the account of its peer. Returns
/// whether there were any.
fn close_rights(message: &libc::msghdr, account: Option<&Account>) -> bool {
    let mut any = false;
    // SAFETY: the kernel has filled in the control data and stored its length in `message`; the
    // macros stay inside that.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: `header` points to an aligned header that the kernel has written.
        let &libc::cmsghdr {
            cmsg_level,
            cmsg_type,
            cmsg_len,
            ..
        } = unsafe { &*header };
        if (cmsg_level, cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: a computation.
            let head = unsafe { libc::CMSG_LEN(0) } as usize;
            // SAFETY: as for `header`.
            let data = unsafe { libc::CMSG_DATA(header) }.cast::<RawFd>();
            for index in 0..(cmsg_len - head) / size_of::<RawFd>() {
                // SAFETY: within the data of this header, which need not be aligned.
                let number = unsafe { data.add(index).read_unaligned() };
                // SAFETY: the kernel has just installed this descriptor; nothing else owns it.
                let fd = unsafe { OwnedFd::from_raw_fd(number) };
                let fd = PeerFd::from(fd);
                drop(match account {
                    Some(account) => fd.owned_by(account),
                    None => fd,
                });
                any = true;
            }
        }
        // SAFETY: as for the first.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    any
}

/// Reads from a file, pipe or socket into shared memory with one readv(2). Blocks if `fd` does.
///
/// # Errors
/// EFAULT (`raw_os_error`) when the memory has vanished. Otherwise errors of readv(2).
pub fn read_slices(fd: BorrowedFd<'_>, slices: &[GuestSlice<'_>]) -> io::Result<usize> {
    let (first, count) = vectors(slices);
    loop {
        // SAFETY: `first` and `count` name elements of `slices`, which have the layout of `struct
        // iovec` (asserted above). Each names memory that is mapped writable and shared, to which
        // no Rust reference exists, for as long as the `GuestSlice` borrow lasts.
        let read = unsafe { libc::readv(fd.as_raw_fd(), first, count) };
        if let Some(result) = outcome(read) {
            return result;
        }
    }
}

/// As [`read_slices`], but never blocks: uses preadv2(2) with RWF_NOWAIT, or recvmsg(2) where the
/// kernel does not support that for sockets (before Linux 6.5).
///
/// # Errors
/// `WouldBlock` when nothing is there, or a file must be read from its disk. `Unsupported` when a
/// read could block. Otherwise as [`read_slices`].
pub fn read_slices_now(fd: BorrowedFd<'_>, slices: &[GuestSlice<'_>]) -> io::Result<usize> {
    let (first, count) = vectors(slices);
    let result = loop {
        // Not every C library has a function for it. The offset in two halves, -1: that of the
        // file.
        let at: libc::c_long = -1;
        // SAFETY: as in `read_slices`, and the arguments are those that preadv2(2) has as a system
        // call, each as wide as a register at most.
        let read = unsafe {
            libc::syscall(
                libc::SYS_preadv2,
                fd.as_raw_fd(),
                first,
                count,
                at,
                at,
                libc::RWF_NOWAIT,
            )
        };
        if let Some(result) = outcome(read as libc::ssize_t) {
            break result;
        }
    };
    let is = |error: &io::Error, code| error.raw_os_error() == Some(code);
    match result {
        Err(error) if is(&error, libc::EOPNOTSUPP) || is(&error, libc::ENOSYS) => {
            match recv_slices(fd, slices) {
                Ok(received) => Ok(received.bytes),
                Err(error) if is(&error, libc::ENOTSOCK) => Err(io::ErrorKind::Unsupported.into()),
                Err(error) => Err(error),
            }
        }
        result => result,
    }
}

/// As [`read_slices`], from offset `at` of the file, in bytes. The file offset does not change.
///
/// # Errors
/// As [`read_slices`], and errors of preadv(2).
pub fn read_slices_at(fd: BorrowedFd<'_>, slices: &[GuestSlice<'_>], at: u64) -> io::Result<usize> {
    let (first, count) = vectors(slices);
    let at = libc::off_t::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
    loop {
        // SAFETY: as in `read_slices`.
        let read = unsafe { libc::preadv(fd.as_raw_fd(), first, count, at) };
        if let Some(result) = outcome(read) {
            return result;
        }
    }
}

/// Writes from shared memory to a file, pipe or socket with one writev(2). Blocks if `fd` does.
///
/// # Errors
/// EFAULT (`raw_os_error`) when the memory has vanished. Otherwise errors of writev(2).
pub fn write_slices(fd: BorrowedFd<'_>, slices: &[GuestSlice<'_>]) -> io::Result<usize> {
    let (first, count) = vectors(slices);
    loop {
        // SAFETY: as in `read_slices`, but the kernel only reads there.
        let written = unsafe { libc::writev(fd.as_raw_fd(), first, count) };
        if let Some(result) = outcome(written) {
            return result;
        }
    }
}

/// The slices as an array of iovec, and how many of them one call uses.
fn vectors(slices: &[GuestSlice<'_>]) -> (*const libc::iovec, libc::c_int) {
    let count = slices.len().min(MAX_SLICES) as libc::c_int;
    (slices.as_ptr().cast(), count)
}

/// A message without address and control data over the slices.
fn message(slices: &[GuestSlice<'_>]) -> libc::msghdr {
    // SAFETY: `msghdr` consists of integers and raw pointers, for which all zeroes is a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = slices.as_ptr().cast::<libc::iovec>().cast_mut();
    // The type of this field differs between C libraries.
    message.msg_iovlen = slices.len().min(MAX_SLICES) as _;
    message
}

/// The result of a call, or `None` if a signal interrupted it and it must be repeated.
pub(crate) fn outcome(returned: libc::ssize_t) -> Option<io::Result<usize>> {
    if let Ok(bytes) = usize::try_from(returned) {
        return Some(Ok(bytes));
    }
    let error = io::Error::last_os_error();
    (error.kind() != io::ErrorKind::Interrupted).then_some(Err(error))
}
