//! The sockets of one endpoint, as its two halves of virtqueues share them: the driver of an attached
//! process, and the device of a program that is the host.
//!
//! - [`engine`], [`datagrams`]: what the sockets of the API ask of the half of the queues that they
//!   have;
//! - [`sockets`]: the table of connections, their leases and loans, and the bounds on what is held;
//! - [`leases`]: the words that the table shares with the holders of leases and loans;
//! - [`inboxes`]: received datagrams;
//! - [`gathered`], [`outgoing`]: bytes that wait to be sent.
//!
//! # Invariants
//! Nothing in here knows virtqueues, devices or drivers.

pub(crate) mod datagrams;
pub(crate) mod engine;
pub(crate) mod gathered;
pub(crate) mod inboxes;
pub(crate) mod leases;
pub(crate) mod outgoing;
pub(crate) mod over;
pub(crate) mod sockets;
