//! Zero-copy vsock sockets: received bytes are read where the peer wrote them, sent bytes are
//! written where the peer reads them.
//!
//! An endpoint is anything with a CID. A program opens one of two kinds:
//!
//! - an [`Endpoint`]: the program attaches to a host in another process, or to `zerosock serve`,
//!   and has a CID of its own, as a guest has;
//! - a [`Host`]: the program contains the device, and is CID 2 to VMs and processes.
//!
//! Both have the same sockets: [`Stream`]s, [`SeqPacket`]s for messages, [`Listener`]s and
//! [`Datagram`]s. Bytes move by copying ([`std::io::Read`], [`std::io::Write`]) or in place
//! ([`Lease`], [`Loan`]); a program may mix the two.
//!
//! # Trust
//! No peer is trusted by default. A peer may change bytes while they are on lease; so a program
//! copies out of a lease or hands it to the system. Plain slices of it exist only for peers that
//! are processes, on an endpoint opened with [`Trust`]: an `unsafe` declaration that the peers do
//! not change leased bytes.
//!
//! # Lifetimes
//! A borrowed [`Lease`], [`Loan`] or [`Batch`] cannot outlive its stream: that does not compile.
//! An endpoint, with its CID and its name, lives as long as the last of its [`Stream`]s,
//! [`Listener`]s and [`OwnedLease`]s, even after the [`Endpoint`] or [`Host`] value is dropped.
//! Dropping a [`Host`] removes its socket files, so no new front-end connects. An [`OwnedLease`]
//! stays readable after its stream, and even its sender, are gone.
//!
//! # Forks
//! Rings and buffers lie in memory that a forked child shares with its parent, while the state that
//! goes with them is copied, and threads stay with the parent. A child that used its copy of an
//! endpoint, a host or a socket of one, or only dropped it, would write to the parent's rings and
//! close the parent's connections. So the child calls `execve` or `_exit`, or forgets its copies
//! ([`std::mem::forget`]), before anything drops them; their descriptors are close-on-exec.
//! [`std::process::Command`] does that. A child that needs an endpoint opens one of its own. What
//! holds for senders is documented at [`zc::Sender`](crate::zc::Sender).

// The files of this module:
// - `endpoint`, `opening`, `host`, `service`: endpoints, how they are opened, and services.
// - `socket`, `bound`, `options`: sockets before they connect or listen, their ports and options.
// - `connecting`: connecting and listening, for both kinds of endpoints.
// - `connection`: what all connected sockets share; `stream`, `seqpacket`, `listener`, `datagram`:
//   the sockets; `lease`, `loan`, `message`: received and lent bytes.
// - `poller`, `tokio`: waiting for many sockets; `waiting`, `blocking`: the wait modes.
// - `errors`: errors, and the side at fault.
// - `background`: the thread that drives an endpoint on request.
// - `hub`: the lock, the calling thread that drives the queues, and the waiters.
// - `rxmap`: receive maps.
//
// The table of connections is the crate's module `table`.

mod background;
mod blocking;
mod bound;
mod connecting;
mod connection;
pub(crate) mod datagram;
pub(crate) mod endpoint;
mod endpoint_calls;
mod endpoint_ref;
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

pub use crate::control::guest::agent::keeper::KeeperEntry;
pub use crate::control::guest::agent::{Agent as GuestAgent, AgentError as GuestAgentError};
pub use crate::fault::Fault;
pub use crate::table::backend::EndpointStats;
pub use crate::table::over::EndpointEnded;
pub use crate::table::sockets::StreamState;
pub use connection::ConnectionStats;
pub use datagram::{
    Datagram, DatagramDrops, DatagramError, DatagramLease, DatagramLoan, DatagramStats,
    MAX_DATAGRAM,
};
pub use endpoint::Endpoint;
pub use endpoint_ref::EndpointRef;
pub use errors::{BindError, ConnectError, ConnectReason, StreamError};
pub use host::{Host, HostBuilder};
pub use lease::{Lease, LeaseCursor, LeaseReader, OwnedLease};
pub use listener::Listener;
pub use loan::{Loan, LoanSlice};
pub use message::Message;
pub use opening::{DeviceError, EndpointBuilder, OpenError};
pub use options::OptionError;
pub use poller::{Poller, Readiness, Ready};
pub use rxmap::{PagedRxMap, RxMap, RxMapError};
pub use seqpacket::{MessageLeases, MessageLoan, Received, SeqPacket, SeqPacketListener};
pub use socket::Socket;
pub use stream::{Batch, Stream};
pub use waiting::Wait;
pub use zerosock_ring::Trust;
pub use zerosock_vhost_user::FrontendFault;
