//! The four loops that every contestant runs.
//!
//! Only one side measures: the one that receives, or that pings. It reads the clock once per batch,
//! so that the reading does not distort the rate of small messages.

use std::time::{Duration, Instant};

use super::link::Link;
use super::order::{Job, Order, Outcome, Wait};
use super::touch::{Check, Fault, Message, Seen};

/// Messages between two readings of the clock.
const BATCH_BYTES: usize = 64 << 10;
const BATCH_MESSAGES: u64 = 256;
/// Round trips between two readings of the clock when both sides spin; sleeping ones are timed one
/// by one.
const BATCH_ROUND_TRIPS: u64 = 64;

/// Carries out one side's job.
pub(crate) fn run(link: &mut impl Link, order: &Order) -> Result<Outcome, Fault> {
    match order.job {
        Job::Send => send(link, order),
        Job::Receive => receive(link, order),
        Job::Ping => ping(link, order),
        Job::Pong => pong(link, order),
    }
}

fn batch(size: usize) -> u64 {
    (BATCH_BYTES as u64 / size as u64).clamp(1, BATCH_MESSAGES)
}

fn send(link: &mut impl Link, order: &Order) -> Result<Outcome, Fault> {
    let len = order.size;
    let batch = batch(len);
    let begin = Instant::now();
    let mut number = 0;
    while begin.elapsed() < order.warm + order.time {
        link.send_run(number, batch, len)?;
        number += batch;
    }
    link.send(Message {
        number,
        len,
        last: true,
    })?;
    link.flush()?;
    Ok(Outcome {
        messages: number,
        nanoseconds: nanoseconds(begin.elapsed()),
        ..Outcome::default()
    })
}

fn receive(link: &mut impl Link, order: &Order) -> Result<Outcome, Fault> {
    let len = order.size;
    let batch = batch(len);
    // The first message ends the wait for the other side. `number` is that of the next one.
    let mut seen = link.recv(Check::new(0, len))?;
    let mut number = 1;
    let first = Instant::now();
    let mut warm = order.warm.is_zero().then_some((1, first));
    while seen == Seen::Next {
        let got;
        (got, seen) = link.recv_run(number, batch, len)?;
        number += got;
        if warm.is_none() && first.elapsed() >= order.warm {
            warm = Some((number, Instant::now()));
        }
    }
    // On a very slow machine everything may have arrived before the time was over.
    let (before, start) = warm
        .filter(|(before, _)| *before < number)
        .unwrap_or((1, first));
    // The first message starts the clock and is not counted; the last one, which stops it, is.
    Ok(Outcome {
        messages: number - before,
        nanoseconds: nanoseconds(start.elapsed()),
        ..Outcome::default()
    })
}

fn ping(link: &mut impl Link, order: &Order) -> Result<Outcome, Fault> {
    let mut number = 0;
    let mut round_trips = |link: &mut _, count, last| -> Result<(), Fault> {
        for _ in 0..count {
            round_trip(link, number, order.size, last)?;
            number += 1;
        }
        Ok(())
    };
    let each = match order.wait {
        Wait::Spin => BATCH_ROUND_TRIPS,
        Wait::Sleep => 1,
    };
    let begin = Instant::now();
    while begin.elapsed() < order.warm {
        round_trips(link, each, false)?;
    }
    let mut times = Vec::new();
    let mut messages = 0;
    let start = Instant::now();
    let mut now = start;
    while now - start < order.time {
        round_trips(link, each, false)?;
        messages += each;
        let after = Instant::now();
        if each == 1 {
            times.push(nanoseconds(after - now));
        }
        now = after;
    }
    round_trips(link, 1, true)?;
    times.sort_unstable();
    Ok(Outcome {
        messages,
        nanoseconds: nanoseconds(now - start),
        p50: percentile(&times, 50),
        p99: percentile(&times, 99),
        ..Outcome::default()
    })
}

#[inline]
fn round_trip(link: &mut impl Link, number: u64, len: usize, last: bool) -> Result<(), Fault> {
    link.send(Message { number, len, last })?;
    link.flush()?;
    link.recv(Check::new(number, len)).map(drop)
}

