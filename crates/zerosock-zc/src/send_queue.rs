//! The sends of one sender, from their acceptance until their buffers are free: which requests are
//! made, in which order, and which are retried.
//!
//! A send is *queued*; then *started*, when the kernel has a request for it; then *finished*, when
//! the kernel took all of it or it failed; and free when its place is idle. On a stream, one chain
//! of linked requests is under way at a time: requests that are not linked could overtake each
//! other, and a send that was taken in part must be completed before the next one. Sends that wait
//! together and have the same mode become one request, with one notification, of up to 128 KiB. A
//! stream on which a send failed accepts nothing more. A stream that ends before the kernel has
//! taken every accepted send is reset, so that its peer does not take it for complete.
//!
//! io_uring can complete a submission within the call, and then no event follows that an event loop
//! could wait for. So a submission is repeated until everything is with the kernel or nothing may
//! be started. In both cases an event is still to come.
//!
//! If the kernel has no memory for a send without a copy (ENOBUFS, ENOMEM: the limit of locked
//! memory, or of the notifications of the socket), the send waits for a notification, which frees
//! some. If none is due, or after a few such rounds, the send is copied; a piece of a datagram is
//! copied with all other pieces (`cork`).
//!
//! # Invariants
//! While a send is accepted and not finished, either a request of it is with the kernel, or it can
//! be started, or an event is due after which it can be started.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};

use super::backend_choice;
use super::cork::Cork;
use super::in_flight::{self, CANCELLED, DatagramPart, InFlightSend};
use super::limit::Limit;
use super::message::{Copying, Outgoing, Refusal, Returned};
use super::policy::Policy;
use super::ranges::Ranges;
use super::slots::Slots;
use super::stats::SenderStats;
use crate::sys::{self, Key, NotStarted, SendBackend, SendMode, Stable, Submission, ZcSocket};

/// The largest number of sends in one chain of requests.
const CHAIN: usize = 32;
/// The largest number of bytes of one request of several sends: large enough that the cost of a
/// request is small in comparison, and small enough that buffers are free soon.
pub(super) const GATHERED: usize = 128 << 10;

pub(super) struct SendQueue<B: Stable> {
    pub(super) zc_socket: ZcSocket<B>,
    pub(super) slots: Slots,
    pub(super) ranges: Ranges,
    pub(super) policy: Policy,
    pub(super) stats: SenderStats,
    pub(super) stream: bool,
    /// Requests of a stream have MSG_WAITALL, so that others can be linked to them. False for the
    /// sendmsg(2) back-ends and for sockets that refuse the flag: these make one request at a time.
    pub(super) whole: bool,
    /// Whether completions are kept for the application, and whether free buffers are.
    pub(super) keeps_ranges: bool,
    /// How often the application has asked for completions.
    pub(super) asked: u64,
    pub(super) returns_buffers: bool,
    /// The state of each send, by the index of its place.
    pub(super) sends: Box<[InFlightSend]>,
    pub(super) queued: VecDeque<Key>,
    /// Sends to be requested again, before those in `queued`, in the order of acceptance.
    pub(super) retries: VecDeque<Key>,
    /// Number of sends that wait for the result of their request.
    pub(super) open: usize,
    /// The last result was WouldBlock.
    pub(super) full: bool,
    /// The request that waits until the socket is writable. No other is started meanwhile.
    pub(super) armed: Option<Key>,
    /// The kernel had no memory: the next request waits for a notification.
    pub(super) starved: bool,
    /// Current limit on the bytes of a zero-copy request of several sends, at most [`GATHERED`].
    pub(super) gather: usize,
    /// The sends of the next request, reused to avoid an allocation.
    run: Vec<Key>,
    /// Number of buffers that have become free.
    pub(super) released: u64,
    /// The error number of the failure after which nothing is accepted.
    pub(super) broken: Option<i32>,
    /// The sender was closed: nothing is accepted.
    pub(super) closed: bool,
    /// The stream was shut down or reset.
    pub(super) shut_down: bool,
    pub(super) cork: Cork,
    /// `process_events` is running.
    pub(super) draining: bool,
    /// Sends to release at the end of `process_events`.
    pub(super) completed: Vec<Key>,
    /// Free buffers that the application has not taken.
    pub(super) free: VecDeque<Returned<B>>,
    /// The number of the next send.
    next: u32,
    /// Number of sends accepted.
    accepted: u64,
    pub(super) limit: Limit,
}

