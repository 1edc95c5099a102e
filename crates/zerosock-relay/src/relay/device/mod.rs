//! The pairs of one worker: accepting, connecting, their turns and their end.
//!
//! # Invariants
//! - Both sockets of a pair are registered with the poller once, for edges; nothing is registered anew
//!   when the direction of the bytes changes.
//! - A connection costs no allocation beyond its slot in the slab.
//! - Each turn keeps to a budget: connections accepted, and bytes of each pair.

mod accepting;
mod connecting;
mod datagrams;
mod hybrid;
mod log;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use slab::Slab;
use zerosock_proto::Instant;
use zerosock_virtio::deadline::earlier;
use zerosock_virtio::device::{self, Event, WorkerDevice};
use zerosock_virtio::mailbox::Sender;
use zerosock_virtio::outbox::{DeviceAddr, Outbox};
use zerosock_virtio::poller::{EventKind, Interest, Readiness, Token};
use zerosock_virtio::worker::WorkerMessage;

use super::associations::Associations;
use super::counters::WorkerCounters;
use super::direction::{Ready, WatchedSocket};
use super::endpoint::KernelEndpoint;
use super::joined::{Step, Turns};
use super::pair::{Origin, Pair, PairOutcome, Reason, SocketStage};
use super::plan::RelayPlan;
use super::socket::{Socket, SocketKind};
use super::store::Store;
use crate::associations::AssociationId;
use crate::connector::{ConnectError, Connected, PendingConnect};
use crate::due::DueList;
pub use hybrid::{CLOSED_WITHOUT_OK, HybridAnswer, LONGEST_ANSWER};

/// The sockets of pairs: the key is that of the pair.
const SIDES: [EventKind; 2] = [EventKind::new(1), EventKind::new(2)];
/// A listening socket: the key is its index.
const LISTENER: EventKind = EventKind::new(3);
/// The socket of all senders of datagrams.
const DATAGRAMS: EventKind = EventKind::new(4);
/// The socket of an association to the target.
const ASSOCIATION: EventKind = EventKind::new(5);
/// The socket of an association to its sender, if the kernel joins both.
const SENDER: EventKind = EventKind::new(6);

type Context<'a> = device::Context<'a, RelayDevice>;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct RelayDevice {
    addr: DeviceAddr,
    plan: Arc<RelayPlan>,
    counters: Arc<WorkerCounters>,
    /// To this worker's own mailbox, for the connector's answers.
    own: Sender<WorkerMessage<RelayDevice>>,
    listeners: Vec<Listener>,
    /// Workers to which accepted connections are given in turn.
    workers: u32,
    next_worker: u32,
    pairs: Slab<Pair>,
    serial: u32,
    /// Pairs with work.
    queue: VecDeque<u32>,
    store: Store,
    connecting: DueList,
    /// Requests to the connector, by pair and end: of sockets that are [`SocketStage::Absent`].
    asked: HashMap<(u32, usize), PendingConnect>,
    idle: DueList,
    /// Turns of the pairs that the kernel joins.
    turns: Turns,
    /// Nothing is accepted until then.
    paused: Option<Instant>,
    /// Connections of each end that wait for one of the other.
    waiting: [VecDeque<(Socket, Origin)>; 2],
    associations: Option<Associations>,
}

/// A listening socket.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) fd: OwnedFd,
    /// The end of the relay that it belongs to.
    pub(super) end: usize,
    pub(super) kind: SocketKind,
    pub(super) refuses_rights: bool,
    /// A connection may wait.
    pub(super) readable: bool,
}

/// A message to the pairs of a worker.
#[derive(Debug)]
pub(super) enum Message {
    /// A connection that another worker has accepted.
    Accepted(Socket, Origin),
    /// What the connector answers.
    Connected {
        key: u32,
        serial: u32,
        end: usize,
        result: Result<Connected, ConnectError>,
    },
    /// The same, for an association.
    Associated {
        id: AssociationId,
        result: Result<Connected, ConnectError>,
    },
    /// Neither end listens: make the only pair.
    Begin,
}

