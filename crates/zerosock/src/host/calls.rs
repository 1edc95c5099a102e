//! The calls of a host's sockets. Each finds the device of its connection and acts on its queues
//! immediately.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant as StdInstant};

use zerosock_proto::vsock::{ConnectError, Directions, ListenError};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Port};

use super::stores::AllStores;
use super::{HostBackend, IDLE_CHECKS};
use crate::device::Worker;
use crate::device::state::program::App;
use crate::table::backend::{Backend, EndpointStats, ReadySource};
use crate::table::calls::TableAccess;
use crate::table::datagrams::DatagramBackend;
use crate::table::leases::Leases;
use crate::table::over::EndpointEnded;
use crate::table::sending::SendAccess;
use crate::table::sockets::{Copied, Sockets, StreamId};
use zerosock_virtio::deadline::earlier;
use zerosock_virtio::poller::Events;

impl Backend for HostBackend {
    fn lease_table(&self) -> Arc<Leases> {
        self.leases.clone()
    }

    #[inline]
    fn pending(&mut self) -> bool {
        self.checks = self.checks.saturating_add(1);
        self.checks >= IDLE_CHECKS
            || !self.touched.is_empty()
            || self.worker.has_messages()
            || !self.worker.is_idle()
            || self.activate_ready_devices()
    }

    #[inline]
    fn drive(&mut self) -> Result<bool, EndpointEnded> {
        self.checks = self.checks.saturating_add(1);
        let any_ready = self.activate_ready_devices();
        self.run_turn(any_ready)
    }

    fn flush(&mut self) {
        self.flush_changed();
    }

    fn flush_before_spin(&mut self) {
        self.flush_changed();
    }

    #[inline]
    fn flush_after_read(&mut self) {
        self.send_flow_control();
        let mut at = 0;
        while let Some(&vm) = self.touched.get(at) {
            let Worker {
                devices, shared, ..
            } = &mut self.worker;
            if let (Some(device), Some(app)) = (devices.get_mut(vm), shared.app.as_deref())
                && !device.is_awaited(app)
            {
                at += 1;
                continue;
            }
            self.touched.swap_remove(at);
            self.flush_device(vm);
        }
    }

    fn arm(&mut self) -> bool {
        self.flush_changed();
        // The mailbox was emptied before, so a message sent after this check wakes the poller.
        if self.worker.has_messages() || !self.worker.is_idle() {
            return true;
        }
        let Worker {
            devices, shared, ..
        } = &mut self.worker;
        let Some(app) = shared.app.as_deref() else {
            return false;
        };
        let mut more = false;
        self.full_devices = 0;
        for (_, device) in devices.iter_mut() {
            self.full_devices += usize::from(device.is_full(app));
            self.watches_host_sockets |= device.watches_host();
            more |= device.arm(app);
        }
        self.armed = !more;
        more
    }

    fn is_stale(&self) -> bool {
        let devices = &self.worker.devices;
        let full = |app: &App| {
            devices
                .iter()
                .filter(|(_, device)| device.is_full(app))
                .count()
        };
        !self.armed || (self.full_devices > 0 && self.app().map_or(0, full) < self.full_devices)
    }

    fn disarm(&mut self) {
        // The next turn of each device disables kicks.
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.worker.as_fd()
    }

    fn reuses_names(&self) -> bool {
        self.watches_host_sockets
    }

    fn handle_events(&mut self, events: &Events) {
        let now = self.worker.handle_events(events);
        self.note_poll(now);
    }

    fn next_ready(&mut self) -> Option<ReadySource> {
        let app = self.worker.shared.app.as_deref_mut()?;
        if let Some(port) = app.listeners.next_port() {
            return Some(ReadySource::Port(port));
        }
        if let Some(id) = app.sockets.next_ready() {
            return Some(ReadySource::Conn(id));
        }
        app.inboxes.next_ready().map(ReadySource::Datagram)
    }

    fn next_timeout(&self) -> Option<StdInstant> {
        if !self.worker.is_idle() {
            return Some(StdInstant::now());
        }
        let held = self.sockets().and_then(Sockets::next_timeout);
        let streams = earlier(self.worker.next_deadline(), held);
        let datagrams = self.app().and_then(|app| app.inboxes.table.poll_timeout());
        let at = earlier(streams, datagrams)?;
        Some(self.worker.clock().at(at))
    }

    fn connect(
        &mut self,
        from: Port,
        to: Address,
        socket_type: SocketType,
    ) -> Result<StreamId, ConnectError> {
        let device = self.worker.shared.routes.device(to.cid);
        let vm = device.ok_or(ConnectError::Unreachable)?.number;
        if self.app().is_some_and(|app| app.listeners.contains(from)) {
            return Err(ConnectError::InUse);
        }
        let (vm, from) = self.place_connection(vm, from, to)?;
        let now = self.worker.clock().now();
        let (device, mut cx) = self.worker.lend(vm, now);
        let device = device.ok_or(ConnectError::Unreachable)?;
        let id = device.half(&mut cx).connect(from, to, socket_type)?;
        self.mark_ready(vm);
        Ok(id)
    }

