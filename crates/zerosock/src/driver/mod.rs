//! For tests and tools; programs use [`vsock`](crate::vsock). The driver half: a process as the
//! guest of a vhost-user vsock device, without a virtual machine.
//!
//! A [`Driver`] owns a piece of shared memory, the driver side of three
//! virtqueues (receive, transmit, event) and a protocol core in the role of a
//! driver. To the device it is a guest like any other: it negotiates over the
//! vhost-user socket, posts buffers, kicks eventfds.
//!
//! # How to drive it
//! The driver has no thread. Its calls never sleep, but for [`Driver::poll`]
//! and the `wait_*` calls, which do so until a deadline that they are given:
//!
//! - **commands** ([`connect`](Driver::connect), [`listen`](Driver::listen),
//!   [`accept`](Driver::accept), [`send`](Driver::send),
//!   [`recv`](Driver::recv), [`shutdown`](Driver::shutdown),
//!   [`close`](Driver::close)) act on the protocol core and the buffers at
//!   once;
//! - [`turn`](Driver::turn) takes in what the device returned and shows it
//!   what the commands have queued, in one batch; [`poll`](Driver::poll) does
//!   so and sleeps when there is nothing to do;
//! - [`poll`](Driver::poll) and [`next_event`](Driver::next_event) hand out
//!   [`DriverEvent`]s.
//!
//! What commands queue becomes visible to the device with the next `turn`,
//! `poll` or `flush`: many small packets cost one kick.
//!
//! # What must hold here
//! The device is not trusted: ring entries and headers are read once into
//! private copies, checked, and only the copies are used. There is no unsafe
//! code here; shared memory is touched through `zerosock-ring` alone. On the
//! packet path nothing is allocated once buffers have grown to their size.

mod arena;
#[cfg(test)]
mod arming_tests;
#[cfg(test)]
mod bare;
mod blocking;
mod commands;
mod config;
mod datagrams;
mod engine;
mod errors;
mod events;
mod flows;
#[cfg(test)]
mod hostile_tests;
mod intake;
mod link;
mod loans;
mod message_loans;
#[cfg(test)]
mod message_tests;
pub(crate) mod messages;
mod moving;
#[cfg(test)]
mod moving_tests;
mod queue_pairs;
mod queues;
mod setup;
mod store;
#[cfg(test)]
mod tests;
mod transfer;
#[cfg(test)]
mod turn_tests;
mod watch;

use std::collections::VecDeque;
use std::time;

use zerosock_proto::Instant;
use zerosock_proto::wire::vsock::{Repr, SocketType};

pub use crate::table::sockets::{StreamId, StreamState};
pub use arena::ArenaError;
pub use config::{ConfigError, DriverConfig};
pub use errors::{DriverError, RecvError, SendError, WaitError};
pub use events::{DriverEvent, DriverStats};
pub use link::AttachError;
pub use queues::QueueSetupError;
pub use transfer::Loan;
pub use zerosock_proto::vsock::How;
pub use zerosock_proto::{Address, Cid, Port};
pub use zerosock_vhost_user::frontend::{Frontend, FrontendError, VringAddr};

use crate::io::deadline::earlier;
use crate::table::sockets::Sockets;
use datagrams::Datagrams;
use link::{Doorbells, EVENT, Link};
use loans::Loans;
use queue_pairs::{QueuePair, QueuePairId, RxSlot};
use queues::EventQueue;
use store::Buffers;
use watch::Watch;

/// How long received bytes may keep a receive slot when they can be moved elsewhere.
const HOLD: time::Duration = time::Duration::from_millis(20);
/// Bytes that all connections together may have in copies because nobody reads them.
const MOST_COPIED: usize = 64 << 20;
/// Turns that found nothing, after which one looks whether the device is still there: nobody else
/// does for who never sleeps.
const IDLE_TURNS: u32 = 256;

