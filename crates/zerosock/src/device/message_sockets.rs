//! Messages between the guest and host sockets of type SOCK_SEQPACKET (unix(7)).
//!
//! # Invariants
//! - No message is truncated or split.
//! - A message that exceeds the receiver's buffer (the guest's) or the socket's limit (the host's)
//!   resets its connection.
//!
//! # Operation
//! A message from the guest leaves with one `sendmsg` from guest memory once all of it has arrived.
//! A message from the host is received into the guest's buffers with one `recvmsg` once there is
//! credit for all of it. A message in too many pieces, or with too few buffers, is copied once.

use crate::device::guest_bridges::GuestBridges;
use arrayvec::ArrayVec;
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::SendFlags;
use zerosock_proto::vsock::{MessageReservation, ReserveError};
use zerosock_proto::wire::vsock::{HEADER_LEN, MAX_PAYLOAD};
use zerosock_ring::{Chain, GuestSlice, Memory, SliceBuf};

use super::Device;
use super::events::emit;
use super::state::bridge::BridgePeer;
use super::state::bridge_state::BridgeEvent;
use super::state::flags::Flags;
use super::to_guest::Fill;
use crate::device::host_sockets::HostSocket;
use crate::device::host_sockets::hybrid::{self, Ahead};
use crate::fallible;
use crate::table::outgoing::{Outgoing, end};
use crate::table::send_calls::SendCalls;

/// Messages of a connection per turn.
const BUDGET: usize = 64;
/// Most buffers, and pieces of memory, in one call.
const PIECES: usize = 128;

/// The result of sending a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Sent {
    Yes,
    /// Not now.
    Full,
    NoMemory,
    /// The message exceeds the socket's limit.
    TooLong,
    /// The datagram cannot be sent; a later one may.
    Dropped,
    /// The host program has gone.
    Gone,
    /// The guest's memory has vanished.
    Lost,
}

/// Sends a message from guest memory. To a socket of datagrams it is sent a second time if only the
/// report about an earlier datagram has stopped it.
pub(super) fn send_slices(socket: &HostSocket, slices: &[GuestSlice<'_>]) -> Sent {
    let mut result = zerosock_sys::send_slices(socket.as_fd(), slices);
    if socket.has_datagrams() && result.as_ref().is_err_and(is_earlier_error) {
        result = zerosock_sys::send_slices(socket.as_fd(), slices);
    }
    sent(socket, result)
}

/// As [`send_slices`], of a copy.
pub(super) fn send_bytes(socket: &HostSocket, bytes: &[u8]) -> Sent {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let mut result = rustix::net::send(socket, bytes, flags);
    if socket.has_datagrams() && result == Err(Errno::CONNREFUSED) {
        result = rustix::net::send(socket, bytes, flags);
    }
    sent(socket, result.map_err(Into::into))
}

fn sent(socket: &HostSocket, result: std::io::Result<usize>) -> Sent {
    match result {
        Ok(_) => Sent::Yes,
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::AGAIN | Errno::INTR) => Sent::Full,
            Some(Errno::NOBUFS | Errno::NOMEM) => Sent::NoMemory,
            Some(Errno::MSGSIZE) if !socket.has_datagrams() => Sent::TooLong,
            Some(Errno::FAULT) => Sent::Lost,
            _ if socket.has_datagrams() => Sent::Dropped,
            _ => Sent::Gone,
        },
    }
}

