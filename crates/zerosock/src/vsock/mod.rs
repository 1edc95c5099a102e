//! Sockets whose bytes are read where they lie and written where they will be read.
//!
//! An endpoint is whatever has a CID. A program has one of two kinds:
//!
//! - an [`Endpoint`]: the program attaches to a host in another process, or to `zerosock serve`,
//!   and is a guest without a virtual machine there;
//! - a [`Host`]: the program has the device in itself, and is CID 2 to VMs and processes.
//!
//! Both give the same [`Stream`]s and [`Listener`]s, and [`SeqPacket`]s for messages. Bytes move in two ways that may be mixed: by
//! copying ([`std::io::Read`], [`std::io::Write`]), or in place ([`Lease`], [`Loan`]).
//!
//! # Whom it trusts
//! Nobody, unless told. A peer may change bytes while they are on lease; so a lease is copied from,
//! or handed to the system. Plain slices of it are given only for peers that are processes and
//! whose endpoint was opened with [`Trust`]: an `unsafe` declaration that they do not do that.
//!
//! # What lives how long
//! A borrowed [`Lease`], [`Loan`] or [`Batch`] cannot outlive its stream: that does not compile.
//! What owns its part keeps it alive: an endpoint, with its place and its name, lives as long as
//! the last of its [`Stream`]s, [`Listener`]s and [`OwnedLease`]s, whether or not the [`Endpoint`]
//! or [`Host`] value itself is still there; only a host's sockets are removed with its value, so
//! that nobody new comes. An [`OwnedLease`] stays readable when its stream, and even its sender,
//! are gone.
//!
//! # Forks
//! Rings and buffers lie in memory that a forked child shares with its parent, while the state that
//! goes with them is copied, and threads stay with the parent. A child that used its copy of an
//! endpoint, a host or a socket of one, or only dropped it, would write to the parent's rings and
//! close the parent's connections. So the child calls `execve` or `_exit`, or forgets its copies
//! ([`std::mem::forget`]), before anything drops them; their descriptors are close-on-exec.
//! [`std::process::Command`] does that. A child that needs an endpoint opens one of its own. What
//! holds for senders is said at [`zc::Sender`](crate::zc::Sender).
//!
//! # What each file is for
//! `endpoint`, `host`: how one comes to be either;
//! `service`: an endpoint that is the host.
//! `socket`: one before it is a connection or a listener, with `options` for what it may be told.
//! `connection`: what all connected sockets have; `stream`, `seqpacket`, `listener`, `lease`, `loan`,
//! `message`: what the user has in hand; `poller` and `tokio` wait for many of them, `waiting` says how;
//! `errors`: what goes wrong, and which side is at fault. `hub`: the lock, which caller drives the
//! queues and which ones sleep. `rxmap`: the interface of memory-mapped receive. The table of
//! connections beneath is the module `table`.

mod connection;
pub(crate) mod datagram;
pub(crate) mod endpoint;
pub(crate) mod errors;
#[cfg(test)]
mod fake;
mod host;
pub(crate) mod hub;
mod lease;
mod listener;
mod loan;
mod message;
mod opening;
pub(crate) mod options;
mod poller;
pub mod rxmap;
mod seqpacket;
mod service;
mod socket;
mod stream;
#[cfg(feature = "tokio")]
pub mod tokio;
mod waiting;

pub use crate::fault::Fault;
pub use crate::table::backend::EndpointStats;
pub use crate::table::over::EndpointOver;
pub use crate::table::sockets::StreamState;
pub use datagram::{
    BindError, Datagram, DatagramDrops, DatagramError, DatagramHome, DatagramLease, DatagramLoan,
    DatagramStats, MAX_DATAGRAM,
};
pub use endpoint::Endpoint;
pub use errors::{ConnectError, ListenError, StreamError};
pub use host::{Host, HostBuilder};
pub use lease::{Lease, OwnedLease, Reading};
pub use listener::{Incoming, Listener};
pub use loan::{Filling, Loan};
pub use message::Message;
pub use opening::{EndpointBuilder, OpenError};
pub use options::OptionError;
pub use poller::{Poller, Readiness, Ready};
pub use rxmap::{PagedRxMap, RxMap, RxMapError};
pub use seqpacket::{
    MessageLeases, MessageLoan, Received, SeqPacket, SeqPacketIncoming, SeqPacketListener,
};
pub use socket::Socket;
pub use stream::{Batch, Stream};
pub use waiting::Wait;
pub use zerosock_ring::Trust;
pub use zerosock_vhost_user::Fault as FrontendFault;
