//! Throughput and latency of small messages between two cores through a pair of queues.
//!
//! A driver half and a device half, each spinning on a core of its own, over two mappings of one
//! file, as two processes would have them. Every message is one packet: a header of 44 bytes in a
//! descriptor of its own and 64 bytes of payload, written by one side, read and compared by the
//! other, through public calls only. "Each" publishes every message, "32" every thirty-second; the
//! receiver returns buffers when there are no more messages for the moment, or after 32. For
//! comparison, the same run measures a cache line that moves between the two cores.
//!
//! `cargo bench -p zerosock-ring --bench messages [-- --quick | --alone N]`
//!
//! `--alone N` passes N messages each way on one thread and measures nothing: for instruction
//! counts (`valgrind --tool=callgrind`), which no other load disturbs.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Instant;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use zerosock_ring::{
    Buffer, DeviceQueue, DriverLayout, DriverQueue, FixedChain, GuestSlice, Memory, Piece,
    QueueConfig, RegionConfig,
};

const HEADER: usize = 44;
const PAYLOAD: usize = 64;
/// Queue entries; a packet takes two.
const SIZE: u16 = 256;
const SLOTS: u16 = SIZE / 2;
/// Distance between two headers, and between two payload buffers.
const HEADER_STRIDE: u64 = 64;
const PAYLOAD_STRIDE: u64 = 4096;
/// Bytes of a payload buffer.
const PAYLOAD_LEN: u64 = 4096;
/// Most messages after which a receiver returns buffers.
const RETURN: u32 = 32;

/// The addresses of one queue's parts.
const RINGS: [u64; 2] = [0, 0x1_0000];
const HEADERS: [u64; 2] = [0x2_0000, 0x3_0000];
const PAYLOADS: [u64; 2] = [0x10_0000, 0x20_0000];
const LEN: u64 = 0x40_0000;

/// One side's view of the buffers of a queue.
struct Slots {
    mem: Arc<Memory>,
    headers: Vec<Piece>,
    payloads: Vec<Piece>,
}

/// The driver's end of a queue. Slots are reused in the order in which they come back.
struct Driver {
    queue: DriverQueue,
    slots: Slots,
    chains: Vec<FixedChain>,
    free: VecDeque<u16>,
}

impl Driver {
    fn new(mem: &Arc<Memory>, index: usize, writable: bool) -> Driver {
        let layout = DriverLayout::at(RINGS[index], SIZE);
        let mut queue = DriverQueue::new(Arc::clone(mem), layout, true).expect("a queue");
        let (mut headers, mut payloads, mut chains) = (Vec::new(), Vec::new(), Vec::new());
        for slot in 0..u64::from(SLOTS) {
            let buffer = |base: u64, stride: u64, len: u64, pieces: &mut Vec<Piece>| {
                let (addr, len) = (base + slot * stride, len as u32);
                mem.translate(addr, len, pieces).expect("an address");
                Buffer {
                    addr,
                    len,
                    writable,
                }
            };
            let header = buffer(HEADERS[index], HEADER_STRIDE, HEADER as u64, &mut headers);
            let payload = buffer(PAYLOADS[index], PAYLOAD_STRIDE, PAYLOAD_LEN, &mut payloads);
            chains.push(
                queue
                    .set_chain(&[header, payload], slot)
                    .expect("free descriptors"),
            );
        }
        Driver {
            queue,
            slots: Slots {
                mem: Arc::clone(mem),
                headers,
                payloads,
            },
            chains,
            free: (0..SLOTS).collect(),
        }
    }

    #[inline]
    fn post(&mut self, slot: u16) {
        let chain = self.chains[usize::from(slot)];
        self.queue.add_fixed(chain).expect("a chain that is here");
    }

    #[inline]
    fn take(&mut self) -> Option<u16> {
        let used = self.queue.poll().expect("a sound queue")?;
        Some(used.token as u16)
    }

    #[inline]
    fn slot(&mut self) -> u16 {
        loop {
            if let Some(slot) = self.free.pop_front() {
                return slot;
            }
            while let Some(slot) = self.take() {
                self.free.push_back(slot);
            }
        }
    }
}

impl Slots {
    #[inline]
    fn parts(&self, slot: u16) -> (GuestSlice<'_>, GuestSlice<'_>) {
        let part = |pieces: &[Piece]| {
            let piece = pieces[usize::from(slot)];
            self.mem.slice(piece).expect("a piece of this memory")
        };
        (part(&self.headers), part(&self.payloads))
    }

