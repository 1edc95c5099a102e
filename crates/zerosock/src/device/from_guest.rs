//! Packets from the guest: from the transmit queue to the bridges. From there [`super::flush`] brings
//! them into the host's sockets.
//!
//! The floor for a packet is one pop, one private copy of 44 bytes, one lookup, and its share of
//! one `sendmsg` for all packets of a connection that came in the same turn; the payload is not
//! touched. A socket that is full leaves chains held, within bounds ([`super::outbound`]).

use super::bridge::BridgePeer;
use super::flush::share_of;
use super::outbound::Held;
use super::{Context, Device, TURN_BYTES};
use crate::header;
use crate::table::backend::{Payload, ShowBounds};
use zerosock_proto::vsock::{Disposition, DropReason, FlowId};
use zerosock_proto::wire::vsock::{HEADER_LEN, SocketType};
use zerosock_ring::{Chain, SliceBuf};

/// Packets taken in one turn.
const BUDGET: usize = 256;

/// Packets that are being shown to the program as they are taken in. What was shown is taken, also
/// when the one who looks panics.
struct Shown<'a, 'c> {
    device: &'a mut Device,
    cx: &'a mut Context<'c>,
    flow: FlowId,
    /// The one that was taken in last, with whose it is and its length; until it is given back.
    opened: Option<(Chain, FlowId, u32)>,
    bytes: usize,
    /// Bytes that were taken in without being shown.
    delivered: u64,
    taken: u64,
}

impl Shown<'_, '_> {
    /// The chain has been looked at.
    #[inline]
    fn give_back(&mut self) {
        if let (Some(tx), Some((chain, ..))) = (&mut self.device.tx, self.opened.take()) {
            tx.complete(chain, 0);
        }
    }
}

impl Drop for Shown<'_, '_> {
    #[inline]
    fn drop(&mut self) {
        let panicked = self.opened.is_some();
        self.give_back();
        let (device, cx) = (&mut *self.device, &mut *self.cx);
        if self.bytes > 0 {
            // A flow that ended meanwhile wants no credit.
            let _ = device.shard.consume(self.flow, self.bytes as u32);
        }
        cx.counters.rx_packets.add(self.taken);
        cx.counters.rx_bytes.add(self.bytes as u64 + self.delivered);
        if let Some(app) = cx.app.as_deref_mut() {
            app.tally.packets_received += self.taken;
            if panicked {
                // Else the caller counts.
                app.sockets.count_shown(self.bytes);
            }
        }
        if device.shard.has_events() || !device.dirty.is_empty() {
            cx.time();
            device.drain_events(cx);
            device.flush_dirty(cx);
        }
    }
}

impl Device {
    /// Whether packets of the guest must wait: answers that cannot be delivered have piled up, or
    /// a command wants the queue to be empty.
    pub(super) fn receive_blocked(&self) -> bool {
        self.waiting.is_some() || self.shard.is_backlogged()
    }

    /// Takes a budget of packets from the guest. True: there may be more.
    pub(super) fn receive(&mut self, cx: &mut Context<'_>) -> bool {
        if let Some(tx) = self.tx.as_mut().filter(|r| r.live()) {
            tx.queue.disable_notifications();
        }
        let mut taken = 0;
        while taken < BUDGET
            && self.moved < TURN_BYTES
            && !self.receive_blocked()
            && !self.app_is_full(cx)
        {
            let Some(chain) = self.tx.as_mut().and_then(|tx| tx.pop()) else {
                break;
            };
            self.packet(chain, cx);
            taken += 1;
        }
        cx.counters.rx_packets.add(taken as u64);
        let moved = self.moved - std::mem::take(&mut self.datagrams.charged).min(self.moved);
        cx.counters.rx_bytes.add(moved as u64);
        if let Some(app) = cx.app.as_deref_mut() {
            app.tally.packets_received += taken as u64;
        }
        self.drain_events(cx);
        self.flush_dirty(cx);
        self.put_app_words(cx);
        taken == BUDGET || self.moved >= TURN_BYTES
    }

