//! What is due without an event.

use std::time::{Duration, Instant};

use super::{Front, Vm};
use crate::stats::FrontendFault;

/// How long a front-end that has sent no message keeps another one waiting.
pub(super) const SILENCE: Duration = Duration::from_secs(10);
/// How long a front-end may leave a reply unread.
pub(super) const REPLY_LIMIT: Duration = Duration::from_secs(10);

impl Vm {
    /// When [`Vm::time_passed`] is to be called next: accepting resumes, a silent front-end gives
    /// way to another one, a reply has not been read for too long, or a driver has had the time to put
    /// a buffer into its queues.
    pub(in super::super) fn deadline(&self) -> Option<Instant> {
        let deadlines = [
            self.front_deadline(),
            self.driver_deadline(),
            self.accept_paused_until,
        ];
        deadlines.into_iter().flatten().min()
    }

    fn front_deadline(&self) -> Option<Instant> {
        let Front::Live(connection) = &self.front else {
            return None;
        };
        match &self.next {
            Some(_) if !connection.has_sent_message => Some(connection.read_since? + SILENCE),
            _ => Some(connection.stalled_since? + REPLY_LIMIT),
        }
    }

    /// Resumes accepting if it is due. Closes the connection of a front-end that has been silent
    /// for too long while another one waits, or that has not read a reply for too long. The latter
    /// may have sent its own end of the connection in a message that is not read: then the
    /// connection stays open although the front-end has exited.
    pub(in super::super) fn time_passed(&mut self, now: Instant) {
        if self.accept_paused_until.is_some_and(|until| now >= until) {
            self.accept_paused_until = None;
        }
        if self.driver_deadline().is_some_and(|at| now >= at) {
            self.check_first_buffer();
        }
        if let Front::Live(connection) = &self.front
            && let Some(since) = connection.stalled_since
            && now >= since + REPLY_LIMIT
        {
            self.counters.fault(FrontendFault::Silent);
            return self.disconnect("the front-end does not read a reply");
        }
        let is_due = |vm: &Vm| vm.front_deadline().is_some_and(|at| now >= at);
        if is_due(self) {
            // It may have sent a message since the socket was read last.
            self.serve();
        }
        if is_due(self) {
            self.counters.fault(FrontendFault::Silent);
            self.disconnect("the front-end has sent no message, and another one waits");
        }
    }
}
