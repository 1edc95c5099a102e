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

use crate::device::guest_bridges::GuestBridges;
use zerosock_proto::vsock::{FlowId, ReserveError};
use zerosock_proto::wire::vsock::{HEADER_LEN, MAX_PAYLOAD};
use zerosock_ring::Chain;

use super::events::emit;
use super::flush::share_of;
use super::outbound::HeldChain;
use super::sibling;
use super::state::bridge::BridgePeer;
use super::state::bridge_state::BridgeEvent;
use super::state::flags::Flags;
use super::to_guest::{Fill, MAX_READ_BUFFERS};
use super::{Context, Device};
use crate::device::state::messages::Sending;
use crate::device::state::sibling_message::SiblingMessage;
use crate::table::outgoing::end;
use crate::table::sockets::{Arrival, MessageEnd};

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
            return self.half(cx).deliver(chain, arrival);
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
                return self.bridges_with(cx).end_for_want_of_memory(key);
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

    /// Resets a connection with an incomplete message: the guest must not receive other
    /// bytes in their place.
    #[cold]
    fn lost_message(&mut self, key: u32, cx: &mut Context<'_>) {
        cx.shared.counters.message_resets.add(1);
        self.warn("connection reset: bytes of a message are missing");
        self.bridges_with(cx).reset_bridge(key);
    }
}

impl GuestBridges<'_, '_> {
    /// Sends the sibling the lengths of messages that it has received completely.
    pub(super) fn send_message_lengths(&mut self, key: u32) {
        let Some(bridge) = self.device.bridges.get_mut(key) else {
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
        if self.cx.outbox.try_reserve(device, count).is_err() {
            return self.end_for_want_of_memory(key);
        }
        for (len, ends) in messages.outbound.drain(..) {
            self.cx
                .outbox
                .send(device, SiblingMessage::Ended { to, len, ends });
        }
    }

    /// Resets a connection with a message that exceeds its receiver's buffer.
    pub(super) fn too_long(&mut self, key: u32, len: usize) {
        self.cx.shared.counters.message_resets.add(1);
        self.device.warn(&format!(
            "connection reset: a message of {len} bytes is longer than its receiver can take"
        ));
        self.reset_bridge(key);
    }

    /// The last `len` bytes from the sibling form a message.
    pub(super) fn sibling_ended_message(&mut self, to: FlowId, len: u32, ends: MessageEnd) {
        let Some((key, bridge)) = self.device.bridges.of_flow(to) else {
            return;
        };
        let (BridgePeer::Sibling(sibling), Some(messages)) = (&bridge.peer, &mut bridge.messages)
        else {
            return;
        };
        if !bridge.state.reads() {
            if len == 0 {
                let to = sibling.peer.flow;
                self.cx
                    .outbox
                    .send(sibling.peer.device, SiblingMessage::ReadEmpty { to });
            }
            return;
        }
        if messages.inbound.try_reserve(1).is_err() {
            return self.end_for_want_of_memory(key);
        }
        messages.inbound.push_back((len, ends));
        bridge.set_readable();
        self.device.bridges.enqueue(key);
        self.update_bridge(key);
    }

    /// Sends messages of the sibling to the guest.
    pub(super) fn fill_messages_from_sibling(&mut self, key: u32) -> Fill {
        let (Some(rx), Some(bridge)) = (
            self.device.queues.rings.rx.as_mut(),
            self.device.bridges.get_mut(key),
        ) else {
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
                match self.device.shard.reserve_message(flow, left) {
                    Ok(reservation) => {
                        messages.sending = Some(Sending {
                            reservation,
                            left,
                            ends,
                        })
                    }
                    Err(ReserveError::TooLong) => {
                        self.too_long(key, left as usize);
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
            let len = sibling::copy_front(sibling, want, rx.queue.memory(), &chain, self.cx);
            let empty = want == 0;
            if len == 0 && !empty {
                // A length without bytes, which a correct sibling never sends. The buffer's
                // contents are no message.
                rx.queue.unpop(chain);
                self.device.lost_message(key, self.cx);
                return Fill::Idle;
            }
            sending.left -= len as u32;
            let last = end(sending.left as usize, sending.ends == MessageEnd::Record);
            match self
                .device
                .shard
                .commit_part(&mut sending.reservation, len as u32, last)
            {
                Ok(header) => {
                    emit(rx, chain, &header, len);
                    self.cx.shared.counters.tx_packets.add(1);
                }
                // The flow has ended, which an event reports.
                Err(_) => rx.complete(chain, 0),
            }
            self.cx.shared.counters.tx_bytes.add(len as u64);
            bridge.to_guest += len as u64;
            self.device.moved += len;
            if last.is_some() {
                messages.sending = None;
            }
            if empty {
                let to = sibling.peer.flow;
                self.cx
                    .outbox
                    .send(sibling.peer.device, SiblingMessage::ReadEmpty { to });
            } else {
                let used_up = sibling.front().is_some_and(|one| one.len() == 0);
                sibling::return_read(sibling, len as u32, used_up, self.cx);
            }
        }
        let done = messages.inbound.is_empty() && messages.sending.is_none();
        if bridge.state.has_host_finished() && done {
            // The remaining bytes are an incomplete message.
            sibling::return_inbound(sibling, true, self.cx);
            self.on_bridge_event(key, BridgeEvent::EndRead);
        }
        // Fewer bytes are in copies now.
        self.update_bridge(key);
        fill
    }
}
