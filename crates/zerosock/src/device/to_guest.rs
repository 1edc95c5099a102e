//! Packets to the guest: from host sockets into the buffers that the guest has posted.
//!
//! The device reserves credit and a packet slot for each buffer, fills the payload parts of several
//! buffers with one `recvmsg`, and writes a header into each filled buffer. It un-pops the others.
//! The number of buffers per read adapts to the connection: one for small messages, up to
//! [`MAX_READ_BUFFERS`] for a stream. The bytes of a read and of a turn adapt to the device
//! ([`TurnBudget`](super::state::turn_budget::TurnBudget)).

use super::events::emit;
use super::sibling as siblings;
use super::state::bridge::{Bridge, BridgePeer};
use super::state::bridge_state::BridgeEvent;
use super::state::flags::Flags;
use super::{Context, Device, TURN_BYTES};
use crate::device::guest_bridges::GuestBridges;
use crate::table::outgoing::Outgoing;
use crate::table::send_calls::SendCalls;
use arrayvec::ArrayVec;
use rustix::io::Errno;
use zerosock_proto::vsock::{FlowId, Reservation, ReserveError, Shard};
use zerosock_proto::wire::vsock::{HEADER_LEN, MAX_PAYLOAD};
use zerosock_ring::{Chain, SliceBuf};
use zerosock_virtio::ring::Ring;

/// Most buffers filled by one read.
pub(super) const MAX_READ_BUFFERS: usize = 32;
/// Most slices of memory passed to one `recvmsg`.
const READ_SLICES: usize = 64;
/// Most reads, of any size, in one turn of a device.
const READS_PER_TURN: usize = 64;

/// The result of filling buffers from one bridge.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Fill {
    /// The bridge may have more bytes: append it to the ready list.
    More,
    /// The bridge has no more bytes until an edge of its socket, credit, or a message of its
    /// sibling.
    Idle,
    /// The guest has posted no buffers.
    Starved,
    /// The device's memory has vanished.
    Lost,
}

impl Device {
    /// Sends packets to the guest within the budget of a turn. Returns true if there is more to
    /// send and buffers are available.
    pub(super) fn transmit(&mut self, cx: &mut Context<'_>) -> bool {
        self.starved = false;
        let rx = self.queues.rings.rx.as_ref().filter(|rx| rx.live());
        let Some(posted) = rx.map(|rx| rx.queue.driver_index()) else {
            return false;
        };
        self.transmit_control(cx);
        if !self.outgoing.is_empty() {
            self.half(cx).send_outgoing();
        }
        // Datagrams have budgets of their own: they never delay a stream.
        let moved = self.moved;
        self.datagrams_with(cx).transmit_datagrams();
        self.moved = moved;
        let mut reads = READS_PER_TURN;
        while !self.starved
            && self.moved < self.most_to_guest(1)
            && let Some(key) = self.bridges.next_ready(&mut reads)
            && let Some(bridge) = self.bridges.get(key)
        {
            let fill = match bridge.peer {
                BridgePeer::Socket { .. } if has_header(bridge) => self.fill_header(key, cx),
                BridgePeer::Sibling(_) if bridge.messages.is_some() => {
                    self.bridges_with(cx).fill_messages_from_sibling(key)
                }
                BridgePeer::Socket { .. } if bridge.messages.is_some() => {
                    self.bridges_with(cx).fill_messages_from_socket(key)
                }
                BridgePeer::Socket { .. } => self.bridges_with(cx).fill_from_socket(key),
                BridgePeer::Sibling(_) => self.bridges_with(cx).fill_from_sibling(key),
                BridgePeer::Doorbell(_) => self.bridges_with(cx).fill_doorbell(key),
                _ => Fill::Idle,
            };
            match fill {
                Fill::More => self.bridges.enqueue(key),
                Fill::Idle => {}
                Fill::Starved => {
                    self.starved = true;
                    self.bridges.unpop_ready(key);
                }
                Fill::Lost => {
                    self.fail("guest memory vanished under a receive", cx);
                    return false;
                }
            }
        }
        let rx = self.queues.rings.rx.as_ref();
        let has_posted = || rx.is_some_and(|rx| rx.queue.driver_index() != posted);
        let left = || !self.starved && self.bridges.has_ready();
        self.to_guest_budget
            .turn_ended(self.moved, has_posted, left);
        self.renew_share();
        self.transmit_control(cx);
        self.half(cx).wake_buffer_waiters();
        self.half(cx).wake_datagram_waiters();
        !self.starved && (self.bridges.has_ready() || !self.outgoing.is_empty())
    }

