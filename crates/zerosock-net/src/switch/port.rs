//! A port with a guest.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use zerosock_proto::Instant;
use zerosock_proto::wire::net::{Header, Mac, Offloads};
use zerosock_ring::{GuestSlice, Piece};
use zerosock_virtio::outbox::{DeviceAddr, Outbox};
use zerosock_virtio::queues::Quiesced;

use super::frames::{self, Batch, Content, Inbox, PortMessage};
use super::software;
use super::table::{Route, Switch};
use crate::backend::{Addresses, Backend, Frame, FrameError, Half, Sent};
use crate::model::ALL_OFFLOADS;
use crate::stats::NetStats;

/// Bytes of frames for several ports that one port has sent and that have not been copied to all of
/// them: each frame counts once for each receiver, and each segment where a receiver has it cut. One frame
/// is always sent, unless it has more than [`MAX_CUT`] segments in all.
const MAX_FLOODED: usize = 1 << 20;
/// Bytes that a frame for several ports, or a segment of it, counts at least.
const MIN_FLOODED: usize = 256;
/// Segments of a frame for several ports, at all receivers that have it cut.
const MAX_CUT: usize = MAX_FLOODED / MIN_FLOODED;
/// Bytes that each of its pieces counts at least: their places are copied for each receiver.
const MIN_PIECE: usize = size_of::<Piece>();
/// Empty batches that a port keeps for the next frames.
const MAX_SPARE: usize = 4;

/// A port with a guest.
#[derive(Debug)]
pub struct SwitchPort {
    sender: Sender,
    mac: Option<Mac>,
    /// A driver uses the port.
    active: bool,
    inbox: Inbox,
}

/// The sending side of any port.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) switch: Arc<Switch>,
    pub(super) addr: DeviceAddr,
    /// What was sent in this turn, one batch for each receiver.
    out: Vec<(DeviceAddr, Batch)>,
    /// The addresses of the last frame, and the index of its batch.
    last: Option<(Addresses, usize)>,
    /// Batches of other ports that go back to them.
    returning: Vec<Batch>,
    /// Batches that have not come back.
    lent: usize,
    /// Frames for several ports of which some have not come back, in the order of their numbers.
    floods: VecDeque<Flood>,
    /// Numbers of frames that no receiver needs any more.
    returned: Vec<u64>,
    /// See [`MAX_FLOODED`].
    flooded: usize,
    spare: Vec<Batch>,
}

/// A frame for several ports.
#[derive(Debug)]
struct Flood {
    number: u64,
    /// Receivers that have not returned it.
    left: usize,
}

/// How many frames a receiver with these offloads makes of this one, and their bytes.
fn cut(frame: &Frame<'_>, offloads: Offloads) -> (usize, usize) {
    software::cut(&frame.header, frame.len, offloads)
}

/// What a frame for several ports counts for a receiver that makes so many frames of these bytes of it: see
/// [`MAX_FLOODED`].
fn flooded_bytes(frame: &Frame<'_>, (segments, len): (usize, usize)) -> usize {
    let pieces = MIN_PIECE * frame.pieces.len();
    (segments * len.max(MIN_FLOODED)).max(pieces)
}

impl Sender {
    pub(super) fn new(switch: Arc<Switch>) -> Sender {
        Sender {
            switch,
            addr: DeviceAddr {
                worker: 0,
                number: 0,
            },
            out: Vec::new(),
            last: None,
            returning: Vec::new(),
            lent: 0,
            floods: VecDeque::new(),
            returned: Vec::new(),
            flooded: 0,
            spare: Vec::new(),
        }
    }

    /// Sends a frame, the addresses of which are in a private copy.
    #[inline]
    pub(super) fn send(
        &mut self,
        frame: &Frame<'_>,
        number: u64,
        now: Instant,
    ) -> Result<Sent, FrameError> {
        let addresses = frame.first.first_chunk().ok_or(FrameError::Refused)?;
        match self.last {
            // Within a turn, nothing changes the way of a frame.
            Some((last, at)) if last == *addresses => {
                self.push(at, frame, addresses, (number, None));
            }
            _ => match self.send_first(frame, addresses, number, now) {
                Ok(true) => {}
                Ok(false) => return Ok(Sent::Done),
                Err(error) => return Err(error),
            },
        }
        if frame.memory.is_none() {
            return Ok(Sent::Done);
        }
        Ok(Sent::Held)
    }

