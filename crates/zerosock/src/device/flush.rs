//! Bytes from the guest to the other end of a bridge: one `sendmsg` per host socket, or loans to a
//! sibling.
//!
//! # Invariants
//! - Bytes keep their order.
//! - Stalled bridges together hold at most half of the queue, chains of zero-copy sends in flight
//!   included. Those of one connection are at most its share.
//! - Copies stay below the device's overflow limit: above it, the connections with the most copied
//!   bytes are reset ([`super::outbound`]).

use super::ends::end_host;
use super::state::bridge::{Bridge, BridgePeer};
use super::state::bridge_state::{BridgeAction, BridgeEvent};
use super::state::flags::Flags;
use super::state::timers::{Timer, Timers};
use super::virtio::BRIDGE;
use super::zero_copy::{sends_of, slow_from};
use super::{Context, Device, DriverKind};
use crate::device::guest_bridges::GuestBridges;
use crate::device::host_sockets;
use crate::device::state::peer::Peer;
use crate::device::state::sibling_message::SiblingMessage;
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::SendFlags;
use zerosock_ring::{Chain, DeviceQueue, Memory, SliceBuf};
use zerosock_virtio::poller::Interest;
use zerosock_zc::{SocketKind, notifications};

/// Pieces of memory given to one `sendmsg`.
const SLICES: usize = 128;

/// Fewest bytes of one send for which pinning their pages repays.
const WORTHWHILE: usize = SocketKind::Tcp4.zero_copy_threshold();

/// The result of a write.
enum Wrote {
    Some {
        bytes: usize,
        all: bool,
        zero_copy: bool,
    },
    Full,
    NoMemory,
    Gone,
    Lost,
}

impl GuestBridges<'_, '_> {
    pub(super) fn flush_dirty(&mut self) {
        while let Some(key) = self.device.bridges.next_dirty() {
            self.flush(key);
        }
    }

    /// Passes bytes from the guest on, as far as the other end takes them.
    pub(super) fn flush(&mut self, key: u32) {
        if self.device.has_lost_memory() {
            // The bridge ends in a later part, without bytes of the lost memory.
            return;
        }
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        if !bridge.state.is_open() {
            return self.update_bridge(key);
        }
        let lingers = bridge.flow.is_none().then(|| bridge.outbound.len());
        match bridge.peer {
            BridgePeer::Socket { .. } if bridge.messages.is_some() => self.flush_messages(key),
            BridgePeer::Socket { .. } => self.flush_socket(key),
            BridgePeer::Sibling(_) => self.flush_sibling(key),
            BridgePeer::NewDoorbell | BridgePeer::Doorbell(_) => self.doorbell_rung(key),
            _ => self.update_bridge(key),
        }
        if let (Some(before), Some(bridge)) = (lingers, self.device.bridges.get(key))
            && bridge.outbound.len() < before
        {
            self.device.lingering.note_progress(key, self.cx.now);
        }
    }

    fn flush_socket(&mut self, key: u32) {
        let mut consumed = 0;
        let others = self.device.bridges.chains_of_others(key);
        loop {
            let Some(bridge) = self.device.bridges.get_mut(key) else {
                return;
            };
            if bridge.outbound.is_empty() || !bridge.flags.has(Flags::WRITABLE) {
                break;
            }
            let held = bridge.outbound.held_chains() > 0;
            let wrote = if held {
                // A process can exit at any time, and its last bytes are still to be delivered. So are those
                // of connections for which there is no place to linger. Pages of a guest endpoint are given back
                // when its device has ended.
                let by_copy = bridge.forwarded.is_none()
                    || self.device.driver != DriverKind::Vm
                    // Another process is about to take over.
                    || self.device.succession.is_ending
                    || self.device.queues.is_command_pending()
                    || self.device.lingering.len() >= self.cx.shared.limits.lingering / 2;
                let Some(tx) = self.device.queues.rings.tx.as_ref() else {
                    break;
                };
                let memory = tx.queue.memory();
                let room = match by_copy {
                    true => 0,
                    false => zero_copy_room(bridge, &tx.queue, others),
                };
                let aborts = self.device.succession.is_kept;
                send_zero_copy(bridge, memory, room, aborts, self.cx)
                    .unwrap_or_else(|| send_held(bridge, memory))
            } else {
                send_overflow(bridge)
            };
            match wrote {
                Wrote::Some {
                    bytes,
                    all,
                    zero_copy,
                } => {
                    consumed += bytes;
                    if let Some(forwarded) = &mut bridge.forwarded {
                        forwarded.sent(bytes);
                        if !zero_copy && let Some(sends) = &mut forwarded.zero_copy {
                            sends.copied(bytes);
                        }
                    }
                    if held {
                        self.cx.shared.counters.in_place_bytes.add(bytes as u64);
                        bridge.advance_held(bytes, zero_copy, &mut self.device.queues.rings.tx);
                    } else {
                        bridge.outbound.advance_overflow(bytes);
                    }
                    // A short write: the socket is full, and new room produces an edge.
                    bridge.flags.set(Flags::WRITABLE, all);
                }
                Wrote::Full => {
                    bridge.flags.remove(Flags::WRITABLE);
                }
                Wrote::NoMemory => {
                    bridge.flags.remove(Flags::WRITABLE);
                    bridge.flags.insert(Flags::NO_MEMORY);
                }
                Wrote::Gone => {
                    consumed += bridge.outbound.len();
                    self.stop_writing(key);
                    self.tcp_gone(key);
                    break;
                }
                Wrote::Lost => {
                    return self
                        .device
                        .fail("guest memory vanished under a send", self.cx);
                }
            }
        }
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        if let Some(flow) = bridge.flow
            && consumed > 0
        {
            let _ = self.device.shard.consume(flow, consumed as u32);
            self.device.drain_events(self.cx);
        }
        self.watch_room(key, consumed > 0);
        self.update_bridge(key);
    }

