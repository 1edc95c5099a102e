//! When to read a host socket: by its edges, or by the clock.
//!
//! A program that writes 64 bytes at a time wakes us for each write, and a reader that is awake
//! fights the writer for the socket's lock: reading at every edge costs about 800 ns of CPU for a
//! message whose reading alone costs 300 ns. So a join whose reads were short, many and close
//! together is read in batches: its edges are muted and a timer reads what has gathered, for as
//! long as each batch is worth it. What must hold: a guest that answers ends it at once, so that
//! no exchange of messages is slowed, and the host's end is seen at its edge.

use super::join::End;
use super::timers::Timer;
use super::{Context, Device};
use crate::engine::poller::Source;
use std::time::Duration;

/// Reads in a row after which a join is read in batches.
const MANY: u8 = 32;
/// A read that got no more than this was short.
const SHORT: usize = 4096;
/// Reads further apart than this are no stream.
const CLOSE: Duration = Duration::from_micros(50);
/// A batch of less than this was not worth the wait.
const WORTH: usize = 1024;

impl Device {
    /// A read emptied the socket of a join and got `received` bytes.
    pub(super) fn pace(&mut self, key: u32, received: usize, cx: &mut Context<'_>) {
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        if join.batched {
            if received < WORTH {
                self.end_batching(key, cx);
            } else {
                self.timers
                    .set(cx.now + cx.limits.coalesce, Timer::Batch(key));
            }
            return;
        }
        let stream = received > 0
            && received <= SHORT
            && cx.now.saturating_duration_since(join.last_read) < CLOSE;
        join.last_read = cx.now;
        join.short_reads = if stream { join.short_reads + 1 } else { 0 };
        if join.short_reads < MANY || cx.limits.coalesce.is_zero() {
            join.short_reads = join.short_reads.min(MANY);
            return;
        }
        let End::Socket { socket, .. } = &join.end else {
            return;
        };
        let source = Source::Join {
            vm: self.addr.vm,
            key,
        };
        if cx.poller.mute(socket, source).is_ok() {
            join.batched = true;
            self.timers
                .set(cx.now + cx.limits.coalesce, Timer::Batch(key));
        }
    }

    /// Goes back to reading by edges. What is there now is an edge of its own.
    pub(super) fn end_batching(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(join) = self.joins.get_mut(key as usize) else {
            return;
        };
        join.batched = false;
        join.short_reads = 0;
        let End::Socket { socket, .. } = &join.end else {
            return;
        };
        let source = Source::Join {
            vm: self.addr.vm,
            key,
        };
        if let Err(error) = cx.poller.change(socket, source) {
            // Without edges it would never be read again.
            tracing::warn!(cid = %self.cid, %error, "cannot watch a host program");
            self.reset_join(key, cx);
        }
    }

    /// The time for a batch has come.
    pub(super) fn batch_due(&mut self, key: u32) {
        if let Some(join) = self.joins.get_mut(key as usize)
            && join.batched
        {
            join.readable = true;
            self.enqueue(key);
        }
    }
}
