//! Connections, listeners and events of a driver.

use std::time;

use zerosock_proto::vsock::{ConnectError, Directions, ListenError, QueuePairs};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Port};

use super::Driver;
use super::errors::DriverError;
use super::events::DriverEvent;
use super::queue_pairs::QueuePairId;
use crate::device::placing::SPARE_PORTS;
use crate::table::sockets::{ReadyFlag, StreamId, StreamState};

impl Driver {
    /// Starts to connect to `peer`. [`DriverEvent::Connected`] or [`DriverEvent::Refused`] follows.
    pub fn connect(&mut self, peer: Address) -> Result<StreamId, ConnectError> {
        self.connect_from(Port::ANY, peer)
    }

    /// As [`connect`](Driver::connect), with a local port.
    pub fn connect_from(&mut self, port: Port, peer: Address) -> Result<StreamId, ConnectError> {
        self.connect_for(port, peer, SocketType::Stream)
    }

    /// As [`connect_from`](Driver::connect_from), with a socket type.
    pub fn connect_for(
        &mut self,
        port: Port,
        peer: Address,
        socket_type: SocketType,
    ) -> Result<StreamId, ConnectError> {
        if self.link.is_none() {
            return Err(ConnectError::Unreachable);
        }
        let now = self.now();
        let (queue_pair, port) = self.choose_queue_pair(port, peer)?;
        let local = Address {
            cid: self.cid,
            port,
        };
        let pair = &mut self.store.queue_pairs[queue_pair];
        let shard = &mut pair.shard;
        let flow = shard.connect(now, local, peer, socket_type)?;
        if pair.flows.reserve(flow).is_err() {
            let _ = shard.reset(flow);
            return Err(ConnectError::TooManyConnections);
        }
        let local = shard.flow(flow).map_or(local, |info| info.local);
        let state = StreamState::Connecting;
        let pool = queue_pair.pool();
        let stream = self
            .sockets
            .insert(pool, flow, state, local, peer, socket_type);
        self.store.queue_pairs[queue_pair]
            .flows
            .insert(flow, stream);
        Ok(stream)
    }

    /// Listens on `port`. As on Linux, at most `backlog + 1` connections wait to be accepted; the
    /// driver answers further requests with RST.
    pub fn listen(&mut self, port: Port, backlog: usize) -> Result<(), ListenError> {
        self.listen_for(port, backlog, SocketType::Stream)
    }

    /// As [`listen`](Driver::listen), with a socket type; requests of the other type are answered
    /// with RST as well.
    pub fn listen_for(
        &mut self,
        port: Port,
        backlog: usize,
        socket_type: SocketType,
    ) -> Result<(), ListenError> {
        self.store.queue_pairs[QueuePairId::FIRST]
            .shard
            .listen(port, backlog)?;
        self.listeners.add(port, backlog, socket_type);
        Ok(())
    }

    /// Stops listening on `port` and resets connections that wait to be accepted.
    pub fn unlisten(&mut self, port: Port) {
        // An error means that the port is not listening.
        let _ = self.store.queue_pairs[QueuePairId::FIRST]
            .shard
            .unlisten(port);
        for stream in self.listeners.remove(port) {
            self.abort(stream);
        }
    }

    /// Accepts the oldest waiting connection on `port`.
    pub fn accept(&mut self, port: Port) -> Option<StreamId> {
        self.listeners.accept(port)
    }

    /// The state of a connection; `None` if it was closed.
    pub fn state(&self, stream: StreamId) -> Option<StreamState> {
        self.sockets.get(stream).map(|stream| stream.state)
    }

    /// The local and the peer's address.
    pub fn addresses(&self, stream: StreamId) -> Option<(Address, Address)> {
        self.sockets
            .get(stream)
            .map(|stream| (stream.local, stream.peer))
    }

    /// Shuts down receiving, sending, or both. Bytes sent before still arrive; received unread
    /// bytes are discarded.
    pub fn shutdown(&mut self, stream: StreamId, how: Directions) {
        let now = self.now();
        if how.receive {
            self.sockets.shutdown_recv(stream, &mut self.store);
        }
        let Some(entry) = self.sockets.get_mut(stream) else {
            return;
        };
        entry.send_shutdown |= how.send;
        let (queue_pair, flow) = (QueuePairId::of_pool(entry.pool), entry.flow);
        if let Some(flow) = flow {
            // Fails only for a flow that has ended.
            let _ = self.store.queue_pairs[queue_pair]
                .shard
                .shutdown(now, flow, how);
        }
    }

