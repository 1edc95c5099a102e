//! One queue of the interface.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::Instant;
use zerosock_proto::wire::net::Header;
use zerosock_ring::{Chain, GuestSlice, Memory};
use zerosock_sys::xdp::{AttachMode, LinkWatch, XdpError, XdpInterface, XdpSocket};
use zerosock_virtio::deadline::earlier;
use zerosock_virtio::queues::Quiesced;

use rustix::event::epoll::EventFlags;

use super::kernel::KernelDrops;
use super::opening::{Opening, RETRY, Step};
use super::received::{Failure, XdpReceiver};
use super::sent::XdpTransmitter;
use crate::backend::{Frame, FrameError, Half, Sent, Taken};
use crate::stats::NetStats;

/// How long a socket that is to be closed has for frames in flight.
const LINGER: Duration = Duration::from_millis(100);
/// How often completions are looked for that no event reports: those of drivers that read the memory
/// themselves, and of frames that the kernel has not taken.
const POLL: Duration = Duration::from_millis(1);
/// The same, where the kernel reports them.
const POLL_REPORTED: Duration = Duration::from_millis(50);

/// Frames of this process that wait for a socket.
const MAX_WAITING: usize = 16;

/// See the [module](self).
pub(super) struct XdpPort {
    name: String,
    interface: Arc<XdpInterface>,
    queue: u32,
    opening: Opening,
    socket: Option<XdpSocket>,
    receiver: XdpReceiver,
    transmitter: XdpTransmitter,
    /// Frames of this process that wait for a socket.
    waiting: VecDeque<Box<[u8]>>,
    kernel_drops: KernelDrops,
    /// The driver uses the queue.
    is_active: bool,
    /// A socket is needed.
    is_wanted: bool,
    /// The socket is to be closed, at the latest then.
    close_at: Option<Instant>,
    /// The chains that the kernel has are not of use any more when the socket is closed.
    forgets: bool,
    /// The interface was down at the last attempt to send.
    is_down: bool,
    /// The kernel has not taken all frames.
    is_pending: bool,
    /// When a socket has failed last.
    failed_at: Option<Instant>,
    /// The time of the last turn.
    now: Instant,
    /// Long frames that were counted.
    long_frames: u64,
}

impl XdpPort {
    pub(super) fn new(
        interface: &Arc<XdpInterface>,
        queue: u32,
        copies: bool,
    ) -> Result<XdpPort, XdpError> {
        let name = format!("{} queue {queue}", interface.name());
        let opening = Opening::new(name.clone(), Arc::clone(interface), queue);
        let opening = opening.map_err(|error| XdpError::System {
            what: "cannot make an epoll instance",
            error,
        })?;
        Ok(XdpPort {
            name,
            interface: Arc::clone(interface),
            queue,
            opening,
            socket: None,
            receiver: XdpReceiver::new(copies),
            transmitter: XdpTransmitter::default(),
            waiting: VecDeque::new(),
            kernel_drops: KernelDrops::default(),
            is_active: false,
            is_wanted: false,
            close_at: None,
            forgets: false,
            is_down: false,
            is_pending: false,
            failed_at: None,
            now: Instant::ZERO,
            long_frames: 0,
        })
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.opening.events()
    }

    /// Has the descriptor report changes of interfaces.
    pub(super) fn watch_links(&self, watch: &LinkWatch) {
        self.opening.watch(watch, EventFlags::IN | EventFlags::ET);
    }

    /// The interface has changed.
    pub(super) fn link_changed(&mut self) {
        self.opening.retry();
        self.is_down = false;
    }

    /// The interface receives frames of up to so many bytes from now on.
    pub(super) fn set_longest(&mut self, longest: usize) {
        self.receiver.longest = longest;
        let is_zero_copy = self.socket.as_ref().is_some_and(XdpSocket::is_zero_copy);
        if is_zero_copy && !self.receiver.all_frames_fit() {
            self.fail("it receives frames that do not fit into a chunk");
        }
    }

    pub(super) fn set_active(&mut self, active: bool) {
        self.is_active = active;
        self.is_wanted = active;
        match active {
            true => self.opening.retry_memory(),
            false => {
                self.waiting.clear();
                self.close_soon(LINGER);
            }
        }
        self.advance();
    }

    /// Nothing of the old memory is in use, or its guest has gone.
    pub(super) fn set_memory(&mut self, memory: Option<&Arc<Memory>>) {
        self.forget_chains();
        if memory.is_none() {
            self.waiting.clear();
        }
        self.close_soon(Duration::ZERO);
        self.opening.set_memory(memory);
        self.is_wanted = false;
        self.advance();
    }

    /// Chains that were posted are not of use any more.
    fn forget_chains(&mut self) {
        self.receiver.forget_waiting();
        self.forgets = self.receiver.has_posted();
    }

