//! The backend of an embedding program: a worker with its devices, driven by the program's threads.
//! The program's sockets are peers of the guests' connections.
//!
//! Most calls affect one device: they find it by the pool of the connection's buffers and act on
//! its queues immediately; [`HostBackend::flush`] or the next turn makes the results visible to the
//! guest. `calls` has those calls, `messages` the ones on whole messages, `datagrams` the ones of
//! datagram sockets; `start` makes the devices, and `stores` finds the device of a held buffer.
//! This file has the turn of the backend.
//!
//! # Invariants
//!
//! - A turn without work reads each queue's index and makes no system call.
//! - Descriptors are polled every [`IDLE_CHECKS`] turns, and every [`POLL_INTERVAL`] while host
//!   sockets are bridged.
//! - A turn reads the clock once; the check for work does not read it.

mod access;
mod calls;
mod datagrams;
mod start;
mod stores;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::vsock::{ConnectError, FlowId};
use zerosock_proto::{Address, Instant, Port};

use crate::control::ControlPlane;
use crate::device::half::DeviceHalf;
use crate::device::placing::SPARE_PORTS;
use crate::device::state::app::QueueStore;
use crate::device::state::program::App;
use crate::device::{DriverKind, Worker};
use crate::fault::Fault;
use crate::table::calls::TableAccess;
use crate::table::leases::Leases;
use crate::table::over::EndpointEnded;
use crate::table::sockets::{Sockets, StreamId};
pub(crate) use start::HostConfig;
use stores::AllStores;
use zerosock_virtio::outbox::DeviceAddr;

/// Checks without work until descriptors are polled: an event of a host socket, or a kick while
/// kicks are disabled, waits for microseconds at most.
const IDLE_CHECKS: u32 = 1024;
/// How often descriptors are polled while there is always work and host sockets are watched.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// See the [module](self).
pub(crate) struct HostBackend {
    /// Dropped before `control_plane`: the control thread waits for its answers.
    worker: Worker,
    leases: Arc<Leases>,
    /// Devices with changes that the guest has not been shown.
    touched: Vec<u32>,
    /// The time of the last turn that read the clock.
    now: Instant,
    /// Checks for work since descriptors were last polled.
    checks: u32,
    next_poll: Instant,
    /// Whether host sockets are watched.
    watches_host_sockets: bool,
    /// No device had a turn since kicks were enabled.
    armed: bool,
    /// Number of devices that had reached their receive limits when kicks were enabled.
    full_devices: usize,
    trust_processes: bool,
    /// The slot where the next search for a datagram begins.
    next_datagram: usize,
    control_plane: ControlPlane,
}

/// A device for one call.
type HostHalf<'a> = DeviceHalf<'a, 'a>;

impl HostBackend {
    #[inline]
    fn app(&self) -> Option<&App> {
        self.worker.shared.app.as_deref()
    }

    /// Whether a pool belongs to an attached process.
    fn is_process(&self, pool: u32) -> bool {
        let vm = self.app().and_then(|app| app.device_of(pool));
        let device = vm.and_then(|vm| self.worker.devices.get(vm));
        device.is_some_and(|device| device.driver == DriverKind::Process)
    }

    /// Records that a device has changes to show to its guest.
    #[inline]
    fn mark_changed(&mut self, vm: u32) {
        if let Some(device) = self.worker.devices.get_mut(vm)
            && !std::mem::replace(&mut device.touched, true)
        {
            self.touched.push(vm);
        }
    }

    /// As `mark_changed`, and activates the device.
    fn mark_ready(&mut self, vm: u32) {
        self.mark_changed(vm);
        self.worker.activate(vm);
    }

    /// The device of a connection.
    #[inline]
    fn device_of(&self, id: StreamId) -> Option<u32> {
        let app = self.app()?;
        app.device_of(app.sockets.get(id)?.pool)
    }

    /// The device and the flow of a connection, if it has both.
    #[inline]
    fn flow_of(&self, id: StreamId) -> Option<(u32, FlowId)> {
        let app = self.app()?;
        let conn = app.sockets.get(id)?;
        Some((app.device_of(conn.pool)?, conn.flow?))
    }

    /// Activates the devices that have work in their queues. Returns whether there are any.
    #[inline]
    fn activate_ready_devices(&mut self) -> bool {
        self.worker.activate_where(|device, shared| {
            let app = shared.app.as_deref();
            app.is_some_and(|app| device.has_ring_work(app))
        })
    }

    /// Makes queued results visible to the guests.
    #[inline]
    fn flush_changed(&mut self) {
        self.send_flow_control();
        while let Some(vm) = self.touched.pop() {
            self.flush_device(vm);
        }
    }

    #[inline]
    fn flush_device(&mut self, vm: u32) {
        let (device, mut cx) = self.worker.lend_late(vm, self.now);
        if let Some(device) = device {
            device.touched = false;
            if device.half(&mut cx).flush() || cx.clock.is_none() {
                // The device may have a timer, which its turn registers.
                self.worker.activate(vm);
            }
        }
    }

