//! Connections that have ended before the host program has read all bytes of the guest.
//!
//! # Invariants
//! - A bridge is listed exactly while it exists and has no flow.
//! - While the list is not empty there is one timer, at `look_at`.
//!
//! # Operation
//! The flow has ended; the socket stays open until the program has taken the bytes, as a kernel
//! socket does after close(2). A socket that takes no byte for
//! [`Limits::linger`](super::Limits::linger) is closed, and the bytes are lost.

use zerosock_proto::Instant;

use super::forwarded::set_reason;
use super::state::timers::Timer;
use super::{Context, Device};

impl Device {
    /// Registers a bridge after its flow has ended.
    pub(super) fn start_lingering(&mut self, key: u32, cx: &Context<'_>) {
        self.lingering.last_progress.insert(key, cx.now);
        if self.lingering.look_at.is_none() {
            self.look_at_lingering(cx.now + cx.shared.limits.linger);
        }
    }

    /// Records that the program has taken bytes of a lingering bridge.
    pub(super) fn note_lingering_progress(&mut self, key: u32, cx: &Context<'_>) {
        if let Some(last) = self.lingering.last_progress.get_mut(&key) {
            *last = cx.now;
        }
    }

    /// Unregisters a bridge that was removed.
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
        let limit = cx.shared.limits.linger;
        let due = |(&key, &last): (&u32, &Instant)| (last + limit <= cx.now).then_some(key);
        let keys: Vec<u32> = self
            .lingering
            .last_progress
            .iter()
            .filter_map(due)
            .collect();
        for key in keys {
            cx.shared.counters.linger_timeouts.add(1);
            tracing::debug!(
                cid = %self.cid,
                "host socket closed: the program did not take the last bytes in time"
            );
            if let Some(bridge) = self.bridges.get_mut(key as usize) {
                set_reason(bridge, "the remote side did not take the last bytes");
            }
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
