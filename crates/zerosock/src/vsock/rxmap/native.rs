//! The native receive map: headers that say where in shared memory the packets lie.
//!
//! What must hold: a packet of which a header is out stays where it is. Its lease counts as being
//! read the whole time, so the endpoint does not move it; the bounds on leases still hold, because
//! a fill ends where they do.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Range;

use super::errors::of_nothing;
use super::packet::{Held, Home, Mapped, RxPacket};
use super::paged::reason;
use super::pages::{Pages, capacity, pages_for};
use super::rx_poll::{self, RxPoll};
use super::{EMPTY, PAGE, RxMapError, SPILLED, STREAM_FLAGS};
use crate::table::backend::NextKind;
use crate::table::leases::Entered;
use crate::table::sockets::{BufferPlace, LeaseParts, PIECES};
use crate::vsock::stream::Stream;

/// Bytes of a header.
const HEADER: usize = 16;
/// Headers that a last packet in several pieces adds.
const MORE: usize = PIECES - 1;

/// `{u32 length, u32 flags, u64 offset}`: the document's header and a place.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/mapped.rs"));
/// use std::io::Write;
/// use zerosock::vsock::RxMap;
/// use zerosock::vsock::rxmap::{RxHeader, RxMapConfig};
///
/// let mut map = RxMap::new(&process, RxMapConfig::default())?;
/// (&host).write_all(b"eight by")?;
/// map.wait()?;
/// assert_eq!(map.fill()?, 1);
/// let header: RxHeader = map.header(0).expect("one packet");
/// assert_eq!(header.length, 8);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct RxHeader {
    /// Bytes of payload. 0: the end of the headers.
    pub length: u32,
    /// [`EOM`](super::EOM), [`EOR`](super::EOR), [`SPILLED`].
    pub flags: u32,
    /// Of the first byte, in bytes from the beginning of the memory that the endpoint shares with
    /// its peer's side (its regions one behind the other, in order of guest addresses), or of the
    /// spill pages. `u64::MAX`: in neither; [`RxMap::packet`] has the bytes all the same.
    pub offset: u64,
}

/// How an [`RxMap`] is to be.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/mapped.rs"));
/// use std::io::Write;
/// use zerosock::vsock::RxMap;
/// use zerosock::vsock::rxmap::RxMapConfig;
///
/// // One packet at a time, whatever waits.
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
    /// One page of headers, which is 251 of them; a fill as large as they make it; 16 spill pages,
    /// so that the largest packet of vsock fits.
    fn default() -> RxMapConfig {
        RxMapConfig {
            headers: capacity(1, HEADER) - MORE,
            bytes: usize::MAX,
            spill_pages: 16,
        }
    }
}

impl RxMapConfig {
    /// Headers of one fill at most; any number, over as many pages as that takes. A last packet
    /// that needs several may add three.
    pub fn headers(mut self, headers: usize) -> RxMapConfig {
        self.headers = headers;
        self
    }

    /// Bytes of one fill: it ends before a packet that would exceed them. A first packet that is
    /// longer comes alone: packets in place are not split.
    pub fn bytes(mut self, bytes: usize) -> RxMapConfig {
        self.bytes = bytes;
        self
    }

    /// Pages for bytes that cannot be given in place; at least one.
    pub fn spill_pages(mut self, pages: usize) -> RxMapConfig {
        self.spill_pages = pages;
        self
    }
}

