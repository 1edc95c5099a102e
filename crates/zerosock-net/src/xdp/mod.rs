//! A network interface as the back-end, through AF_XDP sockets: one for each queue.
//!
//! The memory of a socket is that of the guest. Frames of the guest are sent from its buffers, and
//! completed later. Frames to the guest are received in its buffers where they have room for any frame
//! in one piece, as those of Linux guests do, and in private chunks otherwise, from which they are copied. The
//! first frames go to private chunks in any case, to see what the driver of the interface writes
//! ([`Probe`](zerosock_sys::xdp::Probe)).
//!
//! As the uplink of a switch the back-end has no memory of a guest: all frames are copied.
//!
//! # Invariants
//! - A socket with chains of a guest is closed before the guest gets them back: what is in its fill ring
//!   cannot be recalled.
//! - Nothing here waits: memory is registered, and sockets are bound and closed, on threads of their own
//!   (`opening`). Until a socket with the guest's memory is there, another one copies frames.

mod kernel;
mod opening;
mod port;
mod posted;
mod received;
mod sent;
mod sizes;
#[cfg(test)]
mod test_veth;

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::Instant;
use zerosock_proto::wire::net::{ETHERNET_LEN, Header, Offloads};
use zerosock_ring::{Chain, GuestSlice, Memory};
use zerosock_sys::xdp::{LinkWatch, MAX_FRAME, Registered, Umem, XdpError, XdpInterface};
use zerosock_virtio::deadline::earlier;
use zerosock_virtio::outbox::Outbox;
use zerosock_virtio::queues::Quiesced;

use self::port::{XdpPort, gone, mode};
use self::sizes::{CHUNKS, SIZES};
use crate::backend::{Backend, Frame, FrameError, Half, Never, Sent, Taken};
use crate::stats::NetStats;

/// Bytes of the VLAN tag that a frame may have beyond the MTU.
const VLAN_TAG: usize = 4;
/// How often changes of interfaces are looked for.
const CHECK: Duration = Duration::from_millis(10);
/// How long a queue may be in use by another socket at the start.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the back-end uses of an interface.
#[derive(Clone, Copy, Debug)]
pub struct XdpConfig {
    /// The first queue.
    pub queue: u32,
    /// How many, each for a queue pair of the device.
    pub queues: u16,
    /// Received frames are always copied, from private chunks.
    pub copies: bool,
    /// The user of the frames.
    pub use_of: Use,
}

/// The user of the frames of a back-end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Use {
    /// One guest, in the memory of which they are.
    Guest,
    /// A switch.
    Uplink,
}

/// See the [module](self).
pub struct XdpBackend {
    interface: Arc<XdpInterface>,
    watch: LinkWatch,
    ports: Vec<XdpPort>,
    is_uplink: bool,
    /// Most bytes of a frame that is sent: the kernel drops longer ones silently.
    max_frame: usize,
    is_gone: bool,
    /// When changes of interfaces were last looked for.
    checked_at: Option<Instant>,
    /// A turn has not looked for them since.
    has_skipped: bool,
}

impl fmt::Debug for XdpBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("XdpBackend")
            .field("interface", &self.interface.name())
            .finish_non_exhaustive()
    }
}

impl XdpBackend {
    /// A back-end on queues of the interface. It binds a socket to each of them, and closes it again, to find
    /// out whether that works. Back-ends on other queues of it share the interface.
    ///
    /// # Errors
    /// The queues cannot be used, for one of the reasons in [`XdpError`].
    pub fn new(
        interface: impl Into<Arc<XdpInterface>>,
        config: XdpConfig,
    ) -> Result<XdpBackend, XdpError> {
        let interface = interface.into();
        let system = |error| XdpError::System {
            what: "cannot watch interfaces",
            error,
        };
        let watch = LinkWatch::new().map_err(system)?;
        let mut ports = Vec::new();
        for queue in (config.queue..).take(config.queues.into()) {
            let registered = Registered::create(Umem::map(None, CHUNKS)?, SIZES)?;
            match registered.bind(&interface, queue, PATIENCE) {
                Ok(socket) => {
                    let (name, mode) = (interface.name(), mode(&interface, &socket));
                    tracing::info!("{name} queue {queue}: {mode}");
                }
                // It may come up later.
                Err(XdpError::Down) => {}
                Err(error) => return Err(error),
            }
            ports.push(XdpPort::new(&interface, queue, config.copies)?);
        }
        if let Some(first) = ports.first() {
            first.watch_links(&watch);
        }
        let mut backend = XdpBackend {
            interface,
            watch,
            ports,
            is_uplink: config.use_of == Use::Uplink,
            max_frame: 0,
            is_gone: false,
            checked_at: None,
            has_skipped: false,
        };
        backend.read_mtu();
        Ok(backend)
    }

    fn read_mtu(&mut self) {
        // It has just vanished if this fails: nothing is sent any more.
        let mtu = self.interface.name().mtu().unwrap_or_default() as usize;
        self.max_frame = mtu + ETHERNET_LEN + VLAN_TAG;
        // A driver may let in a frame with two tags.
        let longest = self.max_frame + VLAN_TAG;
        (self.ports.iter_mut()).for_each(|port| port.set_longest(longest));
    }

