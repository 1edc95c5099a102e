//! The device half: a vhost-user back-end that gives a guest, or an attached process, a vsock device. `serve` runs
//! it on workers; [`Host`](crate::vsock::Host) has it in the program.
//!
//! # Invariants
//! - A turn works to a budget and never blocks.
//! - Each chain that was popped is completed exactly once.
//! - The packet path does not allocate, lock or search.
//!
//! # Structure
//! A `Device` belongs to one worker. It connects the rings to the protocol core and joins each
//! connection of the guest to a host socket or a sibling device, by a bridge, or to a connection of
//! the embedding program:
//!
//! - `from_guest`, `flush`: packets from the guest's transmit queue; payload goes by `sendmsg` from
//!   guest memory into the socket;
//! - `to_guest`: packets to the guest; payload comes by `recvmsg` from the socket into the
//!   buffers that the guest has posted;
//! - `listeners`, `handshakes`, `callers`, `guest_backlog`: connections of host programs to the guest;
//!   `connecting`, `backlog`: those of the guest to host programs; `sibling`: those between guests;
//! - `events`, `ends`, `lingering`: their life cycle, and `connection_log` what the log says about it;
//! - `forwarded`: connections by rule with sockets outside, TCP and UDP among them; `zero_copy`: sends
//!   of which the kernel reads the bytes later;
//! - `datagrams`: datagrams of the guest, also by rule to sockets outside;
//! - `messages`, `message_sockets`: connections that carry messages (SEQPACKET);
//! - `app`, `app_store`, `half`, `lending`: connections with the program that embeds the device;
//! - `traffic`: what each device has counted, for reports;
//! - `teardown`: the end of all connections, in parts; `stopped`: their end after a long stop; `successor`:
//!   their end after a crash; `handover`: how another process continues them;
//! - `virtio`: turns, events and commands of the VMM;
//! - `guests`, `guest_commands`, `guest_orders`: endpoints on pages of the guest, which the device of the VM
//!   checks, starts, stops and ends; `guest_ports`, `doorbell`: the two ports of the host for them;
//! - `queue_pairs`: a device with several queue pairs;
//! - `state`: the data that all of these work on, in types with their own invariants.
//!
//! # Views
//! `Device` has the turn, the packets and the events of the core. What concerns one kind of peer is in a view,
//! which borrows the device and its [`Context`] for a call: `GuestBridges` (sockets of the host, sockets
//! outside, siblings), `GuestDatagrams`, and `DeviceHalf` (the program that embeds the device).

pub(crate) mod app;
pub(crate) mod app_store;
#[cfg(test)]
mod arming_tests;
mod backlog;
mod callers;
mod connecting;
mod connection_log;
pub(crate) mod datagrams;
mod doorbell;
#[cfg(test)]
mod doorbell_tests;
mod ends;
mod events;
pub(crate) mod factory;
mod flush;
mod forwarded;
mod from_guest;
#[cfg(fuzzing)]
pub(crate) mod fuzz;
mod guest_backlog;
#[cfg(test)]
mod guest_backlog_random_tests;
#[cfg(test)]
mod guest_backlog_tests;
mod guest_bridges;
pub(crate) mod guest_commands;
pub(crate) mod guest_orders;
mod guest_ports;
#[cfg(test)]
pub(crate) mod guest_test_lab;
mod guests;
#[cfg(test)]
mod guests_pause_tests;
#[cfg(test)]
mod guests_tests;
pub(crate) mod half;
pub(crate) mod handover;
#[cfg(test)]
mod handover_tests;
mod handshakes;
pub(crate) mod host_sockets;
#[cfg(test)]
mod lab;
pub(crate) mod lending;
mod lingering;
mod listeners;
mod message_sockets;
#[cfg(test)]
mod message_tests;
mod messages;
pub(crate) mod model;
pub(crate) mod outbound;
pub(crate) mod placing;
pub(crate) mod queue_pair_ports;
pub(crate) mod queue_pairs;
mod sibling;
pub(crate) mod state;
mod stopped;
mod successor;
#[cfg(test)]
mod successor_tests;
mod teardown;
#[cfg(test)]
pub(crate) mod test_guest;
#[cfg(test)]
mod time_limit_tests;
mod to_guest;
pub(crate) mod traffic;
#[cfg(test)]
mod turn_tests;
mod virtio;
mod zero_copy;

