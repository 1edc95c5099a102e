//! A virtio-net device over vhost-user, with a TAP interface or AF_XDP sockets as its back-end.
//!
//! [`Server`](server::Server) serves one guest: it has a worker for the [`device`](device::Device)
//! and a control thread for the front-end. The device moves each frame between its
//! [`Backend`](backend::Backend) and the guest's buffers: [`TapBackend`](tap::TapBackend) with one system
//! call, [`XdpBackend`](xdp::XdpBackend) by rings that it shares with the kernel.
//!
//! [`Interface`](interface::Interface) is the driver half: a program with it takes the place of a guest.
//!
//! # Invariants
//!
//! - Chains are completed in the order in which they were made available.
//! - A header of the guest is read once, checked against its frame and what was negotiated, and
//!   written anew. A frame with a header that lies is dropped and counted.
//! - The guest's memory is written only inside the buffers that it has posted.
//! - A guest without posted buffers stops the reading of its back-end and nothing else. The kernel
//!   drops frames then, as for any slow receiver.
//! - A turn has a budget ([`device`]).
#![forbid(unsafe_code)]

pub mod backend;
mod checksum;
#[doc(hidden)]
pub mod device;
mod header;
pub mod interface;
#[doc(hidden)]
pub mod model;
mod readable;
pub mod server;
pub mod stats;
pub mod switch;
pub mod tap;
pub mod xdp;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
