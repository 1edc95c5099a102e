//! Datagrams (docs/datagrams.md): sockets, their limits, reassembly and flow control.
//!
//! Datagrams have no connection and no credit, and nothing here touches a [`Shard`](super::Shard):
//! the caller looks at the type of a packet and hands it to the one or the other.
//!
//! # Invariants
//! - Nothing here holds payload or reads a clock.
//! - Everything that a peer can make grow has a bound ([`DatagramLimits`], [`PausedSenders::MAX`],
//!   [`PausedDestinations::MAX`]).
//! - A lost flow control packet costs time and nothing else.
//!
//! # How to drive it
//! Each queue that delivers packets has one [`Assembler`]. It tells for every packet whether its
//! payload is a datagram or a part to be kept; [`Assembler::take_lost`] returns the datagram that
//! it discarded, which [`DatagramTable::handle_lost`] counts. Hand a complete datagram to
//! [`DatagramTable::receive`], which returns its socket or the reason for dropping it, and call
//! [`DatagramTable::consume`] when the application has read it. Before a send, ask
//! [`DatagramTable::may_send`]. Hand flow control packets to [`DatagramTable::handle_control`];
//! send those that [`DatagramTable::poll_control`] returns, after every turn and when
//! [`DatagramTable::poll_timeout`] has passed. A switch that queues datagrams for an endpoint
//! without receive buffers uses [`PausedSenders`] by itself.

mod assembly;
mod paused_destinations;
mod paused_senders;
mod quota;
mod table;
mod wire;

pub use assembly::{Assembler, Lost, PayloadPart};
pub use paused_destinations::{PauseReason, PausedDestinations};
pub use paused_senders::PausedSenders;
pub use table::{
    BindError, DatagramDrops, DatagramId, DatagramLimits, DatagramRefusal, DatagramStats,
    DatagramTable, DropCause,
};
pub use wire::{Control, F_DGRAM, F_DGRAM_FLOW, PauseSource, data};

use core::time::Duration;

/// Payload bytes of the longest datagram; longer ones are refused (EMSGSIZE).
pub const MAX_DATAGRAM: u32 = 65536;

/// RW on DGRAM, bit 0: the only or the last fragment.
pub const DGRAM_EOM: u32 = 1 << 0;

/// How long a source stays paused after its last STOP.
pub const STOP_DURATION: Duration = Duration::from_millis(500);

/// Interval at which a receiver that is still full repeats STOP.
pub const STOP_REPEAT_INTERVAL: Duration = Duration::from_millis(200);

/// Delay before STOP is repeated to a source that keeps sending.
pub const STOP_RESEND_DELAY: Duration = Duration::from_millis(10);

/// Longest time from the first to the last fragment of a datagram.
pub const ASSEMBLY_TIMEOUT: Duration = Duration::from_secs(1);

/// Bytes that a datagram counts for in a buffer beside its payload, so that empty datagrams are
/// bounded too.
pub const OVERHEAD: u32 = 128;