impl device::Message for Message {}

/// What a worker starts with.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) addr: DeviceAddr,
    pub(super) plan: Arc<RelayPlan>,
    pub(super) counters: Arc<WorkerCounters>,
    pub(super) own: Sender<WorkerMessage<RelayDevice>>,
    pub(super) listeners: Vec<Listener>,
    /// The socket of all senders of datagrams.
    pub(super) datagrams: Option<Socket>,
    /// Its address, if the kernel may join senders to their sockets.
    pub(super) connects_at: Option<SocketAddr>,
    /// Workers to which accepted connections are given in turn; 1: they stay here.
    pub(super) workers: u32,
}

impl RelayDevice {
    pub(super) fn new(parts: Parts) -> RelayDevice {
        let config = &parts.plan.config;
        // Looked at twice in the time, so that an idle pair ends after one and a half of it at most.
        let idle = parts
            .plan
            .idle_timeout()
            .map(|time| (time / 2).max(Duration::from_millis(1)));
        let associations = parts
            .datagrams
            .map(|socket| Associations::new(socket, config.datagram_timeout, parts.connects_at));
        RelayDevice {
            addr: parts.addr,
            counters: parts.counters,
            own: parts.own,
            listeners: parts.listeners,
            workers: parts.workers,
            next_worker: parts.addr.worker,
            pairs: Slab::new(),
            serial: 0,
            queue: VecDeque::new(),
            store: Store::new(config.buffer, config.pipes),
            connecting: DueList::new(Some(config.connect_timeout)),
            asked: HashMap::new(),
            idle: DueList::new(idle),
            turns: Turns::default(),
            paused: None,
            waiting: Default::default(),
            associations,
            plan: parts.plan,
        }
    }

    /// Registers a socket of a pair.
    fn register(
        &self,
        socket: &Socket,
        kind: EventKind,
        key: u32,
        cx: &Context<'_>,
    ) -> io::Result<()> {
        let token = Token {
            device: self.addr.number,
            kind,
            key,
        };
        cx.poller.add(socket.fd()?, token, Interest::All)
    }

    fn enqueue(&mut self, key: u32) {
        if let Some(pair) = self.pairs.get_mut(key as usize)
            && !std::mem::replace(&mut pair.queued, true)
        {
            self.queue.push_back(key);
        }
    }

    /// Ends a pair.
    fn end_pair(&mut self, key: u32, reason: Reason, cx: &mut Context<'_>) {
        let Some(pair) = self.pairs.get(key as usize) else {
            return;
        };
        self.log_end(pair, reason, cx.now);
        match reason {
            Reason::Failed(..) => self.counters.failed.add(1),
            Reason::Idle => self.counters.idle.add(1),
            Reason::Closed | Reason::Stopped => {}
        }
        let pair = self.remove(key, cx);
        self.counters.dropped.add(pair.dropped().into());
        pair.close(reason, &mut self.store);
        self.after_end(reason == Reason::Closed);
    }

    /// Takes a pair out of the slab and all lists.
    fn remove(&mut self, key: u32, cx: &mut Context<'_>) -> Pair {
        let is_connected = self.pairs[key as usize].is_connected();
        match is_connected {
            true => self.idle.remove(&mut self.pairs, key),
            false => self.connecting.remove(&mut self.pairs, key),
        }
        let mut pair = self.pairs.remove(key as usize);
        if let Some(joined) = pair.joined() {
            self.turns.plan(key, joined, None);
        }
        if pair.queued {
            self.queue.retain(|&other| other != key);
        }
        for end in 0..2 {
            if pair.stage(end) == SocketStage::Absent
                && let Some(request) = self.asked.remove(&(key, end))
            {
                request.cancel();
            }
            let socket = &pair.side(end).socket;
            // The reaper may close it later, and events must not come until then.
            if socket.carries_rights()
                && let Ok(fd) = socket.fd()
            {
                cx.poller.remove(fd);
            }
        }
        self.counters.ended.add(1);
        pair
    }

