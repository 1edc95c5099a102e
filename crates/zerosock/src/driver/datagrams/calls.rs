//! The driver's implementation of datagram sockets.

use zerosock_proto::vsock::datagram::{DatagramId, data};
use zerosock_proto::{Address, Cid, Port};

use super::QUEUE_PAIR;
use crate::driver::Driver;
use crate::driver::loans::{LoanOf, LoanRecord};
use crate::table::datagrams::{DatagramBackend, DatagramFault};
use crate::table::transfers::LoanParts;

impl DatagramBackend for Driver {
    fn send(&mut self, id: DatagramId, to: Address, bytes: &[u8]) -> Result<(), DatagramFault> {
        self.send_datagram(id, to, bytes)?;
        self.loans.copied_in += bytes.len() as u64;
        Ok(())
    }

    fn loan(
        &mut self,
        id: DatagramId,
        to: Address,
        len: usize,
    ) -> Result<LoanParts, DatagramFault> {
        self.may_send_datagram(id, to, len)?;
        let most = self.store.queue_pairs[QUEUE_PAIR].slots.tx_data.len() as usize;
        let in_place = len <= most && self.loans.may_lend_datagram();
        let slot = match in_place {
            true => match self.store.queue_pairs[QUEUE_PAIR].tx.data_slot(len as u32) {
                Ok(Some(slot)) => Some(slot),
                _ => return Err(self.wait_for_datagram_slots(id, 1)),
            },
            false => None,
        };
        let Some(index) = self.sockets.begin_loan() else {
            if let Some(slot) = slot {
                self.store.queue_pairs[QUEUE_PAIR].tx.put_back(slot);
            }
            return Err(DatagramFault::TooManyLoans);
        };
        let place = slot.and_then(|slot| self.place_of(QUEUE_PAIR, slot));
        let record = LoanRecord {
            of: LoanOf::Datagram(id, to),
            queue_pair: QUEUE_PAIR,
            slot,
        };
        self.loans.put(index, record);
        Ok(LoanParts { index, len, place })
    }

    fn send_loan(
        &mut self,
        index: u32,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<(), DatagramFault> {
        let Some(LoanRecord {
            of: LoanOf::Datagram(id, to),
            slot,
            ..
        }) = self.loans.get(index)
        else {
            return Err(DatagramFault::Unknown);
        };
        let (id, to) = (*id, *to);
        let Some(slot) = *slot else {
            let bytes = private.unwrap_or_default();
            let bytes = bytes.get(..len).unwrap_or(bytes);
            let sent = DatagramBackend::send(self, id, to, bytes);
            if sent != Err(DatagramFault::WouldBlock) {
                self.end_lent(index);
            }
            return sent;
        };
        let from = match self.may_send_datagram(id, to, len) {
            Ok(from) => from,
            Err(DatagramFault::WouldBlock) => return Err(DatagramFault::WouldBlock),
            Err(fault) => {
                self.end_lent(index);
                return Err(fault);
            }
        };
        self.loans.take(index);
        self.sockets.end_loan(index);
        let len = (len as u32).min(self.store.queue_pairs[QUEUE_PAIR].slots.tx_data.len());
        self.store.queue_pairs[QUEUE_PAIR]
            .tx
            .track_datagram(slot, id, len);
        if self
            .transmit(QUEUE_PAIR, slot, &data(from, to, len, true))
            .is_err()
        {
            return Err(DatagramFault::Unknown);
        }
        self.datagrams.inboxes.table.sent(id, len, true);
        self.loans.sent_in_place += u64::from(len);
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
