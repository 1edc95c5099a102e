//! Host programs that connect to the guest.

use crate::device::guest_bridges::GuestBridges;
use zerosock_proto::vsock::{FlowId, QueuePairs};
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_virtio::poller::Interest;

use super::handshakes::forget_handshake;
use super::state::bridge::BridgePeer;
use super::state::guest_backlogs::GuestConnect;
use super::virtio::BRIDGE;
use crate::device::host_sockets::hybrid::OkConvention;
use crate::device::state::host::Caller;
use crate::device::state::sibling_message::SiblingMessage;
use crate::stats::RefusalCause;

impl GuestBridges<'_, '_> {
    /// Connects a host program to the guest, at the queue pair to which the connection belongs.
    /// `watched`: the program's socket is in the poller.
    pub(super) fn call_guest(&mut self, caller: Caller, watched: bool) {
        let guest = Address::new(self.device.cid, caller.to);
        if self.device.queue_pairs.used == QueuePairs::ONE {
            return self.connect_guest(caller, Port::ANY, watched);
        }
        let local = Address::new(Cid::HOST, self.device.shard.spare_port());
        match self.device.queue_pair_for(guest, local) {
            Some(queue_pair) => {
                if watched {
                    self.cx.poller.remove(&caller.socket);
                }
                let (caller, local) = (Box::new(caller), local.port);
                self.cx
                    .outbox
                    .send(queue_pair, SiblingMessage::Call { caller, local });
            }
            None => self.connect_guest(caller, local.port, watched),
        }
    }

    /// Connects a host program to the guest, from port `local`. On failure the socket is closed,
    /// which tells the program.
    pub(super) fn connect_guest(&mut self, caller: Caller, local: Port, watched: bool) {
        let Some(caller) = self.wait_for_listener(caller, watched) else {
            return;
        };
        let deadline = self.cx.now + self.cx.shared.limits.connect;
        self.try_guest_connect(caller, local, watched, deadline);
    }

    /// Sends the guest the request of a program, which it has to answer before `deadline`. Returns the
    /// flow, or `None` if the program is refused.
    pub(super) fn try_guest_connect(
        &mut self,
        caller: Caller,
        local: Port,
        watched: bool,
        deadline: Instant,
    ) -> Option<FlowId> {
        let Some(flow) = self.begin_connect(&caller, local) else {
            if watched {
                forget_handshake(&caller.socket, self.cx);
            }
            if let Some(forwarded) = &caller.forwarded {
                self.device
                    .refuse_forwarded(forwarded, "its endpoint cannot be connected to");
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
        let left = deadline.saturating_duration_since(self.cx.now);
        // Fails if the flow has ended.
        let _ = self
            .device
            .shard
            .set_connect_timeout(self.cx.now, flow, left);
        let connect = GuestConnect {
            to: port,
            socket_type,
            wants_ok,
            deadline,
        };
        self.await_answer(flow, connect);
        let given = self.device.shard.flow(flow).map_or(port, |f| f.local.port);
        let ok = wants_ok.then_some(match self.cx.shared.limits.ok {
            OkConvention::GuestPort => port,
            OkConvention::HostPort => given,
        });
        let key = self.add_bridge(flow, BridgePeer::Socket { socket, ok });
        let token = self.device.token(BRIDGE, key);
        let bridge = self.device.bridges.get_mut(key)?;
        bridge.forwarded = forwarded;
        let BridgePeer::Socket { socket, .. } = &bridge.peer else {
            return None;
        };
        let watched = match watched {
            true => self.cx.poller.change(socket, token, Interest::Incoming),
            false => self.cx.poller.add(socket, token, Interest::Incoming),
        };
        if let Err(error) = watched {
            self.device.warn(&format!(
                "cannot add a host program's socket to the poller: {error}"
            ));
            self.reset_bridge(key);
            return None;
        }
        Some(flow)
    }

    /// Sends the guest a request of a host program. `None`: the program is refused.
    fn begin_connect(&mut self, caller: &Caller, local: Port) -> Option<FlowId> {
        let port = caller.to;
        if !self.device.accepts_requests() {
            self.cx.shared.counters.refuse(RefusalCause::Unreachable);
            tracing::debug!(cid = %self.device.cid, %port, "host program refused: no driver runs");
            return None;
        }
        let peer = Address {
            cid: self.device.cid,
            port,
        };
        let local = Address::new(Cid::HOST, self.device.port_here(local, peer));
        // A client of a rule is connected to a service by the port that it has claimed.
        let service = self.device.service.is_some()
            && caller.forwarded.is_some()
            && self.cx.shared.routes.service(port) == Some(self.device.queue_pairs.first());
        if !service && let Err(denial) = self.cx.shared.routes.admit(Cid::HOST, peer) {
            self.device.deny(local, peer, denial, self.cx);
            return None;
        }
        match self
            .device
            .shard
            .connect(self.cx.now, local, peer, caller.socket_type)
        {
            Ok(flow) => {
                if !self.reserve_bridge(flow) {
                    return None;
                }
                self.device.log_flow(flow, "connection requested");
                Some(flow)
            }
            Err(error) => {
                self.cx.shared.counters.refuse(error.into());
                self.device.warn(&format!(
                    "cannot connect to port {port} of the guest: {error}"
                ));
                None
            }
        }
    }
}
