//! Sends from their acceptance until their buffer is free: what is asked of the kernel, in which
//! order, and again after which answers.
//!
//! A send is *queued*, *started* (the kernel has a request of it), *over* (all of it was taken, or
//! it failed), and then free when the kernel owes nothing more for it. On a stream one chain of
//! linked requests is under way at a time: unlinked ones could overtake each other, and what is
//! short must be completed before anything follows. A stream on which a send failed takes no more.
//!
//! When the kernel has no memory for a zero-copy send (ENOBUFS, ENOMEM: the limit of locked memory,
//! or of the socket's notifications) the send waits for a notification, which frees some. When none
//! is to come, or after a few such rounds, it is copied. Nothing stalls.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use zerosock_sys::zc::{Event, Key, NotStarted, Order, Stable, Way};

use super::calibration::{self, Class};
use super::carrier::{Backend, Carrier};
use super::message::{Copying, Failed, Outgoing, Refusal, Returned, Sent};
use super::policy::Policy;
use super::ranges::Ranges;
use super::slots::{Attached, Slots, Ticket};
use super::stats::Stats;

/// Requests of a stream under way together.
const CHAIN: usize = 32;
/// Rounds of waiting for memory until a send is copied.
const ROUNDS: u8 = 3;

pub(super) struct Flights<B: Stable> {
    pub(super) carrier: Carrier<B>,
    pub(super) slots: Slots,
    pub(super) ranges: Ranges,
    pub(super) policy: Policy,
    pub(super) stats: Stats,
    stream: bool,
    /// Whether ranges are kept, and buffers given back.
    pub(super) tells_ranges: bool,
    pub(super) gives_back: bool,
    /// By place.
    flights: Box<[Flight]>,
    queue: VecDeque<Key>,
    /// What is to be asked again, before the queue.
    again: VecDeque<Key>,
    /// Requests whose result is to come.
    open: usize,
    /// The last answer was WouldBlock.
    full: bool,
    /// The kernel had no memory; a notification is waited for.
    starved: bool,
    /// Counts what the kernel has said.
    pub(super) heard: u64,
    /// What ended the stream.
    broken: Option<i32>,
    /// What is cancelled is not asked again.
    closing: bool,
    /// Free, and to be taken by the user.
    pub(super) free: VecDeque<Returned<B>>,
    next: u32,
    turn: Turn,
}

struct Flight {
    number: Option<u32>,
    ticket: Option<Ticket>,
    attached: Option<Attached>,
    total: usize,
    sent: usize,
    way: Way,
    /// Kept by the policy's class while that is measured.
    class: Option<Class>,
    failure: Option<i32>,
    rounds: u8,
    flush: bool,
    more: bool,
    started: bool,
    over: bool,
    /// Some request of it was made without a copy, and some was copied.
    in_place: bool,
    copied: bool,
}

/// The requests between two submissions, as far as they are alike.
#[derive(Default)]
struct Turn {
    sends: u32,
    /// None when nothing has been started, or things that differ.
    alike: Option<(Class, Way)>,
}

impl<B: Stable> Flights<B> {
    pub(super) fn new(
        carrier: Carrier<B>,
        stream: bool,
        capacity: u32,
        slots: Slots,
        policy: Policy,
    ) -> Self {
        let flight = |_| Flight {
            number: None,
            ticket: None,
            attached: None,
            total: 0,
            sent: 0,
            way: Way::Copy,
            class: None,
            failure: None,
            rounds: 0,
            flush: false,
            more: false,
            started: false,
            over: false,
            in_place: false,
            copied: false,
        };
        Self {
            carrier,
            slots,
            ranges: Ranges::default(),
            policy,
            stats: Stats::default(),
            stream,
            tells_ranges: false,
            gives_back: true,
            flights: (0..capacity).map(flight).collect(),
            queue: VecDeque::new(),
            again: VecDeque::new(),
            open: 0,
            full: false,
            starved: false,
            heard: 0,
            broken: None,
            closing: false,
            free: VecDeque::new(),
            next: 0,
            turn: Turn::default(),
        }
    }

