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
mod bare;
mod blocking;
mod commands;
mod config;
mod datagrams;
mod engine;
mod errors;
mod events;
mod flows;
mod frontend;
#[cfg(test)]
mod hostile_tests;
mod intake;
mod link;
mod loans;
pub(crate) mod messages;
mod queues;
mod store;
#[cfg(test)]
mod tests;
mod transfer;
mod watch;

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time;

use zerosock_proto::Instant;
use zerosock_proto::vsock::{PortTable, Shard, ShardConfig};
use zerosock_proto::wire::vsock::{Repr, SocketType};

pub use crate::vsock::sockets::{StreamId, StreamState};
pub use arena::ArenaError;
pub use config::{ConfigError, DriverConfig};
pub use errors::{DriverError, RecvError, SendError, WaitError};
pub use events::{DriverEvent, DriverStats};
pub(crate) use frontend::timespec;
pub use frontend::{Frontend, FrontendError, VringAddr};
pub use link::AttachError;
pub use queues::QueueSetupError;
pub use transfer::Loan;
pub use zerosock_proto::vsock::How;
pub use zerosock_proto::{Address, Cid, Port};

use crate::deadline::earlier;
use crate::header;
use crate::vsock::leases::Leases;
use crate::vsock::outgoing::Outgoing;
use crate::vsock::sockets::{News, Sockets};
use arena::Arena;
use datagrams::Datagrams;
use flows::Flows;
use link::{Doorbells, EVENT, Link, RX, TX};
use loans::Loans;
use queues::{EventQueue, RxQueue, TxQueue};
use store::Buffers;
use watch::Watch;

/// How long received bytes may keep a receive slot when they can be moved elsewhere.
const HOLD: time::Duration = time::Duration::from_millis(20);
/// Bytes that all connections together may have in copies because nobody reads them.
const MOST_COPIED: usize = 64 << 20;
/// The receive slots, all that [`Sockets`] has to share out.
const POOL: u32 = 0;
/// Turns that found nothing, after which one looks whether the device is still there: nobody else
/// does for who never sleeps.
const IDLE_TURNS: u32 = 256;

/// A guest without a virtual machine. See the [module](self) for how to drive
/// it.
#[derive(Debug)]
pub struct Driver {
    config: DriverConfig,
    bells: Doorbells,
    watch: Watch,
    /// None between the device's hang-up and the next reconnect.
    link: Option<Link>,
    store: Buffers,
    tx: TxQueue,
    event_queue: EventQueue,
    cid: Cid,
    epoch: time::Instant,
    sockets: Sockets<u16>,
    flows: Flows,
    loans: Loans,
    datagrams: Datagrams,
    listeners: Vec<Listener>,
    /// Told before anything else.
    reset_seen: bool,
    gone_seen: bool,
    /// Connections that wait for a transmit slot, oldest first.
    waiting_for_slot: VecDeque<StreamId>,
    /// Messages that have begun and found no slot for the rest. While there are any, somebody waits
    /// for slots.
    outgoing: VecDeque<Outgoing>,
    stats: DriverStats,
    /// Calls were asked for, and somebody may be asleep.
    armed: bool,
    /// Packets wait in the ring, as the bounds on what is held demand, and no call was asked for.
    blocked: bool,
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
    untold: usize,
}

impl Driver {
    /// Makes the memory, connects to the device at `config.socket`, negotiates
    /// and starts the queues.
    pub fn attach(config: DriverConfig) -> Result<Driver, AttachError> {
        Driver::build(config, Link::connect)
    }

    /// As [`attach`](Driver::attach), over a vhost-user socket that is connected
    /// already, as a process gets it that [attaches](crate::attach) to a daemon.
    /// Such a device cannot be had again:
    /// [`reconnect`](Driver::reconnect) would go to `config.socket`.
    pub fn attach_over(socket: UnixStream, config: DriverConfig) -> Result<Driver, AttachError> {
        Driver::build(config, |config| Link::over(socket, config))
    }

