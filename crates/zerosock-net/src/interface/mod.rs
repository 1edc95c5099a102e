//! The driver half of a network device, for a process that takes the place of a guest.
//!
//! An [`Interface`] attaches to any vhost-user network device: a port of `zerosock net`, for example. A
//! received [`ReceivedFrame`] is a lease on the bytes where the device has written them, and a [`FrameLoan`] is
//! memory that the device reads. Headers of virtio are exposed as [`Repr`]: a frame can leave its
//! checksum or its segmentation to the receiver, and may have to do both for the sender.
//!
//! ```no_run
//! use std::path::Path;
//! use zerosock_net::interface::{Interface, InterfaceConfig, Repr};
//!
//! let port = Interface::connect(Path::new("/tmp/a.net"), &InterfaceConfig::default())?;
//! loop {
//!     while let Some(frame) = port.recv() {
//!         let Ok(mut answer) = port.loan(frame.len()) else { break };
//!         answer.write(0, &frame.to_vec());
//!         answer.queue(&Repr::PLAIN)?;
//!     }
//!     port.wait(None)?;
//! }
//! # #[allow(unreachable_code)]
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Driving it
//! - [`recv`](Interface::recv) until it returns `None`; [`loan`](Interface::loan), fill and
//!   [`queue`](FrameLoan::queue) frames; then [`flush`](Interface::flush) once.
//! - Then [`wait`](Interface::wait), or sleep on the descriptor of the interface together with others:
//!   [`arm`](Interface::arm), which flushes; if it returns false, poll; then
//!   [`clear`](Interface::clear).
//!
//! An interface can move to another thread, and leases and loans borrow it. While it is not armed, the
//! device is told not to notify it, and no call makes a system call as long as the device is awake.
//!
//! # Invariants
//! - The device is not trusted. What it writes outside of frames is read once and checked. An index,
//!   a length or a number of buffers that cannot be ends the interface ([`InterfaceFailure`]); a header that
//!   lies drops its frame.
//! - Leases and loans are limited by the buffers of their queue: memory does not grow.
//! - No buffer is in two hands: posted, on lease or on loan.

mod config;
#[cfg(test)]
mod exchange_tests;
mod failure;
mod frame;
mod link;
mod loan;
#[cfg(test)]
mod lying_tests;
mod memory;
mod parts;
mod receive;
#[cfg(feature = "smoltcp")]
mod smoltcp_device;
mod stats;
#[cfg(test)]
mod test_device;
mod transmit;
mod wait;

use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use zerosock_proto::wire::net::F_STATUS;
use zerosock_vhost_user::frontend::{Frontend, FrontendError, Plan, QueueEventFds, SharedMemory};
use zerosock_virtio::spin::Spin;
use zerosock_virtio::watch::Watch;

pub use self::config::{InterfaceConfig, InterfaceConfigError, InterfaceConnectError};
pub use self::failure::InterfaceFailure;
pub use self::frame::{ReceivedFrame, Slices};
use self::link::{InterfaceTerms, Link};
pub use self::loan::FrameLoan;
use self::memory::Layout;
use self::receive::{InterfaceReceiver, RECEIVE};
#[cfg(feature = "smoltcp")]
pub use self::smoltcp_device::{SmoltcpDevice, SmoltcpReceive, SmoltcpTransmit};
pub use self::stats::InterfaceStats;
use self::transmit::InterfaceTransmitter;
pub use self::transmit::LoanError;
pub use zerosock_proto::wire::net::{Checksum, Gso, HeaderError, Mac, Offloads, Repr, Segments};
pub use zerosock_ring::{GuestSlice, Trust};

/// The driver half of a network device. See the [module](self).
#[derive(Debug)]
pub struct Interface {
    receiver: InterfaceReceiver,
    transmitter: InterfaceTransmitter,
    terms: InterfaceTerms,
    frontend: RefCell<Frontend>,
    watch: Watch,
    spin: RefCell<Spin>,
    failure: Cell<Option<InterfaceFailure>>,
    sleeps: Cell<u64>,
    shared: SharedMemory,
}

impl Interface {
    /// Attaches to the vhost-user device that listens at `path`, with memory of its own, and starts its
    /// first queue pair.
    ///
    /// # Errors
    /// [`InterfaceConnectError`]: a setting is out of its range, the system refuses memory or a descriptor, or
    /// the device refuses a request or lacks a feature.
    pub fn connect(
        path: &Path,
        config: &InterfaceConfig,
    ) -> Result<Interface, InterfaceConnectError> {
        config.check()?;
        let link = Link::connect(path, config)?;
        Interface::start(link, config, Frontend::start_queues)
    }

