//! TAP interfaces: Ethernet frames with virtio-net headers, moved between the kernel and guest memory.
//!
//! A [`Tap`] has one descriptor for each queue. [`read_frame`] and [`write_frame`] move one frame
//! with one system call. Its payload goes directly to or from guest memory; its header stays in
//! private memory, so that the guest cannot change it after it was checked.
//!
//! Creating an interface, and changing its state by name, needs CAP_NET_ADMIN in the network
//! namespace of the calling thread. An open [`Tap`] needs no capability, and works on threads of any
//! namespace.

mod access;

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::str::FromStr;

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use zerosock_ring::GuestSlice;

use crate::slices::{MAX_SLICES, outcome};
use crate::socket_option::check;

pub use access::{AccessError, Sharing, TapOwner};

/// Bytes of the header in front of each frame: `struct virtio_net_hdr_v1`.
pub const HEADER_LEN: usize = 12;
/// The most slices of guest memory that one call uses.
pub const MAX_PIECES: usize = MAX_SLICES - 2;

const FLAGS: i32 = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
/// Of `linux/sockios.h`: adds an interface to a bridge.
const SIOCBRADDIF: u32 = 0x89a2;
/// Bytes of `struct ifreq`'s name and of the rest.
const NAME_LEN: usize = libc::IFNAMSIZ;
const DATA_LEN: usize = size_of::<libc::ifreq>() - NAME_LEN;

/// `struct ifreq`.
#[repr(C, align(8))]
struct Request {
    name: [u8; NAME_LEN],
    data: [u8; DATA_LEN],
}

const _: () = assert!(size_of::<Request>() == size_of::<libc::ifreq>());
const _: () = assert!(align_of::<Request>() >= align_of::<libc::ifreq>());

impl Request {
    fn new(name: &InterfaceName, data: &[u8]) -> Request {
        let mut request = Request {
            name: name.0,
            data: [0; DATA_LEN],
        };
        for (to, from) in request.data.iter_mut().zip(data) {
            *to = *from;
        }
        request
    }

    /// The first word of the data.
    fn int(&self) -> i32 {
        let [a, b, c, d, ..] = self.data;
        i32::from_ne_bytes([a, b, c, d])
    }

    /// The flags, a short.
    fn flags(&self) -> i32 {
        i32::from(u16::from_ne_bytes([self.data[0], self.data[1]]))
    }

    fn set_flags(&mut self, flags: i32) {
        self.data[..2].copy_from_slice(&(flags as u16).to_ne_bytes());
    }

    /// Calls ioctl(2) with this request.
    fn call(&mut self, fd: BorrowedFd<'_>, code: u32) -> io::Result<()> {
        // SAFETY: all codes in this module that are used with a request make the kernel read and write
        // one `struct ifreq`, whose size and alignment `Request` has.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), code as _, std::ptr::from_mut(self)) })
    }
}

/// The name of a network interface, as the kernel accepts it.
#[derive(Clone, Copy, Eq, PartialEq)]
pub struct InterfaceName([u8; NAME_LEN]);

/// Why a text is no name of an interface.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("an interface's name has 1 to 15 bytes, without spaces, `/`, `:` and `%`")]
pub struct NameError;

impl FromStr for InterfaceName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<InterfaceName, NameError> {
        let mut name = [0; NAME_LEN];
        let bytes = text.as_bytes();
        let bad = |byte: &u8| !byte.is_ascii_graphic() || b"/:%".contains(byte);
        if matches!(text, "" | "." | "..") || bytes.len() >= NAME_LEN || bytes.iter().any(bad) {
            return Err(NameError);
        }
        name[..bytes.len()].copy_from_slice(bytes);
        Ok(InterfaceName(name))
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.0.iter().position(|byte| *byte == 0);
        let bytes = self.0.get(..end.unwrap_or(NAME_LEN)).unwrap_or_default();
        f.write_str(&String::from_utf8_lossy(bytes))
    }
}

