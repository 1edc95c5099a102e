//! Loans: receive buffers of the guest that the embedding program writes into directly; and
//! replaced guest memory that leases keep mapped.
//!
//! # Invariants
//! - A quarter of the posted buffers is never lent: control packets need them.
//! - A connection has at most an eighth of the queue on loan.
//! - Before the queue stops or its memory is replaced, every loan is taken back. The device waits
//!   for a loan that is being written to: guest memory must not be written to after the command was
//!   answered.
//!
//! # Life of a loan
//! A loan is a chain of the receive queue with credit for its bytes. When it is sent, it gets its
//! header and is completed. When it is dropped, its chain is un-popped, or, if later chains were
//! popped since, completed with no bytes, after which the driver posts it again.

use std::sync::Arc;

use zerosock_proto::Address;
use zerosock_proto::vsock::FlowId;
use zerosock_proto::vsock::datagram::{DatagramId, data};
use zerosock_proto::wire::vsock::{HEADER_LEN, MAX_PAYLOAD};
use zerosock_ring::{Chain, Memory};

use super::app::send_fault;
use super::datagrams::NotPut;
use super::events::emit;
use super::state::program::App;
use super::{Context, Device};
use crate::device::state::loans::{Credit, Lent, Loan, LoanOf};
use crate::fallible;
use crate::table::datagrams::DatagramFault;
use crate::table::sockets::{BufferPlace, Copied, StreamId};
use crate::table::transfers::{LoanParts, SendFault};
use zerosock_virtio::ring::Ring;

impl App {
    pub(super) fn loan_mut(&mut self, index: u32) -> Option<&mut Loan> {
        self.loans.get_mut(index as usize)?.as_mut()
    }

    fn loan(&self, index: u32) -> Option<&Loan> {
        self.loans.get(index as usize)?.as_ref()
    }

    /// What a loan is for, and the number of its device.
    pub(crate) fn loan_at(&self, index: u32) -> Option<(LoanOf, u32)> {
        self.loan(index).map(|loan| (loan.of, loan.vm))
    }

    /// The contents of a loan's buffer when it was taken back.
    pub(crate) fn loan_copy(&self, index: u32) -> Option<Copied> {
        self.loan(index)?.copy.clone()
    }

    #[inline(always)] // saves a copy of the loan
    pub(super) fn add_loan(&mut self, index: u32, loan: Loan) {
        let index = index as usize;
        if self.loans.len() <= index {
            self.loans.resize_with(index + 1, || None);
        }
        if let Some(place) = self.loans.get_mut(index) {
            *place = Some(loan);
        }
    }

    /// Removes a loan and frees its entry in the lease table.
    #[inline(always)] // as `add_loan`
    pub(super) fn remove_loan(&mut self, index: u32) -> Option<Loan> {
        let loan = self.loans.get_mut(index as usize)?.take()?;
        self.sockets.end_loan(index);
        Some(loan)
    }

    /// Removes a loan whose buffer and credit were returned, or have gone with its device.
    pub(crate) fn forget_loan(&mut self, index: u32) {
        if let Some(loan @ Some(_)) = self.loans.get_mut(index as usize) {
            *loan = None;
            self.sockets.end_loan(index);
        }
    }
}

/// Lends the payload part of a chain if `in_place` and it has few enough pieces; else un-pops it.
#[inline(always)] // saves copies of the chain
pub(super) fn lend_chain(
    rx: &mut Ring,
    chain: Chain,
    in_place: bool,
) -> (Option<Lent>, Option<BufferPlace>) {
    let place = || BufferPlace::new(rx.queue.memory(), chain.writable(), HEADER_LEN);
    let Some(place) = in_place.then(place).flatten() else {
        rx.queue.unpop(chain);
        return (None, None);
    };
    let lent = Lent {
        chain,
        epoch: rx.epoch,
        base: rx.queue.base(),
        taken: rx.taken,
    };
    (Some(lent), Some(place))
}

