//! The native receive map: headers with the offsets of packets in shared memory.
//!
//! # Invariants
//! - The endpoint does not move a packet that has an unreleased header: its lease stays entered.
//! - The limits on leases hold: a fill ends at them.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Range;

use super::packet::{HeldLease, MappedPacket, PacketLocation, RxPacket};
use super::pages::{Pages, capacity, pages_for};
use super::rx_header::{HEADER, RxHeader};
use super::rx_poll::RxPoll;
use super::shared::{Filled, fill, map_calls};
use super::{EMPTY, PAGE, RxMapError, SPILLED, STREAM_FLAGS};
use crate::table::leases::Entered;
use crate::table::sockets::{BufferPlace, LeaseParts, PIECES};
use crate::table::transfers::NextKind;
use crate::vsock::stream::Stream;

/// Most extra headers for a last packet in several pieces.
const MORE: usize = PIECES - 1;

/// The settings of an [`RxMap`].
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/mapped.rs"));
/// use std::io::Write;
/// use zerosock::vsock::RxMap;
/// use zerosock::vsock::rxmap::RxMapConfig;
///
/// // One packet per fill.
/// let mut map = RxMap::new(&process, RxMapConfig::default().headers(1))?;
/// (&host).write_all(b"one")?;
/// map.wait()?;
/// assert_eq!(map.fill()?, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug)]
#[must_use]
pub struct RxMapConfig {
    headers: usize,
    bytes: usize,
    spill_pages: usize,
}

impl Default for RxMapConfig {
    /// One page of headers (251); fills without a limit in bytes; 16 spill pages, enough for the
    /// largest vsock packet.
    fn default() -> RxMapConfig {
        RxMapConfig {
            headers: capacity(1, HEADER) - MORE,
            bytes: usize::MAX,
            spill_pages: 16,
        }
    }
}

impl RxMapConfig {
    /// Most headers of one fill, in as many pages as they need. A last packet in several pieces may
    /// add three.
    pub fn headers(mut self, headers: usize) -> RxMapConfig {
        self.headers = headers;
        self
    }

    /// Most bytes of one fill: it ends before a packet that would exceed them. A longer first
    /// packet is filled alone, since packets in place are not split.
    pub fn bytes(mut self, bytes: usize) -> RxMapConfig {
        self.bytes = bytes;
        self
    }

    /// Pages for bytes that are not in place; at least one.
    pub fn spill_pages(mut self, pages: usize) -> RxMapConfig {
        self.spill_pages = pages;
        self
    }
}

/// A receive map whose headers point into memory that the peer's side writes. It copies, maps and
/// unmaps nothing.
///
/// Each header keeps its packet in place until it is [released](Self::release). A fill ends at the
/// connection's limit of leases in place (an eighth of the endpoint's receive buffers). Only
/// packets that are not in place (copied out after the hold time, or beyond the connection's limit)
/// are copied, into the map's spill pages: their headers have [`SPILLED`].
///
/// A packet in several pieces of guest memory has a header for each.
///
/// `S` is the stream or a reference to it: `&Stream`, `Arc<Stream>`. A stream can have any number
/// of maps; each fill takes the next packets.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/mapped.rs"));
/// use std::io::Write;
/// use zerosock::vsock::RxMap;
/// use zerosock::vsock::rxmap::RxMapConfig;
///
/// let mut map = RxMap::new(&process, RxMapConfig::default())?;
/// (&host).write_all(b"in place")?;
/// map.wait()?;
/// let filled = map.fill()?;
/// assert_eq!(map.packet(0).expect("one packet").to_vec(), b"in place");
/// map.release(0..filled)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A map that borrows its stream cannot outlive it:
///
/// ```compile_fail,E0505
/// # use zerosock::vsock::rxmap::{RxMap, RxMapConfig};
/// # use zerosock::vsock::Stream;
/// fn map_outlives_stream(stream: Stream) {
///     let mut map = RxMap::new(&stream, RxMapConfig::default()).unwrap();
///     drop(stream);
///     map.release_all();
/// }
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
pub struct RxMap<S: Borrow<Stream>> {
    stream: S,
    config: RxMapConfig,
    pages: Pages,
    spill: Pages,
    /// Packets of the last fill, in the order of headers.
    packets: Vec<MappedPacket>,
    leases: Vec<HeldLease>,
    unreleased: usize,
    rx_poll: RxPoll,
}

map_calls!(RxMap);

