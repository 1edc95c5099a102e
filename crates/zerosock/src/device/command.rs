//! What the VMM wants of the device, carried out between two turns.
//!
//! What must hold: before a queue's base is told and before memory is replaced, no chain is held
//! and nothing of the old memory is used. Chains that siblings have are called back first; until
//! they are here the command waits and the queue rests. So it does for who writes into a loan at
//! that moment, and for who reads with trust. But a front-end does not wait for ever: the program
//! that embeds the device may keep a buffer for as long as it likes, and the front-end's main loop
//! must not stop with it. After [`RECALL`] it loses its device instead: it is told nothing that is
//! not so, and has not got its buffer back. A front-end that goes waits for nothing: what siblings
//! still read stays mapped, and comes back to a queue that is gone.

use super::bridge::BridgePeer;
use super::model::used_pairs;
use super::ring::Ring;
use super::timers::Timer;
use super::{Context, Device, EVENT, RX, TX};
use crate::device::sibling_message::Message;
use crate::io::poller::Source;
use std::sync::Arc;
use std::time::Duration;
use zerosock_proto::vsock::features::{F_PAIRS, F_SEQPACKET};
use zerosock_ring::{DeviceQueue, Memory, QueueConfig};
use zerosock_sys::PeerFd;
use zerosock_sys::notify::CallFd;
use zerosock_vhost_user::{DeviceCommand, Reply};

/// A command that waits until no chain is out.
#[derive(Debug)]
pub(crate) enum Waiting {
    Stop(Reply),
    StopReceive(Reply),
    Memory(Arc<Memory>, Reply),
    Reset(Reply),
}

/// How long until the next look whether a writer has left the guest's buffers: it tells nobody.
const LOOK: Duration = Duration::from_millis(1);
/// How long a command waits for the program that embeds the device: longer than any copy takes, and
/// shorter than any front-end's patience.
const RECALL: Duration = Duration::from_secs(1);

