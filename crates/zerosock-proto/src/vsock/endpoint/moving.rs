//! Moves connections to another queue pair, and so to another shard (docs/queue-pairs.md).
//!
//! The driver sends MOVE behind all its packets of the connection, and then sends nothing. The
//! device extracts the connection from its shard, inserts it into the other, and answers with MOVED
//! behind all its packets. Now both queues of the old pair hold no packet of the connection. The
//! driver moves it too, and its first packet at the new pair permits the device to send there.
//!
//! # Invariants
//! - Bytes keep their order: neither side sends at the new pair before the other has handled all
//!   packets of the old one.
//! - A connection is in one shard at most.
//! - While a connection waits, only its RST is sent.
//! - Credit and counters move with it.

use core::hash::BuildHasher;
use std::sync::Arc;

use super::{FlowError, MoveError, Shard};
use crate::Instant;
use crate::addr::{Address, Port};
use crate::vsock::config::Role;
use crate::vsock::connection::{Connection, Key, MoveState};
use crate::vsock::event::{Disposition, DropReason};
use crate::vsock::flow_id::FlowId;
use crate::vsock::ports::{PortRef, PortTable};
use crate::vsock::state::State;
use crate::wire::vsock::{Op, Repr};

/// A connection between two shards. It counts against their common limit; dropping it ends the
/// connection without an RST.
#[derive(Debug)]
#[must_use = "a connection that is not inserted ends"]
pub struct FlowSnapshot {
    /// `None` only after `insert`.
    connection: Option<Box<Connection>>,
    /// The table of its port.
    ports: Arc<PortTable>,
}

impl Drop for FlowSnapshot {
    fn drop(&mut self) {
        if let Some(connection) = &mut self.connection
            && let Some(port_ref) = connection.port_ref.take()
        {
            self.ports.release(connection.key.local, port_ref);
        }
        if self.connection.is_some() {
            self.ports.vacate(1);
        }
    }
}

impl<S: BuildHasher> Shard<S> {
    /// Sets whether moves were negotiated. Initially they are not, and MOVE and MOVED are unknown
    /// operations.
    pub fn set_moves(&mut self, negotiated: bool) {
        self.moves = negotiated;
    }

    /// An unused local port, for a connection that is assigned to a shard by its port;
    /// [`Port::ANY`]: none is left. A connection that the peer requested may still have these
    /// addresses: see [`is_connected`](Self::is_connected).
    pub fn spare_port(&self) -> Port {
        let Some((address, port_ref)) = self.ports.allocate(self.own_cid()) else {
            return Port::ANY;
        };
        self.ports.release(address, port_ref);
        address.port
    }

    /// Whether a live connection here has these addresses, so that [`connect`](Self::connect) would
    /// fail. Wildcards are not resolved: [`Cid::ANY`] matches no connection.
    ///
    /// [`Cid::ANY`]: crate::Cid::ANY
    pub fn is_connected(&self, local: Address, peer: Address) -> bool {
        let index = self.table.look_up(&Key { local, peer });
        let slot = index.and_then(|index| self.table.slots.get(index as usize));
        let connection = slot.and_then(|slot| slot.connection.as_ref());
        connection.is_some_and(|connection| connection.state != State::Closed)
    }

    /// On a driver: requests that the device move the connection to another queue pair, `pair`.
    /// Until the answer ([`Disposition::Moved`]) nothing is sent; received packets are delivered.
    ///
    /// # Errors
    /// See [`MoveError`]; nothing has changed.
    pub fn request_move(&mut self, flow: FlowId, pair: u16) -> Result<(), MoveError> {
        if !self.moves || matches!(self.config.role, Role::Device { .. }) {
            return Err(MoveError::NotNegotiated);
        }
        let connection = self.table.get_mut(flow).ok_or(MoveError::Stale)?;
        if !is_movable(connection.state) {
            return Err(MoveError::WrongState);
        }
        if connection.move_state != MoveState::No || connection.tx.has_reserved() {
            return Err(MoveError::Busy);
        }
        connection.move_state = MoveState::RequestQueued(pair);
        connection.tx.pause();
        self.update_lists(flow.index);
        Ok(())
    }

