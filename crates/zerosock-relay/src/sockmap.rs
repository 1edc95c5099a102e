//! Pairs of sockets that the kernel joins itself (sockmap): packets pass from one to the other without
//! a system call and without a copy to user space.
//!
//! The kernel redirects packets and nothing else. [`Pair::turn`] does the rest by hand: bytes that were
//! there before, the end of a stream and half-close, a bound on the bytes under way, and errors.
//! `docs/sockmap.md` says when this pays.
//!
//! # Invariants
//! - Bytes of a stream arrive once and in order. The program redirects only while all packets that it
//!   left at their socket have been sent on by hand, and a turn sends by hand only while the target has
//!   taken all that was redirected.
//! - At most `limit` bytes of a direction are under way inside the kernel towards a TCP socket. The
//!   kernel itself has no bound: it takes all that the sender has, whether the target reads or not.
//! - A packet without bytes is never redirected: it would break the target for good.
//!
//! # Use
//! ```no_run
//! # use std::net::TcpStream;
//! # use zerosock_relay::sockmap::{Directions, RelayMap, Side, State};
//! # fn join(a: TcpStream, b: TcpStream, scratch: &mut [u8]) -> Result<(), Box<dyn std::error::Error>> {
//! let map = RelayMap::new(1000)?;
//! let mut pair = map.insert_pair(a, b, 4 << 20, Directions::Both)?;
//! loop {
//!     let forth = pair.turn(Side::A, scratch)?;
//!     let back = pair.turn(Side::B, scratch)?;
//!     if (forth.state, back.state) == (State::Ended, State::Ended) {
//!         return Ok(());
//!     }
//!     // Wait until a socket of the pair is ready or the earlier `again` has passed.
//! }
//! # }
//! ```
//! Register each socket with epoll for EPOLLRDHUP, edge-triggered, and while [`State::Idle`] for
//! EPOLLIN too. While bytes flow leave EPOLLIN out: from Linux 6.4 on each redirected packet would wake
//! the worker.
//!
//! A socket of which part of a packet was read may not be inserted: the kernel redirects the whole
//! packet once more. Insert it unread, or after a read that found nothing.

mod maps;
mod pair;
mod relay_map;

pub use maps::Side;
pub use pair::{Counters, Pair, State, Turn, TurnError};
pub use relay_map::{Directions, InsertError, Refusal, RelayMap};

#[cfg(test)]
mod tests;
