//! Commands of the VMM, carried out between two turns of a device.
//!
//! # Invariants
//! - Before a queue's base is answered and before memory is replaced, no chain of it is in use.
//! - A pending command waits, and the queue with it, until the device has returned the buffers that
//!   the command needs ([`VirtioDevice::quiesce`]).
//! - A command waits at most a second for buffers whose return no event reports. After that it
//!   fails and the front-end is disconnected.
//! - A disconnect waits for no buffer: memory that is still read stays mapped, and chains that return
//!   to a stopped queue are dropped.
//! - Before a command that ends connections is answered, all of them have ended. A device may need
//!   several turns for it ([`VirtioDevice::reset_part`]); no other command is carried out meanwhile.

use std::sync::Arc;
use std::time::Duration;

use zerosock_ring::{DeviceQueue, LostChains, Memory};
use zerosock_vhost_user::session::F_LOG_ALL;
use zerosock_vhost_user::{DeviceCommand, Reply};

use crate::device::{Context, WorkerDevice};
use crate::poller::{EventKind, Interest, Token};
use crate::queues::{Logging, PendingCommand, QueueSet, QueueStart, Quiesced, Rings, Scope};
use crate::ring::Ring;

/// How often the device is queried for buffers whose return no event reports.
const RECHECK_INTERVAL: Duration = Duration::from_millis(1);
/// How long a command waits for them: longer than any copy takes, and shorter than the timeout of
/// any front-end.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(1);

/// A device with virtqueues. It answers commands by [`command`], and calls [`finish`] once in each
/// turn.
pub trait VirtioDevice: WorkerDevice {
    /// The device's rings.
    type Rings: Rings;

    /// The device's queues.
    fn queues(&mut self) -> &mut QueueSet<Self::Rings>;

    /// The driver has accepted these features; zero when the front-end has gone.
    fn set_features(&mut self, features: u64);

    /// The driver has changed the configuration space.
    fn set_config(&mut self, config: &[u8]) {
        let _ = config;
    }

    /// Queue `index` runs from now on.
    fn queue_started(&mut self, index: u16, started: QueueStarted, cx: &mut Context<'_, Self>) {
        let _ = (index, started, cx);
    }

    /// Sends a RARP broadcast with this MAC address.
    ///
    /// # Errors
    /// Why it was not sent.
    fn send_rarp(&mut self, mac: [u8; 6], cx: &mut Context<'_, Self>) -> Result<(), String> {
        let (_, _) = (mac, cx);
        Err("no network device".into())
    }

    /// A command needs buffers back: the device starts to return them.
    fn release(&mut self, scope: Scope, cx: &mut Context<'_, Self>) {
        let _ = (scope, cx);
    }