    /// Bookkeeping after the end of a pair or connection.
    fn after_end(&self, succeeded: bool) {
        self.plan.dismiss();
        if self.plan.is_single() {
            self.plan.finish(succeeded);
        }
    }

    /// Gives each pair with work a turn.
    fn run_pairs(&mut self, cx: &mut Context<'_>) {
        for _ in 0..self.queue.len() {
            let Some(key) = self.queue.pop_front() else {
                return;
            };
            let Some(pair) = self.pairs.get_mut(key as usize) else {
                continue;
            };
            pair.queued = false;
            if !pair.is_connected() {
                continue;
            }
            if let Some(map) = &self.plan.config.sockmap
                && pair.joins()
            {
                match pair.join(map, &mut self.store) {
                    Ok(joined) => self.counters.joined.add(joined.into()),
                    Err(refusal) => self.plan.say_refusal(&refusal),
                }
            }
            let before = pair.bytes();
            let turn = match pair.is_joined() {
                true => self.step(key, cx),
                false => pair.run(&mut self.store, cx.now),
            };
            let Some(pair) = self.pairs.get(key as usize) else {
                continue;
            };
            self.counters.add_bytes(before, pair.bytes());
            match turn {
                PairOutcome::Waiting => {}
                PairOutcome::Busy => self.enqueue(key),
                PairOutcome::Ended(reason) => self.end_pair(key, reason, cx),
            }
        }
    }

    /// Gives a pair that the kernel joins its turn.
    fn step(&mut self, key: u32, cx: &mut Context<'_>) -> PairOutcome {
        let Some(pair) = self.pairs.get_mut(key as usize) else {
            return PairOutcome::Waiting;
        };
        let again = match pair.step(&mut self.store, cx.now) {
            Step::Wait(again) => again,
            Step::Ended => return PairOutcome::Ended(Reason::Closed),
            Step::Failed(end, errno) => {
                return PairOutcome::Ended(Reason::Failed(end as u8, errno));
            }
        };
        let needs_room = pair.needs_room();
        if let Some(joined) = pair.joined() {
            let tokens = SIDES.map(|kind| Token {
                device: self.addr.number,
                kind,
                key,
            });
            joined.watch(cx.poller, tokens, needs_room);
            let at = again.map(|again| cx.now + again);
            self.turns.plan(key, joined, at);
        }
        PairOutcome::Waiting
    }

    /// Ends the pairs whose time has come.
    fn expire(&mut self, cx: &mut Context<'_>) {
        while let Some(key) = self.connecting.pop(&mut self.pairs, cx.now) {
            let Some(pair) = self.pairs.get(key as usize) else {
                continue;
            };
            let end = usize::from(pair.stage(0) == SocketStage::Connected);
            let reason = match pair.stage(end) {
                SocketStage::Greeting => "timed out while waiting for OK",
                _ => "timed out while connecting",
            };
            self.fail_connect(key, end, &reason, cx);
        }
        while let Some(key) = self.idle.pop(&mut self.pairs, cx.now) {
            let Some(pair) = self.pairs.get_mut(key as usize) else {
                continue;
            };
            let before = pair.bytes();
            pair.observe(cx.now);
            self.counters.add_bytes(before, pair.bytes());
            let rested = cx.now.saturating_duration_since(pair.moved);
            match self.plan.idle_timeout() {
                Some(limit) if rested >= limit => self.end_pair(key, Reason::Idle, cx),
                _ => self.idle.add(&mut self.pairs, key, cx.now),
            }
        }
        while let Some(key) = self.turns.pop(cx.now) {
            self.enqueue(key);
        }
        if self.paused.is_some_and(|until| until <= cx.now) {
            self.paused = None;
        }
    }
}

fn side(socket: Socket, ready: Ready) -> WatchedSocket {
    WatchedSocket { socket, ready }
}

