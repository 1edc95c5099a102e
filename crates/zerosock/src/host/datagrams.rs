//! The datagram sockets of a host: CID 2 to every device. Each call finds the device of the
//! destination, or that of a received datagram, and acts on its queues immediately.

use zerosock_proto::vsock::datagram::{
    BindError, DatagramDrops, DatagramId, DatagramLimits, DatagramStats,
};
use zerosock_proto::{Address, Cid, Instant, Port};

use super::HostBackend;
use super::stores::AllStores;
use crate::device::Worker;
use crate::device::datagrams::NotPut;
use crate::device::state::loans::LoanOf;
use crate::device::state::program::{App, HostToken};
use crate::table::datagrams::{DatagramBackend, DatagramFault};
use crate::table::inboxes::{Inboxes, LeasedDatagram, ReceivedDatagram};
use crate::table::sockets::Sockets;
use crate::table::transfers::{LoanParts, Payload, RecvFault};
use zerosock_virtio::device::WorkerDevice;

impl HostBackend {
    /// Calls `act` with the inboxes, the sockets and the buffers of all devices.
    #[inline]
    fn with_inboxes<T>(
        &mut self,
        act: impl FnOnce(&mut Inboxes, &mut Sockets<HostToken>, &mut AllStores<'_>) -> Option<T>,
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
        act(inboxes, sockets, &mut store)
    }

    /// Checks whether a datagram may be sent to `to`. Returns the source address and the device.
    #[inline]
    fn may_send_datagram(
        &mut self,
        id: DatagramId,
        to: Address,
        len: usize,
    ) -> Result<(Address, u32), DatagramFault> {
        let routes = &self.worker.shared.routes;
        let vm = match routes.device(to.cid) {
            Some(device) if routes.admit(Cid::HOST, to).is_ok() => device.number,
            _ => return Err(DatagramFault::Unreachable),
        };
        let device = self.worker.devices.get_mut(vm);
        match device.and_then(|device| device.takes_datagrams()) {
            Some(true) => {}
            Some(false) => return Err(DatagramFault::PeerUnsupported),
            None => return Err(DatagramFault::Unreachable),
        }
        let clock = self.worker.clock();
        let app = self.worker.shared.app.as_deref_mut();
        let app = app.ok_or(DatagramFault::Unknown)?;
        let from = app.inboxes.table.may_send(id, to, len, || clock.now())?;
        Ok((from, vm))
    }

    /// Registers a socket that found no buffer, to be notified when there is one.
    #[cold]
    fn wait_for_datagram_room(&mut self, id: DatagramId, vm: u32) -> DatagramFault {
        // The device may have a timer, which its turn registers.
        self.worker.activate(vm);
        if let Some(app) = self.worker.shared.app.as_deref_mut() {
            app.inboxes.table.wait_for_buffer(id);
        }
        DatagramFault::WouldBlock
    }

    fn count_sent(&mut self, id: DatagramId, len: usize) {
        if let Some(app) = self.worker.shared.app.as_deref_mut() {
            // The datagram is in the receiver's buffers already, so nothing is in flight.
            app.inboxes.table.sent(id, len as u32, false);
        }
    }

    /// Sends due flow-control messages of datagram sockets.
    #[inline]
    pub(super) fn send_flow_control(&mut self) {
        if self
            .app()
            .is_some_and(|app| app.inboxes.table.has_control())
        {
            self.put_flow_control();
        }
    }

    #[cold]
    fn put_flow_control(&mut self) {
        let now = self.worker.clock().now();
        loop {
            let app = self.worker.shared.app.as_deref_mut();
            let poll = |app: &mut App| app.inboxes.table.poll_control(now, |_| true);
            let Some(message) = app.and_then(poll) else {
                return;
            };
            // The endpoint is gone and needs no message.
            let Some(device) = self.worker.shared.routes.device(message.dst.cid) else {
                continue;
            };
            let (device, mut cx) = self.worker.lend(device.number, now);
            let Some(device) = device else { continue };
            let vm = device.addr().number;
            if device.put_control(&message, &mut cx) {
                self.mark_changed(vm);
            } else if let Some(app) = self.worker.shared.app.as_deref_mut() {
                let same = |to: Address| to.cid == message.dst.cid;
                app.inboxes.table.retry_control(now, same);
            }
        }
    }

    /// Ends blocks that have expired, and repeats flow-control messages that are due.
    #[inline]
    pub(super) fn end_blocks(&mut self, now: Instant) {
        if let Some(app) = self.worker.shared.app.as_deref_mut()
            && app.inboxes.table.poll_timeout().is_some_and(|at| at <= now)
        {
            app.inboxes.table.handle_timeout(now);
            self.put_flow_control();
        }
    }

    /// Passes the next datagram to `look` directly from the queue, for a socket without held
    /// datagrams.
    fn show_datagram(
        &mut self,
        id: DatagramId,
        look: &mut dyn FnMut(Address, Payload<'_>, bool),
    ) -> bool {
        let trusts = self.trust_processes;
        // Round-robin over the devices.
        for _ in 0..self.worker.devices.slots() {
            if self.next_datagram >= self.worker.devices.slots() {
                self.next_datagram = 0;
            }
            let vm = self.worker.devices.at_slot(self.next_datagram);
            let device = vm.and_then(|vm| Some((vm, self.worker.devices.get_mut(vm)?)));
            let Some((vm, _)) =
                device.and_then(|(vm, device)| device.has_arrivals().then_some((vm, ())))
            else {
                self.next_datagram += 1;
                continue;
            };
            // Before the call, because `look` may panic.
            self.mark_changed(vm);
            let (device, mut cx) = self.worker.lend_late(vm, self.now);
            let shown = device.is_some_and(|device| {
                let trusted = trusts && device.process;
                let mut look = |source, payload: Payload<'_>| look(source, payload, trusted);
                device.app_show_datagram(id, &mut look, &mut cx)
            });
            if cx.clock.is_none() {
                // Packets of other kinds were handled too and may have set timers.
                self.worker.activate(vm);
            }
            if shown {
                return true;
            }
            self.next_datagram += 1;
        }
        false
    }
}

impl DatagramBackend for HostBackend {
    fn bind(
        &mut self,
        port: Port,
        limits: DatagramLimits,
    ) -> Result<(DatagramId, Address), BindError> {
        let app = self
            .worker
            .shared
            .app
            .as_deref_mut()
            .ok_or(BindError::TooMany)?;
        let id = app.inboxes.table.bind(port, limits)?;
        app.inboxes.open(id);
        let local = app.inboxes.table.addresses(id).map(|(local, _)| local);
        Ok((id, local.unwrap_or(Address::new(Cid::HOST, port))))
    }

    fn close(&mut self, id: DatagramId) {
        self.with_inboxes(|inboxes, sockets, store| {
            inboxes.table.close(id);
            inboxes.close(id, sockets, store);
            Some(())
        });
    }

    fn connect(&mut self, id: DatagramId, peer: Option<Address>) {
        if let Some(app) = self.worker.shared.app.as_deref_mut() {
            app.inboxes.table.connect(id, peer);
        }
    }

    fn limits(&self, id: DatagramId) -> Option<DatagramLimits> {
        self.app()?.inboxes.table.limits(id)
    }

    fn set_limits(&mut self, id: DatagramId, limits: DatagramLimits) {
        if let Some(app) = self.worker.shared.app.as_deref_mut() {
            app.inboxes.table.set_limits(id, limits);
        }
    }

    #[inline]
    fn send(&mut self, id: DatagramId, to: Address, bytes: &[u8]) -> Result<(), DatagramFault> {
        let (from, vm) = self.may_send_datagram(id, to, bytes.len())?;
        let put = self.with_device(vm, |device, cx| {
            device.app_send_datagram(from, to, bytes, cx)
        });
        match put.ok_or(DatagramFault::Unreachable)? {
            Ok(()) => {
                self.count_sent(id, bytes.len());
                Ok(())
            }
            Err(NotPut::NoRoom) => Err(self.wait_for_datagram_room(id, vm)),
            Err(NotPut::TooLong | NotPut::NotReceived(_)) => {
                Err(DatagramFault::TooLong(bytes.len()))
            }
        }
    }

    fn loan(
        &mut self,
        id: DatagramId,
        to: Address,
        len: usize,
    ) -> Result<LoanParts, DatagramFault> {
        let (_, vm) = self.may_send_datagram(id, to, len)?;
        let parts = self
            .with_device(vm, |device, cx| device.app_loan_datagram(id, to, len, cx))
            .ok_or(DatagramFault::Unreachable)?;
        if matches!(parts, Err(DatagramFault::WouldBlock)) {
            self.wait_for_datagram_room(id, vm);
        }
        parts
    }

    fn send_loan(
        &mut self,
        index: u32,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<(), DatagramFault> {
        let loan = self.app().and_then(|app| app.loan_at(index));
        let Some((LoanOf::Datagram(id, to), vm)) = loan else {
            return Err(DatagramFault::Unknown);
        };
        let (from, vm) = match self.may_send_datagram(id, to, len) {
            // The CID now belongs to another device.
            Ok((_, other)) if other != vm => {
                self.drop_loan(index, vm);
                return Err(DatagramFault::Unreachable);
            }
            Ok(may) => may,
            Err(DatagramFault::WouldBlock) => return Err(DatagramFault::WouldBlock),
            Err(fault) => {
                self.drop_loan(index, vm);
                return Err(fault);
            }
        };
        let sent = self
            .with_device(vm, |device, cx| {
                device.app_send_datagram_loan(index, from, len, private, cx)
            })
            .ok_or(DatagramFault::Unreachable)?;
        match sent {
            Ok(()) => self.count_sent(id, len),
            Err(DatagramFault::WouldBlock) => {
                self.wait_for_datagram_room(id, vm);
            }
            Err(_) => {}
        }
        sent
    }

    fn may_send(&mut self, id: DatagramId, to: Option<Address>) -> bool {
        let Some(to) = to else {
            // Without a destination only the table could say that a send would block.
            return true;
        };
        match self.may_send_datagram(id, to, 0) {
            Ok((_, vm)) => {
                let device = self.worker.devices.get_mut(vm);
                let room = device.is_none_or(|device| {
                    let room = device.has_datagram_room();
                    if !room {
                        device.want_datagram_room();
                    }
                    room
                });
                if !room {
                    self.wait_for_datagram_room(id, vm);
                }
                room
            }
            Err(fault) => fault != DatagramFault::WouldBlock,
        }
    }

    #[inline]
    fn recv(&mut self, id: DatagramId, out: &mut [u8], peek: bool) -> Option<ReceivedDatagram> {
        let empty = self.app().is_some_and(|app| app.inboxes.is_empty(id));
        if empty && !peek {
            let mut got = None;
            self.show_datagram(id, &mut |source, payload, _| {
                let copied = payload.copy_to(0, out);
                let len = payload.len();
                got = Some(ReceivedDatagram {
                    copied,
                    len,
                    source,
                });
            });
            if let (Some(got), Some(app)) = (got, self.worker.shared.app.as_deref_mut()) {
                app.sockets.count_read(got.len);
                return Some(got);
            }
        }
        self.with_inboxes(|inboxes, sockets, store| inboxes.read(id, out, peek, sockets, store))
    }

    fn lease(&mut self, id: DatagramId) -> Result<LeasedDatagram, RecvFault> {
        if self.app().is_some_and(|app| app.inboxes.is_empty(id)) {
            // Moves queued datagrams to the inboxes.
            if self.activate_ready_devices() {
                let now = self.worker.clock().now();
                self.now = now;
                self.worker.turn_devices(now);
            }
        }
        let lease =
            self.with_inboxes(|inboxes, sockets, store| Some(inboxes.lease(id, sockets, store)));
        lease.unwrap_or(Err(RecvFault::Unknown))
    }

    fn trusts(&self, pool: Option<u32>) -> bool {
        // A copy is our own memory.
        pool.is_none_or(|pool| self.trust_processes && self.is_process(pool))
    }

    fn consume_in_place(
        &mut self,
        id: DatagramId,
        most: usize,
        look: &mut dyn FnMut(Address, Payload<'_>, bool) -> bool,
    ) -> usize {
        let mut seen = 0;
        while seen < most {
            let mut go_on = None;
            if self.app().is_some_and(|app| app.inboxes.is_empty(id)) {
                let mut bytes = 0;
                self.show_datagram(id, &mut |source, payload, trusted| {
                    bytes = payload.len();
                    go_on = Some(look(source, payload, trusted));
                });
                if let Some(app) = self.worker.shared.app.as_deref_mut() {
                    app.sockets.count_shown(bytes);
                }
            }
            if go_on.is_none() {
                let app = self.app();
                let pool = app.and_then(|app| app.inboxes.front_pool(id, &app.sockets));
                let trusted = self.trusts(pool);
                let mut look = |source, payload: Payload<'_>| look(source, payload, trusted);
                go_on = self.with_inboxes(|inboxes, sockets, store| {
                    inboxes.show(id, &mut look, sockets, store)
                });
            }
            match go_on {
                Some(true) => seen += 1,
                Some(false) => return seen + 1,
                None => break,
            }
        }
        seen
    }

    fn has_some(&self, id: DatagramId) -> bool {
        self.app().is_some_and(|app| !app.inboxes.is_empty(id))
    }

    fn stats(&self, id: DatagramId) -> Option<DatagramStats> {
        self.app()?.inboxes.table.stats(id)
    }

    fn drops(&self) -> DatagramDrops {
        self.app()
            .map(|app| app.inboxes.table.drops())
            .unwrap_or_default()
    }
}
