//! A network interface with our XDP program.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};

use super::error::XdpError;
use super::program::{self, LongFrames, Sockets};
use crate::bpf::calls;
use crate::bpf::maps::SharedArray;
use crate::tun::InterfaceName;

/// Most queues of an interface that can have a socket.
pub const MAX_QUEUES: u32 = 256;

/// XDP_FLAGS_SKB_MODE and XDP_FLAGS_DRV_MODE.
const GENERIC: u32 = 1 << 1;
const DRIVER: u32 = 1 << 2;

/// Where the program runs.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum AttachMode {
    /// In the driver of the interface.
    Driver,
    /// In the stack of the kernel, behind the driver (`generic`), for interfaces of any kind.
    Generic,
}

/// How an [`XdpInterface`] is opened.
#[derive(Copy, Clone, Debug, Default)]
pub struct InterfaceOptions {
    /// What becomes of long frames.
    pub long_frames: LongFrames,
    /// Where the program has to run; `None`: in the driver if it can.
    pub attach: Option<AttachMode>,
    /// Never asks the driver to read and write the memory of sockets itself (XDP_ZEROCOPY).
    pub copy: bool,
}

/// A network interface with the program attached. The kernel detaches it when this is dropped, or when the
/// process ends. Several sockets of this process, one for each queue, share it.
#[derive(Debug)]
pub struct XdpInterface {
    name: InterfaceName,
    index: u32,
    attached: AttachMode,
    copy: bool,
    sockets: Sockets,
    long_frames: SharedArray<AtomicU64>,
    /// Closing it detaches the program.
    _link: OwnedFd,
}

impl XdpInterface {
    /// Loads the program and attaches it.
    ///
    /// # Errors
    /// See [`XdpError`]. Needs CAP_BPF and CAP_NET_ADMIN.
    pub fn open(name: &InterfaceName, options: InterfaceOptions) -> Result<XdpInterface, XdpError> {
        let index = name.index().map_err(|error| match error.raw_os_error() {
            Some(libc::ENODEV) => XdpError::NoInterface,
            _ => XdpError::system("cannot find the interface", error),
        })?;
        let index = u32::try_from(index).map_err(|_| XdpError::NoInterface)?;
        let sockets = Sockets::create(MAX_QUEUES)?;
        let long_frames = SharedArray::create("the counters of the XDP program", MAX_QUEUES)?;
        let program = program::load(&sockets, &long_frames, options.long_frames)?;
        let attach = |place| {
            let flags = match place {
                AttachMode::Driver => DRIVER,
                AttachMode::Generic => GENERIC,
            };
            calls::attach_xdp(program.as_fd(), index, flags).map(|link| (link, place))
        };
        let result = match options.attach {
            Some(place) => attach(place),
            // A driver refuses for reasons of its own, such as its MTU: no error tells them from others.
            None => attach(AttachMode::Driver).or_else(|_| attach(AttachMode::Generic)),
        };
        let (link, attached) = result.map_err(|error| match error.raw_os_error() {
            Some(libc::EBUSY | libc::EEXIST) => XdpError::Attached,
            Some(libc::ENODEV) => XdpError::NoInterface,
            _ => XdpError::Attach(error),
        })?;
        Ok(XdpInterface {
            name: *name,
            index,
            attached,
            copy: options.copy,
            sockets,
            long_frames,
            _link: link,
        })
    }

    /// The name it was opened by.
    pub fn name(&self) -> InterfaceName {
        self.name
    }

    /// Where the program runs.
    pub fn attached(&self) -> AttachMode {
        self.attached
    }

    /// Frames of more than [`MAX_FRAME`](super::MAX_FRAME) bytes that have arrived at this queue.
    pub fn long_frames(&self, queue: u32) -> u64 {
        let count = self.long_frames.get(queue);
        count.map_or(0, |count| count.load(Relaxed))
    }

    /// Whether the interface still exists in the network namespace of this thread.
    pub fn is_present(&self) -> bool {
        let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None);
        let Ok(socket) = socket else {
            // Nothing is known.
            return true;
        };
        // By number: the name may have changed, or may be that of a later interface.
        let named = netdevice::index_to_name(&socket, self.index);
        !matches!(named, Err(Errno::NODEV | Errno::NXIO))
    }

    pub(super) fn index(&self) -> u32 {
        self.index
    }

    /// Whether sockets are never bound with XDP_ZEROCOPY.
    pub(super) fn copies(&self) -> bool {
        self.copy
    }

    pub(super) fn sockets(&self) -> &Sockets {
        &self.sockets
    }
}