    fn close_soon(&mut self, linger: Duration) {
        if self.socket.is_some() {
            let latest = self.now + linger;
            let at = self.close_at.get_or_insert(latest);
            *at = latest.min(*at);
        }
    }

    /// Closes the socket without waiting for that.
    pub(super) fn retire(&mut self) {
        self.is_wanted = false;
        self.close_soon(Duration::ZERO);
        self.advance();
    }

    /// Opens or closes the socket as far as that is possible now.
    fn advance(&mut self) {
        if let Some(at) = self.close_at {
            if let Some(socket) = &mut self.socket {
                // What was sent in this turn.
                let _ = socket.wake();
                self.transmitter.complete(socket);
            }
            if self.now >= at || self.transmitter.is_idle() {
                self.close();
            }
        }
        if self.socket.is_none() && std::mem::take(&mut self.forgets) {
            self.receiver.forget_waiting();
        }
        let step = (self.opening).step(self.now, self.is_wanted, self.socket.as_ref());
        match step {
            Step::None => {}
            Step::Replace => self.close_soon(LINGER),
            Step::Use(socket) => {
                let memory = match socket.umem().memory() {
                    Some(memory) => format!("in the guest's memory, {} MiB", memory.size() >> 20),
                    None => "in private memory, and copied from and to it".to_owned(),
                };
                let mode = mode(&self.interface, &socket);
                tracing::info!("{}: frames are {memory}; {mode}", self.name);
                self.receiver.attach(&socket);
                self.is_down = false;
                self.socket = Some(*socket);
            }
        }
        if !self.opening.is_closing() {
            self.transmitter.closed();
        }
    }

    fn close(&mut self) {
        self.close_at = None;
        if let Some(mut socket) = self.socket.take() {
            self.receiver.detach(&mut socket);
            self.kernel_drops.finish(&socket);
            self.transmitter.detach();
            self.is_pending = false;
            self.opening.close(socket);
        }
    }

    /// Ends the batch of a turn. `fills`: there are no chains, chunks are always posted.
    pub(super) fn flush(
        &mut self,
        now: Instant,
        fills: bool,
        tally: &mut NetStats,
    ) -> Result<(), FrameError> {
        self.now = now;
        self.advance();
        self.send_waiting();
        if let Some(socket) = &mut self.socket {
            if fills {
                while self.receiver.post_private(socket) {}
            } else if self.is_active {
                self.receiver.post_waiting(socket);
            }
            match socket.wake() {
                Ok(all) => {
                    self.is_pending = !all;
                    self.is_down = false;
                }
                Err(XdpError::Down) => self.is_down = true,
                Err(XdpError::InterfaceRemoved) => return Err(gone()),
                Err(error) => self.fail(&error.to_string()),
            }
        }
        if let Some(socket) = &mut self.socket {
            self.transmitter.complete(socket);
            self.kernel_drops.update(socket, now);
        }
        self.kernel_drops.add_to(tally);
        let long = self.interface.long_frames(self.queue);
        tally.rx_long += long.wrapping_sub(self.long_frames);
        self.long_frames = long;
        tally.rx_dropped += self.receiver.take_lost();
        tally.rx_copied += self.receiver.take_copied();
        tally.tx_copied += self.transmitter.take_copied();
        Ok(())
    }

    /// The socket is of no use any more, or not as it is used.
    fn fail(&mut self, reason: &str) {
        tracing::warn!("{}: {reason}: the socket is replaced", self.name);
        let last = self.failed_at.replace(self.now);
        if last.is_some_and(|last| self.now < last + RETRY) {
            self.opening.pause(self.now);
        }
        self.close_soon(Duration::ZERO);
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let poll = match &self.socket {
            _ if self.close_at.is_some() || self.is_pending => Some(POLL),
            Some(socket) if socket.in_flight() > 0 && !self.is_down => {
                Some(match socket.is_zero_copy() {
                    true => POLL,
                    false => POLL_REPORTED,
                })
            }
            _ => None,
        };
        let poll = poll.map(|poll| self.now + poll);
        let socket = earlier(poll, self.opening.next_timeout());
        let is_starved = self.is_active && !self.receiver.has_posted();
        earlier(socket, self.kernel_drops.next_timeout(is_starved))
    }

    /// The socket that can be used now, if there is one. It is wanted from now on.
    fn usable(&mut self) -> Option<&mut XdpSocket> {
        self.is_wanted = true;
        if self.socket.is_none() {
            self.advance();
        }
        match self.close_at {
            Some(_) => None,
            None => self.socket.as_mut(),
        }
    }

    pub(super) fn post(&mut self, memory: &Arc<Memory>, chain: &Chain) -> bool {
        if self.usable().is_none() {
            return false;
        }
        self.socket.as_mut().is_some_and(|socket| {
            let is_same = lies_in(socket, memory);
            self.receiver.post(socket, chain, is_same)
        })
    }