pub(crate) use forwarded::all_dials;
pub(crate) use handover::check_saved;

use crate::device::guest_bridges::GuestBridges;
use crate::stats::Gauges;
use state::bridge::{Bridge, BridgePeer};
pub(crate) use state::host::HostAccess;
use state::sibling_message::SiblingMessage;
pub(crate) use state::succession::SavedDevice;
use state::timers::Timer;
pub(crate) use state::turn_budget::TURN_BYTES;
pub(crate) use state::{
    Context, Device, DriverKind, EVENT, Limits, RX, Shared, TX, VsockRings, Worker, WorkerMessage,
};
use zerosock_proto::vsock::FlowId;
use zerosock_proto::wire::vsock::SocketType;
use zerosock_vhost_user::FrontendLink;
use zerosock_virtio::command;
use zerosock_virtio::poller::{EventKind, Token};
use zerosock_virtio::ring::Ring;

impl Device {
    /// Updates the worker's gauges of connections, bridges, timers and ports by what has changed in
    /// this device.
    pub(super) fn publish_gauges(&mut self, cx: &Context<'_>) {
        let now = Gauges {
            connections: self.shard.occupied(),
            bridges: self.bridges.len() + self.app.flows.len(),
            timers: self.timers.len()
                + self.shard.timers()
                + self.datagrams.associations.table.deadlines(),
            ports: self.shard.held_ports(),
        };
        if now != self.counted {
            let before = std::mem::replace(&mut self.counted, now);
            cx.shared.counters.replace_gauges(before, now);
        }
    }

    /// Whether a queue has broken and its connections have not been reset yet.
    fn has_broken(&self) -> bool {
        let rings = [&self.queues.rings.rx, &self.queues.rings.tx];
        rings.into_iter().flatten().any(|ring| ring.reset_pending)
    }

    /// Asks the driver for kicks. Returns true if chains became available meanwhile. With `full`
    /// the transmit queue is left out: nothing may be taken from it until chains are returned.
    fn rearm(&mut self, full: bool) -> bool {
        let mut more = false;
        if !full
            && !self.receive_blocked()
            && let Some(tx) = self.queues.rings.tx.as_mut().filter(|r| r.live())
        {
            more |= tx.queue.enable_notifications();
        }
        if self.starved
            && let Some(rx) = self.queues.rings.rx.as_mut().filter(|r| r.live())
        {
            more |= rx.queue.enable_notifications();
        }
        if self.announce_reset
            && let Some(event) = self.queues.rings.event.as_mut().filter(|r| r.live())
        {
            more |= event.queue.enable_notifications();
        }
        more
    }

    /// The name of a descriptor in the poller.
    fn token(&self, kind: EventKind, key: u32) -> Token {
        Token {
            device: self.addr.number,
            kind,
            key,
        }
    }

    /// Logs a warning. Peers can cause any number of them, and a write to the log can block: so
    /// their rate is limited.
    fn warn(&self, text: &str) {
        if let Some(suppressed) = self.warnings.admit(std::time::Instant::now()) {
            tracing::warn!(cid = %self.cid, suppressed, "{text}");
        }
    }

    fn has_work_for_guest(&self) -> bool {
        !self.starved
            && self.queues.rings.rx.as_ref().is_some_and(Ring::live)
            && (self.shard.has_transmit()
                || self.bridges.has_ready()
                || !self.outgoing.is_empty()
                // Datagrams are not sent while a command is pending.
                || (!self.queues.is_command_pending() && self.datagrams.has_work()))
    }

