//! The driver's queues and their slots: which are free, held, or owned by the device.
//!
//! # Invariants
//! - A slot's number is the token of its chain, so returned chains are found without a search.
//!   `DriverQueue` validates the token and clamps the length.
//! - Nothing is allocated after construction.

use std::collections::VecDeque;
use std::sync::Arc;

use zerosock_proto::vsock::datagram::DatagramId;
use zerosock_proto::wire::vsock::HEADER_LEN;
use zerosock_ring::{
    AddError, Buffer, DriverError as RingError, DriverLayout, DriverQueue, FixedChain, Memory,
    QueueError, Used,
};

use super::arena::{Arena, EVENT_LEN, EVENT_SLOTS, PairSlots, Slots};

/// How many packets ahead memory is prefetched: a cache line takes longer to arrive from the
/// device's core than a small packet takes to process.
const PREFETCH_AHEAD: u16 = 8;

/// Limit on the bytes of transmit slots used in rotation: a core's second-level TLB covers 2048
/// pages of 4 KiB. With 16 MiB instead of 8 MiB, transfers were slower by a third.
const ROTATION: u32 = 8 << 20;

/// Packets from this length on are long: they have too many lines to prefetch.
const LONG_PACKET: u32 = 16 << 10;

/// Length of a header, as in a descriptor.
const HEADER: u32 = HEADER_LEN as u32;

