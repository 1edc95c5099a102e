//! Datagrams over the driver's queues (docs/datagrams.md).
//!
//! Received datagrams branch off where a packet is not payload of a connection. A sent datagram
//! takes all its transmit slots at once and counts against its socket's send buffer until the
//! device has returned the last of them.
//!
//! # Invariants
//! - The stream path pays only one comparison of the packet type for this feature.
//! - The fragments of a datagram are adjacent in the queue.
//! - Received flow control is processed before the next datagram is sent.

#[cfg(test)]
mod bad_input_tests;
mod calls;
mod state;
#[cfg(test)]
mod waking_tests;

use zerosock_proto::vsock::datagram::{Control, DatagramId, MAX_DATAGRAM, PayloadPart, data};
use zerosock_proto::wire::vsock::{Op, Repr};
use zerosock_proto::{Address, Instant};

use crate::driver::Driver;
use crate::driver::errors::DriverError;
use crate::driver::queue_pairs::{QueuePairId, RxSlot};
use crate::table::datagrams::DatagramFault;
use crate::table::sockets::{HeldBuffer, MessageEnd, Store};
use crate::table::transfers::Payload;

pub(crate) use state::Datagrams;

/// The number of packets of a turn's budget that a copied packet costs: packets left in the queue
/// can later be read in place.
const COPY: u16 = 16;
/// The queue pair of all datagrams, because order is kept only within a pair (docs/queue-pairs.md).
pub(super) const QUEUE_PAIR: QueuePairId = QueuePairId::FIRST;

impl Driver {
    /// Processes a packet of type DGRAM. Its slot is returned, or held by a socket.
    #[cold]
    pub(in crate::driver) fn take_datagram(
        &mut self,
        now: Option<Instant>,
        slot: RxSlot,
        header: &Repr,
    ) {
        let clock = self.epoch;
        let now = move || now.unwrap_or_else(|| crate::driver::since(clock));
        let datagrams = &mut self.datagrams;
        if header.op.get() != Op::Rw as u16 {
            let heard = datagrams.flow
                && Control::parse(header).is_some()
                && datagrams.inboxes.table.handle_control(now(), header);
            datagrams.malformed += u64::from(!heard);
            return self.store.release(slot);
        }
        let piece = datagrams.assembler.handle(header, now);
        datagrams.count_lost();
        let len = match piece {
            PayloadPart::Whole => {
                return self.whole_datagram(now, slot, header);
            }
            PayloadPart::First => {
                datagrams.fragments.clear();
                None
            }
            PayloadPart::More => None,
            PayloadPart::Last { len } => Some(len),
            PayloadPart::Lost => {
                datagrams.fragments = Vec::new();
                return self.store.release(slot);
            }
        };
        let slots = &self.store.queue_pairs[QUEUE_PAIR].slots;
        let start = datagrams.fragments.len();
        datagrams.fragments.resize(start + header.len as usize, 0);
        let pieces = slots.rx_data.pieces(slot.slot);
        slots.memory.read(
            pieces,
            0,
            datagrams.fragments.get_mut(start..).unwrap_or(&mut []),
        );
        self.store.release(slot);
        let Some(len) = len else { return };
        let bytes = std::mem::take(&mut datagrams.fragments);
        let flow = datagrams.flow;
        let table = &mut datagrams.inboxes.table;
        match table.receive(header.src, header.dst, len, flow, now) {
            Ok(id) => {
                let inboxes = &mut datagrams.inboxes;
                inboxes.deliver_copy(id, header.src, bytes, &mut self.sockets);
            }
            Err(_) => datagrams.dropped += 1,
        }
    }

    fn whole_datagram(&mut self, now: impl Fn() -> Instant, slot: RxSlot, header: &Repr) {
        let datagrams = &mut self.datagrams;
        let flow = datagrams.flow;
        let table = &mut datagrams.inboxes.table;
        match table.receive(header.src, header.dst, header.len, flow, &now) {
            Ok(id) => {
                let held = HeldBuffer {
                    token: slot,
                    offset: 0,
                    len: header.len,
                    since: Some(now()),
                    ends: MessageEnd::Nothing,
                };
                let inboxes = &mut datagrams.inboxes;
                let (sockets, store) = (&mut self.sockets, &mut self.store);
                if inboxes.deliver(id, header.src, QUEUE_PAIR.pool(), held, sockets, store) {
                    datagrams.cost = COPY;
                }
            }
            Err(_) => {
                datagrams.dropped += 1;
                self.store.release(slot);
            }
        }
    }

