//! From the bridges on: what a guest has sent goes to those it is for, in one `sendmsg` for each of
//! them, or by loan to a sibling; and what they do not take stays held within bounds.
//!
//! What must hold: bytes keep their order; a device holds half of its queue at most, and copies up to
//! its cap, above which those with most of it are reset ([`super::outbound`]).

use super::bridge::{Bridge, BridgePeer};
use super::timers::Timer;
use super::{Context, Device};
use crate::device::sibling_message::{Message, Peer};
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::SendFlags;
use zerosock_proto::vsock::How;
use zerosock_ring::SliceBuf;

/// Pieces of memory given to one `sendmsg`.
const SLICES: usize = 128;

/// What became of an attempt to write.
enum Wrote {
    Some { bytes: usize, all: bool },
    Full,
    NoMemory,
    Gone,
    Lost,
}

impl Device {
    pub(super) fn flush_dirty(&mut self, cx: &mut Context<'_>) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for key in dirty.drain(..) {
            if let Some(bridge) = self.bridges.get_mut(key as usize) {
                bridge.in_dirty = false;
                self.flush(key, cx);
            }
        }
        self.dirty = dirty;
    }

    /// Hands on what a bridge has from the guest, as far as the other end takes it.
    pub(super) fn flush(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        if !bridge.open {
            return self.settle(key, cx);
        }
        let lingers = bridge.flow.is_none().then(|| bridge.outbound.len());
        match bridge.end {
            BridgePeer::Socket { .. } if bridge.messages.is_some() => self.flush_messages(key, cx),
            BridgePeer::Socket { .. } => self.flush_socket(key, cx),
            BridgePeer::Sibling(_) => self.flush_sibling(key, cx),
            _ => self.settle(key, cx),
        }
        if let (Some(before), Some(bridge)) = (lingers, self.bridges.get(key as usize))
            && bridge.outbound.len() < before
        {
            self.note_lingering_progress(key, cx);
        }
    }

    fn flush_socket(&mut self, key: u32, cx: &mut Context<'_>) {
        let mut consumed = 0;
        loop {
            let Some(bridge) = self.bridges.get_mut(key as usize) else {
                return;
            };
            if bridge.outbound.is_empty() || !bridge.writable {
                break;
            }
            let held = bridge.outbound.held_chains() > 0;
            let wrote = if held {
                let Some(tx) = self.tx.as_ref() else { break };
                send_held(bridge, tx.queue.memory())
            } else {
                send_overflow(bridge)
            };
            match wrote {
                Wrote::Some { bytes, all } => {
                    consumed += bytes;
                    if held {
                        cx.counters.in_place_bytes.add(bytes as u64);
                        let tx = &mut self.tx;
                        bridge.outbound.advance_held(bytes, |chain| {
                            if let Some(tx) = tx {
                                tx.complete(chain, 0);
                            }
                        });
                    } else {
                        bridge.outbound.advance_overflow(bytes);
                    }
                    // Short: the socket is full, and its next room is an edge.
                    bridge.writable = all;
                }
                Wrote::Full => bridge.writable = false,
                Wrote::NoMemory => {
                    bridge.writable = false;
                    bridge.no_memory = true;
                }
                Wrote::Gone => {
                    consumed += bridge.outbound.len();
                    self.host_is_deaf(key, cx);
                    break;
                }
                Wrote::Lost => {
                    return self.lose("guest memory vanished under a send", cx);
                }
            }
        }
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        if let Some(flow) = bridge.flow
            && consumed > 0
        {
            let _ = self.shard.consume(flow, consumed as u32);
            self.drain_events(cx);
        }
        self.settle(key, cx);
    }

    /// The host takes nothing any more: drop what waits for it and tell the guest.
    pub(super) fn host_is_deaf(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        bridge.write_closed = true;
        let tx = &mut self.tx;
        bridge.outbound.clear(|chain| {
            if let Some(tx) = tx {
                tx.complete(chain, 0);
            }
        });
        if let Some(flow) = bridge.flow {
            let _ = self.shard.shutdown(cx.now, flow, How::RECEIVE);
        }
    }

    /// Lends the guest's chains to the sibling. One that has stalled gets its share, and copies.
    fn flush_sibling(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        let BridgePeer::Sibling(sibling) = &mut bridge.end else {
            return;
        };
        let (Some(tx), Some(flow)) = (self.tx.as_mut(), bridge.flow) else {
            return;
        };
        let Peer { device, flow: to } = sibling.peer;
        let from = Peer {
            device: self.addr,
            flow,
        };
        let size = tx.queue.size();
        let others = self.stalled_chains - bridge.counted.0 as usize;
        let half = usize::from(size / 2).saturating_sub(others);
        let most = if sibling.move_to.is_some() {
            // Those that are out are awaited.
            0
        } else if sibling.stalled {
            share_of(size).min(half)
        } else {
            half
        };
        while (sibling.out as usize) < most {
            let Some(held) = bridge.outbound.pop_held() else {
                break;
            };
            sibling.out += 1;
            sibling.younger += 1;
            let message = Message::Lent {
                to,
                from,
                memory: tx.queue.memory().clone(),
                held,
                epoch: tx.epoch,
            };
            cx.outbox.send(device, message);
        }
        self.spill(key, 0, cx);
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        let bytes = bridge.outbound.take_overflow();
        if !bytes.is_empty() {
            cx.outbox.send(device, Message::Copied { to, bytes });
        }
        self.tell_sibling_of_messages(key, cx);
        self.settle(key, cx);
    }

    /// After a flush: keeps the hold within its bounds, and passes on the guest's end of stream
    /// once everything before it has been taken.
    pub(super) fn settle(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        if bridge.has_lost_bytes() {
            return self.end_for_want_of_memory(key, cx);
        }
        let held = bridge.outbound.held_chains();
        if held > 0 {
            let size = self.tx.as_ref().map_or(0, |tx| tx.queue.size());
            let others = self.stalled_chains - bridge.counted.0 as usize;
            let keep = if others + held > usize::from(size) / 2 {
                0
            } else {
                share_of(size)
            };
            self.spill(key, keep, cx);
        }
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        if bridge.has_lost_bytes() {
            return self.end_for_want_of_memory(key, cx);
        }
        let out = match &mut bridge.end {
            BridgePeer::Sibling(s) => {
                if bridge.held_since.is_none() {
                    s.younger = 0;
                }
                s.rest(&mut self.spare_inbound);
                s.out as usize
            }
            _ => bridge.outbound.held_chains(),
        };
        if out == 0 && !bridge.no_memory {
            bridge.held_since = None;
        } else {
            let since = *bridge.held_since.get_or_insert(cx.now);
            if !bridge.hold_timer {
                bridge.hold_timer = true;
                self.timers.set(since + cx.limits.hold, Timer::Hold(key));
            }
        }
        let inbound = match &bridge.end {
            BridgePeer::Sibling(s) => s.copied(),
            _ => 0,
        };
        // A queue has 32768 chains at most, and credit keeps the bytes below 2^31.
        let lengths = bridge
            .messages
            .as_ref()
            .map_or(0, |messages| messages.cost());
        let bytes = bridge.outbound.overflow_len() + inbound + lengths;
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let now_counted = (out as u32, bytes);
        let before = std::mem::replace(&mut bridge.counted, now_counted);
        self.stalled_chains = self.stalled_chains - before.0 as usize + now_counted.0 as usize;
        self.overflow_bytes = self.overflow_bytes - before.1 as usize + now_counted.1 as usize;
        bridge.outbound.rest(&mut self.spare_outbound);
        if bridge.outbound.is_empty() && bridge.guest_finished && bridge.open && !bridge.finish_told
        {
            bridge.finish_told = true;
            match &bridge.end {
                BridgePeer::Socket { socket, .. } => {
                    // An error means that the host has gone: it needs no telling.
                    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
                }
                BridgePeer::Sibling(s) => {
                    let to = s.peer.flow;
                    let message = Message::Shutdown {
                        to,
                        receive: false,
                        send: true,
                    };
                    cx.outbox.send(s.peer.device, message);
                }
                _ => {}
            }
        }
        if bridge.outbound.is_empty() && bridge.flow.is_none() {
            self.remove_bridge(key, cx);
        } else if self.overflow_bytes > cx.limits.overflow {
            self.shed(cx);
        }
    }

    /// Copies out all but `keep` of the chains that a bridge holds.
    pub(super) fn spill(&mut self, key: u32, keep: usize, cx: &mut Context<'_>) {
        let Some(bridge) = self.bridges.get_mut(key as usize) else {
            return;
        };
        let Some(tx) = self.tx.as_mut() else { return };
        let mut done = Vec::new();
        let copied = bridge
            .outbound
            .spill(tx.queue.memory(), keep, |chain| done.push(chain));
        for chain in done {
            tx.complete(chain, 0);
        }
        cx.counters.copied_bytes.add(copied as u64);
    }

    /// There was no memory for bytes of this connection: it is reset, whatever it has.
    #[cold]
    pub(super) fn end_for_want_of_memory(&mut self, key: u32, cx: &mut Context<'_>) {
        cx.counters.no_memory.add(1);
        tracing::warn!(cid = %self.cid, "a connection was reset: no memory for what it has sent");
        self.reset_bridge(key, cx);
    }

    /// The device's overflow is over its cap: the connections that have most of it are reset, until
    /// an eighth of the cap is free again. So all connections are looked through once for many
    /// bytes, however small the parts are that each has of them.
    fn shed(&mut self, cx: &mut Context<'_>) {
        let with_bytes = |(key, bridge): (usize, &Bridge)| match bridge.counted.1 {
            0 => None,
            bytes => Some((bytes, key as u32)),
        };
        let mut all: Vec<_> = self.bridges.iter().filter_map(with_bytes).collect();
        all.sort_unstable_by(|one, other| other.cmp(one));
        for (_, key) in all {
            if self.overflow_bytes <= cx.limits.overflow / 8 * 7 {
                break;
            }
            cx.counters.overflow_resets.add(1);
            tracing::warn!(cid = %self.cid, "a connection whose reader stalls was reset: overflow");
            self.reset_bridge(key, cx);
        }
    }
}

/// How many chains of a queue of `size` one stalled connection may hold.
pub(super) fn share_of(size: u16) -> usize {
    usize::from(size / 8).max(1)
}

fn send_held(bridge: &Bridge, memory: &zerosock_ring::Memory) -> Wrote {
    let BridgePeer::Socket { socket, .. } = &bridge.end else {
        return Wrote::Full;
    };
    let mut slices = SliceBuf::<SLICES>::new();
    let want = bridge.outbound.gather(memory, &mut slices);
    wrote(zerosock_sys::send_slices(socket.as_fd(), &slices), want)
}

fn send_overflow(bridge: &Bridge) -> Wrote {
    let BridgePeer::Socket { socket, .. } = &bridge.end else {
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
        },
        Err(e) => match Errno::from_io_error(&e) {
            // Interrupted: nothing was taken; try again in the same loop.
            Some(Errno::INTR) => Wrote::Some {
                bytes: 0,
                all: true,
            },
            Some(Errno::AGAIN) => Wrote::Full,
            Some(Errno::NOBUFS | Errno::NOMEM) => Wrote::NoMemory,
            Some(Errno::FAULT) => Wrote::Lost,
            _ => Wrote::Gone,
        },
    }
}
