//! Dequeues received bytes in pieces of a given size, by copying or in place.
//!
//! Only the dequeue is timed: the receiver first waits, by a low-water mark, until a whole piece is
//! available, and that time does not count.

use std::io::Read;
use std::str::FromStr;
use std::time::{Duration, Instant};

use zerosock::vsock::{Lease, Stream};

use crate::report::line;
use crate::worker::order::{Order, Outcome};
use crate::worker::touch::{Check, Fault, Seen};

/// How a receiver dequeues.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct DequeueMode {
    way: Way,
    /// Whether the receiver then reads every byte; else only the first ones, which identify the
    /// message.
    touches: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    /// Copies into a buffer.
    Copies,
    /// Takes leases of a whole piece at once (`recv`).
    Leases,
    /// Reads each packet in place in a callback (`recv_each`).
    Callback,
}

impl FromStr for DequeueMode {
    type Err = Fault;

    fn from_str(word: &str) -> Result<DequeueMode, Fault> {
        let (way, touches) = match word {
            COPY => (Way::Copies, true),
            COPY_UNTOUCHED => (Way::Copies, false),
            IN_PLACE => (Way::Leases, true),
            IN_PLACE_UNTOUCHED => (Way::Leases, false),
            SHOWN => (Way::Callback, true),
            _ => return Err(format!("how={word}: unknown way to dequeue")),
        };
        Ok(DequeueMode { way, touches })
    }
}

pub(crate) const COPY: &str = "copy";
pub(crate) const COPY_UNTOUCHED: &str = "copy-untouched";
pub(crate) const IN_PLACE: &str = "in-place";
pub(crate) const IN_PLACE_UNTOUCHED: &str = "in-place-untouched";
pub(crate) const SHOWN: &str = "shown";

/// Bytes that distinguish a message from the one before and after it.
const NAME: usize = 8;

/// A receiver, over zerosock or the kernel.
pub(crate) trait Dequeue {
    /// Waits until `len` bytes are available, and dequeues none.
    fn wait(&mut self, len: usize) -> Result<(), Fault>;

    /// Dequeues `len` bytes, which are available, and checks them.
    fn dequeue(&mut self, number: u64, len: usize) -> Result<Dequeued, Fault>;
}

/// Result of a dequeue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dequeued {
    seen: Seen,
    /// Time in which the receiver read bytes that it had taken.
    reading: Duration,
}

impl Dequeued {
    /// Reads bytes that were taken, and measures it.
    pub(crate) fn after(read: impl FnOnce() -> Result<Seen, Fault>) -> Result<Dequeued, Fault> {
        let start = Instant::now();
        let seen = read()?;
        let reading = start.elapsed();
        Ok(Dequeued { seen, reading })
    }

    /// Of a receiver that reads nothing, or reads during its call.
    fn unread(seen: Seen) -> Dequeued {
        Dequeued {
            seen,
            reading: Duration::ZERO,
        }
    }
}

/// Dequeues from a zerosock stream.
pub(crate) fn run(stream: &Stream, how: DequeueMode, order: &Order) -> Result<Outcome, Fault> {
    let mut receiver = Receiver {
        stream,
        how,
        buffer: vec![0; order.size],
        leftover_lease: None,
        leftover_bytes: Vec::new(),
    };
    run_with(&mut receiver, order)
}

