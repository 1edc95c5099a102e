//! The virtio-net device.
//!
//! A turn moves at most 256 frames or 1 MiB for each queue pair and direction, and notifies the
//! driver once for each queue.
//!
//! A frame is read directly into the driver's buffers. The device does not know its length before, so
//! it offers room for as many bytes as recent frames had; the part of a frame beyond that is read
//! into memory of the device and copied (`rx_copied`). Without MRG_RXBUF it offers the whole next
//! buffer.
//!
//! A driver that takes partial checksums gets a complete one from DHCP servers (`dhcp.rs`).

mod announcement;
mod control;
mod dhcp;
#[cfg(test)]
mod dhcp_tests;
mod pair;
mod receive;
mod rings;
mod terms;
mod transmit;

use std::fmt;
use std::io;
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use zerosock_proto::Instant;
use zerosock_proto::wire::net::{self, Config, Header, Mac};
use zerosock_ring::Memory;
use zerosock_vhost_user::{DeviceCommand, Reply};
use zerosock_virtio::command::{self, QueueStarted, VirtioDevice};
use zerosock_virtio::deadline::earlier;
use zerosock_virtio::device::{Context, Event, WorkerDevice};
use zerosock_virtio::outbox::{DeviceAddr, Outbox};
use zerosock_virtio::poller::{EventKind, Interest, Token};
use zerosock_virtio::queues::{QueueSet, Quiesced, Rings, Scope};
use zerosock_virtio::ring::Ring;

use self::control::Allowed;
use self::pair::QueuePair;
pub use self::rings::NetRings;
use self::terms::{Fatal, Fixed, Terms};
use crate::backend::{Backend, Half};
use crate::stats::{Counters, NetStats};

/// Events of a queue of the back-end; the key is its number.
pub(crate) const BACKEND: EventKind = EventKind::new(1);

/// Readable once the back-end has gone.
#[derive(Debug)]
pub struct BackendGoneEvent(OwnedFd);

impl BackendGoneEvent {
    pub(crate) fn new() -> io::Result<BackendGoneEvent> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(BackendGoneEvent(eventfd(0, flags)?))
    }

    pub(crate) fn report(&self) {
        // Fails only if the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

impl AsFd for BackendGoneEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What to poll for at the descriptor of a back-end: for room only while it has none, because a
/// descriptor with room reports that with each frame.
pub(crate) fn interest(is_blocked: bool) -> Interest {
    match is_blocked {
        true => Interest::All,
        false => Interest::Read,
    }
}

/// The name of the descriptor of a back-end's queue.
pub(crate) fn backend_token(addr: DeviceAddr, queue: usize) -> Token {
    Token {
        device: addr.number,
        kind: BACKEND,
        key: queue as u32,
    }
}

/// See the [module](self).
pub struct Device<B> {
    addr: DeviceAddr,
    name: String,
    queues: QueueSet<NetRings>,
    backend: B,
    pairs: Vec<QueuePair>,
    terms: Terms,
    fixed: Fixed,
    /// The MTU of `fixed`, or that of the front-end, in bytes.
    mtu: Option<u16>,
    features: u64,
    /// The driver was asked to announce itself, and has not acknowledged that.
    announcing: bool,
    /// Queue pairs that the driver uses, if it has set that by a command on the control queue.
    pairs_set: Option<u16>,
    /// Ends the service at the end of the turn.
    fault: Option<Fatal>,
    /// The back-end has gone.
    is_gone: bool,
    gone: Arc<BackendGoneEvent>,
    tally: NetStats,
    counters: Arc<Counters>,
}

impl<B> fmt::Debug for Device<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name)
            .field("terms", &self.terms)
            .finish_non_exhaustive()
    }
}

/// What a device is told when it is made.
#[derive(Debug)]
pub struct DeviceConfig {
    /// The address on its worker.
    pub addr: DeviceAddr,
    /// The name in the log.
    pub name: String,
    /// What the configuration space says.
    pub mtu: Option<u16>,
    /// The only source address that frames of the guest may have; `None`: any.
    pub only_mac: Option<Mac>,
    /// Where the device counts.
    pub counters: Arc<Counters>,
    /// Where the device reports that its back-end has gone.
    pub gone: Arc<BackendGoneEvent>,
}