    /// As [`connect`](Self::connect), over a connected control socket.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn over(
        socket: UnixStream,
        config: &InterfaceConfig,
    ) -> Result<Interface, InterfaceConnectError> {
        config.check()?;
        let link = Link::over(socket, config)?;
        Interface::start(link, config, Frontend::start_queues)
    }

    /// Creates memory and queues, and passes them to the device by `start`.
    fn start(
        link: Link,
        config: &InterfaceConfig,
        start: impl FnOnce(
            &mut Frontend,
            &SharedMemory,
            &[zerosock_ring::DriverLayout],
            &QueueEventFds,
            &[u16],
        ) -> Result<(), FrontendError>,
    ) -> Result<Interface, InterfaceConnectError> {
        let Link {
            mut frontend,
            terms,
        } = link;
        let mut plan = Plan::default();
        let layout = Layout::new(config, &mut plan);
        let shared = SharedMemory::create("zerosock-interface", &plan, true, config.huge_pages)?;
        let event_fds = QueueEventFds::new(2).map_err(InterfaceConnectError::Descriptor)?;
        let event_fds = Arc::new(event_fds);
        let mut watch = Watch::new(event_fds.calls()).map_err(InterfaceConnectError::Descriptor)?;
        watch
            .device(frontend.as_fd())
            .map_err(InterfaceConnectError::Descriptor)?;
        let (memory, trust) = (&shared.memory, config.trust);
        let receiver = InterfaceReceiver::new(memory, &layout, &terms, trust, &event_fds)?;
        let transmitter = InterfaceTransmitter::new(memory, &layout, &terms, trust, &event_fds)?;
        start(&mut frontend, &shared, &layout.rings, &event_fds, &[0; 2])?;
        // Buffers for frames are there.
        event_fds.kick(RECEIVE);
        Ok(Interface {
            receiver,
            transmitter,
            terms,
            frontend: RefCell::new(frontend),
            watch,
            spin: RefCell::new(Spin::new(config.spin)),
            failure: Cell::new(None),
            sleeps: Cell::new(0),
            shared,
        })
    }

    /// The next frame, if one has arrived.
    #[inline]
    pub fn recv(&self) -> Option<ReceivedFrame<'_>> {
        if self.failure.get().is_some_and(InterfaceFailure::is_lie) {
            return None;
        }
        match self.receiver.next() {
            Ok(received) => Some(ReceivedFrame::new(&self.receiver, received?)),
            Err(failure) => {
                self.failure.set(Some(failure));
                None
            }
        }
    }

    /// A buffer for a frame of `len` bytes without the header of virtio, at least 14 and at most
    /// 65557.
    ///
    /// # Errors
    /// [`LoanError`]: no buffer is free or none is long enough, or the interface has failed.
    #[inline]
    pub fn loan(&self, len: usize) -> Result<FrameLoan<'_>, LoanError> {
        if let Some(failure) = self.failure.get() {
            return Err(failure.into());
        }
        let loan = FrameLoan::take(&self.transmitter, len);
        if let Err(LoanError::Failed(failure)) = loan {
            self.failure.set(Some(failure));
        }
        loan
    }

    /// Shows queued frames to the device, and wakes it if it sleeps.
    #[inline]
    pub fn flush(&self) {
        self.transmitter.flush();
    }

    /// Why the interface cannot be used any more, if that is known.
    pub fn failure(&self) -> Option<InterfaceFailure> {
        self.failure.get()
    }

    /// The MAC address: that of the configuration, of the device, or a random one.
    pub fn mac(&self) -> Mac {
        self.terms.mac
    }

    /// Most bytes of a packet without the Ethernet header, if the device says so.
    pub fn mtu(&self) -> Option<u16> {
        self.terms.mtu
    }

    /// The offloads that a frame to send can use.
    pub fn offloads(&self) -> Offloads {
        self.terms.to_device
    }

    /// The offloads that a received frame can use.
    pub fn receive_offloads(&self) -> Offloads {
        self.terms.from_device
    }

    /// Asks the device whether the link is up; true if it does not tell. This is a request on the
    /// control socket, and waits for the answer.
    ///
    /// # Errors
    /// [`FrontendError`]: the device has gone, or does not answer in time.
    pub fn link_is_up(&self) -> Result<bool, FrontendError> {
        if !self.terms.has_status {
            return Ok(true);
        }
        let config = link::read_config(&mut self.frontend.borrow_mut(), F_STATUS)?;
        Ok(config.link_up)
    }

    /// Whether the memory consists of huge pages.
    pub fn huge_pages(&self) -> bool {
        self.shared.huge_pages
    }

    /// Counters since the interface was connected.
    pub fn stats(&self) -> InterfaceStats {
        let (receive, transmit) = (self.receiver.stats(), self.transmitter.stats());
        InterfaceStats::new(receive, transmit, self.sleeps.get())
    }
}

/// The descriptor to poll for reading. See [`Interface::arm`].
impl AsFd for Interface {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}
