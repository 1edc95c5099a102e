//! Packets from the guest: from the transmit queue into the host's sockets.
//!
//! The floor for a packet is one pop, one private copy of 44 bytes, one lookup, and its share of
//! one `sendmsg` for all packets of a connection that came in the same turn; the payload is not
//! touched. A socket that is full leaves chains held, within bounds ([`super::outbound`]).

use super::join::{End, Join};
use super::outbound::Held;
use super::timers::Timer;
use super::{Context, Device, TURN_BYTES};
use crate::header;
use crate::switch::{Message, Peer};
use crate::vsock::engine::{Payload, ShowBounds};
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::SendFlags;
use zerosock_proto::vsock::{Disposition, DropReason, FlowId, How};
use zerosock_proto::wire::vsock::{HEADER_LEN, SocketType};
use zerosock_ring::{Chain, SliceBuf};

/// Packets taken in one turn.
const BUDGET: usize = 256;
/// Pieces of memory given to one `sendmsg`.
const SLICES: usize = 128;

/// What became of an attempt to write.
enum Wrote {
    Some { bytes: usize, all: bool },
    Full,
    NoMemory,
    Gone,
    Lost,
}

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
            && let Some(payload) = tx.queue.memory().whole(chain.readable(), HEADER_LEN, 1)
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
            // Datagrams are the first lane's, and get no answer.
            None if header.socket_type.get() == SocketType::Datagram as u16
                && self.lanes.pair != 0 =>
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
            self.driver_wants(flow, pair, cx);
        }
        None
    }

    #[inline]
    fn deliver(&mut self, chain: Chain, flow: FlowId, len: u32, cx: &mut Context<'_>) {
        self.moved += len as usize;
        let key = self.key_of(flow);
        let Some(tx) = self.tx.as_mut() else { return };
        let Some((key, join)) = key.and_then(|k| Some((k, self.joins.get_mut(k as usize)?))) else {
            // The shard knows a flow that the device does not: end it rather than lose bytes.
            tx.complete(chain, 0);
            let _ = self.shard.reset(flow);
            return;
        };
        if let End::App(end) = &join.end {
            let id = end.id;
            return self.app_deliver(id, chain, len, cx);
        }
        if join.write_closed {
            tx.complete(chain, 0);
            let _ = self.shard.consume(flow, len);
            return;
        }
        // Within a turn everything may be held: the flush at its end decides what stays so.
        let share = if join.writable {
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
        if let Some(chain) = join.outbound.push(tx.queue.memory(), held, share, spares) {
            cx.counters.copied_bytes.add(u64::from(len));
            tx.complete(chain, 0);
        }
        if !join.in_dirty {
            join.in_dirty = true;
            self.dirty.push(key);
        }
    }

    pub(super) fn flush_dirty(&mut self, cx: &mut Context<'_>) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for key in dirty.drain(..) {
            if let Some(join) = self.joins.get_mut(key as usize) {
                join.in_dirty = false;
                self.flush(key, cx);
            }
        }
        self.dirty = dirty;
    }

    /// Hands on what a join has from the guest, as far as the other end takes it.
    pub(super) fn flush(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        if !join.open {
            return self.settle(key, cx);
        }
        match join.end {
            End::Socket { .. } if join.messages.is_some() => self.flush_messages(key, cx),
            End::Socket { .. } => self.flush_socket(key, cx),
            End::Sibling(_) => self.flush_sibling(key, cx),
            _ => self.settle(key, cx),
        }
    }

    fn flush_socket(&mut self, key: u32, cx: &mut Context<'_>) {
        let mut consumed = 0;
        loop {
            let Some(join) = self.joins.get_mut(key as usize) else {
                return;
            };
            if join.outbound.is_empty() || !join.writable {
                break;
            }
            let held = join.outbound.held_chains() > 0;
            let wrote = if held {
                let Some(tx) = self.tx.as_ref() else { break };
                send_held(join, tx.queue.memory())
            } else {
                send_overflow(join)
            };
            match wrote {
                Wrote::Some { bytes, all } => {
                    consumed += bytes;
                    if held {
                        cx.counters.in_place_bytes.add(bytes as u64);
                        let tx = &mut self.tx;
                        join.outbound.advance_held(bytes, |chain| {
                            if let Some(tx) = tx {
                                tx.complete(chain, 0);
                            }
                        });
                    } else {
                        join.outbound.advance_overflow(bytes);
                    }
                    // Short: the socket is full, and its next room is an edge.
                    join.writable = all;
                }
                Wrote::Full => join.writable = false,
                Wrote::NoMemory => {
                    join.writable = false;
                    join.no_memory = true;
                }
                Wrote::Gone => {
                    consumed += join.outbound.len();
                    self.host_is_deaf(key, cx);
                    break;
                }
                Wrote::Lost => {
                    return self.lose("guest memory vanished under a send", cx);
                }
            }
        }
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        if let Some(flow) = join.flow
            && consumed > 0
        {
            let _ = self.shard.consume(flow, consumed as u32);
            self.drain_events(cx);
        }
        self.settle(key, cx);
    }

    /// The host takes nothing any more: drop what waits for it and tell the guest.
    pub(super) fn host_is_deaf(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        join.write_closed = true;
        let tx = &mut self.tx;
        join.outbound.clear(|chain| {
            if let Some(tx) = tx {
                tx.complete(chain, 0);
            }
        });
        if let Some(flow) = join.flow {
            let _ = self.shard.shutdown(cx.now, flow, How::RECEIVE);
        }
    }

    /// Lends the guest's chains to the sibling. One that has stalled gets its share, and copies.
    fn flush_sibling(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        let End::Sibling(sibling) = &mut join.end else {
            return;
        };
        let (Some(tx), Some(flow)) = (self.tx.as_mut(), join.flow) else {
            return;
        };
        let Peer { device, flow: to } = sibling.peer;
        let from = Peer {
            device: self.addr,
            flow,
        };
        let size = tx.queue.size();
        let others = self.stalled_chains - join.counted.0 as usize;
        let half = usize::from(size / 2).saturating_sub(others);
        let most = if sibling.move_to.is_some() {
            // Those that are out are awaited.
            0
        } else if sibling.stalled {
            share_of(size).min(half)
        } else {
            half
        };
        while (sibling.out as usize) < most {
            let Some(held) = join.outbound.pop_held() else {
                break;
            };
            sibling.out += 1;
            sibling.younger += 1;
            let message = Message::Lent {
                to,
                from,
                memory: tx.queue.memory().clone(),
                held,
                epoch: tx.epoch,
            };
            cx.outbox.send(device, message);
        }
        self.spill(key, 0, cx);
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        let bytes = join.outbound.take_overflow();
        if !bytes.is_empty() {
            cx.outbox.send(device, Message::Copied { to, bytes });
        }
        self.tell_sibling_of_messages(key, cx);
        self.settle(key, cx);
    }

    /// After a flush: keeps the hold within its bounds, and passes on the guest's end of stream
    /// once everything before it has been taken.
    pub(super) fn settle(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        let held = join.outbound.held_chains();
        if held > 0 {
            let size = self.tx.as_ref().map_or(0, |tx| tx.queue.size());
            let others = self.stalled_chains - join.counted.0 as usize;
            let keep = if others + held > usize::from(size) / 2 {
                0
            } else {
                share_of(size)
            };
            self.spill(key, keep, cx);
        }
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        let out = match &mut join.end {
            End::Sibling(s) => {
                if join.held_since.is_none() {
                    s.younger = 0;
                }
                s.rest(&mut self.spare_inbound);
                s.out as usize
            }
            _ => join.outbound.held_chains(),
        };
        if out == 0 && !join.no_memory {
            join.held_since = None;
        } else {
            let since = *join.held_since.get_or_insert(cx.now);
            if !join.hold_timer {
                join.hold_timer = true;
                self.timers.set(since + cx.limits.hold, Timer::Hold(key));
            }
        }
        let inbound = match &join.end {
            End::Sibling(s) => s.copied(),
            _ => 0,
        };
        // A queue has 32768 chains at most, and credit keeps the bytes below 2^31.
        let lengths = join.messages.as_ref().map_or(0, |messages| messages.cost());
        let bytes = join.outbound.overflow_len() + inbound + lengths;
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let now_counted = (out as u32, bytes);
        let before = std::mem::replace(&mut join.counted, now_counted);
        self.stalled_chains = self.stalled_chains - before.0 as usize + now_counted.0 as usize;
        self.overflow_bytes = self.overflow_bytes - before.1 as usize + now_counted.1 as usize;
        join.outbound.rest(&mut self.spare_outbound);
        if join.outbound.is_empty() && join.guest_finished && join.open && !join.finish_told {
            join.finish_told = true;
            match &join.end {
                End::Socket { socket, .. } => {
                    // An error means that the host has gone: it needs no telling.
                    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
                }
                End::Sibling(s) => {
                    let to = s.peer.flow;
                    let message = Message::Shutdown {
                        to,
                        receive: false,
                        send: true,
                    };
                    cx.outbox.send(s.peer.device, message);
                }
                _ => {}
            }
        }
        if join.outbound.is_empty() && join.flow.is_none() {
            self.remove_join(key, cx);
        } else if self.overflow_bytes > cx.limits.overflow {
            self.shed(cx);
        }
    }

    /// Copies out all but `keep` of the chains that a join holds.
    pub(super) fn spill(&mut self, key: u32, keep: usize, cx: &mut Context<'_>) {
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        let Some(tx) = self.tx.as_mut() else { return };
        let mut done = Vec::new();
        let copied = join
            .outbound
            .spill(tx.queue.memory(), keep, |chain| done.push(chain));
        for chain in done {
            tx.complete(chain, 0);
        }
        cx.counters.copied_bytes.add(copied as u64);
    }

    /// The device's overflow is over its cap: the connections that have most of it are reset, until
    /// an eighth of the cap is free again. So all connections are looked through once for many
    /// bytes, however small the parts are that each has of them.
    fn shed(&mut self, cx: &mut Context<'_>) {
        let with_bytes = |(key, join): (usize, &Join)| match join.counted.1 {
            0 => None,
            bytes => Some((bytes, key as u32)),
        };
        let mut all: Vec<_> = self.joins.iter().filter_map(with_bytes).collect();
        all.sort_unstable_by(|one, other| other.cmp(one));
        for (_, key) in all {
            if self.overflow_bytes <= cx.limits.overflow / 8 * 7 {
                break;
            }
            cx.counters.overflow_resets.add(1);
            tracing::warn!(cid = %self.cid, "a connection whose reader stalls was reset: overflow");
            self.reset_join(key, cx);
        }
    }
}

