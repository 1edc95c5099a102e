//! A port with a back-end instead of a guest.
//!
//! Frames of guests go to the back-end from their memory, without a copy by us. A frame of the back-end
//! is received into memory of the uplink, because its receiver is known only then, and copied from there.
//! A back-end without offloads gets complete checksums and segments, which are made when a frame is the next one to
//! send.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use zerosock_proto::Instant;
use zerosock_proto::wire::net::{ETHERNET_LEN, Header, MAX_FRAME, Offloads, Repr};
use zerosock_ring::{Memory, Piece, SliceBuf};
use zerosock_sys::memfd;
use zerosock_virtio::deadline::earlier;
use zerosock_virtio::device::{Context, Event, WorkerDevice};
use zerosock_virtio::outbox::{DeviceAddr, Outbox};

use super::frames::{Content, Inbox, PortMessage};
use super::port::{Sender, undeliverable};
use super::table::Switch;
use crate::backend::{ADDRESSES_LEN, Addresses, Backend, Frame, FrameError, Never, Sent};
use crate::device::{BackendGoneEvent, backend_token, interest};
use crate::readable::Readable;
use crate::stats::{Counters, NetStats};

/// Bytes of memory for received frames: those of a turn, one behind the other.
const ROOM: usize = 1 << 20;
/// Frames received in a turn.
const FRAMES: usize = 256;
/// Frames begin at multiples of it.
const ALIGN: usize = 64;

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
    pub gone: Arc<BackendGoneEvent>,
}

/// A port with a back-end instead of a guest.
pub struct Uplink<B> {
    config: UplinkConfig,
    backend: B,
    sender: Sender,
    /// Frames of guests that the back-end has not taken.
    inbox: Inbox,
    memory: Arc<Memory>,
    /// All of it.
    room: Piece,
    /// Bytes of it in use, from the start on.
    used: usize,
    /// The number of the next frame in it.
    next_number: u64,
    readable: Readable,
    blocked: bool,
    /// The back-end's descriptor is polled for room.
    polls_room: bool,
    is_gone: bool,
    tally: NetStats,
}

impl<B> std::fmt::Debug for Uplink<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uplink")
            .field("name", &self.config.name)
            .finish_non_exhaustive()
    }
}

impl<B: Backend<Message = Never>> Uplink<B> {
    /// A port of `switch` with this back-end, the first queue of which it uses. A back-end never holds
    /// frames of an uplink: they have private addresses.
    ///
    /// # Errors
    /// No memory is to be had, the switch has too many ports, or the back-end has gone.
    pub fn new(
        config: UplinkConfig,
        switch: &Arc<Switch>,
        mut backend: B,
    ) -> io::Result<Uplink<B>> {
        let size = ROOM as u64;
        let file: OwnedFd = memfd::create("zerosock-uplink", size, true)?;
        let memory = Memory::of_file(file, size).map_err(io::Error::other)?;
        let mut room = Vec::new();
        let translated = memory.translate(0, ROOM as u32, &mut room);
        translated.map_err(io::Error::other)?;
        let [room] = room[..] else {
            return Err(io::Error::other("a region in several pieces"));
        };
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
        let mut inbox = Inbox::default();
        inbox.offloads = Offloads::of_device(features);
        switch.table().set_offloads(config.addr, inbox.offloads);
        Ok(Uplink {
            config,
            backend,
            sender,
            inbox,
            memory: Arc::new(memory),
            room,
            used: 0,
            next_number: 0,
            readable: Readable::default(),
            blocked: false,
            polls_room: false,
            is_gone: false,
            tally: NetStats::default(),
        })
    }

    /// Sends what guests have sent, as far as the back-end takes it.
    fn send(&mut self, now: Instant) {
        self.blocked &= !self.backend.has_room(0);
        while !self.blocked && !self.is_gone {
            let backend = &mut self.backend;
            let sent = self
                .inbox
                .with_next(|frame| (frame.len, backend.send(0, frame, 0, now)));
            match sent {
                None => return,
                Some((_, Err(FrameError::NotNow))) => {
                    self.blocked = true;
                    return;
                }
                Some((len, Ok(sent))) => {
                    debug_assert_eq!(sent, Sent::Done);
                    self.tally.tx_frames += 1;
                    self.tally.tx_bytes += len as u64;
                    if self.backend.may_have_answers() {
                        self.readable.set();
                    }
                }
                Some((_, Err(FrameError::LinkDown))) => self.tally.tx_link_down += 1,
                Some((_, Err(FrameError::BackendGone(error)))) => self.lose_backend(&error),
                Some((_, Err(_))) => self.tally.tx_refused += 1,
            }
            self.inbox.pop();
        }
    }

