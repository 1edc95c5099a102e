//! Pairs of sockets that the kernel joins itself (sockmap): packets pass from one to the other without
//! a system call and without a copy to user space.
//!
//! The kernel redirects packets and nothing else. [`RedirectedPair::turn`] does the rest by hand: bytes that were
//! there before, the end of a stream, a bound on the bytes under way, and errors. `docs/sockmap.md` says
//! when this pays.
//!
//! # Invariants
//! - Sources are UDP and Unix datagram sockets, and vsock into TCP. TCP is never a source: the kernel gives
//!   the program a segment that repeats bytes as a whole, so that they would arrive twice.
//! - Bytes of a stream arrive once and in order. The program redirects only while all packets that it
//!   left at their socket have been sent on by hand, and a turn sends by hand only while the target has
//!   taken all that was redirected.
//! - At most `limit` bytes of a direction are under way inside the kernel towards a TCP socket. The
//!   kernel itself has no bound: it takes all that the sender has, whether the target reads or not.
//! - A packet without bytes is never redirected: it would break the target for good.
//!
//! # Use
//! ```no_run
//! # use std::os::fd::OwnedFd;
//! # use zerosock_relay::sockmap::{Directions, RelayMap, SCRATCH, Side, RedirectState};
//! # fn join(vsock: OwnedFd, tcp: OwnedFd) -> Result<(), Box<dyn std::error::Error>> {
//! let map = RelayMap::new(1000)?;
//! let mut scratch = vec![0; SCRATCH];
//! let mut pair = map.insert_pair(vsock, tcp, 4 << 20, Directions::FromA)?;
//! loop {
//!     let turn = pair.turn(Side::A, &mut scratch)?;
//!     if turn.state == RedirectState::Ended {
//!         return Ok(());
//!     }
//!     // Wait until a socket of the pair is ready or the time `turn.again` has passed.
//! }
//! # }
//! ```
//! Register each socket with epoll for EPOLLRDHUP, edge-triggered, and while [`RedirectState::Idle`] for
//! EPOLLIN too. While bytes flow leave EPOLLIN out: from Linux 6.4 on each redirected packet would wake
//! the worker.
//!
//! A vsock socket of which part of a packet was read may not be inserted: the kernel redirects the whole
//! packet once more. Insert it unread, or after a read that found nothing. For the same reason its receive
//! buffer has at most [`SCRATCH`] bytes.

mod maps;
mod pair;
mod relay_map;

pub use maps::Side;
pub use pair::{DirectionCounters, RedirectState, RedirectedPair, SCRATCH, Turn, TurnError};
pub use relay_map::{Directions, InsertError, Refusal, RelayMap};

#[cfg(test)]
mod tests;
