//! The cost of the protocol for a packet of 64 bytes, without a queue: two shards in one thread,
//! with a plain array of headers between them.
//!
//! Each step runs over a batch of packets between two readings of the clock, so that the clock does
//! not count; the whole sender and the whole receiver run the steps packet by packet, as a driver
//! or device does. Every step is a function that is never inlined, so that a profiler that counts
//! instructions by function finds it. Figures are medians of rounds, in nanoseconds per packet.
//!
//! `--quick` checks that the benchmark runs: few rounds, and no reliable figure.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant as Clock;

use zerosock_proto::vsock::{
    Disposition, Event, FlowId, PortTable, Reservation, ReserveError, Shard, ShardConfig,
};
use zerosock_proto::wire::vsock::{HEADER_LEN, Repr, SocketType};
use zerosock_proto::{Address, Cid, Instant, Port};

const NOW: Instant = Instant::ZERO;
const GUEST: Cid = Cid::new(3);
/// Payload of a packet, in bytes.
const PAYLOAD: u32 = 64;
/// Packets between two readings of the clock: the headers of a batch fit the first-level cache.
const BATCH: usize = 256;
/// Receive buffer, for 6553 packets, as many as a large ring takes.
const BUF_ALLOC: u32 = 4 << 20;

type Headers = [[u8; HEADER_LEN]; BATCH];

/// Two ends of one connection.
struct Pair {
    driver: Shard,
    device: Shard,
    client: FlowId,
    server: FlowId,
}

impl Pair {
    fn new() -> Pair {
        let shard = |mut config: ShardConfig| {
            config.buf_alloc = BUF_ALLOC;
            Shard::new(config, Arc::new(PortTable::new()))
        };
        let mut driver = shard(ShardConfig::driver(GUEST));
        let mut device = shard(ShardConfig::device(GUEST));
        let server = Address::new(Cid::HOST, Port::new(1));
        device.listen(server.port, 1).unwrap();
        let any = Address::new(Cid::ANY, Port::ANY);
        let client = driver
            .connect(NOW, any, server, SocketType::Stream)
            .unwrap();
        deliver_control(&mut driver, &mut device);
        let Some(Event::Incoming { flow: server, .. }) = device.poll_event() else {
            panic!("no connection")
        };
        device.accept(NOW, server).unwrap();
        deliver_control(&mut device, &mut driver);
        assert_eq!(driver.poll_event(), Some(Event::Connected { flow: client }));
        Pair {
            driver,
            device,
            client,
            server,
        }
    }
}

/// Delivers control packets one way: credit, and those that connect.
#[inline(never)]
fn deliver_control(from: &mut Shard, to: &mut Shard) {
    while let Some(packet) = from.poll_transmit(NOW, 0) {
        let _ = to.handle_packet(NOW, &packet.header);
    }
}

/// Returns credit, until the sender has some again.
fn return_credit(pair: &mut Pair) {
    deliver_control(&mut pair.driver, &mut pair.device);
    deliver_control(&mut pair.device, &mut pair.driver);
    while pair.driver.poll_event().is_some() {}
}

