//! Datagrams of the guest (docs/datagrams.md): to and from the embedding program, and to and from
//! siblings.
//!
//! # Invariants
//! - The fragments of a datagram are contiguous in the guest's queue.
//! - A packet with a source other than the guest's own address is dropped.
//! - Every lent chain comes back.
//! - Everything that waits is bounded.
//!
//! # Delivery
//! A datagram for the program is held in its chain or copied, within the bounds of
//! [`crate::table::inboxes`]. A datagram for a sibling is lent by one message; the sibling's worker
//! copies the payload into a posted buffer and returns the chain at once. A datagram that finds no
//! buffer waits as a copy, within bounds, and its sources are told to stop.

mod app;
mod put;
mod siblings;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod waiting_tests;

use std::collections::VecDeque;

use zerosock_proto::vsock::datagram::{
    Assembler, Control, F_DGRAM, F_DGRAM_FLOW, PauseSource, PausedSenders, PayloadPart as Fragment,
};
use zerosock_proto::wire::vsock::{HEADER_LEN, Op, Repr};
use zerosock_proto::{Address, Cid, Instant};
use zerosock_ring::Chain;

use crate::device::app_store::QueueStore;
use crate::device::program::HostToken;
use crate::device::{Context, Device};
use crate::table::sockets::{Ends, HeldBuffer};
pub(crate) use put::NotPut;
pub(crate) use siblings::return_lent;
use zerosock_virtio::deadline::earlier;
use zerosock_virtio::ring::Ring;

/// Flow-control packets that may wait for a buffer of the guest.
const MAX_CONTROLS: usize = 64;
/// Bytes of the turn's budget charged for a datagram that had to be copied: datagrams that stay in
/// the queue can later be read in place.
const COPY: usize = 128 << 10;

/// The datagram state of a device.
#[derive(Debug)]
pub(super) struct Datagrams {
    /// The driver has negotiated datagrams.
    negotiated: bool,
    /// The driver has also negotiated datagram flow control.
    flow_control: bool,
    assembler: Assembler,
    /// The fragments so far of the datagram that is being assembled.
    kept: Vec<u8>,
    /// Datagrams of siblings that wait for buffers of the guest.
    waiting: VecDeque<WaitingDatagram>,
    /// Bytes of `waiting`, overheads included.
    waiting_bytes: usize,
    /// Flow-control packets for the guest.
    controls: VecDeque<Repr>,
    /// Sources that were told to stop because of `waiting`.
    stops: PausedSenders,
    stopping: bool,
    /// Buffers that datagrams of siblings may still take before ready streams have had a turn;
    /// `None`: they have taken none since the last turn.
    share: Option<u16>,
    /// Bytes of assembled datagrams that siblings have not confirmed.
    under_way: usize,
    /// A socket of the program waits for a buffer.
    room_wanted: bool,
    /// When to try again after a datagram found some buffers, but too few: no notification tells
    /// how many are posted.
    retry: Option<Instant>,
    /// Bytes of completed chains that were shown to the program and are not published yet.
    returned: usize,
    /// Empty between uses; kept to reuse its allocation.
    gathered: Vec<Chain>,
    /// Part of the device's `moved` that is a charge for copies, not payload.
    pub(super) charged: usize,
}

#[derive(Debug)]
struct WaitingDatagram {
    from: Address,
    to: Address,
    bytes: Vec<u8>,
}

