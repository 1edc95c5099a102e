//! What a packet of 64 bytes costs the driver: measured, not a test.
//!
//! `cargo test --release -p zerosock --lib driver::speed -- --ignored --nocapture --test-threads 1`
//! measures time, with the device's end on a thread of its own, both spinning and pinned. For
//! counts of instructions, which no other load disturbs, run `alone` under
//! `valgrind --tool=callgrind`: there both ends are on one thread, and the calls of the trait are
//! what to look at.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::thread::{CpuSet, sched_setaffinity};
use zerosock_proto::wire::vsock::{HEADER_LEN, Op, Repr};

use super::bare::{Peer, connect, pair};
use super::{Driver, StreamId};
use crate::vsock::engine::{Engine, Payload, RecvFault, SendFault};

const MESSAGE: usize = 64;
const COUNT: u64 = 300_000;
const WINDOW: u32 = 1 << 20;

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    // Fewer processors than two: then it is only slower.
    let _ = sched_setaffinity(None, &set);
}

fn setting() -> (Driver, Peer, StreamId) {
    let (mut driver, mut peer) = pair(|config| {
        config.queue_size = 256;
        config.buf_alloc = WINDOW;
    });
    let id = connect(&mut driver, &mut peer);
    (driver, peer, id)
}

impl Peer {
    /// Takes packets of `MESSAGE` bytes until told to stop, as lightly as can be.
    fn sink(&mut self, stop: &AtomicBool) {
        let (mut taken, mut told) = (0u32, 0u32);
        loop {
            let mut some = 0;
            while some < 32
                && let Some(chain) = self.tx.pop().unwrap()
            {
                let memory = self.tx.memory();
                let header = memory
                    .read_array::<HEADER_LEN>(chain.readable(), 0)
                    .unwrap();
                let len = u32::from_le_bytes(header[24..28].try_into().unwrap());
                if len as usize == MESSAGE {
                    let bytes = memory.read_array::<MESSAGE>(chain.readable(), HEADER_LEN);
                    black_box(bytes);
                }
                taken = taken.wrapping_add(len);
                self.their_fwd_cnt = u32::from_le_bytes(header[40..44].try_into().unwrap());
                self.tx.complete(chain, 0);
                some += 1;
            }
            if some > 0 {
                self.tx.publish_quietly();
            } else if stop.load(Ordering::Relaxed) {
                return;
            }
            if taken.wrapping_sub(told) > WINDOW / 32 {
                told = taken;
                self.header.fwd_cnt = taken;
                self.update();
            }
        }
    }

    /// Sends `count` packets of `MESSAGE` bytes, as lightly as can be.
    fn source(&mut self, count: u64) {
        let mut bytes = [0; HEADER_LEN];
        Repr {
            op: Op::Rw.into(),
            len: MESSAGE as u32,
            ..self.header
        }
        .emit(&mut bytes);
        let payload = [7; MESSAGE];
        let mut left = count;
        while left > 0 {
            let mut batch = 0;
            while batch < 32 && left > 0 && self.room(WINDOW) as usize >= MESSAGE {
                let Some(chain) = self.rx.pop().unwrap() else {
                    break;
                };
                let memory = self.rx.memory();
                memory.write(chain.writable(), 0, &bytes);
                memory.write(chain.writable(), HEADER_LEN, &payload);
                self.rx.complete(chain, (HEADER_LEN + MESSAGE) as u32);
                self.sent = self.sent.wrapping_add(MESSAGE as u32);
                batch += 1;
                left -= 1;
            }
            if batch > 0 {
                self.rx.publish_quietly();
            }
            if self.room(WINDOW) < WINDOW / 2 {
                while self.take().is_some() {}
            }
        }
    }
}

/// Sends `batch` messages, with one flush; how many went.
#[inline(never)]
fn send_batch(engine: &mut dyn Engine, id: StreamId, message: &[u8], batch: usize) -> usize {
    let mut sent = 0;
    while sent < batch {
        match engine.write(id, black_box(message)) {
            Ok(_) => sent += 1,
            Err(SendFault::WouldBlock) => break,
            Err(fault) => panic!("{fault:?}"),
        }
    }
    engine.flush();
    sent
}

/// Receives what there is, by showing it; how many packets.
#[inline(never)]
fn each_batch(engine: &mut dyn Engine, id: StreamId) -> usize {
    let look = &mut |payload: Payload<'_>| {
        if let Payload::InPlace(slices) = payload {
            for slice in slices {
                black_box(slice.read_array::<MESSAGE>(0));
            }
        }
        true
    };
    match engine.each(id, 64, look) {
        Ok(seen) => seen,
        Err(RecvFault::WouldBlock) => 0,
        Err(fault) => panic!("{fault:?}"),
    }
}

/// Receives what there is, a message for each read.
#[inline(never)]
fn read_batch(engine: &mut dyn Engine, id: StreamId) -> usize {
    let mut seen = 0;
    let mut out = [0; MESSAGE];
    while seen < 64 {
        match engine.read(id, &mut out, false) {
            Ok(len) => seen += len / MESSAGE,
            Err(RecvFault::WouldBlock) => break,
            Err(fault) => panic!("{fault:?}"),
        }
        black_box(&out);
    }
    seen
}

