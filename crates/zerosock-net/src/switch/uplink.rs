//! A port with a back-end instead of a guest.
//!
//! Frames of guests go to the back-end from their memory, without a copy by us. A frame of the back-end
//! is received into memory of the uplink, because its receiver is known only then, and copied from there.
//! A back-end without offloads gets complete checksums and segments ([`software`]). A frame waits as it is and is
//! cut when it is the next one to send: so the buffers of its sender bound what waits, and the segments of one frame at
//! a time are in copies.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use zerosock_proto::Instant;
use zerosock_proto::wire::net::{ETHERNET_LEN, Header, MAX_FRAME, Offloads, Repr};
use zerosock_ring::{Memory, Piece, RegionConfig, SliceBuf};
use zerosock_sys::memfd;
use zerosock_virtio::deadline::earlier;
use zerosock_virtio::device::{Context, Event, WorkerDevice};
use zerosock_virtio::outbox::{DeviceAddr, Outbox};
use zerosock_virtio::poller::{Interest, Token};

use super::frames::{Content, Forwarded, Inbox, PortMessage};
use super::port::{Sender, undeliverable};
use super::software;
use super::table::Switch;
use crate::backend::{ADDRESSES_LEN, Addresses, Backend, Frame, FrameError, Never, Sent};
use crate::device::{BACKEND, Gone};
use crate::readable::Readable;
use crate::stats::{Counters, Stats};

/// Bytes of the place for one received frame.
const SLOT: usize = MAX_FRAME.next_multiple_of(4096);
/// Received frames that their receivers have not copied yet.
const SLOTS: usize = 64;
/// Frames in a turn, for each direction.
const FRAMES: usize = 256;
/// Bytes received in a turn, and bytes of frames that are cut.
const BYTES: u64 = 1 << 20;

/// What an uplink is told when it is made.
#[derive(Debug)]
pub struct UplinkConfig {
    /// The address on its worker.
    pub addr: DeviceAddr,
    /// The name in the log.
    pub name: String,
    /// Where the uplink counts. `rx` is towards guests, as for a device.
    pub counters: Arc<Counters>,
    /// Where the uplink reports that its back-end has gone.
    pub gone: Arc<Gone>,
}

/// A port with a back-end instead of a guest.
pub struct Uplink<B> {
    config: UplinkConfig,
    backend: B,
    sender: Sender,
    /// Frames of guests that the back-end has not taken.
    inbox: Inbox,
    /// Frames of guests that the back-end holds in their memory.
    held: VecDeque<Forwarded>,
    /// The number of the first of them.
    first: u64,
    memory: Arc<Memory>,
    /// Slots that are free.
    free: Vec<u16>,
    /// Those that the back-end takes.
    offloads: Offloads,
    readable: Readable,
    blocked: bool,
    is_gone: bool,
    tally: Stats,
}

impl<B> std::fmt::Debug for Uplink<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uplink")
            .field("name", &self.config.name)
            .finish_non_exhaustive()
    }
}

impl<B: Backend<Message = Never>> Uplink<B> {
    /// A port of `switch` with this back-end, the first queue of which it uses.
    ///
    /// # Errors
    /// No memory is to be had, the switch has too many ports, or the back-end has gone.
    pub fn new(
        config: UplinkConfig,
        switch: &Arc<Switch>,
        mut backend: B,
    ) -> io::Result<Uplink<B>> {
        let size = (SLOT * SLOTS) as u64;
        let file: OwnedFd = memfd::create("zerosock-uplink", size, true)?;
        let region = RegionConfig {
            guest_addr: 0,
            user_addr: 0,
            len: size,
            fd_offset: 0,
        };
        let memory = Memory::map(vec![(file, region)]).map_err(io::Error::other)?;
        let mut sender = Sender::new(Arc::clone(switch));
        sender.addr = config.addr;
        backend.start(config.addr)?;
        if !switch.table().add(config.addr, None) {
            return Err(io::Error::other("the switch has too many ports"));
        }
        switch.table().set_active(config.addr, true);
        let features = backend.features();
        let taken = Offloads::of_driver(features);
        if let Err(error) = backend.set_offloads(taken) {
            let name = &config.name;
            tracing::warn!("{name}: without offloads, frames come in segments: {error}");
        }
        Ok(Uplink {
            config,
            backend,
            sender,
            inbox: Inbox::default(),
            held: VecDeque::new(),
            first: 0,
            memory: Arc::new(memory),
            free: (0..SLOTS as u16).collect(),
            offloads: Offloads::of_device(features),
            readable: Readable::default(),
            blocked: false,
            is_gone: false,
            tally: Stats::default(),
        })
    }