    /// Bytes after which this turn ends its reads: the larger budget is for a connection that is ready
    /// alone. `own`: entries of that connection on the ready list.
    pub(super) fn most_to_guest(&self, own: usize) -> usize {
        match self.bridges.ready_len() > own {
            true => TURN_BYTES,
            false => self.to_guest_budget.bytes(),
        }
    }

    /// Sends the packets that carry no payload.
    pub(super) fn transmit_control(&mut self, cx: &mut Context<'_>) {
        cx.time();
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
        self.half(cx).send_coalesced();
    }

    /// Sends the guest the header that goes before the bytes of a client. To a connection that carries
    /// messages it is a message.
    fn fill_header(&mut self, key: u32, cx: &mut Context<'_>) -> Fill {
        let (Some(rx), Some(bridge)) = (self.queues.rings.rx.as_mut(), self.bridges.get_mut(key))
        else {
            return Fill::Idle;
        };
        let (Some(forwarded), Some(flow)) = (&mut bridge.forwarded, bridge.flow) else {
            return Fill::Idle;
        };
        let header = forwarded.header();
        if bridge.messages.is_some() {
            match self.shard.reserve_message(flow, header.len() as u32) {
                Ok(reservation) => {
                    let header = std::mem::take(header);
                    let header = Outgoing::new(reservation, header, false);
                    self.outgoing.push_back(header);
                    self.half(cx).send_outgoing();
                    return Fill::More;
                }
                Err(ReserveError::TooLong) => {
                    let len = header.len();
                    self.bridges_with(cx).too_long(key, len);
                }
                Err(_) => {
                    bridge.flags.insert(Flags::NO_CREDIT);
                }
            }
            return Fill::Idle;
        }
        let mut buffer = ArrayVec::<ReservedBuffer, 1>::new();
        let stop = reserve_buffers(rx, &mut self.shard, flow, 1, TURN_BYTES, &mut buffer);
        let Some(ReservedBuffer {
            chain,
            reservation,
            room,
        }) = buffer.pop()
        else {
            bridge.flags.set(Flags::NO_CREDIT, stop == Some(Fill::Idle));
            return stop.unwrap_or(Fill::Idle);
        };
        let part: Vec<u8> = header.drain(..header.len().min(room)).collect();
        let memory = rx.queue.memory();
        memory.write(chain.writable(), HEADER_LEN, &part);
        send_payload(rx, &mut self.shard, chain, reservation, part.len(), cx);
        Fill::More
    }
}

