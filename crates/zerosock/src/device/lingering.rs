//! Connections that have ended before the host program has read all bytes of the guest.
//!
//! The flow has ended; the socket stays open until the program has taken the bytes, as a kernel
//! socket does after close(2). A socket that takes no byte for
//! [`Limits::linger`](super::Limits::linger) is closed, and the bytes are lost.

use super::forwarded::set_reason;
use crate::device::guest_bridges::GuestBridges;

impl GuestBridges<'_, '_> {
    /// Closes the sockets of programs that have taken nothing for too long.
    pub(super) fn linger_timed_out(&mut self) {
        let limit = self.cx.shared.limits.linger;
        for key in self.device.lingering.due(self.cx.now, limit) {
            self.cx.shared.counters.linger_timeouts.add(1);
            tracing::debug!(
                cid = %self.device.cid,
                "host socket closed: the program did not take the last bytes in time"
            );
            if let Some(bridge) = self.device.bridges.get_mut(key) {
                set_reason(bridge, "the remote side did not take the last bytes");
            }
            self.end_bridge(key);
        }
        self.device
            .lingering
            .recheck(limit, &mut self.device.timers);
    }
}