    /// Whether the buffers of `scope` have been returned. Called again until they are.
    fn quiesce(&mut self, scope: Scope, cx: &mut Context<'_, Self>) -> Quiesced;

    /// The pending command was answered.
    fn command_finished(&mut self) {}

    /// Ends a part of the driver's connections, in the budget of a turn. Returns true once none is left.
    /// [`finish`] calls it in each turn until then, and [`reset`](Self::reset) afterwards. Meanwhile the
    /// device takes no packet and begins no connection, and its turn returns true.
    fn reset_part(&mut self, stopped: bool, cx: &mut Context<'_, Self>) -> bool {
        let (_, _) = (stopped, cx);
        true
    }

    /// Forgets all that the driver knows: it has reset the device or rebooted. `stopped`: its
    /// queues stop too.
    fn reset(&mut self, stopped: bool, cx: &mut Context<'_, Self>);

    /// The connections of a driver with stopped queues have ended ([`forget`]): it has to be told if it
    /// goes on.
    fn forgotten(&mut self) {}

    /// Takes what the driver made available before the front-end disconnected, at most one queue
    /// size.
    fn receive_remaining(&mut self, cx: &mut Context<'_, Self>) {
        let _ = cx;
    }

    /// Another memory, or none, has replaced `old`.
    fn memory_replaced(&mut self, old: Option<Arc<Memory>>, cx: &mut Context<'_, Self>) {
        let _ = (old, cx);
    }
}

/// How a queue has started: see [`VirtioDevice::queue_started`].
#[derive(Clone, Copy, Debug)]
pub struct QueueStarted {
    /// It is the first queue of this front-end that continues at a base other than zero, and was not
    /// stopped here: its driver has used an earlier device.
    pub resumed: bool,
    /// The index of its first available entry.
    pub base: u16,
    /// Chains that a predecessor was killed with, which were returned to the driver unused.
    pub recovered: u16,
    /// The base that was answered when this device stopped it; `None`: this device has not run it before.
    pub stopped_at: Option<u16>,
}

/// Carries out `command`; answers through `reply`, possibly later.
pub fn command<D: VirtioDevice>(
    device: &mut D,
    command: DeviceCommand,
    reply: Reply,
    cx: &mut Context<'_, D>,
) {
    if let Some(PendingCommand::Disconnect { .. }) = device.queues().pending
        && !matches!(command, DeviceCommand::Disconnected)
    {
        return reply.failed("the device ends the connections of its driver");
    }
    if let Some(PendingCommand::Forget(next)) = &mut device.queues().pending
        && !matches!(command, DeviceCommand::Disconnected)
    {
        // The control thread sends no other before it has the answer.
        *next = Some(Box::new((command, reply)));
        return;
    }
    match command {
        DeviceCommand::Connected { link } => {
            let queues = device.queues();
            queues.link = Some(link);
            queues.has_resumed = false;
            reply.done();
        }
        // The rings get the ring features in their configuration.
        DeviceCommand::SetFeatures(features) => {
            let queues = device.queues();
            let logs = queues.set_logging(features & F_LOG_ALL != 0);
            // While a queue runs, nothing else has changed.
            if !logs || queues.rings.running().next().is_none() {
                device.set_features(features & !F_LOG_ALL);
            }
            reply.done();
        }
        DeviceCommand::SetLog(log) => {
            device.queues().set_log(log);
            reply.done();
        }
        DeviceCommand::SetUsedLog { index, guest_addr } => {
            if let Some(Some(ring)) = device.queues().rings.slot(index) {
                ring.queue.set_used_log(guest_addr);
            }
            reply.done();
        }
        DeviceCommand::SetConfig(config) => {
            device.set_config(&config);
            reply.done();
        }
        DeviceCommand::SetMemory(memory) => {
            begin(device, PendingCommand::Memory(memory, reply), cx);
        }
        DeviceCommand::StartQueue {
            index,
            config,
            kick,
            call,
            err,
            used_log,
            enabled,
            start: number,
        } => {
            let start = QueueStart {
                index,
                config,
                kick,
                call,
                err,
                used_log,
                enabled,
                number,
            };
            if has_rebooted(device.queues(), &start) {
                device.queues().stopped_at.clear();
                return begin(device, PendingCommand::Restart(Box::new(start), reply), cx);
            }
            answer_start(start_queue(device, start, cx), reply);
        }
        DeviceCommand::SetCall { index, call } => {
            if let Some(Some(ring)) = device.queues().rings.slot(index) {
                ring.set_call(call, cx.notifier);
            }
            reply.done();
        }
        DeviceCommand::SetErr { index, err } => {
            if let Some(Some(ring)) = device.queues().rings.slot(index) {
                ring.set_err(err);
            }
            reply.done();
        }
        DeviceCommand::EnableQueue { index, enabled } => {
            if let Some(Some(ring)) = device.queues().rings.slot(index) {
                ring.enabled = enabled;
            }
            reply.done();
        }
        DeviceCommand::StopQueue { index } => {
            if let Some(Some(_)) = device.queues().rings.slot(index) {
                begin(device, PendingCommand::Stop(index, reply), cx);
            } else {
                reply.failed(not_running(index));
            }
        }
        DeviceCommand::ResetDevice => begin(device, PendingCommand::Reset(reply), cx),
        DeviceCommand::SendRarp(mac) => match device.send_rarp(mac, cx) {
            Ok(()) => reply.done(),
            Err(reason) => reply.failed(reason),
        },
        DeviceCommand::Disconnected => {
            device.queues().link = None;
            begin_disconnect(device, Some(reply), cx);
        }
    }
}

fn not_running(index: u16) -> String {
    format!("queue {index} does not run")
}

/// Whether a queue starts for another driver than the one for which it was stopped: at a base of 0, after a
/// stop at another base.
fn has_rebooted<R: Rings>(queues: &mut QueueSet<R>, start: &QueueStart) -> bool {
    queues.memory.is_some()
        && queues.rings.slot(start.index).is_some()
        && start.config.base == 0
        && queues.stopped_at(start.index).is_some_and(|at| at != 0)
}

fn answer_start(started: Result<(), String>, reply: Reply) {
    match started {
        Ok(()) => reply.done(),
        Err(reason) => reply.failed(reason),
    }
}

fn start_queue<D: VirtioDevice>(
    device: &mut D,
    start: QueueStart,
    cx: &mut Context<'_, D>,
) -> Result<(), String> {
    let QueueStart {
        index,
        config,
        kick,
        call,
        err,
        used_log,
        enabled,
        number,
    } = start;
    let queues = device.queues();
    let memory = queues.memory.clone().ok_or("no memory table")?;
    if queues.rings.slot(index).is_none() {
        return Err(format!("no queue {index}"));
    }
    let stopped_at = queues.stopped_at(index).take();
    let started = match queues.records.get(usize::from(index)) {
        Some(record) => DeviceQueue::recover(memory, &config, record.clone(), number),
        None => DeviceQueue::new(memory, &config).map(|queue| (queue, LostChains::default())),
    };
    let (mut queue, lost) = started.map_err(|e| e.to_string())?;
    let base = queue.base();
    queue.set_used_log(used_log);
    let token = Token {
        device: device.addr().number,
        kind: EventKind::KICK,
        key: index.into(),
    };
    cx.poller
        .add(&kick, token, Interest::Read)
        .map_err(|e| format!("cannot watch the kick: {e}"))?;
    let queues = device.queues();
    queues.epoch = queues.epoch.wrapping_add(1);
    let mut ring = Ring::new(queue, kick, call, err, enabled, queues.epoch);
    ring.log = Arc::clone(&queues.log);
    queues.log_ring(&mut ring);
    let recovered = ring.return_lost(lost);
    if recovered > 0 {
        tracing::info!(
            index,
            recovered,
            "the queue continues: buffers that were in use when the process ended are returned"
        );
    }
    // An earlier device may have returned buffers and been killed before it notified the driver. If it
    // returned all, this one has none to return, and would never notify either. A base of 0 does not say that
    // there was none: indices wrap. A driver that finds nothing ignores the notification.
    ring.notify_driver(cx.notifier);
    if let Some(slot) = queues.rings.slot(index) {
        *slot = Some(ring);
    }
    let is_new = base != 0 && stopped_at.is_none();
    let resumed = is_new && !std::mem::replace(&mut queues.has_resumed, true);
    let started = QueueStarted {
        resumed,
        base,
        recovered,
        stopped_at,
    };
    device.queue_started(index, started, cx);
    Ok(())
}

fn begin<D: VirtioDevice>(device: &mut D, pending: PendingCommand, cx: &mut Context<'_, D>) {
    if let Some(scope) = pending.scope() {
        device.release(scope, cx);
    }
    device.queues().pending = Some(pending);
    finish(device, cx);
}

/// Completes the pending command once the device has returned the buffers that it needs, and has ended
/// the connections that end with it.
pub fn finish<D: VirtioDevice>(device: &mut D, cx: &mut Context<'_, D>) {
    let queues = device.queues();
    queues.recheck_at = None;
    let Some(pending) = &queues.pending else {
        return;
    };
    let resets = pending.resets();
    let quiesced = match pending.scope() {
        // Its connections end already, so nothing begins to use buffers.
        Some(scope) if !queues.is_resetting => device.quiesce(scope, cx),
        _ => Quiesced::Done,
    };
    match quiesced {
        Quiesced::Done => {}
        Quiesced::Waits => return,
        Quiesced::Unknown(reason) => {
            let queues = device.queues();
            if cx.now < *queues.deadline.get_or_insert(cx.now + QUIESCE_TIMEOUT) {
                queues.recheck_at = Some(cx.now + RECHECK_INTERVAL);
            } else {
                give_up(device, reason, cx);
            }
            return;
        }
    }
    device.queues().deadline = None;
    if let Some(stopped) = resets {
        device.queues().is_resetting = true;
        if !device.reset_part(stopped, cx) {
            return;
        }
        device.queues().is_resetting = false;
        device.reset(stopped, cx);
    }
    let queues = device.queues();
    match queues.pending.take() {
        Some(PendingCommand::Stop(index, reply)) => {
            match queues.rings.slot(index).and_then(Option::take) {
                Some(ring) => {
                    let base = close(ring, cx);
                    *queues.stopped_at(index) = Some(base);
                    reply.base(base);
                }
                None => reply.failed(not_running(index)),
            }
        }
        Some(PendingCommand::Memory(memory, reply)) => match remap(device, memory, cx) {
            Ok(()) => reply.done(),
            Err(reason) => reply.failed(reason),
        },
        Some(PendingCommand::Reset(reply)) => {
            stop_all(device, cx);
            reply.done();
        }
        Some(PendingCommand::Restart(start, reply)) => {
            answer_start(start_queue(device, *start, cx), reply);
        }
        Some(PendingCommand::Forget(next)) => {
            device.forgotten();
            if let Some(next) = next {
                let (next, reply) = *next;
                command(device, next, reply, cx);
            }
            return;
        }
        Some(PendingCommand::Disconnect { reply, failed }) => {
            stop_all(device, cx);
            device.set_features(0);
            device.queues().logging = Logging::default();
            let old = device.queues().memory.take();
            device.memory_replaced(old, cx);
            // A reply that is dropped answers that its command failed.
            drop(failed);
            if let Some(reply) = reply {
                reply.done();
            }
            return;
        }
        None => {}
    }
    device.command_finished();
}

fn remap<D: VirtioDevice>(
    device: &mut D,
    memory: Arc<Memory>,
    cx: &mut Context<'_, D>,
) -> Result<(), String> {
    let mut result = Ok(());
    let queues = device.queues();
    for ring in queues.rings.running() {
        ring.publish(cx.notifier);
        if let Err(error) = ring.queue.remap(memory.clone()) {
            ring.fail();
            result = Err(format!(
                "a running queue is not in the new memory table: {error}"
            ));
        }
    }
    let old = queues.memory.replace(memory);
    device.memory_replaced(old, cx);
    result
}

/// Ends the connections of a driver with stopped queues, in parts. Does nothing if a command is pending.
pub fn forget<D: VirtioDevice>(device: &mut D, cx: &mut Context<'_, D>) {
    if !device.queues().is_command_pending() {
        begin(device, PendingCommand::Forget(None), cx);
    }
}

fn stop_all<D: VirtioDevice>(device: &mut D, cx: &mut Context<'_, D>) {
    let queues = device.queues();
    for slot in queues.rings.slots() {
        if let Some(ring) = slot.take() {
            close(ring, cx);
        }
    }
    queues.stopped_at.clear();
}

/// Ends the service for a front-end that has disconnected or lost its memory. A device that ends its
/// connections in parts continues in its turns.
pub fn disconnect<D: VirtioDevice>(device: &mut D, cx: &mut Context<'_, D>) {
    begin_disconnect(device, None, cx);
}

fn begin_disconnect<D: VirtioDevice>(
    device: &mut D,
    reply: Option<Reply>,
    cx: &mut Context<'_, D>,
) {
    // A pending command must not block the last packets.
    let failed = match device.queues().pending.take() {
        Some(PendingCommand::Disconnect { failed, .. }) => failed,
        before => {
            // A driver that has reset the device has sent the last ones before.
            if !device.queues().is_resetting {
                device.receive_remaining(cx);
            }
            before.map(Box::new)
        }
    };
    device.queues().pending = Some(PendingCommand::Disconnect { reply, failed });
    finish(device, cx);
}

/// Stops all rings, because the memory or a ring is unusable or the device cannot carry out a
/// command, and disconnects the front-end, with `reason` in the log.
pub fn give_up<D: VirtioDevice>(device: &mut D, reason: &str, cx: &mut Context<'_, D>) {
    let queues = device.queues();
    let link = queues.link.take();
    queues.fail(cx.notifier);
    disconnect(device, cx);
    if let Some(link) = link {
        link.close(reason);
    }
}

/// Stops a ring; returns the index at which it would continue.
fn close<D: VirtioDevice>(mut ring: Ring, cx: &Context<'_, D>) -> u16 {
    ring.publish(cx.notifier);
    cx.poller.remove(&ring.kick);
    ring.queue.base()
}

#[cfg(test)]
#[path = "command_tests.rs"]
mod tests;