    fn build(
        config: DriverConfig,
        connect: impl FnOnce(&DriverConfig) -> Result<Link, AttachError>,
    ) -> Result<Driver, AttachError> {
        config.check()?;
        let link = connect(&config)?;
        Driver::with_link(config, link, |link, arena, bells| {
            link.start(arena, bells, [0; 3])
        })
    }

    /// Makes the memory and the queues for a device that is there, and has `start` hand them over.
    fn with_link(
        config: DriverConfig,
        mut link: Link,
        start: impl FnOnce(&mut Link, &Arena, &Doorbells) -> Result<(), AttachError>,
    ) -> Result<Driver, AttachError> {
        let arena = Arena::new(&config)?;
        let bells = Doorbells::new()?;
        let mut watch = Watch::new(bells.calls()).map_err(AttachError::Eventfd)?;
        watch
            .device(link.frontend.as_fd())
            .map_err(AttachError::Eventfd)?;
        let [rx_ring, tx_ring, event_ring] = arena.rings;
        let mut rx = RxQueue::new(&arena, rx_ring, link.event_idx)?;
        let tx = TxQueue::new(&arena, tx_ring, link.event_idx)?;
        let mut event_queue = EventQueue::new(&arena, event_ring, link.event_idx)?;
        // Posted before the device looks for the first time: no kick is owed
        // for what it finds then, but it costs nothing to be sure.
        let _ = rx.publish();
        let _ = event_queue.publish();
        start(&mut link, &arena, &bells)?;
        bells.kick(RX);
        bells.kick(EVENT);
        let cid = link.cid;
        let mut shard = new_shard(&config, cid);
        shard.set_seqpacket(link.seqpacket);
        let slots = config.slots();
        // Each slot can be out on a lease or a loan, and as many copies beside.
        let words = Arc::new(Leases::new((4 * usize::from(slots)).max(256)));
        let loans = Loans::new(words.capacity(), slots);
        let mut datagrams = Datagrams::new(cid, words.capacity());
        datagrams.negotiated(link.datagrams, link.datagram_flow);
        let mut sockets = Sockets::new(words, HOLD, MOST_COPIED);
        // The first one: POOL.
        sockets.add_pool(u32::from(slots));
        Ok(Driver {
            store: Buffers::new(arena, rx, shard),
            sockets,
            flows: Flows::default(),
            loans,
            datagrams,
            bells,
            watch,
            link: Some(link),
            tx,
            event_queue,
            cid,
            epoch: time::Instant::now(),
            listeners: Vec::new(),
            reset_seen: false,
            gone_seen: false,
            waiting_for_slot: VecDeque::new(),
            outgoing: VecDeque::new(),
            stats: DriverStats::default(),
            armed: false,
            blocked: false,
            idle_turns: 0,
            trusted: false,
            config,
        })
    }

    /// Attaches to a restarted device with the memory, the queues and the
    /// listeners as they are: what a VMM does for a guest that knows nothing
    /// of it. Each queue goes on at its used index, so that the new device
    /// works off again what the old one had taken and not returned. Connections
    /// have ended with the old device.
    pub fn reconnect(&mut self) -> Result<(), AttachError> {
        if self.link.is_some() {
            self.device_gone();
            self.gone_seen = false;
        }
        let mut link = Link::connect(&self.config)?;
        self.watch
            .device(link.frontend.as_fd())
            .map_err(AttachError::Eventfd)?;
        let bases = self.used_indices();
        link.start(&self.store.arena, &self.bells, bases)?;
        for queue in [RX, TX, EVENT] {
            self.bells.kick(queue);
        }
        self.store.shard.set_seqpacket(link.seqpacket);
        self.datagrams
            .negotiated(link.datagrams, link.datagram_flow);
        self.link = Some(link);
        Ok(())
    }

