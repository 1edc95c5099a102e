//! Connections of the guest that carry messages (SEQPACKET).
//!
//! # Invariants
//! - The length of a message is passed after all of its bytes.
//! - A message that is incomplete when its sender shuts down sending is dropped.
//! - The kept rest of a message leaves before anything else of its connection.
//! - Bytes of a buffer that were not written are never sent.
//!
//! # Operation
//! Bytes of messages are held, lent or copied like those of a stream, within the same bounds. The
//! lengths of complete messages are passed beside them, so that the receiving side sends a message
//! only if it can send all of it: a guest takes it with credit for the whole message or its
//! connection is reset; a host socket takes it with one call.

use std::io::IoSlice;

use zerosock_proto::vsock::{FlowId, ReserveError};
use zerosock_proto::wire::vsock::{HEADER_LEN, MAX_PAYLOAD};
use zerosock_ring::{Chain, GuestSlice};

use super::app::send_fault;
use super::events::emit;
use super::flush::share_of;
use super::outbound::HeldChain;
use super::sibling;
use super::state::bridge::BridgePeer;
use super::state::bridge_state::BridgeEvent;
use super::state::flags::Flags;
use super::to_guest::{Fill, MAX_READ_BUFFERS};
use super::{Context, Device, TURN_BYTES};
use crate::device::state::messages::Sending;
use crate::device::state::sibling_message::SiblingMessage;
use crate::table::outgoing::{Outgoing, Slices, end, len_of, put_all, whole};
use crate::table::sockets::{Arrival, MessageEnd, StreamId};
use crate::table::transfers::SendFault;

impl Device {
    /// Handles a part of a message from the guest.
    pub(super) fn receive_part(
        &mut self,
        chain: Chain,
        arrival: Arrival,
        ends: MessageEnd,
        cx: &mut Context<'_>,
    ) {
        cx.time();
        let Arrival { flow, len, .. } = arrival;
        self.moved += len as usize;
        let Some((key, bridge)) = self.bridges.of_flow(flow) else {
            return self.app_deliver(chain, arrival, cx);
        };
        let Some(tx) = self.queues.rings.tx.as_mut() else {
            return;
        };
        let Some(messages) = bridge
            .messages
            .as_deref_mut()
            .filter(|_| !bridge.state.drops_bytes())
        else {
            tx.complete(chain, 0);
            let _ = match len {
                0 => self.shard.consume_empty(flow, 1),
                len => self.shard.consume(flow, len),
            };
            return;
        };
        messages.incomplete += len;
        bridge.from_guest += u64::from(len);
        if ends.any() {
            if messages.outbound.try_reserve(1).is_err() {
                tx.complete(chain, 0);
                return self.end_for_want_of_memory(key, cx);
            }
            let whole = std::mem::take(&mut messages.incomplete);
            messages.outbound.push_back((whole, ends));
        }
        if len == 0 {
            tx.complete(chain, 0);
            return self.bridges.mark_dirty(key);
        }
        let share = share_of(tx.queue.size());
        let offset = HEADER_LEN as u32;
        let held = HeldChain { chain, offset, len };
        let memory = tx.queue.memory();
        if let Some(chain) = self.bridges.push_outbound(key, memory, held, share) {
            cx.shared.counters.copied_bytes.add(u64::from(len));
            tx.complete(chain, 0);
        }
    }

    /// Sends the sibling the lengths of messages that it has received completely.
    pub(super) fn send_message_lengths(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(bridge) = self.bridges.get_mut(key) else {
            return;
        };
        let (BridgePeer::Sibling(sibling), Some(messages)) = (&bridge.peer, &mut bridge.messages)
        else {
            return;
        };
        if !bridge.outbound.is_empty() {
            return;
        }
        let (device, to) = (sibling.peer.device, sibling.peer.flow);
        // As many as the guest has sent before the sibling took the bytes.
        let count = messages.outbound.len();
        if cx.outbox.try_reserve(device, count).is_err() {
            return self.end_for_want_of_memory(key, cx);
        }
        for (len, ends) in messages.outbound.drain(..) {
            cx.outbox
                .send(device, SiblingMessage::Ended { to, len, ends });
        }
    }

    /// The last `len` bytes from the sibling form a message.
    pub(super) fn sibling_ended_message(
        &mut self,
        to: FlowId,
        len: u32,
        ends: MessageEnd,
        cx: &mut Context<'_>,
    ) {
        let Some((key, bridge)) = self.bridges.of_flow(to) else {
            return;
        };
        let (BridgePeer::Sibling(sibling), Some(messages)) = (&bridge.peer, &mut bridge.messages)
        else {
            return;
        };
        if !bridge.state.reads() {
            if len == 0 {
                let to = sibling.peer.flow;
                cx.outbox
                    .send(sibling.peer.device, SiblingMessage::ReadEmpty { to });
            }
            return;
        }
        if messages.inbound.try_reserve(1).is_err() {
            return self.end_for_want_of_memory(key, cx);
        }
        messages.inbound.push_back((len, ends));
        bridge.set_readable();
        self.bridges.enqueue(key);
        self.update_bridge(key, cx);
    }