impl fmt::Debug for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl InterfaceName {
    fn socket() -> io::Result<OwnedFd> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
        Ok(rustix::net::socket_with(
            family,
            kind,
            SocketFlags::CLOEXEC,
            None,
        )?)
    }

    fn call(&self, code: u32, data: &[u8]) -> io::Result<Request> {
        let mut request = Request::new(self, data);
        request.call(InterfaceName::socket()?.as_fd(), code)?;
        Ok(request)
    }

    /// The number of the interface.
    ///
    /// # Errors
    /// ENODEV if there is none of this name, here and below.
    pub fn index(&self) -> io::Result<i32> {
        Ok(self.call(libc::SIOCGIFINDEX as u32, &[])?.int())
    }

    /// The interface's MTU.
    ///
    /// # Errors
    /// See [`index`](Self::index).
    pub fn mtu(&self) -> io::Result<u32> {
        let mtu = self.call(libc::SIOCGIFMTU as u32, &[])?.int();
        Ok(u32::try_from(mtu).unwrap_or_default())
    }

    /// Sets the MTU.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN, here and below; EINVAL if the interface cannot have it.
    pub fn set_mtu(&self, mtu: u16) -> io::Result<()> {
        let data = i32::from(mtu).to_ne_bytes();
        self.call(libc::SIOCSIFMTU as u32, &data).map(drop)
    }

    /// Brings the interface up (`ip link set NAME up`).
    ///
    /// # Errors
    /// See [`set_mtu`](Self::set_mtu).
    pub fn bring_up(&self) -> io::Result<()> {
        self.change_flags(|flags| flags | libc::IFF_UP)
    }

    /// Brings the interface down.
    ///
    /// # Errors
    /// See [`set_mtu`](Self::set_mtu).
    pub fn bring_down(&self) -> io::Result<()> {
        self.change_flags(|flags| flags & !libc::IFF_UP)
    }

    fn change_flags(&self, change: impl FnOnce(i32) -> i32) -> io::Result<()> {
        let mut request = self.call(libc::SIOCGIFFLAGS as u32, &[])?;
        let flags = change(request.flags());
        if flags == request.flags() {
            return Ok(());
        }
        request.set_flags(flags);
        request.call(InterfaceName::socket()?.as_fd(), libc::SIOCSIFFLAGS as u32)
    }

    /// Makes the interface a port of `bridge`. That it is one already is no error.
    ///
    /// # Errors
    /// ENODEV without such a bridge, EBUSY if the interface belongs to another one, EPERM without
    /// CAP_NET_ADMIN.
    pub fn join_bridge(&self, bridge: &InterfaceName) -> io::Result<()> {
        if self.is_port_of(bridge) {
            return Ok(());
        }
        let index = self.index()?.to_ne_bytes();
        bridge.call(SIOCBRADDIF, &index).map(drop)
    }

    fn is_port_of(&self, bridge: &InterfaceName) -> bool {
        std::path::Path::new(&format!("/sys/class/net/{bridge}/brif/{self}")).exists()
    }
}

/// What of the offloads of virtio-net the reader of a TAP takes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Offload {
    /// Partial checksums. Without them there are no others.
    pub csum: bool,
    /// TSO over IPv4.
    pub tso4: bool,
    /// TSO over IPv6.
    pub tso6: bool,
    /// TSO with ECN.
    pub ecn: bool,
}

/// Why there is no TAP.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The system has no TUN driver, or does not let this process use it.
    #[error("cannot open /dev/net/tun: {0}")]
    Device(io::Error),
    /// The interface cannot be made or taken.
    #[error("cannot create or take it: {0}")]
    Take(io::Error),
    /// Another process has it, without room for more queues.
    #[error("another process has it open")]
    Busy,
    /// It may have several queues, and not for this process alone.
    #[error(transparent)]
    Access(AccessError),
    /// It exists as another kind of interface.
    #[error(
        "it exists and is no TAP with as many queues; make it with `ip tuntap add mode tap`, with \
         `multi_queue user USER` for more than one queue"
    )]
    Kind,
    /// The descriptor is none of a TAP with IFF_NO_PI and IFF_VNET_HDR.
    #[error("the descriptor is none of a TAP with IFF_NO_PI and IFF_VNET_HDR")]
    Descriptor,
    /// The kernel refuses the headers.
    #[error("headers of {HEADER_LEN} bytes are refused: {0}")]
    Header(io::Error),
}