    /// Notices what has become of the interface: by one system call, and so not in every turn.
    fn check_link(&mut self, now: Instant) {
        self.has_skipped = self.checked_at.is_some_and(|at| now < at + CHECK);
        if self.has_skipped {
            return;
        }
        self.checked_at = Some(now);
        if self.watch.changed() {
            self.is_gone |= !self.interface.is_present();
            self.read_mtu();
            self.ports.iter_mut().for_each(XdpPort::link_changed);
        }
    }

    fn port(&mut self, queue: usize) -> Result<&mut XdpPort, FrameError> {
        match self.ports.get_mut(queue) {
            Some(port) if !self.is_gone => Ok(port),
            _ => Err(gone()),
        }
    }
}

impl Backend for XdpBackend {
    type Message = Never;

    fn queues(&self) -> u16 {
        u16::try_from(self.ports.len()).unwrap_or(u16::MAX)
    }

    /// None: AF_XDP knows no segmentation, and a checksum would have to be written into the guest's memory.
    /// What a received frame has room for, and what the interface sends.
    fn max_mtu(&self) -> Option<u16> {
        let received = MAX_FRAME as usize - ETHERNET_LEN;
        let sent = self.max_frame - (ETHERNET_LEN + VLAN_TAG);
        u16::try_from(received.min(sent)).ok()
    }

    fn descriptor(&self, queue: usize) -> Option<BorrowedFd<'_>> {
        self.ports.get(queue).map(XdpPort::descriptor)
    }

    fn set_offloads(&mut self, offloads: Offloads) -> io::Result<()> {
        match offloads == Offloads::default() {
            true => Ok(()),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn set_active(&mut self, queue: usize, active: bool) -> io::Result<()> {
        if let Some(port) = self.ports.get_mut(queue) {
            port.set_active(active);
        }
        Ok(())
    }

    fn set_memory(&mut self, memory: Option<&Arc<Memory>>) {
        for port in &mut self.ports {
            port.set_memory(memory);
        }
    }

    fn receive(
        &mut self,
        queue: usize,
        header: &mut Header,
        slices: &[GuestSlice<'_>],
        rest: &mut [u8],
    ) -> Result<usize, FrameError> {
        *header = Header::default();
        self.port(queue)?.receive(slices, rest)
    }

    fn posts(&self) -> bool {
        !self.is_uplink
    }

    #[inline]
    fn post(&mut self, queue: usize, memory: &Arc<Memory>, chain: &Chain) -> bool {
        self.port(queue).is_ok_and(|port| port.post(memory, chain))
    }

    #[inline]
    fn take(
        &mut self,
        queue: usize,
        memory: &Arc<Memory>,
        chain: &Chain,
    ) -> Result<Taken, FrameError> {
        self.port(queue)?.take(memory, chain)
    }

    #[inline]
    fn send(
        &mut self,
        queue: usize,
        frame: &Frame<'_>,
        number: u64,
        _: Instant,
    ) -> Result<Sent, FrameError> {
        if frame.len > self.max_frame {
            return Err(FrameError::Refused);
        }
        self.port(queue)?.send(frame, number)
    }

    fn send_copy(
        &mut self,
        queue: usize,
        _: &Header,
        bytes: &[u8],
        _: Instant,
    ) -> Result<(), FrameError> {
        if bytes.len() > self.max_frame {
            return Err(FrameError::Refused);
        }
        self.port(queue)?.send_copy(bytes)
    }

    fn has_room(&self, queue: usize) -> bool {
        self.is_gone || self.ports.get(queue).is_some_and(XdpPort::has_room)
    }

    fn flush(
        &mut self,
        queue: usize,
        now: Instant,
        tally: &mut NetStats,
    ) -> Result<(), FrameError> {
        if queue == 0 {
            self.check_link(now);
        }
        let fills = self.is_uplink;
        self.port(queue)?.flush(now, fills, tally)
    }

    fn sent(&mut self, queue: usize) -> Option<u64> {
        self.ports.get_mut(queue)?.pop_sent()
    }

    fn recall(&mut self, queue: usize, half: Half) -> Quiesced {
        match self.ports.get_mut(queue) {
            Some(port) => port.recall(half),
            None => Quiesced::Done,
        }
    }

    fn on_message(&mut self, message: Never, _: Instant, _: &mut NetStats) -> bool {
        match message {}
    }

    fn undeliverable(message: Never, _: &mut Outbox<Never>) {
        match message {}
    }

    fn next_timeout(&self) -> Option<Instant> {
        let timeouts = self.ports.iter().map(XdpPort::next_timeout);
        let check = self.checked_at.filter(|_| self.has_skipped);
        timeouts.fold(check.map(|at| at + CHECK), earlier)
    }

    fn retire(&mut self, _: &mut Outbox<Never>) {
        self.ports.iter_mut().for_each(XdpPort::retire);
    }
}
