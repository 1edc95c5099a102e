//! Commands of the VMM, carried out between two turns.
//!
//! # Invariants
//! - Before a queue's base is answered and before memory is replaced, no chain is held and the old
//!   memory is not used any more.
//! - A pending command waits, and the queue with it, until siblings have returned their chains, no
//!   loan is being written to, and no lease is under a read guard.
//! - The front-end does not wait longer than [`RECALL`] for the embedding program, which may keep a
//!   buffer for any time. After that the command fails and the front-end is disconnected.
//! - A disconnect waits for nothing: memory that siblings still read stays mapped, and chains that
//!   return to a stopped queue are dropped.

use super::bridge::BridgePeer;
use super::model::used_pairs;
use super::ring::Ring;
use super::timers::Timer;
use super::{Context, Device, EVENT, RX, TX};
use crate::device::sibling_message::SiblingMessage;
use crate::io::poller::Source;
use std::sync::Arc;
use std::time::Duration;
use zerosock_proto::vsock::features::{F_PAIRS, F_SEQPACKET};
use zerosock_ring::{DeviceQueue, Memory, QueueConfig};
use zerosock_sys::PeerFd;
use zerosock_sys::notify::CallFd;
use zerosock_vhost_user::{DeviceCommand, Reply};

/// A command that waits until chains, leases or loans have been returned.
#[derive(Debug)]
pub(crate) enum PendingCommand {
    Stop(Reply),
    StopReceive(Reply),
    Memory(Arc<Memory>, Reply),
    Reset(Reply),
}

/// Interval at which a pending command checks whether a writer has left the guest's buffers; the
/// writer sends no notification.
const LOOK: Duration = Duration::from_millis(1);
/// How long a command waits for the embedding program: longer than any copy takes, and shorter
/// than the timeout of any front-end.
const RECALL: Duration = Duration::from_secs(1);

impl Device {
    /// Carries out `command`; answers through `reply`, possibly later.
    pub(crate) fn command(&mut self, command: DeviceCommand, reply: Reply, cx: &mut Context<'_>) {
        match command {
            DeviceCommand::Connected { link } => {
                self.link = Some(link);
                self.no_queue_started = true;
                self.announce_reset = false;
                self.shard.set_seqpacket(false);
                reply.done();
            }
            // The rings get the ring features in their configuration.
            DeviceCommand::SetFeatures(features) => {
                self.shard.set_moves(features & F_PAIRS != 0);
                self.shard.set_seqpacket(features & F_SEQPACKET != 0);
                // Only the first queue pair carries datagrams.
                let first = self.queue_pairs.pair == 0;
                self.datagrams
                    .set_features(if first { features } else { 0 });
                reply.done();
            }
            DeviceCommand::SetConfig(config) => {
                self.queue_pairs.used = used_pairs(&config);
                reply.done();
            }
            DeviceCommand::SetMemory(memory) => {
                self.release_chains(cx);
                self.pending_command = Some(PendingCommand::Memory(memory, reply));
                self.finish_command(cx);
            }
            DeviceCommand::StartQueue {
                index,
                config,
                kick,
                call,
                err,
                enabled,
            } => match self.start_queue(index, config, kick, call, err, enabled, cx) {
                Ok(()) => reply.done(),
                Err(reason) => reply.failed(reason),
            },
            DeviceCommand::SetCall { index, call } => {
                if let Some(ring) = self.ring(index) {
                    ring.set_call(call, cx.notifier);
                }
                reply.done();
            }
            DeviceCommand::SetErr { index, err } => {
                if let Some(ring) = self.ring(index) {
                    ring.set_err(err);
                }
                reply.done();
            }
            DeviceCommand::EnableQueue { index, enabled } => {
                if let Some(ring) = self.ring(index) {
                    ring.enabled = enabled;
                }
                reply.done();
            }
            DeviceCommand::StopQueue { index } => self.stop_queue(index, reply, cx),
            DeviceCommand::ResetDevice => {
                self.pending_command = Some(PendingCommand::Reset(reply));
                self.finish_command(cx);
            }
            DeviceCommand::Disconnected => {
                self.link = None;
                self.disconnect(cx);
                reply.done();
            }
        }
    }

