//! Gives the calls of [`crate::table::calls`] and [`crate::table::sending`] the tables, the held buffers
//! and the queues of all devices.

use std::collections::VecDeque;
use std::mem::replace;

use zerosock_proto::Address;
use zerosock_proto::vsock::datagram::DatagramId;
use zerosock_proto::vsock::{FlowId, Shard};
use zerosock_ring::GuestSlice;

use super::stores::AllStores;
use super::{HostBackend, HostHalf};
use crate::device::state::app::QueueStore;
use crate::device::state::program::{App, HostToken};
use crate::device::{Device, DriverKind, Worker};
use crate::table::calls::TableAccess;
use crate::table::inboxes::Inboxes;
use crate::table::loan_calls::LoanCalls;
use crate::table::loans::LoanOf;
use crate::table::outgoing::Outgoing;
use crate::table::send_calls::{SendCalls, WholePacket};
use crate::table::sending::SendAccess;
use crate::table::sockets::{LeaseParts, NoLease, Shown, Sockets, StreamId};
use crate::table::transfers::{Payload, Publish, ShowBounds};

impl HostBackend {
    /// Calls `act` on a device that passes a check; the next flush shows the changes to its guest.
    /// Activates the device if `act` has read the clock: it may have set timers.
    #[inline]
    fn with_half_if<T>(
        &mut self,
        vm: u32,
        check: impl FnOnce(&mut Device) -> bool,
        act: impl FnOnce(&mut HostHalf<'_>) -> T,
    ) -> Option<T> {
        let (device, mut cx) = self.worker.lend_late(vm, self.now);
        let device = device?;
        if !check(device) {
            return None;
        }
        // Before the call, because `act` may panic.
        if !std::mem::replace(&mut device.touched, true) {
            self.touched.push(vm);
        }
        let mut half = device.half(&mut cx);
        let done = act(&mut half);
        if half.cx.clock.is_none() {
            self.worker.activate(vm);
        }
        Some(done)
    }
}

impl TableAccess for HostBackend {
    type Token = HostToken;
    type Store<'a> = QueueStore<'a>;
    type AllStores<'a> = AllStores<'a>;

    #[inline]
    fn sockets(&self) -> Option<&Sockets<HostToken>> {
        self.app().map(|app| &app.sockets)
    }

    #[inline]
    fn sockets_mut(&mut self) -> Option<&mut Sockets<HostToken>> {
        let app = self.worker.shared.app.as_deref_mut();
        app.map(|app| &mut app.sockets)
    }

    fn trusts_pool(&self, pool: u32) -> bool {
        self.trust_processes && self.is_process(pool)
    }