/// A guest without a virtual machine. See the [module](self) for how to drive
/// it.
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
#[derive(Debug)]
pub struct Driver {
    config: DriverConfig,
    bells: Doorbells,
    watch: Watch,
    /// None between the device's hang-up and the next reconnect.
    link: Option<Link>,
    store: Buffers,
    event_queue: EventQueue,
    cid: Cid,
    epoch: time::Instant,
    sockets: Sockets<RxSlot>,
    loans: Loans,
    datagrams: Datagrams,
    listeners: Vec<Listener>,
    /// Told before anything else.
    reset_seen: bool,
    gone_seen: bool,
    stats: DriverStats,
    /// Calls were asked for, and somebody may be asleep.
    armed: bool,
    idle_turns: u32,
    trusted: bool,
}

#[derive(Debug)]
struct Listener {
    port: Port,
    socket_type: SocketType,
    backlog: usize,
    /// The receive buffer of its connections, if it is not what the driver was told.
    buffer: Option<u32>,
    waiting: VecDeque<StreamId>,
    /// Connections in `waiting` not told of yet.
    unreported: usize,
}

impl Driver {
    /// Our CID, by the device's configuration space.
    pub fn cid(&self) -> Cid {
        self.cid
    }

    /// Whether our memory is made of huge pages.
    pub fn huge_pages(&self) -> bool {
        self.store.arena.huge_pages
    }

    /// Counters since the driver was attached.
    pub fn stats(&self) -> DriverStats {
        let counted = self.sockets.counted();
        DriverStats {
            rx_bytes: counted.received,
            rx_overflow_bytes: counted.copied_aside,
            rx_malformed: self.stats.rx_malformed + self.datagrams.malformed,
            rx_dropped: self.stats.rx_dropped + self.datagrams.dropped,
            ..self.stats
        }
    }

    /// Whether a device is attached: false between
    /// [`DriverEvent::DeviceGone`] and a successful
    /// [`reconnect`](Driver::reconnect).
    pub fn is_attached(&self) -> bool {
        self.link.is_some()
    }

    /// The control socket, to say more than the driver says by itself.
    pub fn frontend(&mut self) -> Option<&mut Frontend> {
        self.link.as_mut().map(|link| &mut link.frontend)
    }

    /// Connections with a handle, those that have ended but are not closed
    /// included.
    pub fn connections(&self) -> usize {
        self.sockets.len()
    }

    /// Takes in what the device returned, and shows it what is queued. Returns
    /// whether anything was taken in.
    pub fn turn(&mut self) -> Result<bool, DriverError> {
        self.store.check()?;
        let mut busy = false;
        for queue_pair in self.store.queue_pairs.ids() {
            if self.wants_slots(queue_pair) || self.store.queue_pairs[queue_pair].tx.is_low() {
                busy |= self.store.queue_pairs[queue_pair].tx.reap()?;
                self.land();
            }
        }
        let timer = self.next_due();
        // Reading, too, may have ended a connection.
        if !self.has_arrivals() && timer.is_none() && !self.has_core_events() {
            self.idle(busy)?;
            self.tell_of_slots();
            self.flush();
            return Ok(busy);
        }
        // The one look at the clock, and only when there is a use for it.
        let now = self.now();
        busy |= self.take_events(now)?;
        if timer.is_some_and(|at| at <= now) {
            self.handle_timeout(now);
        }
        busy |= self.take_packets(now)?;
        if self.sockets.is_over() {
            self.shed();
        }
        self.take_core_events(now);
        self.transmit_control(now)?;
        self.transmit_words(now)?;
        self.idle(busy)?;
        self.tell_of_slots();
        self.flush();
        Ok(busy)
    }

    /// Whether a turn would take something in: a look at indices.
    #[inline]
    fn has_arrivals(&self) -> bool {
        let arrivals = |id| {
            let queue_pair = &self.store.queue_pairs[id];
            (queue_pair.rx.has_used() && !self.is_blocked(id))
                || (queue_pair.wants_slots() && queue_pair.tx.has_used())
        };
        self.store.queue_pairs.ids().any(arrivals)
            || self.event_queue.has_used()
            || self.has_landed()
    }