impl GuestBridges<'_, '_> {
    /// Sends complete messages to the host socket, as far as it takes them.
    pub(super) fn flush_messages(&mut self, key: u32) {
        let (mut bytes, mut empty) = (0, 0);
        loop {
            let Some(bridge) = self.device.bridges.get_mut(key) else {
                return;
            };
            let writable = bridge.flags.has(Flags::WRITABLE);
            let Some(messages) = bridge.messages.as_deref_mut().filter(|_| writable) else {
                break;
            };
            let Some(&(len, _)) = messages.outbound.front() else {
                break;
            };
            let len = len as usize;
            let (sent, held) = self.send_one(key, len);
            let Some(bridge) = self.device.bridges.get_mut(key) else {
                return;
            };
            if let Some(forwarded) = &mut bridge.forwarded {
                match sent {
                    Sent::Yes => forwarded.sent(len),
                    Sent::Dropped => forwarded.dropped(),
                    _ => {}
                }
            }
            match sent {
                Sent::Yes | Sent::Dropped => {
                    if let Some(messages) = &mut bridge.messages {
                        messages.outbound.pop_front();
                    }
                    bytes += len;
                    empty += u16::from(len == 0);
                    if held {
                        self.cx.shared.counters.in_place_bytes.add(len as u64);
                        bridge.advance_held(len, false, &mut self.device.queues.rings.tx);
                    } else {
                        bridge.outbound.advance_overflow(len);
                    }
                }
                Sent::Full => {
                    bridge.flags.remove(Flags::WRITABLE);
                }
                Sent::NoMemory => {
                    bridge.flags.remove(Flags::WRITABLE);
                    bridge.flags.insert(Flags::NO_MEMORY);
                }
                Sent::TooLong => return self.too_long(key, len),
                Sent::Gone => {
                    bytes += bridge.outbound.len();
                    if let Some(messages) = &mut bridge.messages {
                        messages.outbound.clear();
                        messages.incomplete = 0;
                    }
                    self.stop_writing(key);
                    break;
                }
                Sent::Lost => {
                    return self
                        .device
                        .fail("guest memory vanished under a send", self.cx);
                }
            }
        }
        bytes += self.drop_incomplete_message(key);
        if let Some(flow) = self.device.bridges.get(key).and_then(|bridge| bridge.flow) {
            // Fails if the flow has ended.
            let _ = self.device.shard.consume(flow, bytes as u32);
            if empty > 0 {
                let _ = self.device.shard.consume_empty(flow, empty);
            }
            self.device.drain_events(self.cx);
        }
        self.watch_room(key, bytes > 0);
        self.update_bridge(key);
    }

    /// Sends the first `len` bytes from the guest. Returns the result, and whether they were sent
    /// from guest memory.
    fn send_one(&mut self, key: u32, len: usize) -> (Sent, bool) {
        let in_place = |device: &Device| {
            let bridge = device.bridges.get(key)?;
            let (BridgePeer::Socket { socket, .. }, Some(tx)) =
                (&bridge.peer, &device.queues.rings.tx)
            else {
                return None;
            };
            let mut slices = SliceBuf::<PIECES>::new();
            let covered = bridge
                .outbound
                .gather_first(tx.queue.memory(), len, &mut slices);
            if covered != len || len == 0 {
                return None;
            }
            Some(send_slices(socket, &slices))
        };
        if let Some(sent) = in_place(self.device) {
            return (sent, true);
        }
        // Copied already, or in too many pieces. An empty message needs no bytes: held chains
        // behind it stay held.
        if len > 0 {
            self.spill(key, 0);
        }
        let Some(bridge) = self.device.bridges.get(key) else {
            return (Sent::Gone, false);
        };
        let BridgePeer::Socket { socket, .. } = &bridge.peer else {
            return (Sent::Full, false);
        };
        let bytes = bridge.outbound.overflow().get(..len).unwrap_or_default();
        (send_bytes(socket, bytes), false)
    }