    #[inline]
    fn write(&self, slot: u16, message: u64) {
        let (header, payload) = self.parts(slot);
        write_packet(header, payload, message);
    }

    #[inline]
    fn check(&self, slot: u16, message: u64) {
        let (header, payload) = self.parts(slot);
        check_packet(header, payload, message);
    }
}

/// The words of a header and of its payload. The header has the payload's length at the offset of
/// vsock, and both contain the message's number.
#[inline]
fn packet(message: u64) -> ([u64; 5], [u64; PAYLOAD / 8]) {
    let header = [message, 2, 3, PAYLOAD as u64, message << 32];
    (header, [message; PAYLOAD / 8])
}

/// The last four bytes of a header, half a word: written and read with those before.
const TAIL: usize = HEADER - 8;

#[inline]
fn tail(message: u64) -> u64 {
    message | message << 32
}

#[inline]
fn write_packet(header: GuestSlice<'_>, payload: GuestSlice<'_>, message: u64) {
    let (words, payload_words) = packet(message);
    let written = header.write_words(0, words)
        && header.write_words(TAIL, [tail(message)])
        && payload.write_words(0, payload_words);
    assert!(written, "message {message}");
}

/// Reads every byte of a packet.
#[inline]
fn check_packet(header: GuestSlice<'_>, payload: GuestSlice<'_>, message: u64) {
    let (expected, expected_payload) = packet(message);
    let mut differ = match header.read_words(TAIL) {
        Some([last]) => last ^ tail(message),
        None => 1,
    };
    let words = header.read_words(0).unwrap_or([0; 5]);
    for (word, expected) in words.into_iter().zip(expected) {
        differ |= word ^ expected;
    }
    let words = payload.read_words(0).unwrap_or([0; PAYLOAD / 8]);
    for (word, expected) in words.into_iter().zip(expected_payload) {
        differ |= word ^ expected;
    }
    assert!(differ == 0, "message {message}");
}

fn device_queue(mem: &Arc<Memory>, index: usize) -> DeviceQueue {
    let layout = DriverLayout::at(RINGS[index], SIZE);
    let config = QueueConfig {
        size: SIZE,
        desc: layout.desc,
        avail: layout.avail,
        used: layout.used,
        base: 0,
        event_idx: true,
        indirect: false,
    };
    DeviceQueue::new(Arc::clone(mem), &config).expect("a queue")
}

/// The header and payload of a chain's packet, however the driver divided it into descriptors; here
/// each is one piece.
#[inline]
fn parts<'m>(mem: &'m Memory, pieces: &[Piece]) -> (GuestSlice<'m>, GuestSlice<'m>) {
    let part = |offset, len| mem.contiguous(pieces, offset, len).expect("one piece");
    (part(0, HEADER), part(HEADER, PAYLOAD))
}

/// What one round does, and how many messages it passes.
#[derive(Copy, Clone)]
enum Scene {
    /// A cache line in both directions.
    Floor,
    ToDevice {
        batch: u32,
    },
    ToDriver {
        batch: u32,
    },
    /// A message each way.
    PingPong,
}

struct DriverSide {
    tx: Driver,
    rx: Driver,
}

struct DeviceSide {
    tx: DeviceQueue,
    rx: DeviceQueue,
}

impl DriverSide {
    fn new(mem: &Arc<Memory>) -> DriverSide {
        let mut side = DriverSide {
            tx: Driver::new(mem, 0, false),
            rx: Driver::new(mem, 1, true),
        };
        for slot in 0..SLOTS {
            side.rx.post(slot);
        }
        side.rx.queue.publish_without_notify();
        side
    }

    fn send(&mut self, count: u32, batch: u32) {
        for message in 1..=count {
            let slot = self.tx.slot();
            self.tx.slots.write(slot, u64::from(message));
            self.tx.post(slot);
            if message.is_multiple_of(batch) || message == count {
                self.tx.queue.publish_without_notify();
            }
        }
    }

