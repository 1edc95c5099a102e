//! A connection of the guest joined to its other end.
//!
//! The shard knows the vsock half (state, credit, counters); a [`Bridge`] knows the rest: the
//! socket or the sibling, the bytes under way, and which edges have been seen. What must hold:
//! the order of bytes and ends in each direction, and that a bridge which is stuck is on exactly
//! the list that its cure will look at (`ready`, a timer, an edge, a credit event).

use super::backlog::HostPort;
use super::messages::Messages;
use super::outbound::{Held, Outbound, Spare, Spares};
use super::queue_pairs::Parked;

use crate::device::host_sockets::HostSocket;
use crate::device::sibling_message::Peer;
use crate::table::sockets::StreamId;
use std::collections::VecDeque;
use std::sync::Arc;
use zerosock_proto::vsock::FlowId;
use zerosock_proto::{Instant, Port};
use zerosock_ring::Memory;

/// What the guest is joined to.
#[derive(Debug)]
pub(crate) enum BridgePeer {
    /// A host socket with a full backlog: tried again until the deadline.
    Retrying { to: HostPort, deadline: Instant },
    /// A connect that the kernel has not decided.
    Connecting {
        socket: HostSocket,
        deadline: Instant,
    },
    /// A host socket. `ok` is the port for the OK line, while the guest has not answered.
    Socket {
        socket: HostSocket,
        ok: Option<Port>,
    },
    /// A sibling that was asked and has not accepted; who it is, once it has said so.
    Asked(Option<Peer>),
    /// A sibling.
    Sibling(SiblingEnd),
    /// The program that embeds the device.
    App(AppEnd),
}

/// The program's side of a bridge.
#[derive(Debug)]
pub(crate) struct AppEnd {
    pub(crate) id: StreamId,
    /// Buffers of the guest that it has on loan.
    pub(crate) loans: u16,
}

/// The sibling's side of a bridge.
#[derive(Debug)]
pub(crate) struct SiblingEnd {
    pub(crate) peer: Peer,
    /// Bytes from the sibling for our guest; none at rest.
    inbound: Option<Box<Waiting>>,
    /// Chains of our guest that the sibling has; they come back in order.
    pub(crate) out: u32,
    /// Those that were lent since [`Bridge::held_since`].
    pub(crate) younger: u32,
    /// It held a chain too long, and has not caught up since.
    pub(crate) stalled: bool,
    /// The sibling's guest will send no more once `inbound` is empty.
    pub(crate) finish: bool,
    /// It is to go on at this queue pair once no chain of our guest is out.
    pub(crate) move_to: Option<u16>,
    /// It has come from another pair, and what its sibling sends has to wait.
    pub(crate) parked: Option<Box<Parked>>,
}

impl SiblingEnd {
    pub(crate) fn new(peer: Peer) -> SiblingEnd {
        SiblingEnd {
            peer,
            inbound: None,
            out: 0,
            younger: 0,
            stalled: false,
            finish: false,
            move_to: None,
            parked: None,
        }
    }

    /// Appends bytes from the sibling. Copies go into one buffer, however many small packets they
    /// were; what has been read of it is dropped when it is half, so that it stays below twice the
    /// bytes that wait.
    ///
    /// Returns what there is no memory for: see [`has_lost_bytes`](SiblingEnd::has_lost_bytes).
    pub(crate) fn push(
        &mut self,
        inbound: Inbound,
        spares: &mut Spares<Waiting>,
    ) -> Option<Inbound> {
        let waiting = spares.fill(&mut self.inbound);
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

    /// The oldest bytes that wait.
    pub(crate) fn front(&mut self) -> Option<&mut Inbound> {
        self.inbound.as_mut()?.parts.front_mut()
    }

    /// Takes the oldest bytes out.
    pub(crate) fn pop(&mut self) -> Option<Inbound> {
        self.inbound.as_mut()?.parts.pop_front()
    }

    /// All bytes that wait, in order.
    pub(crate) fn parts(&mut self) -> impl Iterator<Item = &mut Inbound> {
        self.inbound
            .iter_mut()
            .flat_map(|waiting| &mut waiting.parts)
    }

    /// Takes out all bytes that wait, and the memory of the list.
    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = Inbound> {
        let waiting = self.inbound.take();
        waiting.into_iter().flat_map(|waiting| waiting.parts)
    }

    /// Whether bytes are missing, for want of memory: the connection is to be reset.
    #[inline]
    pub(crate) fn has_lost_bytes(&self) -> bool {
        self.inbound.as_ref().is_some_and(|waiting| waiting.lost)
    }

    /// Bytes are missing: see [`has_lost_bytes`](SiblingEnd::has_lost_bytes).
    #[cold]
    pub(crate) fn lose(&mut self, spares: &mut Spares<Waiting>) {
        spares.fill(&mut self.inbound).lost = true;
    }

    /// Nothing waits.
    pub(crate) fn is_drained(&self) -> bool {
        let waiting = self.inbound.as_ref();
        waiting.is_none_or(|waiting| waiting.parts.is_empty())
    }

    /// Bytes that wait in copies; they count as overflow of our device.
    pub(crate) fn copied(&self) -> usize {
        self.inbound.as_ref().map_or(0, |waiting| waiting.copied)
    }

    /// Bytes that wait were copied, or such copies were read.
    pub(crate) fn change_copied(&mut self, change: impl FnOnce(usize) -> usize) {
        if let Some(waiting) = &mut self.inbound {
            waiting.copied = change(waiting.copied);
        }
    }

    /// At rest, if nothing waits: the list is for others.
    #[inline]
    pub(crate) fn rest(&mut self, spares: &mut Spares<Waiting>) {
        spares.rest(&mut self.inbound);
    }
}

/// Bytes from a sibling that our guest has not got yet, in order.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    parts: VecDeque<Inbound>,
    /// Those of them that are in copies.
    copied: usize,
    /// There was no memory for a copy.
    lost: bool,
}