    /// Stops the queues, as a VMM does for a pause or a snapshot; returns the
    /// index at which each can go on. Until [`resume`](Driver::resume) the
    /// device neither reads nor writes our memory.
    pub fn suspend(&mut self) -> Result<[u16; 3], FrontendError> {
        self.link.as_mut().ok_or(FrontendError::Closed)?.stop()
    }

    /// Hands the memory over again and starts the queues at `bases`.
    pub fn resume(&mut self, bases: [u16; 3]) -> Result<(), AttachError> {
        let link = self.link.as_mut().ok_or(FrontendError::Closed)?;
        link.start(&self.store.arena, &self.bells, bases)?;
        for queue in [RX, TX, EVENT] {
            self.bells.kick(queue);
        }
        Ok(())
    }

    /// Sends the memory table again while the queues run, as a VMM does when
    /// memory is plugged.
    pub fn send_memory_table(&mut self) -> Result<(), FrontendError> {
        let table = [(self.store.arena.fd.as_fd(), self.store.arena.region)];
        self.link
            .as_mut()
            .ok_or(FrontendError::Closed)?
            .frontend
            .set_mem_table(&table)
    }

    /// The used index of each queue as it lies in memory: rx, tx, event.
    pub fn used_indices(&self) -> [u16; 3] {
        let memory = &self.store.arena.memory;
        self.store.arena.rings.map(|ring| {
            // struct virtq_used { le16 flags; le16 idx; … } (virtio 1.2, 2.7.8)
            let mut index = [0u8; 2];
            let mut pieces = Vec::new();
            if memory.translate(ring.used + 2, 2, &mut pieces).is_ok() {
                memory.read(&pieces, 0, &mut index);
            }
            u16::from_le_bytes(index)
        })
    }

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
        if self.wants_slots() || self.tx.is_low() {
            busy |= self.tx.reap()?;
            self.land();
        }
        let timer = self.next_due();
        // Reading, too, may have ended a connection.
        if !self.has_arrivals() && timer.is_none() && !self.store.shard.has_events() {
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
        (self.store.rx.has_used() && !self.is_blocked())
            || self.event_queue.has_used()
            || (self.wants_slots() && self.tx.has_used())
    }

    /// Whether packets have to wait in the ring.
    #[inline]
    fn is_blocked(&self) -> bool {
        self.store.shard.is_backlogged() || !self.sockets.has_room(POOL)
    }

    /// Whether something waits for transmit slots.
    #[inline]
    fn wants_slots(&self) -> bool {
        !self.waiting_for_slot.is_empty()
            || self.store.shard.has_transmit()
            || self.datagrams.want_slots()
    }

    /// When a turn has something to do of itself.
    fn next_due(&self) -> Option<Instant> {
        let streams = earlier(self.store.shard.poll_timeout(), self.sockets.next_timeout());
        earlier(streams, self.datagrams.next_due())
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.sockets.handle_timeout(now, &mut self.store);
        if self.store.shard.poll_timeout().is_some_and(|at| at <= now) {
            self.store.shard.handle_timeout(now);
        }
        self.datagrams.handle_timeout(now);
    }

