//! For tests and tools; programs use [`vsock`](crate::vsock).
//!
//! The device half: a vhost-user back-end that gives a guest a vsock device.
//!
//! A `Device` belongs to one worker. It has the rings on one side and the protocol core on the
//! other, and bridges each of the guest's connections to a host socket or to a sibling:
//!
//! - `from_guest`, `flush`: packets from the guest's transmit queue; payload goes by `sendmsg` from
//!   guest memory into the socket;
//! - `to_guest`: packets to the guest; payload comes by `recvmsg` from the socket into the
//!   buffers that the guest has posted;
//! - `events`, `host`, `backlog`, `lingering`, `sibling`: connections that come, change and go;
//! - `messages`, `message_sockets`: connections that carry messages;
//! - `program`, `app`, `app_store`, `lending`, `message_loans`: the program that embeds the device,
//!   and connections with it;
//! - `command`: what the VMM says, through [`control`];
//! - `member`: the device as one of many that come and go;
//! - `queue_pairs`: the device as one of several queue pairs.
//!
//! What must hold: a turn works to a budget and never blocks; each chain popped is completed
//! once; no allocation, lock or search on the way of a packet.

pub(crate) mod app;
pub(crate) mod app_store;
#[cfg(test)]
mod arming_tests;
mod backlog;
#[cfg(test)]
pub(crate) mod bare;
mod bridge;
mod command;
pub(crate) mod datagrams;
mod events;
mod flush;
mod from_guest;
mod gathering;
pub(crate) mod host;
pub(crate) mod host_sockets;
pub(crate) mod lending;
mod lingering;
mod member;
mod message_loans;
mod message_sockets;
#[cfg(test)]
mod message_tests;
mod messages;
pub(crate) mod model;
pub(crate) mod outbound;
pub(crate) mod outbox;
pub(crate) mod placing;
pub(crate) mod program;
pub(crate) mod queue_pair_ports;
pub(crate) mod queue_pairs;
#[cfg(test)]
mod queue_pairs_tests;
#[cfg(test)]
mod ready_tests;
mod ring;
mod sibling;
pub(crate) mod sibling_message;
#[cfg(test)]
mod time_limit_tests;
mod timers;
mod to_guest;

use crate::device::host_sockets::hybrid::OkConvention;
use crate::device::outbox::Outbox;
use crate::io::clock::Clock;
use crate::io::deadline::earlier;
use crate::io::poller::Poller;
use crate::routing::{DeviceAddr, Routes};
use crate::stats::{Counters, Holdings};
use crate::table::gathered::Gathered;
use crate::table::outgoing::Outgoing;
use bridge::{Bridge, BridgePeer};
use host::Handshake;
pub(crate) use host::HostEnd;
use outbound::Spares;
use ring::Ring;
use slab::Slab;
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use timers::Timers;
use zerosock_proto::vsock::{FlowId, Shard};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Cid, Instant, Port};
use zerosock_ring::Memory;
use zerosock_sys::account::{Account, Budget};
use zerosock_sys::notify::Notifier;
use zerosock_vhost_user::{FrontendLink, LogLimit};

/// Index of the queue of buffers for packets to the guest (virtio 1.2, 5.10.2).
pub(crate) const RX: u16 = 0;
/// Index of the queue of packets from the guest.
pub(crate) const TX: u16 = 1;
/// Index of the queue of events.
pub(crate) const EVENT: u16 = 2;

/// Payload bytes moved each way in one turn of a device before others have theirs: about a
/// millisecond.
pub(crate) const TURN_BYTES: usize = 2 << 20;

/// Places for bridges whose memory is kept when there are none.
const KEPT: usize = 1024;

