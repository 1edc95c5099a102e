//! The listening sockets of a device on the host.

use std::time::Duration;

use rustix::io::Errno;
use rustix::net::SocketFlags;
use zerosock_sys::PeerFd;
use zerosock_virtio::poller::Interest;

use super::state::timers::Timer;
use super::virtio::LISTENER;
use super::{Context, Device};
use crate::device::guest_bridges::GuestBridges;
use crate::device::host_sockets::HostSocket;
use crate::device::state::host::Caller;
use crate::stats::RefusalCause;

/// Pause after an accept that failed for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Pause before a successor looks again whether the queues run.
const QUEUES_PAUSE: Duration = Duration::from_millis(1);

/// Connections accepted per call.
const ACCEPT_BUDGET: usize = 64;

impl GuestBridges<'_, '_> {
    /// Adds the listeners to the poller. The worker that owns the device calls it once.
    pub(crate) fn listen(&mut self) -> std::io::Result<()> {
        for (key, listener) in self.device.host.listeners() {
            let token = self.device.token(LISTENER, key);
            self.cx.poller.add(listener.socket, token, Interest::Read)?;
        }
        Ok(())
    }

    /// Accepts pending connections of a listener, up to a budget.
    pub(crate) fn accept(&mut self, key: u32) {
        if self.device.awaits_queues(self.cx.now) {
            let next = self.cx.now + QUEUES_PAUSE;
            return self.device.timers.set(next, Timer::Accept(key));
        }
        self.take_accepted();
        if self.device.account.is_clogged() {
            // Closes of this account's earlier sockets are stuck: accept no more for now.
            self.device
                .timers
                .set(self.cx.now + ACCEPT_PAUSE, Timer::Accept(key));
            return;
        }
        for _ in 0..ACCEPT_BUDGET {
            let Some(listener) = self.device.host.listener(key) else {
                return;
            };
            let (socket_type, port) = (listener.socket_type, listener.port);
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match rustix::net::accept_with(listener.socket, flags) {
                Ok(socket) => match (port, self.device.account.take_descriptors(1)) {
                    (_, Err(exceeded)) => {
                        // No HostSocket was made of it yet, so its close waits for the program
                        // only if descriptors are queued in it.
                        drop(PeerFd::from(socket).owned_by(&self.device.account));
                        self.cx.shared.counters.refuse(RefusalCause::Limit);
                        self.device
                            .warn(&format!("host program refused: {exceeded}"));
                    }
                    (None, Ok(permit)) => {
                        let socket = HostSocket::accepted(socket, permit);
                        self.begin_handshake(socket, socket_type);
                    }
                    (Some(port), Ok(permit)) => {
                        let socket = HostSocket::vsock(socket, permit);
                        let caller = Caller {
                            socket,
                            socket_type,
                            to: port,
                            wants_ok: false,
                            forwarded: None,
                        };
                        self.call_guest(caller, false);
                    }
                },
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(e) => {
                    // Most likely out of descriptors. The edge is used up: retry after a pause.
                    self.device.warn(&format!(
                        "cannot accept a connection of a host program: {e}"
                    ));
                    self.device
                        .timers
                        .set(self.cx.now + ACCEPT_PAUSE, Timer::Accept(key));
                    return;
                }
            }
        }
        // There may be more and the edge is used up: continue in the next turn.
        let next = self.cx.now + Duration::from_nanos(1);
        self.device.timers.set(next, Timer::Accept(key));
    }
}

impl Device {
    /// Removes the listeners from the poller. The reaper closes them later; until then they would
    /// be reported again and again.
    pub(super) fn stop_listening(&self, cx: &Context<'_>) {
        for (_, listener) in self.host.listeners() {
            cx.poller.remove(listener.socket);
        }
    }
}
