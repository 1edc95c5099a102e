//! The doorbells of guest endpoints: streams by which a side that sleeps is woken.
//!
//! The guest sends the token of an attachment, once, and from then on a byte for each wake-up; bytes that arrive together
//! are one. The device of the VM sends a byte when the endpoint's device notifies its driver.
//!
//! # Invariants
//! - No wake-up is lost: one that finds no credit or no buffer is sent later, and those that follow are part of it.
//! - No bytes add up in the guest's kernel beyond the limit of packets that the protocol core has for each connection.
//! - A connection without a token is accepted only while an attachment has an unused one; the oldest is reset when there
//!   are too many.
//! - An endpoint ends with its doorbell, and its doorbell with it.

use arrayvec::ArrayVec;
use zerosock_proto::vsock::FlowId;
use zerosock_ring::Memory;

use super::Device;
use super::guest_orders::AttachmentKey;
use super::state::bridge::BridgePeer;
use super::state::flags::Flags;
use super::to_guest::{Fill, ReservedBuffer, reserve_buffers, send_payload};
use super::virtio::GUEST_CALL;
use crate::device::guest_bridges::GuestBridges;
use crate::device::state::sibling_message::SiblingMessage;
use crate::registration::Token;
use crate::stats::RefusalCause;
use zerosock_proto::wire::vsock::HEADER_LEN;
use zerosock_virtio::poller::Interest;

/// Bytes that the guest may have unread before it is asked whether it has read them.
const UNREAD: u32 = 64;

/// Connections without a token at once. Any program of the guest can open one, and an agent sends its token at once.
const NEW_DOORBELLS: usize = 32;

impl Device {
    /// Whether an attachment has a token that no doorbell has sent.
    pub(super) fn awaits_doorbell(&self) -> bool {
        let guests = self.guests.as_ref();
        guests.is_some_and(|it| it.attachments.values().any(|it| it.token.is_some()))
    }

    /// A doorbell has sent its token, or is removed before.
    pub(super) fn doorbell_decided(&mut self, key: u32) {
        if let Some(guests) = &mut self.guests {
            guests.new_doorbells.retain(|new| *new != key);
        }
    }
}

impl GuestBridges<'_, '_> {
    /// Accepts a connection to the port of doorbells.
    pub(super) fn accept_doorbell(&mut self, flow: FlowId) {
        let key = self.add_bridge(flow, BridgePeer::NewDoorbell);
        if let Some(guests) = &mut self.device.guests {
            guests.new_doorbells.push_back(key);
            if guests.new_doorbells.len() > NEW_DOORBELLS
                && let Some(oldest) = guests.new_doorbells.pop_front()
            {
                self.cx.shared.counters.refuse(RefusalCause::Limit);
                self.reset_bridge(oldest);
            }
        }
        self.host_accepted(key);
    }

    /// Handles bytes of the guest, or the end of them.
    pub(super) fn doorbell_rung(&mut self, key: u32) {
        let Some(bridge) = self.device.bridges.get(key) else {
            return;
        };
        let (len, has_finished) = (bridge.outbound.len(), bridge.state.has_guest_finished());
        let mut wakes = len > 0;
        let opened = match bridge.peer {
            BridgePeer::Doorbell(of) => Some(of),
            _ if len < size_of::<Token>() => None,
            _ => {
                wakes = len > size_of::<Token>();
                let Some(of) = self.open_doorbell(key) else {
                    self.cx.shared.counters.refuse(RefusalCause::Denied);
                    self.device
                        .warn("doorbell of a guest endpoint closed: it has sent an unknown token");
                    return self.reset_bridge(key);
                };
                Some(of)
            }
        };
        if has_finished {
            return self.reset_bridge(key);
        }
        let (Some(of), Some(bridge)) = (opened, self.device.bridges.get_mut(key)) else {
            return self.update_bridge(key);
        };
        bridge.clear_outbound(&mut self.device.queues.rings.tx);
        if wakes {
            self.kick(of);
        }
        if let Some(flow) = self.device.bridges.get(key).and_then(|it| it.flow) {
            // Fails if the flow has ended.
            let _ = self.device.shard.consume(flow, len as u32);
            self.device.drain_events(self.cx);
        }
        self.update_bridge(key);
    }

    /// Wakes the device of an endpoint.
    fn kick(&mut self, of: AttachmentKey) {
        let guests = self.device.guests.as_ref();
        let attachment = guests.and_then(|guests| guests.attachments.get(&of));
        if let Some((device, _)) = attachment.and_then(|it| it.start) {
            self.cx.outbox.send(device, SiblingMessage::Kick);
        }
    }

    /// Finds the attachment with the token that the guest has sent, and joins the doorbell to it.
    fn open_doorbell(&mut self, key: u32) -> Option<AttachmentKey> {
        self.spill(key, 0);
        let bridge = self.device.bridges.get_mut(key)?;
        let token = Token(*bridge.outbound.overflow().first_chunk()?);
        let guests = self.device.guests.as_mut()?;
        let mut attachments = guests.attachments.iter_mut();
        let (&of, attachment) = attachments.find(|(_, it)| it.token == Some(token))?;
        let token = zerosock_virtio::poller::Token {
            device: self.device.addr.number,
            kind: GUEST_CALL,
            key,
        };
        let watched = self.cx.poller.add(&attachment.call, token, Interest::Read);
        watched.ok()?;
        // It opens one doorbell.
        attachment.token = None;
        attachment.doorbell = Some(key);
        bridge.peer = BridgePeer::Doorbell(of);
        self.device.doorbell_decided(key);
        // For notifications of before.
        self.ring_doorbell(key);
        Some(of)
    }

    /// Wakes the driver of an endpoint, as soon as the guest takes a byte.
    pub(super) fn ring_doorbell(&mut self, key: u32) {
        if let Some(bridge) = self.device.bridges.get_mut(key)
            && let BridgePeer::Doorbell(_) = bridge.peer
        {
            bridge.flags.insert(Flags::READABLE);
            self.device.bridges.enqueue(key);
        }
    }

    /// Sends the byte.
    pub(super) fn fill_doorbell(&mut self, key: u32) -> Fill {
        let (Some(rx), Some(bridge)) = (
            self.device.queues.rings.rx.as_mut(),
            self.device.bridges.get_mut(key),
        ) else {
            return Fill::Idle;
        };
        let (BridgePeer::Doorbell(_), Some(flow)) = (&bridge.peer, bridge.flow) else {
            bridge.flags.remove(Flags::READABLE);
            return Fill::Idle;
        };
        let shard = &mut self.device.shard;
        let mut buffer = ArrayVec::<ReservedBuffer, 1>::new();
        let stop = reserve_buffers(rx, shard, flow, 1, 1, &mut buffer);
        let Some(ReservedBuffer {
            chain, reservation, ..
        }) = buffer.pop()
        else {
            bridge.flags.set(Flags::NO_CREDIT, stop == Some(Fill::Idle));
            return stop.unwrap_or(Fill::Idle);
        };
        let memory: &Memory = rx.queue.memory();
        memory.write(chain.writable(), HEADER_LEN, &[1]);
        send_payload(rx, shard, chain, reservation, 1, self.cx);
        bridge.flags.remove(Flags::READABLE);
        bridge.to_guest += 1;
        let unread = |it: &zerosock_proto::vsock::FlowInfo| it.tx_cnt.wrapping_sub(it.peer_fwd_cnt);
        if shard.flow(flow).is_some_and(|it| unread(&it) >= UNREAD) {
            // Its kernel says so at once, and else only when its buffer is nearly full.
            let _ = shard.request_progress(flow);
        }
        Fill::Idle
    }
}
