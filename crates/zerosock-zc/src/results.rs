//! Handles results and notifications of the kernel for the sends of a queue.

use std::io;

use super::in_flight::{CANCELLED, DatagramPart, InFlightSend, TIMED_OUT};
use super::message::Returned;
use super::send_queue::{GATHERED, SendQueue};
use super::stats::CopyReason;
use crate::sys::{self, Event, Key, SendMode, Stable};

/// How often a send waits for memory before it is copied.
const MAX_MEMORY_WAITS: u8 = 3;
/// When the kernel has no memory for a request of several sends, the limit on the length of later
/// ones is halved. Each notification raises the limit again by this many bytes.
const GROWTH: usize = 512;

impl<B: Stable> SendQueue<B> {
    /// Handles all events that are available without a system call.
    pub(super) fn process_events(&mut self) {
        self.draining = true;
        while let Some(event) = self.zc_socket.event() {
            match event {
                Event::Done(key, result) => self.handle_result(key, result),
                Event::Notified {
                    key,
                    copied,
                    is_first,
                } => self.handle_notification(key, copied, is_first),
            }
        }
        self.draining = false;
        // Nothing is added meanwhile.
        let mut completed = std::mem::take(&mut self.completed);
        for key in completed.drain(..) {
            // A key can be queued twice, and its place can belong to another send by now.
            let send = self.sends.get(key.index());
            if send.is_some_and(|send| send.finished && !send.kept) {
                self.release_idle(key);
            }
        }
        self.completed = completed;
        // If nothing that is pending frees memory, waiting for it would never end.
        self.starved &= self.frees_memory();
    }

    /// Whether a pending event frees memory: the notification of a request that took bytes, or the
    /// result of a request that may have. The kernel takes nothing of a request linked to one that
    /// failed, so on a stream pending results do not count.
    pub(super) fn frees_memory(&self) -> bool {
        self.zc_socket.reading() > 0 || (!self.stream && self.open > 0)
    }

    fn handle_result(&mut self, key: Key, result: io::Result<usize>) {
        self.open = self.open.saturating_sub(1);
        if self.armed == Some(key) {
            self.armed = None;
        }
        let Some(send) = self.sends.get_mut(key.index()) else {
            return;
        };
        let piece = send.part != DatagramPart::Whole;
        let code = match result {
            Ok(sent) => {
                send.sent += sent;
                match send.mode() {
                    SendMode::Copy => send.copied = true,
                    SendMode::ZeroCopy => send.in_place = true,
                }
                let whole = send.sent >= send.total || !self.stream;
                if whole {
                    self.piece_taken(key);
                    self.finish(key);
                } else if sent > 0 {
                    self.queue_retry(key);
                }
                (!whole && sent == 0).then_some(0)
            }
            Err(error) => Some(error.raw_os_error().unwrap_or(0)),
        };
        match code {
            Some(code) if piece => self.cork.failed.push((key, code)),
            Some(code) => self.handle_error(key, code),
            None => {}
        }
        if self.cork.under_way && self.open == 0 {
            self.finish_cork();
        }
    }

    /// Handles a request that failed with `code`: retries the send, changes how it is made, or
    /// fails it.
    pub(super) fn handle_error(&mut self, key: Key, code: i32) {
        let waits = self.frees_memory();
        let broken = self.broken;
        let Some(send) = self.sends.get_mut(key.index()) else {
            return;
        };
        let cancelled = send.cancelled;
        match ErrorClass::of(code, send.mode(), self.whole) {
            ErrorClass::Failed => {
                if self.stream && self.broken.is_none() {
                    self.broken = Some(code);
                }
                return self.fail(key, code);
            }
            ErrorClass::Cancelled if broken.is_some() => {
                return self.fail(key, broken.unwrap_or(code));
            }
            _ if cancelled.is_some() => return self.fail(key, cancelled.unwrap_or(code)),
            ErrorClass::Retry | ErrorClass::Cancelled => {}
            ErrorClass::WouldBlock => self.full = true,
            ErrorClass::NoMemory if send.gathered > 0 => {
                // A shorter request needs less memory.
                self.gather = self.gather.min(send.gathered) / 2;
            }
            ErrorClass::NoMemory => {
                send.rounds += 1;
                if send.rounds > MAX_MEMORY_WAITS || !waits {
                    send.copy_for(CopyReason::Memory);
                } else {
                    self.starved = true;
                }
            }
            ErrorClass::ZeroCopyUnsupported => {
                self.policy.disable();
                // Otherwise each waiting send would be refused in turn.
                for key in self.retries.iter().chain(&self.queued) {
                    if let Some(send) = self.sends.get_mut(key.index()) {
                        send.copy_for(CopyReason::Off);
                    }
                }
            }
            ErrorClass::WaitAllUnsupported => self.whole = false,
        }
        if self.policy.is_disabled()
            && let Some(send) = self.sends.get_mut(key.index())
        {
            send.copy_for(CopyReason::Off);
        }
        self.queue_retry(key);
    }