    /// On a device: whether [`extract`](Self::extract) would succeed.
    pub fn can_extract(&self, flow: FlowId) -> bool {
        self.table.get(flow).is_some_and(|c| {
            c.move_state == MoveState::Requested && is_movable(c.state) && !c.tx.has_reserved()
        })
    }

    /// On a driver: whether a move was requested and not answered, so that nothing is sent.
    pub fn is_moving(&self, flow: FlowId) -> bool {
        let connection = self.table.get(flow);
        connection.is_some_and(|c| {
            matches!(
                c.move_state,
                MoveState::RequestQueued(_) | MoveState::RequestSent
            )
        })
    }

    /// On a device, after [`Disposition::Move`]: declines the move; the connection stays at `pair`,
    /// where it is.
    ///
    /// # Errors
    /// [`MoveError::Stale`]; [`MoveError::WrongState`] without a request.
    pub fn decline_move(&mut self, flow: FlowId, pair: u16) -> Result<(), MoveError> {
        let connection = self.table.get_mut(flow).ok_or(MoveError::Stale)?;
        if connection.move_state != MoveState::Requested {
            return Err(MoveError::WrongState);
        }
        connection.move_state = MoveState::DeclineQueued(pair);
        self.update_lists(flow.index);
        Ok(())
    }

    /// On a driver, after [`Disposition::Moved`] that names the same pair: resumes sending.
    ///
    /// # Errors
    /// [`MoveError::Stale`]; [`MoveError::WrongState`] if no answer was outstanding.
    pub fn resume(&mut self, flow: FlowId) -> Result<(), MoveError> {
        let connection = self.table.get_mut(flow).ok_or(MoveError::Stale)?;
        if connection.move_state != MoveState::RequestSent {
            return Err(MoveError::WrongState);
        }
        connection.move_state = MoveState::No;
        connection.tx.resume();
        self.credit_changed(flow.index);
        Ok(())
    }

    /// Extracts a connection, after [`Disposition::Move`] or [`Disposition::Moved`]; the shard of
    /// pair `pair` is to [`insert`](Self::insert) it. Its id is invalid from now on, without an
    /// event; pending events move with it. On a device the result has a header: pass it to
    /// [`send_moved`](Self::send_moved) when the other shard has inserted the connection, not
    /// before.
    ///
    /// # Errors
    /// See [`MoveError`]; nothing has changed.
    pub fn extract(
        &mut self,
        flow: FlowId,
        pair: u16,
    ) -> Result<(FlowSnapshot, Option<Repr>), MoveError> {
        let connection = self.table.get_mut(flow).ok_or(MoveError::Stale)?;
        if connection.tx.has_reserved() {
            return Err(MoveError::Busy);
        }
        let answer = match connection.move_state {
            MoveState::Requested if is_movable(connection.state) => {
                connection.move_state = MoveState::AwaitingDriver;
                connection.tx.pause();
                Some(connection.header(Op::Moved, 0, u32::from(pair)))
            }
            // Also for a connection that is closing: its SHUTDOWN is queued, and the device has
            // moved it.
            MoveState::RequestSent => {
                connection.move_state = MoveState::No;
                connection.tx.resume();
                // The first packet at the new pair, which the device waits for.
                connection.control.credit_update = true;
                None
            }
            _ => return Err(MoveError::WrongState),
        };
        if let Some(queue) = &mut connection.queue {
            // Unreleased spans have an id of this shard.
            queue.unreleased = 0;
        }
        if let Some(armed) = connection.armed.take() {
            self.timers.remove(&(armed, flow.index));
        }
        let slots = &mut self.table.slots;
        self.control.remove(slots, flow.index);
        self.data.remove(slots, flow.index);
        self.events.remove(slots, flow.index);
        let connection = self.table.take(flow.index).ok_or(MoveError::Stale)?;
        self.live -= 1;
        self.held_ports -= usize::from(connection.port_ref == Some(PortRef::Outgoing));
        self.stats.moved_out += 1;
        let handoff = FlowSnapshot {
            connection: Some(Box::new(connection)),
            ports: self.ports.clone(),
        };
        Ok((handoff, answer))
    }

