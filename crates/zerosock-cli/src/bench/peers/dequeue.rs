//! Taking what has come, in pieces of a given size: by copying, or where it lies.
//!
//! What is measured is the time of the dequeue itself: first the receiver waits, by a low-water
//! mark, until there are as many bytes as it takes at once, and that time does not count.

use std::io::Read;
use std::str::FromStr;
use std::time::{Duration, Instant};

use zerosock::vsock::{Lease, Stream};

use crate::bench::worker::order::{Order, Outcome};
use crate::bench::worker::touch::{Check, Fault, Seen};

/// How a receiver dequeues.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct How {
    /// Into a buffer of its own, or by leases.
    copies: bool,
    /// Whether it then reads every byte; else only the first ones, that say which message it is.
    touches: bool,
}

impl FromStr for How {
    type Err = Fault;

    fn from_str(word: &str) -> Result<How, Fault> {
        let (copies, touches) = match word {
            COPY => (true, true),
            COPY_UNTOUCHED => (true, false),
            IN_PLACE => (false, true),
            IN_PLACE_UNTOUCHED => (false, false),
            _ => return Err(format!("how={word}: no way to dequeue")),
        };
        Ok(How { copies, touches })
    }
}

pub(crate) const COPY: &str = "copy";
pub(crate) const COPY_UNTOUCHED: &str = "copy-untouched";
pub(crate) const IN_PLACE: &str = "in-place";
pub(crate) const IN_PLACE_UNTOUCHED: &str = "in-place-untouched";

/// Bytes that tell a message from its neighbours.
const NAME: usize = 8;

/// Dequeues message after message until the last; each is as long as what is dequeued at once.
pub(crate) fn run(stream: &Stream, how: How, order: &Order) -> Result<Outcome, Fault> {
    let low_water = u32::try_from(order.size).map_err(|_| "too large a message")?;
    let mut receiver = Receiver {
        stream,
        how,
        buffer: vec![0; order.size],
    };
    let mut outcome = Outcome::default();
    let mut busy = Duration::ZERO;
    let mut number = 0;
    let begin = Instant::now();
    let mut start = begin;
    loop {
        // Waits, and takes nothing but a look at the first byte. The mark is down again while
        // bytes are taken in parts, as it counts what is not taken.
        stream.set_low_water(low_water);
        stream.peek(&mut [0]).map_err(text)?;
        stream.set_low_water(1);
        let there = Instant::now();
        let seen = receiver.dequeue(number, order.size)?;
        let done = Instant::now();
        number += 1;
        if start == begin && begin.elapsed() < order.warm {
            if seen == Seen::Next {
                continue;
            }
        } else if start == begin {
            start = there;
        }
        outcome.messages += 1;
        busy += done - there;
        if seen == Seen::Last {
            let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            outcome.nanoseconds = nanoseconds(done - start);
            outcome.busy = Some(nanoseconds(busy));
            return Ok(outcome);
        }
    }
}

struct Receiver<'s> {
    stream: &'s Stream,
    how: How,
    buffer: Vec<u8>,
}

impl Receiver<'_> {
    fn dequeue(&mut self, number: u64, len: usize) -> Result<Seen, Fault> {
        if self.how.copies {
            let mut stream = self.stream;
            stream.read_exact(&mut self.buffer).map_err(text)?;
            return if self.how.touches {
                let mut check = Check::new(number, len);
                check.part(&self.buffer);
                check.finish()
            } else {
                name(number, &self.buffer)
            };
        }
        // All of it is held at once, as a program holds what it dequeued.
        let mut leases: Vec<Lease<'_>> = Vec::with_capacity(len.div_ceil(4096));
        let mut check = Check::new(number, len);
        let mut held = 0;
        while held < len {
            let lease = self.stream.recv().map_err(text)?.ok_or("end of file")?;
            held += lease.len();
            leases.push(lease);
        }
        if !self.how.touches {
            let first = leases.first().ok_or("an empty message")?;
            let mut bytes = [0; NAME];
            first.copy_to(0, &mut bytes);
            return name(number, &bytes);
        }
        for lease in &leases {
            let reading = lease.read();
            if let Some(bytes) = reading.as_slice() {
                check.part(bytes);
                continue;
            }
            // Memory that is no plain slice is read by way of the nearest cache.
            let mut at = 0;
            while at < lease.len() {
                let part = &mut self.buffer[..PART.min(len)];
                let got = reading.copy_to(at, part);
                check.part(&part[..got]);
                at += got.max(1);
            }
        }
        check.finish()
    }
}

const PART: usize = 8 << 10;

/// The verdict on the first bytes of a message alone.
fn name(number: u64, bytes: &[u8]) -> Result<Seen, Fault> {
    let mut check = Check::new(number, NAME);
    check.part(&bytes[..NAME.min(bytes.len())]);
    check.finish()
}

fn text(error: impl ToString) -> Fault {
    error.to_string()
}
