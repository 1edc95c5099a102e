//! Host programs that connect to the guest.

use zerosock_proto::vsock::{FlowId, QueuePairs};
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_virtio::poller::Interest;

use super::handshakes::forget_handshake;
use super::state::bridge::BridgePeer;
use super::state::guest_backlogs::GuestConnect;
use super::virtio::BRIDGE;
use super::{Context, Device};
use crate::device::host_sockets::hybrid::OkConvention;
use crate::device::state::host::Caller;
use crate::device::state::sibling_message::SiblingMessage;
use crate::stats::RefusalCause;

impl Device {
    /// Connects a host program to the guest, at the queue pair to which the connection belongs.
    /// `watched`: the program's socket is in the poller.
    pub(super) fn call_guest(&mut self, caller: Caller, watched: bool, cx: &mut Context<'_>) {
        let guest = Address::new(self.cid, caller.to);
        if self.queue_pairs.used == QueuePairs::ONE {
            return self.connect_guest(caller, Port::ANY, watched, cx);
        }
        let local = Address::new(Cid::HOST, self.shard.spare_port());
        match self.queue_pair_for(guest, local) {
            Some(queue_pair) => {
                if watched {
                    cx.poller.remove(&caller.socket);
                }
                let (caller, local) = (Box::new(caller), local.port);
                cx.outbox
                    .send(queue_pair, SiblingMessage::Call { caller, local });
            }
            None => self.connect_guest(caller, local.port, watched, cx),
        }
    }

    /// Connects a host program to the guest, from port `local`. On failure the socket is closed,
    /// which tells the program.
    pub(super) fn connect_guest(
        &mut self,
        caller: Caller,
        local: Port,
        watched: bool,
        cx: &mut Context<'_>,
    ) {
        let Some(caller) = self.wait_for_listener(caller, watched, cx) else {
            return;
        };
        let deadline = cx.now + cx.shared.limits.connect;
        self.try_guest_connect(caller, local, watched, deadline, cx);
    }

    /// Sends the guest the request of a program, which it has to answer before `deadline`. Returns the
    /// flow, or `None` if the program is refused.
    pub(super) fn try_guest_connect(
        &mut self,
        caller: Caller,
        local: Port,
        watched: bool,
        deadline: Instant,
        cx: &mut Context<'_>,
    ) -> Option<FlowId> {
        let Some(flow) = self.begin_connect(&caller, local, cx) else {
            if watched {
                forget_handshake(&caller.socket, cx);
            }
            if let Some(forwarded) = &caller.forwarded {
                self.refuse_forwarded(forwarded, "its endpoint cannot be connected to");
            }
            caller.socket.abort();
            return None;
        };
        let Caller {
            socket,
            socket_type,
            to: port,
            wants_ok,
            forwarded,
        } = caller;
        let left = deadline.saturating_duration_since(cx.now);
        // Fails if the flow has ended.
        let _ = self.shard.set_connect_timeout(cx.now, flow, left);
        let connect = GuestConnect {
            to: port,
            socket_type,
            wants_ok,
            deadline,
        };
        self.await_answer(flow, connect);
        let given = self.shard.flow(flow).map_or(port, |f| f.local.port);
        let ok = wants_ok.then_some(match cx.shared.limits.ok {
            OkConvention::GuestPort => port,
            OkConvention::HostPort => given,
        });
        let key = self.add_bridge(flow, BridgePeer::Socket { socket, ok }, cx);
        let token = self.token(BRIDGE, key);
        let bridge = self.bridges.get_mut(key)?;
        bridge.forwarded = forwarded;
        let BridgePeer::Socket { socket, .. } = &bridge.peer else {
            return None;
        };
        let watched = match watched {
            true => cx.poller.change(socket, token, Interest::Incoming),
            false => cx.poller.add(socket, token, Interest::Incoming),
        };
        if let Err(error) = watched {
            self.warn(&format!(
                "cannot add a host program's socket to the poller: {error}"
            ));
            self.reset_bridge(key, cx);
            return None;
        }
        Some(flow)
    }

    /// Sends the guest a request of a host program. `None`: the program is refused.
    fn begin_connect(
        &mut self,
        caller: &Caller,
        local: Port,
        cx: &mut Context<'_>,
    ) -> Option<FlowId> {
        let port = caller.to;
        if !self.accepts_requests() {
            cx.shared.counters.refuse(RefusalCause::Unreachable);
            tracing::debug!(cid = %self.cid, %port, "host program refused: no driver runs");
            return None;
        }
        let peer = Address {
            cid: self.cid,
            port,
        };
        let local = Address::new(Cid::HOST, self.port_here(local, peer));
        // A client of a rule is connected to a service by the port that it has claimed.
        let service = self.service.is_some()
            && caller.forwarded.is_some()
            && cx.shared.routes.service(port) == Some(self.queue_pairs.first());
        if !service && let Err(denial) = cx.shared.routes.admit(Cid::HOST, peer) {
            self.deny(local, peer, denial, cx);
            return None;
        }
        match self.shard.connect(cx.now, local, peer, caller.socket_type) {
            Ok(flow) => {
                if !self.reserve_bridge(flow, cx) {
                    return None;
                }
                self.log_flow(flow, "connection requested");
                Some(flow)
            }
            Err(error) => {
                cx.shared.counters.refuse(error.into());
                self.warn(&format!(
                    "cannot connect to port {port} of the guest: {error}"
                ));
                None
            }
        }
    }
}
