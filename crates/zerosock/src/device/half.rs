//! The view of a device for the program that embeds it, as sender: see [`SendHalf`].

use std::collections::VecDeque;
use std::sync::Arc;

use zerosock_proto::Instant;
use zerosock_proto::vsock::FlowId;
use zerosock_proto::wire::vsock::{HEADER_LEN, MAX_PAYLOAD, Repr};
use zerosock_ring::{Chain, FrontChain, GuestSlice, Memory, Piece};

use super::events::emit;
use super::state::program::HostToken;
use super::{Context, Device, TURN_BYTES};
use crate::header;
use crate::table::loans::Mark;
use crate::table::outgoing::Outgoing;
use crate::table::send_half::{ProgramParts, SendHalf, SendParts};

/// A device and what the worker lends it. A buffer is a chain that the guest has posted, which alone says how
/// much fits.
pub(crate) struct DeviceHalf<'a, 'c> {
    pub(crate) device: &'a mut Device,
    pub(crate) cx: &'a mut Context<'c>,
}

impl Device {
    #[inline]
    pub(crate) fn half<'a, 'c>(&'a mut self, cx: &'a mut Context<'c>) -> DeviceHalf<'a, 'c> {
        DeviceHalf { device: self, cx }
    }

    /// Messages with remaining bytes that wait for buffers.
    pub(crate) fn outgoing(&self) -> &VecDeque<Outgoing> {
        &self.outgoing
    }
}

impl SendHalf for DeviceHalf<'_, '_> {
    type Buffer = Chain;
    type Token = HostToken;

    #[inline]
    fn number(&self) -> u32 {
        self.device.addr.number
    }

    #[inline(always)] // the compiler otherwise makes all parts for the one that is used
    fn parts(&mut self) -> SendParts<'_, HostToken, Chain> {
        let device = &mut *self.device;
        let app = self.cx.shared.app.as_deref_mut();
        SendParts {
            shard: &mut device.shard,
            flows: &mut device.app.flows,
            waiters: &mut device.app.waiters,
            coalesced: &mut device.coalesced,
            outgoing: &mut device.outgoing,
            program: app.map(|app| ProgramParts {
                sockets: &mut app.sockets,
                loans: &mut app.loans,
                tally: &mut app.tally,
            }),
        }
    }

    fn now(&mut self) -> Instant {
        self.cx.now
    }

    fn send_control(&mut self) {
        if self.may_send_control() {
            self.device.transmit_control(self.cx);
        }
    }

    #[inline]
    fn is_stopping(&self) -> bool {
        self.device.queues.is_command_pending()
    }

    fn has_buffer(&mut self) -> bool {
        let rx = self.device.queues.rings.rx.as_mut();
        rx.is_some_and(|rx| rx.live() && rx.queue.posted() > 0)
    }

    #[inline(always)] // as `emit`
    fn take_buffer(&mut self, _: usize) -> Option<Chain> {
        let rx = self.device.queues.rings.rx.as_mut()?;
        rx.pop_if(HEADER_LEN + 1, true)
    }

    /// Completing an unusable buffer would keep earlier ones from being put back.
    fn take_another(&mut self, _: usize) -> Option<Chain> {
        let rx = self.device.queues.rings.rx.as_mut()?;
        rx.pop_if(HEADER_LEN + 1, false)
    }

    #[inline]
    fn room(&self, chain: &Chain) -> usize {
        (chain.writable_len() as usize - HEADER_LEN).min(MAX_PAYLOAD as usize)
    }

    #[inline(always)] // as `emit`
    fn payload<'b>(&'b self, chain: &'b Chain) -> Option<(&'b Arc<Memory>, &'b [Piece], usize)> {
        let rx = self.device.queues.rings.rx.as_ref()?;
        Some((rx.queue.memory(), chain.writable(), HEADER_LEN))
    }

    #[inline(always)] // every packet
    fn emit(&mut self, chain: Chain, header: &Repr) {
        if let Some(rx) = &mut self.device.queues.rings.rx {
            emit(rx, chain, header, header.len as usize);
        }
    }

    #[inline]
    fn put_back(&mut self, chain: Chain) {
        if let Some(rx) = &mut self.device.queues.rings.rx {
            rx.queue.unpop(chain);
        }
    }

    fn discard(&mut self, chain: Chain) {
        if let Some(rx) = &mut self.device.queues.rings.rx {
            rx.complete(chain, 0);
        }
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
        let rx = self.device.queues.rings.rx.as_mut()?;
        let FrontChain {
            header: place,
            body,
            token,
        } = rx.front(HEADER_LEN, true)?;
        let room = body.len().min(MAX_PAYLOAD as usize);
        let len = match len <= room {
            true => len,
            false if is_whole => return None,
            false => room,
        };
        let shard = &mut self.device.shard;
        let header = shard.send_whole_now(flow, len as u32, flags)?;
        fill(body, len);
        header::store(place, &header);
        rx.complete_front(token, (HEADER_LEN + len) as u32);
        Some(len)
    }

    fn want_buffers(&mut self) {
        self.device.starved |= self.device.queues.rings.rx.is_some();
    }

    fn want_buffers_for_waiters(&mut self) {
        self.device.request_buffers();
    }

    fn may_send_kept(&self) -> bool {
        self.device.moved < TURN_BYTES
    }

    fn count_kept(&mut self, bytes: usize) {
        self.device.moved += bytes;
        let counters = &self.cx.shared.counters;
        counters.tx_packets.add(1);
        counters.tx_bytes.add(bytes as u64);
    }

    fn reset_after_loss(&mut self, flow: FlowId) {
        self.device.count_lost_bytes(self.cx);
        self.device.half(self.cx).reset_app(flow);
    }

    #[inline]
    fn may_lend(&mut self, flow: Option<FlowId>) -> bool {
        self.device.may_lend(flow, self.cx)
    }

    #[inline(always)] // as `emit`
    fn lent_mut(&mut self, _: Option<FlowId>) -> &mut u16 {
        &mut self.device.app.loans
    }

    #[inline]
    fn mark(&self) -> Option<Mark> {
        let rx = self.device.queues.rings.rx.as_ref()?;
        Some(Mark {
            epoch: rx.epoch,
            base: rx.queue.base(),
            taken: rx.taken,
        })
    }
}
