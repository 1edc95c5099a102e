//! The driver half of a vsock device: a process acts as the guest of a vhost-user device, without a
//! virtual machine. [`Endpoint`](crate::vsock::Endpoint) is built on it.
//!
//! A [`Driver`] owns shared memory, the driver side of three virtqueues (receive, transmit, event)
//! and a protocol core in the driver role. The device treats it as any guest: it negotiates over
//! the vhost-user socket, posts buffers and kicks eventfds.
//!
//! # Invariants
//! - The device is not trusted: ring entries and headers are read once into private copies, which
//!   are validated and used exclusively.
//! - There is no unsafe code here; shared memory is accessed through `zerosock-ring` only.
//! - The packet path does not allocate once its buffers have grown.
//!
//! # How to drive it
//! The driver has no thread, and only its drop waits. An endpoint calls it through the trait [`Backend`]:
//! commands act on the protocol core and the buffers at once, and [`Driver::drive`] receives what the device
//! sent and returned, and publishes what the commands queued, in one batch. Queued packets become visible to
//! the device with the next `drive` or `flush`, so that many small packets cost one kick.
//!
//! The module is hidden, and public for the guests of tests and benchmarks (`tests/common/driver.rs`), which
//! call the same trait and the methods of [`Driver`] that stop, start and attach its queues again.

mod arena;
#[cfg(test)]
mod arming_tests;
mod backend;
mod config;
mod datagrams;
mod doorbell;
mod errors;
mod guest;
pub(crate) mod guest_device;
mod half;
#[cfg(test)]
mod hostile_tests;
mod intake;
mod link;
#[cfg(test)]
mod message_tests;
mod queue_pairs;
mod queues;
mod setup;
mod stats;
mod store;
#[cfg(test)]
mod test_device;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod turn_tests;

use std::time;

use zerosock_proto::Instant;
use zerosock_proto::wire::vsock::Repr;

pub use crate::registration::Start;
pub use crate::table::backend::{Backend, ReadySource};
pub use crate::table::calls::ConnectionCalls;
pub use crate::table::sending::SendingCalls;
pub use crate::table::sockets::{StreamId, StreamState};
pub use crate::table::transfers::{Publish, RecvFault, SendFault};
pub use arena::ArenaError;
pub use config::{ConfigError, DriverConfig};
pub use errors::DriverError;
pub use guest_device::{FEATURES, GuestDevice};
pub use link::DriverAttachError;
pub use queues::QueueSetupError;
pub use stats::DriverStats;
pub use zerosock_proto::vsock::{ConnectError, Directions, ListenError};
pub use zerosock_proto::wire::vsock::SocketType;
pub use zerosock_proto::{Address, Cid, Port};
pub use zerosock_vhost_user::frontend::{Frontend, FrontendError, VringAddr};
pub use zerosock_virtio::poller::Events;

use crate::table::listeners::Listeners;
use crate::table::loans::Loans;
use crate::table::send_calls::SendCalls;
use crate::table::sockets::Sockets;
use crate::table::tally::Tally;
use datagrams::Datagrams;
use doorbell::Doorbell;
use link::{EVENT, Link};
use queue_pairs::{QueuePair, QueuePairId, RxSlot};
use queues::EventQueue;
use store::Buffers;
use zerosock_virtio::deadline::earlier;
use zerosock_virtio::watch::Watch;

/// How long received bytes may hold a receive slot that can be copied.
const HOLD: time::Duration = time::Duration::from_millis(20);
/// Limit on the copied unread bytes of all connections.
const MOST_COPIED: usize = 64 << 20;
/// Turns without work after which the driver checks whether the device has hung up; a caller that
/// never sleeps would not notice otherwise.
const IDLE_TURNS: u32 = 256;

/// The driver of a vsock device. See the [module](self) for how to drive it.
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
#[derive(Debug)]
pub struct Driver {
    config: DriverConfig,
    doorbell: Doorbell,
    watch: Watch,
    /// `None` between the device's hang-up and the next reconnect.
    link: Option<Link>,
    store: Buffers,
    event_queue: EventQueue,
    cid: Cid,
    epoch: time::Instant,
    sockets: Sockets<RxSlot>,
    loans: Loans<u16>,
    tally: Tally,
    datagrams: Datagrams,
    listeners: Listeners,
    stats: DriverStats,
    /// Notifications were requested, and a thread may be asleep.
    armed: bool,
    idle_turns: u32,
    trusted: bool,
}

