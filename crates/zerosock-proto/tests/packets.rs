//! A sender and a model of Linux's receiver (6.12.92 and later), which resets a connection that has
//! too many unread packets, however small, and has a reader that may wait for many bytes
//! (SO_RCVLOWAT). The receiver must never reset, and the reader must get the bytes it waits for.

use std::collections::VecDeque;
use std::sync::Arc;

use proptest::prelude::*;
use zerosock_proto::vsock::{Event, FlowId, PortTable, ReserveError, Shard, ShardConfig};
use zerosock_proto::wire::vsock::{Op, Repr, SocketType};
use zerosock_proto::{Address, Cid, Instant, Port};

const GUEST: Cid = Cid::new(3);
/// Bytes of bookkeeping that Linux counts for a packet.
const OVERHEAD: u64 = 576;
/// Payload bytes that fit a receive buffer of a Linux guest.
const BUFFER: u32 = 3732;
/// Capacity of the socket that the sender reads from, in bytes.
const SOCKET: u32 = 200 << 10;

/// Longer than every timer.
const HOUR: Instant = Instant::from_nanos(3_600_000_000_000);

/// The receiver.
struct Linux {
    buf_alloc: u32,
    low_water: u32,
    /// Unread bytes of each packet, and the packets not yet read to their end.
    queue: VecDeque<(u32, u32)>,
    unread: u32,
    received: u64,
    read: u64,
    fwd_cnt: u32,
    announced: u32,
    answers: VecDeque<Op>,
}

impl Linux {
    fn receive(&mut self, header: &Repr) {
        match header.op.known() {
            Some(Op::Rw) => {
                let packets = self.queue.len() as u64 + 1;
                assert!(
                    packets * OVERHEAD <= u64::from(self.buf_alloc).max(OVERHEAD),
                    "reset: {packets} packets in a buffer of {}",
                    self.buf_alloc
                );
                self.queue.push_back((header.len, header.len));
                self.unread += header.len;
                self.received += u64::from(header.len);
                assert!(self.unread <= self.buf_alloc, "more than the credit");
            }
            Some(Op::CreditRequest) => self.answers.push_back(Op::CreditUpdate),
            other => panic!("{other:?}"),
        }
    }

    /// The reader reads up to `most` bytes if its low-water mark, or the last of `all` bytes, has
    /// arrived. Returns whether it read.
    fn read(&mut self, most: u32, all: u64) -> bool {
        let enough = self.unread >= self.low_water || self.received == all;
        let mut left = most.min(self.unread);
        if !enough || left == 0 {
            return false;
        }
        self.read += u64::from(left);
        self.unread -= left;
        while let Some((len, unread)) = self.queue.front_mut().filter(|_| left > 0) {
            let part = left.min(*unread);
            *unread -= part;
            left -= part;
            if *unread == 0 {
                // Credit is returned by whole packets.
                self.fwd_cnt += *len;
                self.queue.pop_front();
            }
        }
        let window = self.buf_alloc - self.fwd_cnt.abs_diff(self.announced).min(self.buf_alloc);
        if window < 64 << 10 || self.unread < self.low_water {
            self.answers.push_back(Op::CreditUpdate);
        }
        true
    }

    fn header(&mut self, op: Op) -> Repr {
        self.announced = self.fwd_cnt;
        Repr {
            src: Address::new(GUEST, Port::new(9)),
            dst: Address::new(Cid::HOST, Port::new(1)),
            len: 0,
            socket_type: SocketType::Stream.into(),
            op: op.into(),
            flags: 0,
            buf_alloc: self.buf_alloc,
            fwd_cnt: self.fwd_cnt,
        }
    }
}

/// The source of the sender's bytes.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum From {
    /// A socket, which keeps bytes that are not read: a relay.
    Socket,
    /// Writes of an application, which are accepted or refused.
    Program,
}

/// The sender.
struct Relay {
    from: From,
    shard: Shard,
    flow: FlowId,
    now: Instant,
    /// Writes that the socket has not accepted.
    writes: VecDeque<u32>,
    /// Bytes in the socket.
    pending: u32,
    waits: bool,
    /// Packets of coalesced bytes.
    gathered: usize,
}

