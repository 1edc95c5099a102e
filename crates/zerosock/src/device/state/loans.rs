//! Buffers of the guest on loan to the embedding program, and replaced memory that is still in use.

use std::sync::Weak;

use zerosock_proto::Address;
use zerosock_proto::vsock::datagram::DatagramId;
use zerosock_proto::vsock::{FlowId, MessageReservation, Reservation};
use zerosock_ring::{Chain, Memory};

use crate::table::sockets::{Copied, StreamId};

/// A buffer on loan to the embedding program.
#[derive(Debug)]
pub(crate) struct Loan {
    pub(crate) of: LoanOf,
    pub(crate) vm: u32,
    pub(in crate::device) len: u32,
    /// The connection; `None` for a datagram.
    pub(in crate::device) flow: Option<FlowId>,
    /// The buffer, while the loan is in place; `None` after it was taken back.
    pub(in crate::device) chain: Option<Lent>,
    pub(in crate::device) credit: Credit,
    /// The contents of the buffer when it was taken back.
    pub(in crate::device) copy: Option<Copied>,
}

/// The credit reserved for a loan.
#[derive(Debug)]
pub(in crate::device) enum Credit {
    None,
    Packet(Reservation),
    /// For the whole message; in the first of its loans.
    Message(MessageReservation),
}

/// What a loan is for.
#[derive(Copy, Clone, Debug)]
pub(crate) enum LoanOf {
    Stream(StreamId),
    /// One buffer of a message.
    Message,
    /// A datagram from this socket to this address.
    Datagram(DatagramId, Address),
}

#[derive(Debug)]
pub(in crate::device) struct Lent {
    pub(in crate::device) chain: Chain,
    /// The epoch of its queue.
    pub(in crate::device) epoch: u32,
    /// The queue's base and its `taken` counter just after this chain was popped. For loans of one
    /// message, `taken` is the value after the last of them.
    pub(in crate::device) base: u16,
    pub(in crate::device) taken: u32,
}

/// Replaced memory tables and their sizes in bytes.
#[derive(Debug, Default)]
pub(in crate::device) struct OldMemory(pub(in crate::device) Vec<(Weak<Memory>, u64)>);

impl OldMemory {
    /// Bytes of the tables that are still mapped.
    pub(in crate::device) fn alive(&mut self) -> u64 {
        self.0.retain(|(memory, _)| memory.strong_count() > 0);
        self.0.iter().map(|(_, size)| *size).sum()
    }
}