/// Why a queue could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueSetupError {
    /// The ring does not fit the memory.
    #[error(transparent)]
    Ring(#[from] QueueError),
    /// The first buffers could not be posted.
    #[error(transparent)]
    Post(#[from] AddError),
}

/// Lays out the chain of each slot once: a header and a payload.
fn chains(
    queue: &mut DriverQueue,
    (packets, data): (&Slots, &Slots),
    slots: u16,
    writable: bool,
) -> Result<Vec<FixedChain>, AddError> {
    let chain = |slot| {
        let header = Buffer {
            addr: packets.addr(slot),
            len: HEADER,
            writable,
        };
        let data = Buffer {
            addr: data.addr(slot),
            len: data.len(),
            writable,
        };
        queue.set_chain(&[header, data], u64::from(slot))
    };
    (0..slots).map(chain).collect()
}

/// Receive queue: every slot is posted or holds a packet not read yet.
#[derive(Debug)]
pub(crate) struct RxQueue {
    queue: DriverQueue,
    chains: Vec<FixedChain>,
    /// Slots posted and not published yet.
    unpublished: u16,
}

impl RxQueue {
    /// A new ring with every slot posted, but not yet published.
    pub(crate) fn new(
        of: &PairSlots,
        layout: DriverLayout,
        event_idx: bool,
    ) -> Result<RxQueue, QueueSetupError> {
        let mut queue = DriverQueue::new(Arc::clone(&of.memory), layout, event_idx)?;
        let slots = layout.size / 2;
        let parts = (&of.rx_packets, &of.rx_data);
        let chains = chains(&mut queue, parts, slots, true)?;
        let mut rx = RxQueue {
            queue,
            chains,
            unpublished: 0,
        };
        for slot in 0..slots {
            rx.post(slot)?;
        }
        Ok(rx)
    }

    /// Gives slot `slot` to the device.
    #[inline]
    pub(crate) fn post(&mut self, slot: u16) -> Result<(), AddError> {
        let chain = self.chains.get(usize::from(slot));
        self.queue.add_fixed(*chain.ok_or(AddError::NotFixed)?)?;
        self.unpublished += 1;
        Ok(())
    }

    /// Slots posted but not yet visible to the device.
    #[inline]
    pub(crate) fn unpublished(&self) -> u16 {
        self.unpublished
    }

    /// The next slot that the device filled, with the length it wrote (header and payload).
    #[inline]
    pub(crate) fn take(&mut self) -> Result<Option<(u16, u32)>, RingError> {
        Ok(self.queue.poll()?.map(|used| (slot_of(&used), used.len)))
    }

    /// The slot that is probably filled a few packets later, to prefetch it.
    #[inline]
    pub(crate) fn likely_next(&self) -> Option<u16> {
        self.queue
            .peek_token(PREFETCH_AHEAD)
            .map(|token| token as u16)
    }

    /// Whether a packet arrived: one load.
    #[inline]
    pub(crate) fn has_used(&self) -> bool {
        self.queue.has_used()
    }

    /// Publishes posted slots. Returns whether the device must be kicked.
    pub(crate) fn publish(&mut self) -> bool {
        std::mem::take(&mut self.unpublished) > 0 && self.queue.publish()
    }

    /// Enables or disables notifications. Returns true if enabled and packets arrived meanwhile.
    pub(crate) fn request_notifications(&mut self, enabled: bool) -> bool {
        request_notifications(&mut self.queue, enabled)
    }
}

/// Transmit queue with its free slots.
#[derive(Debug)]
pub(crate) struct TxQueue {
    queue: DriverQueue,
    chains: Vec<FixedChain>,
    /// In the order of their return.
    free: VecDeque<u16>,
    /// Slots below this one are used in rotation; the others only when all of these are in use,
    /// because more than [`ROTATION`] bytes exceed the TLB.
    round: u16,
    /// Free slots outside the rotation.
    reserve: Vec<u16>,
    /// Slots reserved for control packets.
    spare: u16,
    dirty: bool,
    /// For each slot in flight that ends a datagram: the socket and the datagram's bytes.
    datagram_ends: Vec<Option<(DatagramId, u32)>>,
    /// The number of such slots.
    in_flight: usize,
    /// Datagrams that the device has consumed, not reported yet.
    consumed_datagrams: Vec<(DatagramId, u32)>,
}

impl TxQueue {
    /// A new ring with every slot free.
    pub(crate) fn new(
        of: &PairSlots,
        layout: DriverLayout,
        event_idx: bool,
    ) -> Result<TxQueue, QueueSetupError> {
        let slots = layout.size / 2;
        let mut queue = DriverQueue::new(Arc::clone(&of.memory), layout, event_idx)?;
        let parts = (&of.tx_packets, &of.tx_data);
        let round = (ROTATION / of.tx_data.len().max(1)).max(u32::from(2 * PREFETCH_AHEAD));
        let round = u16::try_from(round).map_or(slots, |round| round.min(slots));
        Ok(TxQueue {
            chains: chains(&mut queue, parts, slots, false)?,
            queue,
            free: (0..round).rev().collect(),
            round,
            reserve: (round..slots).rev().collect(),
            spare: (slots / 8).clamp(1, 8),
            dirty: false,
            datagram_ends: vec![None; usize::from(slots)],
            in_flight: 0,
            consumed_datagrams: Vec::new(),
        })
    }

    /// Reclaims the slots that the device has returned. Returns whether there were any.
    pub(crate) fn reap(&mut self) -> Result<bool, RingError> {
        let mut any = false;
        if self.in_flight > 0 {
            return self.reap_datagrams();
        }
        while let Some(used) = self.queue.poll()? {
            self.put_back(slot_of(&used));
            any = true;
        }
        Ok(any)
    }

    /// As `reap`, and records the datagrams that ended in them.
    fn reap_datagrams(&mut self) -> Result<bool, RingError> {
        let mut any = false;
        while let Some(used) = self.queue.poll()? {
            let slot = slot_of(&used);
            let ends = self.datagram_ends.get_mut(usize::from(slot));
            if let Some(ended) = ends.and_then(Option::take) {
                self.in_flight -= 1;
                self.consumed_datagrams.push(ended);
            }
            self.put_back(slot);
            any = true;
        }
        Ok(any)
    }

    /// Records that the packet in `slot` is the last of a datagram of `len` bytes.
    #[inline]
    pub(crate) fn track_datagram(&mut self, slot: u16, id: DatagramId, len: u32) {
        if let Some(ends) = self.datagram_ends.get_mut(usize::from(slot)) {
            self.in_flight += usize::from(ends.is_none());
            *ends = Some((id, len));
        }
    }

    /// The next datagram that the device has consumed.
    #[inline]
    pub(crate) fn next_consumed_datagram(&mut self) -> Option<(DatagramId, u32)> {
        self.consumed_datagrams.pop()
    }

    /// Limit on the slots used for data.
    pub(crate) fn most_data_slots(&self) -> usize {
        self.chains.len().saturating_sub(usize::from(self.spare))
    }

    /// Whether [`TxQueue::data_slot`] would return `count` slots.
    #[inline]
    pub(crate) fn has_data_slots(&self, count: usize) -> bool {
        self.count_free() >= usize::from(self.spare) + count
    }

    /// The number of free slots.
    #[inline]
    fn count_free(&self) -> usize {
        self.free.len() + self.reserve.len()
    }

    /// For a short packet, the slot returned last: its lines are still in the cache. For a long
    /// one, the slot returned first: its lines have then left the device core's private cache for
    /// the shared one, from where they are written faster.
    #[inline]
    fn take_free(&mut self, len: u32) -> Option<u16> {
        let slot = if len < LONG_PACKET {
            self.free.pop_back()
        } else {
            self.free.pop_front()
        };
        slot.or_else(|| self.reserve.pop())
    }

    /// Whether slots are in flight.
    pub(crate) fn is_busy(&self) -> bool {
        self.count_free() < self.chains.len()
    }

    /// A free slot for a control packet.
    pub(crate) fn control_slot(&mut self) -> Result<Option<u16>, RingError> {
        if self.free.is_empty() {
            self.reap()?;
        }
        Ok(self.take_free(0))
    }

    /// A free slot for `len` bytes of data, or for as many as it holds; leaves some for control
    /// packets.
    #[inline]
    pub(crate) fn data_slot(&mut self, len: u32) -> Result<Option<u16>, RingError> {
        if let Some(slot) = self.ready_slot(len) {
            return Ok(Some(slot));
        }
        self.reap()?;
        Ok(if self.has_data_slot() {
            self.take_free(len)
        } else {
            None
        })
    }

    /// As [`data_slot`](Self::data_slot), if it need not look for returned slots.
    #[inline]
    pub(crate) fn ready_slot(&mut self, len: u32) -> Option<u16> {
        if self.free.is_empty() || !self.has_data_slot() {
            return None;
        }
        self.take_free(len)
    }

    /// The slot that will be used a few short packets later, to prefetch it.
    #[inline]
    pub(crate) fn next_free(&self) -> Option<u16> {
        let at = self.free.len().checked_sub(usize::from(PREFETCH_AHEAD))?;
        self.free.get(at).copied()
    }

    /// Whether fewer than half of the slots in the rotation are free.
    #[inline]
    pub(crate) fn is_low(&self) -> bool {
        self.free.len() < usize::from(self.round / 2)
    }

    /// Whether the device has returned slots: one load.
    #[inline]
    pub(crate) fn has_used(&self) -> bool {
        self.queue.has_used()
    }

    /// Whether [`TxQueue::data_slot`] would return a slot.
    #[inline]
    pub(crate) fn has_data_slot(&self) -> bool {
        self.count_free() > usize::from(self.spare)
    }

    /// Returns an unused slot.
    #[inline]
    pub(crate) fn put_back(&mut self, slot: u16) {
        if slot < self.round {
            self.free.push_back(slot);
        } else {
            self.reserve.push(slot);
        }
    }

    /// Queues the packet in `slot`. Its chain always covers the whole slot; the header has the
    /// length of the packet.
    #[inline]
    pub(crate) fn push(&mut self, slot: u16) -> Result<(), AddError> {
        let chain = self.chains.get(usize::from(slot));
        self.queue.add_fixed(*chain.ok_or(AddError::NotFixed)?)?;
        self.dirty = true;
        Ok(())
    }

    /// Whether packets are queued that are not published.
    #[inline]
    pub(crate) fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// Publishes queued packets. Returns whether the device must be kicked.
    pub(crate) fn publish(&mut self) -> bool {
        std::mem::take(&mut self.dirty) && self.queue.publish()
    }

    /// Enables or disables notifications. Returns true if enabled and slots returned meanwhile.
    pub(crate) fn request_notifications(&mut self, enabled: bool) -> bool {
        request_notifications(&mut self.queue, enabled)
    }

    /// Requests a notification after `packets` more packets, at most as many as are in flight.
    /// Returns true if they have been consumed already.
    pub(crate) fn request_notification_after(&mut self, packets: u32) -> bool {
        // Each datagram in flight has a last packet in the queue; a higher count might never be
        // reached.
        let most = u16::try_from(self.in_flight).unwrap_or(u16::MAX);
        let packets = u16::try_from(packets).unwrap_or(u16::MAX).min(most);
        self.queue
            .enable_notifications_after(packets.saturating_sub(1))
    }
}

/// Event queue: a few small buffers, always posted.
#[derive(Debug)]
pub(crate) struct EventQueue {
    queue: DriverQueue,
    dirty: bool,
}

impl EventQueue {
    /// A new ring with every buffer posted, but not yet published.
    pub(crate) fn new(
        arena: &Arena,
        layout: DriverLayout,
        event_idx: bool,
    ) -> Result<EventQueue, QueueSetupError> {
        let mut events = EventQueue {
            queue: DriverQueue::new(Arc::clone(&arena.memory), layout, event_idx)?,
            dirty: false,
        };
        for slot in 0..EVENT_SLOTS.min(layout.size) {
            events.post(arena, slot)?;
        }
        Ok(events)
    }

    fn post(&mut self, arena: &Arena, slot: u16) -> Result<(), AddError> {
        let buffer = Buffer {
            addr: arena.events.addr(slot),
            len: EVENT_LEN,
            writable: true,
        };
        self.queue.add(&[buffer], u64::from(slot))?;
        self.dirty = true;
        Ok(())
    }

    /// Whether an event arrived: one load.
    #[inline]
    pub(crate) fn has_used(&self) -> bool {
        self.queue.has_used()
    }

    /// The id of the next event; its buffer is posted again. `Some(None)`: the event was too short.
    pub(crate) fn take(&mut self, arena: &Arena) -> Result<Option<Option<u32>>, RingError> {
        let Some(used) = self.queue.poll()? else {
            return Ok(None);
        };
        let slot = slot_of(&used);
        let id = (used.len >= EVENT_LEN).then(|| {
            let mut id = [0u8; EVENT_LEN as usize];
            read(&arena.memory, &arena.events, slot, &mut id);
            u32::from_le_bytes(id)
        });
        // Cannot fail: the chain was just returned.
        let _ = self.post(arena, slot);
        Ok(Some(id))
    }

    /// Publishes posted buffers. Returns whether the device must be kicked.
    pub(crate) fn publish(&mut self) -> bool {
        std::mem::take(&mut self.dirty) && self.queue.publish()
    }

    /// Enables or disables notifications. Returns true if enabled and events arrived meanwhile.
    pub(crate) fn request_notifications(&mut self, enabled: bool) -> bool {
        request_notifications(&mut self.queue, enabled)
    }
}

/// Copies the beginning of a slot.
pub(crate) fn read(memory: &Memory, slots: &Slots, slot: u16, out: &mut [u8]) -> usize {
    memory.read(slots.pieces(slot), 0, out)
}

fn request_notifications(queue: &mut DriverQueue, enabled: bool) -> bool {
    if enabled {
        queue.enable_notifications()
    } else {
        queue.disable_notifications();
        false
    }
}

/// Tokens are slot numbers, and the queue returns only tokens that it was given.
fn slot_of(used: &Used) -> u16 {
    used.token as u16
}
