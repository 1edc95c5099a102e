//! Connections that go on at another queue pair, and so in another shard (docs/queue-pairs.md).
//!
//! The driver asks, behind all it has sent, and then sends nothing: MOVE. The device takes the
//! connection out of its shard, puts it into the other one, and answers behind all that it has
//! sent: MOVED. Now both queues of the old pair are empty of it. The driver does the same, and its
//! first packet at the new pair tells the device that it may send there.
//!
//! What must hold: bytes keep their order, because nobody sends at the new pair before everything
//! of the old one was taken in; a connection is in one shard at most; nothing but its RST leaves
//! while it waits; credit and counts go with it.

use core::hash::BuildHasher;
use std::sync::Arc;

use super::{FlowError, MoveError, Shard};
use crate::Instant;
use crate::addr::{Address, Port};
use crate::vsock::config::Role;
use crate::vsock::connection::{Connection, FlowId, Key, MoveState};
use crate::vsock::event::{Disposition, DropReason};
use crate::vsock::ports::{PortRef, PortTable};
use crate::vsock::state::State;
use crate::wire::vsock::{Op, Repr};

/// A connection between two shards; it counts as one of theirs. One that is dropped is gone without
/// a word to its peer.
#[derive(Debug)]
#[must_use = "a connection that nobody adopts is gone"]
pub struct Handoff {
    /// Always there, but for one that was adopted.
    connection: Option<Box<Connection>>,
    /// Where it has its port.
    ports: Arc<PortTable>,
}

impl Drop for Handoff {
    fn drop(&mut self) {
        if let Some(connection) = &mut self.connection
            && let Some(hold) = connection.port_ref.take()
        {
            self.ports.release(connection.key.local, hold);
        }
        if self.connection.is_some() {
            self.ports.vacate(1);
        }
    }
}

impl<S: BuildHasher> Shard<S> {
    /// Whether connections may be moved between shards: at first not, and MOVE and MOVED are
    /// operations that nobody knows.
    pub fn set_moves(&mut self, negotiated: bool) {
        self.moves = negotiated;
    }

    /// A local port that nobody has now, for a connection whose shard depends on its port.
    /// A connection between the two addresses may be there all the same, one that the other end has
    /// asked for: see [`is_connected`](Self::is_connected). [`Port::ANY`]: there is none.
    pub fn spare_port(&self) -> Port {
        let Some((address, hold)) = self.ports.allocate(self.own_cid()) else {
            return Port::ANY;
        };
        self.ports.release(address, hold);
        address.port
    }

    /// Whether a connection between these two addresses is alive here, so that
    /// [`connect`](Self::connect) would fail. Looks at the address as it is: [`Cid::ANY`] is nobody.
    ///
    /// [`Cid::ANY`]: crate::Cid::ANY
    pub fn is_connected(&self, local: Address, peer: Address) -> bool {
        let index = self.table.look_up(&Key { local, peer });
        let slot = index.and_then(|index| self.table.slots.get(index as usize));
        let connection = slot.and_then(|slot| slot.connection.as_ref());
        connection.is_some_and(|connection| connection.state != State::Closed)
    }

    /// A driver's: asks the device that the connection go on at queue pair `pair`, another one. Until
    /// it has answered ([`Disposition::Moved`]) nothing is sent; what comes is delivered.
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

    /// A device's: whether [`extract`](Self::extract) would give a connection out.
    pub fn can_extract(&self, flow: FlowId) -> bool {
        self.table.get(flow).is_some_and(|c| {
            c.move_state == MoveState::Requested && is_movable(c.state) && !c.tx.has_reserved()
        })
    }

    /// A driver's: whether a connection is on its way, and nothing is sent.
    pub fn is_moving(&self, flow: FlowId) -> bool {
        let connection = self.table.get(flow);
        connection.is_some_and(|c| {
            matches!(
                c.move_state,
                MoveState::RequestQueued(_) | MoveState::RequestSent
            )
        })
    }

    /// A device's, after [`Disposition::Move`]: it stays at `pair`, where it is.
    ///
    /// # Errors
    /// [`MoveError::Stale`]; [`MoveError::WrongState`] if nobody has asked.
    pub fn decline_move(&mut self, flow: FlowId, pair: u16) -> Result<(), MoveError> {
        let connection = self.table.get_mut(flow).ok_or(MoveError::Stale)?;
        if connection.move_state != MoveState::Requested {
            return Err(MoveError::WrongState);
        }
        connection.move_state = MoveState::DeclineQueued(pair);
        self.update_lists(flow.index);
        Ok(())
    }