/// A receive map whose headers point into the memory that the peer's side writes: nothing is
/// copied, and nothing is mapped or unmapped for it.
///
/// Each header holds its packet where it lies until it is [released](Self::release): the lease
/// behind it counts as being read. As many packets as a connection may have on lease in place (an
/// eighth of the endpoint's receive buffers) come in one fill; it ends there, and what follows
/// comes with the next. Only bytes that cannot be had in place at all (they were copied aside while
/// they waited, or other leases use the connection's share up) are copied, into pages of the map's
/// own: a header with [`SPILLED`] names them.
///
/// A packet whose buffer is in several pieces of guest memory has a header for each.
///
/// `S` is the stream, or what refers to it: `&Stream`, `Arc<Stream>`. A stream can have any number
/// of maps; each fill takes what comes next.
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
    /// Of the last fill, in the order of headers.
    packets: Vec<Mapped>,
    leases: Vec<Held>,
    unreleased: usize,
    rx_poll: RxPoll,
}

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

    /// The stream.
    pub fn stream(&self) -> &Stream {
        self.stream.borrow()
    }

    /// What there is to read: [`EMPTY`](super::EMPTY), [`DATA`](super::DATA) or
    /// [`CLOSED`](super::CLOSED). To be called in a loop instead of waiting: no system call is
    /// made while nothing comes.
    ///
    /// # Errors
    /// When the endpoint is over.
    pub fn poll_value(&mut self) -> Result<u32, RxMapError> {
        let value = self.rx_poll.poll(self.stream.borrow())?;
        self.pages.set_poll_value(value);
        Ok(value)
    }

    /// Waits as the stream does ([`Stream::set_wait`], [`Stream::set_nonblocking`],
    /// [`Stream::set_read_timeout`]) until there is something to read or nothing will come; the
    /// poll value then. What `poll(2)` is for a program that does not spin.
    ///
    /// # Errors
    /// `WouldBlock`, `TimedOut`, or when the endpoint is over.
    pub fn wait(&mut self) -> Result<u32, RxMapError> {
        self.stream.borrow().wait_readable()?;
        self.poll_value()
    }

    /// Puts headers for what has come into the map, without waiting; how many (`hdr_num`). 0:
    /// nothing was there; with a poll value of [`CLOSED`](super::CLOSED), nothing will come.
    ///
    /// # Errors
    /// [`RxMapError::NotReleased`], for as long as headers of the last fill are not released. A
    /// connection that was reset, once what had come before is taken.
    pub fn fill(&mut self) -> Result<usize, RxMapError> {
        if self.unreleased > 0 {
            return Err(RxMapError::NotReleased);
        }
        self.packets.clear();
        self.leases.clear();
        let stream = self.stream.borrow();
        let mut locked = stream.conn.core.lock();
        if locked.engine().pending() {
            locked.turn()?;
        }
        let engine = locked.engine();
        let mut bytes = 0;
        let mut spilled = 0;
        let mut fault = None;
        while let Some(next) = engine.ahead(stream.conn.id).and_then(|ahead| ahead.next) {
            let first = self.packets.is_empty();
            if self.packets.len() >= self.config.headers
                || (!first && bytes + next.len > self.config.bytes)
            {
                break;
            }
            match next.kind {
                NextKind::InPlace => {
                    let parts = match engine.lease(stream.conn.id) {
                        Ok(Some(parts)) => parts,
                        Ok(None) => break,
                        Err(error) => {
                            fault = Some(error);
                            break;
                        }
                    };
                    bytes += parts.len;
                    add_leased(
                        &mut self.pages,
                        &mut self.packets,
                        &mut self.leases,
                        stream,
                        parts,
                    );
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
                    if let Err(error) = engine.read(stream.conn.id, out, false) {
                        fault = Some(error);
                        break;
                    }
                    let header = RxHeader {
                        length: len as u32,
                        flags: SPILLED | if len == next.len { STREAM_FLAGS } else { 0 },
                        offset: spilled as u64,
                    };
                    let home = Home::Spilled(spilled);
                    add(&mut self.pages, &mut self.packets, header, home);
                    bytes += len;
                    // On a border of 64 bytes, as bytes in place are.
                    spilled = (spilled + len).next_multiple_of(64);
                    spilled = spilled.min(self.spill.as_slice().len());
                }
            }
        }
        let headers = self.packets.len();
        if headers == 0 && fault.is_none() {
            fault = reason(engine, stream);
        }
        let value = rx_poll::value(engine, stream);
        engine.flush_after_read();
        drop(locked);
        self.pages.set_header(headers, RxHeader::default().encode());
        self.pages.set_hdr_num(headers as u32);
        self.pages.set_poll_value(value);
        self.unreleased = headers;
        match fault {
            Some(fault) if headers == 0 => of_nothing(fault).map(|()| 0),
            _ => Ok(headers),
        }
    }

    /// `poll_value` as it lies in the map: what the last call found.
    pub fn last_poll_value(&self) -> u32 {
        self.pages.poll_value()
    }

    /// `hdr_num` as it lies in the map: headers of the last fill.
    pub fn hdr_num(&self) -> u32 {
        self.pages.hdr_num()
    }

    /// Header `index`; `None` behind the end.
    pub fn header(&self, index: usize) -> Option<RxHeader> {
        self.packets.get(index)?;
        self.pages.header(index).map(RxHeader::decode)
    }

    /// The pages of headers as they lie in memory: `{u32 poll_value, u32 hdr_num}`, then
    /// `{u32 length, u32 flags, u64 offset}` for each header, in the machine's byte order; one of
    /// length 0 is the end.
    pub fn header_pages(&self) -> &[u8] {
        self.pages.as_slice()
    }

    /// The spill pages.
    pub fn spill_pages(&self) -> &[u8] {
        self.spill.as_slice()
    }

    /// The bytes behind header `index`; `None` if it is released, or there is none.
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

    /// What the last fill gave and is not released.
    pub fn packets(&self) -> impl Iterator<Item = RxPacket<'_>> {
        (0..self.packets.len()).filter_map(|index| self.packet(index))
    }

    /// Gives the packets of a range of headers back: their buffers to the peer's side, credit to
    /// their sender. In any order and in any parts; those that are released already are skipped.
    ///
    /// # Errors
    /// [`RxMapError::Range`] for headers that the last fill did not give.
    pub fn release(&mut self, headers: Range<usize>) -> Result<(), RxMapError> {
        let Some(packets) = self.packets.get_mut(headers) else {
            return Err(RxMapError::Range);
        };
        if self.unreleased == 0 || packets.is_empty() {
            return Ok(());
        }
        let core = &self.stream.borrow().conn.core;
        // In a batch, or while packets are shown: whoever gives the lock back sees to it.
        let mut locked = (!core.is_mine()).then(|| core.lock());
        for mapped in packets.iter_mut().filter(|mapped| !mapped.released) {
            mapped.released = true;
            self.unreleased -= 1;
            let (Home::InPlace(lease, _) | Home::Copied(lease, _)) = mapped.home else {
                continue;
            };
            let Some(held) = self.leases.get_mut(lease) else {
                continue;
            };
            held.left -= 1;
            if held.left == 0 {
                if held.memory.take().is_some() {
                    // Not by way of the core: the lock is ours, and is given back soon.
                    core.leases().leave(held.index);
                }
                match &mut locked {
                    Some(locked) => locked.engine().handle_dropped(held.index),
                    None => core.give_back(held.index),
                }
            }
        }
        if let Some(locked) = &mut locked {
            locked.engine().flush_after_read();
        }
        Ok(())
    }

    /// Gives everything back.
    pub fn release_all(&mut self) {
        // The range is the whole.
        let _ = self.release(0..self.packets.len());
    }
}