    /// Accepts a send: it has a place now, and a number if it may go without a copy.
    pub(super) fn accept(
        &mut self,
        outgoing: Outgoing<B>,
    ) -> Result<Option<u32>, (Outgoing<B>, Refusal)> {
        if let Some(error) = self.broken {
            let error = io::Error::from_raw_os_error(error);
            return Err((outgoing, Refusal::Broken(error)));
        }
        let (total, registered) = (outgoing.buffer.total(), outgoing.buffer.arena().is_some());
        let Outgoing {
            buffer,
            to,
            slot,
            flush,
            more,
            copying,
        } = outgoing;
        let key = match self.carrier.put(buffer, to) {
            Ok(key) => key,
            Err(buffer) => {
                let outgoing = Outgoing {
                    buffer,
                    to,
                    slot,
                    flush,
                    more,
                    copying,
                };
                return Err((outgoing, Refusal::Full));
            }
        };
        let way = self.policy.way(copying, total, registered);
        let number = (copying != Copying::Always).then(|| {
            let number = self.next;
            self.next = number.wrapping_add(1);
            number
        });
        let ticket = slot.map(|slot| self.slots.accepted(slot));
        if let Some(place) = self.flights.get_mut(key.index()) {
            *place = Flight {
                number,
                ticket,
                attached: None,
                total,
                sent: 0,
                way,
                class: match copying {
                    Copying::Auto => self.policy.class(registered, total),
                    Copying::Never | Copying::Always => None,
                },
                failure: None,
                rounds: 0,
                flush,
                more,
                started: false,
                over: false,
                in_place: false,
                copied: false,
            };
        }
        self.queue.push_back(key);
        self.stats.accepted += 1;
        Ok(number)
    }