fn to_peer(batch: usize) -> f64 {
    let (mut driver, mut peer, id) = setting();
    let stop = Arc::new(AtomicBool::new(false));
    let sink = std::thread::spawn({
        let stop = stop.clone();
        move || {
            pin(1);
            peer.sink(&stop);
            peer
        }
    });
    pin(0);
    let message = [5u8; MESSAGE];
    let engine: &mut dyn Engine = &mut driver;
    let from = Instant::now();
    let mut left = COUNT as usize;
    while left > 0 {
        left -= send_batch(engine, id, &message, batch.min(left));
        if engine.pending() {
            engine.turn().unwrap();
        }
    }
    let time = from.elapsed().as_nanos() as f64 / COUNT as f64;
    stop.store(true, Ordering::Relaxed);
    let _peer = sink.join().unwrap();
    time
}

fn from_peer(receive: fn(&mut dyn Engine, StreamId) -> usize) -> f64 {
    let (mut driver, mut peer, id) = setting();
    let source = std::thread::spawn(move || {
        pin(1);
        peer.source(COUNT);
        peer
    });
    pin(0);
    let engine: &mut dyn Engine = &mut driver;
    let from = Instant::now();
    let mut left = COUNT as usize;
    while left > 0 {
        if engine.pending() {
            engine.turn().unwrap();
        }
        let seen = receive(engine, id);
        left -= seen;
        if seen > 0 {
            engine.flush();
        }
    }
    let time = from.elapsed().as_nanos() as f64 / COUNT as f64;
    let _peer = source.join().unwrap();
    time
}

/// A message to the peer and one back; half of it, less nothing.
fn ping_pong() -> f64 {
    const ROUNDS: u32 = 50_000;
    let (mut driver, mut peer, id) = setting();
    let pong = std::thread::spawn(move || {
        pin(1);
        let mut bytes = [0; HEADER_LEN];
        let mut header = Repr {
            op: Op::Rw.into(),
            len: MESSAGE as u32,
            ..peer.header
        };
        for round in 0..ROUNDS {
            let chain = loop {
                if let Some(chain) = peer.tx.pop().unwrap() {
                    break chain;
                }
            };
            let memory = peer.tx.memory();
            black_box(memory.read_array::<HEADER_LEN>(chain.readable(), 0));
            black_box(memory.read_array::<MESSAGE>(chain.readable(), HEADER_LEN));
            peer.tx.complete(chain, 0);
            header.fwd_cnt = (round + 1) * MESSAGE as u32;
            header.emit(&mut bytes);
            let chain = peer.rx.pop().unwrap().expect("a buffer");
            let memory = peer.rx.memory();
            memory.write(chain.writable(), 0, &bytes);
            memory.write(chain.writable(), HEADER_LEN, &[1; MESSAGE]);
            peer.rx.complete(chain, (HEADER_LEN + MESSAGE) as u32);
            peer.rx.publish_quietly();
            peer.tx.publish_quietly();
        }
        peer
    });
    pin(0);
    let engine: &mut dyn Engine = &mut driver;
    let message = [5u8; MESSAGE];
    let mut out = [0; MESSAGE];
    let from = Instant::now();
    for _ in 0..ROUNDS {
        engine.write(id, &message).unwrap();
        engine.flush();
        loop {
            while !engine.pending() {}
            engine.turn().unwrap();
            match engine.read(id, &mut out, false) {
                Ok(_) => break,
                Err(RecvFault::WouldBlock) => {}
                Err(fault) => panic!("{fault:?}"),
            }
        }
    }
    let time = from.elapsed().as_nanos() as f64 / f64::from(ROUNDS) / 2.0;
    let _peer = pong.join().unwrap();
    time
}

fn median(what: &str, run: impl Fn() -> f64) {
    let mut times: Vec<f64> = (0..5).map(|_| run()).collect();
    times.sort_by(f64::total_cmp);
    println!(
        "{what:28} median {:6.1} ns, best {:6.1}, worst {:6.1}",
        times[2], times[0], times[4]
    );
}

#[test]
#[ignore = "measures"]
fn times() {
    median("write, flush for 32", || to_peer(32));
    median("write, flush for each", || to_peer(1));
    median("each", || from_peer(each_batch));
    median("read", || from_peer(read_batch));
    median("one way, half of both", ping_pong);
}

/// Messages in bursts of 32, one end after the other.
#[test]
#[ignore = "measures"]
fn alone() {
    let bursts: u32 = std::env::var("BURSTS").map_or(1000, |n| n.parse().unwrap());
    let (mut driver, mut peer, id) = setting();
    let stop = AtomicBool::new(true);
    let message = [5u8; MESSAGE];
    let engine: &mut dyn Engine = &mut driver;
    for burst in 0..bursts {
        assert_eq!(send_batch(engine, id, &message, 32), 32);
        peer.header.fwd_cnt = burst * 32 * MESSAGE as u32;
        peer.sink(&stop);
        peer.source(32);
        engine.turn().unwrap();
        let seen = if burst % 2 == 0 {
            each_batch(engine, id)
        } else {
            read_batch(engine, id)
        };
        assert_eq!(seen, 32);
        engine.flush();
        if burst % 64 == 0 {
            peer.header.fwd_cnt = (burst + 1) * 32 * MESSAGE as u32;
            peer.update();
        }
    }
}