    /// Sends due flow control packets while there are slots.
    pub(in crate::driver) fn transmit_flow_control(
        &mut self,
        now: Instant,
    ) -> Result<(), DriverError> {
        while let Some(word) = self.datagrams.inboxes.table.poll_control(now, |_| true) {
            match self.store.queue_pairs[QUEUE_PAIR].tx.control_slot()? {
                Some(slot) => self.transmit(QUEUE_PAIR, slot, &word)?,
                None => {
                    self.datagrams.inboxes.table.retry_control(now, |_| true);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Whether the device has consumed packets that a sender waits for. The last check of a caller
    /// that found no other work.
    #[inline]
    pub(in crate::driver) fn has_consumed_datagrams(&self) -> bool {
        self.datagrams.waits_for_slots() && self.store.queue_pairs[QUEUE_PAIR].tx.has_used()
    }

    /// Collects datagrams that the device has consumed. Returns whether there were any.
    #[inline]
    pub(in crate::driver) fn collect_consumed_datagrams(&mut self) -> bool {
        let mut any = false;
        while let Some((id, len)) = self.store.queue_pairs[QUEUE_PAIR]
            .tx
            .next_consumed_datagram()
        {
            self.datagrams.inboxes.table.handle_completed(id, len);
            any = true;
        }
        any
    }

    /// Wakes the senders that found too few slots, if there are enough.
    #[inline]
    pub(in crate::driver) fn wake_datagram_senders(&mut self) {
        if self.datagrams.wanted > 0
            && self.store.queue_pairs[QUEUE_PAIR]
                .tx
                .has_data_slots(self.datagrams.wanted)
        {
            self.datagrams.wanted = 0;
            self.datagrams.inboxes.table.wake_all();
        }
    }

    /// Checks whether a datagram may be sent; returns its source address.
    #[inline]
    fn may_send_datagram(
        &mut self,
        id: DatagramId,
        to: Address,
        len: usize,
    ) -> Result<Address, DatagramFault> {
        if !self.datagrams.offered || self.link.is_none() {
            return Err(DatagramFault::NoDatagrams);
        }
        if self.store.queue_pairs[QUEUE_PAIR].rx.has_used() && !self.is_blocked(QUEUE_PAIR) {
            // Received packets may contain flow control of this destination. An error recurs in the
            // next turn, which reports it.
            let _ = self.take_packets(self.now());
        }
        let epoch = self.epoch;
        let now = || crate::driver::since(epoch);
        let mut may = self.datagrams.inboxes.table.may_send(id, to, len, now);
        if may == Err(zerosock_proto::vsock::datagram::DatagramRefusal::Throttled) {
            // The device may have consumed some.
            let _ = self.store.queue_pairs[QUEUE_PAIR].tx.reap();
            self.collect_consumed_datagrams();
            may = self.datagrams.inboxes.table.may_send(id, to, len, now);
        }
        Ok(may?)
    }

    /// Makes a send that found too few slots wait for them.
    #[cold]
    fn wait_for_datagram_slots(&mut self, id: DatagramId, slots: usize) -> DatagramFault {
        self.datagrams.wanted = self.datagrams.wanted.max(slots);
        self.datagrams.inboxes.table.wait_for_buffer(id);
        DatagramFault::WouldBlock
    }

    /// Sends a datagram in as many slots as it needs.
    fn send_datagram(
        &mut self,
        id: DatagramId,
        to: Address,
        bytes: &[u8],
    ) -> Result<(), DatagramFault> {
        let from = self.may_send_datagram(id, to, bytes.len())?;
        let most = self.store.queue_pairs[QUEUE_PAIR]
            .slots
            .tx_data
            .len()
            .max(1) as usize;
        let slots = bytes.len().div_ceil(most).max(1);
        if slots > self.store.queue_pairs[QUEUE_PAIR].tx.most_data_slots() {
            return Err(DatagramFault::TooLong(bytes.len()));
        }
        if !self.store.queue_pairs[QUEUE_PAIR].tx.has_data_slots(slots) {
            let _ = self.store.queue_pairs[QUEUE_PAIR].tx.reap();
            self.collect_consumed_datagrams();
            if !self.store.queue_pairs[QUEUE_PAIR].tx.has_data_slots(slots) {
                return Err(self.wait_for_datagram_slots(id, slots));
            }
        }
        let mut at = 0;
        for left in (0..slots).rev() {
            let rest = bytes.get(at..).unwrap_or(&[]);
            let part = rest.get(..most).unwrap_or(rest);
            let Ok(Some(slot)) = self.store.queue_pairs[QUEUE_PAIR]
                .tx
                .data_slot(part.len() as u32)
            else {
                // The ring is broken; the next turn reports it.
                return Err(DatagramFault::WouldBlock);
            };
            let slots = &self.store.queue_pairs[QUEUE_PAIR].slots;
            if let Some(later) = self.store.queue_pairs[QUEUE_PAIR].tx.next_free() {
                slots.tx_packets.prefetch_write(&slots.memory, later);
            }
            slots.memory.write(slots.tx_data.pieces(slot), 0, part);
            let header = data(from, to, part.len() as u32, left == 0);
            if left == 0 {
                self.store.queue_pairs[QUEUE_PAIR]
                    .tx
                    .track_datagram(slot, id, bytes.len() as u32);
            }
            if self.transmit(QUEUE_PAIR, slot, &header).is_err() {
                return Err(DatagramFault::WouldBlock);
            }
            at += part.len();
        }
        self.datagrams
            .inboxes
            .table
            .sent(id, bytes.len() as u32, true);
        Ok(())
    }

    /// Takes the next packet for a socket that holds nothing. `taken` counts the packets of a call,
    /// and what they cost.
    #[inline]
    fn take_for(&mut self, id: DatagramId, taken: &mut u16) -> Option<(RxSlot, u32)> {
        const MOST: u16 = 256;
        // An earlier packet may be for another socket.
        if *taken >= MOST
            || !self.store.queue_pairs[QUEUE_PAIR].rx.has_used()
            || self.is_blocked(QUEUE_PAIR)
            || !self.datagrams.inboxes.is_empty(id)
        {
            return None;
        }
        let (slot, written) = self.store.queue_pairs[QUEUE_PAIR].rx.take().ok()??;
        *taken += 1;
        self.tally.packets_received += 1;
        let slot = RxSlot {
            queue_pair: QUEUE_PAIR,
            slot,
        };
        Some((slot, written))
    }

    /// Receives packets until there is a datagram for this socket, which holds nothing.
    pub(in crate::driver) fn fill_inbox(&mut self, id: DatagramId) {
        let mut taken = 0;
        while let Some((slot, written)) = self.take_for(id, &mut taken) {
            let now = self.now();
            if let Some(arrival) = self.take_packet(Some(now), slot, written) {
                self.hold(now, slot, arrival);
            } else {
                taken += self.datagrams.take_cost();
            }
        }
    }

    /// Receives packets up to one for this socket, which holds nothing: that datagram is shown
    /// directly and its slot returned at once.
    pub(in crate::driver) fn take_datagram_for(
        &mut self,
        id: DatagramId,
        look: &mut dyn FnMut(Address, Payload<'_>, bool),
    ) {
        let mut taken = 0;
        while let Some((slot, written)) = self.take_for(id, &mut taken) {
            let Some(header) = self.peek_datagram(slot, written) else {
                if let Some(arrival) = self.take_packet(None, slot, written) {
                    self.hold(self.now(), slot, arrival);
                }
                taken += self.datagrams.take_cost();
                continue;
            };
            let table = &mut self.datagrams.inboxes.table;
            if table.find(header.dst.port) != Some(id) || header.dst.cid != table.cid() {
                self.take_datagram(None, slot, &header);
                taken += self.datagrams.take_cost();
                continue;
            }
            let (flow, epoch) = (self.datagrams.flow, self.epoch);
            let now = || crate::driver::since(epoch);
            if table
                .receive(header.src, header.dst, header.len, flow, now)
                .is_err()
            {
                self.datagrams.dropped += 1;
                self.store.release(slot);
                continue;
            }
            table.consume(id, header.len);
            let slots = &self.store.queue_pairs[QUEUE_PAIR].slots;
            let piece = slots.rx_data.pieces(slot.slot).first();
            let slice = piece.and_then(|piece| slots.memory.slice(*piece));
            let slice = slice.map(|slice| slice.part(0, header.len as usize));
            look(
                header.src,
                Payload::in_place(slice.as_slice()),
                self.trusted,
            );
            return self.store.release(slot);
        }
    }

    /// The header of a packet that contains a whole datagram, if no reassembly is in progress.
    #[inline]
    fn peek_datagram(&mut self, slot: RxSlot, written: u32) -> Option<Repr> {
        use zerosock_proto::vsock::datagram::DGRAM_EOM;
        use zerosock_proto::wire::vsock::{HEADER_LEN, SocketType};
        let slots = &self.store.queue_pairs[QUEUE_PAIR].slots;
        slots.rx_packets.prefetch(&slots.memory, slot.slot);
        if let Some(later) = self.store.queue_pairs[QUEUE_PAIR].rx.likely_next() {
            slots.rx_packets.prefetch(&slots.memory, later);
        }
        let header = crate::header::read(&slots.memory, slots.rx_packets.pieces(slot.slot)).ok()?;
        let whole = header.socket_type.get() == SocketType::Datagram as u16
            && header.op.get() == Op::Rw as u16
            && header.flags & DGRAM_EOM != 0
            && !self.datagrams.assembler.is_open();
        let payload = written.checked_sub(HEADER_LEN as u32)?;
        (whole && header.len <= payload.min(slots.rx_data.len())).then_some(header)
    }
}

const _: () = assert!(MAX_DATAGRAM == 65536, "what a transmit buffer may have");
