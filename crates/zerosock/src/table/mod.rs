//! The sockets of one endpoint, shared by both halves of the virtqueues: the driver of an attached
//! process and the device of an embedding program.
//!
//! - [`backend`], [`datagrams`]: the traits between the API and that half of the queues;
//! - [`calls`]: the calls of those traits that both halves implement alike; [`sending`]: those that send;
//! - [`sockets`]: the table of connections, their leases and loans, and the limits on held buffers;
//! - [`flows`]: the connection of each flow;
//! - [`places`]: where the bytes of leases and loans lie;
//! - [`leases`]: lease state shared with the holders of leases and loans;
//! - [`inboxes`]: received datagrams;
//! - [`listeners`]: the ports that the program listens on;
//! - [`send_half`]: what a half of the queues provides for sending;
//! - [`send_calls`], [`loan_calls`], [`message_loan_calls`]: what the calls that send do on a half;
//! - [`loans`]: the buffers on loan; [`tally`]: counters;
//! - [`coalesced`], [`outgoing`]: bytes waiting to be sent;
//! - [`over`]: the error after the endpoint's end.
//!
//! # Invariants
//! No module in here uses virtqueues, devices or drivers.

pub(crate) mod backend;
pub(crate) mod calls;
pub(crate) mod coalesced;
pub(crate) mod datagrams;
pub(crate) mod flows;
pub(crate) mod inboxes;
pub(crate) mod leases;
pub(crate) mod listeners;
pub(crate) mod loan_calls;
pub(crate) mod loans;
pub(crate) mod message_loan_calls;
pub(crate) mod outgoing;
pub(crate) mod over;
pub(crate) mod places;
pub(crate) mod send_calls;
pub(crate) mod send_half;
pub(crate) mod sending;
pub(crate) mod sockets;
pub(crate) mod tally;
pub(crate) mod transfers;
