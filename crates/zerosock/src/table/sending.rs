//! The calls of a backend that send on connections, implemented once for both halves of the virtqueues.
//!
//! # Use
//! A backend implements [`SendAccess`]; [`SendingCalls`] follows. A call finds the half of its connection and
//! leaves the rest to [`SendCalls`], [`LoanCalls`] and [`MessageLoanCalls`].

use std::collections::VecDeque;
use std::io::IoSlice;

use zerosock_proto::vsock::FlowId;
use zerosock_ring::GuestSlice;

use super::calls::TableAccess;
use super::loan_calls::LoanCalls;
use super::loans::LoanOf;
use super::message_loan_calls::MessageLoanCalls;
use super::outgoing::{Outgoing, is_kept, len_of, put_all, whole};
use super::send_calls::{SendCalls, WholePacket};
use super::send_half::SendHalf;
use super::sockets::StreamId;
use super::transfers::{LoanParts, LoanedPart, Publish, SendFault};

/// What a backend provides for the calls of this module. Halves have numbers.
pub(crate) trait SendAccess: TableAccess {
    /// A queue pair as a sender.
    type Half<'a>: SendHalf;

    /// The half with this pool of buffers; `None`: it has gone.
    fn half_of_pool(&self, pool: u32) -> Option<u32>;

