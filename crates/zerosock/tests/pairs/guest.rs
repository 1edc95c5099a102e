//! A guest with several queue pairs: rings written by hand, and a `Shard` for each pair.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use zerosock::driver::{Address, Cid, Port};
use zerosock_proto::Instant;
use zerosock_proto::vsock::{
    Directions, Disposition, Event, FlowId, PortTable, QueuePairs, Shard, ShardConfig,
};
use zerosock_proto::wire::vsock::{Op, Repr, SocketType};

use crate::common::raw::{RawGuest, connect};

const NOW: Instant = Instant::ZERO;

/// A connection, as its program sees it.
#[derive(Default)]
pub(crate) struct Conn {
    /// Its queue pair and flow; `None` when it has ended.
    pub(crate) at: Option<(u16, FlowId)>,
    pub(crate) connected: bool,
    pub(crate) received: Vec<u8>,
    /// The peer has shut its sending side.
    pub(crate) finished: bool,
    /// Bytes to send, and the number of them that have a header.
    outgoing: Vec<u8>,
    sent: usize,
    /// MOVE was sent and is not answered.
    asked: bool,
    /// Declined moves.
    pub(crate) declined: usize,
}

/// See the module.
pub(crate) struct PairsGuest {
    pub(crate) raw: RawGuest,
    pub(crate) shards: Vec<Shard>,
    pub(crate) conns: Vec<Conn>,
    by_id: HashMap<(u16, FlowId), usize>,
    pairs: QueuePairs,
}

impl PairsGuest {
    /// Attaches with `pairs` queue pairs, and listens on `port`.
    pub(crate) fn attach(socket: &Path, pairs: u16, port: u32) -> PairsGuest {
        let pairs = QueuePairs::new(pairs).unwrap();
        let raw = RawGuest::with_pairs(connect(socket), true, pairs);
        let ports = Arc::new(PortTable::new());
        let shard = |_| {
            let config = ShardConfig {
                buf_alloc: 16384,
                ..ShardConfig::driver(raw.cid)
            };
            Shard::new(config, ports.clone())
        };
        let mut shards: Vec<Shard> = (0..pairs.get()).map(shard).collect();
        shards[0].listen(Port::new(port), 64).unwrap();
        PairsGuest {
            raw,
            shards,
            conns: Vec::new(),
            by_id: HashMap::new(),
            pairs,
        }
    }

    /// The pair of a connection's hash.
    pub(crate) fn pair_of(&self, port: Port, peer: Address) -> u16 {
        self.pairs.of_flow(port, peer)
    }

    /// Starts a connect at the pair of the hash; returns the connection's number.
    pub(crate) fn connect(&mut self, from: u32, to: Address) -> usize {
        let from = Port::new(from);
        let pair = self.pairs.of_flow(from, to);
        let local = Address::new(Cid::ANY, from);
        let shard = &mut self.shards[usize::from(pair)];
        let flow = shard.connect(NOW, local, to, SocketType::Stream).unwrap();
        self.add(pair, flow)
    }

    fn add(&mut self, pair: u16, flow: FlowId) -> usize {
        let conn = Conn {
            at: Some((pair, flow)),
            ..Conn::default()
        };
        self.conns.push(conn);
        self.by_id.insert((pair, flow), self.conns.len() - 1);
        self.conns.len() - 1
    }

    /// Queues these bytes to be sent as there is room.
    pub(crate) fn send(&mut self, conn: usize, bytes: &[u8]) {
        let conn = &mut self.conns[conn];
        let (pair, flow) = conn.at.unwrap();
        conn.outgoing.extend_from_slice(bytes);
        let shard = &mut self.shards[usize::from(pair)];
        shard.send(flow, bytes.len() as u32, 0).unwrap();
    }

    /// Bytes not sent yet.
    pub(crate) fn unsent(&self, conn: usize) -> usize {
        self.conns[conn].outgoing.len() - self.conns[conn].sent
    }

    pub(crate) fn shutdown(&mut self, conn: usize, how: Directions) {
        let (pair, flow) = self.conns[conn].at.unwrap();
        let shard = &mut self.shards[usize::from(pair)];
        shard.shutdown(NOW, flow, how).unwrap();
    }