    /// Nanoseconds from the first message to the last.
    fn receive(&mut self, count: u32) -> f64 {
        let mut start = Instant::now();
        let (mut message, mut unpublished) = (0, 0);
        while message < count {
            let Some(slot) = self.rx.take() else {
                if unpublished > 0 {
                    self.rx.queue.publish_without_notify();
                    unpublished = 0;
                }
                continue;
            };
            message += 1;
            if message == 1 {
                start = Instant::now();
            }
            self.rx.slots.check(slot, u64::from(message));
            self.rx.post(slot);
            unpublished += 1;
            if unpublished == RETURN {
                self.rx.queue.publish_without_notify();
                unpublished = 0;
            }
        }
        let time = start.elapsed().as_nanos() as f64;
        self.rx.queue.publish_without_notify();
        time
    }

    fn ping(&mut self, count: u32) -> f64 {
        let start = Instant::now();
        for message in 1..=count {
            self.send_one(message);
            let slot = loop {
                if let Some(slot) = self.rx.take() {
                    break slot;
                }
            };
            self.rx.slots.check(slot, u64::from(message));
            self.rx.post(slot);
            self.rx.queue.publish_without_notify();
        }
        start.elapsed().as_nanos() as f64
    }

    fn send_one(&mut self, message: u32) {
        let slot = self.tx.slot();
        self.tx.slots.write(slot, u64::from(message));
        self.tx.post(slot);
        self.tx.queue.publish_without_notify();
    }
}

impl DeviceSide {
    fn new(mem: &Arc<Memory>) -> DeviceSide {
        DeviceSide {
            tx: device_queue(mem, 0),
            rx: device_queue(mem, 1),
        }
    }

    fn receive(&mut self, count: u32) -> f64 {
        let mut start = Instant::now();
        let (mut message, mut unpublished) = (0, 0);
        while message < count {
            if !self.receive_one(message + 1) {
                if unpublished > 0 {
                    self.tx.publish_without_notify();
                    unpublished = 0;
                }
                continue;
            }
            message += 1;
            if message == 1 {
                start = Instant::now();
            }
            unpublished += 1;
            if unpublished == RETURN {
                self.tx.publish_without_notify();
                unpublished = 0;
            }
        }
        let time = start.elapsed().as_nanos() as f64;
        self.tx.publish_without_notify();
        time
    }

    #[inline]
    fn receive_one(&mut self, message: u32) -> bool {
        let Some(chain) = self.tx.pop().expect("a sound queue") else {
            return false;
        };
        let mem = self.tx.memory();
        let (header, payload) = parts(mem, chain.readable());
        check_packet(header, payload, u64::from(message));
        self.tx.complete(chain, 0);
        true
    }

    fn send(&mut self, count: u32, batch: u32) {
        for message in 1..=count {
            self.send_one(message);
            if message.is_multiple_of(batch) || message == count {
                self.rx.publish_without_notify();
            }
        }
    }

    #[inline]
    fn send_one(&mut self, message: u32) {
        let chain = loop {
            if let Some(chain) = self.rx.pop().expect("a sound queue") {
                break chain;
            }
        };
        let (header, payload) = parts(self.rx.memory(), chain.writable());
        write_packet(header, payload, u64::from(message));
        self.rx.complete(chain, (HEADER + PAYLOAD) as u32);
    }

    fn pong(&mut self, count: u32) {
        for message in 1..=count {
            while !self.receive_one(message) {}
            self.send_one(message);
            self.rx.publish_without_notify();
            // Buffers are returned after the answer, which the other side waits for.
            self.tx.publish_without_notify();
        }
    }
}

/// A cache line of its own (two, because processors fetch pairs).
#[repr(align(128))]
struct Line(AtomicU64);

struct Bench {
    driver: DriverSide,
    start: Arc<Barrier>,
    line: Arc<[Line; 2]>,
    rounds: usize,
}

fn bounce(mine: &Line, other: &Line, count: u32, first: bool) {
    for turn in 1..=u64::from(count) {
        if first {
            mine.0.store(turn, Ordering::Release);
        }
        while other.0.load(Ordering::Acquire) != turn {}
        if !first {
            mine.0.store(turn, Ordering::Release);
        }
    }
}

/// The rounds of every scene, the same on both threads.
const SCENES: [(&str, Scene, u32); 6] = [
    ("floor: a cache line, one way", Scene::Floor, 40_000),
    ("one way, half a round trip", Scene::PingPong, 20_000),
    ("to the device, each", Scene::ToDevice { batch: 1 }, 200_000),
    ("to the device, 32", Scene::ToDevice { batch: 32 }, 200_000),
    ("to the driver, each", Scene::ToDriver { batch: 1 }, 200_000),
    ("to the driver, 32", Scene::ToDriver { batch: 32 }, 200_000),
];

