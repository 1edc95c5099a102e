//! The driver's three queues with their buffers: which slot is with the
//! device, which is with us, which is free.
//!
//! What must hold here: a slot's number is its chain's token, so that what the
//! device gives back is found without a search. `DriverQueue` has checked the
//! token and clamped the length before we see them. Nothing is allocated once
//! the queues stand.

use std::sync::Arc;

use zerosock_proto::wire::vsock::HEADER_LEN;
use zerosock_ring::{AddError, Buffer, DriverError as RingError, DriverLayout, DriverQueue};
use zerosock_ring::{Memory, QueueError, Used};

use super::arena::{Arena, EVENT_LEN, EVENT_SLOTS, Slots};

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

/// Receive queue: every slot is posted, or holds a packet nobody has read yet.
#[derive(Debug)]
pub(crate) struct RxQueue {
    queue: DriverQueue,
    dirty: bool,
}

impl RxQueue {
    /// A fresh ring with every slot posted, but not yet published.
    pub(crate) fn new(
        arena: &Arena,
        layout: DriverLayout,
        event_idx: bool,
    ) -> Result<RxQueue, QueueSetupError> {
        let mut rx = RxQueue {
            queue: DriverQueue::new(Arc::clone(&arena.memory), layout, event_idx)?,
            dirty: false,
        };
        for slot in 0..layout.size / 2 {
            rx.post(arena, slot)?;
        }
        Ok(rx)
    }

    /// Gives slot `slot` to the device.
    pub(crate) fn post(&mut self, arena: &Arena, slot: u16) -> Result<(), AddError> {
        let buffers = [
            Buffer {
                addr: arena.rx_headers.addr(slot),
                len: HEADER,
                writable: true,
            },
            Buffer {
                addr: arena.rx_data.addr(slot),
                len: arena.rx_data.len(),
                writable: true,
            },
        ];
        self.queue.add(&buffers, u64::from(slot))?;
        self.dirty = true;
        Ok(())
    }

    /// The next slot that the device filled, with the bytes it wrote (header
    /// and payload together).
    pub(crate) fn take(&mut self) -> Result<Option<(u16, u32)>, RingError> {
        Ok(self.queue.poll()?.map(|used| (slot_of(&used), used.len)))
    }

    /// Whether a packet is there: one load.
    #[inline]
    pub(crate) fn has_used(&self) -> bool {
        self.queue.has_used()
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

/// Transmit queue with its stack of free slots.
#[derive(Debug)]
pub(crate) struct TxQueue {
    queue: DriverQueue,
    free: Vec<u16>,
    /// Slots that data leaves for control packets.
    spare: u16,
    dirty: bool,
}

impl TxQueue {
    /// A fresh ring with every slot free.
    pub(crate) fn new(
        arena: &Arena,
        layout: DriverLayout,
        event_idx: bool,
    ) -> Result<TxQueue, QueueSetupError> {
        let slots = layout.size / 2;
        Ok(TxQueue {
            queue: DriverQueue::new(Arc::clone(&arena.memory), layout, event_idx)?,
            free: (0..slots).rev().collect(),
            spare: (slots / 8).clamp(1, 8),
            dirty: false,
        })
    }

    /// Takes back what the device has worked off. Returns whether there was
    /// any.
    pub(crate) fn reap(&mut self) -> Result<bool, RingError> {
        let mut any = false;
        while let Some(used) = self.queue.poll()? {
            self.free.push(slot_of(&used));
            any = true;
        }
        Ok(any)
    }

    /// A free slot for a control packet.
    pub(crate) fn control_slot(&mut self) -> Result<Option<u16>, RingError> {
        if self.free.is_empty() {
            self.reap()?;
        }
        Ok(self.free.pop())
    }

    /// A free slot for data; leaves a few for control packets.
    #[inline]
    pub(crate) fn data_slot(&mut self) -> Result<Option<u16>, RingError> {
        if !self.has_data_slot() {
            self.reap()?;
        }
        Ok(if self.has_data_slot() {
            self.free.pop()
        } else {
            None
        })
    }

    /// Whether fewer than half of the slots are free.
    #[inline]
    pub(crate) fn is_low(&self) -> bool {
        self.free.len() < usize::from(self.queue.size() / 4)
    }

    /// Whether the device has worked something off: one load.
    #[inline]
    pub(crate) fn has_used(&self) -> bool {
        self.queue.has_used()
    }

    /// Whether [`TxQueue::data_slot`] would give one.
    pub(crate) fn has_data_slot(&self) -> bool {
        self.free.len() > usize::from(self.spare)
    }

    /// Gives a slot back unused.
    pub(crate) fn put_back(&mut self, slot: u16) {
        self.free.push(slot);
    }

    /// Queues the packet in `slot`: its header, and `len` bytes of payload if
    /// there are any.
    pub(crate) fn push(&mut self, arena: &Arena, slot: u16, len: u32) -> Result<(), AddError> {
        let header = Buffer {
            addr: arena.tx_headers.addr(slot),
            len: HEADER,
            writable: false,
        };
        let data = Buffer {
            addr: arena.tx_data.addr(slot),
            len,
            writable: false,
        };
        let both = [header, data];
        let buffers = if len == 0 { &both[..1] } else { &both[..] };
        self.queue.add(buffers, u64::from(slot))?;
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