impl GuestBridges<'_, '_> {
    fn fill_from_socket(&mut self, key: u32) -> Fill {
        let most = self.device.most_to_guest(0);
        let (Some(rx), Some(bridge)) = (
            self.device.queues.rings.rx.as_mut(),
            self.device.bridges.get_mut(key),
        ) else {
            return Fill::Idle;
        };
        let (BridgePeer::Socket { socket, .. }, Some(flow)) = (&bridge.peer, bridge.flow) else {
            return Fill::Idle;
        };
        if self.device.shard.nears_packet_limit(flow) && !bridge.state.has_host_finished() {
            // The guest has many packets unread: merge small writes into one packet.
            let bytes = rustix::io::ioctl_fionread(socket).unwrap_or(u64::MAX);
            let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
            if bytes > 0 && self.device.shard.should_delay(flow, bytes) {
                bridge.flags.insert(Flags::FEW_BYTES);
                return Fill::Idle;
            }
        }
        let mut buffers = ArrayVec::<ReservedBuffer, MAX_READ_BUFFERS>::new();
        let stop = reserve_buffers(
            rx,
            &mut self.device.shard,
            flow,
            bridge.read_chains,
            most,
            &mut buffers,
        );
        if buffers.is_empty() {
            bridge.flags.set(Flags::NO_CREDIT, stop == Some(Fill::Idle));
            return stop.unwrap_or(Fill::Idle);
        }
        let memory = rx.queue.memory();
        let mut slices = SliceBuf::<READ_SLICES>::new();
        let mut want = 0;
        for buffer in &buffers {
            want += memory.slices(
                buffer.chain.writable(),
                HEADER_LEN,
                buffer.room,
                &mut slices,
            );
        }
        let result = socket.recv_slices(&slices);
        let (received, cut) = match &result {
            Ok(got) => (got.bytes, got.cut),
            Err(_) => (0, false),
        };
        self.device.moved += received;
        commit_received(rx, &mut self.device.shard, buffers, received, self.cx);
        self.cx.shared.counters.in_place_bytes.add(received as u64);
        self.cx.shared.counters.tx_bytes.add(received as u64);
        adapt_read_size(bridge, received, want);
        bridge.to_guest += received as u64;
        if let Some(forwarded) = &mut bridge.forwarded {
            forwarded.received(received);
        }
        match result {
            Ok(_) if received == 0 => self.handle_host_eof(key),
            Ok(_) if received < want => {
                // After a short read the socket is empty, and new bytes cause an edge. Exceptions:
                // the end of file follows and its edge was seen already; or the read stopped behind
                // a passed descriptor, or at an urgent byte.
                let more =
                    bridge.state.has_host_finished() || cut || bridge.flags.has(Flags::URGENT);
                bridge.flags.set(Flags::READABLE, more);
                if more { Fill::More } else { Fill::Idle }
            }
            Ok(_) => Fill::More,
            Err(e) => match Errno::from_io_error(&e) {
                Some(Errno::AGAIN) => {
                    bridge.flags.remove(Flags::READABLE);
                    Fill::Idle
                }
                Some(Errno::INTR) => Fill::More,
                Some(Errno::FAULT) => Fill::Lost,
                errno => {
                    // The program has closed its socket with unread bytes, which resets ours.
                    bridge.state.apply(BridgeEvent::HostGone);
                    match self.tcp_failed(key, errno) {
                        true => Fill::Idle,
                        false => self.handle_host_eof(key),
                    }
                }
            },
        }
    }

    /// Handles the end of file of a host socket: the guest sees a shutdown.
    pub(super) fn handle_host_eof(&mut self, key: u32) -> Fill {
        if !self.ended_by_reset(key) {
            self.on_bridge_event(key, BridgeEvent::EndRead);
        }
        Fill::Idle
    }

    fn fill_from_sibling(&mut self, key: u32) -> Fill {
        let (Some(rx), Some(bridge)) = (
            self.device.queues.rings.rx.as_mut(),
            self.device.bridges.get_mut(key),
        ) else {
            return Fill::Idle;
        };
        let (BridgePeer::Sibling(sibling), Some(flow)) = (&mut bridge.peer, bridge.flow) else {
            return Fill::Idle;
        };
        if self.device.shard.nears_packet_limit(flow) {
            // The guest has many packets unread: merge small ones into one packet.
            let bytes = siblings::merge_inbound(sibling, self.cx);
            if sibling.has_lost_bytes() {
                self.update_bridge(key);
                return Fill::Idle;
            }
            if bytes > 0
                && !bridge.state.has_host_finished()
                && self.device.shard.should_delay(flow, bytes)
            {
                bridge.flags.insert(Flags::FEW_BYTES);
                self.update_bridge(key);
                return Fill::Idle;
            }
        }
        let mut fill = Fill::More;
        for _ in 0..MAX_READ_BUFFERS {
            if sibling.is_drained() {
                bridge.flags.remove(Flags::READABLE);
                fill = Fill::Idle;
                break;
            }
            let mut buffer = ArrayVec::<ReservedBuffer, 1>::new();
            if let Some(stop) =
                reserve_buffers(rx, &mut self.device.shard, flow, 1, TURN_BYTES, &mut buffer)
            {
                bridge.flags.set(Flags::NO_CREDIT, stop == Fill::Idle);
                fill = stop;
                break;
            }
            let Some(ReservedBuffer {
                chain,
                reservation,
                room,
            }) = buffer.pop()
            else {
                break;
            };
            let len = siblings::copy_front(sibling, room, rx.queue.memory(), &chain, self.cx);
            send_payload(rx, &mut self.device.shard, chain, reservation, len, self.cx);
            self.cx.shared.counters.tx_bytes.add(len as u64);
            bridge.to_guest += len as u64;
            self.device.moved += len;
            let used_up = sibling.front().is_some_and(|front| front.len() == 0);
            siblings::return_read(sibling, len as u32, used_up, self.cx);
        }
        if bridge.state.has_host_finished() && sibling.is_drained() {
            self.on_bridge_event(key, BridgeEvent::EndRead);
        }
        // Fewer bytes are in copies now, which count for the device's limits.
        self.update_bridge(key);
        fill
    }
}