    /// Starts what may be started, and tells the kernel.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        if self.queue.is_empty() && self.again.is_empty() {
            return self.carrier.submit();
        }
        let begun = self.turn_is_open().then(Instant::now);
        let result = self.start_all();
        if let Some(begun) = begun {
            self.measured(begun.elapsed());
        }
        result
    }

    fn start_all(&mut self) -> io::Result<()> {
        // A carrier that makes its requests at once knows the answer before the next one.
        let at_once = self.carrier.backend() != Backend::Uring;
        self.turn = Turn::default();
        self.full &= !at_once;
        while self.may_start() {
            let started = self.start_some(if at_once { 1 } else { CHAIN })?;
            if at_once {
                self.progress();
            }
            if started == 0 || self.full && at_once {
                break;
            }
        }
        self.carrier.submit()
    }

    fn may_start(&self) -> bool {
        let waits = self.starved && self.carrier.owed() > 0;
        let chained = self.stream && self.open > 0;
        !(waits || chained || self.queue.is_empty() && self.again.is_empty())
    }

    /// Starts up to `most` requests; of a stream, as one chain. How many.
    fn start_some(&mut self, most: usize) -> io::Result<usize> {
        let count = most.min(self.again.len() + self.queue.len());
        let mut started = 0;
        while started < count {
            let Some(key) = self.again.pop_front().or_else(|| self.queue.pop_front()) else {
                break;
            };
            if let Some(error) = self.broken {
                self.fail(key, error);
                started += 1;
                continue;
            }
            let last = started + 1 == count;
            let Some(flight) = self.flights.get_mut(key.index()) else {
                continue;
            };
            let order = Order {
                way: flight.way,
                from: flight.sent,
                whole: self.stream,
                // A datagram that is continued keeps its order, too.
                linked: (self.stream || flight.more) && !last,
                more: flight.more,
                when_writable: self.full,
            };
            match self.carrier.start(key, order) {
                Ok(()) => {
                    flight.started = true;
                    self.turn
                        .count(flight.class.map(|class| (class, flight.way)));
                    self.open += 1;
                    self.full = false;
                    started += 1;
                    self.stats.requests += 1;
                }
                Err(NotStarted::QueueFull) => {
                    // The request before it may be linked to this one: the kernel ends a chain
                    // where a submission ends.
                    self.again.push_front(key);
                    self.carrier.submit()?;
                    if self.stream {
                        break;
                    }
                }
                Err(NotStarted::Vacant | NotStarted::TooManyPieces) => {
                    self.fail(key, libc_einval());
                    started += 1;
                }
            }
        }
        Ok(started)
    }

    /// Takes in what the kernel has said.
    pub(super) fn progress(&mut self) {
        while let Some(event) = self.carrier.next() {
            self.heard += 1;
            match event {
                Event::Done(key, result) => self.done(key, result),
                Event::Noted { key, copied } => self.noted(key, copied),
            }
        }
    }

    fn done(&mut self, key: Key, result: io::Result<usize>) {
        self.open = self.open.saturating_sub(1);
        let broken = self.broken;
        let starved = self.carrier.owed() > 0;
        let Some(flight) = self.flights.get_mut(key.index()) else {
            return;
        };
        let error = match result {
            Ok(sent) => {
                flight.sent += sent;
                match flight.way {
                    Way::Copy => flight.copied = true,
                    Way::ZeroCopy => flight.in_place = true,
                }
                if flight.sent >= flight.total || !self.stream {
                    return self.over(key);
                }
                if sent > 0 {
                    return self.again.push_back(key);
                }
                io::Error::from(io::ErrorKind::WriteZero)
            }
            Err(error) => error,
        };
        let code = error.raw_os_error().unwrap_or(0);
        match Answer::of(code) {
            Answer::Again => self.again.push_back(key),
            Answer::Cancelled if broken.is_none() && !self.closing => self.again.push_back(key),
            Answer::Cancelled => self.fail(key, broken.unwrap_or(code)),
            Answer::Full => {
                self.full = true;
                self.again.push_back(key);
            }
            Answer::NoMemory if flight.way == Way::ZeroCopy => {
                flight.rounds += 1;
                if flight.rounds > ROUNDS || !starved {
                    flight.way = Way::Copy;
                    self.stats.copied_for_memory += 1;
                } else {
                    self.starved = true;
                }
                self.again.push_back(key);
            }
            Answer::Cannot if flight.way == Way::ZeroCopy => {
                flight.way = Way::Copy;
                self.policy.cannot();
                self.again.push_back(key);
            }
            Answer::NoMemory | Answer::Cannot | Answer::Failed => {
                if self.stream && self.broken.is_none() {
                    self.broken = Some(code);
                }
                self.fail(key, code);
            }
        }
    }

    fn noted(&mut self, key: Key, copied: bool) {
        self.starved = false;
        self.policy.noted(copied);
        self.stats.notified += 1;
        self.stats.copied_by_kernel += u64::from(copied);
        let Some(flight) = self.flights.get_mut(key.index()) else {
            return;
        };
        flight.copied |= copied;
        if flight.over && self.carrier.idle(key) {
            self.release(key);
        }
    }

    fn fail(&mut self, key: Key, code: i32) {
        if let Some(flight) = self.flights.get_mut(key.index()) {
            flight.failure = Some(code);
            self.stats.failed += 1;
        }
        self.over(key);
    }

    /// The kernel is asked nothing more for it.
    fn over(&mut self, key: Key) {
        let Some(flight) = self.flights.get_mut(key.index()) else {
            return;
        };
        flight.over = true;
        self.stats.bytes += flight.sent as u64;
        if let Some(ticket) = flight.ticket.take() {
            if flight.started {
                let flush = flight.flush && flight.failure.is_none();
                flight.attached = self.slots.executed(ticket, flush);
            } else {
                self.slots.abandoned(ticket);
            }
        }
        if self.carrier.idle(key) {
            self.release(key);
        }
    }

    /// Its buffer is free, and so is its place.
    fn release(&mut self, key: Key) {
        let (Some(buffer), Some(flight)) =
            (self.carrier.take(key), self.flights.get_mut(key.index()))
        else {
            return;
        };
        let copied = flight.copied || !flight.in_place;
        self.stats.in_place += u64::from(!copied);
        if let Some(attached) = flight.attached.take() {
            self.slots.released(attached);
        }
        if let Some(number) = flight.number.filter(|_| self.tells_ranges) {
            self.ranges.add(number, copied);
        }
        if self.gives_back {
            let (number, outcome) = (flight.number, flight.outcome());
            self.free.push_back(Returned {
                buffer,
                number,
                outcome,
            });
        }
    }

    /// The oldest buffer that is free.
    pub(super) fn take(&mut self) -> Option<Returned<B>> {
        self.free.pop_front()
    }

    /// Whether everything that was accepted has been handed to the kernel, or has failed.
    pub(super) fn is_handed_over(&self) -> bool {
        self.queue.is_empty() && self.again.is_empty() && self.open == 0
    }

    /// Whether the kernel has, and will have, nothing more to do.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_handed_over() && self.carrier.owed() == 0
    }

    /// Whether the socket must become writable before more can be done.
    pub(super) fn is_full(&self) -> bool {
        self.full
    }

    /// Ends what the kernel has not taken.
    pub(super) fn cancel(&mut self) -> io::Result<()> {
        if self.is_handed_over() {
            return Ok(());
        }
        let cancelled = rustix::io::Errno::CANCELED.raw_os_error();
        self.closing = true;
        if self.stream {
            // What was begun may be in part on its way: nothing can follow it.
            self.broken = self.broken.or(Some(cancelled));
        }
        while let Some(key) = self.again.pop_front().or_else(|| self.queue.pop_front()) {
            self.fail(key, cancelled);
        }
        let result = self.carrier.submit().and_then(|()| self.carrier.cancel());
        self.progress();
        self.closing = false;
        result
    }

    /// Sleeps until the kernel says something, or for `timeout`.
    pub(super) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.carrier.wait(timeout)
    }

    fn turn_is_open(&self) -> bool {
        let mut next = self.again.iter().chain(&self.queue);
        let first = next.next().and_then(|key| self.flights.get(key.index()));
        first
            .and_then(|first| first.class)
            .is_some_and(calibration::is_open)
    }

    fn measured(&mut self, took: Duration) {
        if let Some((class, way)) = self.turn.alike {
            calibration::learn(class, way, self.turn.sends, took);
        }
    }
}