    fn listen(
        &mut self,
        port: Port,
        backlog: usize,
        socket_type: SocketType,
    ) -> Result<(), ListenError> {
        if port == Port::ANY {
            return Err(ListenError::AnyPort);
        }
        let app = self.worker.shared.app.as_deref_mut();
        if app.is_some_and(|app| app.listen(port, backlog, socket_type)) {
            Ok(())
        } else {
            Err(ListenError::InUse)
        }
    }

    fn unlisten(&mut self, port: Port) {
        let app = self.worker.shared.app.as_deref_mut();
        let waiting = app.map(|app| app.listeners.remove(port));
        for id in waiting.into_iter().flatten() {
            self.close_connection(id, true);
        }
    }

    fn bind(&mut self, port: Port) -> Result<Port, ListenError> {
        let app = self.worker.shared.app.as_deref_mut();
        let bound = app.and_then(|app| app.bind(port));
        bound.ok_or(ListenError::InUse)
    }

    fn unbind(&mut self, port: Port) {
        if let Some(app) = self.worker.shared.app.as_deref_mut() {
            app.unbind(port);
        }
    }

    fn set_accept_buffer(&mut self, port: Port, bytes: u32) {
        if let Some(app) = self.worker.shared.app.as_deref_mut() {
            app.listeners.set_buffer(port, bytes);
        }
    }

    fn accept(&mut self, port: Port) -> Option<StreamId> {
        let app = self.worker.shared.app.as_deref_mut()?;
        app.listeners.accept(port)
    }

    fn is_acceptable(&self, port: Port) -> bool {
        self.app()
            .is_some_and(|app| app.listeners.has_waiting(port))
    }

    fn shutdown(&mut self, id: StreamId, how: Directions) {
        let flow = self.flow_of(id);
        if how.receive {
            self.with_received(id, |sockets, store| {
                sockets.shutdown_recv(id, store);
                true
            });
        }
        let app = self.worker.shared.app.as_deref_mut();
        let Some(conn) = app.and_then(|app| app.sockets.get_mut(id)) else {
            return;
        };
        conn.send_shutdown |= how.send;
        // Wakes threads that wait for room: they find the connection shut down.
        if let Some(app) = self.worker.shared.app.as_deref_mut() {
            app.sockets.set_ready(id);
        }
        if let Some((vm, flow)) = flow {
            let now = self.worker.clock().now();
            if let Some(device) = self.worker.devices.get_mut(vm) {
                device.app_shutdown(flow, how, now);
            }
            self.mark_ready(vm);
        }
    }

    fn close(&mut self, id: StreamId) {
        self.close_connection(id, false);
    }

    fn abort(&mut self, id: StreamId) {
        self.close_connection(id, true);
    }

    fn queue_pair(&self, id: StreamId) -> u16 {
        let vm = self.device_of(id);
        let device = vm.and_then(|vm| self.worker.devices.get(vm));
        device.map_or(0, |device| device.pair())
    }

    fn set_connect_timeout(&mut self, id: StreamId, timeout: Duration) {
        let now = self.worker.clock().now();
        self.with_flow(id, |shard, flow| {
            shard.set_connect_timeout(now, flow, timeout)
        });
        // The device has another timer, which its turn registers.
        if let Some(vm) = self.device_of(id) {
            self.worker.activate(vm);
        }
    }

    fn copy_of(&self, index: u32) -> Option<Copied> {
        let app = self.app()?;
        let copy = app.sockets.copy_of(index);
        copy.or_else(|| app.loans.get(index)?.copy.clone())
    }

    #[inline]
    fn handle_dropped(&mut self, index: u32) {
        let Worker {
            devices, shared, ..
        } = &mut self.worker;
        let Some(app) = shared.app.as_deref_mut() else {
            return;
        };
        let vm = app.sockets.pool_of_lease(index);
        let vm = vm.and_then(|pool| app.device_of(pool));
        if let Some((vm, device)) = vm.and_then(|vm| Some((vm, devices.get_mut(vm)?))) {
            if !std::mem::replace(&mut device.touched, true) {
                self.touched.push(vm);
            }
            app.sockets.end_lease(index, &mut device.store());
            return;
        }
        // The recheck index, a loan, or a lease of a device that was removed.
        let mut store = AllStores {
            devices,
            pools: &app.pools,
            touched: &mut self.touched,
        };
        if app.sockets.end_lease(index, &mut store) {
            return;
        }
        self.drop_loan(index);
    }

    fn stats(&self) -> EndpointStats {
        let app = self.app();
        app.map_or_else(EndpointStats::default, |app| {
            EndpointStats::new(&app.tally, app.sockets.counted())
        })
    }

    fn datagrams(&mut self) -> Option<&mut dyn DatagramBackend> {
        Some(self)
    }
}
