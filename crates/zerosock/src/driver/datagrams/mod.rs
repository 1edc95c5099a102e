//! Datagrams through the driver's queues (docs/datagrams.md).
//!
//! What comes in branches off where a packet is not payload of a connection. What goes out takes
//! transmit slots, as many as it needs at once, and counts against its socket's buffer until the
//! device has given the last of them back.
//!
//! What must hold: streams pay nothing for this but a look at a type that they do not have; a
//! datagram's fragments lie in the queue one after the other; a word of the flow control that has
//! arrived is heard before the next datagram is sent.

#[cfg(test)]
mod bad_input_tests;
mod calls;
#[cfg(test)]
mod waking_tests;

use zerosock_proto::vsock::datagram::{
    Assembler, Control, DatagramId, DatagramTable, MAX_DATAGRAM, PayloadPart, data,
};
use zerosock_proto::wire::vsock::{Op, Repr};
use zerosock_proto::{Address, Cid, Instant};

use crate::driver::Driver;
use crate::driver::errors::DriverError;
use crate::driver::queue_pairs::{QueuePairId, RxSlot};
use crate::io::deadline::earlier;
use crate::table::datagrams::DatagramFault;
use crate::table::engine::Payload;
use crate::table::inboxes::Inboxes;
use crate::table::sockets::{Ends, Held, Store};

/// Of the packets that a turn may take in, as many as one that has to be copied counts for: what a
/// reader leaves in the queue he will have in place.
const COPY: u16 = 16;
/// The queue_pair of all datagrams: between queue pairs there is no order (docs/queue-pairs.md).
pub(super) const LANE: QueuePairId = QueuePairId::FIRST;

/// What the driver has for its datagram sockets.
#[derive(Debug)]
pub(crate) struct Datagrams {
    /// The device takes datagrams.
    offered: bool,
    /// And words of the flow control.
    flow: bool,
    pub(in crate::driver) inboxes: Inboxes,
    assembler: Assembler,
    /// The fragments of the set at hand.
    kept: Vec<u8>,
    /// What a turn may take in less, because something was copied.
    cost: u16,
    /// A send found fewer slots than these.
    wanted: usize,
    /// By the loan's word.
    loans: Vec<Option<Lent>>,
    /// Slots that are out on loan.
    lent: u16,
    pub(in crate::driver) malformed: u64,
    pub(in crate::driver) dropped: u64,
}

/// A loan that is out.
#[derive(Debug)]
struct Lent {
    id: DatagramId,
    to: Address,
    /// `None`: it is a private buffer.
    slot: Option<u16>,
}

impl Datagrams {
    pub(in crate::driver) fn new(cid: Cid, words: usize) -> Datagrams {
        Datagrams {
            offered: false,
            flow: false,
            inboxes: Inboxes::new(DatagramTable::new(cid)),
            assembler: Assembler::new(),
            kept: Vec::new(),
            cost: 0,
            wanted: 0,
            loans: (0..words).map(|_| None).collect(),
            lent: 0,
            malformed: 0,
            dropped: 0,
        }
    }

    /// What was negotiated with the device.
    pub(in crate::driver) fn negotiated(&mut self, offered: bool, flow: bool) {
        self.offered = offered;
        self.flow = offered && flow;
    }

    #[inline]
    pub(in crate::driver) fn are_offered(&self) -> bool {
        self.offered
    }

    /// What the packet that was taken in last counts for beside itself.
    #[inline]
    pub(in crate::driver) fn take_cost(&mut self) -> u16 {
        std::mem::take(&mut self.cost)
    }

    /// Whether somebody waits for slots to come back.
    #[inline]
    pub(in crate::driver) fn want_slots(&self) -> bool {
        self.wanted > 0 || self.inboxes.table.has_throttled()
    }

    /// Whether somebody waits for the first slot that comes back.
    #[inline]
    pub(in crate::driver) fn want_a_slot(&self) -> bool {
        self.wanted > 0
    }

    /// How many packets are taken before somebody may go on who waits for what is under way.
    pub(in crate::driver) fn packets_until_named(&self) -> Option<u32> {
        self.inboxes.table.completions_until_writable()
    }

    pub(in crate::driver) fn next_due(&self) -> Option<Instant> {
        earlier(
            self.inboxes.table.poll_timeout(),
            self.assembler.poll_timeout(),
        )
    }

    pub(in crate::driver) fn handle_timeout(&mut self, now: Instant) {
        self.inboxes.table.handle_timeout(now);
        if self.assembler.handle_timeout(now) {
            self.kept = Vec::new();
            self.count_lost();
        }
    }

