//! Receive maps: the interface of the kernel patch set "virtio/vsock: experimental zerocopy
//! receive" (RFC v3 of 6 November 2022), in user space, on top of a [`Stream`].
//!
//! A map begins with a poll value, a count, and an array of headers. A *fill* puts received packets
//! there, a *release* returns them. The patch set uses `getsockopt()` and `madvise()` for the two,
//! and the kernel maps pages into the process. This module has two forms:
//!
//! - [`RxMap`], the native one: the peer's memory stays mapped, and a header gives the offset of a
//!   packet in it. It changes no page tables and copies nothing.
//! - [`PagedRxMap`], the compatible one: the contiguous layout of the document, byte for byte, in
//!   private memory, into which packets are copied.
//!
//! `docs/rxmap.md` compares it with the document, sentence by sentence.
//!
//! # Invariants
//! - A fill takes whole packets, in order: none is lost or repeated.
//! - Of several headers for one packet only the last has its flags, so an earlier part never ends a
//!   message.
//! - A fill does not block. Polling makes no system call while no packet arrives.
//!
//! ```
//! # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/mapped.rs"));
//! use std::io::Write;
//! use zerosock::vsock::RxMap;
//! use zerosock::vsock::rxmap::{CLOSED, RxMapConfig};
//!
//! // The endpoint called `set_rx_map(true)` before it connected.
//! (&host).write_all(b"a word here, a word there")?;
//! drop(host);
//! let mut map = RxMap::new(&process, RxMapConfig::default())?;
//! let mut bytes = 0;
//! loop {
//!     let closed = map.wait()? == CLOSED;
//!     let filled = map.fill()?;
//!     bytes += map.packets().map(|packet| packet.len()).sum::<usize>();
//!     map.release(0..filled)?;
//!     if closed && filled == 0 {
//!         break;
//!     }
//! }
//! assert_eq!(bytes, 25);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod errors;
mod native;
mod packet;
mod paged;
mod pages;
mod rx_header;
mod rx_poll;
mod shared;

pub use errors::RxMapError;
pub use native::{RxMap, RxMapConfig};
pub use packet::RxPacket;
pub use paged::{PagedHeader, PagedRxMap, Protection};
pub use rx_header::RxHeader;

use super::stream::Stream;

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// Poll value: nothing to read.
pub const EMPTY: u32 = 0;
/// Poll value: a fill will find something.
pub const DATA: u32 = 1;
/// Poll value: no more data will arrive. Fill until there are no headers.
pub const CLOSED: u32 = !0;

/// Header flag: the end of a message (VIRTIO_VSOCK_SEQ_EOM). Streams have none.
pub const EOM: u32 = 1;
/// Header flag: the end of a record (VIRTIO_VSOCK_SEQ_EOR). Streams have none.
pub const EOR: u32 = 2;
/// Flag of native headers: the bytes are in the map's spill pages; the offset is relative to them.
/// See [`RxMap`].
pub const SPILLED: u32 = 1 << 31;

/// The flags of stream packets.
const STREAM_FLAGS: u32 = 0;

impl Stream {
    /// Whether the connection may have receive maps.
    pub fn rx_map(&self) -> bool {
        self.rx_map
    }

    /// Fails unless it changes nothing, because a stream is connected. Set the option on the
    /// endpoint ([`Endpoint::set_rx_map`](super::Endpoint::set_rx_map),
    /// [`Host::set_rx_map`](super::Host::set_rx_map)) before the connection is made.
    ///
    /// # Errors
    /// [`RxMapError::Connected`].
    pub fn set_rx_map(&self, enabled: bool) -> Result<(), RxMapError> {
        if enabled == self.rx_map {
            Ok(())
        } else {
            Err(RxMapError::Connected)
        }
    }
}