impl Device {
    /// Lends a receive buffer for at most `max` bytes of a connection.
    pub(crate) fn app_loan(
        &mut self,
        id: StreamId,
        flow: FlowId,
        max: usize,
        cx: &mut Context<'_>,
    ) -> Result<LoanParts, SendFault> {
        let in_place = self.may_lend(flow, cx);
        let vm = self.addr.number;
        let pending = self.queues.is_command_pending();
        let rx = self.queues.rings.rx.as_mut().filter(|_| !pending);
        let popped = rx.and_then(|rx| Some((rx.pop_if(HEADER_LEN + 1, true)?, rx)));
        let Some((chain, rx)) = popped else {
            self.wait_for_room(id, cx);
            return Err(SendFault::WouldBlock);
        };
        let room = (chain.writable_len() as usize - HEADER_LEN).min(MAX_PAYLOAD as usize);
        let max = u32::try_from(max.min(room)).unwrap_or(MAX_PAYLOAD);
        let reservation = match self.shard.reserve(flow, max) {
            Ok(reservation) => reservation,
            Err(error) => {
                rx.queue.unpop(chain);
                return Err(send_fault(error));
            }
        };
        let slot = cx.shared.app.as_deref_mut().and_then(|app| {
            let index = app.sockets.begin_loan()?;
            Some((index, app))
        });
        let Some((index, app)) = slot else {
            rx.queue.unpop(chain);
            self.shard.cancel(reservation);
            return Err(SendFault::TooManyLoans);
        };
        let len = reservation.len();
        let (chain, place) = lend_chain(rx, chain, in_place);
        if chain.is_some() {
            self.count_loan(Some(flow), true);
        }
        let loan = Loan {
            of: LoanOf::Stream(id),
            vm,
            len,
            flow: Some(flow),
            chain,
            credit: Credit::Packet(reservation),
            copy: None,
        };
        app.add_loan(index, loan);
        let len = len as usize;
        Ok(LoanParts { index, len, place })
    }

    /// Whether packets of a connection have to be sent before it borrows a buffer.
    #[inline]
    pub(crate) fn must_send_before_loan(&self, flow: FlowId) -> bool {
        self.shard.has_transmit() || self.coalesced.has(flow)
    }

    /// Sends control packets and coalesced bytes.
    #[cold]
    pub(crate) fn send_before_loan(&mut self, flow: FlowId, cx: &mut Context<'_>) {
        if self.shard.has_transmit() {
            self.transmit_control(cx);
        }
        self.flush_coalesced(flow, cx);
    }

    pub(super) fn count_loan(&mut self, flow: Option<FlowId>, out: bool) {
        let step = |count: u16| {
            if out {
                count.saturating_add(1)
            } else {
                count.saturating_sub(1)
            }
        };
        self.app.loans = step(self.app.loans);
        if let Some(loans) = flow.and_then(|flow| self.app.flows.loans_mut(flow)) {
            *loans = step(*loans);
        }
    }

    /// Lends a receive buffer for a datagram of at most `len` bytes. The loan is a private buffer
    /// if the datagram needs several chains or the bounds on loans are reached.
    pub(crate) fn app_loan_datagram(
        &mut self,
        id: DatagramId,
        to: Address,
        len: usize,
        cx: &mut Context<'_>,
    ) -> Result<LoanParts, DatagramFault> {
        let room = self.old_memory_fits(cx) && self.leaves_a_quarter();
        let vm = self.addr.number;
        let pending = self.queues.is_command_pending();
        let rx = self.queues.rings.rx.as_mut().filter(|_| !pending);
        let popped = rx.and_then(|rx| Some((rx.pop_if(HEADER_LEN + 1, true)?, rx)));
        let Some((chain, rx)) = popped else {
            self.want_datagram_room();
            return Err(DatagramFault::WouldBlock);
        };
        let in_place = room && chain.writable_len() as usize - HEADER_LEN >= len;
        let slot = cx.shared.app.as_deref_mut().and_then(|app| {
            let index = app.sockets.begin_loan()?;
            Some((index, app))
        });
        let Some((index, app)) = slot else {
            rx.queue.unpop(chain);
            return Err(DatagramFault::TooManyLoans);
        };
        let (chain, place) = lend_chain(rx, chain, in_place);
        let lent = chain.is_some();
        let loan = Loan {
            of: LoanOf::Datagram(id, to),
            vm,
            len: len as u32,
            flow: None,
            chain,
            credit: Credit::None,
            copy: None,
        };
        app.add_loan(index, loan);
        if lent {
            self.count_loan(None, true);
        }
        Ok(LoanParts { index, len, place })
    }