    /// Asks the device to move a connection to `pair`, as older drivers did, unless a move is not answered
    /// yet.
    pub(crate) fn ask_move(&mut self, conn: usize, pair: u16) {
        let Some((at, flow)) = self.conns[conn].at else {
            return;
        };
        let info = self.shards[usize::from(at)].flow(flow);
        if let Some(info) = info
            && !self.conns[conn].asked
            && self.raw.may_send_on(at)
        {
            let header = Repr {
                src: info.local,
                dst: info.peer,
                len: 0,
                socket_type: info.socket_type.into(),
                op: Op::Move.into(),
                flags: pair.into(),
                buf_alloc: info.buf_alloc,
                fwd_cnt: info.fwd_cnt,
            };
            self.raw.send_on(at, &header, &[]);
            self.conns[conn].asked = true;
        }
    }

    /// A move was answered: the connection stays at its pair.
    fn declined(&mut self, pair: u16, header: &Repr) {
        assert_eq!(header.flags, u32::from(pair), "{header}");
        let shard = &self.shards[usize::from(pair)];
        let asked = self.conns.iter_mut().find(|conn| {
            let flow = conn.at.filter(|at| at.0 == pair).map(|at| at.1);
            let info = flow.and_then(|flow| shard.flow(flow));
            info.is_some_and(|info| (info.local, info.peer) == (header.dst, header.src))
        });
        let conn = asked.expect("an answer to no connection");
        conn.asked = false;
        conn.declined += 1;
    }

    /// Processes received packets, and sends as there is room. False: nothing was done.
    pub(crate) fn pump(&mut self) -> bool {
        let mut busy = false;
        for pair in 0..self.pairs.get() {
            while let Some((header, payload)) = self.raw.try_recv_on(pair) {
                busy = true;
                self.packet(pair, &header, &payload);
            }
            self.events(pair);
            while self.raw.may_send_on(pair) {
                let shard = &mut self.shards[usize::from(pair)];
                let Some(packet) = shard.poll_transmit(NOW, 4096) else {
                    break;
                };
                busy = true;
                let payload = packet.span.map(|span| {
                    shard.handle_released(span);
                    let conn = &mut self.conns[self.by_id[&(pair, span.flow)]];
                    let at = conn.sent;
                    conn.sent += span.len as usize;
                    conn.outgoing[at..conn.sent].to_vec()
                });
                self.raw
                    .send_on(pair, &packet.header, &payload.unwrap_or_default());
            }
        }
        busy
    }

    fn packet(&mut self, pair: u16, header: &Repr, payload: &[u8]) {
        if header.op == Op::Moved.into() {
            self.declined(pair, header);
            // As every packet, it has the device's credit, which no other packet may repeat.
            let credit = Repr {
                op: Op::CreditUpdate.into(),
                flags: 0,
                ..*header
            };
            return self.packet(pair, &credit, payload);
        }
        let shard = &mut self.shards[usize::from(pair)];
        match shard.handle_packet(NOW, header) {
            Disposition::Deliver { flow, len, .. } => {
                shard.consume(flow, len).unwrap();
                let conn = &mut self.conns[self.by_id[&(pair, flow)]];
                assert_eq!(conn.at, Some((pair, flow)));
                conn.received.extend_from_slice(payload);
            }
            Disposition::Handled | Disposition::Dropped(_) => {}
            other => panic!("{other:?}"),
        }
    }

    fn events(&mut self, pair: u16) {
        while let Some(event) = self.shards[usize::from(pair)].poll_event() {
            match event {
                Event::Incoming { flow, .. } => {
                    self.shards[usize::from(pair)].accept(NOW, flow).unwrap();
                    let conn = self.add(pair, flow);
                    self.conns[conn].connected = true;
                }
                Event::Connected { flow } => {
                    let conn = self.by_id[&(pair, flow)];
                    self.conns[conn].connected = true;
                }
                Event::PeerShutdown { flow, send, .. } => {
                    let conn = self.by_id[&(pair, flow)];
                    self.conns[conn].finished |= send;
                }
                Event::Closed { flow, .. } | Event::Refused { flow, .. } => {
                    if let Some(conn) = self.by_id.remove(&(pair, flow)) {
                        self.conns[conn].at = None;
                        self.conns[conn].finished = true;
                    }
                }
                Event::Writable { .. } => {}
            }
        }
    }
}

/// Pumps all guests until `done`.
#[track_caller]
pub(crate) fn until(
    guests: &mut [&mut PairsGuest],
    mut done: impl FnMut(&mut [&mut PairsGuest]) -> bool,
) {
    let give_up = crate::common::deadline();
    loop {
        let busy = guests
            .iter_mut()
            .fold(false, |busy, guest| guest.pump() | busy);
        if done(guests) {
            return;
        }
        assert!(
            std::time::Instant::now() < give_up,
            "it does not come about"
        );
        if !busy {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}
