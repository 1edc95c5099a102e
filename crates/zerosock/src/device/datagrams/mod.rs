//! Datagrams of the guest (docs/datagrams.md): to and from the embedding program, to and from
//! siblings, and by rule to and from sockets outside.
//!
//! # Invariants
//! - The fragments of a datagram are contiguous in the guest's queue.
//! - A packet with a source other than the guest's own address is dropped.
//! - Every lent chain is returned.
//! - Everything that waits is bounded.
//!
//! # Delivery
//! A datagram for the program is held in its chain or copied, within the bounds of
//! [`crate::table::inboxes`]. A datagram for a sibling is lent by one message; the sibling's worker
//! copies the payload into a posted buffer and returns the chain at once. A datagram that finds no
//! buffer waits as a copy, within bounds, and its sources are told to stop.

mod app;
mod outside;
mod put;
mod siblings;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod waiting_tests;

use crate::device::state::app::QueueStore;
use crate::device::state::datagrams::Datagrams;

use zerosock_proto::vsock::datagram::{Control, PayloadPart as Fragment};
use zerosock_proto::wire::vsock::{HEADER_LEN, Repr};
use zerosock_proto::{Address, Cid};
use zerosock_ring::Chain;

use crate::device::state::program::HostToken;
use crate::device::{Context, Device};
use crate::table::sockets::{HeldBuffer, MessageEnd};
pub(crate) use put::NotPut;
use zerosock_virtio::ring::Ring;

/// Bytes of the turn's budget charged for a datagram that had to be copied: datagrams that stay in
/// the queue can later be read in place.
const COPY: usize = 128 << 10;

/// The datagrams of a device, with what the worker lends it for a turn.
pub(crate) struct GuestDatagrams<'a, 'c> {
    device: &'a mut Device,
    cx: &'a mut Context<'c>,
}

impl Device {
    #[inline]
    pub(crate) fn datagrams_with<'a, 'c>(
        &'a mut self,
        cx: &'a mut Context<'c>,
    ) -> GuestDatagrams<'a, 'c> {
        GuestDatagrams { device: self, cx }
    }
}

impl Device {
    /// Whether the guest's driver has negotiated datagrams; `None`: no driver runs.
    pub(crate) fn takes_datagrams(&self) -> Option<bool> {
        let running = self.queues.rings.rx.as_ref().is_some_and(Ring::live);
        running.then_some(self.datagrams.negotiated)
    }

    /// Whether `source` is the guest's own address: its CID and, for a host service, a port that
    /// the service has claimed.
    fn owns_source(&self, source: Address, cx: &Context<'_>) -> bool {
        source.cid == self.cid
            && (self.cid != Cid::HOST || cx.shared.routes.service(source.port) == Some(self.addr))
    }
}

impl GuestDatagrams<'_, '_> {
    fn complete_tx(&mut self, chain: Chain) {
        if let Some(tx) = &mut self.device.queues.rings.tx {
            tx.complete(chain, 0);
        }
    }

    /// Handles a packet of type DGRAM from the guest.
    #[cold]
    pub(super) fn guest_datagram(&mut self, chain: Chain, header: Repr) {
        let is_control = Control::parse(&header).is_some();
        if !self.device.owns_source(header.src, self.cx)
            || !(Datagrams::is_data(&header) || (is_control && self.device.datagrams.flow_control))
        {
            self.cx.shared.counters.bad_packets.add(1);
            return self.complete_tx(chain);
        }
        if is_control {
            return self.guest_control(chain, header);
        }
        let piece = self
            .device
            .datagrams
            .assembler
            .handle(&header, || self.cx.time());
        self.count_lost();
        let end = match piece {
            Fragment::Whole => return self.dispatch(chain, header, None),
            Fragment::First => {
                self.device.datagrams.kept.clear();
                None
            }
            Fragment::More => None,
            Fragment::Last { len } => Some(len),
            Fragment::Lost => {
                self.device.datagrams.kept = Vec::new();
                self.cx.shared.counters.bad_packets.add(1);
                return self.complete_tx(chain);
            }
        };
        if let Some(tx) = &self.device.queues.rings.tx {
            let kept = &mut self.device.datagrams.kept;
            if kept.try_reserve(header.len as usize).is_err() {
                self.device.datagrams.kept = Vec::new();
                match end {
                    Some(_) => self.cx.shared.counters.datagrams_dropped.add(1),
                    None => self.device.datagrams.assembler.discard(),
                }
                self.count_lost();
                return self.complete_tx(chain);
            }
            let start = kept.len();
            kept.resize(start + header.len as usize, 0);
            let out = kept.get_mut(start..).unwrap_or(&mut []);
            tx.queue.memory().read(chain.readable(), HEADER_LEN, out);
            self.cx
                .shared
                .counters
                .copied_bytes
                .add(u64::from(header.len));
        }
        match end {
            None => self.complete_tx(chain),
            Some(len) => {
                let bytes = std::mem::take(&mut self.device.datagrams.kept);
                self.dispatch(chain, Repr { len, ..header }, Some(bytes));
            }
        }
    }

