//! Handshakes of hybrid vsock: host programs send a CONNECT line before their first byte.

use super::Context;
use super::state::timers::Timer;
use super::virtio::HANDSHAKE;
use crate::device::guest_bridges::GuestBridges;
use crate::device::host_sockets::HostSocket;
use crate::device::host_sockets::hybrid::{self, Line};
use crate::device::state::host::{Caller, Handshake};
use crate::stats::RefusalCause;
use zerosock_proto::wire::vsock::SocketType;
use zerosock_virtio::poller::{Interest, Readiness, Token};

impl GuestBridges<'_, '_> {
    pub(super) fn begin_handshake(&mut self, socket: HostSocket, socket_type: SocketType) {
        // Most programs have sent the line already: such a socket is added to the poller once, as a
        // bridge's.
        let line = hybrid::read_line(&socket, socket_type);
        if line != Line::Partial {
            return self.end_handshake(socket, socket_type, line, false);
        }
        let limit = self.cx.shared.limits.handshakes;
        if self.device.handshakes.len() >= limit {
            self.cx.shared.counters.refuse(RefusalCause::Limit);
            return self.device.warn(&format!(
                "host program refused: {limit} others have not sent their CONNECT lines yet"
            ));
        }
        let deadline = self.cx.now + self.cx.shared.limits.handshake;
        let entry = self.device.handshakes.vacant_entry();
        let key = entry.key() as u32;
        let token = Token {
            device: self.device.addr.number,
            kind: HANDSHAKE,
            key,
        };
        // Bytes that have arrived since the line was read are reported.
        if let Err(error) = self.cx.poller.add(&socket, token, Interest::ReadUntilEnd) {
            self.device.warn(&format!(
                "cannot add a host program's socket to the poller: {error}"
            ));
            return;
        }
        entry.insert(Handshake {
            socket,
            socket_type,
            deadline,
        });
        self.device.timers.set(deadline, Timer::Handshake(key));
    }

    /// Handles bytes from a host program with an incomplete CONNECT line, and its end.
    pub(crate) fn handshake_ready(&mut self, key: u32, readiness: Readiness) {
        let Some(handshake) = self.device.handshakes.get(key as usize) else {
            return;
        };
        let line = match hybrid::read_line(&handshake.socket, handshake.socket_type) {
            // No byte follows those that were read: the peek does not consume them, so it never
            // returns 0 for the end of file behind them.
            Line::Partial if readiness.peer_finished() => Line::CLOSED,
            line => line,
        };
        if line != Line::Partial {
            let done = self.device.handshakes.remove(key as usize);
            self.device
                .timers
                .cancel(done.deadline, Timer::Handshake(key));
            self.end_handshake(done.socket, done.socket_type, line, true);
        }
    }

    /// Connects the program that has sent this line, or refuses it. `watched`: its socket is in the
    /// poller.
    fn end_handshake(
        &mut self,
        socket: HostSocket,
        socket_type: SocketType,
        line: Line,
        watched: bool,
    ) {
        match line {
            Line::Connect(to) => {
                let caller = Caller {
                    socket,
                    socket_type,
                    to,
                    wants_ok: true,
                    forwarded: None,
                };
                self.call_guest(caller, watched);
            }
            Line::Bad(reason) => {
                if watched {
                    forget_handshake(&socket, self.cx);
                }
                tracing::debug!(cid = %self.device.cid, reason, "host program refused: bad CONNECT line");
                self.cx.shared.counters.bad_handshakes.add(1);
            }
            Line::Partial => {}
        }
    }

    pub(super) fn handshake_timed_out(&mut self, key: u32) {
        let due = self
            .device
            .handshakes
            .get(key as usize)
            .is_some_and(|h| h.deadline <= self.cx.now);
        if due {
            let handshake = self.device.handshakes.remove(key as usize);
            forget_handshake(&handshake.socket, self.cx);
            tracing::debug!(cid = %self.device.cid, "host program refused: no CONNECT line in time");
            self.cx.shared.counters.bad_handshakes.add(1);
        }
    }
}

/// Removes a handshake's socket from the poller before it is dropped.
pub(super) fn forget_handshake(socket: &HostSocket, cx: &Context<'_>) {
    if socket.is_closed_later() {
        // An event of the open socket would be attributed to the next handshake with this key.
        cx.poller.remove(socket);
    }
}

#[cfg(test)]
#[path = "handshakes_tests.rs"]
mod tests;
