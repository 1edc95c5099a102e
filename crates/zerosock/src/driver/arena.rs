//! The memory a driver shares with its device: one memfd, cut once into
//! rings, header slots, event slots and payload buffers.
//!
//! What must hold here: nothing overlaps; every slot's place is computed once,
//! at the start, so that the packet path translates no address. A payload
//! begins on a cache line's border (typed leases rely on it), and its header
//! has the line in front: the two make a pair, which a processor fetches
//! together.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use zerosock_proto::vsock::QueuePairs;
use zerosock_ring::{DriverLayout, MapError, Memory, Piece, RegionConfig, TranslateError};
use zerosock_sys::memfd;

use super::config::DriverConfig;

/// Bytes of a header's place: one cache line, so that no two packets share one.
pub(crate) const HEADER_SLOT: u32 = 64;
/// Bytes of an event (`struct virtio_vsock_event`: `le32 id`).
pub(crate) const EVENT_LEN: u32 = 4;
/// Event buffers kept posted, as many as Linux keeps.
pub(crate) const EVENT_SLOTS: u16 = 8;
/// Guest address of the arena's first byte. Not zero: a device that confuses
/// an unset address with a valid one shall fail.
const GUEST_BASE: u64 = 0x10_0000;
/// Front-end ("user") address of the same byte. Another number on purpose: a
/// device that confuses the two kinds of address shall fail.
const USER_BASE: u64 = 0x7e00_0000_0000;
const PAGE: u64 = 4096;

