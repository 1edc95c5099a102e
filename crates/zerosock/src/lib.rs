//! Zero-copy sockets between virtual machines, hosts and processes.
//!
//! Today: [`daemon`], a vhost-user vsock device whose payload goes between guest memory and host
//! sockets without a buffer of ours, and [`driver`], a guest without a virtual machine for tests
//! and measurements. The rooms and the way of a byte through them are in ARCHITECTURE.md.
#![forbid(unsafe_code)]

pub mod attach;
pub mod daemon;
pub mod device;
pub mod driver;
mod engine;
mod plane;
mod relay;
mod stats;
mod switch;
pub mod vsock;

pub use zerosock_proto::{Address, Cid, Port};
