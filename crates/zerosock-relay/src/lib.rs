//! Kernel sockets and the network: targets, name resolution, connecting, address policies, and relays
//! between two kernel sockets.
//!
//! # Invariants
//! - Nothing blocks on the event loops; names are resolved and slow connects are made on a thread of
//!   their own.
//! - A policy judges resolved addresses, never names.
#![forbid(unsafe_code)]

pub mod associations;
pub mod connector;
mod due;
mod held_messages;
pub mod networks;
pub mod proxy_protocol;
pub mod relay;
mod resolve;
pub mod sockmap;
pub mod target;

pub use connector::{
    ConnectCallback, ConnectError, ConnectRequest, ConnectStage, Connected, Connector,
    ConnectorConfig, PendingConnect,
};
pub use networks::{AddressPolicy, Denied, DenyReason, Network};
pub use target::{DomainName, Host, Target};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