#[inline(never)]
fn reserve(shard: &mut Shard, flow: FlowId, len: u32, reserved: &mut Vec<Reservation>) {
    while reserved.len() < BATCH {
        match shard.reserve(flow, len) {
            Ok(reservation) => reserved.push(reservation),
            Err(ReserveError::NoCredit) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

#[inline(never)]
fn commit(shard: &mut Shard, len: u32, reserved: &mut Vec<Reservation>, reprs: &mut Vec<Repr>) {
    for reservation in reserved.drain(..) {
        reprs.push(shard.commit(reservation, len, 0).unwrap());
    }
}

#[inline(never)]
fn emit(reprs: &mut Vec<Repr>, headers: &mut Headers) {
    for (repr, header) in reprs.drain(..).zip(headers) {
        repr.emit(header);
    }
}

#[inline(never)]
fn parse(headers: &[[u8; HEADER_LEN]], reprs: &mut Vec<Repr>) {
    for header in headers {
        reprs.push(Repr::parse(header).unwrap());
    }
}

#[inline(never)]
fn handle_packet(shard: &mut Shard, reprs: &mut Vec<Repr>, delivered: &mut Vec<(FlowId, u32)>) {
    for repr in reprs.drain(..) {
        match shard.handle_packet(NOW, &repr) {
            Disposition::Deliver { flow, len, .. } => delivered.push((flow, len)),
            other => panic!("{other:?}"),
        }
    }
}

#[inline(never)]
fn consume(shard: &mut Shard, delivered: &mut Vec<(FlowId, u32)>) {
    for (flow, len) in delivered.drain(..) {
        shard.consume(flow, len).unwrap();
    }
}

/// Sends a batch; returns the number of packets, fewer at the end of the credit.
#[inline(never)]
fn sender(shard: &mut Shard, flow: FlowId, len: u32, headers: &mut Headers) -> usize {
    for (sent, header) in headers.iter_mut().enumerate() {
        let Ok(reservation) = shard.reserve(flow, len) else {
            return sent;
        };
        let Ok(repr) = shard.commit(reservation, len, 0) else {
            panic!("not committed")
        };
        repr.emit(header);
    }
    BATCH
}

/// As [`sender`], for payload of known length.
#[inline(never)]
fn sender_at_once(shard: &mut Shard, flow: FlowId, len: u32, headers: &mut Headers) -> usize {
    for (sent, header) in headers.iter_mut().enumerate() {
        match shard.send_now(flow, len, 0) {
            Ok(repr) if repr.len == len => repr.emit(header),
            Ok(_) => panic!("cut"),
            Err(_) => return sent,
        }
    }
    BATCH
}

/// One packet through the whole receiver except `consume`.
#[inline(always)]
fn take(shard: &mut Shard, header: &[u8; HEADER_LEN]) -> (FlowId, u32) {
    let Ok(repr) = Repr::parse(header) else {
        panic!("malformed")
    };
    match shard.handle_packet(NOW, &repr) {
        Disposition::Deliver { flow, len, .. } => (flow, len),
        other => panic!("{other:?}"),
    }
}

#[inline(never)]
fn receiver(shard: &mut Shard, headers: &[[u8; HEADER_LEN]]) {
    for header in headers {
        let (flow, len) = take(shard, header);
        let Ok(()) = shard.consume(flow, len) else {
            panic!("not consumed")
        };
    }
}

/// As [`receiver`], but all bytes of the batch are consumed at once.
#[inline(never)]
fn receiver_at_once(shard: &mut Shard, flow: FlowId, headers: &[[u8; HEADER_LEN]]) {
    let mut bytes = 0;
    for header in headers {
        bytes += take(shard, header).1;
    }
    shard.consume(flow, bytes).unwrap();
}

/// Packets in both directions, one at a time: each carries new credit.
#[inline(never)]
fn echo(pair: &mut Pair, headers: &mut Headers) {
    let (header, _) = headers.split_first_mut().unwrap();
    for _ in 0..BATCH / 2 {
        for there in [true, false] {
            let (from, to, flow) = if there {
                (&mut pair.driver, &mut pair.device, pair.client)
            } else {
                (&mut pair.device, &mut pair.driver, pair.server)
            };
            let reservation = from.reserve(flow, PAYLOAD).unwrap();
            from.commit(reservation, PAYLOAD, 0).unwrap().emit(header);
            let (flow, len) = take(to, header);
            to.consume(flow, len).unwrap();
        }
    }
}

/// Time spent in one step, round by round.
struct Row {
    name: &'static str,
    rounds: Vec<f64>,
    nanos: u128,
    packets: usize,
}

impl Row {
    fn new(name: &'static str) -> Row {
        Row {
            name,
            rounds: Vec::new(),
            nanos: 0,
            packets: 0,
        }
    }

    /// Runs a step over `packets` packets.
    fn time<T>(&mut self, packets: usize, step: impl FnOnce() -> T) -> T {
        let start = Clock::now();
        let result = step();
        self.nanos += start.elapsed().as_nanos();
        self.packets += packets;
        result
    }

    fn round(&mut self) {
        self.rounds
            .push(self.nanos as f64 / self.packets.max(1) as f64);
        (self.nanos, self.packets) = (0, 0);
    }

    fn print(&mut self) {
        self.rounds.sort_by(f64::total_cmp);
        let (least, most) = (self.rounds[0], self.rounds[self.rounds.len() - 1]);
        let median = self.rounds[self.rounds.len() / 2];
        println!("{:<44}{median:>8.2}{least:>8.2}{most:>8.2}", self.name);
    }
}

/// A batch through every step on its own.
fn steps(pair: &mut Pair, rows: &mut [Row; 8], buffers: &mut Buffers) {
    let [
        r_reserve,
        r_commit,
        r_emit,
        r_parse,
        r_handle,
        r_consume,
        r_credit,
        r_clock,
    ] = rows;
    let Buffers {
        headers,
        reserved,
        reprs,
        delivered,
    } = buffers;
    let len = black_box(PAYLOAD);
    // The number is not known before: the step counts them.
    r_reserve.time(0, || reserve(&mut pair.driver, pair.client, len, reserved));
    let n = reserved.len();
    r_reserve.packets += n;
    r_commit.time(n, || commit(&mut pair.driver, len, reserved, reprs));
    r_emit.time(n, || emit(reprs, headers));
    r_parse.time(n, || parse(&headers[..n], reprs));
    r_handle.time(n, || handle_packet(&mut pair.device, reprs, delivered));
    r_consume.time(n, || consume(&mut pair.device, delivered));
    r_credit.time(n, || return_credit(pair));
    r_clock.time(n, || ());
}

/// Packets between two steps.
struct Buffers {
    headers: Box<Headers>,
    reserved: Vec<Reservation>,
    reprs: Vec<Repr>,
    delivered: Vec<(FlowId, u32)>,
}

fn main() {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let (rounds, batches) = if quick { (3, 40) } else { (21, 4000) };
    let mut pair = Pair::new();
    let mut buffers = Buffers {
        headers: Box::new([[0; HEADER_LEN]; BATCH]),
        reserved: Vec::with_capacity(BATCH),
        reprs: Vec::with_capacity(BATCH),
        delivered: Vec::with_capacity(BATCH),
    };
    let mut single = [
        "  Shard::reserve",
        "  Shard::commit",
        "  Repr::emit",
        "  Repr::parse",
        "  Shard::handle_packet",
        "  Shard::consume",
        "  credit announced and requested, both sides",
        "  the clock itself",
    ]
    .map(Row::new);
    let mut whole = [
        "sender: reserve, commit, emit",
        "sender: send_now, emit",
        "receiver: parse, handle_packet, consume",
        "receiver, one consume for a batch",
        "echo: sender and receiver, each packet",
    ]
    .map(Row::new);
    for _ in 0..rounds {
        for _ in 0..batches {
            steps(&mut pair, &mut single, &mut buffers);
        }
        let [r_sender, r_sender_now, r_receiver, r_at_once, r_echo] = &mut whole;
        let headers = &mut buffers.headers;
        let len = black_box(PAYLOAD);
        for batch in 0..batches {
            let (driver, client) = (&mut pair.driver, pair.client);
            let sent = if batch % 2 == 0 {
                let sent = r_sender.time(0, || sender(driver, client, len, headers));
                r_sender.packets += sent;
                sent
            } else {
                let sent = r_sender_now.time(0, || sender_at_once(driver, client, len, headers));
                r_sender_now.packets += sent;
                sent
            };
            let headers = &headers[..sent];
            if batch % 2 == 0 {
                r_receiver.time(sent, || receiver(&mut pair.device, headers));
            } else {
                r_at_once.time(sent, || {
                    receiver_at_once(&mut pair.device, pair.server, headers)
                });
            }
            return_credit(&mut pair);
        }
        for _ in 0..batches {
            r_echo.time(BATCH, || echo(&mut pair, headers));
        }
        single.iter_mut().chain(&mut whole).for_each(Row::round);
    }
    assert_eq!(
        pair.device.stats().bad_fwd_cnt + pair.driver.stats().bad_fwd_cnt,
        0
    );
    println!(
        "{:<44}{:>8}{:>8}{:>8}",
        "ns per packet of 64 bytes", "median", "least", "most"
    );
    whole.iter_mut().for_each(Row::print);
    single.iter_mut().for_each(Row::print);
}
