//! The driver's datagram state: sockets and reassembly.

use zerosock_proto::vsock::datagram::{Assembler, DatagramTable};
use zerosock_proto::{Cid, Instant};

use crate::table::inboxes::Inboxes;
use zerosock_virtio::deadline::earlier;

/// The driver's datagram state.
#[derive(Debug)]
pub(crate) struct Datagrams {
    /// The device negotiated datagrams.
    pub(super) offered: bool,
    /// The device negotiated flow control of datagrams.
    pub(super) flow: bool,
    pub(in crate::driver) inboxes: Inboxes,
    pub(super) assembler: Assembler,
    /// The fragments of the datagram being reassembled.
    pub(super) fragments: Vec<u8>,
    /// The reduction of the turn's budget for a copied packet.
    pub(super) cost: u16,
    /// Transmit slots on loan for datagrams.
    pub(in crate::driver) lent: u16,
    /// A send found fewer slots than this.
    pub(super) wanted: usize,
    pub(in crate::driver) malformed: u64,
    pub(in crate::driver) dropped: u64,
}

impl Datagrams {
    pub(in crate::driver) fn new(cid: Cid) -> Datagrams {
        Datagrams {
            offered: false,
            flow: false,
            inboxes: Inboxes::new(DatagramTable::new(cid)),
            assembler: Assembler::new(),
            fragments: Vec::new(),
            cost: 0,
            lent: 0,
            wanted: 0,
            malformed: 0,
            dropped: 0,
        }
    }

    /// Sets what was negotiated with the device.
    pub(in crate::driver) fn negotiated(&mut self, offered: bool, flow: bool) {
        self.offered = offered;
        self.flow = offered && flow;
    }

    #[inline]
    pub(in crate::driver) fn are_offered(&self) -> bool {
        self.offered
    }

    /// The additional cost of the packet received last, in packets.
    #[inline]
    pub(in crate::driver) fn take_cost(&mut self) -> u16 {
        std::mem::take(&mut self.cost)
    }

    /// Whether a sender waits for slots.
    #[inline]
    pub(in crate::driver) fn waits_for_slots(&self) -> bool {
        self.wanted > 0 || self.inboxes.table.has_throttled()
    }

    /// Whether a sender waits for the first slot that returns.
    #[inline]
    pub(in crate::driver) fn waits_for_one_slot(&self) -> bool {
        self.wanted > 0
    }

    /// The number of packets in flight that must be consumed before a waiting sender may continue.
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
            self.fragments = Vec::new();
            self.count_lost();
        }
    }

    /// Counts an incomplete datagram as lost, if there is one.
    #[inline]
    pub(super) fn count_lost(&mut self) {
        if let Some(lost) = self.assembler.take_lost() {
            self.dropped += 1;
            self.inboxes.table.handle_lost(lost);
        }
    }

    /// Handles a transport reset: senders wait no more, and an incomplete datagram is lost.
    pub(in crate::driver) fn reset(&mut self, cid: Cid) {
        self.inboxes.table.reset(cid);
        self.assembler.forget();
        self.fragments = Vec::new();
    }
}
