//! The driver's three queues with their buffers: which slot is with the
//! device, which is with us, which is free.
//!
//! What must hold here: a slot's number is its chain's token, so that what the
//! device gives back is found without a search. `DriverQueue` has checked the
//! token and clamped the length before we see them. Nothing is allocated once
//! the queues stand.

use std::collections::VecDeque;
use std::sync::Arc;

use zerosock_proto::vsock::datagram::DatagramId;
use zerosock_proto::wire::vsock::HEADER_LEN;
use zerosock_ring::{AddError, Buffer, DriverError as RingError, DriverLayout, DriverQueue};
use zerosock_ring::{FixedChain, Memory, QueueError, Used};

use super::arena::{Arena, EVENT_LEN, EVENT_SLOTS, PairSlots, Slots};

/// Packets ahead whose memory is brought near: a cache line is on its way from the device's core for
/// longer than a small packet takes.
const AHEAD: u16 = 8;

/// Bytes of transmit slots that are used in turn, if they are enough: what lies in 4 KiB pages of
/// which a core's second table of translations holds 2048. 16 MiB were slower than 8 by a third.
const ROUND: u32 = 8 << 20;

/// From so many bytes on a packet is a long one: its lines are too many to be fetched in advance.
const LONG: u32 = 16 << 10;

/// Bytes of a header, as a descriptor's length.
const HEADER: u32 = HEADER_LEN as u32;