    /// Counts a datagram that can no longer be completed, if there is one.
    #[inline]
    fn count_lost(&mut self) {
        let Some(lost) = self.device.datagrams.assembler.take_lost() else {
            return;
        };
        self.cx.shared.counters.datagrams_dropped.add(1);
        if is_for_program(lost.to(), self.cx)
            && let Some(app) = self.cx.shared.app.as_deref_mut()
        {
            app.inboxes.table.handle_lost(lost);
        }
    }

    /// Handles a flow-control packet from the guest.
    fn guest_control(&mut self, chain: Chain, header: Repr) {
        if is_for_program(header.dst, self.cx) {
            let now = self.cx.time();
            match self.cx.shared.app.as_deref_mut() {
                Some(app) => {
                    app.inboxes.table.handle_control(now, &header);
                }
                None => self.device.association_control(&header, now),
            }
            return self.complete_tx(chain);
        }
        self.lend_to_sibling(chain, header, None);
    }

    /// Delivers a complete datagram of the guest: in `chain`, or assembled in `bytes`.
    fn dispatch(&mut self, chain: Chain, header: Repr, bytes: Option<Vec<u8>>) {
        self.device.moved += header.len as usize;
        if !is_for_program(header.dst, self.cx) {
            return self.lend_to_sibling(chain, header, bytes);
        }
        let flow = self.device.datagrams.flow_control;
        if let Err(denial) = self.cx.shared.routes.admit(self.device.cid, header.dst) {
            self.device
                .deny_datagram(header.src, header.dst, denial, self.cx);
            return self.complete_tx(chain);
        }
        if self.cx.shared.app.is_none() {
            return self.send_outside(chain, &header, bytes);
        }
        let now = self.cx.time();
        let taken = self.cx.shared.app.as_deref_mut().and_then(|app| {
            let table = &mut app.inboxes.table;
            let id = table.receive(header.src, header.dst, header.len, flow, || now);
            Some((id.ok()?, app))
        });
        let (Some((id, app)), Some(tx)) = (taken, self.device.queues.rings.tx.as_mut()) else {
            return self.complete_tx(chain);
        };
        if let Some(bytes) = bytes {
            tx.complete(chain, 0);
            app.inboxes
                .deliver_copy(id, header.src, bytes, &mut app.sockets);
            return;
        }
        self.device
            .app
            .note_descriptors(chain.descriptors(), tx, app);
        let held = HeldBuffer {
            token: HostToken {
                chain,
                vm: self.device.addr.number,
                epoch: tx.epoch,
            },
            offset: HEADER_LEN as u32,
            len: header.len,
            since: Some(now),
            ends: MessageEnd::Nothing,
        };
        let pool = self.device.app.pool;
        let mut store = QueueStore::new(tx, &mut self.device.shard);
        let (inboxes, sockets) = (&mut app.inboxes, &mut app.sockets);
        if inboxes.deliver(id, header.src, pool, held, sockets, &mut store) {
            self.device.moved += COPY;
            self.device.datagrams.charged += COPY;
        }
    }

    /// Handles expired datagram deadlines.
    pub(super) fn datagram_timeout(&mut self) {
        if self.device.datagrams.handle_timeout(self.cx.now) {
            wake_all(self.cx);
        }
        self.device
            .datagrams
            .associations
            .handle_timeout(self.device.cid, self.cx.now);
        self.end_idle_associations();
        self.count_lost();
        self.notify_sources();
    }

    /// Drops all datagram state, also the program's about this guest: the driver has gone.
    pub(super) fn forget_datagrams(&mut self) {
        self.device.datagrams.forget();
        let cid = self.device.cid;
        if let Some(app) = self.cx.shared.app.as_deref_mut() {
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
fn is_for_program(to: Address, cx: &Context<'_>) -> bool {
    to.cid == Cid::HOST && cx.shared.routes.service(to.port).is_none()
}
