//! Connections: credit, states, ports, and the [`Shard`] that owns them.
//!
//! Start with [`Shard`]: its documentation says how to drive all this.

pub mod config;
pub mod connection;
pub mod credit;
pub mod datagram;
pub mod endpoint;
pub mod event;
pub mod features;
pub mod flow_id;
pub mod flow_log;
pub mod messages;
pub mod pairs;
pub mod ports;
pub mod snapshot;
pub mod state;

pub use config::{LocalCids, Role, ShardConfig};
pub use connection::{FlowInfo, MessageReservation, Reservation};
pub use credit::SMALL_PACKET;
pub use endpoint::{
    CommitError, ConnectError, ConsumeError, FlowError, ListenError, ReserveError, SendError,
    Shard, ShardStats, check_snapshot_version,
};
pub use event::{CloseReason, Disposition, DropReason, Event, RefuseReason, Span, Transmit};
pub use flow_id::FlowId;
pub use flow_log::{FlowLog, LoggedFlow};
pub use pairs::QueuePairs;
pub use ports::PortTable;
pub use snapshot::RestoreError;
pub use state::{Directions, State};