    /// As `send`, for a frame with other addresses than the one before it. False: it goes nowhere.
    #[inline(never)]
    fn send_first(
        &mut self,
        frame: &Frame<'_>,
        addresses: &Addresses,
        number: u64,
        now: Instant,
    ) -> Result<bool, FrameError> {
        let mut table = self.switch.table();
        let to = match table.route(self.addr, addresses, now) {
            Route::Nowhere => return Ok(false),
            Route::Port(to) => vec![(to, Offloads::ALL)],
            Route::Flood => table.others(self.addr).collect(),
        };
        drop(table);
        let is_flooded = to.len() > 1;
        // The receivers take a copy of a frame without memory at once.
        if is_flooded && frame.memory.is_some() {
            self.charge(frame, number, &to)?;
        }
        for (port, offloads) in &to {
            let charge = is_flooded.then(|| flooded_bytes(frame, cut(frame, *offloads)));
            let at = self.batch(*port);
            self.push(at, frame, addresses, (number, charge));
            self.last = (to.len() == 1).then_some((*addresses, at));
        }
        Ok(!to.is_empty())
    }

    /// Charges a frame for several ports before any of them copies or cuts it.
    fn charge(
        &mut self,
        frame: &Frame<'_>,
        number: u64,
        to: &[(DeviceAddr, Offloads)],
    ) -> Result<(), FrameError> {
        let (mut bytes, mut segments) = (0, 0);
        for (_, offloads) in to {
            let cut = cut(frame, *offloads);
            bytes += flooded_bytes(frame, cut);
            segments += cut.0;
        }
        if segments > MAX_CUT || self.flooded > 0 && self.flooded + bytes > MAX_FLOODED {
            return Err(FrameError::Refused);
        }
        self.flooded += bytes;
        let left = to.len();
        self.floods.push_back(Flood { number, left });
        Ok(())
    }

    /// The index of the batch for a port.
    fn batch(&mut self, to: DeviceAddr) -> usize {
        if let Some(at) = self.out.iter().position(|(other, _)| *other == to) {
            return at;
        }
        let batch = self.spare.pop().unwrap_or_else(|| Batch::new(self.addr));
        self.out.push((to, batch));
        self.lent += 1;
        self.out.len() - 1
    }

    #[inline]
    fn push(
        &mut self,
        at: usize,
        frame: &Frame<'_>,
        addresses: &Addresses,
        (number, charge): (u64, Option<usize>),
    ) {
        if let Some((_, batch)) = self.out.get_mut(at) {
            batch.push(frame, addresses, (number, charge));
        }
    }

    /// Returns a batch of another port, whose memory is not read any more, to that port.
    pub(super) fn return_batch(&mut self, batch: Option<Batch>) {
        self.returning.extend(batch);
    }

    /// Takes back a batch of this port, and frees the frames that no other batch has.
    pub(super) fn accept_returned(&mut self, batch: Batch) {
        self.lent = self.lent.saturating_sub(1);
        for frame in batch.frames() {
            let Some(charge) = frame.charge else {
                self.returned.push(frame.number);
                continue;
            };
            self.flooded = self.flooded.saturating_sub(charge);
            let at = (self.floods).binary_search_by_key(&frame.number, |flood| flood.number);
            if let Some(flood) = at.ok().and_then(|at| self.floods.get_mut(at)) {
                flood.left -= 1;
            }
        }
        // Later ones follow: each receiver returns the frames in their order.
        while let Some(&Flood { number, left: 0 }) = self.floods.front() {
            self.floods.pop_front();
            self.returned.push(number);
        }
        if self.spare.len() < MAX_SPARE {
            self.spare.push(batch.emptied());
        }
    }

    /// The number of a frame that no receiver needs any more, in any order.
    pub(super) fn pop_returned(&mut self) -> Option<u64> {
        self.returned.pop()
    }

    /// Gives back the memory of lists that are empty.
    fn shrink(&mut self) {
        self.spare = Vec::new();
        self.floods.shrink_to_fit();
        self.returned.shrink_to_fit();
        self.out.shrink_to_fit();
        self.returning.shrink_to_fit();
    }

    /// Whether all memory has come back.
    pub(super) fn is_idle(&self) -> bool {
        self.lent == 0
    }

