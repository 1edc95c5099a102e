//! A port with a guest.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use zerosock_proto::Instant;
use zerosock_proto::wire::net::{Header, Mac, Offloads};
use zerosock_ring::GuestSlice;
use zerosock_virtio::outbox::{DeviceAddr, Outbox};
use zerosock_virtio::queues::Quiesced;

use super::frames::{Bytes, Content, Forwarded, Inbox, Pieces, PortMessage};
use super::software;
use super::table::{Route, Switch};
use crate::backend::{ADDRESSES_LEN, Addresses, Backend, Frame, FrameError, Half, Sent};
use crate::model::ALL_OFFLOADS;
use crate::stats::Stats;

/// Frames for several ports that one port sends in a turn.
pub const MAX_FLOODED: usize = 64;

/// A port with a guest.
#[derive(Debug)]
pub struct SwitchPort {
    sender: Sender,
    mac: Option<Mac>,
    /// A driver uses the port.
    active: bool,
    inbox: Inbox,
    /// Those that the driver takes.
    offloads: Offloads,
    /// Numbers of frames that have got their memory back.
    returned: VecDeque<u64>,
}

/// The sending side of any port.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) switch: Arc<Switch>,
    pub(super) addr: DeviceAddr,
    /// Messages that are sent at the end of the turn.
    pub(super) out: VecDeque<(DeviceAddr, PortMessage)>,
    /// Frames in the hands of other ports.
    pub(super) lent: usize,
    /// Frames of this turn for several ports.
    pub(super) flooded: usize,
}

impl Sender {
    pub(super) fn new(switch: Arc<Switch>) -> Sender {
        Sender {
            switch,
            addr: DeviceAddr {
                worker: 0,
                number: 0,
            },
            out: VecDeque::new(),
            lent: 0,
            flooded: 0,
        }
    }

    /// Sends a frame, the addresses of which are in a private copy.
    pub(super) fn send(
        &mut self,
        frame: &Frame<'_>,
        number: u64,
        now: Instant,
    ) -> Result<Sent, FrameError> {
        let Some((addresses, more)) = frame.first.split_first_chunk::<ADDRESSES_LEN>() else {
            return Err(FrameError::Refused);
        };
        debug_assert!(
            more.is_empty() || frame.memory.is_none(),
            "only addresses are in a private copy"
        );
        let mut table = self.switch.table();
        let to = match table.route(self.addr, addresses, now) {
            Route::Nowhere => return Ok(Sent::Done),
            Route::Port(to) => to,
            Route::Flood => {
                let mut others = table.others(self.addr);
                match (others.next(), others.next()) {
                    (None, _) => return Ok(Sent::Done),
                    (Some(only), None) => only,
                    (Some(first), Some(second)) => {
                        if self.flooded >= MAX_FLOODED {
                            return Err(FrameError::Refused);
                        }
                        self.flooded += 1;
                        let bytes: Arc<[u8]> = match frame.memory {
                            Some(memory) => {
                                let mut bytes = vec![0; frame.len - ADDRESSES_LEN];
                                memory.read(frame.pieces, frame.skip, &mut bytes);
                                bytes.into()
                            }
                            None => more.into(),
                        };
                        for to in [first, second].into_iter().chain(others) {
                            let rest = Bytes::Copied(Arc::clone(&bytes));
                            let frame = forwarded(frame, addresses, rest);
                            self.out.push_back((to, PortMessage(Content::Frame(frame))));
                        }
                        return Ok(Sent::Done);
                    }
                }
            }
        };
        drop(table);
        let Some(memory) = frame.memory else {
            let frame = forwarded(frame, addresses, Bytes::Copied(more.into()));
            self.out.push_back((to, PortMessage(Content::Frame(frame))));
            return Ok(Sent::Done);
        };
        let rest = Bytes::Lent {
            from: self.addr,
            number,
            memory: Arc::clone(memory),
            pieces: Pieces::of(frame),
        };
        let frame = forwarded(frame, addresses, rest);
        self.out.push_back((to, PortMessage(Content::Frame(frame))));
        self.lent += 1;
        Ok(Sent::Held)
    }

    /// Gives the sender of a frame its memory back.
    pub(super) fn give_back(&mut self, frame: Forwarded) {
        self.out.extend(frame.returned());
    }

    /// The end of a turn.
    pub(super) fn flush(&mut self, outbox: &mut Outbox<PortMessage>) {
        self.flooded = 0;
        for (to, message) in self.out.drain(..) {
            outbox.send(to, message);
        }
    }
}

