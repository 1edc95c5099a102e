//! A queue pair of the driver as a sender: see [`SendHalf`].

use std::sync::Arc;

use zerosock_proto::Instant;
use zerosock_proto::vsock::FlowId;
use zerosock_proto::wire::vsock::Repr;
use zerosock_ring::{GuestSlice, Memory, Piece};

use super::Driver;
use super::arena::PAYLOAD;
use super::queue_pairs::{QueuePair, QueuePairId, RxSlot};
use crate::header;
use crate::table::send_half::{ProgramParts, SendHalf, SendParts};

/// A driver and one of its queue pairs. A buffer is a transmit slot, so its room is known before it is taken.
pub(crate) struct DriverHalf<'a> {
    driver: &'a mut Driver,
    queue_pair: QueuePairId,
}

impl Driver {
    #[inline]
    pub(super) fn half(&mut self, queue_pair: QueuePairId) -> DriverHalf<'_> {
        DriverHalf {
            driver: self,
            queue_pair,
        }
    }
}

impl DriverHalf<'_> {
    #[inline(always)] // as `emit`
    fn pair(&mut self) -> &mut QueuePair {
        &mut self.driver.store.queue_pairs[self.queue_pair]
    }
}

impl SendHalf for DriverHalf<'_> {
    type Buffer = u16;
    type Token = RxSlot;

    #[inline]
    fn number(&self) -> u32 {
        self.queue_pair.pool()
    }

    #[inline(always)] // the compiler otherwise makes all parts for the one that is used
    fn parts(&mut self) -> SendParts<'_, RxSlot, u16> {
        let driver = &mut *self.driver;
        let of = &mut driver.store.queue_pairs[self.queue_pair];
        SendParts {
            shard: &mut of.shard,
            flows: &mut of.flows,
            waiters: &mut of.waiters,
            coalesced: &mut of.coalesced,
            outgoing: &mut of.outgoing,
            program: Some(ProgramParts {
                sockets: &mut driver.sockets,
                loans: &mut driver.loans,
                tally: &mut driver.tally,
            }),
        }
    }

    fn now(&mut self) -> Instant {
        self.driver.now()
    }

    fn send_control(&mut self) {
        let now = self.driver.now();
        // The error recurs in the next turn, which reports it.
        let _ = self.driver.transmit_control_of(self.queue_pair, now);
    }

    fn has_buffer(&mut self) -> bool {
        let tx = &mut self.pair().tx;
        // The next turn reports a broken ring.
        tx.has_data_slot() || (tx.reap().is_ok() && tx.has_data_slot())
    }

    #[inline(always)] // as `emit`
    fn take_buffer(&mut self, len: usize) -> Option<u16> {
        let of = self.pair();
        let len = len.min(of.slots.tx_data.len() as usize) as u32;
        let slot = of.tx.data_slot(len).ok().flatten()?;
        of.prefetch_free();
        Some(slot)
    }

    #[inline]
    fn room(&self, _: &u16) -> usize {
        let of = &self.driver.store.queue_pairs[self.queue_pair];
        of.slots.tx_data.len() as usize
    }

    #[inline(always)] // as `emit`
    fn payload<'b>(&'b self, &slot: &'b u16) -> Option<(&'b Arc<Memory>, &'b [Piece], usize)> {
        let slots = &self.driver.store.queue_pairs[self.queue_pair].slots;
        Some((&slots.memory, slots.tx_data.pieces(slot), 0))
    }

    #[inline(always)] // every packet
    fn emit(&mut self, slot: u16, header: &Repr) {
        if let Err(error) = self.pair().send(slot, header) {
            self.driver.store.fail(error);
        }
    }

    #[inline]
    fn put_back(&mut self, slot: u16) {
        self.pair().tx.put_back(slot);
    }

    fn discard(&mut self, slot: u16) {
        self.put_back(slot);
    }

    #[inline(always)] // keeps the header in registers
    fn send_front(
        &mut self,
        flow: FlowId,
        len: usize,
        is_whole: bool,
        flags: u32,
        fill: impl FnOnce(GuestSlice<'_>, usize),
    ) -> Option<usize> {
        let of = self.pair();
        let room = of.slots.tx_data.len() as usize;
        let len = match len <= room {
            true => len,
            false if is_whole => return None,
            false => room,
        };
        let slot = match is_whole {
            // Without looking for returned slots: one call fewer in the common case.
            true => of.tx.ready_slot(len as u32)?,
            false => of.tx.data_slot(len as u32).ok().flatten()?,
        };
        let Some(header) = of.shard.send_whole_now(flow, len as u32, flags) else {
            of.tx.put_back(slot);
            return None;
        };
        of.prefetch_free();
        if let Some(packet) = of.slots.tx_packets.slice(&of.slots.memory, slot) {
            fill(packet.part(PAYLOAD, usize::MAX), len);
            header::store(packet, &header);
        }
        if let Err(error) = of.tx.push(slot) {
            self.driver.store.fail(error);
        }
        Some(len)
    }

    fn reset_after_loss(&mut self, flow: FlowId) {
        // Fails only for a flow that has ended.
        let _ = self.shard().reset(flow);
    }

    /// Connections leave a quarter of the slots, and each has at most an eighth, so that writes and control
    /// packets always find slots. Datagrams have at most a quarter.
    #[inline(always)] // as `emit`
    fn may_lend(&mut self, flow: Option<FlowId>) -> bool {
        let slots = self.driver.config.slots();
        let Some(flow) = flow else {
            return self.driver.datagrams.lent < slots / 4;
        };
        let of = self.pair();
        let loans = of.flows.loans_mut(flow);
        loans.is_some_and(|loans| *loans < (slots / 8).max(1))
            && of.lent < slots - (slots / 4).max(1)
    }

    #[inline(always)] // as `emit`
    fn lent_mut(&mut self, flow: Option<FlowId>) -> &mut u16 {
        match flow {
            Some(_) => &mut self.pair().lent,
            None => &mut self.driver.datagrams.lent,
        }
    }
}