impl<B: Stable> SendQueue<B> {
    pub(super) fn new(zc_socket: ZcSocket<B>, capacity: u32, slots: Slots, policy: Policy) -> Self {
        let stream = zc_socket.kind().is_stream();
        Self {
            whole: stream && zc_socket.backend() == SendBackend::Uring,
            cork: Cork::new(!stream && zc_socket.backend() != SendBackend::Copy),
            zc_socket,
            slots,
            ranges: Ranges::default(),
            policy,
            stats: SenderStats::default(),
            stream,
            keeps_ranges: false,
            asked: 0,
            returns_buffers: true,
            sends: (0..capacity).map(|_| InFlightSend::vacant()).collect(),
            queued: VecDeque::new(),
            retries: VecDeque::new(),
            open: 0,
            full: false,
            armed: None,
            starved: false,
            gather: GATHERED,
            run: Vec::new(),
            draining: false,
            completed: Vec::new(),
            released: 0,
            broken: None,
            closed: false,
            shut_down: false,
            free: VecDeque::new(),
            next: 0,
            accepted: 0,
            limit: Limit::default(),
        }
    }

    /// Accepts a send: puts its buffer into a place. Returns its number, if it may go without a
    /// copy.
    pub(super) fn accept(
        &mut self,
        outgoing: Outgoing<B>,
    ) -> Result<Option<u32>, (Outgoing<B>, Refusal)> {
        if self.closed {
            return Err((outgoing, Refusal::Closed));
        }
        if let Some(error) = self.broken {
            return Err((outgoing, Refusal::Broken(in_flight::error(error))));
        }
        let total = outgoing.buffer.total();
        let Outgoing {
            buffer,
            to,
            slot,
            flush,
            more,
            copying,
        } = outgoing;
        if self.cork.accepting && self.zc_socket.room() == 0 {
            self.release_kept();
        }
        let key = match self.zc_socket.put(buffer, to) {
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
        let copy_reason = self.policy.copy_reason(copying, total);
        let number = (copying != Copying::Always).then(|| {
            let number = self.next;
            self.next = number.wrapping_add(1);
            number
        });
        let ticket = slot.map(|slot| self.slots.accepted(slot));
        if let Some(place) = self.sends.get_mut(key.index()) {
            *place = InFlightSend {
                ordinal: self.accepted,
                number,
                ticket,
                total,
                copy_reason,
                flush,
                more,
                part: match self.stream {
                    true => DatagramPart::Whole,
                    false => self.cork.accept(more),
                },
                ..InFlightSend::vacant()
            };
        }
        self.start_limit(key, self.accepted);
        self.queued.push_back(key);
        self.accepted += 1;
        self.stats.accepted += 1;
        Ok(number)
    }

    /// Starts requests, submits them, and handles the events that follow at once; repeats this
    /// while more can be started.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        self.enforce_limit();
        if self.is_all_started() {
            self.zc_socket.submit()?;
            if self.zc_socket.room() == 0 && self.is_at_once() {
                // Nothing can be sent before a place is free. An error is reported again by the
                // next call that polls.
                let _ = self.zc_socket.reap();
            }
            self.process_events();
        }
        let at_once = self.is_at_once();
        while self.may_start() {
            self.full &= !at_once;
            let started = self.start_all(at_once)?;
            self.process_events();
            if started == 0 || self.full && at_once {
                break;
            }
        }
        Ok(())
    }

    /// Returns how many sends were started, or failed instead.
    fn start_all(&mut self, at_once: bool) -> io::Result<usize> {
        let mut all = 0;
        while self.may_start() {
            let started = self.start_some(at_once || self.stream && !self.whole)?;
            all += started;
            if at_once {
                self.process_events();
            }
            if started == 0 || self.full && at_once {
                break;
            }
        }
        self.zc_socket.submit()?;
        Ok(all)
    }

    /// Whether each request has its result before the next one is started: the sendmsg(2)
    /// back-ends.
    fn is_at_once(&self) -> bool {
        self.zc_socket.backend() != SendBackend::Uring
    }