    /// Sends messages of the sibling to the guest.
    pub(super) fn fill_messages_from_sibling(&mut self, key: u32, cx: &mut Context<'_>) -> Fill {
        let (Some(rx), Some(bridge)) = (self.queues.rings.rx.as_mut(), self.bridges.get_mut(key))
        else {
            return Fill::Idle;
        };
        let (BridgePeer::Sibling(sibling), Some(flow), Some(messages)) =
            (&mut bridge.peer, bridge.flow, &mut bridge.messages)
        else {
            return Fill::Idle;
        };
        let mut fill = Fill::More;
        for _ in 0..MAX_READ_BUFFERS {
            if messages.sending.is_none() {
                let Some(&(left, ends)) = messages.inbound.front() else {
                    bridge.flags.remove(Flags::READABLE);
                    fill = Fill::Idle;
                    break;
                };
                match self.shard.reserve_message(flow, left) {
                    Ok(room) => messages.sending = Some(Sending { room, left, ends }),
                    Err(ReserveError::TooLong) => {
                        self.too_long(key, left as usize, cx);
                        return Fill::Idle;
                    }
                    // The guest has stopped receiving, which an event reports.
                    Err(_) => {
                        bridge.flags.insert(Flags::NO_CREDIT);
                        fill = Fill::Idle;
                        break;
                    }
                }
                messages.inbound.pop_front();
            }
            let Some(sending) = &mut messages.sending else {
                break;
            };
            let Some(chain) = rx.pop_if(HEADER_LEN + 1, true) else {
                fill = Fill::Starved;
                break;
            };
            let room = (chain.writable_len() as usize - HEADER_LEN).min(MAX_PAYLOAD as usize);
            let want = room.min(sending.left as usize);
            let len = sibling::copy_front(sibling, want, rx.queue.memory(), &chain, cx);
            let empty = want == 0;
            if len == 0 && !empty {
                // A length without bytes, which a correct sibling never sends. The buffer's
                // contents are no message.
                rx.queue.unpop(chain);
                self.lost_message(key, cx);
                return Fill::Idle;
            }
            sending.left -= len as u32;
            let last = end(sending.left as usize, sending.ends == MessageEnd::Record);
            match self.shard.commit_part(&mut sending.room, len as u32, last) {
                Ok(header) => {
                    emit(rx, chain, &header, len);
                    cx.shared.counters.tx_packets.add(1);
                }
                // The flow has ended, which an event reports.
                Err(_) => rx.complete(chain, 0),
            }
            cx.shared.counters.tx_bytes.add(len as u64);
            bridge.to_guest += len as u64;
            self.moved += len;
            if last.is_some() {
                messages.sending = None;
            }
            if empty {
                let to = sibling.peer.flow;
                cx.outbox
                    .send(sibling.peer.device, SiblingMessage::ReadEmpty { to });
            } else {
                let used_up = sibling.front().is_some_and(|one| one.len() == 0);
                sibling::return_read(sibling, len as u32, used_up, cx);
            }
        }
        let done = messages.inbound.is_empty() && messages.sending.is_none();
        if bridge.state.has_host_finished() && done {
            // The remaining bytes are an incomplete message.
            sibling::return_inbound(sibling, true, cx);
            self.on_bridge_event(key, BridgeEvent::EndRead, cx);
        }
        // Fewer bytes are in copies now.
        self.update_bridge(key, cx);
        fill
    }

    /// Resets a connection with a message that exceeds its receiver's buffer.
    pub(super) fn too_long(&mut self, key: u32, len: usize, cx: &mut Context<'_>) {
        cx.shared.counters.message_resets.add(1);
        self.warn(&format!(
            "connection reset: a message of {len} bytes is longer than its receiver can take"
        ));
        self.reset_bridge(key, cx);
    }

    /// Resets a connection with an incomplete message: the guest must not receive other
    /// bytes in their place.
    #[cold]
    fn lost_message(&mut self, key: u32, cx: &mut Context<'_>) {
        cx.shared.counters.message_resets.add(1);
        self.warn("connection reset: bytes of a message are missing");
        self.reset_bridge(key, cx);
    }

    /// Sends a message of the program in one packet, in the common case: as
    /// [`app_write_packet`](Self::app_write_packet). False: nothing was sent.
    #[inline]
    pub(crate) fn app_send_message_packet(
        &mut self,
        flow: FlowId,
        slices: &[IoSlice<'_>],
        ends_record: bool,
        cx: &mut Context<'_>,
    ) -> bool {
        let fill = |body: GuestSlice<'_>| {
            put_all(slices, |at, bytes| {
                body.write(at, bytes);
            });
        };
        self.app_send_packet(flow, len_of(slices), whole(ends_record), fill, cx)
    }