    /// Receives messages of the host socket into the guest's buffers.
    pub(super) fn fill_messages_from_socket(&mut self, key: u32) -> Fill {
        let mut failed = false;
        for _ in 0..BUDGET {
            if self.device.moved >= self.device.most_to_guest(0) {
                break;
            }
            let Some(bridge) = self.device.bridges.get_mut(key) else {
                return Fill::Idle;
            };
            let (BridgePeer::Socket { socket, .. }, Some(flow)) = (&bridge.peer, bridge.flow)
            else {
                return Fill::Idle;
            };
            let len = match hybrid::look_ahead(socket) {
                Ahead::Message(len) => len,
                Ahead::Nothing => {
                    bridge.flags.remove(Flags::READABLE);
                    return Fill::Idle;
                }
                Ahead::EndOfFile => return self.handle_host_eof(key),
                Ahead::Gone => {
                    bridge.state.apply(BridgeEvent::HostGone);
                    return self.handle_host_eof(key);
                }
                // The error was reported once: datagrams may follow. A lasting one has an edge.
                Ahead::Failed if !std::mem::replace(&mut failed, true) => continue,
                Ahead::Failed => {
                    bridge.flags.remove(Flags::READABLE);
                    return Fill::Idle;
                }
            };
            let reserved = match u32::try_from(len) {
                Ok(len) => self.device.shard.reserve_message(flow, len),
                Err(_) => Err(ReserveError::TooLong),
            };
            match reserved {
                Ok(reservation) => match self.fill_message(key, reservation, len) {
                    Fill::More => {}
                    fill => return fill,
                },
                Err(ReserveError::TooLong) if socket.has_datagrams() => {
                    // The guest could never take it. Reading any part of a datagram removes it.
                    let _ = socket.recv(&mut [0u8; 1]);
                    if let Some(forwarded) = &bridge.forwarded {
                        forwarded.dropped();
                    }
                }
                Err(ReserveError::TooLong) => {
                    self.too_long(key, len);
                    return Fill::Idle;
                }
                // No credit; or the guest has stopped receiving, which an event reports.
                Err(_) => {
                    bridge.flags.insert(Flags::NO_CREDIT);
                    return Fill::Idle;
                }
            }
        }
        Fill::More
    }

    /// Receives the next message of `len` bytes into buffers of the guest.
    fn fill_message(&mut self, key: u32, mut reservation: MessageReservation, len: usize) -> Fill {
        let (Some(rx), Some(bridge)) = (
            self.device.queues.rings.rx.as_mut(),
            self.device.bridges.get_mut(key),
        ) else {
            self.device.shard.cancel_message(reservation);
            return Fill::Idle;
        };
        let BridgePeer::Socket { socket, .. } = &bridge.peer else {
            self.device.shard.cancel_message(reservation);
            return Fill::Idle;
        };
        let mut chains = ArrayVec::<Chain, PIECES>::new();
        let mut covered = 0;
        while !chains.is_full() && (covered < len || chains.is_empty()) {
            let Some(chain) = rx.pop_if(HEADER_LEN + 1, chains.is_empty()) else {
                break;
            };
            covered += fits(&chain);
            chains.push(chain);
        }
        if chains.is_empty() {
            self.device.shard.cancel_message(reservation);
            return Fill::Starved;
        }
        let memory = rx.queue.memory();
        let mut slices = SliceBuf::<PIECES>::new();
        let mut reached = 0;
        for chain in &chains {
            let want = fits(chain).min(len - reached);
            reached += memory.slices(chain.writable(), HEADER_LEN, want, &mut slices);
        }
        if reached < len {
            return self.fill_by_copy(key, reservation, len, chains);
        }
        let received = socket.recv_packet(&slices);
        if !received.as_ref().is_ok_and(|got| got.bytes == len) {
            while let Some(chain) = chains.pop() {
                rx.queue.unpop(chain);
            }
            self.device.shard.cancel_message(reservation);
            let vanished =
                |error: &std::io::Error| Errno::from_io_error(error) == Some(Errno::FAULT);
            return match received {
                Err(error) if vanished(&error) => Fill::Lost,
                // `look_ahead` finds the cause in the next round.
                _ => Fill::More,
            };
        }
        bridge.to_guest += len as u64;
        if let Some(forwarded) = &mut bridge.forwarded {
            forwarded.received(len);
        }
        let done = self.fill_chains(&mut reservation, chains, len, |_, _| {});
        debug_assert_eq!(done, len, "there were buffers for all of it");
        self.cx.shared.counters.in_place_bytes.add(len as u64);
        Fill::More
    }