impl From<AccessError> for TapError {
    fn from(error: AccessError) -> TapError {
        match error {
            AccessError::NoSuchTap => TapError::Kind,
            error => TapError::Access(error),
        }
    }
}

/// An open TAP interface. The interface goes with the last descriptor, unless it was made
/// persistent (`ip tuntap add`).
#[derive(Debug)]
pub struct Tap {
    name: InterfaceName,
    queues: Vec<OwnedFd>,
}

impl Tap {
    /// Creates the interface with `queues` queues, or takes an existing one, for this process alone. If it may have
    /// several queues and has no owner, the effective user of this process becomes its owner, and stays so.
    ///
    /// # Errors
    /// See [`TapError`].
    pub fn open(name: &InterfaceName, queues: u16) -> Result<Tap, TapError> {
        Tap::open_with(name, queues, Sharing::Exclusive)
    }

    /// The same, perhaps shared with other processes if it may have several queues.
    ///
    /// # Errors
    /// See [`TapError`].
    pub fn open_with(name: &InterfaceName, queues: u16, sharing: Sharing) -> Result<Tap, TapError> {
        let kinds: &[i32] = match queues {
            // An existing interface may be of either kind.
            ..=1 => &[0, libc::IFF_MULTI_QUEUE],
            _ => &[libc::IFF_MULTI_QUEUE],
        };
        let mut result = Err(TapError::Kind);
        for &kind in kinds {
            result = Tap::open_kind(name, queues.max(1), kind, sharing);
            if !matches!(result, Err(TapError::Kind)) {
                break;
            }
        }
        result
    }

    fn open_kind(
        name: &InterfaceName,
        queues: u16,
        kind: i32,
        sharing: Sharing,
    ) -> Result<Tap, TapError> {
        let has_several = kind == libc::IFF_MULTI_QUEUE;
        if has_several {
            access::check_before(&name.to_string(), sharing)?;
        }
        let mut tap = Tap {
            name: *name,
            queues: Vec::new(),
        };
        for _ in 0..queues {
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let queue = rustix::fs::open("/dev/net/tun", flags, Mode::empty());
            let queue = queue.map_err(|errno| TapError::Device(errno.into()))?;
            let mut request = Request::new(name, &[]);
            request.set_flags(FLAGS | kind);
            let taken = request.call(queue.as_fd(), libc::TUNSETIFF as u32);
            taken.map_err(|error| match error.raw_os_error() {
                Some(libc::EINVAL) => TapError::Kind,
                Some(libc::EBUSY | libc::E2BIG) => TapError::Busy,
                _ => TapError::Take(error),
            })?;
            if has_several && tap.queues.is_empty() {
                access::take_ownership(&name.to_string(), queue.as_fd(), sharing)?;
            }
            set_header(queue.as_fd())?;
            tap.queues.push(queue);
        }
        Ok(tap)
    }

    /// Takes a TAP with queues that another program has opened, by its descriptors in this process. They are
    /// duplicated.
    ///
    /// # Errors
    /// See [`TapError`]. All have to be queues of one interface.
    pub fn from_numbers(numbers: &[RawFd]) -> Result<Tap, TapError> {
        let mut tap: Option<Tap> = None;
        for &number in numbers {
            // SAFETY: the call duplicates a descriptor, if there is one of this number, and touches no
            // memory.
            let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
            if copy < 0 {
                return Err(TapError::Device(io::Error::last_os_error()));
            }
            // SAFETY: the call above made it, and nothing else owns it.
            let queue = unsafe { OwnedFd::from_raw_fd(copy) };
            let mut request = Request::new(&InterfaceName([0; NAME_LEN]), &[]);
            request
                .call(queue.as_fd(), libc::TUNGETIFF as u32)
                .map_err(|_| TapError::Descriptor)?;
            let name = InterfaceName(request.name);
            if request.flags() & (FLAGS | libc::IFF_TUN) != FLAGS {
                return Err(TapError::Descriptor);
            }
            set_header(queue.as_fd())?;
            let nonblocking = rustix::io::ioctl_fionbio(&queue, true);
            nonblocking.map_err(|errno| TapError::Device(errno.into()))?;
            let tap = tap.get_or_insert_with(|| Tap {
                name,
                queues: Vec::new(),
            });
            if tap.name != name {
                return Err(TapError::Descriptor);
            }
            tap.queues.push(queue);
        }
        tap.ok_or(TapError::Descriptor)
    }

