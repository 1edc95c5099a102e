//! Several queue pairs: their number, their queues, and the pair at which a new connection begins
//! (docs/queue-pairs.md).
//!
//! # Invariants
//! Both halves compute the same pair. A connection at another pair works as well (the peer has another
//! number of pairs): it is at the pair where its REQUEST arrived.

use crate::addr::{Address, Port};

/// Queue of buffers for packets to the driver, of the first pair (virtio 1.3, 5.10.2).
pub const RX_QUEUE: u16 = 0;
/// Queue of packets from the driver, of the first pair.
pub const TX_QUEUE: u16 = 1;
/// Queue of events, which all pairs share.
pub const EVENT_QUEUE: u16 = 2;

/// The negotiated number of queue pairs: one, as in the standard, or more.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub struct QueuePairs(u16);

/// An invalid number of queue pairs.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[error("{0} queue pairs: 1 to 16 are possible")]
pub struct BadPairs(pub u16);

/// What a queue is for.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum QueueUse {
    /// Packets to the driver, of this pair.
    Receive(u16),
    /// Packets from the driver, of this pair.
    Transmit(u16),
    /// Events.
    Events,
}

impl QueuePairs {
    /// One pair, as in the standard.
    pub const ONE: QueuePairs = QueuePairs(1);
    /// Most pairs that can be negotiated.
    pub const MAX: u16 = 16;

    /// `count` pairs.
    ///
    /// # Errors
    /// [`BadPairs`] for none, and for more than [`QueuePairs::MAX`].
    pub const fn new(count: u16) -> Result<QueuePairs, BadPairs> {
        match count {
            1..=QueuePairs::MAX => Ok(QueuePairs(count)),
            _ => Err(BadPairs(count)),
        }
    }

    /// The number of pairs.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Queues of the device: two for each pair, and the one for events.
    pub const fn queues(self) -> u16 {
        2 * self.0 + 1
    }

    /// What queue `index` is for. The first three are the standard's; the second pair has 3 and 4,
    /// the third 5 and 6. `None`: there is no such queue.
    pub const fn queue_use(self, index: u16) -> Option<QueueUse> {
        match index {
            EVENT_QUEUE => Some(QueueUse::Events),
            index if index >= self.queues() => None,
            RX_QUEUE => Some(QueueUse::Receive(0)),
            TX_QUEUE => Some(QueueUse::Transmit(0)),
            index if index % 2 == 1 => Some(QueueUse::Receive(index / 2)),
            index => Some(QueueUse::Transmit(index / 2 - 1)),
        }
    }

    /// The pair at which a connection begins, whichever side requests it: `driver` is the port at
    /// the driver's end, `peer` the address at the other.
    pub const fn of_flow(self, driver: Port, peer: Address) -> u16 {
        // Below the number of pairs, which has 16 bits.
        ((flow_hash(driver, peer) as u64 * self.0 as u64) >> 32) as u16
    }
}

/// The queue of packets to the driver, of pair `pair`.
pub const fn rx_queue(pair: u16) -> u16 {
    if pair == 0 { RX_QUEUE } else { 2 * pair + 1 }
}

/// The queue of packets from the driver, of pair `pair`.
pub const fn tx_queue(pair: u16) -> u16 {
    if pair == 0 { TX_QUEUE } else { 2 * pair + 2 }
}

/// Spreads flows over pairs. Not a defence: a driver that puts all its flows into one pair slows
/// only itself.
pub const fn flow_hash(driver: Port, peer: Address) -> u32 {
    const START: u32 = 0x7a73_6f63;
    let hash = mix(START ^ driver.get());
    let hash = mix(hash ^ peer.cid.get());
    mix(hash ^ peer.port.get())
}

/// A bijection of 32 bits; each input bit changes each output bit with a probability of about one
/// half.
const fn mix(mut word: u32) -> u32 {
    word ^= word >> 16;
    word = word.wrapping_mul(0x7feb_352d);
    word ^= word >> 15;
    word = word.wrapping_mul(0x846c_a68b);
    word ^ (word >> 16)
}

#[cfg(test)]
#[path = "pairs_tests.rs"]
mod tests;
