//! The pairs of one worker: accepting, connecting, their turns and their end.
//!
//! # Invariants
//! - Both sockets of a pair are registered with the poller once, for edges; nothing is registered anew
//!   when the direction of the bytes changes.
//! - A connection costs no allocation beyond its slot in the slab.
//! - Each turn keeps to a budget: connections accepted, and bytes of each pair.

mod datagrams;
mod hybrid;
mod log;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with};
use slab::Slab;
use zerosock_proto::Instant;
use zerosock_sys::vsock;
use zerosock_virtio::deadline::earlier;
use zerosock_virtio::device::{self, Event, WorkerDevice};
use zerosock_virtio::mailbox::Sender;
use zerosock_virtio::outbox::DeviceAddr;
use zerosock_virtio::poller::{EventKind, Interest, Readiness, Token};
use zerosock_virtio::worker::WorkerMessage;

use super::associations::Associations;
use super::counters::Counters;
use super::direction::{Ready, Side};
use super::due::DueList;
use super::endpoint::Endpoint;
use super::open::Opened;
use super::pair::{Pair, Reason, Source, Stage, Turn};
use super::plan::Plan;
use super::socket::{Socket, SocketKind};
use super::store::Store;
use crate::connector::{ConnectError, Connected};
use crate::proxy_protocol;

/// The sockets of pairs: the key is that of the pair.
const SIDES: [EventKind; 2] = [EventKind::new(1), EventKind::new(2)];
/// A listening socket: the key is its index.
const LISTENER: EventKind = EventKind::new(3);
/// The socket of all senders of datagrams.
const DATAGRAMS: EventKind = EventKind::new(4);
/// The socket of an association.
const ASSOCIATION: EventKind = EventKind::new(5);

/// Connections that one listener accepts in a turn.
const ACCEPTS: usize = 64;

/// How long nothing is accepted when there is no descriptor or memory for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections of one end that wait for one of the other, if both ends listen.
const MOST_WAITING: usize = 1024;