/// Bounds that hold for each device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// How long a host program may take to say CONNECT.
    pub(crate) handshake: Duration,
    /// How long a host socket with a full backlog is tried.
    pub(crate) connect: Duration,
    /// How long a stalled connection may hold chains of the guest.
    pub(crate) hold: Duration,
    /// Bytes that all connections of a device together may have in overflow buffers; those with
    /// the program that embeds it as much again.
    pub(crate) overflow: usize,
    /// Bytes of memory that a guest does not use any more and leases may keep alive, or twice the
    /// guest's own if that is more.
    pub(crate) old_memory: u64,
    /// Host programs that may be connected without having said CONNECT.
    pub(crate) handshakes: usize,
    /// Host sockets that may still be taking bytes of connections that have ended.
    pub(crate) lingering: usize,
    /// How long such a socket may take no byte.
    pub(crate) linger: Duration,
    pub(crate) ok: OkConvention,
}

/// What a device is lent for a turn.
pub(crate) struct Context<'a> {
    pub(crate) now: Instant,
    /// `now` is old, and this tells the time: see [`Context::time`].
    pub(crate) clock: Option<&'a Clock>,
    pub(crate) poller: &'a Poller,
    pub(crate) routes: &'a Routes,
    pub(crate) outbox: &'a mut Outbox,
    pub(crate) counters: &'a Counters,
    pub(crate) notifier: &'a Notifier,
    pub(crate) limits: &'a Limits,
    /// The worker looks at the rings before it sleeps: no kicks are asked for.
    pub(crate) spins: bool,
    /// The program that embeds the device, if one does.
    pub(crate) app: Option<&'a mut program::App>,
}

impl Context<'_> {
    /// The time, for what few packets need and most do not: the clock is looked at when it is
    /// asked for first.
    #[inline]
    pub(crate) fn time(&mut self) -> Instant {
        if let Some(clock) = self.clock.take() {
            self.now = clock.now();
        }
        self.now
    }
}

/// See the module.
pub(crate) struct Device {
    addr: DeviceAddr,
    cid: Cid,
    shard: Shard,
    host: HostEnd,
    /// The guest is a host service: it is CID 2, and may connect from these ports and from those
    /// that it has claimed, so that no two services have the same.
    service: Option<RangeInclusive<Port>>,
    queue_pairs: queue_pairs::QueuePairSet,
    /// The share of descriptors that host sockets count against.
    account: Account,
    warnings: LogLimit,

    link: Option<FrontendLink>,
    memory: Option<Arc<Memory>>,
    rx: Option<Ring>,
    tx: Option<Ring>,
    event: Option<Ring>,
    /// Numbers the starts of queues, so that chains that come back late are told apart.
    epoch: u32,
    /// No queue of this front-end's has been started yet.
    fresh: bool,
    /// The driver is to be told that the device has lost its connections.
    announce_reset: bool,
    /// A command that waits for chains to come back from siblings.
    waiting: Option<command::Waiting>,
    /// When it waits no more.
    give_up_at: Option<Instant>,

    bridges: Slab<Bridge>,
    /// From the index of a flow to the key of its bridge.
    by_flow: Vec<u32>,
    lingering: lingering::Lingering,
    backlogs: backlog::Backlogs,
    handshakes: Slab<Handshake>,
    /// Joins that have something for the guest, in turn.
    ready: VecDeque<u32>,
    /// Messages that have begun and found no buffer for the rest.
    outgoing: VecDeque<Outgoing>,
    /// The program's small writes that wait for more.
    gathered: Gathered,
    /// Joins that got bytes from the guest in this turn.
    dirty: Vec<u32>,
    /// Lists of bridges that are at rest.
    spare_outbound: Spares<outbound::Bytes>,
    spare_inbound: Spares<bridge::Waiting>,
    /// Sums over the bridges' [`Bridge::counted`].
    stalled_chains: usize,
    overflow_bytes: usize,
    timers: Timers,
    /// Entries of `ready` whose bridge has gone.
    stale_ready: usize,
    /// Requests of our guest to siblings that have not been answered.
    unanswered: usize,
    /// The index at which a queue was stopped, receive and transmit.
    stopped_at: [Option<u16>; 2],
    /// Payload bytes moved in this turn, the way that has its turn.
    moved: usize,
    /// There was something for the guest and no buffer for it.
    starved: bool,
    app: app_store::AppState,
    datagrams: datagrams::Datagrams,