    /// Sends the first `len` bytes of a datagram's loan. The loan ends, except on `WouldBlock`.
    pub(crate) fn app_send_datagram_loan(
        &mut self,
        index: u32,
        from: Address,
        len: usize,
        private: Option<&[u8]>,
        cx: &mut Context<'_>,
    ) -> Result<(), DatagramFault> {
        let app = cx.shared.app.as_deref_mut().ok_or(DatagramFault::Unknown)?;
        let loan = app.loan_mut(index).ok_or(DatagramFault::Unknown)?;
        let LoanOf::Datagram(_, to) = loan.of else {
            return Err(DatagramFault::Unknown);
        };
        let len = len.min(loan.len as usize);
        if loan.chain.is_none() {
            let bytes = private.unwrap_or_default();
            let bytes = bytes.get(..len).unwrap_or(bytes);
            let put = self.app_send_datagram(from, to, bytes, cx);
            if put != Err(NotPut::NoRoom)
                && let Some(app) = cx.shared.app.as_deref_mut()
            {
                app.remove_loan(index);
            }
            return put.map_err(|error| match error {
                NotPut::NoRoom => DatagramFault::WouldBlock,
                NotPut::TooLong | NotPut::NotReceived(_) => DatagramFault::TooLong(len),
            });
        }
        let lent = app.remove_loan(index).and_then(|loan| loan.chain);
        self.count_loan(None, false);
        let (Some(lent), Some(rx)) = (lent, self.queues.rings.rx.as_mut()) else {
            return Err(DatagramFault::Unreachable);
        };
        if lent.epoch != rx.epoch {
            return Err(DatagramFault::Unreachable);
        }
        emit(rx, lent.chain, &data(from, to, len as u32, true), len);
        if let Some(app) = cx.shared.app.as_deref_mut() {
            app.tally.sent += len as u64;
            app.tally.sent_in_place += len as u64;
            app.tally.packets_sent += 1;
        }
        Ok(())
    }

    /// Whether a quarter of the posted buffers remains after one more loan.
    fn leaves_a_quarter(&mut self) -> bool {
        let loans = self.app.loans;
        let Some(rx) = self.queues.rings.rx.as_mut() else {
            return false;
        };
        let fits = |posted: u16| {
            let all = posted.saturating_add(loans);
            loans < all - all.div_ceil(4)
        };
        // `available` is a lower bound; `posted` reads the driver's index.
        fits(rx.queue.available()) || fits(rx.queue.posted())
    }

    /// Whether one more buffer may be lent in place to this connection.
    pub(super) fn may_lend(&mut self, flow: FlowId, cx: &mut Context<'_>) -> bool {
        if !self.old_memory_fits(cx) {
            return false;
        }
        let (Some(loans), Some(rx)) = (self.app.flows.loans_mut(flow), &self.queues.rings.rx)
        else {
            return false;
        };
        *loans < (rx.queue.size() / 8).max(1) && self.leaves_a_quarter()
    }

    /// See [`Backend::send_loan`](crate::table::backend::Backend::send_loan). A loan that was taken
    /// back is sent by copying from `private`.
    pub(crate) fn app_send_loan(
        &mut self,
        index: u32,
        flow: FlowId,
        len: usize,
        private: Option<&[u8]>,
        cx: &mut Context<'_>,
    ) -> Result<usize, SendFault> {
        let Some(app) = cx.shared.app.as_deref_mut() else {
            return Err(SendFault::Unknown);
        };
        let loan = app.loan_mut(index).ok_or(SendFault::Unknown)?;
        let len = len.min(loan.len as usize);
        if len == 0 {
            self.app_drop_loan(index, cx);
            return Ok(0);
        }
        if loan.chain.is_none() {
            let bytes = private.unwrap_or_default();
            let bytes = bytes.get(..len).unwrap_or(bytes);
            return self.send_copy(index, flow, bytes, cx);
        }
        let credit = std::mem::replace(&mut loan.credit, Credit::None);
        let lent = loan.chain.take();
        app.forget_loan(index);
        self.count_loan(Some(flow), false);
        let rx = self.queues.rings.rx.as_mut();
        let (Some(lent), Some(rx), Credit::Packet(reservation)) = (lent, rx, credit) else {
            return Err(SendFault::Reset);
        };
        if lent.epoch != rx.epoch {
            return Err(SendFault::Reset);
        }
        match self.shard.commit(reservation, len as u32, 0) {
            Ok(header) => emit(rx, lent.chain, &header, len),
            Err(_) => {
                rx.complete(lent.chain, 0);
                let ended = self.shard.flow(flow).is_none();
                return Err(if ended {
                    SendFault::Reset
                } else {
                    SendFault::ShutDown
                });
            }
        }
        if let Some(app) = cx.shared.app.as_deref_mut() {
            app.tally.sent += len as u64;
            app.tally.sent_in_place += len as u64;
            app.tally.packets_sent += 1;
        }
        Ok(len)
    }

