//! A switch between guests: frames go from port to port by MAC address, with one copy, from the
//! sender's buffers into the receiver's.
//!
//! If its driver does not take an offload, a receiver gets complete checksums and segments, by two more
//! copies.
//!
//! A port is the [`Backend`](crate::backend::Backend) of a device ([`SwitchPort`]). At the end of a turn it
//! sends each receiver one batch: the places of its frames. The port of the receiver copies them into
//! buffers of its guest and returns the batch before it does anything else; only then are the chains of
//! the sender completed. An [`Uplink`] is a port with a back-end instead of a guest, such as a TAP.
//! Headers pass unchanged, so that a TSO frame of 64 KiB crosses as one, and so do VLAN tags; addresses are
//! learned without regard to VLANs.
//!
//! # Invariants
//!
//! - The addresses of a frame are read once. Its receiver gets those that decided where it goes.
//! - A sender never waits for a receiver. A frame for which the receiver has no buffers waits in a copy,
//!   and is dropped if 1024 frames, or 4 MiB, wait there already.
//! - A frame for several ports counts once for each of them, and once for each segment where a receiver has it
//!   cut. A sender may have 1 MiB of such frames that have not been copied to all receivers; further ones, and those
//!   of more than 4096 segments in all, are dropped before a receiver has any work with them.
//! - A frame that waits lies in memory that goes back to the system when it has left, or its receiver has.

mod copies;
#[cfg(test)]
mod copies_tests;
mod device;
mod frames;
#[cfg(fuzzing)]
pub mod fuzz;
mod port;
mod software;
mod table;
mod uplink;

pub use self::device::SwitchDevice;
pub use self::frames::PortMessage;
pub use self::port::SwitchPort;
pub use self::table::Switch;
pub use self::uplink::{Uplink, UplinkConfig};