impl<B: Backend> Device<B> {
    /// A device with one queue pair for each queue of the back-end.
    ///
    /// # Errors
    /// The back-end cannot be used.
    pub fn new(config: DeviceConfig, mut backend: B) -> io::Result<Device<B>> {
        let DeviceConfig {
            addr,
            name,
            mtu,
            only_mac,
            counters,
            gone,
        } = config;
        backend.start(addr)?;
        let fixed = Fixed {
            mtu,
            needs_addresses: backend.needs_addresses(),
            only_mac,
        };
        let count = backend.queues();
        let mut queues = QueueSet::new(0);
        queues.rings = NetRings::new(count);
        Ok(Device {
            addr,
            name,
            queues,
            backend,
            pairs: (0..count).map(|_| QueuePair::new()).collect(),
            terms: Terms::new(0, &fixed),
            mtu: fixed.mtu,
            fixed,
            features: 0,
            announcing: false,
            pairs_set: None,
            fault: None,
            is_gone: false,
            gone,
            tally: NetStats::default(),
            counters,
        })
    }

    /// Index of the control queue.
    fn control_queue(&self) -> usize {
        match self.terms.multi_queue {
            true => 2 * self.pairs.len(),
            false => 2,
        }
    }

    /// How many queue pairs the driver may use now.
    fn pairs_in_use(&mut self) -> usize {
        let control = self.control_queue();
        if !self.terms.multi_queue {
            return 1;
        }
        match self.pairs_set {
            Some(pairs) => usize::from(pairs),
            // A front-end that has kept the control queue enables the queues that are in use.
            None if self.terms.control && self.queues.rings.ring(control).is_some() => 1,
            None => self.pairs.len(),
        }
    }

    /// Tells the back-end which queues the driver uses.
    fn update_active(&mut self) {
        let in_use = self.pairs_in_use();
        for (index, pair) in self.pairs.iter_mut().enumerate() {
            let wanted = index < in_use && self.queues.rings.live(2 * index).is_some();
            if wanted == pair.active {
                continue;
            }
            pair.active = wanted;
            pair.receiver.readable.set();
            if let Err(error) = self.backend.set_active(index, wanted) {
                self.fault = Some(Fatal::BackendGone(error));
            }
        }
    }

    /// Moves frames on all queue pairs, in turn. Returns whether there may be more.
    fn move_frames(&mut self, now: Instant) -> bool {
        let in_use = self.pairs_in_use();
        self.reclaim();
        if self.queues.is_command_pending() {
            // A command waits for frames that the back-end holds.
            self.flush(now);
            return false;
        }
        let (terms, tally) = (&self.terms, &mut self.tally);
        let mut more = false;
        for (index, pair) in self.pairs.iter_mut().enumerate().take(in_use) {
            let rings = &mut self.queues.rings;
            let backend = (&mut self.backend, index);
            match pair.move_frames(rings, backend, terms, tally, now) {
                Ok(left) => more |= left,
                Err(fatal) => self.fault = Some(fatal),
            }
        }
        self.flush(now);
        // Most of what was sent just now.
        self.reclaim();
        more
    }

    /// Receives the frames of a message, which are few, as far as the driver has buffers.
    fn receive(&mut self, now: Instant) {
        for pair in &mut self.pairs {
            pair.receiver.readable.set();
        }
        // The turn that follows the command receives them then.
        if self.is_gone || self.queues.is_command_pending() {
            return;
        }
        for (index, pair) in self.pairs.iter_mut().enumerate() {
            let Some(ring) = self.queues.rings.live(2 * index) else {
                continue;
            };
            let (backend, tally) = ((&mut self.backend, index), &mut self.tally);
            match (pair.receiver).run_turn(ring, backend, &self.terms, tally, now) {
                // What is left waits for the turn of the device.
                Ok(_) => {}
                Err(fatal) => self.fault = Some(fatal),
            }
        }
    }

    /// Completes the chains of frames that the back-end has sent.
    fn reclaim(&mut self) {
        for (index, pair) in self.pairs.iter_mut().enumerate() {
            if let Some(ring) = self.queues.rings.ring(2 * index + 1) {
                let backend = (&mut self.backend, index);
                pair.transmitter.reclaim(ring, backend);
            }
        }
    }