    /// A driver's, after [`Disposition::Moved`]: the connection goes on here.
    ///
    /// # Errors
    /// [`MoveError::Stale`]; [`MoveError::WrongState`] if it does so already.
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

    /// Takes a connection out, after [`Disposition::Move`] or [`Disposition::Moved`], for the shard
    /// of pair `pair` to [`insert`](Self::insert). Its id is invalid from now on, and no event tells
    /// of that; those that wait go with it. A device says so to its driver with the header that is
    /// returned: give it to [`send_moved`](Self::send_moved) when the other shard has adopted the
    /// connection, not before.
    ///
    /// # Errors
    /// See [`MoveError`]; nothing has changed.
    pub fn extract(
        &mut self,
        flow: FlowId,
        pair: u16,
    ) -> Result<(Handoff, Option<Repr>), MoveError> {
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
            // One that is being closed as well: its SHUTDOWN waits, and the device has moved it.
            MoveState::RequestSent => {
                connection.move_state = MoveState::No;
                connection.tx.resume();
                // The first packet at the new pair: the device waits for it.
                connection.control.credit_update = true;
                None
            }
            _ => return Err(MoveError::WrongState),
        };
        if let Some(queue) = &mut connection.queue {
            // Spans that are still out name an id of this shard.
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
        let handoff = Handoff {
            connection: Some(Box::new(connection)),
            ports: self.ports.clone(),
        };
        Ok((handoff, answer))
    }

    /// Takes a connection in that another shard of the same half has given up; its new id.
    ///
    /// # Errors
    /// The parcel again, if there is one between the same addresses, or no memory for it.
    pub fn insert(&mut self, mut handoff: Handoff) -> Result<FlowId, Handoff> {
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
        // Its first packet shall not take the straight path: there is something to be ended.
        self.table.forget_last();
        self.rearm(index);
        self.credit_changed(index);
        Ok(self.table.id(index))
    }

    /// Sends the answer that [`extract`](Self::extract) has returned, at the pair which the
    /// connection has left.
    pub fn send_moved(&mut self, answer: Repr) {
        self.resets.push_back(answer);
    }

    /// The peer of a connection is gone, and the next one knows nothing of it: it ends without an RST.
    /// As [`handle_transport_reset`](Self::handle_transport_reset), for one that came afterwards.
    ///
    /// # Errors
    /// [`FlowError`]: it is not there any more.
    pub fn forget(&mut self, now: Instant, flow: FlowId) -> Result<(), FlowError> {
        if self.table.get(flow).is_none() {
            return Err(FlowError::Stale);
        }
        self.forget_at(now, flow.index);
        Ok(())
    }

    /// After [`Disposition::MovedStray`], in the shard of the pair that was named: the device has a
    /// connection there, and we have none. `header` is that of the packet that said so.
    pub fn reset_stray(&mut self, header: &Repr) {
        // Counted where the packet came.
        let _ = self.reset_packet(header, DropReason::NoSocket);
    }

    /// MOVE or MOVED, where they were negotiated; `index`: the live connection that it is for.
    pub(super) fn receive_move(&mut self, index: Option<u32>, header: &Repr) -> Disposition {
        let is_device = matches!(self.config.role, Role::Device { .. });
        let asks = header.op == Op::Move.into();
        let pair = header.flags;
        if asks != is_device {
            return Disposition::Dropped(DropReason::Unexpected);
        }
        let found = index.and_then(|index| Some((self.table.id(index), self.table.at(index)?)));
        let Some((flow, connection)) = found else {
            return if asks {
                self.reset_packet(header, DropReason::NoSocket)
            } else {
                Disposition::MovedStray { pair }
            };
        };
        match connection.move_state {
            MoveState::No if asks && is_movable(connection.state) => {
                connection.move_state = MoveState::Requested;
                Disposition::Move { flow, pair }
            }
            MoveState::RequestSent if !asks => Disposition::Moved { flow, pair },
            _ => Disposition::Dropped(DropReason::Unexpected),
        }
    }

    /// The driver has sent something here for a connection that has come from another shard.
    pub(super) fn finish_move(&mut self, index: u32) {
        if let Some(connection) = self.table.at(index)
            && connection.move_state == MoveState::AwaitingDriver
        {
            connection.move_state = MoveState::No;
            connection.tx.resume();
        }
    }

    /// MOVE, or the MOVED of a connection that stays.
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

/// Whether both ends know the connection, and neither is about to give it up.
fn is_movable(state: State) -> bool {
    matches!(state, State::Established { local, .. } if !local.is_both())
}