    /// As `fill_message`, for a message with too few buffers or too many pieces. It is started at
    /// once, so that no other message overtakes it.
    fn fill_by_copy(
        &mut self,
        key: u32,
        mut reservation: MessageReservation,
        len: usize,
        mut chains: ArrayVec<Chain, PIECES>,
    ) -> Fill {
        let Ok(mut bytes) = fallible::zeroed(len) else {
            if let Some(rx) = self.device.queues.rings.rx.as_mut() {
                while let Some(chain) = chains.pop() {
                    rx.queue.unpop(chain);
                }
            }
            self.device.shard.cancel_message(reservation);
            self.end_for_want_of_memory(key);
            return Fill::Idle;
        };
        let received = match self.device.bridges.get(key).map(|bridge| &bridge.peer) {
            Some(BridgePeer::Socket { socket, .. }) => socket.recv(&mut bytes),
            _ => Err(Errno::NOTCONN),
        };
        if received != Ok(len) {
            // The head of the socket's queue has changed: look again.
            if let Some(rx) = self.device.queues.rings.rx.as_mut() {
                while let Some(chain) = chains.pop() {
                    rx.queue.unpop(chain);
                }
            }
            self.device.shard.cancel_message(reservation);
            return Fill::More;
        }
        self.cx.shared.counters.copied_bytes.add(len as u64);
        if let Some(bridge) = self.device.bridges.get_mut(key) {
            bridge.to_guest += len as u64;
            if let Some(forwarded) = &mut bridge.forwarded {
                forwarded.received(len);
            }
        }
        let write = |memory: &Memory, (chain, at, part): (&Chain, usize, usize)| {
            let bytes = bytes.get(at..at + part).unwrap_or_default();
            memory.write(chain.writable(), HEADER_LEN, bytes);
        };
        let done = self.fill_chains(&mut reservation, chains, len, write);
        if done < len {
            let rest = Outgoing::resumed(reservation, bytes, done);
            self.device.half(self.cx).keep_outgoing(rest);
        }
        Fill::More
    }

    /// Sends as much of a message of `len` bytes as fits into `chains`, which `put` fills. Returns
    /// the bytes sent.
    fn fill_chains(
        &mut self,
        reservation: &mut MessageReservation,
        chains: ArrayVec<Chain, PIECES>,
        len: usize,
        put: impl Fn(&Memory, (&Chain, usize, usize)),
    ) -> usize {
        let Some(rx) = self.device.queues.rings.rx.as_mut() else {
            return 0;
        };
        let mut done = 0;
        for chain in chains {
            let part = fits(&chain).min(len - done);
            put(rx.queue.memory(), (&chain, done, part));
            done += part;
            match self
                .device
                .shard
                .commit_part(reservation, part as u32, end(len - done, false))
            {
                Ok(header) => {
                    emit(rx, chain, &header, part);
                    self.cx.shared.counters.tx_packets.add(1);
                }
                // The flow cannot have ended: nothing ran since the credit was reserved.
                Err(_) => rx.complete(chain, 0),
            }
        }
        self.device.moved += done;
        self.cx.shared.counters.tx_bytes.add(done as u64);
        done
    }

    /// Drops a message that the guest can no longer complete; returns its bytes.
    fn drop_incomplete_message(&mut self, key: u32) -> usize {
        let Some(bridge) = self.device.bridges.get_mut(key) else {
            return 0;
        };
        let Some(messages) = &mut bridge.messages else {
            return 0;
        };
        if !bridge.state.has_guest_finished() || !messages.outbound.is_empty() {
            return 0;
        }
        messages.incomplete = 0;
        let bytes = bridge.outbound.len();
        bridge.clear_outbound(&mut self.device.queues.rings.tx);
        bytes
    }
}

/// Whether an error is about an earlier datagram, which nothing has received.
fn is_earlier_error(error: &std::io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::CONNREFUSED)
}

/// Payload bytes that fit into a buffer.
fn fits(chain: &Chain) -> usize {
    (chain.writable_len() as usize - HEADER_LEN).min(MAX_PAYLOAD as usize)
}
