//! The buffers of the outgoing queue that are on loan to the program.
//!
//! # Invariants
//! - A loan owns one buffer, or none if it is private, until it is sent or dropped.
//! - A loan of a connection owns credit until it is sent, wholly or in part, or dropped; the first of a message
//!   owns the credit of all of them.

use zerosock_proto::Address;
use zerosock_proto::vsock::datagram::DatagramId;
use zerosock_proto::vsock::{FlowId, MessageReservation, Reservation};

use super::places::Copied;
use super::sockets::StreamId;

/// A loan of a buffer `B`.
#[derive(Debug)]
pub(crate) struct Loan<B> {
    pub(crate) of: LoanOf,
    /// The half that lent it: see [`SendHalf::number`](super::send_half::SendHalf::number).
    pub(crate) half: u32,
    /// Bytes that the holder may send.
    pub(crate) len: u32,
    /// The connection; `None` for a datagram.
    pub(crate) flow: Option<FlowId>,
    /// The buffer, while the loan is in place. `None`: it is a private buffer of the holder, which is copied
    /// when it is sent.
    pub(crate) lent: Option<Lent<B>>,
    pub(crate) credit: Credit,
    /// The contents of the buffer when it was taken back.
    pub(crate) copy: Option<Copied>,
}

/// A buffer on loan.
#[derive(Debug)]
pub(crate) struct Lent<B> {
    pub(crate) buffer: B,
    /// The queue just after the buffer was taken. For loans of one message, `taken` is the value after the
    /// last of them.
    pub(crate) mark: Mark,
}

/// A state of a queue, which tells whether a buffer is of its current run, and the one that was taken last.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Mark {
    /// The number of the queue's start.
    pub(crate) epoch: u32,
    /// The index of the next buffer, and the buffers taken so far. Both: the index repeats after 65536
    /// buffers, and `taken` counts those that were put back.
    pub(crate) base: u16,
    pub(crate) taken: u32,
}

/// The credit reserved for a loan.
#[derive(Debug)]
pub(crate) enum Credit {
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

/// The loans that are out, by index in the lease table. No longer than the most leases and loans that were
/// out at once: the lease table gives out a new index only if no other is free.
#[derive(Debug)]
pub(crate) struct Loans<B>(Vec<Option<Loan<B>>>);

impl<B> Default for Loans<B> {
    fn default() -> Loans<B> {
        Loans(Vec::new())
    }
}

impl<B> Loans<B> {
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&Loan<B>> {
        self.0.get(index as usize)?.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut Loan<B>> {
        self.0.get_mut(index as usize)?.as_mut()
    }

    #[inline(always)] // saves a copy of the loan
    pub(crate) fn add(&mut self, index: u32, loan: Loan<B>) {
        let index = index as usize;
        if self.0.len() <= index {
            self.0.resize_with(index + 1, || None);
        }
        if let Some(place) = self.0.get_mut(index) {
            *place = Some(loan);
        }
    }

    #[inline(always)] // as `add`
    pub(crate) fn take(&mut self, index: u32) -> Option<Loan<B>> {
        self.0.get_mut(index as usize)?.take()
    }

    /// Removes a loan without its buffer and credit, which were returned or have gone with its half. Returns
    /// whether there was one.
    #[inline]
    pub(crate) fn forget(&mut self, index: u32) -> bool {
        let loan = self.0.get_mut(index as usize);
        match loan {
            Some(loan @ Some(_)) => {
                *loan = None;
                true
            }
            _ => false,
        }
    }

    /// The loans with their indices.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut Loan<B>)> {
        let loans = self.0.iter_mut().enumerate();
        loans.filter_map(|(index, loan)| Some((index as u32, loan.as_mut()?)))
    }
}
