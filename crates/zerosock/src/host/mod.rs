//! The device half as the engine of an endpoint: a worker with its devices, driven by the threads
//! of the program that embeds them, which takes part in the guests' connections itself.
//!
//! Most calls touch one device: they find it by the pool of the connection's buffers and act on its
//! queues at once; [`HostEngine::flush`] and the next turn show the guest what came of it. `calls`
//! has those calls, `messages` what they do with whole messages, `start` makes the devices, `stores`
//! finds the home of what is held when it may be any of them; here is what a turn does.
//!
//! What must hold: a turn that finds nothing costs a look at each queue's index and no system call;
//! descriptors are looked at when something may be there (every so many turns, and often while
//! host sockets are joined); a clock is read once in a turn, and for no look.

mod calls;
mod datagrams;
mod messages;
mod start;
mod stores;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::vsock::{ConnectError, FlowError, FlowId, Shard};
use zerosock_proto::{Address, Instant, Port};

use crate::control::ControlPlane;
use crate::device::app_store::QueueStore;
use crate::device::placing::SPARE_PORTS;
use crate::device::program::{App, HostToken};
use crate::fault::Fault;
use crate::routing::DeviceAddr;
use crate::table::backend::{Payload, RecvFault, SendFault, ShowBounds, copy_shown};
use crate::table::leases::Leases;
use crate::table::over::EndpointOver;
use crate::table::sockets::{Sockets, StreamId, StreamState};
use crate::worker::Worker;
pub(crate) use start::HostConfig;
use stores::AllStores;

/// Looks for something to do until descriptors are looked at although nothing was found: a host
/// socket, or a kick that nobody asked for, waits for microseconds at most.
const IDLE_LOOKS: u32 = 1024;
/// How often descriptors are looked at while there is always something to do and host sockets are
/// watched.
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// See the module.
pub(crate) struct HostEngine {
    /// Dropped before `control_plane`, whose thread waits for answers to what it has asked.
    worker: Worker,
    words: Arc<Leases>,
    /// Devices that have something to show.
    touched: Vec<u32>,
    /// As of the last turn that read the clock.
    now: Instant,
    /// Looks since descriptors were last looked at.
    looks: u32,
    look_at: Instant,
    /// Host sockets may become readable.
    watches: bool,
    /// No device had a turn since the guests were asked for kicks.
    armed: bool,
    /// Devices of which nothing more could be taken in when the guests were asked for kicks.
    full: usize,
    trust_processes: bool,
    /// Where the next look for a datagram begins.
    next_datagram: usize,
    control_plane: ControlPlane,
}

impl HostEngine {
    #[inline]
    fn app(&self) -> Option<&App> {
        self.worker.app.as_deref()
    }

    #[inline]
    fn sockets(&self) -> Option<&Sockets<HostToken>> {
        self.app().map(|app| &app.sockets)
    }

    /// Whether a pool's buffers are those of a process that has attached.
    fn is_process(&self, pool: u32) -> bool {
        let vm = self.app().and_then(|app| app.device_of(pool));
        let device = vm.and_then(|vm| self.worker.devices.get(vm));
        device.is_some_and(|device| device.process)
    }

    /// Notes that a device has something to show.
    #[inline]
    fn touch(&mut self, vm: u32) {
        if let Some(device) = self.worker.devices.get_mut(vm)
            && !std::mem::replace(&mut device.touched, true)
        {
            self.touched.push(vm);
        }
    }

    /// As `touch`, and the device gets a turn.
    fn mark_ready(&mut self, vm: u32) {
        self.touch(vm);
        self.worker.activate(vm);
    }

    /// The device of a connection.
    #[inline]
    fn device_of(&self, id: StreamId) -> Option<u32> {
        let app = self.app()?;
        app.device_of(app.sockets.get(id)?.pool)
    }

    /// The device and the flow of a connection that has one.
    #[inline]
    fn flow_of(&self, id: StreamId) -> Option<(u32, FlowId)> {
        let app = self.app()?;
        let conn = app.sockets.get(id)?;
        Some((app.device_of(conn.pool)?, conn.flow?))
    }

