//! Sockets for tokio: [`AsyncRead`], [`AsyncWrite`], and leases, loans and messages that are
//! awaited.
//!
//! An async socket is a non-blocking socket registered with the `reactor` of its endpoint. `stream`
//! has streams and listeners, `halves` splits streams; `messages` has seqpacket sockets, `datagram`
//! datagram sockets; all connect from an
//! [`EndpointRef`](super::EndpointRef).
//!
//! [`Endpoint::attach`](super::Endpoint::attach) blocks, by default for 10 s at most: call it before the runtime starts, or in `spawn_blocking`. A
//! [`Host`](super::Host) in the same runtime must have an async socket by then, because its first one begins to drive
//! it.
//!
//! [`AsyncRead`]: ::tokio::io::AsyncRead
//! [`AsyncWrite`]: ::tokio::io::AsyncWrite

mod calls;
mod datagram;
mod halves;
mod messages;
mod reactor;
mod stream;
#[cfg(test)]
mod tests;

pub use datagram::{AsyncDatagram, AsyncDatagramLoan};
pub use halves::{OwnedReadHalf, OwnedWriteHalf, ReuniteError};
pub use messages::{AsyncMessageLoan, AsyncSeqPacket, AsyncSeqPacketListener};
pub use stream::{AsyncListener, AsyncStream};
