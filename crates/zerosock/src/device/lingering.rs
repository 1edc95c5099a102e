//! Connections that have ended while the host program has not read all that the guest had sent.
//!
//! The vsock half is gone; the socket stays open until the program has taken the bytes, as a
//! kernel socket does after its owner has closed it. One that takes nothing for as long as
//! [`Limits::linger`](super::Limits::linger) says is closed, and the bytes are lost.
//!
//! # Invariants
//! - A bridge is listed exactly while it exists and has no flow.
//! - While the list is not empty there is one timer, at `look_at`.

use std::collections::BTreeMap;

use zerosock_proto::Instant;

use super::timers::Timer;
use super::{Context, Device};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Lingering {
    /// By the bridge's key: when its program last took bytes, or when the connection ended.
    last_progress: BTreeMap<u32, Instant>,
    look_at: Option<Instant>,
}

impl Lingering {
    pub(super) fn len(&self) -> usize {
        self.last_progress.len()
    }
}

impl Device {
    /// A bridge has been parted from its flow.
    pub(super) fn start_lingering(&mut self, key: u32, cx: &Context<'_>) {
        self.lingering.last_progress.insert(key, cx.now);
        if self.lingering.look_at.is_none() {
            self.look_at_lingering(cx.now + cx.limits.linger);
        }
    }

    /// The program has taken bytes of a bridge that lingers.
    pub(super) fn note_lingering_progress(&mut self, key: u32, cx: &Context<'_>) {
        if let Some(last) = self.lingering.last_progress.get_mut(&key) {
            *last = cx.now;
        }
    }

    /// A bridge without a flow was removed.
    pub(super) fn stop_lingering(&mut self, key: u32) {
        self.lingering.last_progress.remove(&key);
        if self.lingering.last_progress.is_empty()
            && let Some(at) = self.lingering.look_at.take()
        {
            self.timers.cancel(at, Timer::Linger);
        }
    }

    /// Closes the sockets of programs that have taken nothing for too long.
    pub(super) fn linger_timed_out(&mut self, cx: &mut Context<'_>) {
        self.lingering.look_at = None;
        let limit = cx.limits.linger;
        let due = |(&key, &last): (&u32, &Instant)| (last + limit <= cx.now).then_some(key);
        let keys: Vec<u32> = self
            .lingering
            .last_progress
            .iter()
            .filter_map(due)
            .collect();
        for key in keys {
            cx.counters.linger_timeouts.add(1);
            tracing::debug!(cid = %self.cid, "a host program did not take the last bytes in time");
            self.end_bridge(key, cx);
        }
        if let Some(&oldest) = self.lingering.last_progress.values().min() {
            self.look_at_lingering(oldest + limit);
        }
    }

    fn look_at_lingering(&mut self, at: Instant) {
        self.lingering.look_at = Some(at);
        self.timers.set(at, Timer::Linger);
    }
}
