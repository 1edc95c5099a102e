//! The memory that a driver shares with its device: one file, divided into rings, header slots,
//! event slots and payload buffers.
//!
//! # Invariants
//! - Nothing overlaps. With a plan of huge pages ([`Plan::of_huge_pages`]) no ring and no slot crosses the end of one.
//! - Every slot's address is computed once at the start; the packet path translates no addresses.
//! - A payload begins at a cache line boundary (typed leases rely on it), directly behind the line
//!   of its header: processors fetch such pairs of lines together.

use std::sync::Arc;

use zerosock_proto::vsock::QueuePairs;
use zerosock_ring::{DriverLayout, GuestSlice, Memory, Piece, TranslateError};
use zerosock_vhost_user::frontend::{Plan, SharedMemory, SharedMemoryError, SlotPlaces};

use super::config::{DriverConfig, MAX_QUEUE, MAX_RX_BUFFER, MAX_TX_BUFFER};

/// Bytes reserved for a header: one cache line, so that no two packets share one.
pub(crate) const HEADER_SLOT: u32 = 64;
const _: () = assert!(HEADER_SLOT >= 44, "a header fits its slot");
const _: () = {
    let most = Plan::MOST_IN_HUGE_PAGE;
    assert!((HEADER_SLOT + MAX_RX_BUFFER) as u64 <= most && MAX_TX_BUFFER <= MAX_RX_BUFFER);
    assert!(
        DriverLayout::bytes_needed(MAX_QUEUE) <= most,
        "a ring fits a huge page"
    );
};
/// Where the payload begins in a packet's slot.
pub(crate) const PAYLOAD: usize = HEADER_SLOT as usize;
/// Bytes of an event (`struct virtio_vsock_event`: `le32 id`).
pub(crate) const EVENT_LEN: u32 = 4;
/// Event buffers kept posted, as many as Linux keeps.
pub(crate) const EVENT_SLOTS: u16 = 8;
/// Why the shared memory could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The system refused it.
    #[error(transparent)]
    Shared(#[from] SharedMemoryError),
    /// A slot lies outside of the memory: an error in the layout computed here.
    #[error("a buffer lies outside of the shared memory: {0}")]
    Layout(#[from] TranslateError),
}

/// Buffers of equal size in shared memory, each as the device addresses it (a guest address) and as
/// this process does (a piece of the mapping).
#[derive(Debug)]
pub(crate) struct Slots {
    places: SlotPlaces,
    /// Where each begins in its place, in bytes.
    offset: u32,
    len: u32,
    pieces: Vec<Piece>,
}

impl Slots {
    fn new(
        memory: &Memory,
        places: SlotPlaces,
        (offset, len): (u32, u32),
        count: u16,
    ) -> Result<Slots, ArenaError> {
        let mut slots = Slots {
            places,
            offset,
            len,
            pieces: Vec::with_capacity(usize::from(count)),
        };
        for slot in 0..count {
            // The memory is one region, so each slot is one piece.
            memory.translate(slots.addr(slot), len, &mut slots.pieces)?;
        }
        Ok(slots)
    }

    /// Guest address of slot `index`.
    pub(crate) fn addr(&self, index: u16) -> u64 {
        self.places.addr(index) + u64::from(self.offset)
    }

    /// Slot `index` in the mapping; `None` for an index out of range.
    #[inline]
    pub(crate) fn slice<'m>(&self, memory: &'m Memory, index: u16) -> Option<GuestSlice<'m>> {
        memory.slice(*self.pieces.get(usize::from(index))?)
    }

    /// Prefetches the first two lines of slot `index` for reading: header and payload.
    #[inline]
    pub(crate) fn prefetch(&self, memory: &Memory, index: u16) {
        if let Some(slice) = self.slice(memory, index) {
            slice.prefetch();
            slice.part(PAYLOAD, 1).prefetch();
        }
    }

    /// As `prefetch`, for writing.
    #[inline]
    pub(crate) fn prefetch_write(&self, memory: &Memory, index: u16) {
        if let Some(slice) = self.slice(memory, index) {
            slice.prefetch_write();
            slice.part(PAYLOAD, 1).prefetch_write();
        }
    }

    /// Bytes of each slot.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Slot `index` in the mapping, as the slice that calls of `Memory` take; empty for an index
    /// out of range.
    pub(crate) fn pieces(&self, index: u16) -> &[Piece] {
        let index = usize::from(index);
        self.pieces.get(index..index + 1).unwrap_or(&[])
    }
}