    fn may_start(&self) -> bool {
        let waits = self.starved && self.frees_memory();
        let chained = (self.stream || self.cork.under_way) && self.open > 0;
        !(waits || chained || self.armed.is_some() || self.is_all_started())
    }

    fn is_all_started(&self) -> bool {
        self.queued.is_empty() && self.retries.is_empty()
    }

    fn pop(&mut self) -> Option<Key> {
        self.retries.pop_front().or_else(|| self.queued.pop_front())
    }

    /// Collects in `run` the sends of the next request: on a stream, at most `most` sends of one mode,
    /// otherwise one.
    fn run(&self, most: usize, run: &mut Vec<Key>) {
        run.clear();
        if !self.stream {
            run.extend(self.retries.front().or(self.queued.front()));
            return;
        }
        let (mut before, mut left) = (None::<&InFlightSend>, 0);
        for &key in self.retries.iter().chain(&self.queued).take(most) {
            let Some(send) = self.sends.get(key.index()) else {
                return;
            };
            let rest = send.total.saturating_sub(send.sent);
            match before {
                None => {
                    left = match send.mode() {
                        SendMode::ZeroCopy => self.gather,
                        SendMode::Copy => GATHERED,
                    };
                }
                // MSG_MORE of the last send would delay an earlier one that has no MSG_MORE.
                Some(before) => {
                    let uniform = before.mode() == send.mode() && (before.more || !send.more);
                    if !(uniform && send.sent == 0 && rest <= left) {
                        return;
                    }
                }
            }
            left = left.saturating_sub(rest);
            before = Some(send);
            run.push(key);
        }
    }

    /// Starts up to [`CHAIN`] sends, or a single request if `one_by_one`; on a stream, as one
    /// chain. Returns how many sends were started.
    fn start_some(&mut self, one_by_one: bool) -> io::Result<usize> {
        let mut run = std::mem::take(&mut self.run);
        let started = self.start_runs(one_by_one, &mut run);
        self.run = run;
        started
    }

    fn start_runs(&mut self, one_by_one: bool, run: &mut Vec<Key>) -> io::Result<usize> {
        let count = CHAIN.min(self.retries.len() + self.queued.len());
        let (mut started, mut chained) = (0, false);
        while started < count {
            self.run(count - started, run);
            let Some(&key) = run.first() else { break };
            let Some(send) = self.sends.get(key.index()) else {
                break;
            };
            if let Some(error) = self.broken.or_else(|| self.cork.inherited_failure(send)) {
                self.pop();
                self.fail(key, error);
                started += 1;
                continue;
            }
            if !self.cork.admits(send.part, self.open, chained) {
                break;
            }
            let follows = started + run.len() < count && !one_by_one;
            let last = run.last().and_then(|key| self.sends.get(key.index()));
            let submission = Submission {
                mode: send.mode(),
                from: send.sent,
                whole: self.whole,
                linked: follows && (self.stream || send.part != DatagramPart::Whole && send.more),
                more: last.is_some_and(|last| last.more),
                when_writable: self.full,
            };
            let part = send.part;
            match self.zc_socket.start(run, submission) {
                Ok(one) => {
                    let mut bytes = 0;
                    for &key in run.iter().take(one.places) {
                        self.pop();
                        bytes += self.started(key);
                    }
                    if let Some(first) = self.sends.get_mut(key.index()) {
                        first.gathered = if one.places > 1 { bytes } else { 0 };
                    }
                    self.stats.requests += 1;
                    self.stats.registered += u64::from(one.registered);
                    self.cork.started(part);
                    chained = part != DatagramPart::Whole;
                    started += one.places;
                    if std::mem::take(&mut self.full) {
                        self.armed = Some(key);
                    }
                    let is_chain = self.stream || chained || self.armed.is_some();
                    if one_by_one || is_chain && !one.linked {
                        break;
                    }
                }
                Err(NotStarted::QueueFull) => {
                    // The previous request may be linked to this one. The kernel ends a chain at
                    // the end of a submission.
                    self.zc_socket.submit()?;
                    break;
                }
                Err(NotStarted::Vacant | NotStarted::TooManyPieces) => {
                    let code = rustix::io::Errno::INVAL.raw_os_error();
                    if part != DatagramPart::Whole && submission.more {
                        self.cork.failure = Some(code);
                    }
                    if self.stream {
                        self.broken = self.broken.or(Some(code));
                    }
                    self.pop();
                    self.fail(key, code);
                    started += 1;
                }
            }
        }
        Ok(started)
    }

