//! Zero-copy sends from guest memory to TCP sockets (MSG_ZEROCOPY).
//!
//! # Invariants
//! - A socket that is closed with sends in flight is reset, so that the kernel drops its references to
//!   guest memory. (A packet that a network device has queued already can still leave after that, with
//!   bytes that the guest has changed.)
//! - So is one of a process that is killed, if there may be a successor: the kernel drops the references before
//!   that one returns the buffers.
//! - No send is in flight when a queue has stopped, the memory was replaced or the driver was reset by a
//!   command: it waits for [`wait`] at most, then the connections are reset. After a disconnect, streams
//!   that had ended in order have as long.
//!
//! # Operation
//! `flush` makes the sends. `state::zero_copy` decides when, and keeps the chains that they have used up.
//! The kernel reports sends in the error queue of the socket, which an EPOLLERR announces.

use std::time::Duration;

use zerosock_proto::Instant;
use zerosock_ring::Chain;
use zerosock_virtio::poller::Readiness;
use zerosock_virtio::ring::Ring;
use zerosock_zc::notifications;

use super::Context;
use super::forwarded::{abort, set_reason};
use super::state::bridge::{Bridge, BridgePeer};
use super::state::forwarded::Forwarded;
use super::state::timers::Timer;
use super::state::zero_copy::ZeroCopySends;
use crate::device::guest_bridges::GuestBridges;

/// How long a command of the VMM waits for sends in flight: ten times as long as a target may take while its
/// sends are not copied.
fn wait(cx: &Context<'_>) -> Duration {
    cx.shared.limits.hold * 5
}

/// Age from which on a send without a report is slow.
pub(super) fn slow_from(cx: &Context<'_>) -> Duration {
    cx.shared.limits.hold / 2
}

/// The zero-copy sends of a connection by rule, if it may make any.
pub(super) fn sends_of(forwarded: &mut Option<Box<Forwarded>>) -> Option<&mut ZeroCopySends> {
    forwarded.as_mut()?.zero_copy.as_mut()
}

/// Gives a chain that is used up back to the driver, or keeps it until the sends in flight were
/// reported if they have taken bytes of it.
#[inline(always)] // saves a copy of the chain
fn complete_or_keep(
    tx: &mut Option<Ring>,
    forwarded: &mut Option<Box<Forwarded>>,
    chain: Chain,
    sent: bool,
) {
    match sends_of(forwarded).filter(|sends| sent && sends.in_flight()) {
        Some(sends) => sends.keep(chain),
        None => complete(tx, chain),
    }
}

fn complete(tx: &mut Option<Ring>, chain: Chain) {
    if let Some(tx) = tx {
        tx.complete(chain, 0);
    }
}

/// What a bridge does with the chains that it holds of `tx`.
impl Bridge {
    /// The zero-copy sends, if the bridge may make any.
    pub(super) fn sends(&mut self) -> Option<&mut ZeroCopySends> {
        sends_of(&mut self.forwarded)
    }

    /// Advances behind bytes of held chains that were sent.
    #[inline]
    pub(super) fn advance_held(&mut self, bytes: usize, zero_copy: bool, tx: &mut Option<Ring>) {
        let forwarded = &mut self.forwarded;
        self.outbound.advance_held(bytes, zero_copy, |chain, sent| {
            complete_or_keep(tx, forwarded, chain, sent);
        });
    }

    /// Copies out the held chains except the first `keep`. Returns how many bytes were copied.
    pub(super) fn spill(&mut self, keep: usize, tx: &mut Option<Ring>) -> usize {
        let Some(memory) = tx.as_ref().map(|tx| tx.queue.memory().clone()) else {
            return 0;
        };
        let forwarded = &mut self.forwarded;
        self.outbound.spill(&memory, keep, |chain, sent| {
            complete_or_keep(tx, forwarded, chain, sent);
        })
    }

    /// Drops all bytes of the guest.
    pub(super) fn clear_outbound(&mut self, tx: &mut Option<Ring>) {
        let forwarded = &mut self.forwarded;
        self.outbound
            .clear(|chain, sent| complete_or_keep(tx, forwarded, chain, sent));
    }

    /// Reads the reports of sends in flight, and gives the chains back that the kernel does not read any
    /// more.
    pub(super) fn read_reports(&mut self, tx: &mut Option<Ring>, cx: &Context<'_>) {
        let (BridgePeer::Socket { socket, .. }, Some(sends)) =
            (&self.peer, sends_of(&mut self.forwarded))
        else {
            return;
        };
        if sends.in_flight() {
            let (now, slow_from) = (cx.now, slow_from(cx));
            // Does not fail for a socket without other readers.
            let _ = notifications::read(socket, |range| sends.reported(range, now, slow_from));
        }
        while let Some(chain) = sends.pop() {
            complete(tx, chain);
        }
    }