    /// Resets the connections with most unread copies: there are too many of those.
    #[cold]
    fn shed(&mut self) {
        for stream in self.sockets.overfull() {
            if let Some(flow) = self.sockets.get(stream).and_then(|entry| entry.flow) {
                // A flow that ended meanwhile needs no reset.
                let _ = self.store.shard.reset(flow);
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
        self.idle_turns += 1;
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
            self.store.shard.handle_transport_reset(now);
            self.take_core_events(now);
            self.datagrams.reset(self.cid);
        }
    }

    /// Takes in what the device had shown before it went, while its connections are still there: a
    /// peer's last words and its end. That is a queue at most, also of one that keeps our memory and
    /// goes on. What goes wrong here goes wrong again in the next turn, which says so.
    fn take_last(&mut self, now: Instant) {
        let end = self.stats.rx_packets + u64::from(self.config.slots());
        loop {
            // What nobody has read makes room, as a copy.
            self.sockets.recall(POOL, false, &mut self.store);
            if !self.take_packets(now).unwrap_or(false) || self.stats.rx_packets >= end {
                break;
            }
        }
        self.take_core_events(now);
    }

    /// Shows the device what is queued, without taking anything in.
    pub fn flush(&mut self) {
        if self.store.shard.has_transmit() || self.datagrams.inboxes.table.has_control() {
            let now = self.now();
            // What goes wrong here goes wrong again in the next turn, which says so.
            let _ = self.transmit_control(now);
            let _ = self.transmit_words(now);
        }
        // What is sent first: each publishing waits until its stores have reached the device, and
        // nobody waits for buffers as he does for bytes.
        for (index, ring) in [
            (TX, self.tx.publish()),
            (RX, self.store.rx.publish()),
            (EVENT, self.event_queue.publish()),
        ] {
            if ring {
                self.bells.kick(index);
                self.stats.kicks += 1;
            }
        }
        if self.blocked && self.armed && !self.is_blocked() {
            // Whoever sleeps does not know of packets that can be taken in now.
            self.blocked = false;
            self.watch.wake();
        }
    }

    /// Asks to be called. True: something came meanwhile, and no call may come for it.
    fn arm(&mut self) -> bool {
        self.armed = true;
        self.blocked = self.is_blocked();
        // What may not be taken in must not keep anybody awake.
        let mut more = !self.blocked && self.store.rx.want_calls(true);
        more |= self.event_queue.want_calls(true);
        more |= self.wants_slots() && self.tx.want_calls(true);
        more
    }

    /// Asks for no more calls.
    fn want_no_calls(&mut self) {
        self.armed = false;
        self.store.rx.want_calls(false);
        self.event_queue.want_calls(false);
        self.tx.want_calls(false);
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
        while self.store.shard.has_transmit() {
            let Some(slot) = self.tx.control_slot()? else {
                break;
            };
            // We queue no payload with the core, so a packet carries none.
            match self.store.shard.poll_transmit(now, 0) {
                Some(transmit) => self.transmit(slot, &transmit.header)?,
                None => {
                    self.tx.put_back(slot);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Writes the header into slot `slot` and queues the packet; its payload,
    /// if it has any, lies in the slot already.
    #[inline]
    fn transmit(&mut self, slot: u16, repr: &Repr) -> Result<(), DriverError> {
        let arena = &self.store.arena;
        header::write(&arena.memory, arena.tx_headers.pieces(slot), repr);
        self.tx.push(slot)?;
        self.stats.tx_packets += 1;
        self.stats.tx_bytes += u64::from(repr.len);
        Ok(())
    }

    /// Tells those who wait for a slot that there are some.
    fn tell_of_slots(&mut self) {
        self.tell_of_datagram_slots();
        if self.waiting_for_slot.is_empty() || !self.tx.has_data_slot() {
            return;
        }
        if !self.outgoing.is_empty() {
            self.send_kept();
            if !self.outgoing.is_empty() {
                return;
            }
        }
        while let Some(stream) = self.waiting_for_slot.pop_front() {
            if let Some(entry) = self.sockets.get_mut(stream) {
                entry.wants_room = false;
                self.sockets.announce(stream, News::Writable);
            }
        }
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
        while self.link.is_some()
            && (self.tx.is_busy() || !self.outgoing.is_empty())
            && time::Instant::now() < give_up
        {
            self.flush();
            let returned = self.tx.reap().unwrap_or(true);
            self.tell_of_slots();
            if returned || self.tx.want_calls(true) {
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

fn new_shard(config: &DriverConfig, cid: Cid) -> Shard {
    let shard_config = ShardConfig {
        buf_alloc: config.buf_alloc,
        max_connections: config.max_connections,
        connect_timeout: config.connect_timeout,
        ..ShardConfig::driver(cid)
    };
    let ports = match &config.host_ports {
        Some(ports) => PortTable::giving_out(ports.clone()),
        None => PortTable::new(),
    };
    Shard::new(shard_config, Arc::new(ports))
}
