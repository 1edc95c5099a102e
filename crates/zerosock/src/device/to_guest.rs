//! Packets to the guest: from host sockets into the buffers that the guest has posted.
//!
//! Credit and a packet slot are reserved, one `recvmsg` fills the payload parts of several buffers,
//! and each filled buffer gets its header. Unfilled buffers are un-popped. The number of buffers
//! per read adapts: a connection of small messages takes one, a stream up to [`GATHER`].

use super::events::emit;
use super::sibling as siblings;
use super::state::bridge::{Bridge, BridgePeer, Inbound};
use super::{Context, Device, TURN_BYTES};
use arrayvec::ArrayVec;
use rustix::io::Errno;
use zerosock_proto::vsock::{FlowId, How, Reservation, Shard};
use zerosock_proto::wire::vsock::{HEADER_LEN, MAX_PAYLOAD};
use zerosock_ring::{Chain, Memory, SliceBuf};
use zerosock_virtio::ring::Ring;

/// Buffers filled by one read.
pub(super) const GATHER: usize = 32;
/// Pieces of memory given to one `recvmsg`.
const SLICES: usize = 64;
/// Reads (of whatever size) in one turn of a device.
const BUDGET: usize = 64;
/// Bytes of one read: larger reads are not faster.
const READ_MAX: usize = 256 * 1024;

/// The result of filling buffers from one bridge.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Fill {
    /// There may be more: append the bridge to the ready list.
    Again,
    /// Nothing more until an edge, credit, or a message of the sibling.
    Idle,
    /// The guest has posted no buffers.
    Starved,
    /// The device's memory has vanished.
    Lost,
}

impl Device {
    /// Fills a budget of buffers. Returns true if there is more to send and buffers are available.
    pub(super) fn transmit(&mut self, cx: &mut Context<'_>) -> bool {
        self.starved = false;
        if !self.queues.rings.rx.as_ref().is_some_and(Ring::live) {
            return false;
        }
        self.transmit_control(cx);
        if !self.outgoing.is_empty() {
            self.send_outgoing(cx);
        }
        self.transmit_datagrams(cx);
        for _ in 0..BUDGET {
            if self.starved || self.moved >= TURN_BYTES {
                break;
            }
            let Some(key) = self.ready.pop_front() else {
                break;
            };
            let fill = match self.bridges.get_mut(key as usize) {
                // The bridge was removed.
                None => continue,
                Some(bridge) => {
                    // A stale entry of an earlier bridge with this key.
                    if !std::mem::take(&mut bridge.in_ready) || !bridge.may_read() {
                        continue;
                    }
                    match bridge.end {
                        BridgePeer::Sibling(_) if bridge.messages.is_some() => {
                            self.fill_messages_from_sibling(key, cx)
                        }
                        BridgePeer::Socket { .. } if bridge.messages.is_some() => {
                            self.fill_messages_from_socket(key, cx)
                        }
                        BridgePeer::Socket { .. } => self.fill_from_socket(key, cx),
                        BridgePeer::Sibling(_) => self.fill_from_sibling(key, cx),
                        _ => Fill::Idle,
                    }
                }
            };
            match fill {
                Fill::Again => self.enqueue(key),
                Fill::Idle => {}
                Fill::Starved => {
                    self.starved = true;
                    // Keep its place at the front.
                    if let Some(bridge) = self.bridges.get_mut(key as usize) {
                        bridge.in_ready = true;
                        self.ready.push_front(key);
                    }
                }
                Fill::Lost => {
                    self.lose("guest memory vanished under a receive", cx);
                    return false;
                }
            }
        }
        self.renew_share();
        self.transmit_control(cx);
        self.wake_buffer_waiters(cx);
        self.wake_datagram_waiters(cx);
        !self.starved && (!self.ready.is_empty() || !self.outgoing.is_empty())
    }

    /// Sends the packets that carry no payload.
    pub(super) fn transmit_control(&mut self, cx: &mut Context<'_>) {
        self.drain_events(cx);
        let Some(rx) = self.queues.rings.rx.as_mut() else {
            return;
        };
        while self.shard.has_transmit() {
            let Some(chain) = rx.pop_if(HEADER_LEN, true) else {
                self.starved = true;
                return;
            };
            let Some(packet) = self.shard.poll_transmit(cx.now, 0) else {
                rx.queue.unpop(chain);
                break;
            };
            emit(rx, chain, &packet.header, 0);
            cx.shared.counters.tx_packets.add(1);
        }
        self.send_gathered(cx);
    }

