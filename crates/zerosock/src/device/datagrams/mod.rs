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
        if !self.owns_source(header.src, cx)
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
    fn owns_source(&self, source: Address, cx: &Context<'_>) -> bool {
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
        if is_for_program(lost.to(), cx)
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
        if is_for_program(header.dst, cx) {
            let now = cx.time();
            match cx.shared.app.as_deref_mut() {
                Some(app) => {
                    app.inboxes.table.handle_control(now, &header);
                }
                None => self.association_control(&header, now),
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
        if !is_for_program(header.dst, cx) {
            return self.lend_to_sibling(chain, header, bytes, cx);
        }
        let flow = self.datagrams.flow_control;
        if let Err(denial) = cx.shared.routes.admit(self.cid, header.dst) {
            self.deny_datagram(header.src, header.dst, denial, cx);
            return self.complete_tx(chain);
        }
        if cx.shared.app.is_none() {
            return self.send_outside(chain, &header, bytes, cx);
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
                vm: self.addr.number,
                epoch: tx.epoch,
            },
            offset: HEADER_LEN as u32,
            len: header.len,
            since: Some(now),
            ends: MessageEnd::Nothing,
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
        self.datagrams.associations.handle_timeout(self.cid, cx.now);
        self.end_idle_associations(cx);
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
fn is_for_program(to: Address, cx: &Context<'_>) -> bool {
    to.cid == Cid::HOST && cx.shared.routes.service(to.port).is_none()
}
