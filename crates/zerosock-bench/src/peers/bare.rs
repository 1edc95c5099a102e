//! The ceiling: a producer and a consumer on two cores with nothing between them but a ring of
//! buffers and its two indices, each on a cache line of its own.
//!
//! Two threads of one process, so that nothing is checked, mapped or trusted: the producer writes
//! every byte into a buffer, the consumer reads every byte where it lies. A message of one cache
//! line lies in the ring itself; of larger ones the ring carries the buffers, and a second ring
//! brings them back in the same order. Both sides spin.

use std::hint::spin_loop;
use std::thread;

use rtrb::{Consumer, Producer, PushError, RingBuffer};

use crate::worker;
use crate::worker::Link;
use crate::worker::jobs;
use crate::worker::order::{Order, Outcome};
use crate::worker::touch::{Check, Fault, Message, Seen};

/// Smallest size of a buffer: one cache line.
const LINE: usize = 64;
/// Entries of the ring for messages of one cache line.
const LINES: usize = 256;
/// Total size of the buffers of one direction; their number is limited to 4 to 512.
const BUFFER_BYTES: usize = 4 << 20;

/// Runs both sides and returns the outcome of the side that measures the time.
pub(crate) fn run(order: &Order) -> Result<Outcome, Fault> {
    if order.size == LINE {
        let (here, there) = pair(order, lines);
        both(order, here, there)
    } else {
        let (here, there) = pair(order, || buffers(order.size));
        both(order, here, there)
    }
}

fn both<A, B>(order: &Order, here: Ends<A, B>, there: Ends<A, B>) -> Result<Outcome, Fault>
where
    Ends<A, B>: Link + Send,
{
    let other = Order {
        job: order.job.other(),
        cpu: order.other_cpu,
        ..order.clone()
    };
    let side = |order: &Order, mut link: Ends<A, B>| {
        worker::pin(order.cpu)?;
        jobs::run(&mut link, order)
    };
    thread::scope(|scope| {
        let other = scope.spawn(move || side(&other, there));
        let here = scope.spawn(move || side(order, here)).join();
        let other = other.join();
        let panicked = |_| "a side of the bare loop panicked".to_owned();
        // The measuring side is also the first to see a fault.
        let outcome = here.map_err(panicked)??;
        other.map_err(panicked)??;
        Ok(outcome)
    })
}

/// One side's ends: the ring it sends on and the one it receives on.
pub(crate) struct Ends<A, B> {
    sends: Option<A>,
    receives: Option<B>,
}

fn pair<A, B>(order: &Order, ring: impl Fn() -> (A, B)) -> (Ends<A, B>, Ends<A, B>) {
    let (there_in, there_out) = ring();
    let (back_in, back_out) = if order.job.is_one_way() {
        (None, None)
    } else {
        let (back_in, back_out) = ring();
        (Some(back_in), Some(back_out))
    };
    let active = Ends {
        sends: Some(there_in),
        receives: back_out,
    };
    let passive = Ends {
        sends: back_in,
        receives: Some(there_out),
    };
    if order.job.is_open() {
        (passive, active)
    } else {
        (active, passive)
    }
}

#[repr(align(64))]
struct Line([u8; LINE]);

fn lines() -> (Producer<Line>, Consumer<Line>) {
    RingBuffer::new(LINES)
}

impl Link for Ends<Producer<Line>, Consumer<Line>> {
    #[inline]
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        let ring = self.sends.as_mut().ok_or_else(one_way)?;
        let mut line = Line([0; LINE]);
        message.write(&mut line.0);
        push(ring, line)
    }

    #[inline]
    fn recv(&mut self, mut check: Check) -> Result<Seen, Fault> {
        let ring = self.receives.as_mut().ok_or_else(one_way)?;
        check.part(&pop(ring)?.0);
        check.finish()
    }
}

type Buffer = Box<[u8]>;

/// The producer's side: a ring of full buffers and a ring of returned empty buffers.
struct Full {
    full: Producer<Buffer>,
    empty: Consumer<Buffer>,
}

/// The consumer's side.
struct Empty {
    full: Consumer<Buffer>,
    empty: Producer<Buffer>,
}

fn buffers(size: usize) -> (Full, Empty) {
    let count = (BUFFER_BYTES / size).clamp(4, 512);
    let (full, full_out) = RingBuffer::new(count);
    let (mut empty, empty_out) = RingBuffer::new(count);
    for _ in 0..count {
        // The ring has room for all buffers.
        let _ = empty.push(vec![0; size].into_boxed_slice());
    }
    let sends = Full {
        full,
        empty: empty_out,
    };
    let receives = Empty {
        full: full_out,
        empty,
    };
    (sends, receives)
}

impl Link for Ends<Full, Empty> {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        let rings = self.sends.as_mut().ok_or_else(one_way)?;
        let mut buffer = pop(&mut rings.empty)?;
        message.write(&mut buffer);
        push(&mut rings.full, buffer)
    }

    fn recv(&mut self, mut check: Check) -> Result<Seen, Fault> {
        let rings = self.receives.as_mut().ok_or_else(one_way)?;
        let buffer = pop(&mut rings.full)?;
        check.part(&buffer);
        push(&mut rings.empty, buffer)?;
        check.finish()
    }
}

#[inline]
fn push<T>(ring: &mut Producer<T>, mut item: T) -> Result<(), Fault> {
    loop {
        match ring.push(item) {
            Ok(()) => return Ok(()),
            Err(PushError::Full(back)) => item = back,
        }
        if ring.is_abandoned() {
            // The consumer has ended: the last buffer need not return.
            return Ok(());
        }
        spin_loop();
    }
}

#[inline]
fn pop<T>(ring: &mut Consumer<T>) -> Result<T, Fault> {
    loop {
        if let Ok(item) = ring.pop() {
            return Ok(item);
        }
        if ring.is_abandoned() && ring.is_empty() {
            return Err("the other side is gone".to_owned());
        }
        spin_loop();
    }
}

fn one_way() -> Fault {
    "a one-way link was used both ways".to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::worker::order::{Job, Wait};

    #[test]
    fn both_kinds_of_ring_carry_both_kinds_of_run() {
        for size in [LINE, 4096] {
            for job in [Job::Ping, Job::Receive] {
                let order = Order {
                    peer: "bare".into(),
                    job,
                    wait: Wait::Spin,
                    size,
                    warm: Duration::ZERO,
                    time: Duration::from_millis(5),
                    cpu: None,
                    other_cpu: None,
                    place: String::new(),
                    to: None,
                    how: None,
                };
                let outcome = run(&order).unwrap();
                assert!(outcome.messages > 0, "{job:?} of {size} bytes");
            }
        }
    }
}