    /// Queues a send to be requested again, in the order of acceptance: results arrive in any
    /// order.
    pub(super) fn queue_retry(&mut self, key: Key) {
        let ordinal = |key: &Key| {
            let send = self.sends.get(key.index());
            send.map_or(u64::MAX, |send| send.ordinal)
        };
        let own = ordinal(&key);
        let at = match self.retries.back() {
            Some(last) if ordinal(last) > own => {
                self.retries.partition_point(|other| ordinal(other) < own)
            }
            _ => self.retries.len(),
        };
        self.retries.insert(at, key);
    }

    /// Handles the failures of a chain of pieces, after the result of every piece has arrived.
    pub(super) fn finish_cork(&mut self) {
        self.cork.under_way = false;
        let cancelled_chain = std::mem::take(&mut self.cork.cancelled_chain);
        let failed = std::mem::take(&mut self.cork.failed);
        // ECANCELED only says that an earlier piece of the chain failed.
        let own = failed.iter().find(|(_, code)| *code != CANCELLED);
        let Some(&(cause, code)) = own.or(failed.first()) else {
            if cancelled_chain {
                self.forget_pieces();
            }
            return;
        };
        let send = |key: Key| self.sends.get(key.index());
        let mode = send(cause).map_or(SendMode::Copy, |send| send.mode());
        let any = |is: fn(&InFlightSend) -> bool| {
            let mut pieces = failed.iter().filter_map(|&(key, _)| send(key));
            pieces.any(is)
        };
        let mut pieces = failed.iter().filter_map(|&(key, _)| send(key));
        let cancelled = pieces.find_map(|piece| piece.cancelled);
        let failure = match ErrorClass::of(code, mode, false) {
            ErrorClass::Failed => Some(code),
            _ if cancelled.is_some() => cancelled,
            ErrorClass::NoMemory if self.cork.is_all_kept() => return self.copy_pieces(failed),
            _ => (self.cork.taken > 0).then_some(code),
        };
        let goes_on = !any(|piece| !piece.more);
        match failure {
            None => {
                for (key, code) in failed {
                    self.handle_error(key, code);
                }
            }
            Some(failure) => {
                if goes_on {
                    self.cork.failure = Some(failure);
                }
                self.forget_pieces();
                for (key, _) in failed {
                    self.fail(key, failure);
                }
            }
        }
    }

    /// Drops the incomplete datagram that the socket has collected.
    pub(super) fn forget_pieces(&mut self) {
        self.cork.taken = 0;
        self.release_kept();
        if !std::mem::take(&mut self.cork.gathered) {
            return;
        }
        if let Err(error) = sys::forget_pieces(self.zc_socket.socket()) {
            let unsupported = rustix::io::Errno::OPNOTSUPP.raw_os_error();
            let code = error.raw_os_error().unwrap_or(unsupported);
            self.broken = self.broken.or(Some(code));
        }
    }

    /// Handles a notification: the kernel no longer reads what it took of a send in one request.
    /// `is_first` is true for one of the sends that share the notification.
    pub(super) fn handle_notification(&mut self, key: Key, copied: Option<bool>, is_first: bool) {
        if let Some(copied) = copied {
            self.stats.notified += 1;
            self.starved = false;
            self.gather = (self.gather + GROWTH).min(GATHERED);
            if is_first {
                self.policy.notified(copied);
            }
        }
        let Some(send) = self.sends.get_mut(key.index()) else {
            return;
        };
        send.copied |= copied == Some(true);
        if send.finished && !send.kept {
            self.release_idle(key);
        }
    }

    pub(super) fn fail(&mut self, key: Key, code: i32) {
        if let Some(send) = self.sends.get_mut(key.index()) {
            send.failure = Some(code);
            self.stats.failed += 1;
            self.stats.timed_out += u64::from(send.cancelled == Some(TIMED_OUT));
        }
        self.finish(key);
    }

