//! The vsock protocol core of zerosock, and the wire formats of vsock and virtio-net.
//!
//! # Invariants
//! Sans-I/O: this crate reads no clock, makes no system call, touches no memory that a peer can
//! write, and holds no payload. Bytes and time are arguments; headers and events are results. The
//! device half, the driver half, the switch and the tests share it.
//!
//! # How it is used
//! - [`addr`]: addresses, parsed once and valid from then on;
//! - [`time`]: a point in time as the caller counts it;
//! - [`wire`]: the headers of vsock and of virtio-net, raw and parsed;
//! - [`vsock`]: credit, the state machine, ports, and the [`vsock::Shard`] that owns the
//!   connections of one queue pair. Start with its documentation: it says how to drive the crate.
#![forbid(unsafe_code)]

pub mod addr;
pub mod time;
pub mod vsock;
pub mod wire;

pub use addr::{Address, Cid, Port};
pub use time::{Duration, Instant};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