    fn run_turn(&mut self, any_ready: bool) -> Result<bool, EndpointEnded> {
        let mut busy = any_ready;
        if self.worker.has_messages() {
            busy = true;
            if !self.worker.take_messages() {
                return Err(EndpointEnded::new(
                    Fault::System,
                    "the devices were told to end",
                ));
            }
        }
        self.now = self.worker.clock().now();
        if self.checks >= IDLE_CHECKS || (self.watches_host_sockets && self.now >= self.next_poll) {
            busy |= self
                .poll_events()
                .map_err(|error| EndpointEnded::new(Fault::System, error))?;
        }
        let now = self.now;
        self.worker.run_deadlines(now);
        self.handle_hold_timeouts(now);
        self.end_blocks(now);
        // A device that handles packets has disabled kicks.
        self.armed &= self.worker.is_idle();
        self.worker.turn_devices(now);
        if self.sockets().is_some_and(Sockets::is_over_copy_limit) {
            self.reset_overfull();
        }
        self.flush_changed();
        Ok(busy)
    }

    /// Polls descriptors without waiting. Returns whether there were events.
    fn poll_events(&mut self) -> io::Result<bool> {
        let (now, any) = self.worker.poll_events(Some(Duration::ZERO))?;
        self.note_poll(now);
        Ok(any)
    }

    /// Records that descriptors were polled.
    fn note_poll(&mut self, now: Instant) {
        self.checks = 0;
        self.now = now;
        self.next_poll = now + POLL_INTERVAL;
        let mut devices = self.worker.devices.iter_mut();
        self.watches_host_sockets = devices.any(|(_, device)| device.watches_host());
    }

    /// Chooses the queue pair of device `vm` and the local port of a new connection. All queue
    /// pairs are on this worker, so the check for duplicates covers all of them.
    fn place_connection(
        &self,
        vm: u32,
        from: Port,
        to: Address,
    ) -> Result<(u32, Port), ConnectError> {
        let devices = &self.worker.devices;
        let device = devices.get(vm).ok_or(ConnectError::Unreachable)?;
        let queue_pairs = device.queue_pair_addrs();
        if queue_pairs.len() == 1 {
            return Ok((vm, from));
        }
        for _ in 0..SPARE_PORTS {
            let (queue_pair, port) = device.queue_pair_of_app(from, to);
            let is_taken = |queue_pair: &DeviceAddr| {
                let device = devices.get(queue_pair.number);
                device.is_some_and(|device| device.is_connected(port, to))
            };
            if !queue_pairs.iter().any(is_taken) {
                return Ok((queue_pair.number, port));
            }
            if from != Port::ANY {
                break;
            }
        }
        Err(ConnectError::InUse)
    }

    /// Copies out buffers that were held for too long.
    fn handle_hold_timeouts(&mut self, now: Instant) {
        let Worker {
            devices, shared, ..
        } = &mut self.worker;
        let Some(App { sockets, pools, .. }) = shared.app.as_deref_mut() else {
            return;
        };
        if sockets.next_timeout().is_some_and(|at| at <= now) {
            let mut store = AllStores {
                devices,
                pools,
                touched: &mut self.touched,
            };
            sockets.handle_timeout(now, &mut store);
        }
    }

    /// Resets the connections with the most unread copies, because the limit is exceeded.
    #[cold]
    fn reset_overfull(&mut self) {
        let app = self.worker.shared.app.as_deref_mut();
        let overfull = app.map(|app| app.sockets.connections_to_shed());
        for id in overfull.into_iter().flatten() {
            let Some(vm) = self.device_of(id) else {
                // The device is removed; only copies are left.
                if let Some(app) = self.worker.shared.app.as_deref_mut() {
                    app.sockets.mark_reset(id, &mut QueueStore::default());
                }
                continue;
            };
            let now = self.now;
            let (device, mut cx) = self.worker.lend(vm, now);
            if let Some(device) = device {
                device.half(&mut cx).reset_unread(id);
            }
            self.mark_ready(vm);
        }
    }

    /// Closes or resets a connection and removes it.
    fn close_connection(&mut self, id: StreamId, reset: bool) {
        if let Some((vm, flow)) = self.flow_of(id) {
            let now = self.worker.clock().now();
            let (device, mut cx) = self.worker.lend(vm, now);
            if let Some(device) = device {
                device.half(&mut cx).close(flow, reset);
            }
            self.mark_ready(vm);
        }
        self.with_received(id, |sockets, store| {
            sockets.remove(id, store);
            true
        });
    }
}
impl Drop for HostBackend {
    /// Resets every connection, so that guests and host programs learn of the end immediately.
    fn drop(&mut self) {
        self.worker.end_devices();
    }
}