impl Datagrams {
    pub(super) fn new() -> Datagrams {
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
            gathered: Vec::new(),
            charged: 0,
        }
    }

    fn is_data(header: &Repr) -> bool {
        header.op.get() == Op::Rw as u16
    }

    #[inline]
    pub(super) fn are_negotiated(&self) -> bool {
        self.negotiated
    }

    pub(super) fn set_features(&mut self, features: u64) {
        self.negotiated = features & F_DGRAM != 0;
        self.flow_control = self.negotiated && features & F_DGRAM_FLOW != 0;
    }

    /// Drops all datagrams and assembly state: the driver has gone or was reset.
    pub(super) fn forget(&mut self) {
        let (negotiated, flow_control, under_way) =
            (self.negotiated, self.flow_control, self.under_way);
        *self = Datagrams::new();
        (self.negotiated, self.flow_control, self.under_way) =
            (negotiated, flow_control, under_way);
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let deadline = earlier(self.assembler.poll_timeout(), self.stops.poll_timeout());
        earlier(deadline, self.retry)
    }

    /// Returns true if senders that found too few buffers may try again.
    pub(super) fn handle_timeout(&mut self, now: Instant) -> bool {
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
    pub(super) fn room_is_wanted(&self) -> bool {
        self.room_wanted
    }

    /// Whether there are datagrams or flow-control packets that can be sent to the guest now.
    pub(super) fn has_work(&self) -> bool {
        self.retry.is_none() && (!self.waiting.is_empty() || !self.controls.is_empty())
    }

    fn queue_control(&mut self, control: Repr) {
        // A lost flow-control packet only costs time.
        if self.flow_control && self.controls.len() < MAX_CONTROLS {
            self.controls.push_back(control);
        }
    }
}

impl Device {
    /// Whether the guest's driver has negotiated datagrams; `None`: no driver runs.
    pub(crate) fn takes_datagrams(&self) -> Option<bool> {
        let running = self.queues.rings.rx.as_ref().is_some_and(Ring::live);
        running.then_some(self.datagrams.negotiated)
    }

    /// Handles a packet of type DGRAM from the guest.
    #[cold]
    pub(super) fn guest_datagram(&mut self, chain: Chain, header: Repr, cx: &mut Context<'_>) {
        let is_control = Control::parse(&header).is_some();
        if !self.speaks_for(header.src, cx)
            || !(Datagrams::is_data(&header) || (is_control && self.datagrams.flow_control))
        {
            cx.shared.counters.bad_packets.add(1);
            return self.complete_tx(chain);
        }
        if is_control {
            return self.guest_control(chain, header, cx);
        }
        let piece = self.datagrams.assembler.handle(&header, || cx.time());
        self.count_lost(cx);
        let end = match piece {
            Fragment::Whole => return self.dispatch(chain, header, None, cx),
            Fragment::First => {
                self.datagrams.kept.clear();
                None
            }
            Fragment::More => None,
            Fragment::Last { len } => Some(len),
            Fragment::Lost => {
                self.datagrams.kept = Vec::new();
                cx.shared.counters.bad_packets.add(1);
                return self.complete_tx(chain);
            }
        };
        if let Some(tx) = &self.queues.rings.tx {
            let kept = &mut self.datagrams.kept;
            if kept.try_reserve(header.len as usize).is_err() {
                self.datagrams.kept = Vec::new();
                match end {
                    Some(_) => cx.shared.counters.datagrams_dropped.add(1),
                    None => self.datagrams.assembler.discard(),
                }
                self.count_lost(cx);
                return self.complete_tx(chain);
            }
            let start = kept.len();
            kept.resize(start + header.len as usize, 0);
            let out = kept.get_mut(start..).unwrap_or(&mut []);
            tx.queue.memory().read(chain.readable(), HEADER_LEN, out);
            cx.shared.counters.copied_bytes.add(u64::from(header.len));
        }
        match end {
            None => self.complete_tx(chain),
            Some(len) => {
                let bytes = std::mem::take(&mut self.datagrams.kept);
                self.dispatch(chain, Repr { len, ..header }, Some(bytes), cx);
            }
        }
    }

    /// Whether `source` is the guest's own address: its CID and, for a host service, a port that
    /// the service has claimed.
    fn speaks_for(&self, source: Address, cx: &Context<'_>) -> bool {
        source.cid == self.cid
            && (self.cid != Cid::HOST || cx.shared.routes.service(source.port) == Some(self.addr))
    }