impl Driver {
    /// The CID in the device's configuration space.
    pub fn cid(&self) -> Cid {
        self.cid
    }

    /// Whether the shared memory consists of huge pages.
    pub fn huge_pages(&self) -> bool {
        self.store.arena.shared.huge_pages
    }

    /// Counters since the driver was attached.
    pub fn stats(&self) -> DriverStats {
        DriverStats {
            rx_malformed: self.stats.rx_malformed + self.datagrams.malformed,
            rx_dropped: self.stats.rx_dropped + self.datagrams.dropped,
            ..self.stats
        }
    }

    /// Whether a device is attached: false between its hang-up and a successful
    /// [`reconnect`](Driver::reconnect).
    pub fn is_attached(&self) -> bool {
        self.link.is_some()
    }

    /// Sets the time limit of later vhost-user requests.
    pub(crate) fn set_control_timeout(&mut self, timeout: time::Duration) {
        self.config.control_timeout = timeout;
        if let Some(frontend) = self.frontend() {
            frontend.set_timeout(timeout);
        }
    }

    /// The control socket, for requests that the driver does not send by itself; none on memory that it was given.
    pub fn frontend(&mut self) -> Option<&mut Frontend> {
        self.link.as_mut().and_then(Link::frontend)
    }

    /// The number of queue pairs in use.
    pub fn queue_pairs(&self) -> u16 {
        self.store.queue_pairs.len() as u16
    }

    /// Connections with a handle, including ended ones that are not closed yet.
    pub fn connections(&self) -> usize {
        self.sockets.len()
    }

    /// Receives what the device sent and returned, and publishes what is queued. Returns whether
    /// anything was received.
    pub fn drive(&mut self) -> Result<bool, DriverError> {
        self.store.check()?;
        let mut busy = false;
        for queue_pair in self.store.queue_pairs.ids() {
            if self.wants_slots(queue_pair) || self.store.queue_pairs[queue_pair].tx.is_low() {
                busy |= self.store.queue_pairs[queue_pair].tx.reap()?;
                self.collect_consumed_datagrams();
            }
        }
        let timer = self.next_due();
        // Reading may have ended a connection.
        if !self.has_arrivals() && timer.is_none() && !self.has_core_events() {
            self.check_for_hang_up(busy)?;
            self.wake_slot_waiters();
            self.flush();
            return Ok(busy);
        }
        // The clock is read once, and only if needed.
        let now = self.now();
        busy |= self.take_events(now)?;
        if timer.is_some_and(|at| at <= now) {
            self.handle_timeout(now);
        }
        busy |= self.take_packets(now)?;
        if self.sockets.is_over_copy_limit() {
            self.reset_largest_holders();
        }
        self.take_core_events(now);
        self.transmit_control(now)?;
        self.transmit_flow_control(now)?;
        self.check_for_hang_up(busy)?;
        self.wake_slot_waiters();
        self.flush();
        Ok(busy)
    }

    /// Whether a turn would receive anything, by a check of the ring indices.
    #[inline]
    fn has_arrivals(&self) -> bool {
        let arrivals = |id| {
            let queue_pair = &self.store.queue_pairs[id];
            (queue_pair.rx.has_used() && !self.is_blocked(id))
                || (queue_pair.wants_slots() && queue_pair.tx.has_used())
        };
        self.store.queue_pairs.ids().any(arrivals)
            || self.event_queue.has_used()
            || self.has_consumed_datagrams()
    }

    /// Whether the protocol core has an event.
    #[inline]
    fn has_core_events(&self) -> bool {
        let mut queue_pairs = self.store.queue_pairs.iter();
        queue_pairs.any(|queue_pair| queue_pair.shard.has_events())
    }

    /// Whether packets must wait in the ring.
    #[inline]
    fn is_blocked(&self, queue_pair: QueuePairId) -> bool {
        self.store.queue_pairs[queue_pair].shard.is_backlogged()
            || !self.sockets.has_room(queue_pair.pool())
    }

    /// Whether a sender waits for transmit slots of a queue pair.
    #[inline]
    fn wants_slots(&self, queue_pair: QueuePairId) -> bool {
        let datagrams = queue_pair == QueuePairId::FIRST && self.datagrams.waits_for_slots();
        datagrams || self.store.queue_pairs[queue_pair].wants_slots()
    }

    /// When the next timer is due.
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