/// Whether a header goes before the bytes of the client.
fn has_header(bridge: &Bridge) -> bool {
    let forwarded = bridge.forwarded.as_ref();
    forwarded.is_some_and(|forwarded| forwarded.has_header())
}

/// A popped buffer, and credit that is reserved for its payload.
pub(super) struct ReservedBuffer {
    pub(super) chain: Chain,
    pub(super) reservation: Reservation,
    /// Payload bytes that fit both the buffer and the credit.
    room: usize,
}

/// Pops up to `count` buffers, which may exceed `most` bytes only by the last one, and reserves credit for
/// each. If there are fewer, returns the reason: `Starved` without buffers, `Idle` without credit.
pub(super) fn reserve_buffers<const N: usize>(
    rx: &mut Ring,
    shard: &mut Shard,
    flow: FlowId,
    count: u8,
    most: usize,
    out: &mut ArrayVec<ReservedBuffer, N>,
) -> Option<Fill> {
    let mut total = 0;
    while out.len() < usize::from(count).min(N) && total < most {
        // A buffer with room for a header only is useless for payload.
        let Some(chain) = rx.pop_if(HEADER_LEN + 1, out.is_empty()) else {
            return Some(Fill::Starved);
        };
        let fits = (chain.writable_len() as usize - HEADER_LEN).min(MAX_PAYLOAD as usize);
        match shard.reserve(flow, fits as u32) {
            Ok(reservation) => {
                let room = reservation.len() as usize;
                total += room;
                out.push(ReservedBuffer {
                    chain,
                    reservation,
                    room,
                });
            }
            // There is no credit, or the guest has shut down receiving, which an event reports.
            Err(_) => {
                rx.queue.unpop(chain);
                return Some(Fill::Idle);
            }
        }
    }
    None
}

/// Sends the buffers that have received bytes; un-pops the others, the last one first.
fn commit_received(
    rx: &mut Ring,
    shard: &mut Shard,
    mut buffers: ArrayVec<ReservedBuffer, MAX_READ_BUFFERS>,
    received: usize,
    cx: &mut Context<'_>,
) {
    let mut used = 0;
    let mut covered = 0;
    while covered < received && used < buffers.len() {
        covered += buffers[used].room;
        used += 1;
    }
    while buffers.len() > used {
        if let Some(buffer) = buffers.pop() {
            shard.cancel(buffer.reservation);
            rx.queue.unpop(buffer.chain);
        }
    }
    let mut left = received;
    for ReservedBuffer {
        chain,
        reservation,
        room,
    } in buffers
    {
        let len = left.min(room);
        left -= len;
        send_payload(rx, shard, chain, reservation, len, cx);
    }
}

pub(super) fn send_payload(
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
        // Does not happen: no call between `reserve` and `commit` can end the flow.
        Err(_) => rx.complete(chain, 0),
    }
}

/// Adapts the number of buffers of the next read: doubles it when this read filled all of them,
/// halves it when less than half of their bytes were used.
fn adapt_read_size(bridge: &mut Bridge, received: usize, want: usize) {
    let n = bridge.read_chains;
    if received == want {
        bridge.read_chains = n.saturating_mul(2).min(MAX_READ_BUFFERS as u8);
    } else if received * 2 < want {
        bridge.read_chains = (n / 2).max(1);
    }
}