    pub(super) fn take(&mut self, memory: &Memory, chain: &Chain) -> Result<Taken, FrameError> {
        if self.usable().is_none() {
            return Err(FrameError::NotNow);
        }
        let socket = self.socket.as_mut().ok_or(FrameError::NotNow)?;
        let taken = self.receiver.take(socket, (memory, chain), &self.name);
        taken.map_err(|failure| self.frame_error(failure))
    }

    pub(super) fn receive(
        &mut self,
        slices: &[GuestSlice<'_>],
        rest: &mut [u8],
    ) -> Result<usize, FrameError> {
        if self.usable().is_none() {
            return Err(FrameError::NotNow);
        }
        let socket = self.socket.as_mut().ok_or(FrameError::NotNow)?;
        let received = self.receiver.receive(socket, (slices, rest), &self.name);
        received.map_err(|failure| self.frame_error(failure))
    }

    fn frame_error(&mut self, failure: Failure) -> FrameError {
        match failure {
            Failure::Frame(error) => error,
            Failure::Driver(reason) => {
                self.receiver.copies = true;
                self.fail(&reason);
                FrameError::NotNow
            }
        }
    }

    pub(super) fn send(&mut self, frame: &Frame<'_>, number: u64) -> Result<Sent, FrameError> {
        let is_down = self.is_down;
        if self.usable().is_none() {
            return match self.opening.has_failed() && self.socket.is_none() {
                true => Err(FrameError::LinkDown),
                false => Err(FrameError::NotNow),
            };
        }
        let Some(socket) = self.socket.as_mut().filter(|_| !is_down) else {
            return Err(FrameError::LinkDown);
        };
        let is_same = frame.memory.is_some_and(|memory| lies_in(socket, memory));
        self.transmitter.send(socket, frame, number, is_same)
    }

    /// Sends a frame of this process; without a socket, as soon as there is one.
    pub(super) fn send_copy(&mut self, bytes: &[u8]) -> Result<(), FrameError> {
        match self.send(&Frame::of_bytes(Header::default(), bytes), 0) {
            Err(FrameError::NotNow | FrameError::LinkDown) if self.waiting.len() < MAX_WAITING => {
                self.waiting.push_back(bytes.into());
                Ok(())
            }
            sent => sent.map(drop),
        }
    }

    /// Sends frames that have waited for the socket.
    fn send_waiting(&mut self) {
        while self.socket.is_some()
            && let Some(bytes) = self.waiting.pop_front()
        {
            let sent = self.send(&Frame::of_bytes(Header::default(), &bytes), 0);
            if matches!(sent, Err(FrameError::NotNow | FrameError::LinkDown)) {
                self.waiting.push_front(bytes);
                return;
            }
        }
    }

    pub(super) fn has_room(&self) -> bool {
        match &self.socket {
            Some(socket) => {
                self.close_at.is_none() && (self.is_down || self.transmitter.has_room(socket))
            }
            None => self.opening.has_failed(),
        }
    }

    pub(super) fn pop_sent(&mut self) -> Option<u64> {
        self.transmitter.pop_returned()
    }

    pub(super) fn recall(&mut self, half: Half) -> Quiesced {
        self.is_wanted = false;
        match half {
            Half::Receive => {
                self.forget_chains();
                if self.forgets {
                    self.close_soon(LINGER);
                }
            }
            Half::Transmit if !self.transmitter.is_idle() => self.close_soon(LINGER),
            Half::Transmit => {}
        }
        self.advance();
        let is_in_use = match half {
            Half::Receive => self.receiver.has_posted() || self.opening.is_closing(),
            Half::Transmit => !self.transmitter.is_idle(),
        };
        match is_in_use {
            true => Quiesced::Waits,
            false => Quiesced::Done,
        }
    }
}

/// Whether the socket has this memory.
fn lies_in(socket: &XdpSocket, memory: &Arc<Memory>) -> bool {
    let of_socket = socket.umem().memory();
    of_socket.is_some_and(|of_socket| Arc::ptr_eq(of_socket, memory))
}

/// How the interface passes frames on, for the log.
pub(super) fn mode(interface: &XdpInterface, socket: &XdpSocket) -> String {
    let program = match interface.attached() {
        AttachMode::Driver => "its driver",
        AttachMode::Generic => "the network stack (generic)",
    };
    let frames = match socket.is_zero_copy() {
        true => "its driver reads and writes frames (zero copy)",
        false => "the kernel copies frames",
    };
    format!("the XDP program runs in {program}, {frames}")
}

pub(super) fn gone() -> FrameError {
    FrameError::BackendGone(std::io::Error::other("the interface was removed"))
}

#[cfg(test)]
#[path = "port_tests.rs"]
mod tests;
