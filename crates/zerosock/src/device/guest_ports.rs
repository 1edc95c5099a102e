//! The two ports of the host that a VM with guest endpoints has: its kernel's connections to them are looked up nowhere
//! else.

use rustix::net::{AddressFamily, SocketFlags, SocketType as SocketKind, socketpair};
use zerosock_proto::vsock::FlowId;
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Port};
use zerosock_sys::{PeerFd, fd_passing};

use super::guest_orders::GuestEvent;
use super::state::bridge::BridgePeer;
use super::{Context, Device};
use crate::device::guest_bridges::GuestBridges;
use crate::device::host_sockets::{HostSocket, Refusal};
use crate::registration::{DOORBELL_PORT, REGISTRATION_PORT};
use crate::stats::RefusalCause;

/// The first port that processes without CAP_NET_BIND_SERVICE can connect from.
const UNPRIVILEGED: Port = Port::new(1024);

/// Whether a VM with guest endpoints has this port of the host for them.
#[inline]
pub(super) fn is_guest_port(port: Port) -> bool {
    port == REGISTRATION_PORT || port == DOORBELL_PORT
}

impl Device {
    /// The guest's kernel connects to one of the ports.
    #[cold]
    pub(super) fn open_guest_port(
        &mut self,
        flow: FlowId,
        port: Port,
        peer: Address,
        socket_type: SocketType,
        cx: &mut Context<'_>,
    ) {
        let reason = match port == DOORBELL_PORT {
            _ if socket_type != SocketType::Stream => Some("it is no stream"),
            true if !self.awaits_doorbell() => Some("no guest endpoint waits for its doorbell"),
            false if peer.port >= UNPRIVILEGED => {
                Some("only processes with a port below 1024 may register guest endpoints")
            }
            _ => None,
        };
        if let Some(reason) = reason {
            cx.shared.counters.refuse(RefusalCause::Denied);
            tracing::debug!(cid = %self.cid, %peer, reason, "connection of the guest refused");
            // Fails if the flow has ended.
            let _ = self.shard.reject(flow);
            return;
        }
        let mut bridges = self.bridges_with(cx);
        if !bridges.reserve_bridge(flow) {
            return bridges.cx.shared.counters.refuse(RefusalCause::Limit);
        }
        match port == DOORBELL_PORT {
            true => bridges.accept_doorbell(flow),
            false => bridges.open_registration(flow),
        }
    }
}

impl GuestBridges<'_, '_> {
    /// Joins the flow to one end of a socket pair. The control thread gets the other.
    fn open_registration(&mut self, flow: FlowId) {
        let key = self.add_bridge(flow, BridgePeer::Asked(None));
        let (socket, control) = match self.registration_pair() {
            Ok(pair) => pair,
            Err(error) => return self.refuse(key, &Refusal::from(error)),
        };
        self.host_connected(key, socket);
        if self.device.bridges.get(key).is_some() {
            self.device.report_guest(GuestEvent::Stream(control));
        }
    }

    fn registration_pair(&self) -> std::io::Result<(HostSocket, PeerFd)> {
        let account = &self.device.account;
        let permit = || account.take_descriptors(1).map_err(std::io::Error::other);
        let (ours, theirs) = (permit()?, permit()?);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, control) = socketpair(AddressFamily::UNIX, SocketKind::STREAM, flags, None)?;
        fd_passing::refuse_rights(&socket)?;
        let socket = HostSocket::unix(socket, ours, SocketKind::STREAM);
        Ok((socket, PeerFd::from(control).with_permit(theirs)))
    }
}