    /// Has the poller report room in a socket that is full or to which bytes were `sent`. In a Unix socket
    /// each read of the program makes room: it wakes the worker while the program prepares an answer, and the
    /// answer waits less. Host AF_VSOCK sockets are treated alike. A TCP socket reports room only after it was
    /// full.
    pub(super) fn watch_room(&mut self, key: u32, sent: bool) {
        let token = self.device.token(BRIDGE, key);
        if let Some(bridge) = self.device.bridges.get_mut(key)
            && !bridge.flags.has(Flags::WATCHES_ROOM)
            && let BridgePeer::Socket { socket, .. } = &bridge.peer
            && (!bridge.flags.has(Flags::WRITABLE) || sent && !socket.is_tcp())
        {
            // Room that there is already is reported too. The call fails only for an unknown socket.
            let watches = self.cx.poller.change(socket, token, Interest::All).is_ok();
            bridge.flags.set(Flags::WATCHES_ROOM, watches);
        }
    }

    /// Drops the bytes for a host program that has stopped reading, and tells the guest.
    pub(super) fn stop_writing(&mut self, key: u32) {
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        bridge.clear_outbound(&mut self.device.queues.rings.tx);
        self.on_bridge_event(key, BridgeEvent::HostStopped);
    }

    /// Lends the guest's chains to the sibling. A stalled sibling gets its share, and copies.
    fn flush_sibling(&mut self, key: u32) {
        let others = self.device.bridges.chains_of_others(key);
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        let BridgePeer::Sibling(sibling) = &mut bridge.peer else {
            return;
        };
        let (Some(tx), Some(flow)) = (self.device.queues.rings.tx.as_mut(), bridge.flow) else {
            return;
        };
        let Peer { device, flow: to } = sibling.peer;
        let from = Peer::new(self.device.addr, flow);
        let size = tx.queue.size();
        let half = usize::from(size / 2).saturating_sub(others);
        let most = match sibling.stalled {
            true => share_of(size).min(half),
            false => half,
        };
        while (sibling.lent as usize) < most {
            let Some(held) = bridge.outbound.pop_held() else {
                break;
            };
            sibling.lent += 1;
            sibling.lent_since_hold += 1;
            let message = SiblingMessage::Lent {
                to,
                from,
                memory: tx.queue.memory().clone(),
                held,
                epoch: tx.epoch,
            };
            self.cx.outbox.send(device, message);
        }
        self.spill(key, 0);
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        let bytes = bridge.outbound.take_overflow();
        if !bytes.is_empty() {
            self.cx
                .outbox
                .send(device, SiblingMessage::Copied { to, bytes });
        }
        self.send_message_lengths(key);
        self.update_bridge(key);
    }

