//! Pieces of datagrams in a queue: which are kept, requested again, copied or returned (see
//! `cork`).

use std::mem;

use super::in_flight::DatagramPart;
use super::send_queue::SendQueue;
use super::stats::CopyReason;
use crate::sys::{Key, Stable};

impl<B: Stable> SendQueue<B> {
    /// Takes note that the socket has taken a piece of a datagram, or a whole one.
    pub(super) fn piece_taken(&mut self, key: Key) {
        let Some(send) = self.sends.get_mut(key.index()) else {
            return;
        };
        let piece = send.part != DatagramPart::Whole;
        let goes_on = piece && send.more;
        self.cork.taken += usize::from(piece);
        self.cork.gathered = goes_on;
        if !goes_on {
            return self.release_kept();
        }
        if self.cork.keeps {
            send.kept = true;
            self.cork.kept.push_back(key);
        }
    }

    /// Releases the kept pieces: they will not be requested again.
    pub(super) fn release_kept(&mut self) {
        while let Some(key) = self.cork.kept.pop_front() {
            if let Some(send) = self.sends.get_mut(key.index()) {
                send.kept = false;
            }
            self.report_to_slot(key);
        }
    }

    /// Whether kept pieces wait for a next piece that the application has not sent.
    pub(super) fn awaits_pieces(&self) -> bool {
        self.cork.is_keeping() && self.is_handed_over()
    }

    /// Releases kept pieces when the application polls or waits: it may need the buffers for the
    /// next piece. If the sender is closed, no next piece can follow, and the socket drops the
    /// datagram.
    pub(super) fn release_kept_for_caller(&mut self) {
        if !self.is_handed_over() {
            return;
        }
        match self.closed && self.cork.keeps {
            true => self.forget_pieces(),
            false => self.release_kept(),
        }
    }

    /// Copies all pieces of a datagram because one found no memory: those that the socket has
    /// taken, those that `failed`, and those that follow.
    pub(super) fn copy_pieces(&mut self, failed: Vec<(Key, i32)>) {
        let kept = mem::take(&mut self.cork.kept);
        self.forget_pieces();
        for key in kept {
            if let Some(send) = self.sends.get_mut(key.index()) {
                (send.kept, send.finished) = (false, false);
                self.stats.over -= 1;
                self.stats.bytes -= mem::take(&mut send.sent) as u64;
            }
            self.queue_retry(key);
        }
        for (key, _) in failed {
            self.queue_retry(key);
        }
        // The pieces of this datagram are the oldest unfinished sends.
        for key in self.retries.iter().chain(&self.queued) {
            let Some(send) = self.sends.get_mut(key.index()) else {
                break;
            };
            send.copy_for(CopyReason::Memory);
            if !send.more {
                break;
            }
        }
    }
}