/// Dequeues message after message until the last; each is as long as one piece.
pub(crate) fn run_with(receiver: &mut impl Dequeue, order: &Order) -> Result<Outcome, Fault> {
    let mut outcome = Outcome::default();
    let (mut busy, mut reading) = (Duration::ZERO, Duration::ZERO);
    let mut number = 0;
    // The other side may start late: measure from its first message.
    receiver.wait(order.size)?;
    let begin = Instant::now();
    let mut start = None;
    loop {
        let available = Instant::now();
        let dequeued = receiver.dequeue(number, order.size)?;
        let seen = dequeued.seen;
        let done = Instant::now();
        number += 1;
        if start.is_some() || available - begin >= order.warm || seen == Seen::Last {
            let start = *start.get_or_insert(available);
            outcome.messages += 1;
            busy += done - available;
            reading += dequeued.reading;
            if seen == Seen::Last {
                outcome.nanoseconds = nanoseconds(done - start);
                outcome.busy = Some(nanoseconds(busy));
                outcome.calls = Some(nanoseconds(busy.saturating_sub(reading)));
                outcome.total = Some(number);
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
    how: DequeueMode,
    buffer: Vec<u8>,
    /// The part of the last lease that belongs to the next piece: a lease of copied bytes may cover
    /// several packets.
    leftover_lease: Option<LeasePart<'s>>,
    /// The bytes of the last packet that belong to the next piece, for [`Way::Callback`].
    leftover_bytes: Vec<u8>,
}

/// The bytes of a lease from `at` on.
struct LeasePart<'s> {
    lease: Lease<'s>,
    at: usize,
}

impl LeasePart<'_> {
    fn len(&self) -> usize {
        self.lease.len() - self.at
    }
}

impl Dequeue for Receiver<'_> {
    /// Reads only the first byte of each packet. Lowers the mark meanwhile: it counts bytes that
    /// are not yet dequeued.
    fn wait(&mut self, len: usize) -> Result<(), Fault> {
        let leftover = self.leftover_lease.as_ref();
        let leftover = leftover.map_or(self.leftover_bytes.len(), LeasePart::len);
        if leftover < len {
            let low_water = u32::try_from(len - leftover).map_err(|_| "too large a message")?;
            self.stream.set_low_water(low_water).map_err(line)?;
            self.stream.peek(&mut [0]).map_err(line)?;
            self.stream.set_low_water(1).map_err(line)?;
        }
        Ok(())
    }

    fn dequeue(&mut self, number: u64, len: usize) -> Result<Dequeued, Fault> {
        if self.how.way == Way::Callback {
            return self.read_in_callback(number, len).map(Dequeued::unread);
        }
        if self.how.way == Way::Copies {
            let mut stream = self.stream;
            stream.read_exact(&mut self.buffer).map_err(line)?;
            return if self.how.touches {
                Dequeued::after(|| {
                    let mut check = Check::new(number, len);
                    check.part(&self.buffer);
                    check.finish()
                })
            } else {
                check_name(number, &self.buffer).map(Dequeued::unread)
            };
        }
        // Holds all leases of the piece at once, as a program would.
        let mut parts = Vec::with_capacity(len.div_ceil(4096));
        let mut held = 0;
        while held < len {
            let part = match self.leftover_lease.take() {
                Some(leftover) => leftover,
                None => LeasePart {
                    lease: self.stream.recv().map_err(line)?.ok_or("end of file")?,
                    at: 0,
                },
            };
            held += part.len();
            parts.push(part);
        }
        let dequeued = if self.how.touches {
            Dequeued::after(|| check_leases(&parts, number, len))?
        } else {
            let first = parts.first().ok_or("an empty message")?;
            let mut bytes = [0; NAME];
            first.lease.copy_to(first.at, &mut bytes);
            Dequeued::unread(check_name(number, &bytes)?)
        };
        if let Some(mut last) = parts.pop().filter(|_| held > len) {
            last.at = last.lease.len() - (held - len);
            self.leftover_lease = Some(last);
        }
        Ok(dequeued)
    }
}

impl Receiver<'_> {
    fn read_in_callback(&mut self, number: u64, len: usize) -> Result<Seen, Fault> {
        let mut check = Check::new(number, len);
        let mut left = std::mem::take(&mut self.leftover_bytes);
        let now = left.len().min(len);
        check.part(&left[..now]);
        left.drain(..now);
        while check.missing() > 0 {
            let shown = self.stream.recv_each(1, |packet| {
                packet.windows(|bytes| {
                    let (now, later) = bytes.split_at(bytes.len().min(check.missing()));
                    check.part(now);
                    left.extend_from_slice(later);
                });
            });
            if shown.map_err(line)? == 0 {
                return Err("end of file".to_owned());
            }
        }
        self.leftover_bytes = left;
        check.finish()
    }
}

fn check_leases(parts: &[LeasePart<'_>], number: u64, len: usize) -> Result<Seen, Fault> {
    let mut check = Check::new(number, len);
    for part in parts {
        let mut skip = part.at;
        part.lease.read().windows(|bytes| {
            let (passed, bytes) = bytes.split_at(skip.min(bytes.len()));
            skip -= passed.len();
            check.part(&bytes[..bytes.len().min(check.missing())]);
        });
    }
    check.finish()
}

/// Checks only the first [`NAME`] bytes of a message.
fn check_name(number: u64, bytes: &[u8]) -> Result<Seen, Fault> {
    let mut check = Check::new(number, NAME);
    check.part(&bytes[..NAME.min(bytes.len())]);
    check.finish()
}