    #[inline]
    fn with_received(
        &mut self,
        id: StreamId,
        act: impl FnOnce(&mut Sockets<HostToken>, &mut QueueStore<'_>) -> bool,
    ) {
        let Some(app) = self.worker.shared.app.as_deref_mut() else {
            return;
        };
        let Some(pool) = app.sockets.get(id).map(|conn| conn.pool) else {
            return;
        };
        let vm = app.device_of(pool);
        let Some((vm, device)) = vm.and_then(|vm| Some((vm, self.worker.devices.get_mut(vm)?)))
        else {
            // The device is removed; only copies are left.
            act(&mut app.sockets, &mut QueueStore::default());
            return;
        };
        // Recorded before the call, because `act` may pass bytes to a caller that panics.
        let newly_touched = !replace(&mut device.touched, true);
        if newly_touched {
            self.touched.push(vm);
        }
        if !act(&mut app.sockets, &mut device.store()) && newly_touched {
            device.touched = false;
            self.touched.pop();
        }
    }

    #[inline]
    fn show_arrivals(
        &mut self,
        id: StreamId,
        bounds: ShowBounds,
        look: &mut impl FnMut(Payload<'_>) -> bool,
    ) -> Shown {
        let app = self.worker.shared.app.as_deref();
        let Some((vm, flow)) = app.and_then(|app| {
            let (pool, flow) = app.sockets.drained_flow(id)?;
            Some((app.device_of(pool)?, flow))
        }) else {
            return Shown::default();
        };
        // Packets of other kinds or connections are handled too.
        let show = |half: &mut HostHalf<'_>| half.show(flow, bounds, look);
        self.with_half_if(vm, Device::has_arrivals, show)
            .unwrap_or_default()
    }

    #[inline]
    fn lease_next(&mut self, id: StreamId) -> Result<LeaseParts, NoLease> {
        let app = self.app().ok_or(NoLease::Empty)?;
        let conn = app.sockets.get(id).ok_or(NoLease::Empty)?;
        let (unread, flow) = (conn.has_unread(), conn.drained_flow());
        let may_lease = |device: &mut Device| unread || device.has_arrivals();
        let lease = |half: &mut HostHalf<'_>| half.lease(id, flow);
        let vm = app.device_of(conn.pool);
        let leased = vm.and_then(|vm| self.with_half_if(vm, may_lease, lease));
        leased.unwrap_or_else(|| {
            // Nothing has arrived, or the device is removed, and only copies are left.
            let sockets = self.sockets_mut().ok_or(NoLease::Empty)?;
            sockets.lease(id, &mut QueueStore::default())
        })
    }

    /// Updates whether replaced memory that leases keep mapped permits further leases in place.
    #[inline]
    fn prepare_lease(&mut self, id: StreamId) {
        if let Some(vm) = self.device_of(id)
            && let (Some(device), mut cx) = self.worker.lend_late(vm, self.now)
        {
            device.half(&mut cx).old_memory_fits();
        }
    }

    fn flow(&self, id: StreamId) -> Option<(&Shard, FlowId)> {
        let (vm, flow) = self.flow_of(id)?;
        Some((self.worker.devices.get(vm)?.shard(), flow))
    }

    fn with_flow<T>(
        &mut self,
        id: StreamId,
        act: impl FnOnce(&mut Shard, FlowId) -> T,
    ) -> Option<T> {
        let (vm, flow) = self.flow_of(id)?;
        let done = act(self.worker.devices.get_mut(vm)?.shard_mut(), flow);
        self.mark_changed(vm);
        Some(done)
    }

    #[inline]
    fn inboxes(&self) -> Option<&Inboxes> {
        self.app().map(|app| &app.inboxes)
    }

    #[inline]
    fn with_inboxes<T>(
        &mut self,
        act: impl FnOnce(&mut Inboxes, &mut Sockets<HostToken>, &mut AllStores<'_>) -> T,
    ) -> Option<T> {
        let Worker {
            devices, shared, ..
        } = &mut self.worker;
        let App {
            inboxes,
            sockets,
            pools,
            ..
        } = shared.app.as_deref_mut()?;
        let mut store = AllStores {
            devices,
            pools,
            touched: &mut self.touched,
        };
        Some(act(inboxes, sockets, &mut store))
    }

    fn show_datagram(&mut self, id: DatagramId, look: &mut dyn FnMut(Address, Payload<'_>, bool)) {
        let trusts = self.trust_processes;
        // Round-robin over the devices.
        for _ in 0..self.worker.devices.slots() {
            if self.next_datagram >= self.worker.devices.slots() {
                self.next_datagram = 0;
            }
            let vm = self.worker.devices.at_slot(self.next_datagram);
            let has_arrivals = |vm: &u32| {
                let device = self.worker.devices.get_mut(*vm);
                device.is_some_and(|device| device.has_arrivals())
            };
            let Some(vm) = vm.filter(has_arrivals) else {
                self.next_datagram += 1;
                continue;
            };
            // Before the call, because `look` may panic.
            self.mark_changed(vm);
            let (device, mut cx) = self.worker.lend_late(vm, self.now);
            let shown = device.is_some_and(|device| {
                let trusted = trusts && device.driver == DriverKind::Process;
                let mut look = |source, payload: Payload<'_>| look(source, payload, trusted);
                device.half(&mut cx).show_datagram(id, &mut look)
            });
            if cx.clock.is_none() {
                // Packets of other kinds were handled too and may have set timers.
                self.worker.activate(vm);
            }
            if shown {
                return;
            }
            self.next_datagram += 1;
        }
    }

    fn take_in_datagrams(&mut self, _: DatagramId) {
        if self.activate_ready_devices() {
            self.now = self.worker.clock().now();
            self.worker.turn_devices(self.now);
        }
    }
}

impl SendAccess for HostBackend {
    type Half<'a> = HostHalf<'a>;

    #[inline]
    fn half_of_pool(&self, pool: u32) -> Option<u32> {
        self.app()?.device_of(pool)
    }

    #[inline]
    fn with_half<T>(&mut self, half: u32, act: impl FnOnce(&mut Self::Half<'_>) -> T) -> Option<T> {
        self.with_half_if(half, |_| true, act)
    }

    fn look_at_half<T>(
        &mut self,
        half: u32,
        act: impl FnOnce(&mut Self::Half<'_>) -> T,
    ) -> Option<T> {
        let (device, mut cx) = self.worker.lend(half, self.now);
        let mut half = device?.half(&mut cx);
        Some(act(&mut half))
    }

    #[inline(always)] // every packet
    fn send_packet(
        &mut self,
        half: u32,
        publish: Publish,
        packet: WholePacket,
        fill: impl FnOnce(GuestSlice<'_>),
    ) -> bool {
        let (Some(device), mut cx) = self.worker.lend_late(half, self.now) else {
            return false;
        };
        if !device.half(&mut cx).send_whole(packet, fill) {
            return false;
        }
        match publish {
            Publish::Now if device.touched => self.flush_changed(),
            Publish::Now => device.half(&mut cx).publish_sent(),
            Publish::Later if device.touched => {}
            Publish::Later => {
                device.touched = true;
                self.touched.push(half);
            }
        }
        true
    }

    fn outgoing(&self, half: u32) -> Option<&VecDeque<Outgoing>> {
        Some(self.worker.devices.get(half)?.outgoing())
    }

    #[inline]
    fn loan_at(&self, index: u32) -> Option<(LoanOf, u32)> {
        let loan = self.app()?.loans.get(index)?;
        Some((loan.of, loan.half))
    }

    fn drop_loan(&mut self, index: u32) {
        let Some((_, vm)) = self.loan_at(index) else {
            return;
        };
        if self.with_half(vm, |half| half.drop_loan(index)).is_none()
            && let Some(app) = self.worker.shared.app.as_deref_mut()
        {
            app.forget_loan(index);
        }
    }

    fn flush_sent(&mut self) {
        self.flush_changed();
    }
}