    /// Counts a datagram that will not be whole, if there is one.
    #[inline]
    fn count_lost(&mut self) {
        if let Some(lost) = self.assembler.take_lost() {
            self.dropped += 1;
            self.inboxes.table.handle_lost(lost);
        }
    }

    /// The transport was reset: nobody waits for anybody, and what is not complete will not be.
    pub(in crate::driver) fn reset(&mut self, cid: Cid) {
        self.inboxes.table.reset(cid);
        self.assembler.forget();
        self.kept = Vec::new();
    }
}

impl Driver {
    /// A packet of type DGRAM. Its slot goes back, or is held by a socket.
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
                datagrams.kept.clear();
                None
            }
            PayloadPart::More => None,
            PayloadPart::Last { len } => Some(len),
            PayloadPart::Lost => {
                datagrams.kept = Vec::new();
                return self.store.release(slot);
            }
        };
        let slots = &self.store.queue_pairs[LANE].slots;
        let start = datagrams.kept.len();
        datagrams.kept.resize(start + header.len as usize, 0);
        let pieces = slots.rx_data.pieces(slot.slot);
        slots.memory.read(
            pieces,
            0,
            datagrams.kept.get_mut(start..).unwrap_or(&mut []),
        );
        self.store.release(slot);
        let Some(len) = len else { return };
        let bytes = std::mem::take(&mut datagrams.kept);
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
                let held = Held {
                    token: slot,
                    offset: 0,
                    len: header.len,
                    since: now(),
                    ends: Ends::Nothing,
                };
                let inboxes = &mut datagrams.inboxes;
                let (sockets, store) = (&mut self.sockets, &mut self.store);
                if inboxes.deliver(id, header.src, LANE.pool(), held, sockets, store) {
                    datagrams.cost = COPY;
                }
            }
            Err(_) => {
                datagrams.dropped += 1;
                self.store.release(slot);
            }
        }
    }

    /// Words of the flow control that are due, while there are slots.
    pub(in crate::driver) fn transmit_words(&mut self, now: Instant) -> Result<(), DriverError> {
        while let Some(word) = self.datagrams.inboxes.table.poll_control(now, |_| true) {
            match self.store.queue_pairs[LANE].tx.control_slot()? {
                Some(slot) => self.transmit(LANE, slot, &word)?,
                None => {
                    self.datagrams.inboxes.table.retry_control(now, |_| true);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Whether the device has taken something for which a sender waits: asked for last, by who looks
    /// in vain for anything else.
    #[inline]
    pub(in crate::driver) fn has_landed(&self) -> bool {
        self.datagrams.want_slots() && self.store.queue_pairs[LANE].tx.has_used()
    }

    /// Takes note of datagrams that the device has taken. True: there were some.
    #[inline]
    pub(in crate::driver) fn land(&mut self) -> bool {
        let mut any = false;
        while let Some((id, len)) = self.store.queue_pairs[LANE].tx.landed() {
            self.datagrams.inboxes.table.handle_completed(id, len);
            any = true;
        }
        any
    }

    /// Tells those who found too few slots that there are some.
    #[inline]
    pub(in crate::driver) fn tell_of_datagram_slots(&mut self) {
        if self.datagrams.wanted > 0
            && self.store.queue_pairs[LANE]
                .tx
                .has_data_slots(self.datagrams.wanted)
        {
            self.datagrams.wanted = 0;
            self.datagrams.inboxes.table.wake_all();
        }
    }

    /// Whether a datagram may be sent; from which address.
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
        if self.store.queue_pairs[LANE].rx.has_used() && !self.is_blocked(LANE) {
            // Among it may be a word about this destination. What goes wrong here goes wrong again
            // in the next turn, which says so.
            let _ = self.take_packets(self.now());
        }
        let epoch = self.epoch;
        let now = || crate::driver::since(epoch);
        let mut may = self.datagrams.inboxes.table.may_send(id, to, len, now);
        if may == Err(zerosock_proto::vsock::datagram::Refusal::Throttled) {
            // Perhaps the device has taken some.
            let _ = self.store.queue_pairs[LANE].tx.reap();
            self.land();
            may = self.datagrams.inboxes.table.may_send(id, to, len, now);
        }
        Ok(may?)
    }

    /// A send found too few slots: it is told when there are some.
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
        let most = self.store.queue_pairs[LANE].slots.tx_data.len().max(1) as usize;
        let slots = bytes.len().div_ceil(most).max(1);
        if slots > self.store.queue_pairs[LANE].tx.most_data_slots() {
            return Err(DatagramFault::TooLong(bytes.len()));
        }
        if !self.store.queue_pairs[LANE].tx.has_data_slots(slots) {
            let _ = self.store.queue_pairs[LANE].tx.reap();
            self.land();
            if !self.store.queue_pairs[LANE].tx.has_data_slots(slots) {
                return Err(self.wait_for_datagram_slots(id, slots));
            }
        }
        let mut at = 0;
        for left in (0..slots).rev() {
            let rest = bytes.get(at..).unwrap_or(&[]);
            let part = rest.get(..most).unwrap_or(rest);
            let Ok(Some(slot)) = self.store.queue_pairs[LANE].tx.data_slot(part.len() as u32)
            else {
                // The ring is broken, which the next turn says.
                return Err(DatagramFault::WouldBlock);
            };
            let slots = &self.store.queue_pairs[LANE].slots;
            if let Some(later) = self.store.queue_pairs[LANE].tx.later() {
                slots.tx_headers.prefetch_write(&slots.memory, later);
                slots.tx_data.prefetch_write(&slots.memory, later);
            }
            slots.memory.write(slots.tx_data.pieces(slot), 0, part);
            let header = data(from, to, part.len() as u32, left == 0);
            if left == 0 {
                self.store.queue_pairs[LANE]
                    .tx
                    .fly(slot, id, bytes.len() as u32);
            }
            if self.transmit(LANE, slot, &header).is_err() {
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

    /// A loan of a datagram's was dropped unsent. False: it is none.
    pub(in crate::driver) fn end_datagram_loan(&mut self, index: u32) -> bool {
        let place = self.datagrams.loans.get_mut(index as usize);
        let Some(lent) = place.and_then(Option::take) else {
            return false;
        };
        if let Some(slot) = lent.slot {
            self.datagrams.lent = self.datagrams.lent.saturating_sub(1);
            self.store.queue_pairs[LANE].tx.put_back(slot);
        }
        self.sockets.end_loan(index);
        true
    }

    /// Takes the next packets in, up to one for this socket, of which nothing is held: that one is
    /// shown, and its slot goes back at once. `None`: there was none.
    fn show_datagram(
        &mut self,
        id: DatagramId,
        look: &mut dyn FnMut(Address, Payload<'_>),
    ) -> Option<()> {
        const MOST: u16 = 256;
        let mut taken = 0;
        // One of several packets may come before.
        while taken < MOST
            && self.store.queue_pairs[LANE].rx.has_used()
            && !self.is_blocked(LANE)
            && self.datagrams.inboxes.is_empty(id)
        {
            let Ok(Some((slot, written))) = self.store.queue_pairs[LANE].rx.take() else {
                break;
            };
            taken += 1;
            self.stats.rx_packets += 1;
            let slot = RxSlot {
                queue_pair: LANE,
                slot,
            };
            let Some(header) = self.peek_datagram(slot, written) else {
                if let Some((flow, len)) = self.take_packet(None, slot, written) {
                    self.hold(self.now(), slot, flow, len);
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
            let slots = &self.store.queue_pairs[LANE].slots;
            let piece = slots.rx_data.pieces(slot.slot).first();
            let slice = piece.and_then(|piece| slots.memory.slice(*piece));
            let slice = slice.map(|slice| slice.part(0, header.len as usize));
            look(header.src, Payload::in_place(slice.as_slice()));
            self.store.release(slot);
            return Some(());
        }
        None
    }

    /// The header of a packet that is a whole datagram, while no set is open.
    #[inline]
    fn peek_datagram(&mut self, slot: RxSlot, written: u32) -> Option<Repr> {
        use zerosock_proto::vsock::datagram::DGRAM_EOM;
        use zerosock_proto::wire::vsock::{HEADER_LEN, SocketType};
        let slots = &self.store.queue_pairs[LANE].slots;
        slots.rx_data.prefetch(&slots.memory, slot.slot);
        if let Some(later) = self.store.queue_pairs[LANE].rx.guess() {
            slots.rx_headers.prefetch(&slots.memory, later);
            slots.rx_data.prefetch(&slots.memory, later);
        }
        let header = crate::header::read(&slots.memory, slots.rx_headers.pieces(slot.slot)).ok()?;
        let whole = header.socket_type.get() == SocketType::Datagram as u16
            && header.op.get() == Op::Rw as u16
            && header.flags & DGRAM_EOM != 0
            && !self.datagrams.assembler.is_open();
        let payload = written.checked_sub(HEADER_LEN as u32)?;
        (whole && header.len <= payload.min(slots.rx_data.len())).then_some(header)
    }
}

const _: () = assert!(MAX_DATAGRAM == 65536, "what a transmit buffer may have");
