//! Registering a UMEM with the kernel, and binding a socket to a queue.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, XDP_PGOFF_RX_RING, XDP_PGOFF_TX_RING,
    XDP_UMEM_PGOFF_COMPLETION_RING, XDP_UMEM_PGOFF_FILL_RING, XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};

use super::error::{XdpError, check_limit};
use super::interface::XdpInterface;
use super::ring::{Consumer, Producer, RingSizes, Rings};
use super::sent::Sent;
use super::socket::XdpSocket;
use super::umem::Umem;
use super::{CHUNK, HEADROOM};

/// How long until a queue that is in use is tried again.
const RETRY: Duration = Duration::from_millis(2);

/// A socket with memory and rings that is not bound. Dropping it unpins the memory in the background.
#[derive(Debug)]
pub struct Registered {
    // The order of drops: the kernel keeps a socket as long as its rings are mapped.
    rings: Rings,
    socket: OwnedFd,
    umem: Umem,
}

impl Registered {
    /// Pins all of the memory, which allocates what of it is not allocated yet, and makes the rings.
    ///
    /// It takes the kernel 0.1 s for each GiB that is allocated, and 5 s for each that is not: call it on
    /// a thread of its own ([`Task`](super::Task)). Other threads cannot map memory during the first of
    /// these times.
    ///
    /// # Errors
    /// [`XdpError::MemoryLock`] before anything is pinned, if the limit is known to be too low;
    /// [`XdpError::NotPinnable`] and others.
    pub fn create(umem: Umem, sizes: RingSizes) -> Result<Registered, XdpError> {
        let need = umem.locked();
        check_limit(need)?;
        let family = AddressFamily::XDP;
        let socket = socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, None)
            .map_err(XdpError::of_socket)?;
        umem.populate();
        let registration = XdpUmemReg {
            addr: umem.start(),
            len: need,
            chunk_size: CHUNK,
            headroom: HEADROOM,
            flags: XdpUmemRegFlags::XDP_UMEM_UNALIGNED_CHUNK_FLAG,
            tx_metadata_len: 0,
        };
        sockopt::set_xdp_umem_reg(&socket, registration)
            .map_err(|errno| XdpError::of_umem(errno, need))?;
        let RingSizes { receive, transmit } = sizes;
        sockopt::set_xdp_umem_fill_ring_size(&socket, receive)
            .and_then(|()| sockopt::set_xdp_rx_ring_size(&socket, receive))
            .and_then(|()| sockopt::set_xdp_umem_completion_ring_size(&socket, transmit))
            .and_then(|()| sockopt::set_xdp_tx_ring_size(&socket, transmit))
            .map_err(XdpError::of_socket)?;
        let offsets = sockopt::xdp_mmap_offsets(&socket).map_err(XdpError::of_socket)?;
        let map = || -> std::io::Result<Rings> {
            let fd = socket.as_fd();
            let fill = XDP_UMEM_PGOFF_FILL_RING;
            let completion = XDP_UMEM_PGOFF_COMPLETION_RING;
            Ok(Rings {
                fill: Producer::map(fd, fill, offsets.fr, receive)?,
                receive: Consumer::map(fd, XDP_PGOFF_RX_RING, offsets.rx, receive)?,
                transmit: Producer::map(fd, XDP_PGOFF_TX_RING, offsets.tx, transmit)?,
                completion: Consumer::map(fd, completion, offsets.cr, transmit)?,
            })
        };
        let rings = map().map_err(|error| XdpError::system("cannot map the rings", error))?;
        Ok(Registered {
            rings,
            socket,
            umem,
        })
    }

    /// The memory.
    pub fn umem(&self) -> &Umem {
        &self.umem
    }

    /// Binds to a queue of the interface, which then delivers frames. A driver that can reads and writes
    /// the memory itself; otherwise the kernel copies.
    ///
    /// A queue that was in use until a moment ago stays so for some milliseconds: it is tried again for as long
    /// as `patience`. Drivers can take seconds to change their queues. So this is for a thread of its own.
    ///
    /// # Errors
    /// [`XdpError::Busy`], [`XdpError::NoQueue`], [`XdpError::Down`] and others.
    pub fn bind(
        self,
        interface: &XdpInterface,
        queue: u32,
        patience: Duration,
    ) -> Result<XdpSocket, XdpError> {
        let end = Instant::now() + patience;
        let (zero_copy, segments) = loop {
            match self.try_bind(interface, queue) {
                Err(Errno::BUSY) if Instant::now() < end => std::thread::sleep(RETRY),
                result => break result.map_err(|errno| XdpError::of_bind(errno, queue))?,
            }
        };
        let redirected = interface.sockets().insert(queue, self.socket.as_fd());
        redirected.map_err(|error| XdpError::system("cannot redirect frames", error))?;
        Ok(XdpSocket {
            rings: self.rings,
            socket: self.socket,
            umem: self.umem,
            sockets: interface.sockets().clone(),
            sent: Sent::default(),
            queue,
            zero_copy,
            segments,
        })
    }

    /// Whether the driver uses the memory itself, and frames can have several descriptors.
    fn try_bind(&self, interface: &XdpInterface, queue: u32) -> Result<(bool, bool), Errno> {
        use SocketAddrXdpFlags as Flags;
        // How many descriptors a driver takes is not known, so a frame has one. Linux before 6.6 has no
        // XDP_USE_SG.
        let ways = [
            (Flags::XDP_ZEROCOPY, true, false),
            (Flags::XDP_COPY | Flags::XDP_USE_SG, false, true),
            (Flags::XDP_COPY, false, false),
        ];
        let mut result = Err(Errno::OPNOTSUPP);
        for (flags, zero_copy, segments) in ways {
            if zero_copy && interface.copies() {
                continue;
            }
            let flags = flags | Flags::XDP_USE_NEED_WAKEUP;
            let address = SocketAddrXdp::new(flags, interface.index(), queue);
            result = bind(&self.socket, &address).map(|()| (zero_copy, segments));
            // No other way changes these.
            if matches!(result, Ok(_) | Err(Errno::BUSY | Errno::NODEV)) {
                break;
            }
        }
        result
    }
}
