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
use zerosock_proto::vsock::datagram::data;
use zerosock_proto::wire::vsock::HEADER_LEN;
use zerosock_ring::Memory;

use super::datagrams::NotPut;
use super::{Context, Device};
use crate::device::half::DeviceHalf;
use crate::fallible;
use crate::table::datagrams::DatagramFault;
use crate::table::loan_calls::LoanCalls;
use crate::table::loans::{Lent, LoanOf};
use crate::table::send_calls::SendCalls;

impl DeviceHalf<'_, '_> {
    /// Sends the first `len` bytes of a datagram's loan. The loan ends, except on `WouldBlock`.
    pub(crate) fn send_datagram_loan(
        &mut self,
        index: u32,
        from: Address,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<(), DatagramFault> {
        let app = self
            .cx
            .shared
            .app
            .as_deref()
            .ok_or(DatagramFault::Unknown)?;
        let loan = app.loans.get(index).ok_or(DatagramFault::Unknown)?;
        let LoanOf::Datagram(_, to) = loan.of else {
            return Err(DatagramFault::Unknown);
        };
        let len = len.min(loan.len as usize);
        if loan.lent.is_none() {
            let bytes = private.unwrap_or_default();
            let bytes = bytes.get(..len).unwrap_or(bytes);
            let put = self.send_datagram(from, to, bytes);
            if put != Err(NotPut::NoRoom) {
                self.drop_loan(index);
            }
            return put.map_err(|error| match error {
                NotPut::NoRoom => DatagramFault::WouldBlock,
                NotPut::TooLong | NotPut::NotReceived(_) => DatagramFault::TooLong(len),
            });
        }
        let lent = self.take_lent(index).filter(|lent| self.is_current(lent));
        let lent = lent.ok_or(DatagramFault::Unreachable)?;
        self.transmit(lent.buffer, &data(from, to, len as u32, true));
        self.count_in_place(len);
        Ok(())
    }

    /// Takes back every loan of this device. Bytes written so far are saved, and the holder sends
    /// them by copying. Returns false if a loan is being written to at this moment, or if there is
    /// no memory for its bytes; it stays out.
    /// With `force`, for a guest that has gone, such a loan is marked revoked, and its chain is not
    /// completed because it may still be written to.
    pub(super) fn recall_loans(&mut self, force: bool) -> bool {
        let Self { device, cx } = self;
        let (vm, mut all) = (device.addr.number, true);
        if device.app.loans == 0 {
            return all;
        }
        let Some(app) = cx.shared.app.as_deref_mut() else {
            return all;
        };
        let leases = app.sockets.lease_table().clone();
        for (index, loan) in app.loans.iter_mut() {
            if loan.half != vm || loan.lent.is_none() {
                continue;
            }
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
            let Some(Lent {
                buffer: chain,
                mark,
            }) = loan.lent.take()
            else {
                continue;
            };
            let rx = device
                .queues
                .rings
                .rx
                .as_mut()
                .filter(|rx| rx.epoch == mark.epoch);
            if let (true, Some(rx)) = (moved, rx) {
                if let Some(mut bytes) = copy.filter(|_| !force) {
                    let pieces = chain.writable();
                    rx.queue.memory().read(pieces, HEADER_LEN, &mut bytes);
                    loan.copy = Some((Arc::new(bytes), 0));
                }
                rx.complete(chain, 0);
            }
            if !moved {
                leases.mark_torn(index);
            }
            device.app.loans = device.app.loans.saturating_sub(1);
            if let Some(loans) = loan.flow.and_then(|flow| device.app.flows.loans_mut(flow)) {
                *loans = loans.saturating_sub(1);
            }
        }
        all
    }

    /// Tracks memory that the device no longer uses but that leases may keep mapped.
    pub(super) fn track_old_memory(&mut self, memory: Option<Arc<Memory>>) {
        if let Some(memory) = memory.filter(|_| self.cx.shared.app.is_some()) {
            self.device.app.old.track(&memory);
        }
    }

    /// Whether leases and loans may be in place: the replaced memory that is still mapped is within
    /// [`Limits::old_memory`](super::Limits), or within twice the guest's size if that is larger. A
    /// guest that reboots during a read keeps one old table mapped, in the worst case two.
    #[inline]
    pub(crate) fn old_memory_fits(&mut self) -> bool {
        self.device.app.old.is_empty() || self.check_old_memory()
    }

    #[cold]
    fn check_old_memory(&mut self) -> bool {
        let Self { device, cx } = self;
        let size = device
            .queues
            .memory
            .as_ref()
            .map_or(0, |memory| memory.mapping().size());
        let few = device.app.old.alive() <= cx.shared.limits.old_memory.max(size.saturating_mul(2));
        if let Some(app) = cx.shared.app.as_deref_mut() {
            app.sockets.lease_copies(device.app.pool, !few);
        }
        few
    }
}

impl Device {
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

    /// Whether one more buffer may be lent in place, to this connection or for a datagram.
    pub(super) fn may_lend(&mut self, flow: Option<FlowId>, cx: &mut Context<'_>) -> bool {
        if !self.half(cx).old_memory_fits() {
            return false;
        }
        if let Some(flow) = flow {
            let (Some(loans), Some(rx)) = (self.app.flows.loans_mut(flow), &self.queues.rings.rx)
            else {
                return false;
            };
            if *loans >= (rx.queue.size() / 8).max(1) {
                return false;
            }
        }
        self.leaves_a_quarter()
    }
}