fn forwarded(frame: &Frame<'_>, addresses: &Addresses, rest: Bytes) -> Forwarded {
    Forwarded {
        header: frame.header,
        len: frame.len,
        addresses: *addresses,
        rest,
    }
}

/// Answers a message to a port that has gone.
pub(super) fn undeliverable(message: PortMessage, outbox: &mut Outbox<PortMessage>) {
    if let Content::Frame(frame) = message.0
        && let Some((to, message)) = frame.returned()
    {
        outbox.send(to, message);
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
            offloads: Offloads::default(),
            returned: VecDeque::new(),
        }
    }

    /// Adds a frame that has come for the guest.
    fn arrive(&mut self, frame: Forwarded, now: Instant, tally: &mut Stats) {
        if !software::is_accepted(&frame.header, frame.len, self.offloads) {
            let converted = software::convert(&frame.header, frame.bytes(), self.offloads);
            self.sender.give_back(frame);
            match converted {
                None => tally.rx_dropped += 1,
                Some(frames) => frames.iter().for_each(|(header, bytes)| {
                    tally.rx_copied += bytes.len() as u64;
                    if let Some(frame) = Forwarded::of_bytes(*header, bytes) {
                        self.push(frame, now, tally);
                    }
                }),
            }
            return;
        }
        self.push(frame, now, tally);
    }

    fn push(&mut self, frame: Forwarded, now: Instant, tally: &mut Stats) {
        if let Some(frame) = self.inbox.push(frame, now) {
            tally.rx_no_room += 1;
            self.sender.give_back(frame);
        }
    }

    /// Drops all frames that wait for the guest.
    fn drop_waiting(&mut self) {
        while let Some(frame) = self.inbox.remove() {
            self.sender.give_back(frame);
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

    fn queues(&self) -> u16 {
        1
    }

    fn features(&self) -> u64 {
        ALL_OFFLOADS
    }

    fn descriptor(&self, _: usize) -> Option<BorrowedFd<'_>> {
        None
    }

    fn needs_addresses(&self) -> bool {
        true
    }

    fn set_offloads(&mut self, offloads: Offloads) -> io::Result<()> {
        self.offloads = offloads;
        Ok(())
    }

    fn set_active(&mut self, _: usize, active: bool) -> io::Result<()> {
        self.active = active;
        let addr = self.sender.addr;
        self.sender.switch.table().set_active(addr, active);
        self.drop_waiting();
        Ok(())
    }

    fn next_len(&mut self, _: usize) -> Option<usize> {
        self.inbox.front().map(|frame| frame.len)
    }

    #[inline]
    fn receive(
        &mut self,
        _: usize,
        header: &mut Header,
        slices: &[GuestSlice<'_>],
        rest: &mut [u8],
    ) -> Result<usize, FrameError> {
        let frame = self.inbox.pop().ok_or(FrameError::NotNow)?;
        frame.copy_to(slices, rest);
        *header = frame.header;
        let len = frame.len;
        self.sender.give_back(frame);
        Ok(len)
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
        self.returned.pop_front()
    }

    fn recall(&mut self, _: usize, half: Half) -> Quiesced {
        match half {
            // Their receivers return them within a bounded time.
            Half::Transmit if self.sender.lent > 0 => Quiesced::Waits,
            _ => Quiesced::Done,
        }
    }

    fn on_message(&mut self, message: PortMessage, now: Instant, tally: &mut Stats) {
        match message.0 {
            Content::Returned(number) => {
                self.sender.lent = self.sender.lent.saturating_sub(1);
                self.returned.push_back(number);
            }
            Content::Frame(frame) if !self.active => self.sender.give_back(frame),
            Content::Frame(frame) => self.arrive(frame, now, tally),
        }
    }

    fn undeliverable(message: PortMessage, outbox: &mut Outbox<PortMessage>) {
        undeliverable(message, outbox);
    }

    fn finish_turn(&mut self, now: Instant, outbox: &mut Outbox<PortMessage>, tally: &mut Stats) {
        while let Some(frame) = self.inbox.pop_expired(now) {
            tally.rx_no_room += 1;
            self.sender.give_back(frame);
        }
        self.sender.flush(outbox);
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.inbox.next_timeout()
    }

    fn retire(&mut self, outbox: &mut Outbox<PortMessage>) {
        self.sender.switch.table().remove(self.sender.addr);
        self.drop_waiting();
        self.sender.flush(outbox);
    }
}
