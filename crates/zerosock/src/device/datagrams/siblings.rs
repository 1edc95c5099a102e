//! Datagrams between two guests of this daemon.
//!
//! # Invariants
//! - Every lent packet is answered at once.
//! - Datagrams that wait for buffers are bounded, and their sources are told to stop.
//! - Assembled datagrams in flight to siblings are bounded.
//! - Ready streams keep half of the guest's buffers.

use crate::device::datagrams::GuestDatagrams;
use crate::device::state::datagrams::{Datagrams, WaitingDatagram};
use zerosock_proto::Address;
use zerosock_proto::vsock::datagram::{Control, OVERHEAD};
use zerosock_proto::wire::vsock::{HEADER_LEN, Repr};
use zerosock_ring::Chain;

use super::put::{DatagramPayload, NotPut};
use crate::device::Device;
use crate::device::state::sibling_message::{SiblingDatagram, SiblingMessage, SiblingPayload};
use crate::fallible;

/// Bytes that may wait for buffers of a guest, overheads included; one datagram may overshoot. After STOP at a
/// quarter there is room for a default send buffer.
const WAITING: usize = 640 << 10;
/// Bytes of assembled datagrams in flight to siblings, above which they are dropped; one datagram
/// may overshoot.
pub(super) const UNDER_WAY: usize = 1 << 20;

impl GuestDatagrams<'_, '_> {
    /// Passes a packet on to the device of its destination.
    pub(super) fn lend_to_sibling(&mut self, chain: Chain, header: Repr, bytes: Option<Vec<u8>>) {
        // A flow-control packet may go to any endpoint that may reach its sender: the reverse
        // direction need not be allowed, nor the source port be claimed.
        let is_data = Datagrams::is_data(&header);
        let may = match is_data {
            true => self.cx.shared.routes.admit(self.device.cid, header.dst),
            false => self.cx.shared.routes.check(header.dst.cid, header.src),
        };
        if let Err(denial) = may {
            if is_data {
                self.device
                    .deny_datagram(header.src, header.dst, denial, self.cx);
            }
            return self.complete_tx(chain);
        }
        let device = self.cx.shared.routes.target(header.dst);
        let (Some(device), Some(tx)) = (device, self.device.queues.rings.tx.as_ref()) else {
            self.cx
                .shared
                .counters
                .datagrams_dropped
                .add(u64::from(is_data));
            return self.complete_tx(chain);
        };
        let payload = match bytes {
            Some(_) if self.device.datagrams.under_way >= UNDER_WAY => {
                self.cx.shared.counters.datagrams_dropped.add(1);
                return self.complete_tx(chain);
            }
            Some(bytes) => {
                self.device.datagrams.under_way += bytes.len();
                SiblingPayload::Copied(bytes.into_boxed_slice())
            }
            None => SiblingPayload::Lent(tx.queue.memory().clone()),
        };
        let datagram = SiblingDatagram {
            from: self.device.addr,
            flow: self.device.datagrams.flow_control,
            header,
            payload,
            chain,
            epoch: tx.epoch,
        };
        self.cx
            .outbox
            .send(device, SiblingMessage::Datagram(datagram));
    }

    /// Handles a sibling's datagram or flow-control packet for our guest.
    pub(in crate::device) fn sibling_datagram(&mut self, datagram: SiblingDatagram) {
        let SiblingDatagram {
            from,
            flow,
            header,
            payload,
            chain,
            epoch,
        } = datagram;
        let copied = payload.copied();
        let mut answer = None;
        if !self.device.datagrams.negotiated {
            let data = Datagrams::is_data(&header);
            self.cx
                .shared
                .counters
                .datagrams_dropped
                .add(u64::from(data));
            // Also if no driver runs at all.
            if flow && data {
                answer = Some(Control::Unsupported.emit(header.dst, header.src));
            }
        } else if !Datagrams::is_data(&header) {
            self.device.datagrams.queue_control(header);
        } else {
            let source = match &payload {
                SiblingPayload::Copied(bytes) => DatagramPayload::Bytes(bytes),
                SiblingPayload::Lent(memory) => {
                    DatagramPayload::Chain(memory, &chain, header.len as usize)
                }
            };
            self.take_from_sibling(&header, source, flow);
        }
        let done = SiblingMessage::DatagramDone {
            chain,
            epoch,
            copied,
            answer,
        };
        self.cx.outbox.send(from, done);
    }