    /// Acts on what a connection has received. True from `act`: something was taken.
    #[inline]
    fn received(
        &mut self,
        id: StreamId,
        act: impl FnOnce(&mut Sockets<HostToken>, &mut QueueStore<'_>) -> bool,
    ) {
        let Some(app) = self.worker.app.as_deref_mut() else {
            return;
        };
        let Some(pool) = app.sockets.get(id).map(|conn| conn.pool) else {
            return;
        };
        let vm = app.device_of(pool);
        let Some((vm, device)) = vm.and_then(|vm| Some((vm, self.worker.devices.get_mut(vm)?)))
        else {
            // Its device is gone: what is left are copies.
            act(&mut app.sockets, &mut QueueStore::default());
            return;
        };
        // Noted beforehand: it may show bytes to somebody who panics.
        let ready_flags = !std::mem::replace(&mut device.touched, true);
        if ready_flags {
            self.touched.push(vm);
        }
        if !act(&mut app.sockets, &mut device.store()) && ready_flags {
            device.touched = false;
            self.touched.pop();
        }
    }

    /// Shows packets of a connection of which nothing is held as they are taken in.
    #[inline]
    fn show_arrivals(
        &mut self,
        id: StreamId,
        bounds: ShowBounds,
        look: &mut dyn FnMut(Payload<'_>) -> bool,
    ) -> (usize, usize) {
        let app = self.worker.app.as_deref();
        let Some((vm, flow)) = app.and_then(|app| {
            let flow = app.sockets.drained_flow(id)?;
            Some((app.device_of(app.sockets.get(id)?.pool)?, flow))
        }) else {
            return (0, 0);
        };
        let device = self.worker.devices.get_mut(vm);
        if device.is_none_or(|device| !device.has_arrivals()) {
            return (0, 0);
        }
        // Beforehand: who looks may panic.
        self.touch(vm);
        let (device, mut cx) = self.worker.lend_late(vm, self.now);
        let shown = device.map_or((0, 0), |device| {
            device.app_show(flow, bounds, look, &mut cx)
        });
        if cx.clock.is_none() {
            // There was more than plain packets of this connection: timers may have been set.
            self.worker.activate(vm);
        }
        shown
    }

    /// As [`show_arrivals`](Self::show_arrivals), copying to `out`.
    #[inline]
    fn read_arrivals(&mut self, id: StreamId, out: &mut [u8]) -> usize {
        let show = |bounds, copy: &mut dyn FnMut(Payload<'_>) -> bool| {
            self.show_arrivals(id, bounds, copy)
        };
        let bytes = copy_shown(out, show);
        if let Some(app) = self.worker.app.as_deref_mut() {
            app.sockets.count_read(bytes);
        }
        bytes
    }

    /// Copies to `out` what is held of a connection.
    #[inline]
    fn read_held(&mut self, id: StreamId, out: &mut [u8], peek: bool) -> usize {
        let mut got = 0;
        self.received(id, |sockets, store| {
            got = sockets.read(id, out, peek, store);
            got > 0 && !peek
        });
        got
    }

    /// Notes whether old memory that leases keep alive allows more of them in place.
    #[inline]
    fn weigh_old(&mut self, id: StreamId) {
        if let Some(vm) = self.device_of(id) {
            let now = self.now;
            let (device, mut cx) = self.worker.lend(vm, now);
            if let Some(device) = device {
                device.old_memory_fits(&mut cx);
            }
        }
    }

    /// Why nothing was received: `Ok` is the end.
    fn why_empty(&self, id: StreamId) -> Result<(), RecvFault> {
        let conn = self.sockets().and_then(|sockets| sockets.get(id));
        conn.ok_or(RecvFault::Unknown)?.why_empty()
    }

    /// The device and the flow of a connection that may send.
    #[inline]
    fn sender(&self, id: StreamId) -> Result<(u32, FlowId), SendFault> {
        let app = self.app().ok_or(SendFault::Unknown)?;
        let conn = app.sockets.get(id).ok_or(SendFault::Unknown)?;
        if conn.send_shutdown || conn.peer_recv_shutdown {
            return Err(SendFault::ShutDown);
        }
        match (conn.state, conn.flow) {
            (StreamState::Connecting, _) => Err(SendFault::NotConnected),
            (StreamState::Finished, _) => Err(SendFault::ShutDown),
            (StreamState::Connected, Some(flow)) => {
                let vm = app.device_of(conn.pool).ok_or(SendFault::Reset)?;
                Ok((vm, flow))
            }
            _ => Err(SendFault::Reset),
        }
    }

    /// Acts on the flow of a connection, if it has one; what comes of it waits for the next flush.
    fn tune(
        &mut self,
        id: StreamId,
        act: impl FnOnce(&mut Shard, FlowId) -> Result<(), FlowError>,
    ) {
        let Some((vm, flow)) = self.flow_of(id) else {
            return;
        };
        if let Some(device) = self.worker.devices.get_mut(vm) {
            device.app_tune(flow, act);
        }
        self.touch(vm);
    }

    /// The time for an act on a device: read from the clock only if the act may set timers.
    #[inline]
    fn time_for(&mut self, vm: u32) -> Instant {
        let words = self.worker.app.as_deref();
        let words = words.is_some_and(|app| app.inboxes.table.has_control());
        let device = self.worker.devices.get_mut(vm);
        if words || device.is_some_and(|device| device.has_control()) {
            self.now = self.worker.clock.now();
            self.worker.activate(vm);
        }
        self.now
    }

    /// Makes the devices active of which a look says that they have something.
    #[inline]
    fn find_news(&mut self) -> bool {
        let Worker {
            devices,
            app,
            active,
            ..
        } = &mut self.worker;
        let Some(app) = app.as_deref() else {
            return false;
        };
        let mut any = false;
        for (vm, device) in devices.iter_mut() {
            if device.has_ring_work(app) {
                any = true;
                if !std::mem::replace(&mut device.active, true) {
                    active.push_back(vm);
                }
            }
        }
        any
    }

    /// Shows what is queued.
    #[inline]
    fn show(&mut self) {
        self.send_flow_control();
        while let Some(vm) = self.touched.pop() {
            self.show_one(vm);
        }
    }

    #[inline]
    fn show_one(&mut self, vm: u32) {
        let now = self.time_for(vm);
        let (device, mut cx) = self.worker.lend(vm, now);
        if let Some(device) = device {
            device.touched = false;
            if device.app_flush(&mut cx) {
                // There may be a timer to note.
                self.worker.activate(vm);
            }
        }
    }

    fn work(&mut self, ready_flags: bool) -> Result<bool, EndpointOver> {
        let mut busy = ready_flags;
        if self.worker.has_messages() {
            busy = true;
            if !self.worker.take_messages() {
                return Err(EndpointOver::new(
                    Fault::System,
                    "the devices were told to end",
                ));
            }
        }
        self.now = self.worker.clock.now();
        if self.looks >= IDLE_LOOKS || (self.watches && self.now >= self.look_at) {
            busy |= self
                .look()
                .map_err(|error| EndpointOver::new(Fault::System, error))?;
        }
        let now = self.now;
        self.worker.fire(now);
        self.relieve(now);
        self.end_blocks(now);
        // A device that takes packets in asks for no kicks while it does so.
        self.armed &= self.worker.is_idle();
        self.worker.turn_devices(now);
        if self.sockets().is_some_and(Sockets::is_over_copy_limit) {
            self.shed();
        }
        self.show();
        Ok(busy)
    }

    /// Looks at descriptors without waiting.
    fn look(&mut self) -> io::Result<bool> {
        self.looks = 0;
        let (now, any) = self.worker.look(Some(Duration::ZERO))?;
        self.now = now;
        self.look_at = now + LOOK_EVERY;
        let mut devices = self.worker.devices.iter_mut();
        self.watches = devices.any(|(_, device)| device.watches_host());
        Ok(any)
    }

    /// The queue_pair of device `vm`'s where a connection begins that the program asks for, and the port
    /// that it is from. All of them are this worker's, so that what any of them has is seen.
    fn place(&self, vm: u32, from: Port, to: Address) -> Result<(u32, Port), ConnectError> {
        let devices = &self.worker.devices;
        let device = devices.get(vm).ok_or(ConnectError::Unreachable)?;
        let queue_pairs = device.queue_pair_addrs();
        if queue_pairs.len() == 1 {
            return Ok((vm, from));
        }
        for _ in 0..SPARE_PORTS {
            let (queue_pair, port) = device.queue_pair_of_app(from, to);
            let is_taken = |queue_pair: &DeviceAddr| {
                let device = devices.get(queue_pair.vm);
                device.is_some_and(|device| device.is_connected(port, to))
            };
            if !queue_pairs.iter().any(is_taken) {
                return Ok((queue_pair.vm, port));
            }
            if from != Port::ANY {
                break;
            }
        }
        Err(ConnectError::InUse)
    }

    /// Copies out what was held for too long.
    fn relieve(&mut self, now: Instant) {
        let Worker { devices, app, .. } = &mut self.worker;
        let Some(App { sockets, pools, .. }) = app.as_deref_mut() else {
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

    /// Resets the connections with most unread copies: there are too many of those.
    #[cold]
    fn shed(&mut self) {
        let app = self.worker.app.as_deref_mut();
        let overfull = app.map(|app| app.sockets.connections_to_shed());
        for id in overfull.into_iter().flatten() {
            let Some(vm) = self.device_of(id) else {
                // Its device is gone: what is left are copies.
                if let Some(app) = self.worker.app.as_deref_mut() {
                    app.sockets.mark_reset(id, &mut QueueStore::default());
                }
                continue;
            };
            let now = self.now;
            let (device, mut cx) = self.worker.lend(vm, now);
            if let Some(device) = device {
                device.app_reset_unread(id, &mut cx);
            }
            self.mark_ready(vm);
        }
    }

    /// Ends a connection from our side and forgets it.
    fn end(&mut self, id: StreamId, reset: bool) {
        if let Some((vm, flow)) = self.flow_of(id) {
            let now = self.worker.clock.now();
            let (device, mut cx) = self.worker.lend(vm, now);
            if let Some(device) = device {
                device.app_close(flow, reset, &mut cx);
            }
            self.mark_ready(vm);
        }
        self.received(id, |sockets, store| {
            sockets.remove(id, store);
            true
        });
    }
}
impl HostEngine {
    fn drop_loan(&mut self, index: u32, vm: u32) {
        let now = self.now;
        let (device, mut cx) = self.worker.lend(vm, now);
        match (device, cx.app.as_deref_mut()) {
            (Some(device), Some(_)) => device.app_drop_loan(index, &mut cx),
            (None, Some(app)) => app.forget_loan(index),
            (_, None) => {}
        }
        self.touch(vm);
    }
}

impl Drop for HostEngine {
    /// Every connection is reset, so that guests and host programs know at once.
    fn drop(&mut self) {
        let now = self.worker.clock.now();
        for vm in self.worker.devices.numbers() {
            let (device, mut cx) = self.worker.lend(vm, now);
            if let Some(device) = device {
                device.reset_connections(&mut cx);
            }
        }
    }
}
