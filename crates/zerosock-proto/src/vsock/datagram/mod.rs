//! Datagrams (docs/datagrams.md): sockets and their bounds, fragments, and who is to send no more.
//!
//! There are no connections here and no credit, and so nothing of this touches a
//! [`Shard`](super::Shard): a caller looks at a packet's type and brings it to the one or the other.
//!
//! # How to drive it
//! Of each queue that packets come from there is one [`Assembler`]; it says of every packet whether
//! its payload is a datagram, or a part to be kept; and, with [`Assembler::take_lost`], what of a
//! datagram has been thrown away, which goes to [`DatagramTable::handle_lost`] to be counted. A whole one goes to [`DatagramTable::receive`],
//! which names its socket or says why it is dropped; when its reader is done with it, to
//! [`DatagramTable::consume`]. Sending asks [`DatagramTable::may_send`] first. Packets of the flow
//! control go to [`DatagramTable::handle_control`], and come out of
//! [`DatagramTable::poll_control`], which is to be asked after every turn and when
//! [`DatagramTable::poll_timeout`] is over. A switch that keeps datagrams for somebody who has no
//! buffers uses [`PausedSenders`] by itself.
//!
//! What must hold: no payload and no clock; whatever a peer can make grow has a bound
//! ([`DatagramLimits`], [`Stops::MAX`], [`PausedDestinations::MAX`]); a lost packet of the flow control costs
//! time, and nothing else.

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
    BindError, DatagramDrops, DatagramId, DatagramLimits, DatagramStats, DatagramTable, DropCause,
    Refusal,
};
pub use wire::{Control, F_DGRAM, F_DGRAM_FLOW, PauseSource, data};

use core::time::Duration;

/// Payload bytes of the longest datagram; longer ones are refused (EMSGSIZE).
pub const MAX_DATAGRAM: u32 = 65536;

/// RW on DGRAM, bit 0: the only or the last fragment.
pub const DGRAM_EOM: u32 = 1 << 0;

/// How long a STOP holds that is not repeated: after that its source may try again.
pub const STOP_DURATION: Duration = Duration::from_millis(500);

/// After how long a receiver that is still full repeats its STOP.
pub const STOP_REPEAT_INTERVAL: Duration = Duration::from_millis(200);

/// How soon a STOP is repeated to a source that goes on sending.
pub const STOP_RESEND_DELAY: Duration = Duration::from_millis(10);

/// How long the fragments of a datagram may take, from the first to the last.
pub const ASSEMBLY_TIMEOUT: Duration = Duration::from_secs(1);

/// What a datagram counts for in a receive buffer beside its payload, so that empty ones are not
/// free of charge.
pub const OVERHEAD: u32 = 128;
