//! The time limit of a device with stopped queues.
//!
//! A VMM that pauses a VM stops the queues and starts them again later; at a reset of the guest it stops them
//! too, and not every VMM tells it from a pause by RESET_DEVICE. The connections last until the next driver
//! starts, or until the limit.
//!
//! # Invariants
//! - A device has one deadline, which each stop of a queue moves and each start cancels.

use zerosock_virtio::command;

use super::state::timers::Timer;
use super::{Context, Device, RX, TX};

impl Device {
    /// A queue for packets stops: moves the end of the connections.
    pub(super) fn begin_stop(&mut self, cx: &Context<'_>) {
        self.cancel_stop();
        if let Some(limit) = self.stop.limit {
            let at = cx.now + limit;
            self.stop.ends_at = Some(at);
            self.timers.set(at, Timer::Stopped);
        }
    }

    pub(super) fn cancel_stop(&mut self) {
        if let Some(at) = self.stop.ends_at.take() {
            self.timers.cancel(at, Timer::Stopped);
        }
    }

    /// Queue `index` has started. A driver that goes on after its connections have ended is told so.
    pub(super) fn end_stop(&mut self, index: u16, cx: &mut Context<'_>) {
        if index == RX || index == TX {
            self.cancel_stop();
        }
        // The index of this queue tells that it is not another driver.
        if index == TX && std::mem::take(&mut self.stop.has_ended) {
            self.announce_lost(cx);
        }
    }

    /// Ends the connections if the queues are still stopped.
    pub(super) fn stop_timed_out(&mut self, cx: &mut Context<'_>) {
        if self.stop.ends_at.is_none_or(|at| at > cx.now) {
            return;
        }
        self.stop.ends_at = None;
        let guests = self.guests.as_ref();
        let has_endpoints =
            guests.is_some_and(|it| it.attachments.values().any(|it| it.end.is_none()));
        if self.queues.is_command_pending() || has_endpoints {
            // The queue has not stopped yet, or guest endpoints would end with the streams of their agent.
            return self.begin_stop(cx);
        }
        let bridges = self.bridges.len() - self.lingering.len();
        let connections = bridges + self.app.flows.len();
        if self.queues.rings.rx.is_some() || self.queues.rings.tx.is_some() || connections == 0 {
            return;
        }
        tracing::info!(
            cid = %self.cid,
            connections,
            "connections ended: the VM has been paused, or without a driver, for longer than \
             --stopped-timeout"
        );
        command::forget(self, cx);
    }
}

#[cfg(test)]
#[path = "stopped_tests.rs"]
mod tests;