    /// Counts a datagram that can no longer be completed, if there is one.
    #[inline]
    fn count_lost(&mut self, cx: &mut Context<'_>) {
        let Some(lost) = self.datagrams.assembler.take_lost() else {
            return;
        };
        cx.shared.counters.datagrams_dropped.add(1);
        if is_apps(lost.to(), cx)
            && let Some(app) = cx.shared.app.as_deref_mut()
        {
            app.inboxes.table.handle_lost(lost);
        }
    }

    fn complete_tx(&mut self, chain: Chain) {
        if let Some(tx) = &mut self.queues.rings.tx {
            tx.complete(chain, 0);
        }
    }

    /// Handles a flow-control packet from the guest.
    fn guest_control(&mut self, chain: Chain, header: Repr, cx: &mut Context<'_>) {
        if is_apps(header.dst, cx) {
            let now = cx.time();
            if let Some(app) = cx.shared.app.as_deref_mut() {
                app.inboxes.table.handle_control(now, &header);
            }
            return self.complete_tx(chain);
        }
        self.lend_to_sibling(chain, header, None, cx);
    }

    /// Delivers a complete datagram of the guest: in `chain`, or assembled in `bytes`.
    fn dispatch(
        &mut self,
        chain: Chain,
        header: Repr,
        bytes: Option<Vec<u8>>,
        cx: &mut Context<'_>,
    ) {
        self.moved += header.len as usize;
        if !is_apps(header.dst, cx) {
            return self.lend_to_sibling(chain, header, bytes, cx);
        }
        let flow = self.datagrams.flow_control;
        if cx.shared.app.is_none() || !cx.shared.routes.may_reach(self.cid, header.dst) {
            cx.shared.counters.datagrams_dropped.add(1);
            return self.complete_tx(chain);
        }
        let now = cx.time();
        let taken = cx.shared.app.as_deref_mut().and_then(|app| {
            let table = &mut app.inboxes.table;
            let id = table.receive(header.src, header.dst, header.len, flow, || now);
            Some((id.ok()?, app))
        });
        let (Some((id, app)), Some(tx)) = (taken, self.queues.rings.tx.as_mut()) else {
            return self.complete_tx(chain);
        };
        if let Some(bytes) = bytes {
            tx.complete(chain, 0);
            app.inboxes
                .deliver_copy(id, header.src, bytes, &mut app.sockets);
            return;
        }
        self.app.note_descriptors(chain.descriptors(), tx, app);
        let held = HeldBuffer {
            token: HostToken {
                chain,
                vm: self.addr.vm,
                epoch: tx.epoch,
            },
            offset: HEADER_LEN as u32,
            len: header.len,
            since: now,
            ends: Ends::Nothing,
        };
        let pool = self.app.pool;
        let mut store = QueueStore::new(tx, &mut self.shard);
        let (inboxes, sockets) = (&mut app.inboxes, &mut app.sockets);
        if inboxes.deliver(id, header.src, pool, held, sockets, &mut store) {
            self.moved += COPY;
            self.datagrams.charged += COPY;
        }
    }

    /// Handles expired datagram deadlines.
    pub(super) fn datagram_timeout(&mut self, cx: &mut Context<'_>) {
        if self.datagrams.handle_timeout(cx.now) {
            wake_all(cx);
        }
        self.count_lost(cx);
        self.notify_sources(cx);
    }

    /// Drops all datagram state, also the program's about this guest: the driver has gone.
    pub(super) fn forget_datagrams(&mut self, cx: &mut Context<'_>) {
        self.datagrams.forget();
        let cid = self.cid;
        if let Some(app) = cx.shared.app.as_deref_mut() {
            app.inboxes.table.forget(cid);
        }
    }
}

/// Wakes every socket of the program that waits for buffers.
fn wake_all(cx: &mut Context<'_>) {
    if let Some(app) = cx.shared.app.as_deref_mut() {
        app.inboxes.table.wake_all();
    }
}

/// Whether the destination is the embedding program: CID 2, except ports of services.
fn is_apps(to: Address, cx: &Context<'_>) -> bool {
    to.cid == Cid::HOST && cx.shared.routes.service(to.port).is_none()
}