    /// Sends `bytes` of a loan by copying. The loan ends when all of them have been sent.
    fn send_copy(
        &mut self,
        index: u32,
        flow: FlowId,
        bytes: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<usize, SendFault> {
        let loan = cx
            .shared
            .app
            .as_deref_mut()
            .and_then(|app| app.loan_mut(index));
        let loan = loan.ok_or(SendFault::Unknown)?;
        let LoanOf::Stream(id) = loan.of else {
            return Err(SendFault::Unknown);
        };
        if let Credit::Packet(reservation) = std::mem::replace(&mut loan.credit, Credit::None) {
            self.shard.cancel(reservation);
        }
        let result = self.app_write(id, flow, bytes, cx);
        let app = cx.shared.app.as_deref_mut().ok_or(SendFault::Unknown)?;
        match result {
            Ok(sent) if sent < bytes.len() => {
                if let Some(loan) = app.loan_mut(index) {
                    loan.len = loan.len.saturating_sub(sent as u32);
                }
                Ok(sent)
            }
            Err(SendFault::WouldBlock) => Err(SendFault::WouldBlock),
            done => {
                app.remove_loan(index);
                done
            }
        }
    }

    /// Ends a loan that was dropped without being sent.
    pub(crate) fn app_drop_loan(&mut self, index: u32, cx: &mut Context<'_>) {
        let loan = cx
            .shared
            .app
            .as_deref_mut()
            .and_then(|app| app.remove_loan(index));
        let Some(loan) = loan else { return };
        match loan.credit {
            Credit::Packet(reservation) => self.shard.cancel(reservation),
            Credit::Message(room) => self.shard.cancel_message(room),
            Credit::None => {}
        }
        let Some(lent) = loan.chain else { return };
        self.count_loan(loan.flow, false);
        if let Some(rx) = self
            .queues
            .rings
            .rx
            .as_mut()
            .filter(|rx| rx.epoch == lent.epoch)
        {
            // Check both: the base repeats after 65536 chains, and `taken` counts un-popped
            // chains. Loans taken together are un-popped in reverse order.
            if rx.queue.base() == lent.base && rx.taken == lent.taken {
                rx.queue.unpop(lent.chain);
            } else {
                rx.complete(lent.chain, 0);
            }
        }
    }

    /// Takes back every loan of this device. Bytes written so far are saved, and the holder sends
    /// them by copying. Returns false if a loan is being written to at this moment, or if there is
    /// no memory for its bytes; it stays out.
    /// With `force`, for a guest that has gone, such a loan is marked revoked, and its chain is not
    /// completed because it may still be written to.
    pub(super) fn recall_loans(&mut self, force: bool, cx: &mut Context<'_>) -> bool {
        let (vm, mut all) = (self.addr.number, true);
        if self.app.loans == 0 {
            return all;
        }
        let Some(app) = cx.shared.app.as_deref_mut() else {
            return all;
        };
        let leases = app.sockets.lease_table().clone();
        for (index, loan) in app.loans.iter_mut().enumerate() {
            let loan = loan
                .as_mut()
                .filter(|loan| loan.vm == vm && loan.chain.is_some());
            let (Some(loan), index) = (loan, index as u32) else {
                continue;
            };
            // After the loan was moved it is too late to find that there is no memory.
            let copy = match force {
                true => Some(Vec::new()),
                false => fallible::zeroed(loan.len as usize).ok(),
            };
            let moved = copy.is_some() && leases.try_move(index);
            if !moved && !force {
                all = false;
                continue;
            }
            let Some(lent) = loan.chain.take() else {
                continue;
            };
            let rx = self
                .queues
                .rings
                .rx
                .as_mut()
                .filter(|rx| rx.epoch == lent.epoch);
            if let (true, Some(rx)) = (moved, rx) {
                if let Some(mut bytes) = copy.filter(|_| !force) {
                    let pieces = lent.chain.writable();
                    rx.queue.memory().read(pieces, HEADER_LEN, &mut bytes);
                    loan.copy = Some((Arc::new(bytes), 0));
                }
                rx.complete(lent.chain, 0);
            }
            if !moved {
                leases.mark_torn(index);
            }
            let flow = loan.flow;
            self.count_loan(flow, false);
        }
        all
    }

    /// Tracks memory that the device no longer uses but that leases may keep mapped.
    pub(super) fn track_old_memory(&mut self, memory: Option<Arc<Memory>>, cx: &Context<'_>) {
        if let Some(memory) = memory.filter(|_| cx.shared.app.is_some()) {
            let size = memory.size();
            self.app.old.0.push((Arc::downgrade(&memory), size));
        }
    }

    /// Whether leases and loans may be in place: the replaced memory that is still mapped is within
    /// [`Limits::old_memory`](super::Limits), or within twice the guest's size if that is larger. A
    /// guest that reboots during a read keeps one old table mapped, in the worst case two.
    #[inline]
    pub(crate) fn old_memory_fits(&mut self, cx: &mut Context<'_>) -> bool {
        self.app.old.0.is_empty() || self.check_old_memory(cx)
    }

    #[cold]
    fn check_old_memory(&mut self, cx: &mut Context<'_>) -> bool {
        let size = self
            .queues
            .memory
            .as_ref()
            .map_or(0, |memory| memory.size());
        let few = self.app.old.alive() <= cx.shared.limits.old_memory.max(size.saturating_mul(2));
        if let Some(app) = cx.shared.app.as_deref_mut() {
            app.sockets.lease_copies(self.app.pool, !few);
        }
        few
    }
}