    /// Restores the invariants of a bridge after its bytes or chains have changed: bounds the held
    /// chains, updates the device's sums and timers, passes on the guest's end of stream once all
    /// bytes have been taken, and removes a bridge that has nothing left to do.
    pub(super) fn update_bridge(&mut self, key: u32) {
        self.bound_held_chains(key);
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return;
        };
        if bridge.has_lost_bytes() {
            return self.end_for_want_of_memory(key);
        }
        set_hold_timer(bridge, key, &mut self.device.timers, self.cx);
        if bridge.outbound.is_empty()
            && bridge.state.apply(BridgeEvent::Delivered) == BridgeAction::EndHost
        {
            end_host(bridge, self.cx);
        }
        let done = bridge.is_delivered() && bridge.flow.is_none();
        self.device.bridges.recount(key);
        if done {
            if let Some(Bridge {
                peer: BridgePeer::Socket { socket, .. },
                ..
            }) = self.remove_bridge(key)
                && socket.is_tcp()
            {
                // Closing with unread bytes would reset the connection, with bytes under way.
                host_sockets::leave_nothing_unread(&socket);
            }
        } else if self.device.bridges.overflow_bytes() > self.cx.shared.limits.overflow {
            self.reset_largest_holders();
        }
    }

    /// Copies out the held chains beyond the connection's share, or all if half of the queue is in use.
    fn bound_held_chains(&mut self, key: u32) {
        let Some(bridge) = self.device.bridges.get(key) else {
            return;
        };
        let held = bridge.outbound.held_chains();
        if held == 0 || bridge.has_lost_bytes() {
            return;
        }
        let tx = self.device.queues.rings.tx.as_ref();
        let size = tx.map_or(0, |tx| tx.queue.size());
        // Chains in flight cannot be copied out any more.
        let others = self.device.bridges.chains_of_others(key) + bridge.chains_in_flight().count();
        let keep = if others + held > usize::from(size) / 2 {
            0
        } else {
            share_of(size)
        };
        self.spill(key, keep);
    }

    /// Copies out the chains that a bridge holds, except the first `keep`.
    pub(super) fn spill(&mut self, key: u32, keep: usize) {
        if let Some(bridge) = self.device.bridges.get_mut(key) {
            let copied = bridge.spill(keep, &mut self.device.queues.rings.tx);
            self.cx.shared.counters.copied_bytes.add(copied as u64);
        }
    }

    /// Resets a connection after an allocation for its bytes failed.
    #[cold]
    pub(super) fn end_for_want_of_memory(&mut self, key: u32) {
        self.device.count_lost_bytes(self.cx);
        self.reset_bridge(key);
    }

    /// Resets the connections with the most copied bytes until an eighth of the device's overflow
    /// limit is free. The margin makes the scan of all connections rare, however small their parts.
    fn reset_largest_holders(&mut self) {
        for key in self.device.bridges.largest_holders() {
            if self.device.bridges.overflow_bytes() <= self.cx.shared.limits.overflow / 8 * 7 {
                break;
            }
            self.cx.shared.counters.overflow_resets.add(1);
            self.device
                .warn("connection reset: its reader stalls and the overflow limit is reached");
            self.reset_bridge(key);
        }
    }
}

impl Device {
    /// Counts and logs a connection that is reset because an allocation for its bytes failed.
    pub(super) fn count_lost_bytes(&self, cx: &Context<'_>) {
        cx.shared.counters.no_memory.add(1);
        self.warn("connection reset: out of memory for its bytes");
    }
}

/// Begins or ends the time for which chains are held or lent.
fn set_hold_timer(bridge: &mut Bridge, key: u32, timers: &mut Timers, cx: &Context<'_>) {
    let chains = match &mut bridge.peer {
        BridgePeer::Sibling(s) => {
            if bridge.held_since.is_none() {
                s.lent_since_hold = 0;
            }
            s.lent as usize
        }
        _ => bridge.outbound.held_chains(),
    };
    if chains == 0 && !bridge.flags.has(Flags::NO_MEMORY) {
        bridge.held_since = None;
    } else {
        let since = *bridge.held_since.get_or_insert(cx.now);
        if bridge.flags.insert(Flags::HOLD_TIMER) {
            timers.set(since + cx.shared.limits.hold, Timer::Hold(key));
        }
    }
}

/// Chains that one stalled connection may hold of a queue of `size`.
pub(super) fn share_of(size: u16) -> usize {
    usize::from(size / 8).max(1)
}

