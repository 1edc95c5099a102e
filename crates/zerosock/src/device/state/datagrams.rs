//! The datagram state of a device.

use std::collections::VecDeque;

use zerosock_proto::vsock::datagram::{
    Assembler, F_DGRAM, F_DGRAM_FLOW, PauseSource, PausedSenders,
};
use zerosock_proto::wire::vsock::{Op, Repr};
use zerosock_proto::{Address, Instant};
use zerosock_ring::Chain;
use zerosock_virtio::deadline::earlier;

use super::associations::Associations;

/// Flow-control packets that may wait for a buffer of the guest.
const MAX_CONTROLS: usize = 64;

/// The datagram state of a device.
#[derive(Debug)]
pub(in crate::device) struct Datagrams {
    /// The driver has negotiated datagrams.
    pub(in crate::device) negotiated: bool,
    /// The driver has also negotiated datagram flow control.
    pub(in crate::device) flow_control: bool,
    pub(in crate::device) assembler: Assembler,
    /// The fragments so far of the datagram that is being assembled.
    pub(in crate::device) kept: Vec<u8>,
    /// Datagrams of siblings that wait for buffers of the guest.
    pub(in crate::device) waiting: VecDeque<WaitingDatagram>,
    /// Bytes of `waiting`, overheads included.
    pub(in crate::device) waiting_bytes: usize,
    /// Flow-control packets for the guest.
    pub(in crate::device) controls: VecDeque<Repr>,
    /// Sources that were told to stop because of `waiting`.
    pub(in crate::device) stops: PausedSenders,
    pub(in crate::device) stopping: bool,
    /// Buffers that datagrams of siblings may still take before ready streams have had a turn;
    /// `None`: they have taken none since the last turn.
    pub(in crate::device) share: Option<u16>,
    /// Bytes of assembled datagrams that siblings have not confirmed.
    pub(in crate::device) under_way: usize,
    /// A socket of the program waits for a buffer.
    pub(in crate::device) room_wanted: bool,
    /// When to try again after a datagram found some buffers, but too few: no notification tells
    /// how many are posted.
    pub(in crate::device) retry: Option<Instant>,
    /// Bytes of completed chains that were shown to the program and are not published yet.
    pub(in crate::device) returned: usize,
    /// The list of chains of one datagram. Empty between calls; kept to reuse its allocation.
    pub(in crate::device) spare_chains: Vec<Chain>,
    /// Part of the device's `moved` that is a charge for copies, not payload.
    pub(in crate::device) charged: usize,
    /// Sockets outside to which rules send datagrams of the guest.
    pub(in crate::device) associations: Associations,
}

#[derive(Debug)]
pub(in crate::device) struct WaitingDatagram {
    pub(in crate::device) from: Address,
    pub(in crate::device) to: Address,
    pub(in crate::device) bytes: Vec<u8>,
}

impl Datagrams {
    pub(in crate::device) fn new() -> Datagrams {
        Datagrams {
            negotiated: false,
            flow_control: false,
            assembler: Assembler::new(),
            kept: Vec::new(),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            controls: VecDeque::new(),
            stops: PausedSenders::new(PauseSource::Switch),
            stopping: false,
            share: None,
            under_way: 0,
            room_wanted: false,
            retry: None,
            returned: 0,
            spare_chains: Vec::new(),
            charged: 0,
            associations: Associations::default(),
        }
    }

    pub(in crate::device) fn is_data(header: &Repr) -> bool {
        header.op.get() == Op::Rw as u16
    }

    #[inline]
    pub(in crate::device) fn are_negotiated(&self) -> bool {
        self.negotiated
    }

    pub(in crate::device) fn set_features(&mut self, features: u64) {
        self.negotiated = features & F_DGRAM != 0;
        self.flow_control = self.negotiated && features & F_DGRAM_FLOW != 0;
    }

    /// Drops all datagrams and assembly state: the driver has gone or was reset. Its associations have
    /// ended before.
    pub(in crate::device) fn forget(&mut self) {
        let (negotiated, flow_control, under_way) =
            (self.negotiated, self.flow_control, self.under_way);
        *self = Datagrams::new();
        (self.negotiated, self.flow_control, self.under_way) =
            (negotiated, flow_control, under_way);
    }

    pub(in crate::device) fn next_timeout(&self) -> Option<Instant> {
        let deadline = earlier(self.assembler.poll_timeout(), self.stops.poll_timeout());
        earlier(
            earlier(deadline, self.retry),
            self.associations.next_timeout(),
        )
    }

    /// Returns true if senders that found too few buffers may try again.
    pub(in crate::device) fn handle_timeout(&mut self, now: Instant) -> bool {
        if self.assembler.handle_timeout(now) {
            self.kept = Vec::new();
        }
        let again = self.retry.is_some_and(|at| at <= now);
        if again {
            self.retry = None;
        }
        again
    }

    /// Whether sockets of the program wait for buffers of the guest.
    pub(in crate::device) fn room_is_wanted(&self) -> bool {
        self.room_wanted
    }

    /// Whether there are datagrams or flow-control packets that can be sent to the guest now.
    pub(in crate::device) fn has_work(&self) -> bool {
        self.retry.is_none()
            && (!self.waiting.is_empty()
                || !self.controls.is_empty()
                || self.associations.table.queued() > 0)
    }

    pub(in crate::device) fn queue_control(&mut self, control: Repr) {
        // A lost flow-control packet only costs time.
        if self.flow_control && self.controls.len() < MAX_CONTROLS {
            self.controls.push_back(control);
        }
    }
}