    /// Takes note that a request of a send was started. Returns how many of its bytes are in the
    /// request.
    fn started(&mut self, key: Key) -> usize {
        self.open += 1;
        let Some(send) = self.sends.get_mut(key.index()) else {
            return 0;
        };
        send.started = true;
        send.total.saturating_sub(send.sent)
    }

    /// Whether every accepted send has the results of its requests, and none is queued.
    pub(super) fn is_handed_over(&self) -> bool {
        self.is_all_started() && self.open == 0
    }

    /// Whether every send is finished and every buffer free, except one in doubt.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_handed_over() && self.zc_socket.is_drained() && !self.cork.is_keeping()
    }

    /// Cancels every send that the kernel has not taken.
    pub(super) fn cancel(&mut self) -> io::Result<()> {
        self.fail_pending(CANCELLED)
    }

    /// Fails every send that the kernel has not taken, with `code`.
    pub(super) fn fail_pending(&mut self, code: i32) -> io::Result<()> {
        if self.is_handed_over() {
            return Ok(());
        }
        if self.stream {
            // The kernel may have taken a part of a started send: nothing can follow it.
            self.broken = self.broken.or(Some(code));
        }
        // The results of requests that another thread submitted can follow later.
        let is_unreferenced = |send: &&mut InFlightSend| !send.finished;
        for send in self.sends.iter_mut().filter(is_unreferenced) {
            send.cancelled = send.cancelled.or(Some(code));
        }
        while let Some(key) = self.pop() {
            self.fail(key, code);
        }
        if self.cork.accepting {
            self.cork.failure = Some(code);
        }
        self.cork.cancelled_chain = self.cork.under_way;
        let result = self
            .zc_socket
            .submit()
            .and_then(|()| self.zc_socket.cancel());
        self.process_events();
        if !self.cork.under_way {
            self.forget_pieces();
        }
        // Sends that were taken in part are queued as retries now, and fail in this submission.
        result.and(self.submit())
    }

    /// Submits as long as the kernel takes something at once.
    fn submit_all(&mut self) {
        loop {
            let before = self.stats.over;
            let done = self.submit().and_then(|()| self.zc_socket.reap());
            self.process_events();
            if done.is_err() || self.stats.over == before || self.is_handed_over() {
                return;
            }
        }
    }

    /// Whether the kernel has taken every accepted send.
    fn is_whole(&self) -> bool {
        self.is_handed_over() && self.broken.is_none()
    }

    /// Shuts the stream down, or, if not `orderly`, resets it where the kind of socket has a reset.
    /// Returns whether it was reset.
    pub(super) fn end(&mut self, orderly: bool) -> bool {
        self.shut_down = true;
        if !self.stream {
            return false;
        }
        if !orderly {
            self.broken = self.broken.or(Some(CANCELLED));
        }
        let socket = self.zc_socket.socket();
        if !orderly && sys::reset(socket).unwrap_or(false) {
            return true;
        }
        // Closing is not enough: other descriptors may refer to the socket. The call fails if the
        // socket is no longer connected.
        let _ = shutdown(socket, Shutdown::Write);
        false
    }

    /// Waits for an event, for `timeout`, or until a send is late.
    pub(super) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.zc_socket
            .wait(self.time_left().into_iter().chain(timeout).min())
    }
}

impl<B: Stable> Drop for SendQueue<B> {
    fn drop(&mut self) {
        if self.keeps_ranges {
            backend_choice::record_use(self.zc_socket.kind(), self.accepted, self.asked);
        }
        if self.shut_down || self.zc_socket.is_forked() {
            return;
        }
        // Sends what the kernel takes at once; the drop of `ZcSocket` ends the rest.
        self.submit_all();
        // The thread of `orphans` keeps the socket open, with the pieces that it has collected.
        self.forget_pieces();
        if self.stream && !self.is_whole() {
            self.end(false);
        } else if let Some(due) = self.due() {
            self.zc_socket.reset_at(due);
        }
    }
}

#[cfg(test)]
#[path = "send_queue_tests.rs"]
mod tests;
