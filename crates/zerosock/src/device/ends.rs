//! Ends of a guest's connection, as the other end of its bridge sees them.

use super::Context;
use super::forwarded::abort;
use super::sibling;
use super::state::bridge::{Bridge, BridgePeer};
use crate::device::host_sockets;
use crate::device::state::sibling_message::SiblingMessage;

/// Passes the end of the guest's stream on to the other end.
pub(super) fn end_host(bridge: &Bridge, cx: &mut Context<'_>) {
    match &bridge.peer {
        BridgePeer::Socket { socket, .. } => {
            // Fails only if the host has gone.
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
        }
        BridgePeer::Sibling(s) => {
            let (to, receive, send) = (s.peer.flow, false, true);
            let message = SiblingMessage::Shutdown { to, receive, send };
            cx.outbox.send(s.peer.device, message);
        }
        _ => {}
    }
}

/// Informs the other end that the guest receives no more, and drops its bytes. The next write of a host
/// program fails with EPIPE.
pub(super) fn stop_host(bridge: &mut Bridge, cx: &mut Context<'_>) {
    match &mut bridge.peer {
        BridgePeer::Socket { socket, .. } => host_sockets::stop_reading(socket),
        BridgePeer::Sibling(s) => {
            sibling::return_inbound(s, true, cx);
            let (to, receive, send) = (s.peer.flow, true, false);
            let message = SiblingMessage::Shutdown { to, receive, send };
            cx.outbox.send(s.peer.device, message);
        }
        _ => {}
    }
}

/// Ends the other side of a bridge that was removed: in order, or by a reset.
pub(super) fn end_other_side(bridge: &Bridge, orderly: bool, cx: &mut Context<'_>) {
    if !orderly {
        abort(bridge);
    }
    sibling::send_end(bridge, orderly, cx);
}