    /// Calls `act` with a half; the next flush shows the changes to its peer. `None`: it has gone.
    fn with_half<T>(&mut self, half: u32, act: impl FnOnce(&mut Self::Half<'_>) -> T) -> Option<T>;

    /// As [`with_half`](Self::with_half), for an `act` that changes nothing that the peer could see.
    fn look_at_half<T>(
        &mut self,
        half: u32,
        act: impl FnOnce(&mut Self::Half<'_>) -> T,
    ) -> Option<T> {
        self.with_half(half, act)
    }

    /// Has a half send one packet as [`SendCalls::send_whole`], and publishes it as `publish` says. Buffers that
    /// the program has returned before are published with it: the peer may be waiting for them.
    fn send_packet(
        &mut self,
        half: u32,
        publish: Publish,
        packet: WholePacket,
        fill: impl FnOnce(GuestSlice<'_>),
    ) -> bool;

    /// The messages of a half with remaining bytes.
    fn outgoing(&self, half: u32) -> Option<&VecDeque<Outgoing>>;

    /// What a loan is for, and its half.
    fn loan_at(&self, index: u32) -> Option<(LoanOf, u32)>;

    /// Ends a loan unsent.
    fn drop_loan(&mut self, index: u32);

    /// Publishes what was sent.
    fn flush_sent(&mut self);

    /// The half and the flow of a connection that may send.
    #[inline(always)] // every packet
    fn sender(&self, id: StreamId) -> Result<(u32, FlowId), SendFault> {
        let (pool, flow) = self.sockets().ok_or(SendFault::Unknown)?.sender(id)?;
        Ok((self.half_of_pool(pool).ok_or(SendFault::Reset)?, flow))
    }
}

/// The calls that send.
pub trait SendingCalls {
    /// Sends a copy of as many bytes as credit and buffers allow: at least one, in as few packets
    /// as possible. Visible as `publish` says.
    fn write(&mut self, id: StreamId, bytes: &[u8], publish: Publish) -> Result<usize, SendFault>;

    /// Borrows a buffer that the peer will read, for one packet of at most `max` bytes. Publishes packets
    /// that had to be sent before.
    fn loan(&mut self, id: StreamId, max: usize) -> Result<LoanParts, SendFault>;

    /// Sends the first `len` bytes of a loan; `private` holds them if the loan was not in place.
    /// Ends the loan, except for a private one that found no buffer (`WouldBlock`) or sent fewer
    /// than `len` bytes: the rest can be sent later or dropped.
    fn send_loan(
        &mut self,
        index: u32,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<usize, SendFault>;

    /// Sends the bytes of `slices` as one message, completely or not at all. Returns false if a
    /// part was queued for lack of buffers; later turns send it. Published when the call returns.
    fn send_message(
        &mut self,
        id: StreamId,
        slices: &[IoSlice<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault>;

    /// Borrows buffers that the peer will read, with credit for one message of at most `len` bytes.
    /// The loans are in order, each with its own lease table entry. Bytes without a buffer in place
    /// form one private buffer at the end, which has an entry only if it is the only loan.
    fn loan_message(&mut self, id: StreamId, len: usize) -> Result<Vec<LoanParts>, SendFault>;

    /// Sends the bytes written into a message loan as one message. `parts` are the buffers with
    /// bytes, and the first in any case. Ends all loans, except for `WouldBlock`: then nothing was
    /// sent and the loans remain. Returns false as [`send_message`](Self::send_message). Visible
    /// after the next flush.
    fn send_message_loan(
        &mut self,
        id: StreamId,
        parts: &[LoanedPart<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault>;

    /// Whether a part of a message is queued for lack of buffers.
    fn is_sending(&self, id: StreamId) -> bool;

    /// Whether a message can be sent now, as
    /// [`is_writable`](super::backend::Backend::is_writable).
    fn may_send_message(&mut self, id: StreamId) -> bool;
}

impl<A: SendAccess> SendingCalls for A {
    #[inline]
    fn write(&mut self, id: StreamId, bytes: &[u8], publish: Publish) -> Result<usize, SendFault> {
        let (half, flow) = self.sender(id)?;
        let packet = WholePacket {
            flow,
            len: bytes.len(),
            flags: 0,
        };
        let fill = |body: GuestSlice<'_>| {
            body.write(0, bytes);
        };
        if self.send_packet(half, publish, packet, fill) {
            return Ok(bytes.len());
        }
        write_part(self, half, (id, flow), bytes, publish)
    }

    #[inline]
    fn loan(&mut self, id: StreamId, max: usize) -> Result<LoanParts, SendFault> {
        let (half, flow) = self.sender(id)?;
        let mut has_sent = false;
        let loan = self.with_half(half, |half| {
            has_sent = half.send_before_loan(flow);
            half.lend(id, flow, max)
        });
        if has_sent {
            // At once: the program may keep the loan.
            self.flush_sent();
        }
        loan.ok_or(SendFault::Reset)?
    }

    #[inline]
    fn send_loan(
        &mut self,
        index: u32,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<usize, SendFault> {
        let Some((LoanOf::Stream(id), half)) = self.loan_at(index) else {
            return Err(SendFault::Unknown);
        };
        let fault = match self.sender(id) {
            Ok((_, flow)) => {
                match self.with_half(half, |half| half.send_loan(index, flow, len, private)) {
                    Some(sent) => return sent,
                    None => SendFault::Reset,
                }
            }
            Err(fault) => fault,
        };
        self.drop_loan(index);
        Err(fault)
    }

    fn send_message(
        &mut self,
        id: StreamId,
        slices: &[IoSlice<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault> {
        let (half, flow) = self.sender(id)?;
        let packet = WholePacket {
            flow,
            len: len_of(slices),
            flags: whole(ends_record),
        };
        let fill = |body: GuestSlice<'_>| {
            put_all(slices, |at, bytes| {
                body.write(at, bytes);
            });
        };
        if self.send_packet(half, Publish::Now, packet, fill) {
            return Ok(true);
        }
        send_parts(self, half, (id, flow), slices, ends_record)
    }

    fn loan_message(&mut self, id: StreamId, len: usize) -> Result<Vec<LoanParts>, SendFault> {
        let (half, flow) = self.sender(id)?;
        self.with_half(half, |half| half.lend_message(id, flow, len))
            .ok_or(SendFault::Reset)?
    }

    fn send_message_loan(
        &mut self,
        id: StreamId,
        parts: &[LoanedPart<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault> {
        let head = parts.first().and_then(|part| self.loan_at(part.index));
        let Some((LoanOf::Message, half)) = head else {
            return Err(SendFault::Unknown);
        };
        let sent = self.sender(id).and_then(|_| {
            let sent = self.with_half(half, |half| half.send_message_loan(id, parts, ends_record));
            sent.ok_or(SendFault::Reset)
        });
        sent.unwrap_or_else(|fault| {
            for part in parts {
                self.drop_loan(part.index);
            }
            Err(fault)
        })
    }

    fn is_sending(&self, id: StreamId) -> bool {
        let conn = self.sockets().and_then(|sockets| sockets.get(id));
        let kept = conn.and_then(|conn| {
            let outgoing = self.outgoing(self.half_of_pool(conn.pool)?)?;
            Some(is_kept(outgoing, conn.flow?))
        });
        kept.unwrap_or(false)
    }

    fn may_send_message(&mut self, id: StreamId) -> bool {
        match self.sender(id) {
            Ok((half, flow)) => self
                .look_at_half(half, |half| half.may_send_message(id, flow))
                .unwrap_or(true),
            Err(fault) => fault != SendFault::NotConnected,
        }
    }
}

/// Sends what could not be sent in one packet at once.
#[cold]
#[inline(never)] // out of the way of the common case, which would keep fewer values in registers
fn write_part<A: SendAccess>(
    of: &mut A,
    half: u32,
    (id, flow): (StreamId, FlowId),
    bytes: &[u8],
    publish: Publish,
) -> Result<usize, SendFault> {
    let sent = of.with_half(half, |half| half.write(id, flow, bytes));
    let sent = sent.ok_or(SendFault::Reset)??;
    if publish == Publish::Now {
        of.flush_sent();
    }
    Ok(sent)
}

/// As [`write_part`], for a message.
#[cold]
#[inline(never)]
fn send_parts<A: SendAccess>(
    of: &mut A,
    half: u32,
    (id, flow): (StreamId, FlowId),
    slices: &[IoSlice<'_>],
    ends_record: bool,
) -> Result<bool, SendFault> {
    let all = of.with_half(half, |half| {
        half.send_message(id, flow, slices, ends_record)
    });
    let all = all.ok_or(SendFault::Reset)??;
    of.flush_sent();
    Ok(all)
}
