//! Messages between the devices of one daemon.
//!
//! A connection between two guests of one daemon is two connections, one in each device's shard, so
//! that credit, limits and state are enforced against each guest separately. The receiver's worker
//! copies bytes from the sender's chain into the receiver's posted buffer: one copy. Until then the
//! chain is lent to the receiver ([`SiblingMessage::Lent`]), which returns it with
//! [`SiblingMessage::Returned`]; the lender can recall it at any time ([`SiblingMessage::Recall`]).

use std::net::SocketAddr;
use std::sync::Arc;
use zerosock_proto::vsock::FlowId;
use zerosock_proto::wire::vsock::{Repr, SocketType};
use zerosock_proto::{Address, Port};
use zerosock_relay::associations::AssociationId;
use zerosock_ring::Memory;
use zerosock_virtio::outbox::DeviceAddr;

use super::host::{Caller, Client};
use super::peer::Peer;
use crate::device::guest_orders::{GuestAnswer, GuestOrder};
use crate::device::host_sockets::{HostSocket, Refusal};
use crate::device::outbound::HeldChain;
use crate::table::sockets::MessageEnd;

/// A message from one side of a sibling connection to the other. Messages between the same two
/// devices keep their order. A message for a flow that has ended is dropped after what it carries
/// was returned.
#[derive(Debug)]
pub(crate) enum SiblingMessage {
    /// A guest connects to its sibling: ask your guest and answer.
    Connect {
        from: Peer,
        local: Address,
        peer: Address,
        socket_type: SocketType,
    },
    /// The sending device continues a connection of another process. `local`: the address of its guest, `peer`:
    /// that of yours.
    Rejoin {
        from: Peer,
        local: Address,
        peer: Address,
    },
    /// The immediate answer to `Connect`: `from` is asking its guest.
    Asking { to: FlowId, from: Peer },
    /// The other immediate answer to `Connect`: the guest cannot be asked.
    Refused { to: FlowId },
    /// The guest has accepted.
    Accepted { to: FlowId },
    /// Bytes in the sending guest's memory. Return the chain when they have been read.
    Lent {
        to: FlowId,
        from: Peer,
        memory: Arc<Memory>,
        held: HeldChain,
        epoch: u32,
    },
    /// Bytes in a copy.
    Copied { to: FlowId, bytes: Vec<u8> },
    /// The last `len` bytes sent form a message.
    Ended {
        to: FlowId,
        len: u32,
        ends: MessageEnd,
    },
    /// An empty message was read.
    ReadEmpty { to: FlowId },
    /// `bytes` of the peer's data were read; `chain` is a chain that is no longer needed, with its
    /// epoch.
    Returned {
        to: FlowId,
        bytes: u32,
        chain: Option<(zerosock_ring::Chain, u32)>,
    },
    /// Copy out and return the chains lent for this flow now.
    Recall { to: FlowId },
    /// The sending guest has shut down receiving, sending, or both.
    Shutdown {
        to: FlowId,
        receive: bool,
        send: bool,
    },
    /// The connection has ended, or the guest has refused it.
    Reset { to: FlowId },

    /// From the connector: the connection for this flow, or why there is none.
    Dialed {
        to: FlowId,
        outcome: Result<Box<Dialed>, Refusal>,
    },
    /// From the connector: the socket for the datagrams of an association, or why there is none.
    DialedDatagrams {
        to: AssociationId,
        outcome: Result<Box<Dialed>, Refusal>,
    },
    /// From a listener: connect this client to your guest.
    Client(Box<Client>),

    /// Between queue pairs of one device: this host program's connection, from port `local`,
    /// belongs to your pair.
    Call { caller: Box<Caller>, local: Port },
    /// To the first queue pair: the driver has connections that the device does not know.
    Lost,

    /// From the control thread, to the first queue pair of a VM: what to do with a guest endpoint.
    Guest(Box<GuestOrder>),
    /// From the device of a guest endpoint, to that of its VM.
    GuestAnswer(Box<GuestAnswer>),
    /// To the device of a guest endpoint: its driver has made buffers available.
    Kick,

    /// A datagram or flow-control packet for the peer's guest. Return the chain at once.
    Datagram(SiblingDatagram),
    /// The answer to `Datagram`: the chain, and a flow-control packet for the sender's guest.
    DatagramDone {
        chain: zerosock_ring::Chain,
        epoch: u32,
        /// Bytes of the datagram if it was assembled, else 0.
        copied: usize,
        answer: Option<Repr>,
    },
    /// A flow-control packet for the peer's guest.
    DatagramControl(Repr),
}

/// A connection that the connector has made.
#[derive(Debug)]
pub(crate) struct Dialed {
    pub(in crate::device) socket: HostSocket,
    /// The address that a name was resolved to.
    pub(in crate::device) address: Option<SocketAddr>,
    /// See [`zerosock_relay::Connected::has_alternative`].
    pub(in crate::device) has_alternative: bool,
}