    /// Closes a connection in order: bytes sent before still arrive, unread bytes are discarded,
    /// the handle becomes invalid. A connection that the peer has not answered yet is reset.
    pub fn close(&mut self, stream: StreamId) -> Result<(), DriverError> {
        let now = self.now();
        if let Some((queue_pair, flow)) = self.remove_flow(stream)
            && self.store.queue_pairs[queue_pair]
                .shard
                .shutdown(now, flow, Directions::BOTH)
                .is_err()
        {
            // Fails only for a flow that has ended.
            let _ = self.store.queue_pairs[queue_pair].shard.reset(flow);
        }
        self.sockets.remove(stream, &mut self.store);
        Ok(self.store.check()?)
    }

    /// Resets a connection; the handle becomes invalid.
    pub fn abort(&mut self, stream: StreamId) {
        if let Some((queue_pair, flow)) = self.remove_flow(stream) {
            // Fails only for a flow that has ended.
            let _ = self.store.queue_pairs[queue_pair].shard.reset(flow);
        }
        self.sockets.remove(stream, &mut self.store);
    }

    /// The next queued event. Does not receive from the device: call [`drive`](Driver::drive) for
    /// that.
    pub fn next_event(&mut self) -> Option<DriverEvent> {
        if std::mem::take(&mut self.unreported_gone) {
            return Some(DriverEvent::DeviceGone);
        }
        if std::mem::take(&mut self.unreported_reset) {
            return Some(DriverEvent::TransportReset);
        }
        if let Some(port) = self.listeners.next_port(1) {
            return Some(DriverEvent::Incoming { port });
        }
        let (stream, flag) = self.sockets.next_ready_flag()?;
        let entry = self.sockets.get(stream)?;
        Some(match flag {
            ReadyFlag::Connected => DriverEvent::Connected { stream },
            ReadyFlag::Readable => DriverEvent::Readable { stream },
            ReadyFlag::Writable => DriverEvent::Writable { stream },
            ReadyFlag::PeerShutdown => DriverEvent::PeerShutdown {
                stream,
                receive: entry.peer_recv_shutdown,
                send: entry.peer_send_shutdown,
            },
            ReadyFlag::Refused => DriverEvent::Refused {
                stream,
                peer: entry.peer,
            },
            ReadyFlag::Closed => DriverEvent::Closed {
                stream,
                reset: entry.state == StreamState::Reset,
            },
        })
    }

    /// Takes turns, and sleeps in between, until there is an event or `deadline` has passed
    /// (`None`: no limit). Returns `Ok(None)` after the deadline.
    pub fn poll(
        &mut self,
        deadline: Option<time::Instant>,
    ) -> Result<Option<DriverEvent>, DriverError> {
        loop {
            let busy = self.drive()?;
            if let Some(event) = self.next_event() {
                return Ok(Some(event));
            }
            if deadline.is_some_and(|at| at <= time::Instant::now()) {
                return Ok(None);
            }
            if !busy {
                self.sleep(deadline)?;
            }
        }
    }
}

impl Driver {
    /// The number of queue pairs in use.
    pub fn queue_pairs(&self) -> u16 {
        self.store.queue_pairs.len() as u16
    }

    /// The queue pair of a connection; `None` if it was closed.
    pub fn queue_pair(&self, stream: StreamId) -> Option<u16> {
        let conn = self.sockets.get(stream)?;
        Some(QueuePairId::of_pool(conn.pool).pair())
    }

    /// Chooses the queue pair and the local port of a connection to `peer`. With several pairs, the
    /// queue pair depends on the port. No other connection on any pair has the same two addresses.
    pub(super) fn choose_queue_pair(
        &self,
        port: Port,
        peer: Address,
    ) -> Result<(QueuePairId, Port), ConnectError> {
        let queue_pairs = &self.store.queue_pairs;
        let pairs = QueuePairs::new(self.queue_pairs()).unwrap_or(QueuePairs::ONE);
        if pairs == QueuePairs::ONE {
            return Ok((QueuePairId::FIRST, port));
        }
        for _ in 0..SPARE_PORTS {
            let from = match port {
                Port::ANY => queue_pairs[QueuePairId::FIRST].shard.spare_port(),
                port => port,
            };
            let local = Address::new(self.cid, from);
            if !queue_pairs
                .iter()
                .any(|queue_pair| queue_pair.shard.is_connected(local, peer))
            {
                let queue_pair = queue_pairs.of_pair(pairs.of_flow(from, peer).into());
                return Ok((queue_pair.unwrap_or(QueuePairId::FIRST), from));
            }
            if port != Port::ANY {
                break;
            }
        }
        Err(ConnectError::InUse)
    }
}