    /// Gives all chains of a bridge that was removed back. If sends are in flight, its socket, which is
    /// closed before the driver sees that, resets the connection.
    pub(super) fn return_chains(&mut self, tx: &mut Option<Ring>, cx: &Context<'_>) {
        self.read_reports(tx, cx);
        if self.has_sends_in_flight() {
            abort(self);
            if let Some(sends) = self.sends() {
                sends.forget();
            }
            self.read_reports(tx, cx);
        } else if let (BridgePeer::Socket { socket, .. }, Some(sends)) =
            (&self.peer, sends_of(&mut self.forwarded))
            && sends.aborts
        {
            socket.close_in_order();
        }
        self.clear_outbound(tx);
    }
}

impl GuestBridges<'_, '_> {
    /// Reads the reports of sends, if `readiness` of a bridge's socket announces some. Returns the
    /// other events.
    pub(super) fn handle_reports(&mut self, key: u32, readiness: Readiness) -> Readiness {
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return readiness;
        };
        let numbered = bridge.sends().is_some_and(|sends| sends.numbered);
        if !numbered || !readiness.has_error() {
            return readiness;
        }
        bridge.read_reports(&mut self.device.queues.rings.tx, self.cx);
        if bridge.flow.is_none() {
            self.device.lingering.note_progress(key, self.cx.now);
        }
        self.update_bridge(key);
        readiness.without_error_queue()
    }

    /// Limits the time for which a command waits for sends in flight.
    pub(super) fn limit_sends(&mut self) {
        let any = self.device.bridges.have_sends_in_flight();
        self.device.sends_end_by = any.then_some(self.cx.now + wait(self.cx));
        if let Some(at) = self.device.sends_end_by {
            self.device.timers.set(at, Timer::EndSends);
        }
    }

    /// Lets a connection with sends in flight linger when its ring stops, if its stream had ended in order.
    /// Returns whether it does.
    pub(super) fn linger_without_ring(&mut self, key: u32) -> bool {
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return false;
        };
        let ended = bridge.state.has_guest_finished();
        let Some(sends) = bridge.sends().filter(|_| ended) else {
            return false;
        };
        let at = self.cx.now + wait(self.cx);
        sends.ends_by = Some(at);
        sends.forget_chains();
        self.device.timers.set(at, Timer::EndSends);
        bridge.flow.is_none() || self.linger(key)
    }

    /// Resets the connections with sends in flight that have delayed a command for too long, or that have
    /// had no ring for as long.
    pub(super) fn sends_timed_out(&mut self) {
        let past = |at: Option<Instant>| at.is_some_and(|at| at <= self.cx.now);
        let command = self.device.queues.is_command_pending() && past(self.device.sends_end_by);
        let ends = |bridge: &Bridge| {
            let forwarded = bridge.forwarded.as_ref();
            let sends = forwarded.and_then(|it| it.zero_copy.as_ref());
            sends.is_some_and(|it| it.in_flight() && (command || past(it.ends_by)))
        };
        for key in self.device.bridges.keys_where(ends) {
            if let Some(bridge) = self.device.bridges.get_mut(key) {
                set_reason(bridge, "the remote side did not acknowledge in time");
            }
            self.reset_bridge(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::net::{TcpListener, TcpStream};

    use zerosock_proto::{Address, Cid, Port};

    use super::*;
    use crate::device::host_sockets::HostSocket;
    use crate::device::lab::DeviceFixture;
    use crate::device::state::forwarded::Remote;
    use crate::routing::forward::{RuleState, ZeroCopy};

    /// Without a place among the lingering sockets, for instance.
    #[test]
    fn a_socket_that_is_closed_in_order_with_sends_in_flight_resets_its_peer() {
        for in_flight in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut peer, from) = listener.accept().unwrap();
            let mut lab = DeviceFixture::new();
            let key = lab.ready();
            let (device, mut cx) = lab.lend();
            let permit = device.account.take_descriptors(1).unwrap();
            let endpoint = Address::new(Cid::new(3), Port::new(1));
            let admitted = RuleState::new("rule".into(), None, None).admit().unwrap();
            let mut forwarded =
                Forwarded::new(admitted, endpoint, Remote::Client(Some(from)), None)
                    .with_zero_copy(ZeroCopy::Always);
            if in_flight {
                forwarded.zero_copy.as_mut().unwrap().sent(Instant::ZERO);
            }
            let bridge = device.bridges.get_mut(key).unwrap();
            bridge.forwarded = Some(Box::new(forwarded));
            bridge.peer = BridgePeer::Socket {
                socket: HostSocket::tcp(socket.into(), permit),
                ok: None,
            };
            drop(device.bridges_with(&mut cx).remove_bridge(key));
            match peer.read(&mut [0; 1]) {
                Ok(0) => assert!(!in_flight),
                Err(error) => assert!(in_flight && error.kind() == ErrorKind::ConnectionReset),
                Ok(_) => panic!("a byte"),
            }
        }
    }
}
