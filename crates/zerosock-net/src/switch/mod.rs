//! A switch between guests: frames go from port to port by MAC address, with one copy, from the
//! sender's buffers into the receiver's.
//!
//! If its driver does not take an offload, a receiver gets complete checksums and segments, by two more
//! copies.
//!
//! A port is the [`Backend`](crate::backend::Backend) of a device ([`SwitchPort`]). It sends the
//! place of a frame to the port of the receiver, which copies the frame into buffers of its guest and
//! answers; only then is the sender's chain completed. An [`Uplink`] is a port with a back-end instead
//! of a guest, such as a TAP. Headers pass unchanged, so that a TSO frame of 64 KiB crosses as one, and
//! so do VLAN tags; addresses are learned without regard to VLANs.
//!
//! # Invariants
//!
//! - The addresses of a frame are read once. Its receiver gets those that decided where it goes.
//! - A frame waits for buffers of its receiver at most [`HOLD`]. A receiver that has let a frame wait
//!   for so long has to take the next ones at once, and loses them otherwise: buffers of a sender return in
//!   order, so that a frame which waits delays the return of those behind it.
//! - A frame for several ports is copied, at most [`MAX_FLOODED`] of them in a turn of its sender.

mod device;
mod frames;
mod port;
mod software;
mod table;
mod uplink;

pub use self::device::SwitchDevice;
pub use self::frames::{HOLD, PortMessage};
pub use self::port::{MAX_FLOODED, SwitchPort};
#[cfg(feature = "smoltcp")]
pub(crate) use self::software::complete_checksum;
pub use self::table::Switch;
pub use self::uplink::{Uplink, UplinkConfig};