/// Why the shared memory could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The memfd could not be made or duplicated.
    #[error("cannot make shared memory: {0}")]
    Memfd(#[from] io::Error),
    /// It could not be mapped.
    #[error("cannot map shared memory: {0}")]
    Map(#[from] MapError),
    /// A slot does not lie in it: a fault of this file's arithmetic.
    #[error("shared memory is laid out wrongly: {0}")]
    Layout(#[from] TranslateError),
}

/// Equal buffers of shared memory: where each lies for the device (a guest
/// address) and for us (a piece of the mapping).
#[derive(Debug)]
pub(crate) struct Slots {
    base: u64,
    stride: u64,
    len: u32,
    pieces: Vec<Piece>,
}

impl Slots {
    fn new(
        memory: &Memory,
        base: u64,
        stride: u64,
        len: u32,
        count: u16,
    ) -> Result<Slots, ArenaError> {
        let mut pieces = Vec::with_capacity(usize::from(count));
        for slot in 0..u64::from(count) {
            // One region, so that each slot is one piece.
            memory.translate(base + slot * stride, len, &mut pieces)?;
        }
        Ok(Slots {
            base,
            stride,
            len,
            pieces,
        })
    }

    /// Guest address of slot `index`.
    pub(crate) fn addr(&self, index: u16) -> u64 {
        self.base + u64::from(index) * self.stride
    }

    /// Brings the first line of slot `index` near, to be read.
    #[inline]
    pub(crate) fn prefetch(&self, memory: &Memory, index: u16) {
        let piece = self.pieces.get(usize::from(index));
        if let Some(slice) = piece.and_then(|piece| memory.slice(*piece)) {
            slice.prefetch();
        }
    }

    /// Brings the first line of slot `index` near, to be written.
    #[inline]
    pub(crate) fn prefetch_write(&self, memory: &Memory, index: u16) {
        let piece = self.pieces.get(usize::from(index));
        if let Some(slice) = piece.and_then(|piece| memory.slice(*piece)) {
            slice.prefetch_write();
        }
    }

    /// Bytes of each slot.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Our view of slot `index`, as the slice that `Memory`'s calls take;
    /// empty for an index out of range.
    pub(crate) fn pieces(&self, index: u16) -> &[Piece] {
        let index = usize::from(index);
        self.pieces.get(index..index + 1).unwrap_or(&[])
    }
}

/// The whole of a driver's shared memory.
#[derive(Debug)]
pub(crate) struct Arena {
    /// The mapping.
    pub(crate) memory: Arc<Memory>,
    /// The memfd, for SET_MEM_TABLE.
    pub(crate) fd: OwnedFd,
    /// Its one region.
    pub(crate) region: RegionConfig,
    /// It is made of huge pages.
    pub(crate) huge_pages: bool,
    /// Places of the rings, by the queue's number.
    pub(crate) rings: Vec<DriverLayout>,
    /// Event buffers.
    pub(crate) events: Slots,
}

/// The buffers of one queue pair.
#[derive(Debug)]
pub(crate) struct PairSlots {
    /// Headers of received packets.
    pub(crate) rx_headers: Slots,
    /// Payload of received packets.
    pub(crate) rx_data: Slots,
    /// Headers of packets to send.
    pub(crate) tx_headers: Slots,
    /// Payload of packets to send.
    pub(crate) tx_data: Slots,
    /// Where they lie.
    pub(crate) memory: Arc<Memory>,
}

impl Arena {
    /// Makes and maps the memory that `config` asks for; with the buffers of each of `pairs`.
    pub(crate) fn new(
        config: &DriverConfig,
        pairs: QueuePairs,
    ) -> Result<(Arena, Vec<PairSlots>), ArenaError> {
        let slots = u64::from(config.slots());
        let rx_stride = stride(config.rx_buffer_size);
        let tx_stride = stride(config.tx_buffer_size);

        let mut end = GUEST_BASE;
        let mut take = |len: u64| {
            let start = end;
            end += pages(len);
            start
        };
        let ring_len = DriverLayout::bytes_needed(config.queue_size);
        let rings = (0..pairs.queues())
            .map(|_| DriverLayout::at(take(ring_len), config.queue_size))
            .collect();
        let events = take(u64::from(EVENT_SLOTS) * u64::from(HEADER_SLOT));
        let places: Vec<(u64, u64)> = (0..pairs.get())
            .map(|_| (take(slots * rx_stride), take(slots * tx_stride)))
            .collect();
        let len = end - GUEST_BASE;

        let huge = match config.huge_pages && config.seal {
            true => map_huge(len),
            false => None,
        };
        let huge_pages = huge.is_some();
        let (fd, region, memory) = match huge {
            Some(mapped) => mapped,
            None => map(memfd::create("zerosock-driver", len, config.seal)?, len)?,
        };
        let count = config.slots();
        let line = u64::from(HEADER_SLOT);
        let header = zerosock_proto::wire::vsock::HEADER_LEN as u32;
        let memory = Arc::new(memory);
        let (rx_len, tx_len) = (config.rx_buffer_size, config.tx_buffer_size);
        let pair = |(rx, tx)| {
            Ok(PairSlots {
                rx_headers: Slots::new(&memory, rx, rx_stride, header, count)?,
                rx_data: Slots::new(&memory, rx + line, rx_stride, rx_len, count)?,
                tx_headers: Slots::new(&memory, tx, tx_stride, header, count)?,
                tx_data: Slots::new(&memory, tx + line, tx_stride, tx_len, count)?,
                memory: memory.clone(),
            })
        };
        let slots: Result<_, ArenaError> = places.into_iter().map(pair).collect();
        let arena = Arena {
            events: Slots::new(&memory, events, line, EVENT_LEN, EVENT_SLOTS)?,
            memory: memory.clone(),
            fd,
            region,
            huge_pages,
            rings,
        };
        Ok((arena, slots?))
    }

    /// The user address that stands for guest address `addr`.
    pub(crate) fn user_addr(&self, addr: u64) -> u64 {
        addr - GUEST_BASE + USER_BASE
    }
}

type Mapped = (OwnedFd, RegionConfig, Memory);

/// The memory in huge pages, if the system has as many to give.
fn map_huge(len: u64) -> Option<Mapped> {
    // Whole pages: a part of one could not be unmapped.
    let len = len.next_multiple_of(memfd::HUGE_PAGE);
    let fd = memfd::create_huge("zerosock-driver", len).ok()?;
    map(fd, len).ok()
}

fn map(fd: OwnedFd, len: u64) -> Result<Mapped, ArenaError> {
    let region = RegionConfig {
        guest_addr: GUEST_BASE,
        user_addr: USER_BASE,
        len,
        fd_offset: 0,
    };
    let memory = Memory::map(vec![(fd.try_clone()?, region)])?;
    Ok((fd, region, memory))
}

/// From one slot to the next: a header's line and the payload, in whole pairs of lines. An odd
/// number of pairs, so that the beginnings of all slots do not fall into a few sets of the caches,
/// as they would at distances of a power of two.
fn stride(len: u32) -> u64 {
    let pair = 2 * u64::from(HEADER_SLOT);
    let pairs = (u64::from(HEADER_SLOT) + u64::from(len)).div_ceil(pair);
    pair * (pairs | 1)
}

fn pages(len: u64) -> u64 {
    len.next_multiple_of(PAGE)
}