/// A packet of type DGRAM on its way from one guest to another.
#[derive(Debug)]
pub(crate) struct SiblingDatagram {
    pub(crate) from: DeviceAddr,
    /// The sender's driver has negotiated datagram flow control.
    pub(crate) flow: bool,
    /// The header as the guest sent it; for an assembled datagram with its total length.
    pub(crate) header: Repr,
    pub(crate) payload: SiblingPayload,
    /// The chain of the datagram, or of its last fragment.
    pub(crate) chain: zerosock_ring::Chain,
    pub(crate) epoch: u32,
}

/// Where the payload of a datagram is.
#[derive(Debug)]
pub(crate) enum SiblingPayload {
    /// In its chain, behind the header.
    Lent(Arc<Memory>),
    /// Assembled from fragments.
    Copied(Box<[u8]>),
}

impl SiblingPayload {
    /// Bytes of an assembled datagram, else 0.
    pub(crate) fn copied(&self) -> usize {
        match self {
            SiblingPayload::Lent(_) => 0,
            SiblingPayload::Copied(bytes) => bytes.len(),
        }
    }
}

impl SiblingMessage {
    /// The answer, with its destination, when the device that this message was for has gone: a
    /// request is refused, a lent chain is returned. In all other cases the sender knows already,
    /// or learns it from the messages that the device sent before it went.
    pub(crate) fn undeliverable(self) -> Option<(DeviceAddr, SiblingMessage)> {
        match self {
            SiblingMessage::Connect { from, .. } => {
                let to = from.flow;
                Some((from.device, SiblingMessage::Refused { to }))
            }
            SiblingMessage::Asking { from, .. } | SiblingMessage::Rejoin { from, .. } => {
                let to = from.flow;
                Some((from.device, SiblingMessage::Reset { to }))
            }
            SiblingMessage::Lent {
                from, held, epoch, ..
            } => {
                let message = SiblingMessage::Returned {
                    to: from.flow,
                    bytes: 0,
                    chain: Some((held.chain, epoch)),
                };
                Some((from.device, message))
            }
            SiblingMessage::Datagram(datagram) => Some(return_lent(datagram)),
            // The program's, client's or target's socket is closed.
            SiblingMessage::Call { .. }
            | SiblingMessage::Client(_)
            | SiblingMessage::Dialed { .. }
            | SiblingMessage::DialedDatagrams { .. }
            | SiblingMessage::Lost
            // The control thread has removed the device itself.
            | SiblingMessage::Guest(_)
            | SiblingMessage::GuestAnswer(_)
            | SiblingMessage::Kick
            | SiblingMessage::DatagramDone { .. }
            | SiblingMessage::DatagramControl(_)
            | SiblingMessage::Refused { .. }
            | SiblingMessage::Accepted { .. }
            | SiblingMessage::Copied { .. }
            | SiblingMessage::Ended { .. }
            | SiblingMessage::ReadEmpty { .. }
            | SiblingMessage::Returned { .. }
            | SiblingMessage::Recall { .. }
            | SiblingMessage::Shutdown { .. }
            | SiblingMessage::Reset { .. } => None,
        }
    }
}

/// The answer that returns a lent packet: its receiver has gone.
pub(crate) fn return_lent(datagram: SiblingDatagram) -> (DeviceAddr, SiblingMessage) {
    let SiblingDatagram {
        from,
        chain,
        epoch,
        payload,
        ..
    } = datagram;
    let (copied, answer) = (payload.copied(), None);
    let done = SiblingMessage::DatagramDone {
        chain,
        epoch,
        copied,
        answer,
    };
    (from, done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerosock_proto::Cid;

    /// Messages move through several queues; 128 bytes are two cache lines.
    #[test]
    fn message_fits_in_two_cache_lines() {
        assert!(
            size_of::<SiblingMessage>() <= 128,
            "{}",
            size_of::<SiblingMessage>()
        );
    }

    #[test]
    fn requests_to_a_removed_device_are_answered() {
        let mut shard = zerosock_proto::vsock::Shard::new(
            zerosock_proto::vsock::ShardConfig::driver(Cid::new(3)),
            Arc::new(zerosock_proto::vsock::PortTable::new()),
        );
        let host = Address::new(Cid::HOST, Port::new(1));
        let any = Address::new(Cid::ANY, Port::ANY);
        let stream = zerosock_proto::wire::vsock::SocketType::Stream;
        let now = zerosock_proto::Instant::ZERO;
        let flow = shard.connect(now, any, host, stream).unwrap();
        let device = DeviceAddr {
            worker: 1,
            number: 2,
        };
        let from = Peer { device, flow };
        let connect = SiblingMessage::Connect {
            from,
            local: any,
            peer: host,
            socket_type: SocketType::SeqPacket,
        };
        let Some((to, SiblingMessage::Refused { to: told })) = connect.undeliverable() else {
            panic!("a connect without an answer");
        };
        assert_eq!((to, told), (device, flow));
        let asking = SiblingMessage::Asking { to: flow, from };
        let Some((to, SiblingMessage::Reset { to: told })) = asking.undeliverable() else {
            panic!("a half-open connection without an answer");
        };
        assert_eq!((to, told), (device, flow));
        assert!(SiblingMessage::Reset { to: flow }.undeliverable().is_none());
    }
}