/// All shared memory of a driver.
#[derive(Debug)]
pub(crate) struct Arena {
    /// The memory, and its descriptor.
    pub(crate) shared: SharedMemory,
    /// The mapping.
    pub(crate) memory: Arc<Memory>,
    /// Layouts of the rings, by queue index.
    pub(crate) rings: Vec<DriverLayout>,
    /// Event buffers.
    pub(crate) events: Slots,
}

/// The buffers of one queue pair.
#[derive(Debug)]
pub(crate) struct PairSlots {
    /// Header lines and payload of received packets.
    pub(crate) rx_packets: Slots,
    /// Payload of received packets.
    pub(crate) rx_data: Slots,
    /// Header lines and payload of packets to send.
    pub(crate) tx_packets: Slots,
    /// Payload of packets to send.
    pub(crate) tx_data: Slots,
    /// The mapping that contains them.
    pub(crate) memory: Arc<Memory>,
}

/// Where everything lies in the memory of a driver.
#[derive(Debug)]
pub(super) struct Layout {
    plan: Plan,
    rings: Vec<DriverLayout>,
    events: SlotPlaces,
    /// The receive and the transmit buffers of each queue pair.
    pairs: Vec<(SlotPlaces, SlotPlaces)>,
}

/// Bytes of a buffer: the header's line and the payload.
fn whole(payload: u32) -> u32 {
    HEADER_SLOT.saturating_add(payload)
}

impl Layout {
    /// Divides memory for `config` as `plan` does, with buffers for each of `pairs`.
    pub(super) fn new(config: &DriverConfig, pairs: QueuePairs, mut plan: Plan) -> Layout {
        let ring_len = DriverLayout::bytes_needed(config.queue_size);
        let mut ring = || DriverLayout::at(plan.take(ring_len), config.queue_size);
        let rings = (0..pairs.queues()).map(|_| ring()).collect();
        let events = plan.take_slots(EVENT_LEN, EVENT_SLOTS);
        let mut slots = |len| plan.take_slots(whole(len), config.slots());
        let pairs = (0..pairs.get())
            .map(|_| (slots(config.rx_buffer_size), slots(config.tx_buffer_size)))
            .collect();
        Layout {
            plan,
            rings,
            events,
            pairs,
        }
    }

    /// Bytes of the memory.
    pub(super) fn len(&self) -> u64 {
        self.plan.len()
    }

    /// The plan, from which all was taken.
    pub(super) fn plan(&self) -> &Plan {
        &self.plan
    }
}

impl Arena {
    /// Creates and maps the memory for `config`, as `plan` divides it, with buffers for each of `pairs`.
    pub(crate) fn new(
        config: &DriverConfig,
        pairs: QueuePairs,
        plan: Plan,
    ) -> Result<(Arena, Vec<PairSlots>), ArenaError> {
        let layout = Layout::new(config, pairs, plan);
        let (seal, huge_pages) = (config.seal, config.huge_pages);
        let shared = SharedMemory::create("zerosock-driver", layout.plan(), seal, huge_pages)?;
        Arena::in_memory(config, layout, shared)
    }

    /// Divides memory that was mapped for this layout of `config`.
    pub(super) fn in_memory(
        config: &DriverConfig,
        layout: Layout,
        shared: SharedMemory,
    ) -> Result<(Arena, Vec<PairSlots>), ArenaError> {
        let count = config.slots();
        let (rx_len, tx_len) = (config.rx_buffer_size, config.tx_buffer_size);
        let (rx_whole, tx_whole) = (whole(rx_len), whole(tx_len));
        let memory = Arc::clone(&shared.memory);
        let pair = |(rx, tx)| {
            Ok(PairSlots {
                rx_packets: Slots::new(&memory, rx, (0, rx_whole), count)?,
                rx_data: Slots::new(&memory, rx, (HEADER_SLOT, rx_len), count)?,
                tx_packets: Slots::new(&memory, tx, (0, tx_whole), count)?,
                tx_data: Slots::new(&memory, tx, (HEADER_SLOT, tx_len), count)?,
                memory: memory.clone(),
            })
        };
        let slots: Result<_, ArenaError> = layout.pairs.into_iter().map(pair).collect();
        let arena = Arena {
            events: Slots::new(&memory, layout.events, (0, EVENT_LEN), EVENT_SLOTS)?,
            memory: memory.clone(),
            shared,
            rings: layout.rings,
        };
        Ok((arena, slots?))
    }
}

#[cfg(test)]
#[path = "arena_tests.rs"]
mod tests;
