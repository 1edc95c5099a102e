//! Receive maps: the interface of the kernel patch set "virtio/vsock: experimental zerocopy
//! receive" (RFC v3 of 6 November 2022), in user space, on top of a [`Stream`].
//!
//! A map begins with a word to poll, a count, and an array of headers; a *fill* puts there what
//! has come, a *release* gives it back. The patch set has `getsockopt()` and `madvise()` for the
//! two, and the kernel moves pages into the process. Here are two forms:
//!
//! - [`RxMap`], the native one: memory that the peer's side writes is mapped already, once and for
//!   all, so a header just says where in it a packet lies. No page table changes, nothing is
//!   copied.
//! - [`PagedRxMap`], the compatibility view: the contiguous layout of the document, byte for byte,
//!   in a mapping of our own, into which packets are copied.
//!
//! `docs/rxmap.md` says for each sentence of the document what is here instead.
//!
//! # What must hold
//! A fill takes packets in order and whole, or leaves them: nothing is lost, nothing comes twice.
//! Where one packet has to become several headers, only the last of them has its flags: a part in
//! front never says that a message is over. A fill does not wait. Polling makes no system call
//! while nothing comes.
//!
//! ```
//! # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/mapped.rs"));
//! use std::io::Write;
//! use zerosock::vsock::RxMap;
//! use zerosock::vsock::rxmap::{CLOSED, RxMapConfig};
//!
//! // `set_rx_map(true)` was said at the endpoint, and then it has connected.
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
mod rx_poll;

pub use errors::RxMapError;
pub use native::{RxHeader, RxMap, RxMapConfig};
pub use packet::RxPacket;
pub use paged::{PagedHeader, PagedRxMap, Protection};

use super::endpoint::Endpoint;
use super::host::Host;
use super::stream::Stream;

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// Poll value: nothing to read.
pub const EMPTY: u32 = 0;
/// Poll value: a fill will find something.
pub const DATA: u32 = 1;
/// Poll value: no more will come. Fill until there are no headers.
pub const CLOSED: u32 = !0;

/// Header flag: the end of a message (VIRTIO_VSOCK_SEQ_EOM). Streams have none.
pub const EOM: u32 = 1;
/// Header flag: the end of a record (VIRTIO_VSOCK_SEQ_EOR). Streams have none.
pub const EOR: u32 = 2;
/// Flag of native headers: the bytes are in the map's own spill pages, and the offset counts from
/// their beginning. See [`RxMap`].
pub const SPILLED: u32 = 1 << 31;

/// What packets of a stream have for flags.
const STREAM_FLAGS: u32 = 0;

impl Endpoint {
    /// Whether connections made or accepted from now on may have receive maps: at first not. The
    /// document's SO_VM_SOCKETS_ZEROCOPY, which "could be enabled only for socket in
    /// SS_UNCONNECTED state".
    pub fn set_rx_map(&self, enabled: bool) {
        self.core.set_rx_map(enabled);
    }
}

impl Host {
    /// As [`Endpoint::set_rx_map`].
    pub fn set_rx_map(&self, enabled: bool) {
        self.core.set_rx_map(enabled);
    }
}

impl Stream {
    /// Whether the connection may have receive maps.
    pub fn rx_map(&self) -> bool {
        self.rx_map
    }

    /// Always refused unless it changes nothing: a stream is connected. Set the option on the
    /// endpoint ([`Endpoint::set_rx_map`], [`Host::set_rx_map`]) before the connection is made.
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