    /// Ends the batch of each queue of the back-end.
    fn flush(&mut self, now: Instant) {
        for index in 0..self.pairs.len() {
            let flushed = self.backend.flush(index, now, &mut self.tally);
            if let Some(fatal) = flushed.err().and_then(Fatal::of) {
                self.fault = Some(fatal);
            }
        }
    }

    fn run_control(&mut self) -> bool {
        if !self.terms.control {
            return false;
        }
        let (index, most) = (self.control_queue(), self.backend.queues());
        let most = if self.terms.multi_queue { most } else { 0 };
        let Some(ring) = self.queues.rings.live(index) else {
            return false;
        };
        let allowed = Allowed {
            pairs: most,
            announcement: self.announcing,
        };
        let outcome = control::run(ring, &allowed, &mut self.tally);
        self.pairs_set = outcome.pairs.or(self.pairs_set);
        if outcome.announced {
            self.ask_for_announcement(false);
        }
        outcome.more | outcome.pairs.is_some()
    }

    /// Asks the driver to announce itself, or stops that, by the status in the configuration space.
    fn ask_for_announcement(&mut self, wanted: bool) {
        if std::mem::replace(&mut self.announcing, wanted) != wanted
            && let Some(link) = &self.queues.link
        {
            let status = net::status(true, wanted);
            link.change_config(Config::STATUS.start, &status, wanted);
        }
    }

    fn set_terms(&mut self) {
        let fixed = Fixed {
            mtu: self.mtu,
            ..self.fixed
        };
        self.terms = Terms::new(self.features, &fixed);
    }

    /// Returns the popped chains of a queue pair to its ring.
    fn unpop(&mut self, index: usize) {
        if let Some(pair) = self.pairs.get_mut(index) {
            let ring = self.queues.rings.ring(2 * index);
            pair.receiver.unpop(ring, &mut self.tally);
        }
    }

    /// Whether all chains of one half of a queue pair are back in the ring.
    fn quiesce_half(&mut self, pair: u16, is_receive: bool) -> Quiesced {
        let index = usize::from(pair);
        let Some(pair) = self.pairs.get_mut(index) else {
            return Quiesced::Done;
        };
        let backend = (&mut self.backend, index);
        if !is_receive {
            let ring = self.queues.rings.ring(2 * index + 1);
            return pair.transmitter.quiesce(ring, backend);
        }
        let answer = pair.receiver.quiesce(backend);
        if answer == Quiesced::Done {
            self.unpop(index);
        }
        answer
    }

    /// The rings from which a turn would pop chains.
    fn wanted_rings(&mut self) -> impl Iterator<Item = &mut Ring> {
        let in_use = self.pairs_in_use();
        let control = self.terms.control.then(|| self.control_queue());
        let pairs = &self.pairs;
        let wanted = move |index: usize| {
            if control == Some(index) {
                return true;
            }
            let pair = pairs.get(index / 2).filter(|_| index / 2 < in_use);
            pair.is_some_and(|pair| match index % 2 {
                0 => pair.receiver.starved,
                _ => !pair.transmitter.blocked,
            })
        };
        let rings = self.queues.rings.0.iter_mut().enumerate();
        rings.filter_map(move |(index, ring)| ring.as_mut().filter(|r| r.live() && wanted(index)))
    }

    /// Polls the descriptors of queues without room for room.
    fn poll_room(&mut self, cx: &Context<'_, Self>) {
        for (queue, pair) in self.pairs.iter_mut().enumerate() {
            let is_blocked = pair.transmitter.blocked;
            if is_blocked != pair.polls_room
                && let Some(descriptor) = self.backend.descriptor(queue)
            {
                pair.polls_room = is_blocked;
                let token = backend_token(self.addr, queue);
                if let Err(error) = cx.poller.change(descriptor, token, interest(is_blocked)) {
                    self.fault = Some(Fatal::BackendGone(error));
                }
            }
        }
    }

    fn lose_backend(&mut self, error: &io::Error, cx: &mut Context<'_, Self>) {
        let reason = format!("the network back-end has gone: {error}");
        tracing::error!(device = self.name, "{reason}");
        self.is_gone = true;
        self.gone.report();
        command::give_up(self, &reason, cx);
    }
}