/// What an edge says, as the directions know it.
fn ready_of(readiness: Readiness) -> Ready {
    let mut ready = Ready::default();
    for (holds, what) in [
        (readiness.readable(), Ready::READ),
        (readiness.writable(), Ready::WRITE),
        (readiness.peer_finished(), Ready::FINISHED),
        (readiness.urgent(), Ready::URGENT),
        (readiness.hung_up(), Ready::HUNG_UP),
    ] {
        if holds {
            ready.set(what);
        }
    }
    ready
}

impl WorkerDevice for RelayDevice {
    type Shared = ();
    type Message = Message;

    fn addr(&self) -> DeviceAddr {
        self.addr
    }

    fn start(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let token = |kind, key| Token {
            device: self.addr.number,
            kind,
            key,
        };
        for (index, listener) in self.listeners.iter().enumerate() {
            let token = token(LISTENER, index as u32);
            cx.poller.add(&listener.fd, token, Interest::Read)?;
        }
        if let Some(associations) = &self.associations {
            let token = token(DATAGRAMS, 0);
            cx.poller
                .add(associations.listener().fd()?, token, Interest::Read)?;
        }
        Ok(())
    }

    fn on_event(&mut self, event: Event, cx: &mut Context<'_>) {
        let Event {
            kind,
            key,
            readiness,
        } = event;
        match kind {
            LISTENER => {
                if let Some(listener) = self.listeners.get_mut(key as usize) {
                    listener.readable = true;
                }
            }
            DATAGRAMS => {
                if let Some(associations) = &mut self.associations {
                    associations.set_readable();
                }
            }
            SENDER | ASSOCIATION => {
                let ready = match kind {
                    ASSOCIATION => ready_of(readiness),
                    _ => Ready::default(),
                };
                if let Some(associations) = &mut self.associations {
                    associations.set_ready(key, ready);
                }
            }
            _ => {
                let end = usize::from(kind == SIDES[1]);
                let Some(pair) = self.pairs.get_mut(key as usize) else {
                    return;
                };
                pair.side_mut(end).ready.set(ready_of(readiness));
                match pair.is_connected() {
                    true => self.enqueue(key),
                    false => self.on_connect_event(key, end, readiness, cx),
                }
            }
        }
    }

    fn on_message(&mut self, message: Message, cx: &mut Context<'_>) {
        match message {
            Message::Accepted(socket, source) => self.begin(Some(socket), source, cx),
            Message::Connected {
                key,
                serial,
                end,
                result,
            } => self.on_connected((key, serial, end), result, cx),
            Message::Associated { id, result } => self.on_associated(id, result, cx),
            Message::Begin => {
                self.plan.admit();
                self.begin(None, Origin::Here, cx);
            }
        }
    }

    fn undeliverable(message: Message, _: &mut Outbox<Message>) {
        // The relay ends: dropping the message closes its socket.
        drop(message);
    }

    fn turn(&mut self, cx: &mut Context<'_>) -> bool {
        self.expire(cx);
        if self.paused.is_none() {
            for index in 0..self.listeners.len() {
                self.accept(index, cx);
            }
        }
        self.run_pairs(cx);
        let more = self.run_associations(cx);
        let accepts = self.paused.is_none() && self.listeners.iter().any(|one| one.readable);
        more || accepts || !self.queue.is_empty()
    }

    fn next_timeout(&self) -> Option<Instant> {
        let pairs = earlier(self.connecting.next(), self.idle.next());
        let pairs = earlier(pairs, self.turns.next());
        let datagrams = self
            .associations
            .as_ref()
            .and_then(|all| all.next_timeout());
        earlier(earlier(pairs, datagrams), self.paused)
    }

    fn retire(&mut self, cx: &mut Context<'_>) {
        WorkerDevice::end(self, cx);
    }

    fn end(&mut self, cx: &mut Context<'_>) {
        let keys: Vec<u32> = self.pairs.iter().map(|(key, _)| key as u32).collect();
        for key in keys {
            self.end_pair(key, Reason::Stopped, cx);
        }
        self.end_associations(cx);
        self.listeners.clear();
    }
}

/// The end of a relay, for a log line.
fn name(plan: &RelayPlan, end: usize) -> &KernelEndpoint {
    &plan.config.ends[end & 1]
}
