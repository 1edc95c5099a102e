//! placeholder bodies; the signatures stand
#![allow(unused_variables, reason = "bodies follow")]
use std::sync::Arc;

use super::config::{LocalCids, ShardConfig};
use super::connection::{FlowId, FlowInfo, Reservation};
use super::event::{Disposition, DropReason, Event, Span, Transmit};
use super::ports::PortTable;
use super::state::How;
use crate::addr::{Address, Cid, Port};
use crate::time::Instant;
use crate::wire::vsock::{Repr, SocketType};

mod error;
pub use error::{
    CommitError, ConnectError, ConsumeError, FlowError, ListenError, ReserveError, SendError,
};

/// Counters since the shard was made.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
#[non_exhaustive]
pub struct ShardStats {
    /// Packets handled.
    pub packets: u64,
}

/// The connections of one queue pair.
#[derive(Debug)]
pub struct Shard<S = hashbrown::DefaultHashBuilder> {
    config: ShardConfig,
    stats: ShardStats,
    hasher: S,
}

impl Shard {
    /// A shard without connections, its hash keyed at random.
    pub fn new(config: ShardConfig, ports: Arc<PortTable>) -> Shard {
        Shard::with_hasher(config, ports, hashbrown::DefaultHashBuilder::default())
    }
}

impl<S: core::hash::BuildHasher> Shard<S> {
    /// A shard with a hash of the caller's.
    pub fn with_hasher(config: ShardConfig, ports: Arc<PortTable>, hasher: S) -> Shard<S> {
        Shard {
            config,
            stats: ShardStats::default(),
            hasher,
        }
    }
    /// Live connections.
    pub fn connections(&self) -> usize {
        0
    }
    /// About one connection.
    pub fn flow(&self, flow: FlowId) -> Option<FlowInfo> {
        None
    }
    /// Whether `poll_transmit` has something.
    pub fn has_transmit(&self) -> bool {
        false
    }
    /// Whether no more packets may be handled until some were transmitted.
    pub fn is_backlogged(&self) -> bool {
        false
    }
    /// Counters.
    pub fn stats(&self) -> &ShardStats {
        &self.stats
    }
    /// The configuration.
    pub fn config(&self) -> &ShardConfig {
        &self.config
    }
    /// Takes a packet's header.
    pub fn handle_packet(&mut self, now: Instant, header: &Repr) -> Disposition {
        Disposition::Dropped(DropReason::NoSocket)
    }
    /// Acts on timers due.
    pub fn handle_timeout(&mut self, now: Instant) {}
    /// A span's payload is no longer needed.
    pub fn handle_released(&mut self, span: Span) {}
    /// Drops all connections.
    pub fn handle_transport_reset(&mut self, now: Instant) {}
    /// Other CIDs of ours (device).
    pub fn set_local_cids(&mut self, local: LocalCids) {}
    /// Our new CID after a transport reset (driver).
    pub fn set_driver_cid(&mut self, cid: Cid) {}
    /// Asks for a connection.
    pub fn connect(
        &mut self,
        now: Instant,
        local: Address,
        peer: Address,
        socket_type: SocketType,
    ) -> Result<FlowId, ConnectError> {
        Err(ConnectError::TooManyConnections)
    }
    /// Accepts.
    pub fn accept(&mut self, now: Instant, flow: FlowId) -> Result<(), FlowError> {
        Err(FlowError::Stale)
    }
    /// Rejects.
    pub fn reject(&mut self, flow: FlowId) -> Result<(), FlowError> {
        Err(FlowError::Stale)
    }
    /// Shuts down.
    pub fn shutdown(&mut self, now: Instant, flow: FlowId, how: How) -> Result<(), FlowError> {
        Err(FlowError::Stale)
    }
    /// Resets.
    pub fn reset(&mut self, flow: FlowId) -> Result<(), FlowError> {
        Err(FlowError::Stale)
    }
    /// Counts bytes consumed.
    pub fn consume(&mut self, flow: FlowId, bytes: u32) -> Result<(), ConsumeError> {
        Err(ConsumeError::Stale)
    }
    /// Changes the receive buffer.
    pub fn set_buf_alloc(&mut self, flow: FlowId, buf_alloc: u32) -> Result<(), FlowError> {
        Err(FlowError::Stale)
    }
    /// Takes credit.
    pub fn reserve(&mut self, flow: FlowId, max: u32) -> Result<Reservation, ReserveError> {
        Err(ReserveError::Stale)
    }
    /// Makes a header.
    pub fn commit(
        &mut self,
        reservation: Reservation,
        len: u32,
        flags: u32,
    ) -> Result<Repr, CommitError> {
        Err(CommitError::Stale)
    }
    /// Gives credit back.
    pub fn cancel(&mut self, reservation: Reservation) {}
    /// Queues a send.
    pub fn send(&mut self, flow: FlowId, len: u32, flags: u32) -> Result<u64, SendError> {
        Err(SendError::Stale)
    }
    /// Listens.
    pub fn listen(&mut self, port: Port, backlog: usize) -> Result<(), ListenError> {
        Err(ListenError::InUse)
    }
    /// Listens no more.
    pub fn unlisten(&mut self, port: Port) -> Result<(), ListenError> {
        Err(ListenError::NotListening)
    }
    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        None
    }
    /// The next packet.
    pub fn poll_transmit(&mut self, now: Instant, max_payload: u32) -> Option<Transmit> {
        None
    }
    /// The next timer.
    pub fn poll_timeout(&self) -> Option<Instant> {
        None
    }
}