/// How many chains of a queue of `size` one stalled connection may hold.
pub(super) fn share_of(size: u16) -> usize {
    usize::from(size / 8).max(1)
}

fn send_held(join: &Join, memory: &zerosock_ring::Memory) -> Wrote {
    let End::Socket { socket, .. } = &join.end else {
        return Wrote::Full;
    };
    let mut slices = SliceBuf::<SLICES>::new();
    let want = join.outbound.gather(memory, &mut slices);
    wrote(zerosock_sys::send_slices(socket.as_fd(), &slices), want)
}

fn send_overflow(join: &Join) -> Wrote {
    let End::Socket { socket, .. } = &join.end else {
        return Wrote::Full;
    };
    let bytes = join.outbound.overflow();
    let sent = rustix::net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    wrote(sent.map_err(Into::into), bytes.len())
}

fn wrote(result: std::io::Result<usize>, want: usize) -> Wrote {
    match result {
        Ok(bytes) => Wrote::Some {
            bytes,
            all: bytes == want,
        },
        Err(e) => match Errno::from_io_error(&e) {
            // Interrupted: nothing was taken; try again in the same loop.
            Some(Errno::INTR) => Wrote::Some {
                bytes: 0,
                all: true,
            },
            Some(Errno::AGAIN) => Wrote::Full,
            Some(Errno::NOBUFS | Errno::NOMEM) => Wrote::NoMemory,
            Some(Errno::FAULT) => Wrote::Lost,
            _ => Wrote::Gone,
        },
    }
}