/// A header for each piece of a lease, which is entered.
fn add_leased(
    pages: &mut Pages,
    packets: &mut Vec<Mapped>,
    leases: &mut Vec<Held>,
    stream: &Stream,
    parts: LeaseParts,
) {
    let LeaseParts { index, len, place } = parts;
    let lease = leases.len();
    let (memory, pieces, offset) = match place {
        BufferPlace::InPlace {
            memory,
            pieces,
            offset,
        } => {
            // Nobody has moved it since: whoever may needs the lock, which the caller has.
            let entered = stream.conn.core.leases().enter(index);
            debug_assert_eq!(entered, Entered::InPlace, "moved behind the lock");
            (memory, pieces, offset)
        }
        // The endpoint said that it would be in place, and then found that it holds too much of
        // a peer's memory of before.
        BufferPlace::Copied(copy) => {
            let header = RxHeader {
                length: len as u32,
                flags: SPILLED | STREAM_FLAGS,
                offset: u64::MAX,
            };
            add(pages, packets, header, Home::Copied(lease, copy));
            leases.push(Held {
                index,
                memory: None,
                left: 1,
            });
            return;
        }
    };
    let (mut skip, mut rest, mut left) = (offset, len, 0);
    for piece in pieces {
        let part = piece.part(skip, rest);
        skip = skip.saturating_sub(piece.len());
        if part.is_empty() {
            continue;
        }
        rest -= part.len();
        left += 1;
        let header = RxHeader {
            length: part.len() as u32,
            flags: if rest == 0 { STREAM_FLAGS } else { 0 },
            offset: memory.flat_offset(part).unwrap_or(u64::MAX),
        };
        add(pages, packets, header, Home::InPlace(lease, part));
    }
    leases.push(Held {
        index,
        memory: Some(memory),
        left,
    });
}

fn add(pages: &mut Pages, packets: &mut Vec<Mapped>, header: RxHeader, home: Home) {
    pages.set_header(packets.len(), header.encode());
    let released = false;
    packets.push(Mapped { released, home });
}

impl RxHeader {
    fn encode(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&self.length.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.offset.to_ne_bytes());
        bytes
    }

    fn decode(bytes: [u8; HEADER]) -> RxHeader {
        let [a, b, c, d, e, f, g, h, offset @ ..] = bytes;
        RxHeader {
            length: u32::from_ne_bytes([a, b, c, d]),
            flags: u32::from_ne_bytes([e, f, g, h]),
            offset: u64::from_ne_bytes(offset),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_laid_out_as_said() {
        let header = RxHeader {
            length: 0x0403_0201,
            flags: 0x0807_0605,
            offset: 0x100f_0e0d_0c0b_0a09,
        };
        if cfg!(target_endian = "little") {
            assert_eq!(header.encode(), std::array::from_fn(|at| at as u8 + 1));
        }
        assert_eq!(RxHeader::decode(header.encode()), header);
    }
}