    /// Whether the protocol core has something to tell.
    #[inline]
    fn has_core_events(&self) -> bool {
        let mut queue_pairs = self.store.queue_pairs.iter();
        queue_pairs.any(|queue_pair| queue_pair.shard.has_events())
    }

    /// Whether packets have to wait in the ring.
    #[inline]
    fn is_blocked(&self, queue_pair: QueuePairId) -> bool {
        self.store.queue_pairs[queue_pair].shard.is_backlogged()
            || !self.sockets.has_room(queue_pair.pool())
    }

    /// Whether something waits for transmit slots of a queue_pair.
    #[inline]
    fn wants_slots(&self, queue_pair: QueuePairId) -> bool {
        let datagrams = queue_pair == QueuePairId::FIRST && self.datagrams.want_slots();
        datagrams || self.store.queue_pairs[queue_pair].wants_slots()
    }

    /// When a turn has something to do of itself.
    fn next_due(&self) -> Option<Instant> {
        let queue_pairs = self.store.queue_pairs.iter();
        let core = queue_pairs
            .filter_map(|queue_pair| queue_pair.shard.poll_timeout())
            .min();
        let streams = earlier(core, self.sockets.next_timeout());
        earlier(streams, self.datagrams.next_due())
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.sockets.handle_timeout(now, &mut self.store);
        for queue_pair in self.store.queue_pairs.iter_mut() {
            if queue_pair.shard.poll_timeout().is_some_and(|at| at <= now) {
                queue_pair.shard.handle_timeout(now);
            }
        }
        self.datagrams.handle_timeout(now);
    }

    /// Resets the connections with most unread copies: there are too many of those.
    #[cold]
    fn shed(&mut self) {
        for stream in self.sockets.overfull() {
            if let Some((queue_pair, flow)) = self.flow_of(stream) {
                // A flow that ended meanwhile needs no reset.
                let _ = self.store.queue_pairs[queue_pair].shard.reset(flow);
            }
            self.sockets.give_up(stream, &mut self.store);
        }
    }

    /// Looks now and then whether the device is still there, for callers that never sleep. Not
    /// while somebody may sleep: what was told is told to him.
    fn idle(&mut self, busy: bool) -> Result<(), DriverError> {
        if busy {
            self.idle_turns = 0;
            return Ok(());
        }
        self.idle_turns = self.idle_turns.saturating_add(1);
        if self.idle_turns >= IDLE_TURNS && !self.armed {
            self.idle_turns = 0;
            if self.watch.forget()? {
                self.device_gone();
            }
        }
        Ok(())
    }

    /// The device hung up: all connections end, as they do when the transport is reset.
    fn device_gone(&mut self) {
        if self.link.take().is_some() {
            self.gone_seen = true;
            let now = self.now();
            self.take_last(now);
            for queue_pair in self.store.queue_pairs.iter_mut() {
                queue_pair.shard.handle_transport_reset(now);
                queue_pair.gathered.clear();
            }
            self.take_core_events(now);
            self.datagrams.reset(self.cid);
        }
    }

    /// Takes in what the device had shown before it went, while its connections are still there: a
    /// peer's last words and its end. That is a queue at most, also of one that keeps our memory and
    /// goes on. What goes wrong here goes wrong again in the next turn, which says so.
    fn take_last(&mut self, now: Instant) {
        let slots = usize::from(self.config.slots()) * self.store.queue_pairs.len();
        let end = self.stats.rx_packets + slots as u64;
        loop {
            // What nobody has read makes room, as a copy.
            for queue_pair in self.store.queue_pairs.ids() {
                self.sockets
                    .recall(queue_pair.pool(), false, &mut self.store);
            }
            if !self.take_packets(now).unwrap_or(false) || self.stats.rx_packets >= end {
                break;
            }
        }
        self.take_core_events(now);
    }

