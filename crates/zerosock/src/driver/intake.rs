//! What comes in: packets, events of the device, events of the protocol core.
//!
//! What must hold here: a header is read once into a private copy and only the copy is used; a
//! slot goes back to the device at once unless a connection holds it; packets are taken in only
//! while there is room to hold what they bring, so that a quarter of the slots is always with the
//! device or on its way there.

use zerosock_proto::vsock::{Disposition, Event, FlowId};
use zerosock_proto::wire::vsock::{HEADER_LEN, Packet, Repr};
use zerosock_proto::{Address, Cid, Instant};

use super::errors::DriverError;
use super::{Driver, POOL};
use crate::vsock::sockets::{Held, News, Store, StreamId, StreamState};

/// Packets taken in by one turn before the user gets a say.
const TURN_BUDGET: u16 = 256;

impl Driver {
    /// Takes packets from the receive queue into the protocol core.
    pub(super) fn take_packets(&mut self, now: Instant) -> Result<bool, DriverError> {
        let mut taken = 0;
        while taken < TURN_BUDGET && !self.is_blocked() {
            let Some((slot, written)) = self.store.rx.take()? else {
                break;
            };
            taken += 1;
            self.take_packet(now, slot, written);
        }
        self.stats.rx_packets += u64::from(taken);
        Ok(taken > 0)
    }

    /// One packet. Its slot goes back, or stays with a connection.
    #[inline]
    fn take_packet(&mut self, now: Instant, slot: u16, written: u32) {
        let arena = &self.store.arena;
        // The private copy: the device may change the header under us.
        let header = arena
            .memory
            .read_array::<HEADER_LEN>(arena.rx_headers.pieces(slot), 0);
        let payload = written.checked_sub(HEADER_LEN as u32);
        let repr = header
            .and_then(|header| Packet::new_checked(header).ok())
            .and_then(|packet| Repr::parse(&packet).ok());
        let (Some(payload), Some(repr)) = (payload, repr) else {
            return self.malformed(slot);
        };
        if repr.len > payload || repr.len > arena.rx_data.len() {
            return self.malformed(slot);
        }
        match self.store.shard.handle_packet(now, &repr) {
            Disposition::Deliver { flow, len, .. } => {
                let held = Held {
                    token: slot,
                    offset: 0,
                    len,
                    since: now,
                };
                match self.flow(flow) {
                    Some(stream) => self.sockets.deliver(stream, held, &mut self.store),
                    // Closed by us, and the peer does not know yet.
                    None => self.store.release(slot),
                }
            }
            Disposition::Handled => self.store.release(slot),
            Disposition::Dropped(_) => {
                self.stats.rx_dropped += 1;
                self.store.release(slot);
            }
        }
    }

    #[cold]
    fn malformed(&mut self, slot: u16) {
        self.stats.rx_malformed += 1;
        self.store.release(slot);
    }

    /// The connection that a flow of the protocol core belongs to.
    #[inline]
    fn flow(&self, flow: FlowId) -> Option<StreamId> {
        let stream = self.flows.get(flow)?;
        let conn = self.sockets.get(stream)?;
        (conn.flow == Some(flow)).then_some(stream)
    }

    /// Takes events from the event queue.
    pub(super) fn take_events(&mut self, now: Instant) -> Result<bool, DriverError> {
        let mut any = false;
        while let Some(id) = self.event_queue.take(&self.store.arena)? {
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
        self.store.shard.handle_transport_reset(now);
        self.take_core_events(now);
        let cid = self
            .link
            .as_mut()
            .and_then(|link| link.frontend.guest_cid().ok());
        let Some(cid) = cid.and_then(|cid| Cid::guest(cid).ok()) else {
            return;
        };
        self.cid = cid;
        self.store.shard.set_driver_cid(cid);
    }

    /// Turns the protocol core's events into ours.
    pub(super) fn take_core_events(&mut self, now: Instant) {
        while let Some(event) = self.store.shard.poll_event() {
            match event {
                Event::Incoming {
                    flow, local, peer, ..
                } => self.incoming(now, flow, local, peer),
                Event::Connected { flow } => {
                    if let Some(stream) = self.flow(flow) {
                        self.set_state(stream, StreamState::Connected);
                        self.sockets.announce(stream, News::Connected);
                    }
                }
                Event::Refused { flow, .. } => {
                    if let Some(stream) = self.flow(flow) {
                        self.set_state(stream, StreamState::Reset);
                        if let Some(entry) = self.sockets.get_mut(stream) {
                            entry.flow = None;
                        }
                        self.sockets.announce(stream, News::Refused);
                    }
                }
                Event::PeerShutdown {
                    flow,
                    receive,
                    send,
                } => {
                    if let Some(stream) = self.flow(flow)
                        && let Some(entry) = self.sockets.get_mut(stream)
                    {
                        entry.peer_finished |= send;
                        entry.peer_deaf |= receive;
                        self.sockets.announce(stream, News::PeerShutdown);
                    }
                }
                Event::Writable { flow } => {
                    if let Some(stream) = self.flow(flow) {
                        self.sockets.announce(stream, News::Writable);
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
            let _ = self.store.shard.reject(flow);
            return;
        };
        if self.store.shard.accept(now, flow).is_ok() {
            let state = StreamState::Connected;
            let stream = self.sockets.insert(POOL, flow, state, local, peer);
            self.flows.insert(flow, stream);
            listener.waiting.push_back(stream);
            listener.untold += 1;
        }
    }

    fn closed(&mut self, flow: FlowId, orderly: bool) {
        let Some(stream) = self.flow(flow) else {
            return;
        };
        let Some(entry) = self.sockets.get_mut(stream) else {
            return;
        };
        entry.flow = None;
        entry.state = if orderly {
            StreamState::Finished
        } else {
            StreamState::Reset
        };
        self.sockets.announce(stream, News::Closed);
    }

    fn set_state(&mut self, stream: StreamId, state: StreamState) {
        if let Some(entry) = self.sockets.get_mut(stream) {
            entry.state = state;
        }
    }
}