    fn ring(&mut self, index: u16) -> Option<&mut Ring> {
        match index {
            RX => self.rx.as_mut(),
            TX => self.tx.as_mut(),
            EVENT => self.event.as_mut(),
            _ => None,
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of one message")]
    fn start_queue(
        &mut self,
        index: u16,
        config: QueueConfig,
        kick: PeerFd,
        call: Option<CallFd>,
        err: Option<CallFd>,
        enabled: bool,
        cx: &mut Context<'_>,
    ) -> Result<(), String> {
        let memory = self.memory.clone().ok_or("no memory table")?;
        let stopped_at = self.stopped_at.get_mut(usize::from(index));
        let stopped_at = stopped_at.and_then(Option::take);
        if config.base == 0 && stopped_at.is_some_and(|at| at != 0) {
            // A base of 0 after a stop at another base: the driver has rebooted and knows no
            // connection of this device.
            self.stopped_at = [None; 2];
            self.forget_connections(cx);
        }
        let queue = DeviceQueue::new(memory, &config).map_err(|e| e.to_string())?;
        self.epoch = self.epoch.wrapping_add(1);
        let source = Source::Kick { vm: self.addr.vm };
        cx.poller
            .add(&kick, source)
            .map_err(|e| format!("cannot watch the kick: {e}"))?;
        let ring = Ring::new(queue, kick, call, err, enabled, self.epoch);
        match index {
            RX => self.rx = Some(ring),
            TX => {
                self.tx = Some(ring);
                self.app_started(cx);
            }
            EVENT => self.event = Some(ring),
            _ => return Err(format!("no queue {index}")),
        }
        // The first queue started by a front-end continues at a base other than 0: its driver used
        // an earlier device and has connections that this one does not know.
        if self.no_queue_started && config.base != 0 {
            self.announce_lost(cx);
        }
        self.no_queue_started = false;
        Ok(())
    }

    fn stop_queue(&mut self, index: u16, reply: Reply, cx: &mut Context<'_>) {
        if index == TX && self.tx.is_some() {
            self.release_chains(cx);
            self.pending_command = Some(PendingCommand::Stop(reply));
            return self.finish_command(cx);
        }
        if index == RX && self.rx.is_some() {
            self.pending_command = Some(PendingCommand::StopReceive(reply));
            return self.finish_command(cx);
        }
        let ring = match index {
            EVENT => self.event.take(),
            _ => None,
        };
        match ring {
            Some(ring) => self.answer_base(index, ring, reply, cx),
            None => reply.failed(format!("queue {index} does not run")),
        }
    }

    fn answer_base(&mut self, index: u16, ring: Ring, reply: Reply, cx: &mut Context<'_>) {
        let base = close(ring, cx);
        if let Some(stopped_at) = self.stopped_at.get_mut(usize::from(index)) {
            *stopped_at = Some(base);
        }
        reply.base(base);
    }

    /// Copies out held chains and recalls those lent to siblings.
    fn release_chains(&mut self, cx: &mut Context<'_>) {
        // Leases under a read guard are recalled by `finish_command`.
        self.app_recall(false, cx);
        let keys: Vec<u32> = self.bridges.iter().map(|(key, _)| key as u32).collect();
        for key in keys {
            self.spill(key, 0, cx);
            self.update_bridge(key, cx);
            if let Some(bridge) = self.bridges.get(key as usize)
                && let BridgePeer::Sibling(s) = &bridge.end
                && s.out > 0
            {
                cx.outbox
                    .send(s.peer.device, SiblingMessage::Recall { to: s.peer.flow });
            }
        }
    }

    /// Completes the pending command once everything that it waits for has been returned.
    pub(super) fn finish_command(&mut self, cx: &mut Context<'_>) {
        let (chains, leases, loans) = match self.pending_command {
            None => return,
            Some(PendingCommand::Stop(_)) => (true, true, false),
            Some(PendingCommand::StopReceive(_)) => (false, false, true),
            Some(PendingCommand::Reset(_)) => (false, true, true),
            Some(PendingCommand::Memory(..)) => (true, true, true),
        };
        let mut back = !loans || self.recall_loans(false, cx);
        back &= !leases || self.app_recall(false, cx);
        if !back {
            if cx.now < *self.command_deadline.get_or_insert(cx.now + RECALL) {
                self.timers.set(cx.now + LOOK, Timer::Recall);
            } else {
                self.drop_frontend(cx);
            }
            return;
        }
        let out = self
            .tx
            .as_ref()
            .is_some_and(|tx| tx.queue.outstanding() > 0);
        if chains && out {
            return;
        }
        self.command_deadline = None;
        match self.pending_command.take() {
            Some(PendingCommand::Stop(reply)) => match self.tx.take() {
                Some(ring) => self.answer_base(TX, ring, reply, cx),
                None => reply.failed("queue 1 does not run"),
            },
            Some(PendingCommand::StopReceive(reply)) => match self.rx.take() {
                Some(ring) => self.answer_base(RX, ring, reply, cx),
                None => reply.failed("queue 0 does not run"),
            },
            Some(PendingCommand::Memory(memory, reply)) => match self.remap(memory, cx) {
                Ok(()) => reply.done(),
                Err(reason) => reply.failed(reason),
            },
            Some(PendingCommand::Reset(reply)) => {
                self.stop_all(cx);
                reply.done();
            }
            None => {}
        }
        // The program was not notified of buffers while the command was pending.
        self.starved |= self.rx.is_some() && self.program_waits();
    }

    /// Disconnects a front-end that waits for buffers that the embedding program keeps in use.
    fn drop_frontend(&mut self, cx: &mut Context<'_>) {
        let reason = "the embedding program kept a guest buffer in use for too long";
        tracing::warn!(cid = %self.cid, reason, "front-end disconnected");
        self.disconnect(cx);
        if let Some(link) = self.link.take() {
            link.close(reason);
        }
    }

    fn remap(&mut self, memory: Arc<Memory>, cx: &Context<'_>) -> Result<(), String> {
        let mut result = Ok(());
        for ring in [&mut self.rx, &mut self.tx, &mut self.event]
            .into_iter()
            .flatten()
        {
            ring.publish(cx.notifier);
            if let Err(error) = ring.queue.remap(memory.clone()) {
                ring.fail();
                result = Err(format!(
                    "a running queue is not in the new memory table: {error}"
                ));
            }
        }
        let old = self.memory.replace(memory);
        self.track_old_memory(old, cx);
        result
    }

    /// Ends every connection without a packet to the guest: its driver knows none of them. Bytes
    /// that the guest sent before are still delivered.
    fn forget_connections(&mut self, cx: &mut Context<'_>) {
        self.app_recall(true, cx);
        self.recall_loans(true, cx);
        // Lingering bridges have no flow any more.
        let known = self
            .bridges
            .iter()
            .filter(|(_, bridge)| bridge.flow.is_some());
        let keys: Vec<u32> = known.map(|(key, _)| key as u32).collect();
        for key in keys {
            if !self.linger(key, cx) {
                self.remove_without_guest(key, cx);
            }
        }
        self.ready.clear();
        self.outgoing.clear();
        self.gathered.clear();
        self.stale_ready = 0;
        self.shard.handle_transport_reset(cx.now);
        self.forget_datagrams(cx);
        self.forget_handed_off(cx);
        while self.shard.poll_event().is_some() {}
    }

    fn stop_all(&mut self, cx: &mut Context<'_>) {
        self.forget_connections(cx);
        // Dropping the reply of a pending command answers that it failed.
        self.pending_command = None;
        self.command_deadline = None;
        for ring in [self.rx.take(), self.tx.take(), self.event.take()]
            .into_iter()
            .flatten()
        {
            close(ring, cx);
        }
        self.use_one_pair();
        self.announce_reset = false;
        self.starved = false;
        self.stopped_at = [None; 2];
    }

    /// Processes the packets that the guest made available before its front-end disconnected. Takes
    /// at most one queue size of packets, even if the driver keeps adding more.
    fn receive_remaining(&mut self, cx: &mut Context<'_>) {
        let taken = |device: &Device| device.tx.as_ref().map_or(0, |tx| tx.taken);
        let size = self.tx.as_ref().map_or(0, |tx| tx.queue.size());
        let start = taken(self);
        loop {
            // Copies out what the program has not read: that frees room for more packets.
            self.app_recall(false, cx);
            let before = taken(self);
            self.moved = 0;
            self.receive(cx);
            let after = taken(self);
            if after == before || after.wrapping_sub(start) >= u32::from(size) {
                return;
            }
        }
    }

    /// Ends the service for a front-end that has disconnected.
    pub(super) fn disconnect(&mut self, cx: &mut Context<'_>) {
        // A pending command must not block the last packets. It is dropped at the end, which
        // answers that it failed.
        let pending = self.pending_command.take();
        self.receive_remaining(cx);
        self.stop_all(cx);
        self.datagrams.set_features(0);
        let old = self.memory.take();
        self.track_old_memory(old, cx);
        drop(pending);
    }

    /// Resets every connection before the daemon ends, so that the guest learns it at once.
    pub(crate) fn reset_connections(&mut self, cx: &mut Context<'_>) {
        let keys: Vec<u32> = self.bridges.iter().map(|(key, _)| key as u32).collect();
        for key in keys {
            self.reset_bridge(key, cx);
        }
        self.turn(cx);
    }
}

/// Stops a ring; returns the index at which it would continue.
fn close(mut ring: Ring, cx: &mut Context<'_>) -> u16 {
    ring.publish(cx.notifier);
    cx.poller.remove(&ring.kick);
    ring.queue.base()
}