    /// The interface's name.
    pub fn name(&self) -> InterfaceName {
        self.name
    }

    /// The queues.
    pub fn queues(&self) -> &[OwnedFd] {
        &self.queues
    }

    /// Tells the kernel which offloads frames read here may need. Others it carries out itself.
    ///
    /// # Errors
    /// EINVAL if it does not know one; EBADFD if the interface was removed, here and below.
    pub fn set_offload(&self, offload: Offload) -> io::Result<()> {
        let Offload {
            csum,
            tso4,
            tso6,
            ecn,
        } = offload;
        let bits = [
            (csum, libc::TUN_F_CSUM),
            (tso4, libc::TUN_F_TSO4),
            (tso6, libc::TUN_F_TSO6),
            (ecn, libc::TUN_F_TSO_ECN),
        ];
        let set = bits.iter().filter(|(wanted, _)| *wanted);
        let flags = set.fold(0, |flags, (_, bit)| flags | bit);
        let first = self.queues.first().ok_or(io::ErrorKind::NotFound)?;
        // SAFETY: TUNSETOFFLOAD takes a number and touches no memory of the caller.
        let done = unsafe {
            libc::ioctl(
                first.as_raw_fd(),
                libc::TUNSETOFFLOAD as _,
                libc::c_ulong::from(flags),
            )
        };
        check(done)
    }

    /// Sets whether other interfaces see a carrier: whether there is a guest.
    ///
    /// # Errors
    /// EINVAL before Linux 5.0.
    pub fn set_carrier(&self, carrier: bool) -> io::Result<()> {
        let first = self.queues.first().ok_or(io::ErrorKind::NotFound)?;
        set_int(first.as_fd(), libc::TUNSETCARRIER as u32, carrier.into())
    }

    /// Attaches a queue, or detaches it: then the kernel puts no frames into it, and drops those that
    /// are there. The queues of a TAP are attached at first.
    ///
    /// # Errors
    /// EINVAL if it is so already, or the interface has one queue only.
    pub fn attach_queue(&self, queue: usize, attach: bool) -> io::Result<()> {
        let queue = self.queues.get(queue).ok_or(io::ErrorKind::NotFound)?;
        let mut request = Request::new(&self.name, &[]);
        request.set_flags(match attach {
            true => libc::IFF_ATTACH_QUEUE,
            false => libc::IFF_DETACH_QUEUE,
        });
        request.call(queue.as_fd(), libc::TUNSETQUEUE as u32)
    }
}

/// Sets the length and the byte order of headers.
fn set_header(queue: BorrowedFd<'_>) -> Result<(), TapError> {
    set_int(queue, libc::TUNSETVNETHDRSZ as u32, HEADER_LEN as i32)
        .and_then(|()| set_int(queue, libc::TUNSETVNETLE as u32, 1))
        .map_err(TapError::Header)
}

fn set_int(fd: BorrowedFd<'_>, code: u32, value: i32) -> io::Result<()> {
    // SAFETY: the codes used here make the kernel read one int, which lives until the call returns.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), code as _, std::ptr::from_ref(&value)) })
}

/// The array of iovec for one frame.
struct Vectors {
    entries: [MaybeUninit<libc::iovec>; MAX_SLICES],
    len: usize,
}

impl Vectors {
    fn new() -> Vectors {
        Vectors {
            entries: [const { MaybeUninit::uninit() }; MAX_SLICES],
            len: 0,
        }
    }