    /// The end of a turn.
    pub(super) fn flush(&mut self, outbox: &mut Outbox<PortMessage>) {
        self.last = None;
        for (to, batch) in self.out.drain(..) {
            outbox.send(to, PortMessage(Content::Frames(batch)));
        }
        for batch in self.returning.drain(..) {
            outbox.send(batch.from, PortMessage(Content::Returned(batch)));
        }
    }
}

/// Answers a message to a port that has gone.
pub(super) fn undeliverable(message: PortMessage, outbox: &mut Outbox<PortMessage>) {
    if let Content::Frames(batch) = message.0 {
        outbox.send(batch.from, PortMessage(Content::Returned(batch)));
    }
}

impl SwitchPort {
    /// A port. Frames to `mac` go there and to no other one; without it the switch learns addresses
    /// from the source of frames.
    pub fn new(switch: Arc<Switch>, mac: Option<Mac>) -> SwitchPort {
        SwitchPort {
            sender: Sender::new(switch),
            mac,
            active: false,
            inbox: Inbox::default(),
        }
    }
}

impl Backend for SwitchPort {
    type Message = PortMessage;

    fn start(&mut self, addr: DeviceAddr) -> io::Result<()> {
        self.sender.addr = addr;
        match self.sender.switch.table().add(addr, self.mac) {
            true => Ok(()),
            false => Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                "the switch has too many ports, or the address is that of another one",
            )),
        }
    }

    fn features(&self) -> u64 {
        ALL_OFFLOADS
    }

    fn needs_addresses(&self) -> bool {
        true
    }

    fn set_offloads(&mut self, offloads: Offloads) -> io::Result<()> {
        self.inbox.offloads = offloads;
        let table = &self.sender.switch;
        table.table().set_offloads(self.sender.addr, offloads);
        Ok(())
    }

    /// The memory of frames for a driver goes with it.
    fn set_active(&mut self, _: usize, active: bool) -> io::Result<()> {
        self.active = active;
        self.sender.shrink();
        let addr = self.sender.addr;
        self.sender.switch.table().set_active(addr, active);
        self.inbox.clear();
        Ok(())
    }

    fn next_len(&mut self, _: usize) -> Option<usize> {
        self.inbox.next_len()
    }

    #[inline]
    fn receive(
        &mut self,
        _: usize,
        header: &mut Header,
        slices: &[GuestSlice<'_>],
        rest: &mut [u8],
    ) -> Result<usize, FrameError> {
        let received = self.inbox.with_next(|frame| {
            frames::copy(frame, slices, rest);
            *header = frame.header;
            frame.len
        });
        self.inbox.pop();
        received.ok_or(FrameError::NotNow)
    }

    #[inline]
    fn send(
        &mut self,
        _: usize,
        frame: &Frame<'_>,
        number: u64,
        now: Instant,
    ) -> Result<Sent, FrameError> {
        self.sender.send(frame, number, now)
    }

    fn sent(&mut self, _: usize) -> Option<u64> {
        self.sender.pop_returned()
    }

    fn recall(&mut self, _: usize, half: Half) -> Quiesced {
        match half {
            // Their receivers return them with the next messages.
            Half::Transmit if !self.sender.is_idle() => Quiesced::Waits,
            _ => Quiesced::Done,
        }
    }

    fn on_message(&mut self, message: PortMessage, _: Instant, _: &mut NetStats) -> bool {
        match message.0 {
            Content::Returned(batch) => self.sender.accept_returned(batch),
            Content::Frames(batch) if !self.active => self.sender.return_batch(Some(batch)),
            Content::Frames(batch) => {
                self.inbox.add_batch(batch);
                return true;
            }
        }
        false
    }

    fn undeliverable(message: PortMessage, outbox: &mut Outbox<PortMessage>) {
        undeliverable(message, outbox);
    }

    fn finish_turn(&mut self, _: Instant, outbox: &mut Outbox<PortMessage>, tally: &mut NetStats) {
        let batch = self.inbox.take_batch();
        self.sender.return_batch(batch);
        let losses = self.inbox.take_losses();
        tally.rx_copied += losses.copied;
        tally.rx_no_room += losses.no_room;
        tally.rx_dropped += losses.unfit;
        self.sender.flush(outbox);
    }

    fn retire(&mut self, outbox: &mut Outbox<PortMessage>) {
        self.sender.switch.table().remove(self.sender.addr);
        self.inbox.clear();
        self.sender.flush(outbox);
    }
}

#[cfg(test)]
#[path = "port_tests.rs"]
mod tests;