    /// Sends what guests have sent. Returns whether there may be more.
    fn send(&mut self, now: Instant) -> bool {
        self.blocked &= !self.backend.has_room(0);
        while let Some(number) = self.backend.sent(0) {
            // Back-ends complete frames in their order.
            if number == self.first
                && let Some(frame) = self.held.pop_front()
            {
                self.first += 1;
                self.sender.give_back(frame);
            }
        }
        let mut converted = 0;
        for _ in 0..FRAMES {
            let Some(frame) = self.inbox.front().filter(|_| !self.blocked) else {
                return false;
            };
            if !software::is_accepted(&frame.header, frame.len, self.offloads) {
                if converted >= BYTES {
                    return true;
                }
                converted += frame.len as u64;
                self.convert_front();
                continue;
            }
            let number = self.first + self.held.len() as u64;
            let sent = frame.with_frame(|frame| self.backend.send(0, frame, number, now));
            let len = frame.len as u64;
            if matches!(sent, Err(FrameError::NotNow)) {
                self.blocked = true;
                return false;
            }
            let Some(frame) = self.inbox.pop() else {
                return false;
            };
            match sent {
                Ok(sent) => {
                    self.tally.tx_frames += 1;
                    self.tally.tx_bytes += len;
                    if sent == Sent::Held {
                        self.held.push_back(frame);
                        continue;
                    }
                    self.first += u64::from(self.held.is_empty());
                }
                Err(FrameError::LinkDown) => self.tally.tx_link_down += 1,
                Err(FrameError::Gone(error)) => self.lose_backend(&error),
                Err(_) => self.tally.tx_refused += 1,
            }
            self.sender.give_back(frame);
        }
        true
    }

    /// Puts what the back-end takes in the place of the next frame.
    fn convert_front(&mut self) {
        let Some(frame) = self.inbox.front() else {
            return;
        };
        let converted = software::convert(&frame.header, frame.bytes(), self.offloads);
        let converted = converted.unwrap_or_default().into_iter();
        // Each frame is converted once.
        let accepted = converted
            .filter(|(header, bytes)| software::is_accepted(header, bytes.len(), self.offloads));
        let frames = accepted.filter_map(|(header, bytes)| Forwarded::of_bytes(header, &bytes));
        let frames: Vec<Forwarded> = frames.collect();
        self.tally.tx_refused += u64::from(frames.is_empty());
        if let Some(frame) = self.inbox.replace_front(frames) {
            self.sender.give_back(frame);
        }
    }

    /// Adds a frame of a guest.
    fn push(&mut self, frame: Forwarded, now: Instant) {
        if let Some(frame) = self.inbox.push(frame, now) {
            self.tally.tx_refused += 1;
            self.sender.give_back(frame);
        }
    }

    /// Receives frames and sends them to guests. Returns whether there may be more.
    fn receive(&mut self, now: Instant) -> bool {
        let before = self.tally.rx_bytes;
        for _ in 0..FRAMES {
            if !self.readable.check(now) {
                return false;
            }
            if self.tally.rx_bytes - before >= BYTES {
                return true;
            }
            let Some(slot) = self.free.pop() else {
                // A message follows when one has become free.
                return false;
            };
            if !self.receive_into(slot, now) {
                self.free.push(slot);
            }
        }
        true
    }