/// Why a queue could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum QueueSetupError {
    /// The ring does not lie in the memory as it should.
    #[error(transparent)]
    Ring(#[from] QueueError),
    /// The first buffers could not be posted.
    #[error(transparent)]
    Post(#[from] AddError),
}

/// Lays out a chain of a header and a payload for each slot, once and for all.
fn chains(
    queue: &mut DriverQueue,
    (headers, data): (&Slots, &Slots),
    slots: u16,
    writable: bool,
) -> Result<Vec<FixedChain>, AddError> {
    let chain = |slot| {
        let header = Buffer {
            addr: headers.addr(slot),
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

/// Receive queue: every slot is posted, or holds a packet nobody has read yet.
#[derive(Debug)]
pub(crate) struct RxQueue {
    queue: DriverQueue,
    chains: Vec<FixedChain>,
    /// Slots posted and not shown yet.
    unshown: u16,
}

impl RxQueue {
    /// A fresh ring with every slot posted, but not yet published.
    pub(crate) fn new(
        of: &PairSlots,
        layout: DriverLayout,
        event_idx: bool,
    ) -> Result<RxQueue, QueueSetupError> {
        let mut queue = DriverQueue::new(Arc::clone(&of.memory), layout, event_idx)?;
        let slots = layout.size / 2;
        let parts = (&of.rx_headers, &of.rx_data);
        let chains = chains(&mut queue, parts, slots, true)?;
        let mut rx = RxQueue {
            queue,
            chains,
            unshown: 0,
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
        self.unshown += 1;
        Ok(())
    }

    /// Slots that were given to the device, which it does not see yet.
    #[inline]
    pub(crate) fn unshown(&self) -> u16 {
        self.unshown
    }

    /// The next slot that the device filled, with the bytes it wrote (header
    /// and payload together).
    #[inline]
    pub(crate) fn take(&mut self) -> Result<Option<(u16, u32)>, RingError> {
        Ok(self.queue.poll()?.map(|used| (slot_of(&used), used.len)))
    }

    /// The slot that is probably taken a few packets later.
    #[inline]
    pub(crate) fn guess(&self) -> Option<u16> {
        self.queue.peek_token(AHEAD).map(|token| token as u16)
    }

    /// Whether a packet is there: one load.
    #[inline]
    pub(crate) fn has_used(&self) -> bool {
        self.queue.has_used()
    }

    /// Shows the device what was posted. True: kick it.
    pub(crate) fn publish(&mut self) -> bool {
        std::mem::take(&mut self.unshown) > 0 && self.queue.publish()
    }

    /// Asks to be called, or not. True when asked: something came meanwhile.
    pub(crate) fn want_calls(&mut self, want: bool) -> bool {
        want_calls(&mut self.queue, want)
    }
}

/// Transmit queue with its free slots.
#[derive(Debug)]
pub(crate) struct TxQueue {
    queue: DriverQueue,
    chains: Vec<FixedChain>,
    /// In the order in which they came back.
    free: VecDeque<u16>,
    /// The slots below this one go round; those from it on are used when all others are out: more
    /// than [`ROUND`] bytes are more pages than a core keeps track of.
    round: u16,
    /// Those of them that are free.
    reserve: Vec<u16>,
    /// Slots that data leaves for control packets.
    spare: u16,
    dirty: bool,
    /// Whose datagram a slot ends, and its bytes, while the device has it.
    flying: Vec<Option<(DatagramId, u32)>>,
    /// How many there are.
    in_flight: usize,
    /// Those that the device has taken.
    landed: Vec<(DatagramId, u32)>,
}

impl TxQueue {
    /// A fresh ring with every slot free.
    pub(crate) fn new(
        of: &PairSlots,
        layout: DriverLayout,
        event_idx: bool,
    ) -> Result<TxQueue, QueueSetupError> {
        let slots = layout.size / 2;
        let mut queue = DriverQueue::new(Arc::clone(&of.memory), layout, event_idx)?;
        let parts = (&of.tx_headers, &of.tx_data);
        let round = (ROUND / of.tx_data.len().max(1)).max(u32::from(2 * AHEAD));
        let round = u16::try_from(round).map_or(slots, |round| round.min(slots));
        Ok(TxQueue {
            chains: chains(&mut queue, parts, slots, false)?,
            queue,
            free: (0..round).rev().collect(),
            round,
            reserve: (round..slots).rev().collect(),
            spare: (slots / 8).clamp(1, 8),
            dirty: false,
            flying: vec![None; usize::from(slots)],
            in_flight: 0,
            landed: Vec::new(),
        })
    }

    /// Takes back what the device has worked off. Returns whether there was
    /// any.
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

    /// As `reap`, and notes which of them were ends of datagrams.
    fn reap_datagrams(&mut self) -> Result<bool, RingError> {
        let mut any = false;
        while let Some(used) = self.queue.poll()? {
            let slot = slot_of(&used);
            let ends = self.flying.get_mut(usize::from(slot));
            if let Some(ended) = ends.and_then(Option::take) {
                self.in_flight -= 1;
                self.landed.push(ended);
            }
            self.put_back(slot);
            any = true;
        }
        Ok(any)
    }

    /// The packet in `slot` is the last of a datagram of `len` bytes.
    #[inline]
    pub(crate) fn fly(&mut self, slot: u16, id: DatagramId, len: u32) {
        if let Some(ends) = self.flying.get_mut(usize::from(slot)) {
            self.in_flight += usize::from(ends.is_none());
            *ends = Some((id, len));
        }
    }

    /// A datagram that the device has taken.
    #[inline]
    pub(crate) fn landed(&mut self) -> Option<(DatagramId, u32)> {
        self.landed.pop()
    }

    /// Slots that there are for data at most.
    pub(crate) fn most_data_slots(&self) -> usize {
        self.chains.len().saturating_sub(usize::from(self.spare))
    }

    /// Whether [`TxQueue::data_slot`] would give so many.
    #[inline]
    pub(crate) fn has_data_slots(&self, count: usize) -> bool {
        self.count_free() >= usize::from(self.spare) + count
    }

    /// Free slots.
    #[inline]
    fn count_free(&self) -> usize {
        self.free.len() + self.reserve.len()
    }

    /// For a short packet the slot that came back last: what was just written and read is still
    /// near. For a long one the first of those that came back: the lines that the other core has
    /// read have then left its own cache for the common one, from where a writer gets them sooner.
    #[inline]
    fn take_free(&mut self, len: u32) -> Option<u16> {
        let slot = if len < LONG {
            self.free.pop_back()
        } else {
            self.free.pop_front()
        };
        slot.or_else(|| self.reserve.pop())
    }

    /// Whether the device has slots of ours.
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

    /// A free slot for `len` bytes of data, or for what it holds; leaves a few for control packets.
    #[inline]
    pub(crate) fn data_slot(&mut self, len: u32) -> Result<Option<u16>, RingError> {
        if self.free.is_empty() || !self.has_data_slot() {
            self.reap()?;
        }
        Ok(if self.has_data_slot() {
            self.take_free(len)
        } else {
            None
        })
    }

    /// The slot that is given out a few packets later, if they are short.
    #[inline]
    pub(crate) fn later(&self) -> Option<u16> {
        let at = self.free.len().checked_sub(usize::from(AHEAD))?;
        self.free.get(at).copied()
    }

    /// Whether fewer than half of the slots that go round are free.
    #[inline]
    pub(crate) fn is_low(&self) -> bool {
        self.free.len() < usize::from(self.round / 2)
    }

    /// Whether the device has worked something off: one load.
    #[inline]
    pub(crate) fn has_used(&self) -> bool {
        self.queue.has_used()
    }

    /// Whether [`TxQueue::data_slot`] would give one.
    pub(crate) fn has_data_slot(&self) -> bool {
        self.count_free() > usize::from(self.spare)
    }

    /// Gives a slot back unused.
    #[inline]
    pub(crate) fn put_back(&mut self, slot: u16) {
        if slot < self.round {
            self.free.push_back(slot);
        } else {
            self.reserve.push(slot);
        }
    }

    /// Queues the packet in `slot`. Its chain is always as long as the slot; how much of it is
    /// meant is said by the header.
    #[inline]
    pub(crate) fn push(&mut self, slot: u16) -> Result<(), AddError> {
        let chain = self.chains.get(usize::from(slot));
        self.queue.add_fixed(*chain.ok_or(AddError::NotFixed)?)?;
        self.dirty = true;
        Ok(())
    }

    /// Shows the device what was pushed. True: kick it.
    pub(crate) fn publish(&mut self) -> bool {
        std::mem::take(&mut self.dirty) && self.queue.publish()
    }

    /// Asks to be called, or not. True when asked: slots came back meanwhile.
    pub(crate) fn want_calls(&mut self, want: bool) -> bool {
        want_calls(&mut self.queue, want)
    }

    /// Asks to be called when so many packets have been taken, of which as many are under way at
    /// least. True: they have been.
    pub(crate) fn want_call_after(&mut self, packets: u32) -> bool {
        // Each datagram's last packet is there; for more there might be no call.
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
    /// A fresh ring with every buffer posted, but not yet published.
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

    /// Whether an event is there: one load.
    #[inline]
    pub(crate) fn has_used(&self) -> bool {
        self.queue.has_used()
    }

    /// The next event's id; its buffer is posted again. `Some(None)`: an event
    /// too short to have one.
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
        // The chain just came back, so there is room for it.
        let _ = self.post(arena, slot);
        Ok(Some(id))
    }

    /// Shows the device what was posted. True: kick it.
    pub(crate) fn publish(&mut self) -> bool {
        std::mem::take(&mut self.dirty) && self.queue.publish()
    }

    /// Asks to be called, or not. True when asked: something came meanwhile.
    pub(crate) fn want_calls(&mut self, want: bool) -> bool {
        want_calls(&mut self.queue, want)
    }
}

/// Copies the beginning of a slot out.
pub(crate) fn read(memory: &Memory, slots: &Slots, slot: u16, out: &mut [u8]) -> usize {
    memory.read(slots.pieces(slot), 0, out)
}

fn want_calls(queue: &mut DriverQueue, want: bool) -> bool {
    if want {
        queue.enable_notifications()
    } else {
        queue.disable_notifications();
        false
    }
}

/// Tokens are slot numbers, and only tokens we gave come back.
fn slot_of(used: &Used) -> u16 {
    used.token as u16
}
