//! Keeps a worker process running, and its descriptors and state across its crashes.
//!
//! The [`Supervisor`] starts the worker process with one end of a SOCK_SEQPACKET pair as its standard
//! input, and holds an ordered store of entries for it: a key, bytes and descriptors. The worker process
//! changes the store by batches through its [`Client`]. When it dies, a successor gets all entries.
//!
//! # Invariants
//! - A batch is one datagram, and is applied as a whole or not at all.
//! - Messages of the worker process are hostile input: one that breaks a rule changes nothing and ends that
//!   worker process. Nothing panics, and every amount has a bound.
//! - The loop of the supervisor waits in poll(2) only; calls that can wait are made by other threads.
#![forbid(unsafe_code)]

mod background;
mod client;
#[cfg(fuzzing)]
pub mod fuzz;
mod message;
mod restarts;
mod signals;
mod socket;
mod store;
mod supervisor;
mod upgrade;
mod worker;

pub use client::{Batch, Client, Entry, HANDOVER_PREFIX};
pub use message::{Limits, MAX_BYTES, MAX_DATAGRAM, MAX_FDS, MAX_KEY, MAX_OPERATIONS};
pub use restarts::RestartPolicy;
pub use supervisor::{Config, LISTEN_PREFIX, Supervisor};

/// Why a call failed. It has changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The caller, or the worker process, breaks a rule of the messages or the store.
    #[error("invalid message: {0}")]
    Invalid(&'static str),
    /// The store would exceed its limits.
    #[error("the store of the supervisor is full")]
    Full,
    /// Standard input is not the socket of a supervisor, or the supervisor has ended.
    #[error("this process has no supervisor")]
    NoSupervisor,
    /// A system call failed.
    #[error(transparent)]
    System(#[from] std::io::Error),
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
