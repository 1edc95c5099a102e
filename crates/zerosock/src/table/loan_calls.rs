//! Loans of buffers for one packet, written once for both halves of the virtqueues.
//!
//! # Invariants
//! - A loan that is not in place is a private buffer, copied when it is sent.
//! - Every buffer on loan is sent or returned once; so is its entry in the lease table.

use std::mem::replace;

use zerosock_proto::Address;
use zerosock_proto::vsock::FlowId;
use zerosock_proto::vsock::datagram::DatagramId;

use super::datagrams::DatagramFault;
use super::loans::{Credit, Lent, Loan, LoanOf};
use super::places::BufferPlace;
use super::send_calls::SendCalls;
use super::sockets::StreamId;
use super::transfers::{LoanParts, SendFault};

/// The calls on loans. See the module documentation.
pub(crate) trait LoanCalls: SendCalls {
    /// Sends what goes before a loan: control packets and coalesced bytes. Returns whether there were any.
    #[inline(always)] // every packet
    fn send_before_loan(&mut self, flow: FlowId) -> bool {
        let parts = self.parts();
        let control = parts.shard.has_transmit();
        let any = control || parts.coalesced.has(flow);
        if control {
            self.send_control();
        }
        if any {
            self.flush_coalesced(flow);
        }
        any
    }

    /// Lends a buffer for one packet of at most `most` bytes.
    #[inline]
    fn lend(&mut self, id: StreamId, flow: FlowId, most: usize) -> Result<LoanParts, SendFault> {
        let in_place = self.may_lend(Some(flow));
        let buffer = self.next_buffer(id, most)?;
        let most = most.min(self.room(&buffer)) as u32;
        let reservation = match self.shard().reserve(flow, most) {
            Ok(reservation) => reservation,
            Err(error) => {
                self.put_back(buffer);
                return Err(error.into());
            }
        };
        let program = self.parts().program;
        let Some(index) = program.and_then(|program| program.sockets.begin_loan()) else {
            self.put_back(buffer);
            self.shard().cancel(reservation);
            return Err(SendFault::TooManyLoans);
        };
        let len = reservation.len();
        let loan = (LoanOf::Stream(id), Some(flow), Credit::Packet(reservation));
        let place = self.add_loan(index, len, loan, buffer, in_place);
        let len = len as usize;
        Ok(LoanParts { index, len, place })
    }

    /// Lends a buffer for a datagram of at most `len` bytes: a private buffer if it needs several or the
    /// bounds on loans are reached. `WouldBlock`: the caller waits for a buffer.
    fn lend_datagram(
        &mut self,
        id: DatagramId,
        to: Address,
        len: usize,
    ) -> Result<LoanParts, DatagramFault> {
        let may_lend = self.may_lend(None);
        let stopping = self.is_stopping();
        let buffer = (!stopping).then(|| self.take_buffer(len)).flatten();
        let buffer = buffer.ok_or(DatagramFault::WouldBlock)?;
        let in_place = may_lend && self.room(&buffer) >= len;
        let program = self.parts().program;
        let Some(index) = program.and_then(|program| program.sockets.begin_loan()) else {
            self.put_back(buffer);
            return Err(DatagramFault::TooManyLoans);
        };
        let loan = (LoanOf::Datagram(id, to), None, Credit::None);
        let place = self.add_loan(index, len as u32, loan, buffer, in_place);
        Ok(LoanParts { index, len, place })
    }

    /// Adds a loan, which has the buffer if `in_place` and it has few enough pieces. Else puts the buffer
    /// back: the loan is a private buffer.
    #[inline(always)] // saves copies of the loan
    fn add_loan(
        &mut self,
        index: u32,
        len: u32,
        (of, flow, credit): (LoanOf, Option<FlowId>, Credit),
        buffer: Self::Buffer,
        in_place: bool,
    ) -> Option<BufferPlace> {
        let place = match self.payload(&buffer).filter(|_| in_place) {
            Some((memory, pieces, offset)) => BufferPlace::new(memory, pieces, offset),
            None => None,
        };
        let lent = match self.mark().filter(|_| place.is_some()) {
            Some(mark) => {
                self.count_lent(flow, |count| count.saturating_add(1));
                Some(Lent { buffer, mark })
            }
            None => {
                self.put_back(buffer);
                None
            }
        };
        let loan = Loan {
            of,
            half: self.number(),
            len,
            flow,
            lent,
            credit,
            copy: None,
        };
        if let Some(program) = self.parts().program {
            program.loans.add(index, loan);
        }
        place
    }