    /// Its guest is a process that has attached.
    pub(crate) process: bool,
    /// Has something for the guest to see that only [`app_flush`](Self::app_flush) shows.
    pub(crate) touched: bool,
    /// On the worker's list of devices to be turned.
    pub(crate) active: bool,
    /// What the worker's counters know of.
    counted: Holdings,
    /// The deadline that the worker has noted for this device.
    pub(crate) armed: Option<Instant>,
}

impl Device {
    pub(crate) fn new(
        addr: DeviceAddr,
        cid: Cid,
        shard: Shard,
        host: HostEnd,
        service: Option<RangeInclusive<Port>>,
    ) -> Device {
        Device {
            addr,
            cid,
            shard,
            host,
            service,
            queue_pairs: queue_pairs::QueuePairSet::one(addr),
            account: Budget::unlimited().account(),
            warnings: LogLimit::default(),
            link: None,
            memory: None,
            rx: None,
            tx: None,
            event: None,
            epoch: 0,
            fresh: true,
            announce_reset: false,
            waiting: None,
            give_up_at: None,
            bridges: Slab::new(),
            by_flow: Vec::new(),
            lingering: lingering::Lingering::default(),
            backlogs: backlog::Backlogs::default(),
            handshakes: Slab::new(),
            ready: VecDeque::new(),
            outgoing: VecDeque::new(),
            gathered: Gathered::default(),
            dirty: Vec::new(),
            spare_outbound: Spares::default(),
            spare_inbound: Spares::default(),
            stalled_chains: 0,
            overflow_bytes: 0,
            timers: Timers::default(),
            stale_ready: 0,
            unanswered: 0,
            stopped_at: [None; 2],
            moved: 0,
            starved: false,
            app: app_store::AppState::default(),
            datagrams: datagrams::Datagrams::new(),
            process: false,
            touched: false,
            active: false,
            counted: Holdings::default(),
            armed: None,
        }
    }

    /// Has the device's host sockets count against this account.
    pub(crate) fn set_account(&mut self, account: Account) {
        self.account = account;
    }

    /// Does a bounded amount of what there is to do. True: there is more.
    pub(crate) fn turn(&mut self, cx: &mut Context<'_>) -> bool {
        self.moved = 0;
        self.fire_timers(cx);
        let mut more = self.receive(cx);
        self.moved = 0;
        more |= self.transmit(cx);
        // What was received may have made room or answers for more.
        self.drain_events(cx);
        self.serve_events();
        for ring in [&mut self.rx, &mut self.tx, &mut self.event]
            .into_iter()
            .flatten()
        {
            let told = ring.publish(cx.notifier);
            if let Some(app) = cx.app.as_deref_mut() {
                app.tally.notifications += u64::from(told);
            }
            cx.counters
                .bad_chains
                .add(std::mem::take(&mut ring.malformed));
        }
        self.reset_on_broken_ring(cx);
        self.finish_waiting(cx);
        if self.memory.as_ref().is_some_and(|m| m.is_lost()) {
            self.lose("guest memory vanished under the device", cx);
            return false;
        }
        self.count(cx);
        // A program that embeds the device asks for kicks itself, when it is about to sleep.
        more || (cx.app.is_none() && !cx.spins && self.rearm(false)) || self.has_work_for_guest()
    }

    /// Has the counters say what there is.
    pub(super) fn count(&mut self, cx: &Context<'_>) {
        let now = Holdings {
            connections: self.shard.occupied(),
            bridges: self.bridges.len(),
            timers: self.timers.len() + self.shard.timers(),
            ports: self.shard.held_ports(),
        };
        if now != self.counted {
            let before = std::mem::replace(&mut self.counted, now);
            cx.counters.hold(before, now);
        }
    }