    fn fill_from_socket(&mut self, key: u32, cx: &mut Context<'_>) -> Fill {
        let (Some(rx), Some(bridge)) = (
            self.queues.rings.rx.as_mut(),
            self.bridges.get_mut(key as usize),
        ) else {
            return Fill::Idle;
        };
        let (BridgePeer::Socket { socket, .. }, Some(flow)) = (&bridge.end, bridge.flow) else {
            return Fill::Idle;
        };
        if self.shard.nears_packet_limit(flow) && !bridge.host_finished {
            // Small writes go as one packet while the guest does not read.
            let bytes = rustix::io::ioctl_fionread(socket).unwrap_or(u64::MAX);
            let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
            if bytes > 0 && self.shard.should_delay(flow, bytes) {
                (bridge.holds_back, bridge.no_credit) = (true, true);
                return Fill::Idle;
            }
        }
        let mut gathered = ArrayVec::<Slot, GATHER>::new();
        let stop = gather(rx, &mut self.shard, flow, bridge.read_chains, &mut gathered);
        if gathered.is_empty() {
            bridge.no_credit = stop == Some(Fill::Idle);
            return stop.unwrap_or(Fill::Idle);
        }
        let memory = rx.queue.memory();
        let mut slices = SliceBuf::<SLICES>::new();
        let mut want = 0;
        for slot in &gathered {
            want += memory.slices(slot.chain.writable(), HEADER_LEN, slot.room, &mut slices);
        }
        let result = socket.recv_slices(&slices);
        let (received, cut) = match &result {
            Ok(got) => (got.bytes, got.cut),
            Err(_) => (0, false),
        };
        self.moved += received;
        commit(rx, &mut self.shard, gathered, received, cx);
        cx.shared.counters.in_place_bytes.add(received as u64);
        cx.shared.counters.tx_bytes.add(received as u64);
        learn(bridge, received, want);
        if let Some(forwarded) = &mut bridge.forwarded {
            forwarded.received(received);
        }
        match result {
            Ok(_) if received == 0 => self.host_ended(key, cx),
            Ok(_) if received < want => {
                // A short read: the socket is empty, and new bytes produce an edge. Exceptions: an
                // end of file after its edge was seen; and a read that stopped behind a passed
                // descriptor (cut off) or at an urgent byte.
                bridge.readable = bridge.host_finished || cut || bridge.urgent;
                if bridge.readable {
                    Fill::Again
                } else {
                    Fill::Idle
                }
            }
            Ok(_) => Fill::Again,
            Err(e) => match Errno::from_io_error(&e) {
                Some(Errno::AGAIN) => {
                    bridge.readable = false;
                    Fill::Idle
                }
                Some(Errno::INTR) => Fill::Again,
                Some(Errno::FAULT) => Fill::Lost,
                errno => {
                    // Reset by a program that closed with unread bytes.
                    bridge.host_gone = true;
                    match self.tcp_failed(key, errno, cx) {
                        true => Fill::Idle,
                        false => self.host_ended(key, cx),
                    }
                }
            },
        }
    }

    /// Handles the end of file of a host socket.
    pub(super) fn host_ended(&mut self, key: u32, cx: &mut Context<'_>) -> Fill {
        if self.ended_by_reset(key, cx) {
            return Fill::Idle;
        }
        if let Some(bridge) = self.bridges.get_mut(key as usize) {
            bridge.read_closed = true;
            if let Some(flow) = bridge.flow {
                let _ = self.shard.shutdown(
                    cx.now,
                    flow,
                    How {
                        receive: bridge.host_gone,
                        send: true,
                    },
                );
            }
        }
        Fill::Idle
    }