    /// Shows packets of one connection of the program's to `look` as they are taken in, as far as
    /// `bounds` go, and gives their chains back at once; packets of others go their way, and one of
    /// the connection that is out of bounds is held, the last to be taken in. Packets and bytes
    /// shown. For a connection of which nothing is held. The short way for small packets.
    #[inline]
    pub(crate) fn app_show(
        &mut self,
        flow: FlowId,
        bounds: ShowBounds,
        look: &mut dyn FnMut(Payload<'_>) -> bool,
        cx: &mut Context<'_>,
    ) -> (usize, usize) {
        let mut shown = Shown {
            device: self,
            cx,
            flow,
            opened: None,
            bytes: 0,
            delivered: 0,
            taken: 0,
        };
        let mut seen = 0;
        let mut go_on = true;
        while go_on
            && seen < bounds.packets
            && shown.taken < BUDGET as u64
            && !shown.device.receive_blocked()
            && !shown.device.app_is_full(shown.cx)
        {
            let device = &mut *shown.device;
            let Some(chain) = device.tx.as_mut().and_then(|tx| tx.pop()) else {
                break;
            };
            shown.taken += 1;
            shown.opened = device.open(chain, shown.cx);
            let (Some((chain, of, len)), Some(tx)) = (&shown.opened, &device.tx) else {
                continue;
            };
            let (of, len) = (*of, *len);
            let mut slices = SliceBuf::<4>::new();
            let (readable, memory) = (chain.readable(), tx.queue.memory());
            let mut want = if of == flow { len as usize } else { 0 };
            if want > bounds.bytes - shown.bytes {
                want = 0;
            }
            if want > 0 && memory.slices(readable, HEADER_LEN, want, &mut slices) == want {
                shown.bytes += want;
                go_on = look(Payload::in_place(&slices));
                shown.give_back();
                seen += 1;
            } else if let Some((chain, ..)) = shown.opened.take() {
                shown.cx.time();
                shown.delivered += u64::from(len);
                device.deliver(chain, of, len, shown.cx);
                if of == flow {
                    // Those behind a packet that is held are held too.
                    break;
                }
            }
        }
        (seen, shown.bytes)
    }

    pub(super) fn packet(&mut self, chain: Chain, cx: &mut Context<'_>) {
        if let Some((chain, flow, len)) = self.open(chain, cx) {
            self.deliver(chain, flow, len, cx);
        }
    }

    /// Reads a packet's header. The chain goes back, unless it has payload for a connection.
    #[inline]
    fn open(&mut self, chain: Chain, cx: &mut Context<'_>) -> Option<(Chain, FlowId, u32)> {
        let tx = self.tx.as_mut()?;
        if cx.app.is_some()
            && let Some(payload) = tx
                .queue
                .memory()
                .contiguous(chain.readable(), HEADER_LEN, 1)
        {
            // The payload comes near while the header does.
            payload.prefetch();
        }
        let header = match header::read(tx.queue.memory(), chain.readable()) {
            // The payload that is said to be there must be there.
            Ok(h) if h.len as usize <= chain.readable_len() as usize - HEADER_LEN => h,
            _ => {
                cx.counters.bad_packets.add(1);
                tx.complete(chain, 0);
                return None;
            }
        };
        let mut wanted = None;
        let disposition = match self.shard.handle_payload(&header) {
            Some(disposition) => disposition,
            None if header.socket_type.get() == SocketType::Datagram as u16
                && self.datagrams.are_agreed() =>
            {
                self.guest_datagram(chain, header, cx);
                return None;
            }
            // Datagrams are the first queue_pair's, and get no answer.
            None if header.socket_type.get() == SocketType::Datagram as u16
                && self.queue_pairs.pair != 0 =>
            {
                cx.counters.bad_packets.add(1);
                tx.complete(chain, 0);
                return None;
            }
            None => self.shard.handle_packet(cx.time(), &header),
        };
        match disposition {
            Disposition::Deliver { flow, len, .. } => return Some((chain, flow, len)),
            Disposition::Part { flow, len, flags } => {
                self.part(chain, flow, len, flags, cx);
                return None;
            }
            Disposition::Move { flow, pair } => wanted = Some((flow, pair)),
            // The last two are for drivers.
            Disposition::Handled | Disposition::Moved { .. } | Disposition::MovedStray { .. } => {}
            Disposition::Dropped(reason) => {
                tracing::debug!(cid = %self.cid, ?reason, ?header, "packet dropped");
                // What crosses our own SHUTDOWN is in order.
                if reason != DropReason::ReceiveShut {
                    cx.counters.bad_packets.add(1);
                }
            }
        }
        tx.complete(chain, 0);
        // At once, because the next packet may reuse what this one has ended.
        self.drain_events(cx);
        if let Some((flow, pair)) = wanted {
            cx.time();
            self.handle_move_request(flow, pair, cx);
        }
        None
    }

    #[inline]
    fn deliver(&mut self, chain: Chain, flow: FlowId, len: u32, cx: &mut Context<'_>) {
        self.moved += len as usize;
        let key = self.key_of(flow);
        let Some(tx) = self.tx.as_mut() else { return };
        let Some((key, bridge)) = key.and_then(|k| Some((k, self.bridges.get_mut(k as usize)?)))
        else {
            // The shard knows a flow that the device does not: end it rather than lose bytes.
            tx.complete(chain, 0);
            let _ = self.shard.reset(flow);
            return;
        };
        if let BridgePeer::App(end) = &bridge.end {
            let id = end.id;
            return self.app_deliver(id, chain, len, cx);
        }
        if bridge.write_closed {
            tx.complete(chain, 0);
            let _ = self.shard.consume(flow, len);
            return;
        }
        // Within a turn everything may be held: the flush at its end decides what stays so.
        let share = if bridge.writable {
            usize::MAX
        } else {
            share_of(tx.queue.size())
        };
        let held = Held {
            chain,
            offset: HEADER_LEN as u32,
            len,
        };
        let spares = &mut self.spare_outbound;
        if let Some(chain) = bridge.outbound.push(tx.queue.memory(), held, share, spares) {
            cx.counters.copied_bytes.add(u64::from(len));
            tx.complete(chain, 0);
        }
        if !bridge.in_dirty {
            bridge.in_dirty = true;
            self.dirty.push(key);
        }
    }
}