    /// Receives frames and sends them to guests. Returns whether there may be more.
    fn receive(&mut self, now: Instant) -> bool {
        if !self.sender.is_idle() {
            // A message follows when the memory has come back.
            return false;
        }
        self.used = 0;
        for _ in 0..FRAMES {
            if !self.readable.check(now) {
                return false;
            }
            if self.used + MAX_FRAME > ROOM {
                break;
            }
            self.receive_one(now);
        }
        true
    }

    fn receive_one(&mut self, now: Instant) {
        let pieces = [self.room.part(self.used, MAX_FRAME)];
        let mut header = Header::default();
        let mut slices = SliceBuf::<1>::new();
        self.memory.slices(&pieces, 0, MAX_FRAME, &mut slices);
        let len = match self.backend.receive(0, &mut header, &slices, &mut []) {
            Ok(len) => len,
            Err(FrameError::NotNow) => return self.readable.clear(),
            Err(error) => {
                self.tally.rx_dropped += u64::from(matches!(error, FrameError::Refused));
                self.readable.fail(now);
                if let FrameError::BackendGone(error) = error {
                    self.lose_backend(&error);
                }
                return;
            }
        };
        let addresses: Option<Addresses> = self.memory.read_array(&pieces, 0);
        let repr = Repr::parse(&header, len, Offloads::ALL);
        let (Some(addresses), Ok(repr), ETHERNET_LEN..=MAX_FRAME) = (addresses, repr, len) else {
            self.tally.rx_dropped += 1;
            return;
        };
        let frame = Frame {
            header: repr.emit(),
            len,
            first: &addresses,
            memory: Some(&self.memory),
            pieces: &pieces,
            skip: ADDRESSES_LEN,
            slices: &[],
        };
        match self.sender.send(&frame, self.next_number, now) {
            Ok(Sent::Held) => {
                self.used += len.next_multiple_of(ALIGN);
                self.next_number += 1;
            }
            Ok(Sent::Done) => {}
            Err(_) => {
                self.tally.rx_dropped += 1;
                return;
            }
        }
        self.tally.rx_frames += 1;
        self.tally.rx_bytes += len as u64;
    }

    /// Returns batches to their senders, and sends those of this turn to their receivers.
    fn finish(&mut self, outbox: &mut Outbox<PortMessage>) {
        let batch = self.inbox.take_batch();
        self.sender.return_batch(batch);
        let losses = self.inbox.take_losses();
        self.tally.tx_copied += losses.copied;
        self.tally.tx_refused += losses.no_room + losses.unfit;
        self.sender.flush(outbox);
    }

    /// Polls the back-end for room while it has none.
    fn poll_room(&mut self, cx: &Context<'_, Self>) {
        if self.blocked != self.polls_room
            && let Some(descriptor) = self.backend.descriptor(0)
        {
            self.polls_room = self.blocked;
            let token = backend_token(self.config.addr, 0);
            let interest = interest(self.blocked);
            if let Err(error) = cx.poller.change(descriptor, token, interest) {
                self.lose_backend(&error);
            }
        }
    }

    fn lose_backend(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.is_gone, true) {
            let name = &self.config.name;
            tracing::error!("{name}: the uplink has gone: {error}");
            self.readable.clear();
            self.inbox.clear();
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
        if let Some(descriptor) = self.backend.descriptor(0) {
            let token = backend_token(self.config.addr, 0);
            cx.poller.add(descriptor, token, interest(false))?;
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
            Content::Returned(batch) => {
                self.sender.accept_returned(batch);
                // The memory is used again when all of it has come back.
                while self.sender.pop_returned().is_some() {}
            }
            Content::Frames(batch) if self.is_gone => self.sender.return_batch(Some(batch)),
            Content::Frames(batch) => {
                self.inbox.add_batch(batch);
                self.send(cx.now);
            }
        }
        self.finish(cx.outbox);
    }

    fn undeliverable(message: PortMessage, outbox: &mut Outbox<PortMessage>) {
        undeliverable(message, outbox);
    }

    fn turn(&mut self, cx: &mut Context<'_, Self>) -> bool {
        let mut more = false;
        if !self.is_gone {
            self.send(cx.now);
            more = self.receive(cx.now);
            self.poll_room(cx);
            if let Err(FrameError::BackendGone(error)) =
                self.backend.flush(0, cx.now, &mut self.tally)
            {
                self.lose_backend(&error);
            }
        }
        self.finish(cx.outbox);
        self.config.counters.add(std::mem::take(&mut self.tally));
        more
    }

    fn next_timeout(&self) -> Option<Instant> {
        if self.is_gone {
            return None;
        }
        earlier(self.backend.next_timeout(), self.readable.next_timeout())
    }

    fn retire(&mut self, cx: &mut Context<'_, Self>) {
        self.sender.switch.table().remove(self.config.addr);
        self.inbox.clear();
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
#[path = "uplink_tests.rs"]
mod tests;