    fn push(&mut self, base: *mut u8, len: usize) {
        if let Some(entry) = self.entries.get_mut(self.len) {
            entry.write(libc::iovec {
                iov_base: base.cast(),
                iov_len: len,
            });
            self.len += 1;
        }
    }

    fn push_all(&mut self, slices: &[GuestSlice<'_>]) {
        for slice in slices.iter().take(MAX_PIECES) {
            self.push(slice.as_ptr(), slice.len());
        }
    }
}

/// Reads one frame: its header into `header`, its bytes into `slices`, and those for which there is
/// no room there into `rest`. Uses at most [`MAX_PIECES`] slices. Returns the number of bytes
/// without the header; the kernel drops bytes for which there is no room at all.
///
/// # Errors
/// `WouldBlock` when no frame is there. EFAULT (`raw_os_error`) when the memory has vanished; the
/// frame is lost then. EBADFD when the interface was removed.
pub fn read_frame(
    queue: BorrowedFd<'_>,
    header: &mut [u8; HEADER_LEN],
    slices: &[GuestSlice<'_>],
    rest: &mut [u8],
) -> io::Result<usize> {
    let mut vectors = Vectors::new();
    vectors.push(header.as_mut_ptr(), HEADER_LEN);
    vectors.push_all(slices);
    vectors.push(rest.as_mut_ptr(), rest.len());
    let (first, count) = (vectors.entries.as_ptr().cast(), vectors.len as libc::c_int);
    loop {
        // SAFETY: the first `count` entries are initialised. The first and the last name exclusive
        // borrows, the others mapped memory for as long as the `GuestSlice` borrow lasts: it is
        // mapped writable and shared, and no Rust reference to it exists, so that bytes may change
        // there at any time.
        let read = unsafe { libc::readv(queue.as_raw_fd(), first, count) };
        if let Some(result) = outcome(read) {
            return result?
                .checked_sub(HEADER_LEN)
                .ok_or_else(|| io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// Writes one frame: its header, `first` and the slices. Uses at most [`MAX_PIECES`] slices.
///
/// # Errors
/// `WouldBlock` when the kernel takes none now. EINVAL (`raw_os_error`) when it refuses header or
/// frame, EIO when the interface is down, EBADFD when it was removed, EFAULT when the memory has
/// vanished.
pub fn write_frame(
    queue: BorrowedFd<'_>,
    header: &[u8; HEADER_LEN],
    first: &[u8],
    slices: &[GuestSlice<'_>],
) -> io::Result<()> {
    let mut vectors = Vectors::new();
    vectors.push(header.as_ptr().cast_mut(), HEADER_LEN);
    vectors.push(first.as_ptr().cast_mut(), first.len());
    vectors.push_all(slices);
    let (vector, count) = (vectors.entries.as_ptr().cast(), vectors.len as libc::c_int);
    loop {
        // SAFETY: as in `read_frame`, but the kernel only reads.
        let written = unsafe { libc::writev(queue.as_raw_fd(), vector, count) };
        if let Some(result) = outcome(written) {
            return result.map(drop);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_kernel() {
        for text in ["tap0", "a", "vm-3.net_1", "fifteen-bytes-x"] {
            let name: InterfaceName = text.parse().expect(text);
            assert_eq!(name.to_string(), text);
        }
        for text in [
            "",
            ".",
            "..",
            "a b",
            "a/b",
            "tap%d",
            "a:1",
            "\u{e9}",
            "sixteen-bytes-xx",
        ] {
            assert!(text.parse::<InterfaceName>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_descriptor_of_another_kind_is_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let result = Tap::from_numbers(&[file.as_raw_fd()]);
        assert!(matches!(result, Err(TapError::Descriptor)), "{result:?}");
        assert!(matches!(Tap::from_numbers(&[]), Err(TapError::Descriptor)));
        assert!(matches!(
            Tap::from_numbers(&[i32::MAX]),
            Err(TapError::Device(_))
        ));
    }
}
