//! Kernel sockets and the network: targets, name resolution, connecting, address policies, and relays
//! between two kernel sockets.
//!
//! # Invariants
//! - Nothing blocks on the event loops; names are resolved and slow connects are made on a thread of
//!   their own.
//! - A policy judges resolved addresses, never names.
#![forbid(unsafe_code)]

pub mod sockmap;
