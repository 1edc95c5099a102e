//! A connection of the guest joined to its other end.
//!
//! # Invariants
//! - Bytes and ends keep their order in each direction.
//! - A bridge that cannot proceed is registered where the cause is resolved: on the `ready` list,
//!   with a timer, in the poller, or for a credit event.
//!
//! # Structure
//! The shard has the vsock half (state, credit, counters); a [`Bridge`] has the socket or sibling,
//! the bytes in flight, and the edges seen.

use super::bridge_state::BridgeState;
use super::flags::Flags;
use super::forwarded::Forwarded;
use super::messages::Messages;
use super::zero_copy::ZeroCopySends;
use crate::device::guest_orders::AttachmentKey;
use crate::device::host_sockets::{HostPort, HostSocket};
use crate::device::outbound::{HeldChain, Outbound, QueuePool, ReusableQueue};

use super::peer::Peer;
use std::collections::VecDeque;
use std::sync::Arc;
use zerosock_proto::vsock::FlowId;
use zerosock_proto::{Instant, Port};
use zerosock_relay::connector::PendingConnect;
use zerosock_ring::{Chain, Memory};

/// The other end of a connection of the guest.
#[derive(Debug)]
pub(crate) enum BridgePeer {
    /// A host socket with a full backlog; retried until the deadline.
    Retrying { to: HostPort, deadline: Instant },
    /// A target of a rule that the connector connects to; its answer is
    /// [`Dialed`](super::sibling_message::SiblingMessage::Dialed). `None` until it was asked.
    Resolving(Option<PendingConnect>),
    /// A connect that the kernel has not completed.
    Connecting {
        socket: HostSocket,
        deadline: Instant,
    },
    /// A host socket. `ok` is the port for the OK line until the guest has answered.
    Socket {
        socket: HostSocket,
        ok: Option<Port>,
    },
    /// A sibling that has not accepted yet; its address, once it is known.
    Asked(Option<Peer>),
    /// A sibling.
    Sibling(SiblingPeer),
    /// A sibling of a connection that another process has begun. Its device has not told its address yet.
    Rejoining(SiblingPeer),
    /// A doorbell of which the token has not arrived. It is reset at the deadline.
    NewDoorbell,
    /// The doorbell of this attachment.
    Doorbell(AttachmentKey),
}

/// A sibling as the peer of a bridge.
#[derive(Debug)]
pub(crate) struct SiblingPeer {
    pub(crate) peer: Peer,
    /// Bytes from the sibling for our guest; `None` while idle.
    inbound: Option<Box<InboundQueue>>,
    /// Chains of our guest that are lent to the sibling, which returns them in order.
    pub(crate) lent: u32,
    /// How many of them were lent after [`Bridge::held_since`].
    pub(crate) lent_since_hold: u32,
    /// The sibling held a chain beyond the hold limit and has not caught up since.
    pub(crate) stalled: bool,
}

impl SiblingPeer {
    pub(crate) fn new(peer: Peer) -> SiblingPeer {
        SiblingPeer {
            peer,
            inbound: None,
            lent: 0,
            lent_since_hold: 0,
            stalled: false,
        }
    }

    /// Appends bytes from the sibling. Copies go into a single buffer; its read bytes are dropped
    /// when they make up half of it, so it stays below twice the waiting bytes.
    ///
    /// Returns `inbound` if the list could not grow: see
    /// [`has_lost_bytes`](SiblingPeer::has_lost_bytes).
    pub(crate) fn push(
        &mut self,
        inbound: Inbound,
        spares: &mut QueuePool<InboundQueue>,
    ) -> Option<Inbound> {
        let waiting = spares.get_or_insert_spare(&mut self.inbound);
        match (waiting.parts.back_mut(), inbound) {
            (Some(Inbound::Copied { bytes, taken }), Inbound::Copied { bytes: more, .. }) => {
                waiting.copied += more.len();
                if *taken >= bytes.len() / 2 {
                    bytes.drain(..*taken);
                    *taken = 0;
                }
                match bytes.try_reserve(more.len()) {
                    Ok(()) => bytes.extend_from_slice(&more),
                    Err(_) => waiting.lost = true,
                }
            }
            (_, inbound) => {
                if waiting.parts.try_reserve(1).is_err() {
                    waiting.lost = true;
                    return Some(inbound);
                }
                if let Inbound::Copied { bytes, .. } = &inbound {
                    waiting.copied += bytes.len();
                }
                waiting.parts.push_back(inbound);
            }
        }
        None
    }

    /// The oldest waiting bytes.
    pub(crate) fn front(&mut self) -> Option<&mut Inbound> {
        self.inbound.as_mut()?.parts.front_mut()
    }