impl Relay {
    fn connected(from: From, linux: &mut Linux) -> Relay {
        let mut config = ShardConfig::device(GUEST);
        config.accept_all = true;
        config.send_limit = Some(u32::MAX);
        let mut shard = Shard::new(config, Arc::new(PortTable::new()));
        let now = Instant::ZERO;
        let _ = shard.handle_packet(now, &linux.header(Op::Request));
        let Some(Event::Incoming { flow, .. }) = shard.poll_event() else {
            panic!("no connection")
        };
        shard.accept(now, flow).unwrap();
        shard.set_coalescing(flow, from == From::Program);
        let response = shard.poll_transmit(now, 0).unwrap();
        assert_eq!(response.header.op.known(), Some(Op::Response));
        Relay {
            from,
            shard,
            flow,
            now,
            writes: VecDeque::new(),
            pending: 0,
            waits: false,
            gathered: 0,
        }
    }

    /// The application writes while its socket has space. Returns whether it wrote.
    fn write(&mut self) -> bool {
        let mut any = false;
        if self.from == From::Program {
            // Those are accepted below, one by one.
            return !self.waits && !self.writes.is_empty();
        }
        while let Some(&write) = self.writes.front() {
            if self.pending + write > SOCKET {
                break;
            }
            self.writes.pop_front();
            self.pending += write;
            any = true;
        }
        any
    }

