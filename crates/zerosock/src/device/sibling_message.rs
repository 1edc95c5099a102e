//! What the devices of one daemon say to each other.
//!
//! Two guests of one daemon are joined by two connections, one in each device's shard, so that
//! credit, caps and state are enforced against each of them separately. Bytes go from the
//! sender's chain straight into the receiver's posted buffer, in the receiver's worker: one
//! copy. Until then the chain is on loan to the receiver ([`Message::Lent`]) and comes back by
//! [`Message::Returned`]; the lender can ask for it back at any time ([`Message::Recall`]).

use super::datagrams::returned;
use super::host::Caller;
use super::outbound::Held;
use super::queue_pairs::Handoff;
use crate::routing::DeviceAddr;
use crate::table::sockets::Ends;
use std::sync::Arc;
use zerosock_proto::vsock::FlowId;
use zerosock_proto::wire::vsock::{Repr, SocketType};
use zerosock_proto::{Address, Port};
use zerosock_ring::Memory;

/// One side of a sibling connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Peer {
    pub(crate) device: DeviceAddr,
    pub(crate) flow: FlowId,
}

/// What one side of a sibling connection says to the other. Messages of one pair keep their
/// order. One that names a flow that has ended is dropped, after what it carries was returned.
#[derive(Debug)]
pub(crate) enum Message {
    /// A guest wants to reach its sibling: connect to your guest and answer.
    Connect {
        from: Peer,
        local: Address,
        peer: Address,
        socket_type: SocketType,
    },
    /// The answer to `Connect`, at once: `from` is asking its guest.
    Asking { to: FlowId, from: Peer },
    /// The other answer to `Connect`: it cannot be asked.
    Refused { to: FlowId },
    /// Your connect went through; `from` is the other side from now on.
    Accepted { to: FlowId, from: Peer },
    /// Bytes that lie in my guest's memory. Give the chain back when they are read.
    Lent {
        to: FlowId,
        from: Peer,
        memory: Arc<Memory>,
        held: Held,
        epoch: u32,
    },
    /// Bytes that I had to copy.
    Copied { to: FlowId, bytes: Vec<u8> },
    /// The last `len` bytes, all of which I have sent, are a message.
    Ended { to: FlowId, len: u32, ends: Ends },
    /// A message of yours without a byte was read.
    ReadEmpty { to: FlowId },
    /// `bytes` of what you sent were read; a chain that is no longer needed comes with it.
    Returned {
        to: FlowId,
        bytes: u32,
        chain: Option<(zerosock_ring::Chain, u32)>,
    },
    /// Copy out what you hold of mine for this flow and return it now.
    Recall { to: FlowId },
    /// My guest will not receive, or not send, any more.
    Shutdown {
        to: FlowId,
        receive: bool,
        send: bool,
    },
    /// The connection is gone, or the guest has refused it.
    Reset { to: FlowId },

    /// From queue_pair to queue_pair of a device with several queue pairs: this host program's connection belongs
    /// to you, from that port.
    Call { caller: Caller, local: Port },
    /// From queue_pair to queue_pair, to the first: the driver knows connections that the device does not.
    Lost,
    /// From a device to itself, that is to its worker: the connection goes to the queue_pair of that queue
    /// pair.
    HandOff { to: FlowId, pair: u16 },
    /// From queue_pair to queue_pair: take this connection.
    TakeOver(Box<Handoff>),
    /// The answer: it is there, or nowhere. With what the driver is to be told.
    Arrived {
        to: FlowId,
        now: Option<Peer>,
        answer: Repr,
    },
    /// From the old queue_pair to the new one: the driver that had this connection is gone.
    Orphaned { to: FlowId },
    /// From the queue_pair that has a connection now, to its sibling: send to me. `old` is who had it.
    Relocated { to: FlowId, from: Peer, old: Peer },
    /// The answer, to `old`: nothing more will come to you.
    Flushed { to: FlowId },
    /// From the old queue_pair to the new one: what was sent to me.
    SentOn(Box<Message>),

    /// A datagram, or a word of their flow control, for your guest. Give the chain back at once.
    Datagram(Datagram),
    /// The answer to `Datagram`: the chain, and a word for your guest.
    DatagramDone {
        chain: zerosock_ring::Chain,
        epoch: u32,
        /// Bytes of it that were put together.
        copied: usize,
        answer: Option<Repr>,
    },
    /// A word of the flow control for your guest.
    DatagramWord(Repr),
}

/// A packet of type DGRAM on its way from one guest to another.
#[derive(Debug)]
pub(crate) struct Datagram {
    pub(crate) from: DeviceAddr,
    /// Its sender understands words of the flow control.
    pub(crate) flow: bool,
    /// As the guest has sent it; of one that was put together, with the length of all of it.
    pub(crate) header: Repr,
    pub(crate) payload: Payload,
    /// The chain that it came in, the last of those.
    pub(crate) chain: zerosock_ring::Chain,
    pub(crate) epoch: u32,
}

/// Where a datagram lies.
#[derive(Debug)]
pub(crate) enum Payload {
    /// In its chain, behind the header.
    Lent(Arc<Memory>),
    /// It was put together.
    Copied(Box<[u8]>),
}

impl Payload {
    /// Bytes that were put together.
    pub(crate) fn copied(&self) -> usize {
        match self {
            Payload::Lent(_) => 0,
            Payload::Copied(bytes) => bytes.len(),
        }
    }
}