impl Bench {
    /// Nanoseconds per message, or per way.
    fn round(&mut self, scene: Scene, count: u32, device_time: &AtomicU64) -> f64 {
        self.line
            .iter()
            .for_each(|line| line.0.store(0, Ordering::Relaxed));
        self.start.wait();
        let each = f64::from(count);
        let time = match scene {
            Scene::Floor => {
                let start = Instant::now();
                bounce(&self.line[0], &self.line[1], count, true);
                start.elapsed().as_nanos() as f64 / each / 2.0
            }
            Scene::PingPong => self.driver.ping(count) / each / 2.0,
            Scene::ToDevice { batch } => {
                self.driver.send(count, batch);
                f64::NAN
            }
            Scene::ToDriver { .. } => self.driver.receive(count) / each,
        };
        self.start.wait();
        if time.is_nan() {
            f64::from_bits(device_time.load(Ordering::Relaxed)) / each
        } else {
            time
        }
    }

    fn run(&mut self, device_time: &AtomicU64) {
        println!(
            "{:32} {:>9} {:>22} {:>10}",
            "", "median", "best to worst", "rate"
        );
        for (name, scene, count) in SCENES {
            let mut times: Vec<f64> = (0..self.rounds)
                .map(|_| self.round(scene, count, device_time))
                .collect();
            times.sort_by(f64::total_cmp);
            let (median, best, worst) = (times[times.len() / 2], times[0], times[times.len() - 1]);
            let rate = match scene {
                Scene::ToDevice { .. } | Scene::ToDriver { .. } => {
                    format!("{:.1} M/s", 1e3 / median)
                }
                _ => String::new(),
            };
            println!("{name:32} {median:6.1} ns {best:8.1} to {worst:7.1} ns {rate:>10}");
        }
    }
}

/// Messages in bursts of 32, one side after the other.
fn alone(driver: &mut DriverSide, device: &mut DeviceSide, count: u32) {
    let burst = 32;
    for _ in 0..count / burst {
        driver.send(burst, 1);
        device.receive(burst);
        device.send(burst, 1);
        driver.receive(burst);
    }
}

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).expect("a processor of our own");
}

/// Two mappings of one file, as two processes have them.
fn memories() -> (Arc<Memory>, Arc<Memory>) {
    let fd = memfd_create("messages", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&fd, LEN).expect("its length");
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len: LEN,
        fd_offset: 0,
    };
    let map = |fd| Arc::new(Memory::map(vec![(fd, region)]).expect("a mapping"));
    (map(fd.try_clone().expect("a descriptor")), map(fd))
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let rounds = if args.iter().any(|arg| arg == "--quick") {
        5
    } else {
        25
    };
    let (ours, theirs) = memories();
    if let Some(at) = args.iter().position(|arg| arg == "--alone") {
        let count = args.get(at + 1).and_then(|count| count.parse().ok());
        let (mut driver, mut device) = (DriverSide::new(&ours), DeviceSide::new(&theirs));
        alone(
            &mut driver,
            &mut device,
            count.expect("a number of messages"),
        );
        return;
    }
    let allowed = sched_getaffinity(None).expect("our processors");
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|cpu| allowed.is_set(*cpu))
        .collect();
    let [first, second, ..] = cpus[..] else {
        println!("two processors are needed, one for each side");
        return;
    };

    let start = Arc::new(Barrier::new(2));
    let line = Arc::new([Line(AtomicU64::new(0)), Line(AtomicU64::new(0))]);
    let device_time = Arc::new(AtomicU64::new(0));
    pin(first);
    let mut bench = Bench {
        driver: DriverSide::new(&ours),
        start: Arc::clone(&start),
        line: Arc::clone(&line),
        rounds,
    };
    let time = Arc::clone(&device_time);
    let peer = std::thread::spawn(move || {
        pin(second);
        let mut device = DeviceSide::new(&theirs);
        for (_, scene, count) in SCENES {
            for _ in 0..rounds {
                start.wait();
                match scene {
                    Scene::Floor => bounce(&line[1], &line[0], count, false),
                    Scene::PingPong => device.pong(count),
                    Scene::ToDevice { .. } => {
                        time.store(device.receive(count).to_bits(), Ordering::Relaxed);
                    }
                    Scene::ToDriver { batch } => device.send(count, batch),
                }
                start.wait();
            }
        }
    });
    bench.run(&device_time);
    peer.join().expect("the device's side");
}