impl Spare for Waiting {
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
    /// In the sibling guest's memory; the chain goes back when they are read.
    Lent {
        memory: Arc<Memory>,
        held: Held,
        epoch: u32,
    },
    /// In a copy: the first `taken` bytes have been read.
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

/// See the module.
#[derive(Debug)]
pub(crate) struct Bridge {
    /// The vsock half; `None` when it has ended and the host still has bytes to take.
    pub(crate) flow: Option<FlowId>,
    pub(crate) end: BridgePeer,
    pub(crate) outbound: Outbound,
    /// Where the messages end that it carries, if it carries any.
    pub(crate) messages: Option<Box<Messages>>,
    /// Both halves are connected.
    pub(crate) open: bool,
    /// The socket may have bytes or an end for us (an edge was seen and not used up).
    pub(crate) readable: bool,
    /// The socket may take bytes.
    pub(crate) writable: bool,
    /// The host has finished sending: end of file comes after what is still to be read.
    pub(crate) host_finished: bool,
    /// The host has closed both ways.
    pub(crate) host_gone: bool,
    /// We do not read from the host any more: end of file was read, or the guest is recv_shutdown.
    pub(crate) read_closed: bool,
    /// We do not write to the host any more: bytes from the guest are dropped.
    pub(crate) write_closed: bool,
    /// The guest will send no more once `outbound` is empty.
    pub(crate) guest_finished: bool,
    /// The host has been told that the guest will send no more.
    pub(crate) finish_told: bool,
    /// On the device's ready list.
    pub(crate) in_ready: bool,
    /// On the device's list of bridges to flush.
    pub(crate) in_dirty: bool,
    /// Waits for credit: the shard will say `Writable`.
    pub(crate) no_credit: bool,
    /// Does so only because it has few bytes: more of them end it.
    pub(crate) holds_back: bool,
    /// Since when chains of the guest are held or lent without progress; `None`: none are.
    pub(crate) held_since: Option<Instant>,
    /// A hold timer is set. It may find that nothing is held any more: one for many holds.
    pub(crate) hold_timer: bool,
    /// The kernel had no memory for a send; no edge tells when it has.
    pub(crate) no_memory: bool,
    /// Every read goes on until there is nothing: the host plays with urgent bytes, at which reads
    /// stop short.
    pub(crate) urgent: bool,
    /// How many receive buffers the next read gathers.
    pub(crate) read_chains: u8,
    /// What this bridge adds to the device's sums of held chains and overflow bytes.
    pub(crate) counted: (u32, u32),
}

impl Bridge {
    pub(crate) fn new(flow: FlowId, end: BridgePeer) -> Bridge {
        Bridge {
            flow: Some(flow),
            end,
            outbound: Outbound::default(),
            messages: None,
            open: false,
            readable: false,
            writable: false,
            host_finished: false,
            host_gone: false,
            read_closed: false,
            write_closed: false,
            guest_finished: false,
            finish_told: false,
            in_ready: false,
            in_dirty: false,
            no_credit: false,
            holds_back: false,
            held_since: None,
            hold_timer: false,
            no_memory: false,
            urgent: false,
            read_chains: 1,
            counted: (0, 0),
        }
    }

    /// Whether bytes either way are missing, for want of memory: the connection is to be reset.
    #[inline]
    pub(crate) fn has_lost_bytes(&self) -> bool {
        self.outbound.has_lost_bytes()
            || matches!(&self.end, BridgePeer::Sibling(sibling) if sibling.has_lost_bytes())
    }

    /// There are more bytes: perhaps enough to be sent.
    #[inline]
    pub(crate) fn hold_back_no_more(&mut self) {
        if std::mem::take(&mut self.holds_back) {
            self.no_credit = false;
        }
    }

    /// Whether a look at the other end may bring something for the guest.
    pub(crate) fn may_read(&self) -> bool {
        self.open && self.readable && !self.read_closed && !self.no_credit && self.flow.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_that_are_never_all_read_stay_small() {
        let mut shard = zerosock_proto::vsock::Shard::new(
            zerosock_proto::vsock::ShardConfig::driver(zerosock_proto::Cid::new(3)),
            Arc::new(zerosock_proto::vsock::PortTable::new()),
        );
        let to = zerosock_proto::Address::new(zerosock_proto::Cid::HOST, Port::new(1));
        let any = zerosock_proto::Address::new(zerosock_proto::Cid::ANY, Port::ANY);
        let stream = zerosock_proto::wire::vsock::SocketType::Stream;
        let flow = shard.connect(Instant::ZERO, any, to, stream).unwrap();
        let (worker, vm) = (0, 0);
        let device = crate::routing::DeviceAddr { worker, vm };
        let mut sibling = SiblingEnd::new(Peer { device, flow });
        let mut spares = Spares::default();
        for _ in 0..1000 {
            let (bytes, taken) = (vec![7; 1000], 0);
            sibling.push(Inbound::Copied { bytes, taken }, &mut spares);
            // All but the last of it is read.
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
    fn a_join_at_rest_is_small() {
        // With the shard's half, and both twice for two guests of one daemon, this stays below the
        // design's 1 KiB for a connection.
        assert!(size_of::<Bridge>() <= 112, "{}", size_of::<Bridge>());
    }
}
