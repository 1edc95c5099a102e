//! Redirection between sockets inside the kernel (sockmap), through bpf(2) and without a toolchain.
//!
//! A [`SockMap`] refers to sockets by small numbers. A verdict [`Program`] runs for each packet that
//! arrives at a socket of the map that it is attached to ([`Sources`]), looks up the [`Slot`] of this
//! socket, and hands the packet to the socket with the same number in a second map. The instructions
//! are assembled here.
//!
//! # Invariants
//! - The maps and programs of this process end with their descriptors: nothing is pinned. Closing a map
//!   ends the redirection of the sockets in it.
//! - A slot is shared memory of the kernel's program and of this process. Both access it with atomic
//!   operations only.
//! - A map refers to a socket without keeping it open: a socket that is closed leaves the map.
//!
//! # Use
//! `zerosock_relay::sockmap` joins pairs of sockets with it and does by hand what sockmap does not.
//! Creating maps and programs needs CAP_BPF and CAP_NET_ADMIN ([`BpfError`] says what is missing);
//! inserting sockets into an existing map needs neither from Linux 5.19 on, so that a process can call
//! [`drop_bpf_capabilities`] after set-up.

pub(crate) mod assembler;
pub(crate) mod calls;
mod capabilities;
mod error;
pub(crate) mod maps;
mod program;
mod sources;

pub use capabilities::drop_bpf_capabilities;
pub use error::{BpfError, Denial, inserting_needs_capabilities};
pub use maps::{NumberByCookie, Slot, Slots, SockMap};
pub use program::{ArrivalSocket, Program, VerdictMaps};
pub use sources::Sources;

#[cfg(test)]
mod tests;