    /// Removes the oldest waiting bytes.
    pub(crate) fn pop(&mut self) -> Option<Inbound> {
        self.inbound.as_mut()?.parts.pop_front()
    }

    /// All waiting bytes, in order.
    pub(crate) fn parts(&mut self) -> impl Iterator<Item = &mut Inbound> {
        self.inbound
            .iter_mut()
            .flat_map(|waiting| &mut waiting.parts)
    }

    /// All waiting bytes, in order.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = &Inbound> {
        self.inbound.iter().flat_map(|waiting| &waiting.parts)
    }

    /// Removes all waiting bytes.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Inbound> {
        self.change_copied(|_| 0);
        let waiting = self.inbound.iter_mut();
        waiting.flat_map(|waiting| waiting.parts.drain(..))
    }

    /// Adds a copy of bytes that were removed.
    pub(crate) fn restore(&mut self, bytes: Vec<u8>) {
        if let Some(waiting) = &mut self.inbound {
            waiting.copied += bytes.len();
            let copy = Inbound::Copied { bytes, taken: 0 };
            waiting.parts.push_back(copy);
        }
    }

    /// Whether bytes were lost to a failed allocation: the connection has to be reset.
    #[inline]
    pub(crate) fn has_lost_bytes(&self) -> bool {
        self.inbound.as_ref().is_some_and(|waiting| waiting.lost)
    }

    /// Records that waiting bytes were lost: see [`has_lost_bytes`](SiblingPeer::has_lost_bytes).
    #[cold]
    pub(crate) fn lose(&mut self) {
        if let Some(waiting) = &mut self.inbound {
            waiting.lost = true;
        }
    }

    /// Whether no bytes wait.
    pub(crate) fn is_drained(&self) -> bool {
        let waiting = self.inbound.as_ref();
        waiting.is_none_or(|waiting| waiting.parts.is_empty())
    }

    /// Waiting bytes in copies; they count as overflow of our device.
    pub(crate) fn copied(&self) -> usize {
        self.inbound.as_ref().map_or(0, |waiting| waiting.copied)
    }

    /// Updates the number of waiting bytes in copies.
    pub(crate) fn change_copied(&mut self, change: impl FnOnce(usize) -> usize) {
        if let Some(waiting) = &mut self.inbound {
            waiting.copied = change(waiting.copied);
        }
    }

    /// Returns an empty list to `spares`.
    #[inline]
    pub(crate) fn recycle(&mut self, spares: &mut QueuePool<InboundQueue>) {
        spares.recycle(&mut self.inbound);
    }
}

/// Bytes from a sibling that have not been sent to our guest, in order.
#[derive(Debug, Default)]
pub(crate) struct InboundQueue {
    parts: VecDeque<Inbound>,
    /// Bytes of `parts` that are in copies.
    copied: usize,
    /// An allocation failed and bytes were lost.
    lost: bool,
}

impl ReusableQueue for InboundQueue {
    #[inline]
    fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.copied == 0 && !self.lost
    }

    #[inline]
    fn capacity(&self) -> usize {
        self.parts.capacity()
    }
}

/// Bytes from a sibling.
#[derive(Debug)]
pub(crate) enum Inbound {
    /// In the sibling guest's memory; the chain is returned when the bytes have been read.
    Lent {
        memory: Arc<Memory>,
        held: HeldChain,
        epoch: u32,
    },
    /// In a copy, of which the first `taken` bytes have been read.
    Copied { bytes: Vec<u8>, taken: usize },
}

impl Inbound {
    pub(crate) fn len(&self) -> usize {
        match self {
            Inbound::Lent { held, .. } => held.len as usize,
            Inbound::Copied { bytes, taken } => bytes.len() - taken,
        }
    }
}

/// A connection of the guest and its other end: see the module.
#[derive(Debug)]
pub(crate) struct Bridge {
    /// The vsock half; `None` while the bridge lingers: the flow has ended, bytes for the host
    /// remain.
    pub(crate) flow: Option<FlowId>,
    pub(crate) peer: BridgePeer,
    /// Bytes of the guest that the peer has not taken.
    pub(crate) outbound: Outbound,
    /// Boundaries of messages, for a SEQPACKET connection.
    pub(crate) messages: Option<Box<Messages>>,
    /// The rule that the connection was made by, and what is counted for it.
    pub(crate) forwarded: Option<Box<Forwarded>>,
    /// How far the two directions are.
    pub(crate) state: BridgeState,
    /// What may be done, what is waited for, and the lists that it is on.
    pub(crate) flags: Flags,
    /// Since when chains of the guest are held or lent without progress; `None`: none are.
    pub(crate) held_since: Option<Instant>,
    /// Number of receive buffers that the next read fills.
    pub(crate) read_chains: u8,
    /// This bridge's part of the device's sums: chains held, lent or in flight, and overflow bytes.
    pub(super) counted: (u32, u32),
    /// Payload bytes that the guest has sent, for the log.
    pub(crate) from_guest: u64,
    /// Payload bytes to the guest.
    pub(crate) to_guest: u64,
}

