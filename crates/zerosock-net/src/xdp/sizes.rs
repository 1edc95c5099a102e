//! The sizes of a socket.

use zerosock_sys::xdp::{PROBES, RingSizes};

/// Entries of the rings.
pub(super) const SIZES: RingSizes = RingSizes {
    receive: 512,
    transmit: 1024,
};
/// Private chunks with frames that are sent.
pub(super) const MAX_COPIES: usize = 256;
/// Private chunks: one for each entry of the fill ring, and those of frames that are sent.
pub(super) const CHUNKS: u32 = SIZES.receive + (MAX_COPIES + PROBES) as u32;