impl<S: Borrow<Stream>> RxMap<S> {
    /// A map for `stream`.
    ///
    /// # Errors
    /// [`RxMapError::NotEnabled`]; [`RxMapError::Length`] for no headers, no bytes or no spill
    /// pages.
    pub fn new(stream: S, config: RxMapConfig) -> Result<RxMap<S>, RxMapError> {
        if !stream.borrow().rx_map() {
            return Err(RxMapError::NotEnabled);
        }
        let most = u32::MAX as usize / PAGE;
        let sizes = [config.headers, config.bytes, config.spill_pages];
        if sizes.contains(&0) || config.headers > most || config.spill_pages > most {
            return Err(RxMapError::Length(0));
        }
        Ok(RxMap {
            stream,
            config,
            pages: Pages::new(pages_for(config.headers + MORE, HEADER)),
            spill: Pages::new(config.spill_pages),
            packets: Vec::new(),
            leases: Vec::new(),
            unreleased: 0,
            rx_poll: RxPoll::default(),
        })
    }

    /// Puts headers for received packets into the map, without blocking; returns how many
    /// (`hdr_num`). 0: no packets; with a poll value of [`CLOSED`](super::CLOSED) none will arrive.
    ///
    /// # Errors
    /// [`RxMapError::NotReleased`] while headers of the last fill are not released. A reset of the
    /// connection, after all packets received before it.
    pub fn fill(&mut self) -> Result<usize, RxMapError> {
        if self.unreleased > 0 {
            return Err(RxMapError::NotReleased);
        }
        self.packets.clear();
        self.leases.clear();
        let stream = self.stream.borrow();
        let filled = fill(stream, &mut self.pages, |backend, pages| {
            let mut bytes = 0;
            let mut spilled = 0;
            let mut fault = None;
            while let Some(next) = backend.ahead(stream.conn.id).and_then(|ahead| ahead.next) {
                let first = self.packets.is_empty();
                if self.packets.len() >= self.config.headers
                    || (!first && bytes + next.len > self.config.bytes)
                {
                    break;
                }
                match next.kind {
                    NextKind::InPlace => {
                        let parts = match backend.lease(stream.conn.id) {
                            Ok(Some(parts)) => parts,
                            Ok(None) => break,
                            Err(error) => {
                                fault = Some(error);
                                break;
                            }
                        };
                        stream.conn.counts.add_lease(&parts);
                        bytes += parts.len;
                        add_leased(pages, &mut self.packets, &mut self.leases, stream, parts);
                    }
                    NextKind::Bounded if !first => break,
                    NextKind::Bounded | NextKind::Copied => {
                        let room = self.spill.as_slice().len() - spilled;
                        let room = room.min(self.config.bytes.saturating_sub(bytes));
                        let len = next.len.min(room);
                        let out = self.spill.as_mut_slice().get_mut(spilled..spilled + len);
                        let Some(out) = out.filter(|out| !out.is_empty()) else {
                            break;
                        };
                        if let Err(error) = backend.read(stream.conn.id, out, false) {
                            fault = Some(error);
                            break;
                        }
                        stream.conn.counts.add_read_copied(len);
                        let header = RxHeader {
                            length: len as u32,
                            flags: SPILLED | if len == next.len { STREAM_FLAGS } else { 0 },
                            offset: spilled as u64,
                        };
                        let location = PacketLocation::Spilled(spilled);
                        add(pages, &mut self.packets, header, location);
                        bytes += len;
                        // Aligned to 64 bytes, as bytes in place are.
                        spilled = (spilled + len).next_multiple_of(64);
                        spilled = spilled.min(self.spill.as_slice().len());
                    }
                }
            }
            let headers = self.packets.len();
            pages.set_header(headers, RxHeader::default().encode());
            let number = headers;
            Filled {
                headers,
                number,
                fault,
            }
        });
        self.unreleased = self.packets.len();
        filled
    }

    /// Header `index`; `None` behind the end.
    pub fn header(&self, index: usize) -> Option<RxHeader> {
        self.packets.get(index)?;
        self.pages.header(index).map(RxHeader::decode)
    }

    /// The header pages: `{u32 poll_value, u32 hdr_num}`, then
    /// `{u32 length, u32 flags, u64 offset}` for each header, in the machine's byte order; one of
    /// length 0 is the end.
    pub fn header_pages(&self) -> &[u8] {
        self.pages.as_slice()
    }

    /// The spill pages.
    pub fn spill_pages(&self) -> &[u8] {
        self.spill.as_slice()
    }

