//! What the table hears and says of the flow control, and when.

use super::DatagramTable;
use crate::addr::{Address, Cid};
use crate::time::Instant;
use crate::vsock::datagram::paused_destinations::PauseReason;
use crate::vsock::datagram::wire::Control;
use crate::wire::vsock::Repr;

impl DatagramTable {
    /// Takes a word of the flow control. False: it is none, or about no socket of ours.
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
        // What is over makes room, and who waits for it is named.
        self.handle_timeout(now);
        if self
            .paused_destinations
            .pause(now, port, header.src, reason)
            && let Some(socket) = self.get_mut(id)
        {
            socket.stats.stopped += 1;
            if reason == PauseReason::Unsupported {
                // Who waits is to hear of it.
                self.wake(id.index);
            }
        }
        true
    }

    /// Whether packets of the flow control are known to be due: to be asked first, as it needs no
    /// clock.
    #[inline]
    pub fn has_control(&self) -> bool {
        self.paused_senders.is_due()
    }

    /// The next packet of the flow control to be sent, of those to a source of which `consume` says so.
    pub fn poll_control(&mut self, now: Instant, of: impl Fn(Address) -> bool) -> Option<Repr> {
        self.paused_senders.poll(now, of)
    }

    /// The packet of the last [`poll_control`](Self::poll_control) found no buffer: it comes again
    /// soon, with those to others of whom `same` says that they would not find any either.
    pub fn retry_control(&mut self, now: Instant, same: impl Fn(Address) -> bool) {
        self.paused_senders.retry_later(now, same);
    }

    /// When [`handle_timeout`](Self::handle_timeout) and [`poll_control`](Self::poll_control) have
    /// something to do.
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

    /// Ends paused_destinations whose time is over.
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

    /// An endpoint is gone: nothing is to be said to it, and nobody waits for it.
    pub fn forget(&mut self, cid: Cid) {
        self.paused_senders.forget(|address| address.cid == cid);
        self.paused_destinations
            .forget(|_, address| address.cid == cid);
        self.wake_all();
    }
}