    /// Stops the device because its memory is unusable: ends its connections and disconnects its
    /// front-end. Other devices are unaffected.
    fn fail(&mut self, reason: &str, cx: &mut Context<'_>) {
        let link = self.queues.link.take();
        if link.as_ref().is_some_and(FrontendLink::note_loss) {
            if let Some(suppressed) = self.warnings.admit(std::time::Instant::now()) {
                tracing::error!(cid = %self.cid, reason, suppressed, "device lost");
            }
            cx.shared.counters.devices_lost.add(1);
        }
        self.half(cx).lose();
        self.queues.fail(cx.notifier);
        // Bytes left in the lost memory are undefined: they are not delivered.
        self.teardown.memory_lost = true;
        command::disconnect(self, cx);
        if let Some(link) = link {
            link.close(reason);
        }
        if let DriverKind::GuestEndpoint { vm } = self.driver {
            // The VM's device, which has the same memory, may sleep: its next turn finds the loss.
            cx.outbox.send(vm, SiblingMessage::Kick);
        }
    }
}

impl GuestBridges<'_, '_> {
    fn add_bridge(&mut self, flow: FlowId, end: BridgePeer) -> u32 {
        let mut bridge = Bridge::new(flow, end);
        let info = self.device.shard.flow(flow);
        if info.is_some_and(|info| info.socket_type == SocketType::SeqPacket) {
            bridge.messages = Some(Box::default());
        }
        self.cx.shared.counters.conns_added.add(1);
        self.device.bridges.insert(bridge)
    }

    /// Makes room for the bridge of a new flow. Without memory for it, the flow is reset.
    fn reserve_bridge(&mut self, flow: FlowId) -> bool {
        let is_reserved = self.device.bridges.reserve(flow).is_ok();
        if !is_reserved {
            self.reset_without_memory(flow);
        }
        is_reserved
    }

    /// Resets a new flow for whose connection there is no memory.
    #[cold]
    fn reset_without_memory(&mut self, flow: FlowId) {
        self.cx.shared.counters.no_memory.add(1);
        self.device
            .warn("connection refused: out of memory for the table of connections");
        let _ = self.device.shard.reset(flow);
    }

    /// Removes a bridge: completes its chains, closes its socket and updates the sums. The flow in
    /// the protocol core is left to the caller.
    fn remove_bridge(&mut self, key: u32) -> Option<Bridge> {
        let mut bridge = self.device.bridges.remove(key)?;
        if let BridgePeer::Connecting { socket, .. } | BridgePeer::Socket { socket, .. } =
            &bridge.peer
            && socket.is_closed_later()
        {
            // An event for the open socket would be attributed to the next bridge with this key.
            self.cx.poller.remove(socket);
        }
        match &mut bridge.peer {
            BridgePeer::Connecting { deadline, .. } => {
                self.device.timers.cancel(*deadline, Timer::Connect(key));
            }
            BridgePeer::Resolving(pending) => {
                if let Some(pending) = pending.take() {
                    pending.cancel();
                }
            }
            _ => {}
        }
        if let Some(forwarded) = &mut bridge.forwarded {
            if let Some(idle) = forwarded.idle {
                self.device.timers.cancel(idle.next, Timer::Idle(key));
            }
            forwarded.finish();
        }
        self.device.backlogs.forget(key, &bridge);
        if !bridge.state.is_open()
            && let Some(flow) = bridge.flow
        {
            self.forget_guest_connect(flow);
        }
        if bridge.flow.is_none() {
            self.device.lingering.stop(key, &mut self.device.timers);
        }
        bridge.return_chains(&mut self.device.queues.rings.tx, self.cx);
        match &mut bridge.peer {
            BridgePeer::Sibling(sibling) => sibling::return_inbound(sibling, false, self.cx),
            BridgePeer::Doorbell(of) => self.device.doorbell_closed(*of, self.cx),
            BridgePeer::NewDoorbell => self.device.doorbell_decided(key),
            _ => {}
        }
        self.cx.shared.counters.conns_removed.add(1);
        Some(bridge)
    }
}
