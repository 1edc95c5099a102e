//! Flow control of the table: STOP and START received and sent, and their timers.

use super::DatagramTable;
use crate::addr::{Address, Cid};
use crate::time::Instant;
use crate::vsock::datagram::paused_destinations::PauseReason;
use crate::vsock::datagram::wire::Control;
use crate::wire::vsock::Repr;

impl DatagramTable {
    /// Handles a flow control packet. False: it is another packet, or not for a socket of this
    /// table.
    pub fn handle_control(&mut self, now: Instant, header: &Repr) -> bool {
        let (Some(control), true) = (Control::parse(header), header.dst.cid == self.cid) else {
            return false;
        };
        let port = header.dst.port;
        let Some(id) = self.find(port) else {
            return false;
        };
        let reason = match control {
            Control::Stop(place) => PauseReason::Full(place),
            Control::Unsupported => PauseReason::Unsupported,
            Control::Start(place) => {
                if self.paused_destinations.resume(port, header.src, place) {
                    self.wake(id.index);
                }
                return true;
            }
        };
        // Expired entries free their space, and their sockets become writable.
        self.handle_timeout(now);
        if self
            .paused_destinations
            .pause(now, port, header.src, reason)
            && let Some(socket) = self.get_mut(id)
        {
            socket.stats.stopped += 1;
            if reason == PauseReason::Unsupported {
                // The waiting sender gets the error.
                self.wake(id.index);
            }
        }
        true
    }

    /// Whether flow control packets are known to be due. Ask this first: it needs no clock.
    #[inline]
    pub fn has_control(&self) -> bool {
        self.paused_senders.is_due()
    }

    /// The next flow control packet to send, to a source for which `of` is true.
    pub fn poll_control(&mut self, now: Instant, of: impl Fn(Address) -> bool) -> Option<Repr> {
        self.paused_senders.poll(now, of)
    }

    /// The packet of the last [`poll_control`](Self::poll_control) found no buffer. It is retried,
    /// and so are those to other sources for which `same` is true: they would find no buffer
    /// either.
    pub fn retry_control(&mut self, now: Instant, same: impl Fn(Address) -> bool) {
        self.paused_senders.retry_later(now, same);
    }

    /// When to call [`handle_timeout`](Self::handle_timeout) and
    /// [`poll_control`](Self::poll_control).
    #[inline]
    pub fn poll_timeout(&self) -> Option<Instant> {
        match (
            self.paused_senders.poll_timeout(),
            self.paused_destinations.poll_timeout(),
        ) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }
    }

    /// Ends the pauses that have expired.
    pub fn handle_timeout(&mut self, now: Instant) {
        let mut ended = Vec::new();
        self.paused_destinations
            .expire(now, |port| ended.push(port));
        for port in ended {
            if let Some(id) = self.find(port) {
                self.wake(id.index);
            }
        }
    }

    /// The endpoint `cid` is gone: drops its pauses and the packets for it.
    pub fn forget(&mut self, cid: Cid) {
        self.paused_senders.forget(|address| address.cid == cid);
        self.paused_destinations
            .forget(|_, address| address.cid == cid);
        self.wake_all();
    }
}