    /// Shows the device what is queued, without taking anything in.
    pub fn flush(&mut self) {
        let speaks = |queue_pair: &QueuePair| queue_pair.shard.has_transmit();
        let control = self.store.queue_pairs.iter().any(speaks);
        if control || self.datagrams.inboxes.table.has_control() {
            let now = self.now();
            // What goes wrong here goes wrong again in the next turn, which says so.
            let _ = self.transmit_control(now);
            let _ = self.transmit_words(now);
        }
        for id in self.store.queue_pairs.ids() {
            let queue_pair = &mut self.store.queue_pairs[id];
            // What is sent first: each publishing waits until its stores have reached the device,
            // and nobody waits for buffers as he does for bytes.
            for (queue, ring) in [
                (id.tx(), queue_pair.tx.publish()),
                (id.rx(), queue_pair.rx.publish()),
            ] {
                self.stats.kicks += u64::from(self.bells.kick_if(ring, queue));
            }
            if self.store.queue_pairs[id].blocked && self.armed && !self.is_blocked(id) {
                // Whoever sleeps does not know of packets that can be taken in now.
                self.store.queue_pairs[id].blocked = false;
                self.watch.wake();
            }
        }
        let ring = self.event_queue.publish();
        self.stats.kicks += u64::from(self.bells.kick_if(ring, EVENT));
    }

    /// Asks to be called. True: something came meanwhile, and no call may come for it.
    fn arm(&mut self) -> bool {
        self.armed = true;
        // What came back with a look for a free slot brings no call any more.
        let mut more = self.land();
        more |= self.event_queue.want_calls(true);
        for id in self.store.queue_pairs.ids() {
            let blocked = self.is_blocked(id);
            let queue_pair = &mut self.store.queue_pairs[id];
            queue_pair.blocked = blocked;
            // What may not be taken in must not keep anybody awake.
            more |= !blocked && queue_pair.rx.want_calls(true);
            let datagrams = (id == QueuePairId::FIRST).then_some(&self.datagrams);
            if queue_pair.wants_slots() || datagrams.is_some_and(Datagrams::want_a_slot) {
                more |= queue_pair.tx.want_calls(true);
            } else if let Some(datagrams) = datagrams
                && let Some(packets) = datagrams.packets_until_named()
            {
                more |= queue_pair.tx.want_call_after(packets);
            }
        }
        more
    }

    /// Asks for no more calls.
    fn want_no_calls(&mut self) {
        self.armed = false;
        self.event_queue.want_calls(false);
        for queue_pair in self.store.queue_pairs.iter_mut() {
            queue_pair.rx.want_calls(false);
            queue_pair.tx.want_calls(false);
        }
    }

    /// Sleeps until the device calls, something is due, or `deadline`;
    /// returns at once when something came while we went to sleep.
    fn sleep(&mut self, deadline: Option<time::Instant>) -> Result<(), DriverError> {
        if !self.arm() {
            let timeout = self.next_due().map(|at| self.wall(at));
            self.stats.sleeps += 1;
            if self.watch.sleep(earlier(deadline, timeout))? {
                self.device_gone();
            }
        }
        self.want_no_calls();
        Ok(())
    }

    /// Packets that the protocol core wants out, while there are slots.
    fn transmit_control(&mut self, now: Instant) -> Result<(), DriverError> {
        for queue_pair in self.store.queue_pairs.ids() {
            self.transmit_control_of(queue_pair, now)?;
        }
        Ok(())
    }

    fn transmit_control_of(
        &mut self,
        queue_pair: QueuePairId,
        now: Instant,
    ) -> Result<(), DriverError> {
        while self.store.queue_pairs[queue_pair].shard.has_transmit() {
            let Some(slot) = self.store.queue_pairs[queue_pair].tx.control_slot()? else {
                break;
            };
            // Payload that the core has waits for slots of its own.
            match self.store.queue_pairs[queue_pair]
                .shard
                .poll_transmit(now, 0)
            {
                Some(transmit) => self.transmit(queue_pair, slot, &transmit.header)?,
                None => {
                    self.store.queue_pairs[queue_pair].tx.put_back(slot);
                    break;
                }
            }
        }
        if self.store.queue_pairs[queue_pair].shard.has_data() {
            self.send_gathered(queue_pair, now)?;
        }
        Ok(())
    }