    /// Copies a message of the program into buffers of the guest: all of it, or nothing. The part
    /// that finds no buffer is kept. Returns whether all of it was sent.
    pub(crate) fn app_send_message(
        &mut self,
        id: StreamId,
        flow: FlowId,
        slices: &[IoSlice<'_>],
        ends_record: bool,
        cx: &mut Context<'_>,
    ) -> Result<bool, SendFault> {
        if self.shard.has_transmit() {
            self.transmit_control(cx);
        }
        let mut slices = Slices::new(slices);
        let total = u32::try_from(slices.left()).map_err(|_| SendFault::TooLong)?;
        let pending = self.queues.is_command_pending();
        let rx = self.queues.rings.rx.as_mut().filter(|_| !pending);
        let Some(rx) = rx else {
            self.wait_for_room(id, cx);
            return Err(SendFault::WouldBlock);
        };
        let Some(mut chain) = rx.pop_if(HEADER_LEN + 1, true) else {
            self.wait_for_room(id, cx);
            return Err(SendFault::WouldBlock);
        };
        let mut room = match self.shard.reserve_message(flow, total) {
            Ok(room) => room,
            Err(error) => {
                rx.queue.unpop(chain);
                return Err(send_fault(error));
            }
        };
        let mut packets = 0;
        let rest = loop {
            let most = (chain.writable_len() as usize - HEADER_LEN).min(MAX_PAYLOAD as usize);
            let len = slices.left().min(most);
            slices.take(len, |at, bytes| {
                let (memory, pieces) = (rx.queue.memory(), chain.writable());
                memory.write(pieces, HEADER_LEN + at, bytes);
            });
            let last = end(slices.left(), ends_record);
            match self.shard.commit_part(&mut room, len as u32, last) {
                Ok(header) => emit(rx, chain, &header, len),
                // Cannot happen: nothing ran since the credit was reserved.
                Err(_) => {
                    rx.complete(chain, 0);
                    return Err(SendFault::Reset);
                }
            }
            packets += 1;
            if last.is_some() {
                break None;
            }
            match rx.pop_if(HEADER_LEN + 1, true) {
                Some(next) => chain = next,
                None => break Some(Outgoing::from_slices(room, slices, ends_record)),
            }
        };
        let all = rest.is_none();
        if let Some(rest) = rest {
            self.keep_outgoing(rest);
        }
        if let Some(app) = cx.shared.app.as_deref_mut() {
            app.tally.sent += u64::from(total);
            app.tally.copied_in += u64::from(total);
            app.tally.packets_sent += packets;
        }
        Ok(all)
    }

    /// Keeps the rest of a message until there are buffers for it.
    pub(super) fn keep_outgoing(&mut self, rest: Outgoing) {
        self.starved = true;
        self.outgoing.push_back(rest);
    }

    /// Whether the program may send a message: see
    /// [`Backend::is_writable`](crate::table::backend::Backend::is_writable).
    pub(crate) fn app_may_send(
        &mut self,
        id: StreamId,
        flow: FlowId,
        cx: &mut Context<'_>,
    ) -> bool {
        let pending = self.queues.is_command_pending();
        let rx = self.queues.rings.rx.as_mut().filter(|_| !pending);
        if !rx.is_some_and(|rx| rx.live() && rx.queue.posted() > 0) {
            self.wait_for_room(id, cx);
            return false;
        }
        self.shard.can_reserve_message(flow)
    }

    /// Whether the rest of a message is kept for this flow.
    pub(crate) fn is_sending(&self, flow: FlowId) -> bool {
        self.outgoing.iter().any(|kept| kept.room.flow() == flow)
    }

    /// Sends kept messages to the guest as far as there are buffers.
    pub(super) fn send_outgoing(&mut self, cx: &mut Context<'_>) {
        let Some(rx) = self.queues.rings.rx.as_mut() else {
            return;
        };
        while self.moved < TURN_BYTES
            && let Some(mut kept) = self.outgoing.pop_front()
        {
            let Some(chain) = rx.pop_if(HEADER_LEN + 1, true) else {
                self.starved = true;
                self.outgoing.push_front(kept);
                return;
            };
            let most = (chain.writable_len() as usize - HEADER_LEN).min(MAX_PAYLOAD as usize);
            let len = kept.left().len().min(most);
            let bytes = kept.left().get(..len).unwrap_or(&[]);
            rx.queue.memory().write(chain.writable(), HEADER_LEN, bytes);
            let last = kept.end(len);
            match self.shard.commit_part(&mut kept.room, len as u32, last) {
                Ok(header) => emit(rx, chain, &header, len),
                // The connection has ended: drop the rest.
                Err(_) => {
                    rx.complete(chain, 0);
                    continue;
                }
            }
            kept.advance(len);
            self.moved += len;
            cx.shared.counters.tx_packets.add(1);
            cx.shared.counters.tx_bytes.add(len as u64);
            if let Some(app) = cx.shared.app.as_deref_mut() {
                app.tally.packets_sent += 1;
            }
            if last.is_none() {
                self.outgoing.push_front(kept);
                continue;
            }
            // The sender may wait for the end of the message; no other event reports it.
            if let Some(id) = self.app.flows.get(kept.room.flow()) {
                Self::app_writable(id, cx);
            }
        }
    }
}