impl Message {
    /// The connection that it is for, if it is for one that exists.
    pub(crate) fn to(&self) -> Option<FlowId> {
        match self {
            Message::Asking { to, .. }
            | Message::Refused { to }
            | Message::Accepted { to, .. }
            | Message::Lent { to, .. }
            | Message::Copied { to, .. }
            | Message::Ended { to, .. }
            | Message::ReadEmpty { to, .. }
            | Message::Returned { to, .. }
            | Message::Recall { to }
            | Message::Shutdown { to, .. }
            | Message::Reset { to }
            | Message::HandOff { to, .. }
            | Message::Arrived { to, .. }
            | Message::Orphaned { to }
            | Message::Relocated { to, .. }
            | Message::Flushed { to } => Some(*to),
            Message::Connect { .. }
            | Message::Call { .. }
            | Message::Lost
            | Message::TakeOver(_)
            | Message::SentOn(_)
            | Message::Datagram(_)
            | Message::DatagramDone { .. }
            | Message::DatagramWord(_) => None,
        }
    }

    /// The connection that it is for has this name now.
    pub(crate) fn set_to(&mut self, now: FlowId) {
        match self {
            Message::Asking { to, .. }
            | Message::Refused { to }
            | Message::Accepted { to, .. }
            | Message::Lent { to, .. }
            | Message::Copied { to, .. }
            | Message::Ended { to, .. }
            | Message::ReadEmpty { to, .. }
            | Message::Returned { to, .. }
            | Message::Recall { to }
            | Message::Shutdown { to, .. }
            | Message::Reset { to }
            | Message::HandOff { to, .. }
            | Message::Arrived { to, .. }
            | Message::Orphaned { to }
            | Message::Relocated { to, .. }
            | Message::Flushed { to } => *to = now,
            Message::Connect { .. }
            | Message::Call { .. }
            | Message::Lost
            | Message::TakeOver(_)
            | Message::SentOn(_)
            | Message::Datagram(_)
            | Message::DatagramDone { .. }
            | Message::DatagramWord(_) => {}
        }
    }

    /// What is to be said, and to whom, when the device that this was for is gone: whoever asked
    /// it gets an answer, whoever lent it something gets it back. All others know already, or will
    /// when they have read what the device said before it went.
    pub(crate) fn undeliverable(self) -> Option<(DeviceAddr, Message)> {
        match self {
            Message::Connect { from, .. } => {
                let to = from.flow;
                Some((from.device, Message::Refused { to }))
            }
            Message::Asking { from, .. } | Message::Accepted { from, .. } => {
                let to = from.flow;
                Some((from.device, Message::Reset { to }))
            }
            Message::Lent {
                from, held, epoch, ..
            } => {
                let message = Message::Returned {
                    to: from.flow,
                    bytes: 0,
                    chain: Some((held.chain, epoch)),
                };
                Some((from.device, message))
            }
            // Who had it sends on the ready_flags that nothing more will come.
            Message::Relocated { old, .. } => {
                let to = old.flow;
                Some((old.device, Message::Flushed { to }))
            }
            Message::SentOn(message) => message.undeliverable(),
            Message::Datagram(datagram) => Some(returned(datagram)),
            // Whoever has one sees to it: it is more than one answer.
            Message::TakeOver(_) => None,
            // The program sees its socket close.
            Message::Call { .. }
            | Message::Lost
            | Message::HandOff { .. }
            | Message::Arrived { .. }
            | Message::Orphaned { .. }
            | Message::Flushed { .. }
            | Message::DatagramDone { .. }
            | Message::DatagramWord(_)
            | Message::Refused { .. }
            | Message::Copied { .. }
            | Message::Ended { .. }
            | Message::ReadEmpty { .. }
            | Message::Returned { .. }
            | Message::Recall { .. }
            | Message::Shutdown { .. }
            | Message::Reset { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerosock_proto::Cid;

    /// Every packet between siblings is one, and is moved from list to list: two cache lines.
    #[test]
    fn a_message_is_small() {
        assert!(size_of::<Message>() <= 128, "{}", size_of::<Message>());
    }

    #[test]
    fn who_asks_or_lends_is_answered_for_a_device_that_is_gone() {
        let mut shard = zerosock_proto::vsock::Shard::new(
            zerosock_proto::vsock::ShardConfig::driver(Cid::new(3)),
            Arc::new(zerosock_proto::vsock::PortTable::new()),
        );
        let host = Address::new(Cid::HOST, Port::new(1));
        let any = Address::new(Cid::ANY, Port::ANY);
        let stream = zerosock_proto::wire::vsock::SocketType::Stream;
        let now = zerosock_proto::Instant::ZERO;
        let flow = shard.connect(now, any, host, stream).unwrap();
        let device = DeviceAddr { worker: 1, vm: 2 };
        let from = Peer { device, flow };
        let connect = Message::Connect {
            from,
            local: any,
            peer: host,
            socket_type: SocketType::SeqPacket,
        };
        let Some((to, Message::Refused { to: told })) = connect.undeliverable() else {
            panic!("an unanswered connect");
        };
        assert_eq!((to, told), (device, flow));
        for message in [
            Message::Asking { to: flow, from },
            Message::Accepted { to: flow, from },
        ] {
            let Some((to, Message::Reset { to: told })) = message.undeliverable() else {
                panic!("a half connection");
            };
            assert_eq!((to, told), (device, flow));
        }
        assert!(Message::Reset { to: flow }.undeliverable().is_none());
    }
}