impl Flight {
    fn outcome(&self) -> Result<Sent, Failed> {
        match self.failure {
            None if self.in_place && !self.copied => Ok(Sent::InPlace),
            None => Ok(Sent::Copied),
            Some(code) => Err(Failed {
                sent: self.sent,
                error: match code {
                    0 => io::ErrorKind::WriteZero.into(),
                    code => io::Error::from_raw_os_error(code),
                },
            }),
        }
    }
}

impl<B: Stable> Drop for Flights<B> {
    fn drop(&mut self) {
        // What the kernel takes at once is sent; the carrier ends the rest.
        let _ = self.submit();
    }
}

impl Turn {
    fn count(&mut self, one: Option<(Class, Way)>) {
        if self.sends == 0 {
            self.alike = one;
        } else if self.alike != one {
            self.alike = None;
        }
        self.sends += 1;
    }
}

/// What an error of a request means for it.
enum Answer {
    Again,
    /// The request before it in its chain did not succeed.
    Cancelled,
    Full,
    NoMemory,
    /// Not without a copy.
    Cannot,
    Failed,
}

impl Answer {
    fn of(code: i32) -> Self {
        match rustix::io::Errno::from_raw_os_error(code) {
            rustix::io::Errno::INTR => Self::Again,
            rustix::io::Errno::CANCELED => Self::Cancelled,
            rustix::io::Errno::AGAIN => Self::Full,
            rustix::io::Errno::NOBUFS | rustix::io::Errno::NOMEM => Self::NoMemory,
            rustix::io::Errno::OPNOTSUPP => Self::Cannot,
            _ => Self::Failed,
        }
    }
}

fn libc_einval() -> i32 {
    rustix::io::Errno::INVAL.raw_os_error()
}