impl<B: Backend> WorkerDevice for Device<B> {
    type Shared = ();
    type Message = B::Message;

    fn addr(&self) -> DeviceAddr {
        self.addr
    }

    fn start(&mut self, cx: &mut Context<'_, Self>) -> io::Result<()> {
        for queue in 0..self.pairs.len() {
            if let Some(descriptor) = self.backend.descriptor(queue) {
                let token = backend_token(self.addr, queue);
                cx.poller.add(descriptor, token, interest(false))?;
            }
        }
        Ok(())
    }

    fn on_event(&mut self, event: Event, _: &mut Context<'_, Self>) {
        if event.kind == BACKEND
            && let Some(pair) = self.pairs.get_mut(event.key as usize)
        {
            if event.readiness.readable() {
                pair.receiver.readable.set();
            }
            pair.transmitter.blocked &= !event.readiness.writable();
            // Not only a read finds out: without posted buffers there is none.
            if event.readiness.has_error() && !self.is_gone {
                let error = io::Error::other("it was removed");
                self.fault = Some(Fatal::BackendGone(error));
            }
        }
    }

    fn on_message(&mut self, message: B::Message, cx: &mut Context<'_, Self>) {
        if self.backend.on_message(message, cx.now, &mut self.tally) {
            self.receive(cx.now);
        }
        self.backend.finish_turn(cx.now, cx.outbox, &mut self.tally);
    }

    fn undeliverable(message: B::Message, outbox: &mut Outbox<B::Message>) {
        B::undeliverable(message, outbox);
    }

    fn command(&mut self, command: DeviceCommand, reply: Reply, cx: &mut Context<'_, Self>) {
        if let DeviceCommand::EnableQueue { index, enabled } = command
            && let Some(Some(ring)) = self.queues.rings.slot(index)
            && !self.is_gone
        {
            // Before the answer: the back-end drops what it queues for a pair that it detaches later.
            ring.enabled = enabled;
            self.update_active();
        }
        command::command(self, command, reply, cx);
    }

    fn turn(&mut self, cx: &mut Context<'_, Self>) -> bool {
        let mut more = false;
        if !self.is_gone {
            more |= self.run_control();
            // Before the answers to control commands are published, for the same reason as in `command`.
            self.update_active();
            more |= self.move_frames(cx.now);
            self.poll_room(cx);
        }
        for ring in self.queues.rings.running() {
            self.tally.notifications += u64::from(ring.publish(cx.notifier));
            self.tally.bad_chains += std::mem::take(&mut ring.malformed);
        }
        let waited = self.queues.is_command_pending();
        command::finish(self, cx);
        // Chains that were returned for the command are taken again.
        more |= waited && !self.queues.is_command_pending();
        let fault = self.fault.take();
        match fault {
            None if !self.queues.is_memory_lost() => {}
            Some(Fatal::BackendGone(error)) => self.lose_backend(&error, cx),
            None | Some(Fatal::MemoryLost) => {
                command::give_up(self, "guest memory vanished under the device", cx);
            }
        }
        // A command, too, may have stopped or started a queue.
        if !self.is_gone {
            self.update_active();
        }
        self.backend.finish_turn(cx.now, cx.outbox, &mut self.tally);
        self.counters.add(std::mem::take(&mut self.tally));
        more || self.fault.is_some() || (!cx.spins && self.enable_kicks())
    }

    fn next_timeout(&self) -> Option<Instant> {
        if self.is_gone {
            // No turn moves frames any more.
            return self.queues.next_timeout();
        }
        // A queue that is disabled gets no turn.
        let frames = self.pairs.iter().filter(|pair| pair.active);
        let frames = frames.filter_map(|pair| pair.receiver.next_timeout()).min();
        let backend = self.backend.next_timeout();
        earlier(earlier(frames, backend), self.queues.next_timeout())
    }

    fn has_available_chains(&mut self) -> bool {
        !self.is_gone && self.wanted_rings().any(|ring| ring.queue.available() > 0)
    }

