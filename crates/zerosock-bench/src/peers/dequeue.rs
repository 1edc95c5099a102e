//! Taking what has come, in pieces of a given size: by copying, or where it lies.
//!
//! What is measured is the time of the dequeue itself: first the receiver waits, by a low-water
//! mark, until there are as many bytes as it takes at once, and that time does not count.

use std::io::Read;
use std::str::FromStr;
use std::time::{Duration, Instant};

use zerosock::vsock::{Lease, Stream};

use crate::worker::order::{Order, Outcome};
use crate::worker::touch::{Check, Fault, Seen};

/// How a receiver dequeues.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct How {
    way: Way,
    /// Whether it then reads every byte; else only the first ones, that say which message it is.
    touches: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    /// Into a buffer of its own.
    Copies,
    /// By leases, all of a piece at once.
    Leases,
    /// One packet after the other is shown where it lies.
    Shows,
}

impl FromStr for How {
    type Err = Fault;

    fn from_str(word: &str) -> Result<How, Fault> {
        let (way, touches) = match word {
            COPY => (Way::Copies, true),
            COPY_UNTOUCHED => (Way::Copies, false),
            IN_PLACE => (Way::Leases, true),
            IN_PLACE_UNTOUCHED => (Way::Leases, false),
            SHOWN => (Way::Shows, true),
            _ => return Err(format!("how={word}: no way to dequeue")),
        };
        Ok(How { way, touches })
    }
}

pub(crate) const COPY: &str = "copy";
pub(crate) const COPY_UNTOUCHED: &str = "copy-untouched";
pub(crate) const IN_PLACE: &str = "in-place";
pub(crate) const IN_PLACE_UNTOUCHED: &str = "in-place-untouched";
pub(crate) const SHOWN: &str = "shown";

/// Bytes that tell a message from its neighbours.
const NAME: usize = 8;

/// A receiver, of ours or the kernel's.
pub(crate) trait Dequeue {
    /// Waits until there are `len` bytes, and takes none.
    fn wait(&mut self, len: usize) -> Result<(), Fault>;

    /// Takes them, and looks at them; they are there.
    fn dequeue(&mut self, number: u64, len: usize) -> Result<Seen, Fault>;
}

/// Dequeues from a stream of ours.
pub(crate) fn run(stream: &Stream, how: How, order: &Order) -> Result<Outcome, Fault> {
    let mut receiver = Receiver {
        stream,
        how,
        buffer: vec![0; order.size],
        rest: None,
        left: Vec::new(),
    };
    run_with(&mut receiver, order)
}

/// Dequeues message after message until the last; each is as long as what is dequeued at once.
pub(crate) fn run_with(receiver: &mut impl Dequeue, order: &Order) -> Result<Outcome, Fault> {
    let mut outcome = Outcome::default();
    let mut busy = Duration::ZERO;
    let mut number = 0;
    // The other side may come late: the time begins with what it sends first.
    receiver.wait(order.size)?;
    let begin = Instant::now();
    let mut start = None;
    loop {
        let there = Instant::now();
        let seen = receiver.dequeue(number, order.size)?;
        let done = Instant::now();
        number += 1;
        if start.is_some() || there - begin >= order.warm || seen == Seen::Last {
            let start = *start.get_or_insert(there);
            outcome.messages += 1;
            busy += done - there;
            if seen == Seen::Last {
                outcome.nanoseconds = nanoseconds(done - start);
                outcome.busy = Some(nanoseconds(busy));
                return Ok(outcome);
            }
        }
        receiver.wait(order.size)?;
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

struct Receiver<'s> {
    stream: &'s Stream,
    how: How,
    buffer: Vec<u8>,
    /// What lies behind the last piece in the same lease: one that came copied, because of the
    /// bounds on what is held, may have bytes of several packets.
    rest: Option<Part<'s>>,
    /// The same of what was shown.
    left: Vec<u8>,
}

/// The bytes of a lease from `at` on.
struct Part<'s> {
    lease: Lease<'s>,
    at: usize,
}

impl Part<'_> {
    fn len(&self) -> usize {
        self.lease.len() - self.at
    }
}

impl Dequeue for Receiver<'_> {
    /// Takes nothing but a look at the first byte. The mark is down again while bytes are taken in
    /// parts, as it counts what is not taken.
    fn wait(&mut self, len: usize) -> Result<(), Fault> {
        let rest = self.rest.as_ref().map_or(self.left.len(), Part::len);
        if rest < len {
            let low_water = u32::try_from(len - rest).map_err(|_| "too large a message")?;
            self.stream.set_low_water(low_water).map_err(text)?;
            self.stream.peek(&mut [0]).map_err(text)?;
            self.stream.set_low_water(1).map_err(text)?;
        }
        Ok(())
    }

    fn dequeue(&mut self, number: u64, len: usize) -> Result<Seen, Fault> {
        if self.how.way == Way::Shows {
            return self.show(number, len);
        }
        if self.how.way == Way::Copies {
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
        let mut parts = Vec::with_capacity(len.div_ceil(4096));
        let mut held = 0;
        while held < len {
            let part = match self.rest.take() {
                Some(rest) => rest,
                None => Part {
                    lease: self.stream.recv().map_err(text)?.ok_or("end of file")?,
                    at: 0,
                },
            };
            held += part.len();
            parts.push(part);
        }
        let verdict = self.look(&parts, number, len)?;
        if let Some(mut last) = parts.pop().filter(|_| held > len) {
            last.at = last.lease.len() - (held - len);
            self.rest = Some(last);
        }
        Ok(verdict)
    }
}

impl Receiver<'_> {
    fn show(&mut self, number: u64, len: usize) -> Result<Seen, Fault> {
        let mut check = Check::new(number, len);
        let mut left = std::mem::take(&mut self.left);
        let now = left.len().min(len);
        check.part(&left[..now]);
        left.drain(..now);
        while check.missing() > 0 {
            let buffer = &mut self.buffer;
            let shown = self.stream.recv_each(1, |packet| {
                let bytes = packet.as_slice().unwrap_or_else(|| {
                    // As long as a piece at least, and a packet is no longer.
                    buffer.resize(buffer.len().max(packet.len()), 0);
                    let len = packet.copy_to(0, buffer);
                    &buffer[..len]
                });
                let (now, later) = bytes.split_at(bytes.len().min(check.missing()));
                check.part(now);
                left.extend_from_slice(later);
            });
            if shown.map_err(text)? == 0 {
                return Err("end of file".to_owned());
            }
        }
        self.left = left;
        check.finish()
    }

    fn look(&mut self, parts: &[Part<'_>], number: u64, len: usize) -> Result<Seen, Fault> {
        if !self.how.touches {
            let first = parts.first().ok_or("an empty message")?;
            let mut bytes = [0; NAME];
            first.lease.copy_to(first.at, &mut bytes);
            return name(number, &bytes);
        }
        let mut check = Check::new(number, len);
        for part in parts {
            let reading = part.lease.read();
            let end = part.lease.len().min(part.at + check.missing());
            if let Some(bytes) = reading.as_slice() {
                check.part(&bytes[part.at..end]);
                continue;
            }
            // Memory that is no plain slice is read by way of the nearest cache.
            let mut at = part.at;
            while at < end {
                let bytes = &mut self.buffer[..PART.min(end - at)];
                let got = reading.copy_to(at, bytes);
                check.part(&bytes[..got]);
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
