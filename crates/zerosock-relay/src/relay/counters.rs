//! What a relay has done: counted by each worker for itself, and added up when it is asked for.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a relay has done since its start, and does now.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct RelayStats {
    /// Connections that were accepted or made, and associations of datagrams.
    pub opened: u64,
    /// Those that exist now.
    pub open: u64,
    /// Connections that were closed at once, and datagrams of new senders that were dropped, because as
    /// many as are allowed existed.
    pub refused: u64,
    /// Connections for which the target could not be reached.
    pub unreachable: u64,
    /// Connections that ended because a socket failed, by a reset for instance.
    pub failed: u64,
    /// Connections and associations that ended because nothing was sent for the idle time-out.
    pub idle: u64,
    /// Associations that ended because there was no room for a new sender.
    pub replaced: u64,
    /// Connections and associations whose sockets the kernel joined (way sockmap).
    pub joined: u64,
    /// Bytes that were delivered to the target's side.
    pub bytes_to_target: u64,
    /// Bytes that were delivered to the source's side.
    pub bytes_to_source: u64,
    /// Messages that were dropped: too long, refused, or without room at the receiver.
    pub dropped: u64,
}

/// The counters of one worker. On cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct WorkerCounters {
    pub(super) opened: Counter,
    pub(super) ended: Counter,
    pub(super) refused: Counter,
    pub(super) unreachable: Counter,
    pub(super) failed: Counter,
    pub(super) idle: Counter,
    pub(super) replaced: Counter,
    pub(super) joined: Counter,
    /// To the target, and to the source.
    pub(super) bytes: [Counter; 2],
    pub(super) dropped: Counter,
}

impl WorkerCounters {
    /// Adds what was moved between two sums of a pair or of associations.
    pub(super) fn add_bytes(&self, before: [u64; 2], after: [u64; 2]) {
        for (end, counter) in self.bytes.iter().enumerate() {
            counter.add(after[end] - before[end]);
        }
    }
}

/// A number that one thread changes and others read.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    /// Adds to the number. Only one thread does.
    #[inline]
    pub(super) fn add(&self, more: u64) {
        // Relaxed: a number without relation to other memory.
        let sum = self.0.load(Ordering::Relaxed).wrapping_add(more);
        self.0.store(sum, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl RelayStats {
    pub(super) fn sum<'a>(counters: impl IntoIterator<Item = &'a WorkerCounters>) -> RelayStats {
        let mut sum = RelayStats::default();
        for one in counters {
            // In this order: a connection that ends meanwhile does not make the difference negative.
            let ended = one.ended.get();
            let opened = one.opened.get();
            sum.opened += opened;
            sum.open += opened.saturating_sub(ended);
            sum.refused += one.refused.get();
            sum.unreachable += one.unreachable.get();
            sum.failed += one.failed.get();
            sum.idle += one.idle.get();
            sum.replaced += one.replaced.get();
            sum.joined += one.joined.get();
            sum.bytes_to_target += one.bytes[0].get();
            sum.bytes_to_source += one.bytes[1].get();
            sum.dropped += one.dropped.get();
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counters_of_all_workers_are_added_up() {
        let workers = [WorkerCounters::default(), WorkerCounters::default()];
        workers[0].opened.add(3);
        workers[1].opened.add(2);
        workers[0].ended.add(1);
        workers[1].bytes[0].add(7);
        workers[1].bytes[1].add(5);
        let sum = RelayStats::sum(&workers);
        assert_eq!((sum.opened, sum.open), (5, 4));
        assert_eq!((sum.bytes_to_target, sum.bytes_to_source), (7, 5));
    }
}