    fn fill_from_sibling(&mut self, key: u32, cx: &mut Context<'_>) -> Fill {
        let (Some(rx), Some(bridge)) = (
            self.queues.rings.rx.as_mut(),
            self.bridges.get_mut(key as usize),
        ) else {
            return Fill::Idle;
        };
        let (BridgePeer::Sibling(sibling), Some(flow)) = (&mut bridge.end, bridge.flow) else {
            return Fill::Idle;
        };
        if self.shard.nears_packet_limit(flow) {
            // Small packets go as one packet while the guest does not read.
            let bytes = siblings::merge_inbound(sibling, &mut self.spare_inbound, cx);
            if sibling.has_lost_bytes() {
                self.update_bridge(key, cx);
                return Fill::Idle;
            }
            if bytes > 0 && !sibling.finish && self.shard.should_delay(flow, bytes) {
                (bridge.holds_back, bridge.no_credit) = (true, true);
                self.update_bridge(key, cx);
                return Fill::Idle;
            }
        }
        let mut fill = Fill::Again;
        for _ in 0..GATHER {
            let Some(front) = sibling.front() else {
                bridge.readable = false;
                fill = Fill::Idle;
                break;
            };
            let mut slot = ArrayVec::<Slot, 1>::new();
            if let Some(stop) = gather(rx, &mut self.shard, flow, 1, &mut slot) {
                bridge.no_credit = stop == Fill::Idle;
                fill = stop;
                break;
            }
            let Some(Slot {
                chain,
                reservation,
                room,
            }) = slot.pop()
            else {
                break;
            };
            let len = front.len().min(room);
            let from = HEADER_LEN;
            match front {
                Inbound::Lent { memory, held, .. } => {
                    let source = (&**memory, held.chain.readable(), held.offset as usize);
                    let target = (&**rx.queue.memory(), chain.writable(), from);
                    Memory::copy(source, target, len);
                    held.offset += len as u32;
                    held.len -= len as u32;
                    cx.shared.counters.in_place_bytes.add(len as u64);
                }
                Inbound::Copied { bytes, taken } => {
                    let bytes = &bytes[*taken..*taken + len];
                    rx.queue.memory().write(chain.writable(), from, bytes);
                    *taken += len;
                    sibling.change_copied(|copied| copied.saturating_sub(len));
                }
            }
            finish(rx, &mut self.shard, chain, reservation, len, cx);
            cx.shared.counters.tx_bytes.add(len as u64);
            self.moved += len;
            let used_up = sibling.front().is_some_and(|front| front.len() == 0);
            siblings::return_read(sibling, len as u32, used_up, cx);
        }
        let sibling_finished = sibling.finish && sibling.is_drained();
        if sibling_finished && !bridge.read_closed {
            bridge.read_closed = true;
            let _ = self.shard.shutdown(cx.now, flow, How::SEND);
        }
        // Fewer bytes are in copies now.
        self.update_bridge(key, cx);
        fill
    }
}

/// A buffer with reserved credit.
struct Slot {
    chain: Chain,
    reservation: Reservation,
    /// Payload bytes for which there are room and credit.
    room: usize,
}

/// Takes up to `count` buffers and reserves credit for each. Returns why it stopped short:
/// `Starved` without buffers, `Idle` without credit.
fn gather<const N: usize>(
    rx: &mut Ring,
    shard: &mut Shard,
    flow: FlowId,
    count: u8,
    out: &mut ArrayVec<Slot, N>,
) -> Option<Fill> {
    let mut total = 0;
    while out.len() < usize::from(count).min(N) && total < READ_MAX {
        // A buffer with room for a header only is useless for payload.
        let Some(chain) = rx.pop_if(HEADER_LEN + 1, out.is_empty()) else {
            return Some(Fill::Starved);
        };
        let fits = (chain.writable_len() as usize - HEADER_LEN).min(MAX_PAYLOAD as usize);
        match shard.reserve(flow, fits as u32) {
            Ok(reservation) => {
                let room = reservation.len() as usize;
                total += room;
                out.push(Slot {
                    chain,
                    reservation,
                    room,
                });
            }
            // No credit; or the guest has stopped receiving, which an event reports.
            Err(_) => {
                rx.queue.unpop(chain);
                return Some(Fill::Idle);
            }
        }
    }
    None
}

/// Sends the buffers that received bytes and un-pops the others, last one first.
fn commit(
    rx: &mut Ring,
    shard: &mut Shard,
    mut gathered: ArrayVec<Slot, GATHER>,
    received: usize,
    cx: &mut Context<'_>,
) {
    let mut used = 0;
    let mut covered = 0;
    while covered < received && used < gathered.len() {
        covered += gathered[used].room;
        used += 1;
    }
    while gathered.len() > used {
        if let Some(slot) = gathered.pop() {
            shard.cancel(slot.reservation);
            rx.queue.unpop(slot.chain);
        }
    }
    let mut left = received;
    for Slot {
        chain,
        reservation,
        room,
    } in gathered
    {
        let len = left.min(room);
        left -= len;
        finish(rx, shard, chain, reservation, len, cx);
    }
}

fn finish(
    rx: &mut Ring,
    shard: &mut Shard,
    chain: Chain,
    reservation: Reservation,
    len: usize,
    cx: &mut Context<'_>,
) {
    match shard.commit(reservation, len as u32, 0) {
        Ok(header) => {
            emit(rx, chain, &header, len);
            cx.shared.counters.tx_packets.add(1);
        }
        // The flow cannot have ended between reserve and commit: nothing ran in between.
        Err(_) => rx.complete(chain, 0),
    }
}

/// Adapts the number of buffers of the next read: doubles it when this read filled all, halves it
/// when most stayed empty.
fn learn(bridge: &mut Bridge, received: usize, want: usize) {
    let n = bridge.read_chains;
    if received == want {
        bridge.read_chains = n.saturating_mul(2).min(GATHER as u8);
    } else if received * 2 < want {
        bridge.read_chains = (n / 2).max(1);
    }
}