    /// Whether a queue has broken and its connections have not been ended.
    fn has_broken(&self) -> bool {
        let rings = [&self.rx, &self.tx];
        rings.into_iter().flatten().any(|ring| ring.reset_pending)
    }

    /// Ends all connections when a queue that carries them has broken: nothing will ever come of
    /// them, and whoever is at the other end has done no wrong and shall know.
    fn reset_on_broken_ring(&mut self, cx: &mut Context<'_>) {
        if !self.has_broken() {
            return;
        }
        for ring in [&mut self.rx, &mut self.tx].into_iter().flatten() {
            ring.reset_pending = false;
        }
        // Those that linger have been parted from the guest before.
        let known = self
            .bridges
            .iter()
            .filter(|(_, bridge)| bridge.flow.is_some());
        let keys: Vec<u32> = known.map(|(key, _)| key as u32).collect();
        for key in keys {
            self.reset_bridge(key, cx);
        }
    }

    /// The next time at which [`turn`](Self::turn) has something to do of itself.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let streams = earlier(self.timers.next(), self.shard.poll_timeout());
        earlier(streams, self.datagrams.next_timeout())
    }

    /// Whether the guest has put something into a ring that a turn would take.
    pub(crate) fn has_come(&mut self) -> bool {
        let blocked = self.receive_blocked();
        let tx = self.tx.as_mut().filter(|ring| ring.live() && !blocked);
        let starved = self.starved;
        let rx = self.rx.as_mut().filter(|ring| ring.live() && starved);
        let mut rings = tx.into_iter().chain(rx);
        rings.any(|ring| ring.queue.available() > 0)
    }

    /// Asks the driver for kicks. True: something came meanwhile.
    pub(crate) fn ask_for_kicks(&mut self) -> bool {
        self.rearm(false)
    }

    /// Asks the driver for kicks before the worker sleeps. True: something came meanwhile. With
    /// `full` nothing may be taken from the guest until something has gone back.
    fn rearm(&mut self, full: bool) -> bool {
        let mut more = false;
        if !full
            && !self.receive_blocked()
            && let Some(tx) = self.tx.as_mut().filter(|r| r.live())
        {
            more |= tx.queue.enable_notifications();
        }
        if self.starved
            && let Some(rx) = self.rx.as_mut().filter(|r| r.live())
        {
            more |= rx.queue.enable_notifications();
        }
        if self.announce_reset
            && let Some(event) = self.event.as_mut().filter(|r| r.live())
        {
            more |= event.queue.enable_notifications();
        }
        more
    }

    fn has_work_for_guest(&self) -> bool {
        !self.starved
            && self.rx.as_ref().is_some_and(Ring::live)
            && (self.shard.has_transmit()
                || !self.ready.is_empty()
                || !self.outgoing.is_empty()
                // While a command waits no datagram is put into the queue.
                || (self.waiting.is_none() && self.datagrams.has_some()))
    }

    /// The bridge of `flow`, if it is still there.
    #[inline]
    fn key_of(&self, flow: FlowId) -> Option<u32> {
        let key = *self.by_flow.get(flow.index())?;
        (self.bridges.get(key as usize)?.flow == Some(flow)).then_some(key)
    }

    fn add_bridge(&mut self, flow: FlowId, end: BridgePeer, cx: &Context<'_>) -> u32 {
        let mut bridge = Bridge::new(flow, end);
        let info = self.shard.flow(flow);
        if info.is_some_and(|info| info.socket_type == SocketType::SeqPacket)
            && !matches!(bridge.end, BridgePeer::App(_))
        {
            bridge.messages = Some(Box::default());
        }
        let key = self.bridges.insert(bridge) as u32;
        self.name_bridge(flow, key);
        cx.counters.conns_added.add(1);
        key
    }

    /// From now on the bridge at `key` is found by its flow.
    fn name_bridge(&mut self, flow: FlowId, key: u32) {
        if self.by_flow.len() <= flow.index() {
            self.by_flow.resize(flow.index() + 1, u32::MAX);
        }
        self.by_flow[flow.index()] = key;
    }

    /// Puts a bridge on the ready list if it may have something for the guest.
    fn enqueue(&mut self, key: u32) {
        if let Some(bridge) = self.bridges.get_mut(key as usize)
            && bridge.may_read()
            && !bridge.in_ready
        {
            bridge.in_ready = true;
            self.ready.push_back(key);
        }
    }

    /// An entry of `ready` has lost its bridge. The list is swept when most of it is so.
    fn forget_ready(&mut self) {
        self.stale_ready += 1;
        if self.stale_ready > 64 && self.stale_ready > self.ready.len() / 2 {
            self.stale_ready = 0;
            // One entry for each bridge that is on the list: a key that was used again has more.
            let bridges = &mut self.bridges;
            self.ready.retain(|&key| {
                let bridge = bridges.get_mut(key as usize);
                bridge.is_some_and(|bridge| std::mem::take(&mut bridge.in_ready))
            });
            for &key in &self.ready {
                if let Some(bridge) = bridges.get_mut(key as usize) {
                    bridge.in_ready = true;
                }
            }
        }
    }

    /// Ends a bridge: chains go back, the socket closes, the sums forget it. The vsock half is
    /// someone else's business.
    fn remove_bridge(&mut self, key: u32, cx: &mut Context<'_>) -> Option<Bridge> {
        let mut bridge = self.bridges.try_remove(key as usize)?;
        if let BridgePeer::Connecting { socket, .. } | BridgePeer::Socket { socket, .. } =
            &bridge.end
            && socket.is_closed_later()
        {
            // Until then its events would be taken for those of the next bridge with this key.
            cx.poller.remove(socket);
        }
        self.backlogs.forget(key, &bridge);
        if let Some(flow) = bridge.flow {
            if self.by_flow.get(flow.index()) == Some(&key) {
                self.by_flow[flow.index()] = u32::MAX;
            }
        } else {
            self.stop_lingering(key);
        }
        if bridge.in_ready {
            self.forget_ready();
        }
        self.stalled_chains -= bridge.counted.0 as usize;
        self.overflow_bytes -= bridge.counted.1 as usize;
        let tx = &mut self.tx;
        bridge.outbound.clear(|chain| {
            if let Some(tx) = tx {
                tx.complete(chain, 0);
            }
        });
        if let BridgePeer::Sibling(sibling) = &mut bridge.end {
            sibling::return_inbound(sibling, false, cx);
            if let Some(parked) = sibling.parked.take() {
                self.abandon_parked(*parked, cx);
            }
        }
        cx.counters.conns_removed.add(1);
        if self.bridges.is_empty() && self.bridges.capacity() > KEPT {
            // Keys are hints wherever they are kept.
            self.bridges = Slab::new();
            self.by_flow = Vec::new();
            self.ready = VecDeque::new();
            self.stale_ready = 0;
        }
        Some(bridge)
    }

    /// Gives the device up: its memory or its rings cannot be used any more. Other devices go on.
    fn lose(&mut self, reason: &str, cx: &mut Context<'_>) {
        let link = self.link.take();
        if link.as_ref().is_some_and(FrontendLink::note_loss) {
            tracing::error!(cid = %self.cid, reason, "the device is lost");
            cx.counters.devices_lost.add(1);
        }
        self.app_lose(cx);
        for ring in [&mut self.rx, &mut self.tx, &mut self.event]
            .into_iter()
            .flatten()
        {
            ring.fail();
            ring.publish(cx.notifier);
        }
        // What is left in the memory means nothing any more: it is not delivered.
        let keys: Vec<u32> = self.bridges.iter().map(|(key, _)| key as u32).collect();
        for key in keys {
            self.end_bridge(key, cx);
        }
        self.disconnect(cx);
        if let Some(link) = link {
            link.close(reason);
        }
    }
}