    fn take_from_sibling(&mut self, header: &Repr, source: DatagramPayload<'_>, flow: bool) {
        let (from, to) = (header.src, header.dst);
        let put = match self.device.datagrams.waiting.is_empty() {
            true => self.put_of_sibling(from, to, source),
            false => Err(NotPut::NoRoom),
        };
        match put {
            Ok(()) => {
                return self
                    .cx
                    .shared
                    .counters
                    .in_place_bytes
                    .add(source.len() as u64);
            }
            Err(NotPut::TooLong | NotPut::NotReceived(_)) => {
                return self.cx.shared.counters.datagrams_dropped.add(1);
            }
            Err(NotPut::NoRoom) => {}
        }
        let datagrams = &mut self.device.datagrams;
        let has_room =
            datagrams.waiting_bytes <= WAITING && datagrams.waiting.try_reserve(1).is_ok();
        if has_room && let Ok(mut bytes) = fallible::zeroed(source.len()) {
            match source {
                DatagramPayload::Bytes(from) => bytes.copy_from_slice(from),
                DatagramPayload::Chain(memory, chain, _) => {
                    memory.read(chain.readable(), HEADER_LEN, &mut bytes);
                }
                // Answers of sockets wait in their sockets.
                DatagramPayload::Socket(..) => {}
            }
            self.cx.shared.counters.copied_bytes.add(bytes.len() as u64);
            datagrams.waiting_bytes += bytes.len() + OVERHEAD as usize;
            datagrams
                .waiting
                .push_back(WaitingDatagram { from, to, bytes });
        } else {
            self.cx.shared.counters.datagrams_dropped.add(1);
        }
        if flow && datagrams.waiting_bytes > WAITING / 4 {
            datagrams.stopping = true;
            let now = self.cx.time();
            datagrams.stops.pause(now, to, from);
            self.notify_sources();
        }
    }

    /// As [`put_datagram`](Self::put_datagram), within the share that ready streams leave; one
    /// datagram may overshoot.
    pub(super) fn put_of_sibling(
        &mut self,
        from: Address,
        to: Address,
        source: DatagramPayload<'_>,
    ) -> Result<(), NotPut> {
        if !self.device.bridges.has_ready() {
            return self.put_datagram(from, to, source);
        }
        let Some(rx) = self.device.queues.rings.rx.as_mut() else {
            return Err(NotPut::NoRoom);
        };
        let before = rx.taken;
        let share = match self.device.datagrams.share {
            Some(share) => share,
            None => (rx.queue.posted() / 2).max(1),
        };
        if share == 0 {
            return Err(NotPut::NoRoom);
        }
        self.put_datagram(from, to, source)?;
        let rx = self.device.queues.rings.rx.as_ref();
        let taken = rx.map_or(0, |rx| rx.taken.wrapping_sub(before));
        let taken = u16::try_from(taken).unwrap_or(u16::MAX);
        self.device.datagrams.share = Some(share.saturating_sub(taken));
        Ok(())
    }

    /// Sends the flow-control packets that are due to the sources.
    pub(in crate::device) fn notify_sources(&mut self) {
        if self.device.datagrams.stops.is_empty() {
            return;
        }
        let now = self.cx.time();
        while let Some(control) = self.device.datagrams.stops.poll(now, |_| true) {
            if let Some(device) = self.cx.shared.routes.target(control.dst) {
                self.cx
                    .outbox
                    .send(device, SiblingMessage::DatagramControl(control));
            }
        }
    }

    /// Sends the guest waiting flow-control packets and datagrams, as far as there are buffers.
    pub(in crate::device) fn transmit_datagrams(&mut self) {
        if self.device.queues.is_command_pending() {
            // The queue is stopped while a command is pending.
            return;
        }
        while let Some(control) = self.device.datagrams.controls.pop_front() {
            if !self.put_control(&control) {
                self.device.datagrams.controls.push_front(control);
                return;
            }
        }
        let answers_first = self.device.datagrams.associations.take_first();
        if answers_first {
            self.transmit_answers();
        }
        while let Some(next) = self.device.datagrams.waiting.pop_front() {
            let put = self.put_of_sibling(next.from, next.to, DatagramPayload::Bytes(&next.bytes));
            if put == Err(NotPut::NoRoom) {
                self.device.datagrams.waiting.push_front(next);
                break;
            }
            self.device.moved += next.bytes.len();
            let bytes = next.bytes.len() + OVERHEAD as usize;
            self.device.datagrams.waiting_bytes =
                self.device.datagrams.waiting_bytes.saturating_sub(bytes);
        }
        if !answers_first {
            self.transmit_answers();
        }
        if self.device.datagrams.stopping && self.device.datagrams.waiting_bytes <= WAITING / 8 {
            self.device.datagrams.stopping = false;
            self.device.datagrams.stops.resume_all();
        }
        self.notify_sources();
    }
}

impl Device {
    /// Renews the share of datagrams: ready streams have had their turn.
    pub(in crate::device) fn renew_share(&mut self) {
        self.datagrams.share = None;
    }

    /// A sibling has processed a packet of our guest.
    pub(in crate::device) fn datagram_done(
        &mut self,
        chain: Chain,
        epoch: u32,
        copied: usize,
        answer: Option<Repr>,
    ) {
        self.datagrams.under_way = self.datagrams.under_way.saturating_sub(copied);
        // A chain of an earlier epoch needs no completion: its queue was stopped.
        if let Some(tx) = self.queues.rings.tx.as_mut().filter(|tx| tx.epoch == epoch) {
            tx.complete(chain, 0);
        }
        if let Some(answer) = answer {
            self.datagrams.queue_control(answer);
        }
    }

    /// Queues a flow-control packet for our guest.
    pub(in crate::device) fn datagram_control(&mut self, control: Repr) {
        self.datagrams.queue_control(control);
    }
}