impl Device {
    /// Carries out `command`; the answer goes through `reply`, perhaps later.
    pub(crate) fn command(&mut self, command: DeviceCommand, reply: Reply, cx: &mut Context<'_>) {
        match command {
            DeviceCommand::Connected { link } => {
                self.link = Some(link);
                self.fresh = true;
                self.announce_reset = false;
                self.shard.set_seqpacket(false);
                reply.done();
            }
            // The rings get what they need of it in their configuration.
            DeviceCommand::SetFeatures(features) => {
                self.shard.set_moves(features & F_PAIRS != 0);
                self.shard.set_seqpacket(features & F_SEQPACKET != 0);
                // Datagrams are the first queue_pair's.
                let first = self.queue_pairs.pair == 0;
                self.datagrams.negotiated(if first { features } else { 0 });
                reply.done();
            }
            DeviceCommand::SetConfig(config) => {
                self.queue_pairs.used = used_pairs(&config);
                reply.done();
            }
            DeviceCommand::SetMemory(memory) => {
                self.release_chains(cx);
                self.waiting = Some(Waiting::Memory(memory, reply));
                self.finish_waiting(cx);
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
                self.waiting = Some(Waiting::Reset(reply));
                self.finish_waiting(cx);
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
            // The driver starts from nothing: it has rebooted and knows no connection of ours.
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
        // A front-end whose first queue goes on in the middle has a driver that knew an earlier
        // device, with connections that we know nothing of.
        if self.fresh && config.base != 0 {
            self.announce_lost(cx);
        }
        self.fresh = false;
        Ok(())
    }

    fn stop_queue(&mut self, index: u16, reply: Reply, cx: &mut Context<'_>) {
        if index == TX && self.tx.is_some() {
            self.release_chains(cx);
            self.waiting = Some(Waiting::Stop(reply));
            return self.finish_waiting(cx);
        }
        if index == RX && self.rx.is_some() {
            self.waiting = Some(Waiting::StopReceive(reply));
            return self.finish_waiting(cx);
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

    /// Copies out what is held of the guest's chains and calls back what siblings have.
    fn release_chains(&mut self, cx: &mut Context<'_>) {
        // Those that are read with trust come later.
        self.app_recall(false, cx);
        let keys: Vec<u32> = self.bridges.iter().map(|(key, _)| key as u32).collect();
        for key in keys {
            self.spill(key, 0, cx);
            self.settle(key, cx);
            if let Some(bridge) = self.bridges.get(key as usize)
                && let BridgePeer::Sibling(s) = &bridge.end
                && s.out > 0
            {
                cx.outbox
                    .send(s.peer.device, Message::Recall { to: s.peer.flow });
            }
        }
    }

    /// Goes on with a command once the last chain is back.
    pub(super) fn finish_waiting(&mut self, cx: &mut Context<'_>) {
        let (chains, leases, loans) = match self.waiting {
            None => return,
            Some(Waiting::Stop(_)) => (true, true, false),
            Some(Waiting::StopReceive(_)) => (false, false, true),
            Some(Waiting::Reset(_)) => (false, true, true),
            Some(Waiting::Memory(..)) => (true, true, true),
        };
        let mut back = !loans || self.recall_loans(false, cx);
        back &= !leases || self.app_recall(false, cx);
        if !back {
            if cx.now < *self.give_up_at.get_or_insert(cx.now + RECALL) {
                self.timers.set(cx.now + LOOK, Timer::Recall);
            } else {
                self.give_up(cx);
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
        self.give_up_at = None;
        match self.waiting.take() {
            Some(Waiting::Stop(reply)) => match self.tx.take() {
                Some(ring) => self.answer_base(TX, ring, reply, cx),
                None => reply.failed("queue 1 does not run"),
            },
            Some(Waiting::StopReceive(reply)) => match self.rx.take() {
                Some(ring) => self.answer_base(RX, ring, reply, cx),
                None => reply.failed("queue 0 does not run"),
            },
            Some(Waiting::Memory(memory, reply)) => match self.remap(memory, cx) {
                Ok(()) => reply.done(),
                Err(reason) => reply.failed(reason),
            },
            Some(Waiting::Reset(reply)) => {
                self.stop_all(cx);
                reply.done();
            }
            None => {}
        }
        // Nobody was told of buffers meanwhile.
        self.starved |= self.rx.is_some() && self.starves_program();
    }

    /// The program does not let go of the guest's buffers, and the front-end waits.
    fn give_up(&mut self, cx: &mut Context<'_>) {
        let reason = "the program that has the device kept a buffer in use for too long";
        tracing::warn!(cid = %self.cid, reason, "the front-end is turned away");
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
        self.note_old(old, cx);
        result
    }

    /// Closes every connection without a word to the guest, which knows of none. What it had sent
    /// before it went is still delivered.
    fn forget_connections(&mut self, cx: &mut Context<'_>) {
        self.app_recall(true, cx);
        self.recall_loans(true, cx);
        // Those that linger have been parted from the guest before.
        let known = self
            .bridges
            .iter()
            .filter(|(_, bridge)| bridge.flow.is_some());
        let keys: Vec<u32> = known.map(|(key, _)| key as u32).collect();
        for key in keys {
            if !self.linger(key, cx) {
                self.part_bridge(key, cx);
            }
        }
        self.ready.clear();
        self.outgoing.clear();
        self.gathered.clear();
        self.stale_ready = 0;
        self.shard.handle_transport_reset(cx.now);
        self.forget_datagrams(cx);
        self.forget_those_who_left(cx);
        while self.shard.poll_event().is_some() {}
    }

    fn stop_all(&mut self, cx: &mut Context<'_>) {
        self.forget_connections(cx);
        // A command that still waits is answered by its token: it was not carried out.
        self.waiting = None;
        self.give_up_at = None;
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

    /// Takes in what the guest had shown before its front-end went, and nobody had looked at yet:
    /// its sender was told that it was sent. Of an honest driver that is at most a queue; and so it
    /// is of one that keeps its memory and goes on.
    fn take_last(&mut self, cx: &mut Context<'_>) {
        let taken = |device: &Device| device.tx.as_ref().map_or(0, |tx| tx.taken);
        let size = self.tx.as_ref().map_or(0, |tx| tx.queue.size());
        let start = taken(self);
        loop {
            // What the program has not read makes room, as a copy.
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

    /// The front-end is gone.
    pub(super) fn disconnect(&mut self, cx: &mut Context<'_>) {
        // A command that still waits stops no packet, and is answered by its token at the end: it was
        // not carried out.
        let waiting = self.waiting.take();
        self.take_last(cx);
        self.stop_all(cx);
        self.datagrams.negotiated(0);
        let old = self.memory.take();
        self.note_old(old, cx);
        drop(waiting);
    }

    /// Before the daemon ends: every connection is reset so that the guest knows at once.
    pub(crate) fn say_goodbye(&mut self, cx: &mut Context<'_>) {
        let keys: Vec<u32> = self.bridges.iter().map(|(key, _)| key as u32).collect();
        for key in keys {
            self.reset_bridge(key, cx);
        }
        self.turn(cx);
    }
}

/// Takes a ring out of service; returns the index at which it would go on.
fn close(mut ring: Ring, cx: &mut Context<'_>) -> u16 {
    ring.publish(cx.notifier);
    cx.poller.remove(&ring.kick);
    ring.queue.base()
}