type Context<'a> = device::Context<'a, RelayDevice>;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct RelayDevice {
    addr: DeviceAddr,
    plan: Arc<Plan>,
    counters: Arc<Counters>,
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
    idle: DueList,
    /// Nothing is accepted until then.
    paused: Option<Instant>,
    /// Connections of each end that wait for one of the other.
    waiting: [VecDeque<(Socket, Source)>; 2],
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
    Accepted(Socket, Source),
    /// What the connector answers.
    Connected {
        key: u32,
        serial: u32,
        end: usize,
        result: Result<Connected, ConnectError>,
    },
    /// The same, for an association.
    Associated {
        key: u32,
        serial: u32,
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
    pub(super) plan: Arc<Plan>,
    pub(super) counters: Arc<Counters>,
    pub(super) own: Sender<WorkerMessage<RelayDevice>>,
    pub(super) listeners: Vec<Listener>,
    /// The socket of all senders of datagrams.
    pub(super) datagrams: Option<OwnedFd>,
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
            .map(|socket| Associations::new(socket, config.datagram_timeout));
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
            idle: DueList::new(idle),
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

    /// Accepts what waits at a listener, within a budget.
    fn accept(&mut self, index: usize, cx: &mut Context<'_>) {
        for _ in 0..ACCEPTS {
            let Some(listener) = self.listeners.get_mut(index).filter(|one| one.readable) else {
                return;
            };
            match accept_one(listener) {
                Ok((socket, source)) => {
                    let end = listener.end;
                    self.admit(end, socket, source, cx);
                }
                Err(Errno::AGAIN) => listener.readable = false,
                // The client is gone already, or the network had an error for it (accept(2)).
                Err(
                    Errno::INTR
                    | Errno::CONNABORTED
                    | Errno::PROTO
                    | Errno::NETDOWN
                    | Errno::NOPROTOOPT
                    | Errno::HOSTDOWN
                    | Errno::HOSTUNREACH
                    | Errno::NETUNREACH
                    | Errno::OPNOTSUPP,
                ) => {}
                Err(errno) => {
                    // Not for each attempt: the next ones fail alike.
                    if self.paused.is_none() {
                        tracing::warn!(
                            "cannot accept a connection: {errno}; accepting again when there are \
                             descriptors and memory (see RLIMIT_NOFILE)"
                        );
                    }
                    self.paused = Some(cx.now + ACCEPT_PAUSE);
                    return;
                }
            }
            self.paused = None;
        }
    }

    /// Takes an accepted connection, or refuses it if there are too many.
    fn admit(&mut self, end: usize, socket: Socket, source: Source, cx: &mut Context<'_>) {
        if !self.plan.admit() {
            self.counters.refused.add(1);
            socket.reset_on_close();
            return;
        }
        if self.plan.destinations.iter().all(Option::is_none) {
            return self.meet(end, socket, source, cx);
        }
        if self.workers > 1 {
            self.next_worker = (self.next_worker + 1) % self.workers;
            if self.next_worker != self.addr.worker {
                let to = DeviceAddr {
                    worker: self.next_worker,
                    number: self.addr.number,
                };
                cx.outbox.send(to, Message::Accepted(socket, source));
                return;
            }
        }
        self.begin(Some(socket), source, cx);
    }

    /// Joins a connection to the one of the other end that has waited longest.
    fn meet(&mut self, end: usize, socket: Socket, source: Source, cx: &mut Context<'_>) {
        let Some((other, other_source)) = self.waiting[1 - end].pop_front() else {
            if self.waiting[end].len() < MOST_WAITING {
                self.waiting[end].push_back((socket, source));
            } else {
                self.counters.refused.add(1);
                self.plan.dismiss();
                socket.reset_on_close();
            }
            return;
        };
        // Two connections are one pair.
        self.plan.dismiss();
        let (sockets, source) = match end {
            0 => ([socket, other], source),
            _ => ([other, socket], other_source),
        };
        let sides = sockets.map(|socket| (side(socket, Ready::default()), Stage::Connected));
        self.add(sides, source, cx);
    }

    /// Begins a pair with a socket that was accepted, or with none.
    fn begin(&mut self, accepted: Option<Socket>, source: Source, cx: &mut Context<'_>) {
        let first = match accepted {
            Some(socket) => Ok((side(socket, Ready::default()), Stage::Connected)),
            None => self.open(0),
        };
        match (first, self.open(1)) {
            (Ok(first), Ok(second)) => self.add([first, second], source, cx),
            (Ok((side, _)), Err(errno)) => {
                self.unreachable(source, 1, &errno);
                side.socket.reset_on_close();
            }
            (Err(errno), _) => self.unreachable(source, 0, &errno),
        }
    }

    /// Begins to connect to an end.
    fn open(&self, end: usize) -> Result<(Side, Stage), Errno> {
        let destination = self.plan.destinations[end].as_ref().ok_or(Errno::INVAL)?;
        Ok(match destination.open()? {
            Opened::Socket(socket, Stage::Connected) => {
                (side(socket, Ready::WRITE), Stage::Connected)
            }
            Opened::Socket(socket, stage) => (side(socket, Ready::default()), stage),
            Opened::Ask(_) => {
                let absent = Socket::absent(destination.kind());
                (side(absent, Ready::default()), Stage::Absent)
            }
        })
    }

    /// Adds a pair, registers its sockets and asks the connector for those that are absent.
    fn add(&mut self, sides: [(Side, Stage); 2], source: Source, cx: &mut Context<'_>) {
        self.serial = self.serial.wrapping_add(1);
        let mut pair = Pair::new(sides, self.plan.modes(), source, self.serial, cx.now);
        if self.plan.config.proxy_protocol {
            let source = match source {
                Source::Ip(address) => proxy_protocol::Source::Ip(address),
                _ => proxy_protocol::Source::Local,
            };
            let to = local_address(&pair.side(0).socket);
            pair.prepend(proxy_protocol::header(source, to), &mut self.store);
        }
        pair.target = self.plan.destinations[1]
            .as_ref()
            .and_then(|to| to.address());
        let is_connected = pair.is_connected();
        let key = self.pairs.insert(pair) as u32;
        self.counters.opened.add(1);
        match is_connected {
            true => self.idle.add(&mut self.pairs, key, cx.now),
            false => self.connecting.add(&mut self.pairs, key, cx.now),
        }
        for end in 0..2 {
            let Some(pair) = self.pairs.get(key as usize) else {
                return;
            };
            let side = pair.side(end);
            if side.socket.is_absent() {
                self.ask(key, end);
            } else if let Err(error) = self.register(&side.socket, SIDES[end], key, cx) {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                return self.end_pair(key, Reason::Failed(end as u8, errno), cx);
            } else if pair.stage(end) == Stage::Greeting {
                self.greet(key, end, cx);
            }
        }
        self.enqueue(key);
    }

    /// Asks the connector for the socket of an end.
    fn ask(&self, key: u32, end: usize) {
        let Some(pair) = self.pairs.get(key as usize) else {
            return;
        };
        let (serial, own, number) = (pair.serial, self.own.clone(), self.addr.number);
        let answer = move |result| {
            let message = Message::Connected {
                key,
                serial,
                end,
                result,
            };
            // A worker that has ended has closed the pair.
            let _ = own.send(WorkerMessage::Device { number, message });
        };
        let Some(target) = self.plan.destinations[end]
            .as_ref()
            .and_then(|to| to.target())
        else {
            return;
        };
        self.plan.ask(target, Box::new(answer));
    }

    /// The connector has answered for an end of a pair.
    fn on_connected(
        &mut self,
        (key, serial, end): (u32, u32, usize),
        result: Result<Connected, ConnectError>,
        cx: &mut Context<'_>,
    ) {
        let Some(pair) = self.pairs.get_mut(key as usize) else {
            return;
        };
        if pair.serial != serial || pair.stage(end) != Stage::Absent {
            return;
        }
        let connected = match result {
            Ok(connected) => connected,
            Err(error) => return self.fail_connect(key, end, &error, cx),
        };
        let Some(destination) = &self.plan.destinations[end] else {
            return;
        };
        let (socket, stage) = match destination.adopt(connected.socket) {
            Ok(adopted) => adopted,
            Err(errno) => return self.fail_connect(key, end, &errno, cx),
        };
        *pair.side_mut(end) = side(socket, Ready::WRITE);
        pair.target = connected.address.filter(|_| end == 1).or(pair.target);
        let Some(pair) = self.pairs.get(key as usize) else {
            return;
        };
        if let Err(error) = self.register(&pair.side(end).socket, SIDES[end], key, cx) {
            return self.fail_connect(key, end, &error, cx);
        }
        self.advance(key, end, stage, cx);
    }

    /// A socket has reached a stage.
    fn advance(&mut self, key: u32, end: usize, stage: Stage, cx: &mut Context<'_>) {
        let Some(pair) = self.pairs.get_mut(key as usize) else {
            return;
        };
        pair.set_stage(end, stage);
        if stage == Stage::Greeting {
            return self.greet(key, end, cx);
        }
        if pair.is_connected() {
            pair.moved = cx.now;
            self.connecting.remove(&mut self.pairs, key);
            self.idle.add(&mut self.pairs, key, cx.now);
            self.enqueue(key);
        }
    }

    /// An edge of a socket that is not connected yet.
    fn on_connect_event(
        &mut self,
        key: u32,
        end: usize,
        readiness: Readiness,
        cx: &mut Context<'_>,
    ) {
        let Some(pair) = self.pairs.get_mut(key as usize) else {
            return;
        };
        match pair.stage(end) {
            Stage::Connecting if readiness.writable() => {
                if let Some(errno) = pair.side(end).socket.take_error() {
                    return self.fail_connect(key, end, &errno, cx);
                }
                let greets = self.plan.destinations[end]
                    .as_ref()
                    .is_some_and(|to| to.greeting().is_some());
                let next = if greets {
                    Stage::Greeting
                } else {
                    Stage::Connected
                };
                self.advance(key, end, next, cx);
            }
            Stage::Greeting if readiness.readable() => self.read_greeting(key, end, cx),
            // The other socket is not connected yet: a reset ends the pair, the end of the stream follows
            // its bytes.
            Stage::Connected if readiness.hung_up() => {
                if let Some(errno) = pair.side(end).socket.take_error() {
                    self.end_pair(key, Reason::Failed(end as u8, errno), cx);
                }
            }
            _ => {}
        }
    }

    /// Ends a pair whose socket cannot be connected.
    fn fail_connect(
        &mut self,
        key: u32,
        end: usize,
        reason: &dyn std::fmt::Display,
        cx: &mut Context<'_>,
    ) {
        let Some(pair) = self.pairs.get(key as usize) else {
            return;
        };
        self.unreachable_end(pair.source, end, reason);
        self.counters.unreachable.add(1);
        let pair = self.remove(key, cx);
        pair.close(
            Reason::Failed(end as u8, Errno::CONNREFUSED),
            &mut self.store,
        );
        self.after_end(false);
    }

    /// The target of a connection cannot be reached; there is no pair yet.
    fn unreachable(&self, source: Source, end: usize, reason: &dyn std::fmt::Display) {
        self.unreachable_end(source, end, reason);
        self.counters.opened.add(1);
        self.counters.ended.add(1);
        self.counters.unreachable.add(1);
        self.after_end(false);
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
        let pair = self.pairs.remove(key as usize);
        if pair.queued {
            self.queue.retain(|&other| other != key);
        }
        for end in 0..2 {
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
            let before = pair.bytes();
            let turn = pair.run(&mut self.store, cx.now);
            let after = pair.bytes();
            for end in 0..2 {
                self.counters.bytes[end].add(after[end] - before[end]);
            }
            match turn {
                Turn::Waiting => {}
                Turn::Busy => self.enqueue(key),
                Turn::Ended(reason) => self.end_pair(key, reason, cx),
            }
        }
    }

    /// Ends the pairs whose time has come.
    fn expire(&mut self, cx: &mut Context<'_>) {
        while let Some(key) = self.connecting.pop(&mut self.pairs, cx.now) {
            let Some(pair) = self.pairs.get(key as usize) else {
                continue;
            };
            let end = usize::from(pair.stage(0) == Stage::Connected);
            let reason = match pair.stage(end) {
                Stage::Greeting => "timed out while waiting for OK",
                _ => "timed out while connecting",
            };
            self.fail_connect(key, end, &reason, cx);
        }
        while let Some(key) = self.idle.pop(&mut self.pairs, cx.now) {
            let Some(pair) = self.pairs.get(key as usize) else {
                continue;
            };
            let rested = cx.now.saturating_duration_since(pair.moved);
            match self.plan.idle_timeout() {
                Some(limit) if rested >= limit => self.end_pair(key, Reason::Idle, cx),
                _ => self.idle.add(&mut self.pairs, key, cx.now),
            }
        }
        if self.paused.is_some_and(|until| until <= cx.now) {
            self.paused = None;
        }
    }
}

fn side(socket: Socket, ready: Ready) -> Side {
    Side { socket, ready }
}

fn accept_one(listener: &Listener) -> Result<(Socket, Source), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    if listener.kind == SocketKind::Vsock {
        let (fd, cid, port) = vsock::accept(&listener.fd)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let socket = Socket::new(fd, listener.kind, true);
        return Ok((socket, Source::Vsock { cid, port }));
    }
    let (fd, address) = acceptfrom_with(&listener.fd, flags)?;
    let source = match address.map(SocketAddr::try_from) {
        Some(Ok(address)) => Source::Ip(address),
        _ => Source::Unix,
    };
    let socket = Socket::new(fd, listener.kind, listener.refuses_rights);
    Ok((socket, source))
}

/// The address to which a client has connected.
fn local_address(socket: &Socket) -> Option<SocketAddr> {
    let address = rustix::net::getsockname(socket.fd().ok()?).ok()?;
    SocketAddr::try_from(address).ok()
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
                .add(associations.listener(), token, Interest::Read)?;
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
            ASSOCIATION => {
                if let Some(associations) = &mut self.associations {
                    associations.set_ready(key, ready_of(readiness));
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
            Message::Associated {
                key,
                serial,
                result,
            } => self.on_associated(key, serial, result, cx),
            Message::Begin => {
                self.plan.admit();
                self.begin(None, Source::Here, cx);
            }
        }
    }

    fn undeliverable(message: Message, cx: &mut Context<'_>) {
        // The relay ends: dropping the message closes its socket.
        let _ = (message, cx);
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
fn name(plan: &Plan, end: usize) -> &Endpoint {
    &plan.config.ends[end & 1]
}
