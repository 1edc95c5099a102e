//! The bytes of a header of a native map.
//!
//! # Invariants
//! - Bytes are read in place only while the header is not released.
//! - No plain slice of peer memory exists without a declaration of trust.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use zerosock_ring::{Memory, Piece, SliceBuf};

use super::rx_header::RxHeader;
use crate::table::sockets::Copied;
use crate::vsock::stream::Stream;

/// The packet of a header.
#[derive(Debug)]
pub(super) struct MappedPacket {
    pub(super) released: bool,
    pub(super) location: PacketLocation,
}

#[derive(Debug)]
pub(super) enum PacketLocation {
    /// In the memory of a lease, by its index among `leases`.
    InPlace(usize, Piece),
    /// In the spill pages, at this offset.
    Spilled(usize),
    /// In a lease that is a copy.
    Copied(usize, Copied),
}

/// A lease, entered while any of its headers is unreleased.
#[derive(Debug)]
pub(super) struct HeldLease {
    pub(super) index: u32,
    pub(super) memory: Option<Arc<Memory>>,
    /// Headers that are not released.
    pub(super) unreleased: usize,
}

/// The bytes of one header.
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
/// It cannot outlive a release or the next fill:
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
    pub(super) mapped: &'m MappedPacket,
    pub(super) leases: &'m [HeldLease],
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
        matches!(self.mapped.location, PacketLocation::InPlace(..))
    }

    /// Whether the peer has taken its memory back (it disconnected, rebooted, or changed its
    /// memory): the memory is still mapped, but its contents are undefined.
    pub fn is_revoked(&self) -> bool {
        self.in_place()
            .is_some_and(|(held, _, _)| self.stream.conn.core.leases().is_revoked(held.index))
    }

    fn in_place(&self) -> Option<(&HeldLease, &Memory, Piece)> {
        let PacketLocation::InPlace(lease, piece) = self.mapped.location else {
            return None;
        };
        let held = self.leases.get(lease)?;
        Some((held, held.memory.as_deref()?, piece))
    }

    /// Where the bytes are, if in private memory.
    fn private(&self) -> Option<&[u8]> {
        match &self.mapped.location {
            PacketLocation::InPlace(..) => None,
            PacketLocation::Spilled(start) => self.spill.get(*start..*start + self.len()),
            PacketLocation::Copied(_, (bytes, start)) => bytes.get(*start..*start + self.len()),
        }
    }

    /// The bytes themselves. `None` if the peer may write them: then copy them out, or, for process
    /// peers, declare [`Trust`](crate::vsock::Trust) when opening the endpoint. `None` also if they
    /// are revoked ([`is_revoked`](Self::is_revoked)).
    pub fn as_slice(&self) -> Option<&[u8]> {
        match self.in_place() {
            Some(_) if self.is_revoked() => None,
            Some((_, memory, piece)) => memory.trusted_slice(piece, self.stream.conn.trust?),
            None => self.private(),
        }
    }

    /// Copies bytes from `offset` on to `out`; returns how many. Safe with any peer.
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

    /// Writes all bytes to `fd` without a copy in user space; returns how many the system took.
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