    /// Ends a send: no more requests are made for it, unless it is a kept piece.
    fn finish(&mut self, key: Key) {
        let Some(send) = self.sends.get_mut(key.index()) else {
            return;
        };
        send.finished = true;
        self.stats.over += 1;
        self.stats.bytes += send.sent as u64;
        if !send.kept {
            self.report_to_slot(key);
        }
    }

    /// Reports a send that will not be requested again to its slot, and releases its buffer if that
    /// is free.
    pub(super) fn report_to_slot(&mut self, key: Key) {
        let Some(send) = self.sends.get_mut(key.index()) else {
            return;
        };
        if let Some(ticket) = send.ticket.take() {
            if send.started {
                let flush = send.flush && send.failure.is_none();
                send.attached = self.slots.executed(ticket, flush);
            } else {
                self.slots.finish(ticket);
            }
        }
        self.release_idle(key);
    }

    /// Releases a send if its place is idle. While events are drained, the release waits until the
    /// last one is handled: the place is idle as soon as `ZcSocket` has read the completion, and a
    /// later event of the batch can still say whether the kernel copied.
    fn release_idle(&mut self, key: Key) {
        if self.zc_socket.idle(key) {
            match self.draining {
                true => self.completed.push(key),
                false => self.release(key),
            }
        }
    }

    /// Takes the buffer of a finished send out of its place, and reports it.
    fn release(&mut self, key: Key) {
        let (Some(buffer), Some(send)) =
            (self.zc_socket.take(key), self.sends.get_mut(key.index()))
        else {
            return;
        };
        self.released += 1;
        let copied = send.copied || !send.in_place;
        match (send.failure, copied) {
            (Some(_), _) => {}
            (None, true) => self.stats.count_copied(send.copy_reason),
            (None, false) => self.stats.in_place += 1,
        }
        if let Some(attached) = send.attached.take() {
            self.slots.released(attached);
        }
        if let Some(number) = send.number.filter(|_| self.keeps_ranges) {
            self.ranges.add(number, copied);
        }
        if self.returns_buffers {
            let (number, outcome) = (send.number, send.outcome());
            self.free.push_back(Returned {
                buffer,
                number,
                outcome,
            });
        }
    }
}

/// What the error of a request means for its send.
#[derive(Debug, Eq, PartialEq)]
enum ErrorClass {
    Retry,
    /// An earlier request of the same chain failed.
    Cancelled,
    WouldBlock,
    /// The kernel has no memory for a zero-copy request now.
    NoMemory,
    /// The socket cannot send without a copy.
    ZeroCopyUnsupported,
    /// The socket refuses MSG_WAITALL: kernel TLS refuses every flag that it does not know.
    WaitAllUnsupported,
    Failed,
}

impl ErrorClass {
    /// Classifies the error number of a request that was made in this mode, with MSG_WAITALL if
    /// `whole`.
    fn of(code: i32, mode: SendMode, whole: bool) -> Self {
        use rustix::io::Errno;
        const AGAIN: i32 = Errno::INTR.raw_os_error();
        const FULL: i32 = Errno::AGAIN.raw_os_error();
        const NO_BUFFERS: i32 = Errno::NOBUFS.raw_os_error();
        const NO_MEMORY: i32 = Errno::NOMEM.raw_os_error();
        const CANNOT: i32 = Errno::OPNOTSUPP.raw_os_error();
        match code {
            AGAIN => Self::Retry,
            CANCELLED => Self::Cancelled,
            FULL => Self::WouldBlock,
            NO_BUFFERS | NO_MEMORY if mode == SendMode::ZeroCopy => Self::NoMemory,
            CANNOT if mode == SendMode::ZeroCopy => Self::ZeroCopyUnsupported,
            CANNOT if whole => Self::WaitAllUnsupported,
            _ => Self::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_send_of_which_nothing_was_taken_fails_with_write_zero() {
        // 0 is no error number.
        assert_eq!(
            ErrorClass::of(0, SendMode::ZeroCopy, true),
            ErrorClass::Failed
        );
        assert_eq!(
            super::super::in_flight::error(0).kind(),
            io::ErrorKind::WriteZero
        );
    }

    #[test]
    fn only_a_zero_copy_request_waits_for_memory() {
        for code in [rustix::io::Errno::NOBUFS, rustix::io::Errno::NOMEM] {
            let code = code.raw_os_error();
            assert_eq!(
                ErrorClass::of(code, SendMode::ZeroCopy, true),
                ErrorClass::NoMemory
            );
            assert_eq!(
                ErrorClass::of(code, SendMode::Copy, true),
                ErrorClass::Failed
            );
        }
    }
}