impl Bridge {
    pub(crate) fn new(flow: FlowId, peer: BridgePeer) -> Bridge {
        Bridge::restored(Some(flow), peer, BridgeState::CONNECTING)
    }

    /// A connection that another process has begun. Without a flow it lingers.
    pub(crate) fn restored(flow: Option<FlowId>, peer: BridgePeer, state: BridgeState) -> Bridge {
        Bridge {
            flow,
            peer,
            outbound: Outbound::default(),
            messages: None,
            forwarded: None,
            state,
            flags: Flags::default(),
            held_since: None,
            read_chains: 1,
            counted: (0, 0),
            from_guest: 0,
            to_guest: 0,
        }
    }

    /// Whether bytes of either direction were lost to a failed allocation: the connection has to
    /// be reset.
    #[inline]
    pub(crate) fn has_lost_bytes(&self) -> bool {
        self.outbound.has_lost_bytes()
            || matches!(&self.peer, BridgePeer::Sibling(sibling) if sibling.has_lost_bytes())
    }

    /// Whether the kernel may still read bytes of the guest for the socket.
    pub(crate) fn has_sends_in_flight(&self) -> bool {
        let forwarded = self.forwarded.as_ref();
        forwarded
            .and_then(|it| it.zero_copy.as_ref())
            .is_some_and(ZeroCopySends::in_flight)
    }

    /// Chains that are kept until sends in flight were reported.
    pub(crate) fn chains_in_flight(&self) -> impl Iterator<Item = &Chain> {
        let forwarded = self.forwarded.as_ref();
        let sends = forwarded.and_then(|it| it.zero_copy.as_ref());
        sends.into_iter().flat_map(ZeroCopySends::chains)
    }

    /// Whether the other end has taken all bytes of the guest.
    pub(crate) fn is_delivered(&self) -> bool {
        self.outbound.is_empty() && !self.has_sends_in_flight()
    }

    /// Records that more bytes or an end of file have arrived for the guest, perhaps enough to be sent.
    #[inline]
    pub(crate) fn set_readable(&mut self) {
        self.flags.insert(Flags::READABLE);
        self.flags.remove(Flags::FEW_BYTES);
    }

    /// Whether reading from the other end may bring something for the guest.
    pub(crate) fn may_read(&self) -> bool {
        self.flags.has(Flags::READABLE)
            && !self.flags.has(Flags::WAITS)
            && self.state.is_open()
            && self.state.reads()
            && self.flow.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_of_copies_that_never_empties_stays_small() {
        let mut shard = zerosock_proto::vsock::Shard::new(
            zerosock_proto::vsock::ShardConfig::driver(zerosock_proto::Cid::new(3)),
            Arc::new(zerosock_proto::vsock::PortTable::new()),
        );
        let to = zerosock_proto::Address::new(zerosock_proto::Cid::HOST, Port::new(1));
        let any = zerosock_proto::Address::new(zerosock_proto::Cid::ANY, Port::ANY);
        let stream = zerosock_proto::wire::vsock::SocketType::Stream;
        let flow = shard.connect(Instant::ZERO, any, to, stream).unwrap();
        let (worker, vm) = (0, 0);
        let device = zerosock_virtio::outbox::DeviceAddr { worker, number: vm };
        let mut sibling = SiblingPeer::new(Peer { device, flow });
        let mut spares = QueuePool::default();
        for _ in 0..1000 {
            let (bytes, taken) = (vec![7; 1000], 0);
            sibling.push(Inbound::Copied { bytes, taken }, &mut spares);
            // Read all but the last of it.
            while sibling.copied() > 1000 {
                let Some(Inbound::Copied { taken, .. }) = sibling.front() else {
                    panic!("nothing there");
                };
                *taken += 500;
                sibling.change_copied(|copied| copied - 500);
            }
            assert_eq!(sibling.parts().count(), 1);
            let Some(Inbound::Copied { bytes, .. }) = sibling.front() else {
                panic!("nothing there");
            };
            assert!(bytes.len() <= 4000, "{}", bytes.len());
        }
    }

    #[test]
    fn idle_bridge_is_small() {
        // A connection between two guests has two bridges and two flows: together at most 1 KiB. What
        // only connections by rule need is behind one pointer.
        assert!(size_of::<Bridge>() <= 128, "{}", size_of::<Bridge>());
    }
}