    /// Resets the connections with most copied bytes, because the limit is exceeded.
    #[cold]
    fn reset_largest_holders(&mut self) {
        for stream in self.sockets.connections_to_shed() {
            if let Some((queue_pair, flow)) = self.flow_of(stream) {
                // A flow that ended meanwhile needs no reset.
                let _ = self.store.queue_pairs[queue_pair].shard.reset(flow);
            }
            self.sockets.mark_reset(stream, &mut self.store);
        }
    }

    /// Checks from time to time whether the device has hung up, for callers that never sleep. Not
    /// while armed: a sleeping thread must find the notification.
    fn check_for_hang_up(&mut self, busy: bool) -> Result<(), DriverError> {
        if busy {
            self.idle_turns = 0;
            return Ok(());
        }
        self.idle_turns = self.idle_turns.saturating_add(1);
        if self.idle_turns >= IDLE_TURNS && !self.armed {
            self.idle_turns = 0;
            if self.watch.clear()? && self.doorbell.has_hung_up() {
                self.device_gone();
            }
        }
        Ok(())
    }

    /// Ends all connections after the device hung up, as for a transport reset.
    fn device_gone(&mut self) {
        if self.link.take().is_some() {
            let now = self.now();
            self.receive_before_hang_up(now);
            for queue_pair in self.store.queue_pairs.iter_mut() {
                queue_pair.shard.handle_transport_reset(now);
                queue_pair.coalesced.clear();
            }
            self.take_core_events(now);
            self.datagrams.reset(self.cid);
        }
    }

    /// Receives what the device had published before it hung up, while its connections still exist:
    /// the last bytes and shutdowns of the peers. Bounded by the size of the queue, even if the
    /// device keeps writing the memory. An error recurs in the next turn, which reports it.
    fn receive_before_hang_up(&mut self, now: Instant) {
        let slots = usize::from(self.config.slots()) * self.store.queue_pairs.len();
        let end = self.tally.packets_received + slots as u64;
        loop {
            // Unread bytes are copied to make room.
            for queue_pair in self.store.queue_pairs.ids() {
                self.sockets
                    .recall(queue_pair.pool(), false, &mut self.store);
            }
            if !self.take_packets(now).unwrap_or(false) || self.tally.packets_received >= end {
                break;
            }
        }
        self.take_core_events(now);
    }

    /// Publishes what is queued, without receiving anything.
    pub fn flush(&mut self) {
        // The errors here recur in the next turn, which reports them.
        if self.datagrams.inboxes.table.has_control() {
            let _ = self.transmit_flow_control(self.now());
        }
        for id in self.store.queue_pairs.ids() {
            if self.store.queue_pairs[id].shard.has_transmit() {
                let _ = self.transmit_control_of(id, self.now());
            }
            self.publish(id);
            if self.store.queue_pairs[id].blocked && self.armed && !self.is_blocked(id) {
                // A sleeping thread does not know of packets that may be received now.
                self.store.queue_pairs[id].blocked = false;
                self.watch.wake();
            }
        }
        if self.event_queue.publish() {
            self.kick(EVENT);
        }
    }

    /// Publishes the packets and the returned slots of a queue pair. Packets first: each publication waits
    /// until its stores have reached the device, and the device waits for packets rather than for buffers.
    #[inline(always)] // every packet
    fn publish(&mut self, id: QueuePairId) {
        let queue_pair = &mut self.store.queue_pairs[id];
        let (kick_tx, kick_rx) = (queue_pair.tx.publish(), queue_pair.rx.publish());
        if kick_tx {
            self.kick(id.tx());
        }
        if kick_rx && !(kick_tx && self.doorbell.is_shared()) {
            self.kick(id.rx());
        }
    }

    /// Notifies the device, which has asked for it.
    fn kick(&mut self, queue: usize) {
        self.doorbell.kick(queue);
        self.tally.notifications += 1;
    }

    /// Requests notifications. Returns true if work arrived meanwhile, for which no notification
    /// may come.
    fn arm(&mut self) -> bool {
        let has_unsent = |pair: &QueuePair| pair.tx.is_dirty() || pair.shard.has_transmit();
        if self.store.queue_pairs.iter().any(has_unsent) {
            // A request for credit, of a send that found none.
            self.flush();
        }
        self.armed = true;
        // Slots that the device has returned already cause no notification.
        let mut more = self.collect_consumed_datagrams() | self.has_core_events();
        more |= self.doorbell.has_unsent_kick();
        more |= self.event_queue.request_notifications(true);
        for id in self.store.queue_pairs.ids() {
            let blocked = self.is_blocked(id);
            let queue_pair = &mut self.store.queue_pairs[id];
            queue_pair.blocked = blocked;
            // Packets that may not be received yet must not keep the caller awake.
            more |= !blocked && queue_pair.rx.request_notifications(true);
            let datagrams = (id == QueuePairId::FIRST).then_some(&self.datagrams);
            if queue_pair.wants_slots() || datagrams.is_some_and(Datagrams::waits_for_one_slot) {
                more |= queue_pair.tx.request_notifications(true);
            } else if let Some(datagrams) = datagrams
                && let Some(packets) = datagrams.packets_until_named()
            {
                more |= queue_pair.tx.request_notification_after(packets);
            }
        }
        more
    }

