//! What comes in: packets, events of the device, events of the protocol core.
//!
//! What must hold here: a header is read once into a private copy and only the copy is used; a
//! slot goes back to the device at once unless a connection holds it within its share.

use zerosock_proto::vsock::{Disposition, Event, FlowId};
use zerosock_proto::wire::vsock::{HEADER_LEN, Packet, Repr};
use zerosock_proto::{Address, Cid, Instant};

use super::errors::DriverError;
use super::stream::{News, StreamId, StreamState};
use super::{Driver, queues};

/// Packets taken in by one turn before the user gets a say.
const TURN_BUDGET: u16 = 256;

impl Driver {
    /// Takes packets from the receive queue into the protocol core.
    pub(super) fn take_packets(&mut self, now: Instant) -> Result<bool, DriverError> {
        let mut taken = 0;
        while taken < TURN_BUDGET && !self.shard.is_backlogged() {
            let Some((slot, written)) = self.rx.take()? else {
                break;
            };
            taken += 1;
            self.stats.rx_packets += 1;
            if !self.take_packet(now, slot, written) {
                self.give_back(slot)?;
            }
        }
        Ok(taken > 0)
    }

    /// One packet. Returns whether its slot stays with a connection.
    fn take_packet(&mut self, now: Instant, slot: u16, written: u32) -> bool {
        // The private copy: the device may change the header under us.
        let mut header = [0u8; HEADER_LEN];
        queues::read(
            &self.arena.memory,
            &self.arena.rx_headers,
            slot,
            &mut header,
        );
        let payload = written.checked_sub(HEADER_LEN as u32);
        let repr = Packet::new_checked(&header[..])
            .ok()
            .and_then(|p| Repr::parse(&p).ok());
        let (Some(payload), Some(repr)) = (payload, repr) else {
            self.stats.rx_malformed += 1;
            return false;
        };
        if repr.len > payload || repr.len > self.arena.rx_data.len() {
            self.stats.rx_malformed += 1;
            return false;
        }
        match self.shard.handle_packet(now, &repr) {
            Disposition::Deliver { flow, len, .. } => self.deliver(flow, slot, len),
            Disposition::Handled => false,
            Disposition::Dropped(_) => {
                self.stats.rx_dropped += 1;
                false
            }
        }
    }

    /// Payload for one of our connections. Returns whether the slot stays
    /// with it.
    fn deliver(&mut self, flow: FlowId, slot: u16, len: u32) -> bool {
        let Some(stream) = self.streams.of_flow(flow).filter(|_| len > 0) else {
            // Closed by us, and the peer does not know yet.
            return false;
        };
        self.stats.rx_bytes += u64::from(len);
        if self
            .streams
            .get(stream)
            .is_some_and(|entry| entry.unread == 0)
        {
            self.streams.announce(stream, News::Readable);
        }
        // One connection holds at most a quarter of the buffers, all of them
        // together three quarters: control packets always find one.
        let quarter = (self.config.slots() / 4).max(1);
        if self.rx.posted() > quarter && self.streams.may_hold(stream, quarter) {
            self.streams.hold(stream, slot, len);
            return true;
        }
        self.stats.rx_overflow_bytes += u64::from(len);
        let mut part = [0u8; 4096];
        let mut at = 0;
        while at < len as usize {
            let want = part.len().min(len as usize - at);
            let pieces = self.arena.rx_data.pieces(slot);
            let got = self.arena.memory.read(pieces, at, &mut part[..want]);
            if got == 0 {
                break;
            }
            self.streams.overflow(stream, &part[..got]);
            at += got;
        }
        false
    }

    /// Takes events from the event queue.
    pub(super) fn take_events(&mut self, now: Instant) -> Result<bool, DriverError> {
        let mut any = false;
        while let Some(id) = self.event_queue.take(&self.arena)? {
            any = true;
            if id == Some(0) {
                self.stats.transport_resets += 1;
                self.reset_seen = true;
                self.transport_reset(now);
            } else {
                self.stats.unknown_events += 1;
            }
        }
        Ok(any)
    }

    /// virtio 1.2, 5.10.6.7.1: read the CID again, drop the connections, keep
    /// the listeners.
    fn transport_reset(&mut self, now: Instant) {
        self.shard.handle_transport_reset(now);
        self.take_core_events(now);
        let cid = self
            .link
            .as_mut()
            .and_then(|link| link.frontend.guest_cid().ok());
        let Some(cid) = cid.and_then(|cid| Cid::guest(cid).ok()) else {
            return;
        };
        self.cid = cid;
        self.shard.set_driver_cid(cid);
    }

    /// Turns the protocol core's events into ours.
    pub(super) fn take_core_events(&mut self, now: Instant) {
        while let Some(event) = self.shard.poll_event() {
            match event {
                Event::Incoming {
                    flow, local, peer, ..
                } => self.incoming(now, flow, local, peer),
                Event::Connected { flow } => {
                    if let Some(stream) = self.streams.of_flow(flow) {
                        self.set_state(stream, StreamState::Connected);
                        self.streams.announce(stream, News::Connected);
                    }
                }
                Event::Refused { flow, .. } => {
                    if let Some(stream) = self.streams.of_flow(flow) {
                        self.set_state(stream, StreamState::Reset);
                        if let Some(entry) = self.streams.get_mut(stream) {
                            entry.flow = None;
                        }
                        self.streams.announce(stream, News::Refused);
                    }
                }
                Event::PeerShutdown {
                    flow,
                    receive,
                    send,
                } => {
                    if let Some(stream) = self.streams.of_flow(flow)
                        && let Some(entry) = self.streams.get_mut(stream)
                    {
                        entry.peer_finished |= send;
                        entry.peer_deaf |= receive;
                        self.streams.announce(stream, News::PeerShutdown);
                    }
                }
                Event::Writable { flow } => {
                    if let Some(stream) = self.streams.of_flow(flow) {
                        self.streams.announce(stream, News::Writable);
                    }
                }
                Event::Closed { flow, reason } => self.closed(flow, reason.is_orderly()),
            }
        }
    }

    fn incoming(&mut self, now: Instant, flow: FlowId, local: Address, peer: Address) {
        let listener = self
            .listeners
            .iter_mut()
            .find(|listener| listener.port == local.port);
        let Some(listener) = listener.filter(|one| one.waiting.len() < one.backlog) else {
            // A flow that ended meanwhile needs no answer.
            let _ = self.shard.reject(flow);
            return;
        };
        if self.shard.accept(now, flow).is_ok() {
            let stream = self
                .streams
                .insert(flow, StreamState::Connected, local, peer);
            listener.waiting.push_back(stream);
            listener.untold += 1;
        }
    }

    fn closed(&mut self, flow: FlowId, orderly: bool) {
        let Some(stream) = self.streams.of_flow(flow) else {
            return;
        };
        let Some(entry) = self.streams.get_mut(stream) else {
            return;
        };
        entry.flow = None;
        entry.state = if orderly {
            StreamState::Finished
        } else {
            StreamState::Reset
        };
        self.streams.announce(stream, News::Closed);
    }

    fn set_state(&mut self, stream: StreamId, state: StreamState) {
        if let Some(entry) = self.streams.get_mut(stream) {
            entry.state = state;
        }
    }
}
