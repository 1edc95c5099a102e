//! Sockets whose bytes are read where they lie and written where they will be read.
//!
//! An endpoint is whatever has a CID. A program has one of two kinds:
//!
//! - an [`Endpoint`]: the program attaches to a host in another process, or to `zerosock serve`,
//!   and is a guest without a virtual machine there;
//! - a [`Host`]: the program has the device in itself, and is CID 2 to VMs and processes.
//!
//! Both give the same [`Stream`]s and [`Listener`]s. Bytes move in two ways that may be mixed: by
//! copying ([`std::io::Read`], [`std::io::Write`]), or in place ([`Lease`], [`Loan`]).
//!
//! # Whom it trusts
//! Nobody, unless told. A peer may change bytes while they are on lease; so a lease is copied from,
//! or handed to the system. Plain slices of it are given only for peers that are processes and
//! whose endpoint was opened with [`Trust`]: an `unsafe` declaration that they do not do that.
//!
//! # What each file is for
//! `stream`, `listener`, `lease`, `loan`, `message`: what the user has in hand. `core`: the lock,
//! the waiting. `engine`: what the core drives. `sockets`: the table of connections that both
//! engines share, with the bounds on what is held. `rxmap`: the interface of memory-mapped receive.
//! `leases`: the words that holders share with it.

pub(crate) mod core;
pub(crate) mod endpoint;
pub(crate) mod engine;
pub(crate) mod errors;
#[cfg(test)]
mod fake;
mod host;
mod lease;
pub(crate) mod leases;
mod listener;
mod loan;
mod message;
mod poller;
pub mod rxmap;
pub(crate) mod socket_file;
pub(crate) mod sockets;
mod stream;
#[cfg(feature = "tokio")]
pub mod tokio;
mod waiting;

pub use crate::attach::Fault;
pub use crate::device::control::Fault as FrontendFault;
pub use endpoint::{Endpoint, EndpointBuilder, OpenError};
pub use engine::EndpointStats;
pub use errors::{ConnectError, EndpointOver, ListenError, StreamError};
pub use host::{Host, HostBuilder};
pub use lease::{Lease, OwnedLease, Reading};
pub use listener::Listener;
pub use loan::{Filling, Loan};
pub use message::Message;
pub use poller::{Poller, Readiness, Ready};
pub use rxmap::{PagedRxMap, RxMap, RxMapError};
pub use sockets::StreamState;
pub use stream::{Batch, Stream};
pub use waiting::Wait;
pub use zerosock_ring::Trust;