    fn enable_kicks(&mut self) -> bool {
        if self.is_gone {
            return false;
        }
        let mut more = false;
        for ring in self.wanted_rings() {
            more |= ring.queue.enable_notifications();
        }
        more
    }

    fn retire(&mut self, cx: &mut Context<'_, Self>) {
        command::disconnect(self, cx);
        for queue in 0..self.pairs.len() {
            if let Some(descriptor) = self.backend.descriptor(queue) {
                cx.poller.remove(descriptor);
            }
        }
        self.backend.retire(cx.outbox);
    }

    fn end(&mut self, cx: &mut Context<'_, Self>) {
        self.turn(cx);
    }
}

impl<B: Backend> VirtioDevice for Device<B> {
    type Rings = NetRings;

    fn queues(&mut self) -> &mut QueueSet<NetRings> {
        &mut self.queues
    }

    fn set_features(&mut self, features: u64) {
        if self.queues.link.is_none() {
            // The MTU of a front-end goes with it.
            self.mtu = self.fixed.mtu;
        }
        // A driver with other features begins with a new configuration space.
        self.announcing &= self.features == features;
        self.features = features;
        self.set_terms();
        self.pairs_set = None;
        if self.is_gone {
            return;
        }
        if features != 0 {
            let (name, terms) = (&self.name, &self.terms);
            tracing::debug!("{name}: the driver has accepted {features:#x}: {terms:?}");
        }
        if let Err(error) = self.backend.set_offloads(self.terms.of_driver) {
            let name = &self.name;
            tracing::warn!(
                "{name}: offloads cannot be set, frames that need them are dropped: {error}"
            );
        }
    }

    fn set_config(&mut self, config: &[u8]) {
        if let Some(&[low, high]) = config.get(Config::MTU) {
            self.mtu = Some(u16::from_le_bytes([low, high])).filter(|mtu| *mtu != 0);
            self.set_terms();
        }
    }

    /// A driver that comes from another device, in a migration or after a restart, is to announce
    /// itself.
    fn queue_started(&mut self, _: u16, started: QueueStarted, _: &mut Context<'_, Self>) {
        if started.resumed && self.terms.announces {
            self.ask_for_announcement(true);
        }
    }

    fn send_rarp(&mut self, mac: [u8; 6], cx: &mut Context<'_, Self>) -> Result<(), String> {
        let mac = Mac(mac);
        if !mac.is_unicast() {
            return Err(format!("{mac} is no address of an interface"));
        }
        if let Some(only) = self.fixed.only_mac.filter(|only| *only != mac) {
            return Err(format!("{mac} is not the guest's address, which is {only}"));
        }
        if self.is_gone {
            return Err("the network back-end has gone".into());
        }
        let (header, frame) = (Header::default(), announcement::rarp(mac));
        let sent = self.backend.send_copy(0, &header, &frame, cx.now);
        sent.map_err(|error| format!("the RARP frame of {mac} was not sent: {error:?}"))?;
        self.tally.announcements += 1;
        Ok(())
    }

    fn quiesce(&mut self, scope: Scope, _: &mut Context<'_, Self>) -> Quiesced {
        match scope {
            Scope::Queue(index) => self.quiesce_half(index / 2, index % 2 == 0),
            Scope::Memory | Scope::Reset => {
                let mut all = Quiesced::Done;
                for pair in 0..self.backend.queues() {
                    for is_receive in [true, false] {
                        let answer = self.quiesce_half(pair, is_receive);
                        all = if answer == Quiesced::Done {
                            all
                        } else {
                            answer
                        };
                    }
                }
                all
            }
        }
    }

    fn reset(&mut self, _: bool, _: &mut Context<'_, Self>) {
        for index in 0..self.pairs.len() {
            if self.backend.posts() {
                // It takes no other chains before it has given these back.
                let _ = self.backend.recall(index, Half::Receive);
            }
            self.unpop(index);
            if let Some(pair) = self.pairs.get_mut(index) {
                pair.transmitter.reset();
            }
        }
        self.ask_for_announcement(false);
        self.pairs_set = None;
    }

    fn memory_replaced(&mut self, _: Option<Arc<Memory>>, _: &mut Context<'_, Self>) {
        self.backend.set_memory(self.queues.memory.as_ref());
    }
}
