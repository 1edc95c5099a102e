//! The vsock protocol core of zerosock.
//!
//! Sans-I/O: nothing here reads a clock, makes a system call, touches memory
//! that a peer can write, or holds payload. Bytes and time come in as
//! arguments, headers and events come out. The same core serves the device
//! half, the driver half, the switch and the tests.
//!
//! - [`addr`]: addresses, parsed once and valid from then on;
//! - [`time`]: a point in time as the caller counts it;
//! - [`wire`]: the 44-byte header, raw and parsed;
//! - [`vsock`]: credit, the state machine, ports, and the [`vsock::Shard`]
//!   that owns the connections of one queue pair. Start with its
//!   documentation: it says how to drive the crate.
#![forbid(unsafe_code)]

pub mod addr;
pub mod time;
pub mod vsock;
pub mod wire;

pub use addr::{Address, Cid, Port};
pub use time::{Duration, Instant};