    /// Receives a frame into a slot. False: the slot is free again.
    fn receive_into(&mut self, slot: u16, now: Instant) -> bool {
        let memory = Arc::clone(&self.memory);
        let mut all = Vec::with_capacity(1);
        let start = u64::from(slot) * SLOT as u64;
        if memory.translate(start, SLOT as u32, &mut all).is_err() {
            return false;
        }
        let pieces: &[Piece] = &all;
        let mut header = Header::default();
        let mut slices = SliceBuf::<1>::new();
        memory.slices(pieces, 0, SLOT, &mut slices);
        let len = match self.backend.receive(0, &mut header, &slices, &mut []) {
            Ok(len) => len,
            Err(FrameError::NotNow) => {
                self.readable.clear();
                return false;
            }
            Err(error) => {
                self.tally.rx_dropped += u64::from(matches!(error, FrameError::Refused));
                self.readable.fail(now);
                if let FrameError::Gone(error) = error {
                    self.lose_backend(&error);
                }
                return false;
            }
        };
        let addresses: Option<Addresses> = memory.read_array(pieces, 0);
        let repr = Repr::parse(&header, len, Offloads::ALL);
        let (Some(addresses), Ok(repr), ETHERNET_LEN..=MAX_FRAME) = (addresses, repr, len) else {
            self.tally.rx_dropped += 1;
            return false;
        };
        self.tally.rx_frames += 1;
        self.tally.rx_bytes += len as u64;
        let frame = Frame {
            header: repr.emit(),
            len,
            first: &addresses,
            memory: Some(&memory),
            pieces,
            skip: ADDRESSES_LEN,
            slices: &[],
        };
        matches!(
            self.sender.send(&frame, u64::from(slot), now),
            Ok(Sent::Held)
        )
    }

    fn lose_backend(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.is_gone, true) {
            let name = &self.config.name;
            tracing::error!("{name}: the uplink has gone: {error}");
            self.readable.clear();
            self.sender
                .switch
                .table()
                .set_active(self.config.addr, false);
            self.config.gone.report();
        }
    }
}

impl<B: Backend<Message = Never>> WorkerDevice for Uplink<B> {
    type Shared = ();
    type Message = PortMessage;

    fn addr(&self) -> DeviceAddr {
        self.config.addr
    }

    fn start(&mut self, cx: &mut Context<'_, Self>) -> io::Result<()> {
        let token = Token {
            device: self.config.addr.number,
            kind: BACKEND,
            key: 0,
        };
        if let Some(descriptor) = self.backend.descriptor(0) {
            cx.poller.add(descriptor, token, Interest::All)?;
        }
        self.backend.set_active(0, true)
    }

    fn on_event(&mut self, event: Event, _: &mut Context<'_, Self>) {
        if event.readiness.readable() && !self.is_gone {
            self.readable.set();
        }
        self.blocked &= !event.readiness.writable();
        if event.readiness.has_error() {
            self.lose_backend(&io::Error::other("it was removed"));
        }
    }

    fn on_message(&mut self, message: PortMessage, cx: &mut Context<'_, Self>) {
        match message.0 {
            Content::Returned(slot) => {
                self.sender.lent = self.sender.lent.saturating_sub(1);
                self.free.extend(u16::try_from(slot));
            }
            Content::Frame(frame) if self.is_gone => self.sender.give_back(frame),
            Content::Frame(frame) => self.push(frame, cx.now),
        }
    }

    fn undeliverable(message: PortMessage, cx: &mut Context<'_, Self>) {
        undeliverable(message, cx.outbox);
    }

    fn turn(&mut self, cx: &mut Context<'_, Self>) -> bool {
        let mut more = false;
        if !self.is_gone {
            more |= self.send(cx.now);
            more |= self.receive(cx.now);
            if let Err(FrameError::Gone(error)) = self.backend.flush(0, cx.now, &mut self.tally) {
                self.lose_backend(&error);
            }
        }
        while let Some(frame) = self.inbox.pop_expired(cx.now) {
            self.tally.tx_refused += 1;
            self.sender.give_back(frame);
        }
        self.sender.flush(cx.outbox);
        self.config.counters.add(std::mem::take(&mut self.tally));
        more
    }

    fn next_timeout(&self) -> Option<Instant> {
        let backend = self.backend.next_timeout().filter(|_| !self.is_gone);
        let frames = earlier(self.inbox.next_timeout(), self.readable.next_timeout());
        earlier(frames, backend)
    }

    fn retire(&mut self, cx: &mut Context<'_, Self>) {
        self.sender.switch.table().remove(self.config.addr);
        let held = std::mem::take(&mut self.held);
        held.into_iter()
            .for_each(|frame| self.sender.give_back(frame));
        while let Some(frame) = self.inbox.remove() {
            self.sender.give_back(frame);
        }
        self.sender.flush(cx.outbox);
        if let Some(descriptor) = self.backend.descriptor(0) {
            cx.poller.remove(descriptor);
        }
        // It has no device to send messages to.
        let mut outbox = Outbox::new(self.config.addr.worker);
        self.backend.retire(&mut outbox);
    }

    fn end(&mut self, cx: &mut Context<'_, Self>) {
        self.turn(cx);
    }
}

#[cfg(test)]
mod tests;