    /// The bytes of header `index`; `None` if it is released or does not exist.
    pub fn packet(&self, index: usize) -> Option<RxPacket<'_>> {
        let mapped = self.packets.get(index).filter(|mapped| !mapped.released)?;
        Some(RxPacket {
            stream: self.stream.borrow(),
            header: self.header(index)?,
            mapped,
            leases: &self.leases,
            spill: self.spill.as_slice(),
        })
    }

    /// The unreleased packets of the last fill.
    pub fn packets(&self) -> impl Iterator<Item = RxPacket<'_>> {
        (0..self.packets.len()).filter_map(|index| self.packet(index))
    }

    /// Releases the packets of a range of headers: returns their buffers and their credit to the
    /// peer. In any order and any parts; released headers are skipped.
    ///
    /// # Errors
    /// [`RxMapError::Range`] for headers beyond the last fill.
    pub fn release(&mut self, headers: Range<usize>) -> Result<(), RxMapError> {
        let Some(packets) = self.packets.get_mut(headers) else {
            return Err(RxMapError::Range);
        };
        if self.unreleased == 0 || packets.is_empty() {
            return Ok(());
        }
        let core = &self.stream.borrow().conn.core;
        // In a batch or a `recv_each` callback this thread holds the lock; its release returns
        // them.
        let mut locked = (!core.is_held_by_this_thread()).then(|| core.lock());
        for mapped in packets.iter_mut().filter(|mapped| !mapped.released) {
            mapped.released = true;
            self.unreleased -= 1;
            let (PacketLocation::InPlace(lease, _) | PacketLocation::Copied(lease, _)) =
                mapped.location
            else {
                continue;
            };
            let Some(held) = self.leases.get_mut(lease) else {
                continue;
            };
            held.unreleased -= 1;
            if held.unreleased == 0 {
                if held.memory.take().is_some() {
                    // Not `Core::end_access`: this thread holds the lock; releasing it returns
                    // dropped leases.
                    core.leases().leave(held.index);
                }
                match &mut locked {
                    Some(locked) => locked.backend().handle_dropped(held.index),
                    None => core.return_buffer(held.index),
                }
            }
        }
        if let Some(locked) = &mut locked {
            locked.backend().flush_after_read();
        }
        Ok(())
    }

    /// Releases all packets of the last fill.
    pub fn release_all(&mut self) {
        // Cannot fail: the range is that of all packets.
        let _ = self.release(0..self.packets.len());
    }
}

/// Adds a header for each piece of a lease, and enters the lease.
fn add_leased(
    pages: &mut Pages,
    packets: &mut Vec<MappedPacket>,
    leases: &mut Vec<HeldLease>,
    stream: &Stream,
    parts: LeaseParts,
) {
    let LeaseParts {
        index, len, place, ..
    } = parts;
    let lease = leases.len();
    let (memory, pieces) = match place {
        BufferPlace::InPlace { memory, pieces } => {
            // Cannot have been moved: that takes the lock, which the caller holds.
            let entered = stream.conn.core.leases().enter(index);
            debug_assert_eq!(entered, Entered::InPlace, "moved behind the lock");
            (memory, pieces)
        }
        // The lease was to be in place, but the endpoint has reached its limit of old peer memory.
        BufferPlace::Copied(copy) => {
            let header = RxHeader {
                length: len as u32,
                flags: SPILLED | STREAM_FLAGS,
                offset: u64::MAX,
            };
            add(pages, packets, header, PacketLocation::Copied(lease, copy));
            leases.push(HeldLease {
                index,
                memory: None,
                unreleased: 1,
            });
            return;
        }
    };
    let (mut rest, mut unreleased) = (len, 0);
    for piece in pieces.iter() {
        let part = piece.part(0, rest);
        if part.is_empty() {
            continue;
        }
        rest -= part.len();
        unreleased += 1;
        let header = RxHeader {
            length: part.len() as u32,
            flags: if rest == 0 { STREAM_FLAGS } else { 0 },
            offset: memory.flat_offset(part).unwrap_or(u64::MAX),
        };
        add(pages, packets, header, PacketLocation::InPlace(lease, part));
    }
    leases.push(HeldLease {
        index,
        memory: Some(memory),
        unreleased,
    });
}

fn add(
    pages: &mut Pages,
    packets: &mut Vec<MappedPacket>,
    header: RxHeader,
    location: PacketLocation,
) {
    pages.set_header(packets.len(), header.encode());
    let released = false;
    packets.push(MappedPacket { released, location });
}

impl<S: Borrow<Stream>> Drop for RxMap<S> {
    fn drop(&mut self) {
        self.release_all();
    }
}

impl<S: Borrow<Stream>> fmt::Debug for RxMap<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RxMap")
            .field("hdr_num", &self.hdr_num())
            .field("unreleased", &self.unreleased)
            .field("has_data", &(self.last_poll_value() != EMPTY))
            .finish_non_exhaustive()
    }
}