    /// Sends as a device does from a readable socket.
    fn send(&mut self) -> Option<Repr> {
        if self.from == From::Program {
            return self.send_write();
        }
        if self.waits || self.pending == 0 {
            return None;
        }
        if self.shard.nears_packet_limit(self.flow)
            && self.shard.should_delay(self.flow, self.pending)
        {
            self.waits = true;
            return None;
        }
        match self.shard.reserve(self.flow, BUFFER) {
            Ok(reservation) => {
                let len = self.pending.min(reservation.len());
                self.pending -= len;
                Some(self.shard.commit(reservation, len, 0).unwrap())
            }
            Err(ReserveError::NoCredit) => {
                self.waits = true;
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Sends as a driver or device does for a write of the application.
    fn send_write(&mut self) -> Option<Repr> {
        while let Some(&write) = self.writes.front().filter(|_| !self.waits) {
            if self.shard.has_data() {
                // There is a buffer: packets that are due are sent before the next write.
                let packet = self.shard.poll_transmit(self.now, BUFFER);
                return packet.map(|packet| packet.header);
            }
            let (took, header) = match self.shard.send_now(self.flow, write.min(BUFFER), 0) {
                Ok(header) => (header.len, Some(header)),
                Err(ReserveError::ShouldCoalesce) => (self.shard.coalesce(self.flow, write), None),
                Err(ReserveError::NoCredit) => (0, None),
                Err(error) => panic!("{error}"),
            };
            self.waits = took == 0;
            match write - took {
                0 => drop(self.writes.pop_front()),
                left => self.writes[0] = left,
            }
            if header.is_some() {
                return header;
            }
        }
        None
    }

    /// Sends control packets and coalesced bytes. Returns whether there were any.
    fn control(&mut self, linux: &mut Linux) -> bool {
        let mut any = false;
        while let Some(packet) = self.shard.poll_transmit(self.now, BUFFER) {
            linux.receive(&packet.header);
            self.gathered += usize::from(packet.span.is_some());
            any = true;
        }
        any
    }

    fn events(&mut self) {
        while let Some(event) = self.shard.poll_event() {
            match event {
                Event::Writable { .. } => self.waits = false,
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Runs `stream_from` for both kinds of senders; returns packets and time of the worse one.
fn stream(
    buf_alloc: u32,
    low_water: u32,
    most: u32,
    writes: &[u32],
    eager: bool,
) -> (usize, Instant) {
    let from = |from| stream_from(from, buf_alloc, low_water, most, writes, eager);
    let (socket, program) = (from(From::Socket), from(From::Program));
    (socket.0.max(program.0), socket.1.max(program.1))
}

/// Sends writes of these sizes to a reader that waits for `low_water` bytes and reads `most` at a
/// time. `eager`: the application writes before the relay reads, and not one write at a time.
/// Returns the number of packets, and when the last byte was read.
fn stream_from(
    from: From,
    buf_alloc: u32,
    low_water: u32,
    most: u32,
    writes: &[u32],
    eager: bool,
) -> (usize, Instant) {
    let mut linux = Linux {
        buf_alloc,
        low_water,
        queue: VecDeque::new(),
        unread: 0,
        received: 0,
        read: 0,
        fwd_cnt: 0,
        announced: 0,
        answers: VecDeque::new(),
    };
    let mut relay = Relay::connected(from, &mut linux);
    let all: u64 = writes.iter().copied().map(u64::from).sum();
    let mut later: VecDeque<u32> = writes.iter().copied().collect();
    let mut packets = 0;
    while linux.read < all {
        let mut busy = false;
        if eager {
            relay.writes.append(&mut later);
        } else if relay.writes.is_empty() {
            relay.writes.extend(later.pop_front());
        }
        busy |= relay.write();
        while let Some(header) = relay.send() {
            linux.receive(&header);
            packets += 1;
            busy = true;
        }
        busy |= relay.control(&mut linux);
        if busy && !eager {
            // The next write precedes the reader.
            continue;
        }
        busy |= linux.read(most, all);
        while let Some(op) = linux.answers.pop_front() {
            let header = linux.header(op);
            let _ = relay.shard.handle_packet(relay.now, &header);
            busy = true;
        }
        relay.events();
        let info = relay.shard.flow(relay.flow).unwrap();
        let held = info.unsent > 0;
        if !busy && (relay.waits || held) {
            // Time passes only when nothing else can happen.
            let Some(at) = relay.shard.poll_timeout() else {
                panic!("both wait for ever: {} of {all} read", linux.read);
            };
            assert!(at < HOUR, "both wait: {} of {all} read", linux.read);
            relay.now = at;
            relay.shard.handle_timeout(at);
            relay.events();
        } else if !busy && later.is_empty() && relay.writes.is_empty() && relay.pending == 0 {
            panic!("bytes are lost: {} of {all} read", linux.read);
        }
    }
    (packets + relay.gathered, relay.now)
}

/// The public test suite's small packets under back-pressure, without a reader.
#[test]
fn small_writes_coalesce_when_the_peer_does_not_read() {
    let writes: Vec<u32> = (0..2000).map(|n| 129 + n % 384).collect();
    let all: u32 = writes.iter().sum();
    let packets = |from| stream_from(from, 262_144, 262_144, u32::MAX, &writes, false).0;
    // The first writes were sent as they were.
    let socket = packets(From::Socket);
    assert!(socket < 281 + 2 * (all / 2048) as usize, "{socket}");
    // No packet is ready when the reader has read a full buffer, twice.
    let program = packets(From::Program);
    assert!(program < 3 * 281 + (all / 2048) as usize + 3, "{program}");
}

#[test]
fn a_reader_that_waits_for_a_full_buffer_gets_it() {
    for size in [1, 100, 129, 512, 1500, 2047] {
        let writes = vec![size; 300_000 / size as usize];
        stream(262_144, 262_144, u32::MAX, &writes, false);
        stream(131_072, 131_072, u32::MAX, &writes, false);
    }
}

/// The reader may need a few last bytes that no more bytes follow.
#[test]
fn a_small_last_packet_is_sent_after_a_delay() {
    let mut writes = vec![200; 300];
    writes.push(262_144 - 60_000 - 10_000);
    writes.extend([1000; 10]);
    let (_, done) = stream(262_144, 262_144, u32::MAX, &writes, false);
    assert!(done <= Instant::from_nanos(100_000_000), "{done:?}");
}

proptest! {
    #[test]
    fn the_receiver_never_resets_and_the_reader_never_starves(
        buf_alloc in prop_oneof![Just(262_144u32), Just(65_536u32), 4096u32..300_000],
        low_water in 0.0f64..=1.0,
        most in prop_oneof![200u32..5000, Just(u32::MAX)],
        sizes in prop::collection::vec(prop_oneof![8 => 1u32..600, 2 => 1u32..5000], 1..30),
        times in 1usize..25,
        eager in any::<bool>(),
    ) {
        // A packet that was read in part keeps its space: of a buffer that it fills, nothing is
        // left.
        let low_water = (f64::from(buf_alloc.saturating_sub(BUFFER)) * low_water) as u32;
        let low_water = low_water.max(1);
        stream(buf_alloc, low_water, most, &sizes.repeat(times), eager);
    }
}