fn send_held(bridge: &Bridge, memory: &Memory) -> Wrote {
    let BridgePeer::Socket { socket, .. } = &bridge.peer else {
        return Wrote::Full;
    };
    let mut slices = SliceBuf::<SLICES>::new();
    let want = bridge.outbound.gather(memory, usize::MAX, &mut slices);
    wrote(zerosock_sys::send_slices(socket.as_fd(), &slices), want)
}

/// How many chains of a bridge the next zero-copy send may use. `others`: chains of other bridges.
fn zero_copy_room(bridge: &Bridge, queue: &DeviceQueue, others: usize) -> usize {
    let size = queue.size();
    let half = usize::from(size / 2).saturating_sub(others + bridge.chains_in_flight().count());
    // Without indirect tables a few chains can have all descriptors of the queue.
    let descriptors = |chain: &Chain| match queue.has_indirect() {
        true => 1,
        false => chain.readable().len().max(1),
    };
    let mut left = share_of(size);
    for chain in bridge.chains_in_flight() {
        left = left.saturating_sub(descriptors(chain));
    }
    let fits = |chain: &&Chain| match left.checked_sub(descriptors(chain)) {
        Some(rest) => {
            left = rest;
            true
        }
        None => false,
    };
    bridge.outbound.chains().take(half).take_while(fits).count()
}

/// Sends up to `room` held chains without a copy. `None`: they are to be copied. `aborts`: if this process is
/// killed, the connection is reset, so that the kernel drops its references before a successor returns the
/// buffers.
fn send_zero_copy(
    bridge: &mut Bridge,
    memory: &Memory,
    room: usize,
    aborts: bool,
    cx: &Context<'_>,
) -> Option<Wrote> {
    let chains = room.min(bridge.outbound.held_chains());
    let sends = sends_of(&mut bridge.forwarded).filter(|_| chains > 0)?;
    if bridge.outbound.held_bytes() < WORTHWHILE || !sends.may_send(chains, cx.now, slow_from(cx)) {
        return None;
    }
    let BridgePeer::Socket { socket, .. } = &bridge.peer else {
        return None;
    };
    let mut slices = SliceBuf::<SLICES>::new();
    let want = bridge.outbound.gather(memory, chains, &mut slices);
    if want < WORTHWHILE {
        return None;
    }
    if !*sends
        .permitted
        .get_or_insert_with(|| notifications::permit(socket))
    {
        return None;
    }
    if aborts && !std::mem::replace(&mut sends.aborts, true) {
        socket.abort();
    }
    let memory_before = match sends.numbered {
        true => None,
        false => notifications::reports(socket),
    };
    let result = zerosock_sys::send_slices_zero_copy(socket.as_fd(), &slices);
    match wrote(result, want) {
        Wrote::Some { bytes, all, .. } if bytes > 0 => {
            let zero_copy = sends.numbered || notifications::reports(socket) > memory_before;
            match zero_copy {
                true => {
                    sends.sent(cx.now);
                    cx.shared.counters.zero_copy_bytes.add(bytes as u64);
                }
                false => sends.permitted = Some(false),
            }
            Some(Wrote::Some {
                bytes,
                all,
                zero_copy,
            })
        }
        // Too little memory may be locked, or for notifications; another error is that of a copying
        // send, too.
        Wrote::NoMemory | Wrote::Gone => {
            sends.refused();
            None
        }
        // Memory that cannot be pinned can still be copied; that send finds out whether it has vanished.
        Wrote::Lost => {
            sends.permitted = Some(false);
            None
        }
        other => Some(other),
    }
}

fn send_overflow(bridge: &Bridge) -> Wrote {
    let BridgePeer::Socket { socket, .. } = &bridge.peer else {
        return Wrote::Full;
    };
    let bytes = bridge.outbound.overflow();
    let sent = rustix::net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    wrote(sent.map_err(Into::into), bytes.len())
}

fn wrote(result: std::io::Result<usize>, want: usize) -> Wrote {
    match result {
        Ok(bytes) => Wrote::Some {
            bytes,
            all: bytes == want,
            zero_copy: false,
        },
        Err(e) => match Errno::from_io_error(&e) {
            // Interrupted before any byte was sent: try again in the same loop.
            Some(Errno::INTR) => Wrote::Some {
                bytes: 0,
                all: true,
                zero_copy: false,
            },
            Some(Errno::AGAIN) => Wrote::Full,
            Some(Errno::NOBUFS | Errno::NOMEM) => Wrote::NoMemory,
            Some(Errno::FAULT) => Wrote::Lost,
            _ => Wrote::Gone,
        },
    }
}
