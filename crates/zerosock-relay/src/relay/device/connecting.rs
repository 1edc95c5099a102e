//! From a connection's first socket to a pair of which both are connected.

use std::net::SocketAddr;

use rustix::io::Errno;
use zerosock_virtio::poller::Readiness;
use zerosock_virtio::worker::WorkerMessage;

use super::{Context, Message, RelayDevice, SIDES, side};
use crate::connector::{ConnectError, Connected, NO_PERMISSION};
use crate::proxy_protocol;
use crate::relay::direction::{Ready, WatchedSocket};
use crate::relay::open::Opened;
use crate::relay::pair::{Origin, Pair, Reason, SocketStage};
use crate::relay::socket::Socket;

impl RelayDevice {
    /// Begins a pair with a socket that was accepted, or with none.
    pub(super) fn begin(&mut self, accepted: Option<Socket>, source: Origin, cx: &mut Context<'_>) {
        let first = match accepted {
            Some(socket) => Ok((side(socket, Ready::default()), SocketStage::Connected)),
            None => self.open(0),
        };
        match (first, self.open(1)) {
            (Ok(first), Ok(second)) => self.add([first, second], source, cx),
            (Ok((side, _)), Err(errno)) => {
                self.unreachable(source, 1, &self.explain(1, &errno, errno));
                side.socket.reset_on_close();
            }
            (Err(errno), _) => self.unreachable(source, 0, &self.explain(0, &errno, errno)),
        }
    }

    /// Begins to connect to an end.
    fn open(&self, end: usize) -> Result<(WatchedSocket, SocketStage), Errno> {
        let destination = self.plan.destinations[end].as_ref().ok_or(Errno::INVAL)?;
        Ok(match destination.open()? {
            Opened::Socket(socket, SocketStage::Connected) => {
                (side(socket, Ready::WRITE), SocketStage::Connected)
            }
            Opened::Socket(socket, stage) => (side(socket, Ready::default()), stage),
            Opened::Ask(_) => {
                let absent = Socket::absent(destination.kind());
                (side(absent, Ready::default()), SocketStage::Absent)
            }
        })
    }

    /// Adds a pair, registers its sockets and asks the connector for those that are absent.
    pub(super) fn add(
        &mut self,
        sides: [(WatchedSocket, SocketStage); 2],
        source: Origin,
        cx: &mut Context<'_>,
    ) {
        self.serial = self.serial.wrapping_add(1);
        let mut pair = Pair::new(sides, self.plan.modes(), source, self.serial, cx.now);
        if self.plan.config.sockmap.is_some() {
            pair.join_when_connected();
        }
        if self.plan.config.proxy_protocol {
            let source = match source {
                Origin::Ip(address) => proxy_protocol::Source::Ip(address),
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
        for (end, kind) in SIDES.into_iter().enumerate() {
            let Some(pair) = self.pairs.get(key as usize) else {
                return;
            };
            let side = pair.side(end);
            if side.socket.is_absent() {
                self.ask(key, end);
            } else if let Err(error) = self.register(&side.socket, kind, key, cx) {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                return self.end_pair(key, Reason::Failed(end as u8, errno), cx);
            } else if pair.stage(end) == SocketStage::Greeting {
                self.greet(key, end, cx);
            }
        }
        self.enqueue(key);
    }

    /// Asks the connector for the socket of an end.
    fn ask(&mut self, key: u32, end: usize) {
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
        if let Some(request) = self.plan.ask(target, Box::new(answer)) {
            self.asked.insert((key, end), request);
        }
    }

    /// The connector has answered for an end of a pair.
    pub(super) fn on_connected(
        &mut self,
        (key, serial, end): (u32, u32, usize),
        result: Result<Connected, ConnectError>,
        cx: &mut Context<'_>,
    ) {
        let Some(pair) = self.pairs.get_mut(key as usize) else {
            return;
        };
        if pair.serial != serial || pair.stage(end) != SocketStage::Absent {
            return;
        }
        self.asked.remove(&(key, end));
        let connected = match result {
            Ok(connected) => connected,
            Err(error) => {
                let errno = match &error {
                    ConnectError::Io(error) => Errno::from_io_error(error),
                    _ => None,
                };
                let reason = self.explain(end, &error, errno.unwrap_or(Errno::IO));
                return self.fail_connect(key, end, &reason, cx);
            }
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
    pub(super) fn advance(
        &mut self,
        key: u32,
        end: usize,
        stage: SocketStage,
        cx: &mut Context<'_>,
    ) {
        let Some(pair) = self.pairs.get_mut(key as usize) else {
            return;
        };
        pair.set_stage(end, stage);
        if stage == SocketStage::Greeting {
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
    pub(super) fn on_connect_event(
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
            SocketStage::Connecting if readiness.writable() => {
                // Without EPOLLERR there is no error to ask for.
                if readiness.hung_up()
                    && let Some(errno) = pair.side(end).socket.take_error()
                {
                    return self.fail_connect(key, end, &errno, cx);
                }
                let greets = self.plan.destinations[end]
                    .as_ref()
                    .is_some_and(|to| to.greeting().is_some());
                let next = if greets {
                    SocketStage::Greeting
                } else {
                    SocketStage::Connected
                };
                self.advance(key, end, next, cx);
            }
            SocketStage::Greeting if readiness.readable() => {
                self.read_greeting(key, end, readiness, cx);
            }
            // The other socket is not connected yet: a reset ends the pair, the end of the stream follows
            // its bytes.
            SocketStage::Connected if readiness.hung_up() => {
                if let Some(errno) = pair.side(end).socket.take_error() {
                    self.end_pair(key, Reason::Failed(end as u8, errno), cx);
                }
            }
            _ => {}
        }
    }

    /// An error for the log, with what it means for a Unix socket.
    fn explain(&self, end: usize, error: &dyn std::fmt::Display, errno: Errno) -> String {
        match errno {
            Errno::ACCESS if self.plan.kind(end).is_unix() => format!("{error}: {NO_PERMISSION}"),
            _ => error.to_string(),
        }
    }

    /// Ends a pair whose socket cannot be connected.
    pub(super) fn fail_connect(
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
    pub(super) fn unreachable(&self, source: Origin, end: usize, reason: &dyn std::fmt::Display) {
        self.unreachable_end(source, end, reason);
        self.counters.opened.add(1);
        self.counters.ended.add(1);
        self.counters.unreachable.add(1);
        self.after_end(false);
    }
}

/// The address to which a client has connected.
fn local_address(socket: &Socket) -> Option<SocketAddr> {
    let address = rustix::net::getsockname(socket.fd().ok()?).ok()?;
    SocketAddr::try_from(address).ok()
}