fn pong(link: &mut impl Link, order: &Order) -> Result<Outcome, Fault> {
    let len = order.size;
    let mut number = 0;
    loop {
        let seen = link.recv(Check::new(number, len))?;
        link.send(Message {
            number,
            len,
            last: false,
        })?;
        link.flush()?;
        number += 1;
        if seen == Seen::Last {
            return Ok(Outcome {
                messages: number,
                ..Outcome::default()
            });
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// `values` must be sorted.
pub(crate) fn percentile(sorted: &[u64], percent: usize) -> Option<u64> {
    let at = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(at - 1).copied()
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::mpsc;

    use super::*;

    /// A link over channels that can lose, duplicate or damage a message.
    struct Channel {
        out: mpsc::Sender<Vec<u8>>,
        input: mpsc::Receiver<Vec<u8>>,
        /// Effect on the n-th message.
        spoil: Option<(u64, Spoil)>,
        pending: VecDeque<Vec<u8>>,
    }

    #[derive(Clone, Copy, Debug)]
    enum Spoil {
        Lose,
        Double,
        Damage,
    }

    impl Link for Channel {
        fn send(&mut self, message: Message) -> Result<(), Fault> {
            let mut bytes = vec![0; message.len];
            message.write(&mut bytes);
            match self.spoil {
                Some((at, spoil)) if at == message.number => match spoil {
                    Spoil::Lose => {}
                    Spoil::Double => self.pending.extend([bytes.clone(), bytes]),
                    Spoil::Damage => {
                        bytes[message.len / 2] ^= 4;
                        self.pending.push_back(bytes);
                    }
                },
                _ => self.pending.push_back(bytes),
            }
            for bytes in self.pending.drain(..) {
                self.out.send(bytes).map_err(|_| "gone".to_owned())?;
            }
            Ok(())
        }

        fn recv(&mut self, mut check: Check) -> Result<Seen, Fault> {
            let bytes = self.input.recv().map_err(|_| "gone".to_owned())?;
            check.part(&bytes);
            check.finish()
        }
    }

    fn pair(job: Job, spoil: Option<(u64, Spoil)>) -> [Result<Outcome, Fault>; 2] {
        let (out, input) = mpsc::channel();
        let (back, answers) = mpsc::channel();
        let mut left = Channel {
            out,
            input: answers,
            spoil,
            pending: VecDeque::new(),
        };
        let mut right = Channel {
            out: back,
            input,
            spoil: None,
            pending: VecDeque::new(),
        };
        let order = |job| Order {
            peer: String::new(),
            job,
            wait: Wait::Sleep,
            size: 256,
            warm: Duration::ZERO,
            time: Duration::from_millis(2),
            cpu: None,
            other_cpu: None,
            place: String::new(),
            to: None,
            how: None,
        };
        let other = std::thread::spawn(move || run(&mut right, &order(job.other())));
        let here = run(&mut left, &order(job));
        drop(left);
        [here, other.join().unwrap()]
    }

    #[test]
    fn a_run_counts_what_arrived() {
        let [sent, received] = pair(Job::Send, None).map(Result::unwrap);
        assert!(sent.messages > 0);
        assert_eq!(received.messages, sent.messages);
        assert!(received.nanoseconds > 0);
    }

    #[test]
    fn a_ping_is_answered_and_timed() {
        let [ping, pong] = pair(Job::Ping, None).map(Result::unwrap);
        assert!(ping.messages > 0);
        assert_eq!(
            pong.messages,
            ping.messages + 1,
            "the last one is not timed"
        );
        assert!(ping.p50.unwrap() <= ping.p99.unwrap());
    }

    #[test]
    fn a_lost_doubled_or_damaged_message_ends_the_run() {
        for spoil in [Spoil::Lose, Spoil::Double, Spoil::Damage] {
            let [_, received] = pair(Job::Send, Some((2, spoil)));
            let fault = received.expect_err("the receiver noticed nothing");
            assert!(
                fault.contains("lost, doubled or damaged"),
                "{spoil:?}: {fault}"
            );
        }
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        assert_eq!(percentile(&[], 50), None);
        assert_eq!(percentile(&[7], 99), Some(7));
        let hundred: Vec<u64> = (1..=100).collect();
        assert_eq!(percentile(&hundred, 50), Some(50));
        assert_eq!(percentile(&hundred, 99), Some(99));
    }
}