    /// Inserts a connection that another shard of the same half has extracted; returns its new id.
    ///
    /// # Errors
    /// The handoff, if a connection has the same addresses or there is no memory.
    pub fn insert(&mut self, mut handoff: FlowSnapshot) -> Result<FlowId, FlowSnapshot> {
        let Some(connection) = handoff.connection.take() else {
            return Err(handoff);
        };
        if !self.table.reserve_one() || !self.vacate(&connection.key) {
            handoff.connection = Some(connection);
            return Err(handoff);
        }
        self.live += 1;
        self.held_ports += usize::from(connection.port_ref == Some(PortRef::Outgoing));
        self.stats.moved_in += 1;
        let index = self.table.insert(*connection);
        // Its first packet must not take the fast path: it completes the move.
        self.table.forget_last();
        self.rearm(index);
        self.credit_changed(index);
        Ok(self.table.id(index))
    }

    /// Queues the answer that [`extract`](Self::extract) returned, at the pair which the connection
    /// has left.
    pub fn send_moved(&mut self, answer: Repr) {
        self.resets.push_back(answer);
    }

    /// Ends a connection without an RST: its peer is gone, and the next one does not know it. As
    /// [`handle_transport_reset`](Self::handle_transport_reset), for a connection inserted
    /// afterwards.
    ///
    /// # Errors
    /// [`FlowError::Stale`]: it has ended.
    pub fn forget(&mut self, now: Instant, flow: FlowId) -> Result<(), FlowError> {
        if self.table.get(flow).is_none() {
            return Err(FlowError::Stale);
        }
        self.forget_at(now, flow.index);
        Ok(())
    }

    /// After [`Disposition::MovedStray`], in the shard of the pair that was named: resets the
    /// connection that the device has there and we do not have. `header` is the header of that
    /// MOVED.
    pub fn reset_stray(&mut self, header: &Repr) {
        // The other shard has counted the packet.
        let _ = self.reset_packet(header, DropReason::NoSocket);
    }

    /// Handles a negotiated MOVE or MOVED; `index`: the live connection that it is for.
    pub(super) fn receive_move(&mut self, index: Option<u32>, header: &Repr) -> Disposition {
        let is_device = matches!(self.config.role, Role::Device { .. });
        let is_request = header.op == Op::Move.into();
        let pair = header.flags;
        if is_request != is_device {
            return Disposition::Dropped(DropReason::Unexpected);
        }
        let found = index.and_then(|index| Some((self.table.id(index), self.table.at(index)?)));
        let Some((flow, connection)) = found else {
            return if is_request {
                self.reset_packet(header, DropReason::NoSocket)
            } else {
                Disposition::MovedStray { pair }
            };
        };
        match connection.move_state {
            MoveState::No if is_request && is_movable(connection.state) => {
                connection.move_state = MoveState::Requested;
                Disposition::Move { flow, pair }
            }
            MoveState::RequestSent if !is_request => Disposition::Moved { flow, pair },
            _ => Disposition::Dropped(DropReason::Unexpected),
        }
    }

    /// The driver's first packet here for an inserted connection completes the move.
    pub(super) fn finish_move(&mut self, index: u32) {
        if let Some(connection) = self.table.at(index)
            && connection.move_state == MoveState::AwaitingDriver
        {
            connection.move_state = MoveState::No;
            connection.tx.resume();
        }
    }

    /// The header of MOVE, or of the MOVED that declines.
    pub(super) fn moving_header(&mut self, index: u32) -> Option<Repr> {
        let connection = self.table.at(index)?;
        let (next, op, pair) = match connection.move_state {
            MoveState::RequestQueued(pair) => (MoveState::RequestSent, Op::Move, pair),
            MoveState::DeclineQueued(pair) => (MoveState::No, Op::Moved, pair),
            MoveState::No
            | MoveState::RequestSent
            | MoveState::Requested
            | MoveState::AwaitingDriver => return None,
        };
        connection.move_state = next;
        Some(connection.header(op, 0, u32::from(pair)))
    }
}

/// Whether both ends are connected and we are not closing.
fn is_movable(state: State) -> bool {
    matches!(state, State::Established { local, .. } if !local.is_both())
}