    /// Writes the header into slot `slot` and queues the packet; its payload,
    /// if it has any, lies in the slot already.
    #[inline]
    fn transmit(
        &mut self,
        queue_pair: QueuePairId,
        slot: u16,
        repr: &Repr,
    ) -> Result<(), DriverError> {
        self.store.queue_pairs[queue_pair].send(slot, repr)?;
        self.count_sent(repr);
        Ok(())
    }

    #[inline]
    fn count_sent(&mut self, repr: &Repr) {
        self.stats.tx_packets += 1;
        self.stats.tx_bytes += u64::from(repr.len);
    }

    /// Tells those who wait for a slot that there are some.
    fn tell_of_slots(&mut self) {
        self.tell_of_datagram_slots();
        for queue_pair in self.store.queue_pairs.ids() {
            self.tell_of_slots_in(queue_pair);
        }
    }

    fn tell_of_slots_in(&mut self, queue_pair: QueuePairId) {
        let of = &self.store.queue_pairs[queue_pair];
        let waits = !of.waiters.is_empty() || !of.outgoing.is_empty();
        if !waits || !of.tx.has_data_slot() {
            return;
        }
        if !of.outgoing.is_empty() {
            self.send_kept(queue_pair);
            if !self.store.queue_pairs[queue_pair].outgoing.is_empty() {
                return;
            }
        }
        let waiters = &mut self.store.queue_pairs[queue_pair].waiters;
        self.sockets.tell_of_room(waiters);
    }

    /// Keeps receive buffers from the device as they come back, or posts all
    /// that were kept: a guest that is slow to refill its queue.
    #[doc(hidden)]
    pub fn withhold_buffers(&mut self, withhold: bool) -> Result<(), DriverError> {
        self.store.withhold(withhold);
        Ok(self.store.check()?)
    }

    /// Receive buffers kept from the device now.
    #[doc(hidden)]
    pub fn withheld_buffers(&self) -> usize {
        self.store.withheld()
    }

    fn now(&self) -> Instant {
        since(self.epoch)
    }

    /// A time of the protocol core's on the system's clock.
    fn wall(&self, at: Instant) -> time::Instant {
        self.epoch + time::Duration::from_nanos(at.as_nanos())
    }
}

/// The time of a protocol core that began at `epoch`.
fn since(epoch: time::Instant) -> Instant {
    let since = epoch.elapsed().as_nanos();
    Instant::from_nanos(u64::try_from(since).unwrap_or(u64::MAX))
}

/// How long a driver that goes waits for a device to take what was sent. A device in `serve` needs
/// microseconds, or, with a stalled reader, the time after which it copies; an embedding program
/// may not be driving its device at all.
const LINGER: time::Duration = time::Duration::from_millis(200);

impl Drop for Driver {
    /// Lets the device take what was sent: it reads our memory, but only what it took before it
    /// sees us gone. One that does not get to it in time is left alone.
    fn drop(&mut self) {
        let give_up = time::Instant::now() + LINGER;
        let is_busy = |queue_pair: &QueuePair| {
            queue_pair.tx.is_busy()
                || !queue_pair.outgoing.is_empty()
                || queue_pair.shard.has_data()
        };
        for queue_pair in self.store.queue_pairs.iter_mut() {
            for flow in queue_pair.gathered.flows() {
                queue_pair.shard.let_go(flow);
            }
        }
        while self.link.is_some()
            && self.store.queue_pairs.iter().any(is_busy)
            && time::Instant::now() < give_up
        {
            self.flush();
            let mut returned = false;
            for queue_pair in self.store.queue_pairs.iter_mut() {
                returned |= queue_pair.tx.reap().unwrap_or(true);
            }
            self.tell_of_slots();
            let queue_pairs = self.store.queue_pairs.iter_mut();
            // All of them are to be asked.
            if returned
                || queue_pairs.fold(false, |more, queue_pair| {
                    queue_pair.tx.want_calls(true) | more
                })
            {
                continue;
            }
            match self.watch.sleep(Some(give_up)) {
                Ok(false) => {}
                // It has gone itself, or cannot be waited for.
                Ok(true) | Err(_) => return,
            }
        }
    }
}
