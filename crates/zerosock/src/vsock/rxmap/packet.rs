//! The bytes behind a header of a native map.
//!
//! What must hold: they are looked at where they lie only as long as the header is not released,
//! and no plain slice of peer memory is made that nobody declared trust in.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use zerosock_ring::{Memory, Piece, SliceBuf};

use super::native::RxHeader;
use crate::table::sockets::Copied;
use crate::vsock::stream::Stream;

/// What is behind a header.
#[derive(Debug)]
pub(super) struct Mapped {
    pub(super) released: bool,
    pub(super) home: Home,
}

#[derive(Debug)]
pub(super) enum Home {
    /// In the memory of a lease, by its place among `leases`.
    InPlace(usize, Piece),
    /// In the spill pages, from there on.
    Spilled(usize),
    /// In a lease that turned out to be a copy.
    Copied(usize, Copied),
}

/// A lease, entered for as long as any of its headers is out.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) index: u32,
    pub(super) memory: Option<Arc<Memory>>,
    /// Headers that are not released.
    pub(super) left: usize,
}

/// The bytes behind one header, as long as it is not released.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/mapped.rs"));
/// use std::io::Write;
/// use zerosock::vsock::RxMap;
/// use zerosock::vsock::rxmap::RxMapConfig;
///
/// let mut map = RxMap::new(&process, RxMapConfig::default())?;
/// (&host).write_all(b"a packet")?;
/// map.wait()?;
/// map.fill()?;
/// let packet = map.packet(0).expect("one packet");
/// let mut word = [0; 6];
/// assert_eq!(packet.copy_to(2, &mut word), 6);
/// assert_eq!(&word, b"packet");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// It is gone with a release, and with the next fill:
///
/// ```compile_fail,E0502
/// # use zerosock::vsock::rxmap::RxMap;
/// # use zerosock::vsock::Stream;
/// fn packet_outlives_release(map: &mut RxMap<&Stream>) {
///     let packet = map.packet(0).unwrap();
///     map.release_all();
///     packet.to_vec();
/// }
/// ```
///
/// ```compile_fail,E0502
/// # use zerosock::vsock::rxmap::RxMap;
/// # use zerosock::vsock::Stream;
/// fn packet_outlives_fill(map: &mut RxMap<&Stream>) {
///     let packet = map.packet(0).unwrap();
///     map.fill().unwrap();
///     packet.to_vec();
/// }
/// ```
pub struct RxPacket<'m> {
    pub(super) stream: &'m Stream,
    pub(super) header: RxHeader,
    pub(super) mapped: &'m Mapped,
    pub(super) leases: &'m [Held],
    pub(super) spill: &'m [u8],
}

impl RxPacket<'_> {
    /// Its header.
    pub fn header(&self) -> RxHeader {
        self.header
    }

    /// Length in bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a packet is never empty")]
    pub fn len(&self) -> usize {
        self.header.length as usize
    }

    /// Whether the bytes are where the peer's side wrote them.
    pub fn is_in_place(&self) -> bool {
        matches!(self.mapped.home, Home::InPlace(..))
    }

    /// Whether the peer got its memory back meanwhile (it disconnected, rebooted, or changed its
    /// memory): the memory is still there, but what it holds means nothing.
    pub fn is_torn(&self) -> bool {
        self.in_place()
            .is_some_and(|(held, _, _)| self.stream.conn.core.leases().is_torn(held.index))
    }

    fn in_place(&self) -> Option<(&Held, &Memory, Piece)> {
        let Home::InPlace(lease, piece) = self.mapped.home else {
            return None;
        };
        let held = self.leases.get(lease)?;
        Some((held, held.memory.as_deref()?, piece))
    }

    /// Where the bytes are, if in private memory.
    fn private(&self) -> Option<&[u8]> {
        match &self.mapped.home {
            Home::InPlace(..) => None,
            Home::Spilled(start) => self.spill.get(*start..*start + self.len()),
            Home::Copied(_, (bytes, start)) => bytes.get(*start..*start + self.len()),
        }
    }

    /// The bytes themselves. `None` if the peer may write them meanwhile: then copy them out, or,
    /// for process peers, declare [`Trust`](crate::vsock::Trust) when opening the endpoint. `None`
    /// also if they were torn away ([`is_torn`](Self::is_torn)).
    pub fn as_slice(&self) -> Option<&[u8]> {
        match self.in_place() {
            Some(_) if self.is_torn() => None,
            Some((_, memory, piece)) => memory.trusted_slice(piece, self.stream.conn.trust?),
            None => self.private(),
        }
    }

    /// Copies bytes from `offset` on to `out`; how many. Safe with any peer.
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) -> usize {
        match self.in_place() {
            Some((_, memory, piece)) => memory.read(&[piece], offset, out),
            None => {
                let bytes = self.private().and_then(|bytes| bytes.get(offset..));
                let bytes = bytes.unwrap_or(&[]);
                let len = bytes.len().min(out.len());
                out[..len].copy_from_slice(&bytes[..len]);
                len
            }
        }
    }

    /// A copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(0, &mut bytes);
        bytes
    }

    /// Writes all bytes to `fd`, straight from where they lie; how many the system took.
    ///
    /// # Errors
    /// Those of `writev(2)`.
    pub fn write_to(&self, fd: impl AsFd) -> io::Result<usize> {
        let Some((_, memory, piece)) = self.in_place() else {
            return Ok(rustix::io::write(fd, self.private().unwrap_or(&[]))?);
        };
        let mut slices = SliceBuf::<1>::new();
        memory.slices(&[piece], 0, piece.len(), &mut slices);
        zerosock_sys::write_slices(fd.as_fd(), &slices)
    }

    /// The address of the first byte.
    pub fn as_ptr(&self) -> *const u8 {
        match self.in_place() {
            Some((_, memory, piece)) => memory
                .slice(piece)
                .map_or(std::ptr::null(), |slice| slice.as_ptr().cast_const()),
            None => self.private().map_or(std::ptr::null(), <[u8]>::as_ptr),
        }
    }
}

impl fmt::Debug for RxPacket<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RxPacket")
            .field("header", &self.header)
            .finish_non_exhaustive()
    }
}