    /// Asks the device for no notifications, because the caller polls.
    fn disable_notifications(&mut self) {
        self.armed = false;
        self.event_queue.request_notifications(false);
        for queue_pair in self.store.queue_pairs.iter_mut() {
            queue_pair.rx.request_notifications(false);
            queue_pair.tx.request_notifications(false);
        }
    }

    /// Sends packets of the protocol core while there are slots.
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
            // Payload of the core needs a data slot.
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
        self.half(queue_pair).send_coalesced();
        Ok(())
    }

    /// Writes the header into slot `slot` and queues the packet; its payload, if any, is already in
    /// the slot.
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
        self.tally.count_sent(repr.len);
    }

    /// Wakes the senders that wait for slots, if there are some.
    fn wake_slot_waiters(&mut self) {
        self.wake_datagram_senders();
        for queue_pair in self.store.queue_pairs.ids() {
            self.wake_slot_waiters_of(queue_pair);
        }
    }

    fn wake_slot_waiters_of(&mut self, queue_pair: QueuePairId) {
        let of = &self.store.queue_pairs[queue_pair];
        let waits = !of.waiters.is_empty() || !of.outgoing.is_empty();
        if !waits || !of.tx.has_data_slot() {
            return;
        }
        if !of.outgoing.is_empty() {
            self.half(queue_pair).send_outgoing();
            if !self.store.queue_pairs[queue_pair].outgoing.is_empty() {
                return;
            }
        }
        let waiters = &mut self.store.queue_pairs[queue_pair].waiters;
        self.sockets.wake_waiters(waiters);
    }

    /// Keeps returned receive buffers from the device, or posts all kept ones: emulates a guest
    /// that is slow to refill its queue.
    #[doc(hidden)]
    pub fn withhold_buffers(&mut self, withhold: bool) -> Result<(), DriverError> {
        self.store.withhold(withhold);
        Ok(self.store.check()?)
    }

    /// Receive buffers kept from the device.
    #[doc(hidden)]
    pub fn withheld_buffers(&self) -> usize {
        self.store.withheld()
    }

    fn now(&self) -> Instant {
        since(self.epoch)
    }

    /// Converts a time of the protocol core to the system clock.
    fn wall(&self, at: Instant) -> time::Instant {
        self.epoch + time::Duration::from_nanos(at.as_nanos())
    }
}

/// The current time of a protocol core that began at `epoch`.
fn since(epoch: time::Instant) -> Instant {
    let since = epoch.elapsed().as_nanos();
    Instant::from_nanos(u64::try_from(since).unwrap_or(u64::MAX))
}

/// How long a dropped driver waits for the device to take sent packets. A device in `serve` needs
/// microseconds or, with a stalled reader, its hold time; an embedding program may not be driving
/// its device at all.
const LINGER: time::Duration = time::Duration::from_millis(200);

impl Drop for Driver {
    /// Waits for the device to take sent packets: it reads only what it took before it sees the
    /// hang-up. The wait is limited to `LINGER`.
    fn drop(&mut self) {
        let give_up = time::Instant::now() + LINGER;
        let is_busy = |queue_pair: &QueuePair| {
            queue_pair.tx.is_busy()
                || !queue_pair.outgoing.is_empty()
                || queue_pair.shard.has_data()
        };
        for queue_pair in self.store.queue_pairs.iter_mut() {
            for flow in queue_pair.coalesced.flows() {
                queue_pair.shard.flush_coalesced(flow);
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
            self.wake_slot_waiters();
            let queue_pairs = self.store.queue_pairs.iter_mut();
            // Every queue pair must be checked.
            if returned
                || queue_pairs.fold(false, |more, queue_pair| {
                    queue_pair.tx.request_notifications(true) | more
                })
            {
                continue;
            }
            match self.watch.sleep(Some(give_up)) {
                Ok(event) if event && self.doorbell.has_hung_up() => return,
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }
}