    /// Counts a buffer that is lent or returned.
    #[inline(always)] // every packet
    fn count_lent(&mut self, flow: Option<FlowId>, step: impl Fn(u16) -> u16) {
        let lent = self.lent_mut(flow);
        *lent = step(*lent);
        if let Some(loans) = flow.and_then(|flow| self.parts().flows.loans_mut(flow)) {
            *loans = step(*loans);
        }
    }

    /// Sends the first `len` bytes of a loan: see
    /// [`SendingCalls::send_loan`](super::sending::SendingCalls::send_loan). A loan that is not in place is sent by
    /// copying from `private`.
    fn send_loan(
        &mut self,
        index: u32,
        flow: FlowId,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<usize, SendFault> {
        let program = self.parts().program.ok_or(SendFault::Unknown)?;
        let loan = program.loans.get_mut(index).ok_or(SendFault::Unknown)?;
        let LoanOf::Stream(id) = loan.of else {
            return Err(SendFault::Unknown);
        };
        let len = len.min(loan.len as usize);
        if len == 0 {
            self.drop_loan(index);
            return Ok(0);
        }
        let credit = replace(&mut loan.credit, Credit::None);
        let Some(lent) = loan.lent.take() else {
            if let Credit::Packet(reservation) = credit {
                self.shard().cancel(reservation);
            }
            let bytes = private.unwrap_or_default();
            let bytes = bytes.get(..len).unwrap_or(bytes);
            return self.send_private(index, id, flow, bytes);
        };
        program.loans.forget(index);
        program.sockets.end_loan(index);
        self.count_lent(Some(flow), |count| count.saturating_sub(1));
        let Credit::Packet(reservation) = credit else {
            return Err(SendFault::Reset);
        };
        if !self.is_current(&lent) {
            self.shard().cancel(reservation);
            return Err(SendFault::Reset);
        }
        match self.shard().commit(reservation, len as u32, 0) {
            Ok(header) => self.transmit(lent.buffer, &header),
            Err(error) => {
                self.discard(lent.buffer);
                return Err(error.into());
            }
        }
        self.count_in_place(len);
        Ok(len)
    }

    /// Sends `bytes` of a private loan by copying. The loan ends when all of them have been sent.
    fn send_private(
        &mut self,
        index: u32,
        id: StreamId,
        flow: FlowId,
        bytes: &[u8],
    ) -> Result<usize, SendFault> {
        let result = self.write(id, flow, bytes);
        let program = self.parts().program.ok_or(SendFault::Unknown)?;
        match result {
            Ok(sent) if sent < bytes.len() => {
                if let Some(loan) = program.loans.get_mut(index) {
                    loan.len = loan.len.saturating_sub(sent as u32);
                }
            }
            Err(SendFault::WouldBlock) => {}
            _ => {
                program.loans.forget(index);
                program.sockets.end_loan(index);
            }
        }
        result
    }

    /// Counts bytes that the holder of a loan wrote in place.
    #[inline(always)] // every packet
    fn count_in_place(&mut self, bytes: usize) {
        if let Some(program) = self.parts().program {
            program.tally.sent_in_place += bytes as u64;
        }
    }

    /// Ends a loan; returns its buffer.
    fn take_lent(&mut self, index: u32) -> Option<Lent<Self::Buffer>> {
        let program = self.parts().program?;
        let loan = program.loans.take(index)?;
        program.sockets.end_loan(index);
        let lent = loan.lent?;
        self.count_lent(loan.flow, |count| count.saturating_sub(1));
        Some(lent)
    }

    /// Ends a loan that is dropped unsent.
    fn drop_loan(&mut self, index: u32) {
        let Some(program) = self.parts().program else {
            return;
        };
        let Some(loan) = program.loans.take(index) else {
            return;
        };
        program.sockets.end_loan(index);
        match loan.credit {
            Credit::Packet(reservation) => self.shard().cancel(reservation),
            Credit::Message(reservation) => self.shard().cancel_message(reservation),
            Credit::None => {}
        }
        let Some(lent) = loan.lent else { return };
        self.count_lent(loan.flow, |count| count.saturating_sub(1));
        if self.mark() == Some(lent.mark) {
            // Loans taken together are put back in reverse order.
            self.put_back(lent.buffer);
        } else if self.is_current(&lent) {
            self.discard(lent.buffer);
        }
    }

    /// Whether the queue of a buffer on loan still runs.
    #[inline(always)] // every packet
    fn is_current(&self, lent: &Lent<Self::Buffer>) -> bool {
        self.mark()
            .is_some_and(|mark| mark.epoch == lent.mark.epoch)
    }
}

impl<S: SendCalls> LoanCalls for S {}
