//! The driver's implementation of datagram sockets.

use zerosock_proto::vsock::datagram::{DatagramId, data};
use zerosock_proto::{Address, Cid, Port};

use super::QUEUE_PAIR;
use crate::driver::Driver;
use crate::table::datagrams::{DatagramBackend, DatagramFault};
use crate::table::loan_calls::LoanCalls;
use crate::table::loans::LoanOf;
use crate::table::send_calls::SendCalls;
use crate::table::send_half::SendHalf;
use crate::table::sending::SendAccess;
use crate::table::transfers::LoanParts;

impl DatagramBackend for Driver {
    fn send(&mut self, id: DatagramId, to: Address, bytes: &[u8]) -> Result<(), DatagramFault> {
        self.send_datagram(id, to, bytes)?;
        self.tally.copied_in += bytes.len() as u64;
        Ok(())
    }

    fn loan(
        &mut self,
        id: DatagramId,
        to: Address,
        len: usize,
    ) -> Result<LoanParts, DatagramFault> {
        self.may_send_datagram(id, to, len)?;
        let loan = self.half(QUEUE_PAIR).lend_datagram(id, to, len);
        if matches!(loan, Err(DatagramFault::WouldBlock)) {
            self.wait_for_datagram_slots(id, 1);
        }
        loan
    }

    fn send_loan(
        &mut self,
        index: u32,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<(), DatagramFault> {
        let loan = self.loans.get(index).ok_or(DatagramFault::Unknown)?;
        let LoanOf::Datagram(id, to) = loan.of else {
            return Err(DatagramFault::Unknown);
        };
        if loan.lent.is_none() {
            let bytes = private.unwrap_or_default();
            let bytes = bytes.get(..len).unwrap_or(bytes);
            let sent = DatagramBackend::send(self, id, to, bytes);
            if sent != Err(DatagramFault::WouldBlock) {
                self.drop_loan(index);
            }
            return sent;
        }
        let from = match self.may_send_datagram(id, to, len) {
            Ok(from) => from,
            Err(DatagramFault::WouldBlock) => return Err(DatagramFault::WouldBlock),
            Err(fault) => {
                self.drop_loan(index);
                return Err(fault);
            }
        };
        let mut half = self.half(QUEUE_PAIR);
        let lent = half.take_lent(index).ok_or(DatagramFault::Unknown)?;
        let len = len.min(half.room(&lent.buffer));
        half.count_in_place(len);
        let (slot, len) = (lent.buffer, len as u32);
        let tx = &mut self.store.queue_pairs[QUEUE_PAIR].tx;
        tx.track_datagram(slot, id, len);
        let header = data(from, to, len, true);
        self.half(QUEUE_PAIR).transmit(slot, &header);
        self.datagrams.inboxes.table.sent(id, len, true);
        Ok(())
    }

    fn is_flushed(&mut self, id: DatagramId) -> bool {
        // The error recurs in the next turn, which reports it.
        let _ = self.store.queue_pairs[QUEUE_PAIR].tx.reap();
        self.collect_consumed_datagrams();
        self.datagrams.inboxes.table.is_flushed(id)
    }

    fn may_send(&mut self, id: DatagramId, to: Option<Address>) -> bool {
        let to = to.unwrap_or(Address::new(Cid::ANY, Port::ANY));
        match self.may_send_datagram(id, to, 0) {
            Ok(_) if self.store.queue_pairs[QUEUE_PAIR].tx.has_data_slots(1) => true,
            Ok(_) => {
                self.wait_for_datagram_slots(id, 1);
                false
            }
            Err(fault) => fault != DatagramFault::WouldBlock,
        }
    }
}
