//! The sender's side of the flow control: to whom nothing is to be sent for a while.
//!
//! What must hold: only the destination that asked for it is blocked; there are at most
//! [`Blocks::MOST`] blocks, and of one endpoint at most [`Blocks::MOST_OF_ONE`], so that one that
//! floods us with words about its own ports costs itself alone; beyond that a STOP is not heeded,
//! and what is sent may be lost. None lasts longer than it is repeated.

use hashbrown::HashMap;

use super::STOP_HOLDS;
use crate::addr::{Address, Port};
use crate::time::Instant;

/// Why nothing is to be sent to a destination.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum Block {
    /// It has enough, and says when it has room.
    Full,
    /// Nobody there takes datagrams.
    Deaf,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Blocks {
    of: HashMap<(Port, Address), (Block, Instant)>,
    /// Not later than the first that ends.
    next: Option<Instant>,
}

impl Blocks {
    /// Most destinations that are blocked at once.
    pub const MOST: usize = 1024;
    /// Most of them that are of one endpoint.
    pub const MOST_OF_ONE: usize = 64;

    /// Nobody is blocked.
    pub fn new() -> Blocks {
        Blocks::default()
    }

    /// Whether nobody is: to be asked first, as it needs no clock.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// How many are.
    pub fn len(&self) -> usize {
        self.of.len()
    }

    /// Why nothing is to be sent from our port `from` to `to` now.
    pub fn of(&self, now: Instant, from: Port, to: Address) -> Option<Block> {
        let (block, until) = self.of.get(&(from, to))?;
        (*until > now).then_some(*block)
    }

    /// `by` has said STOP to our port `port`. False: it is not heeded.
    pub fn stop(&mut self, now: Instant, port: Port, by: Address, block: Block) -> bool {
        let until = now + STOP_HOLDS;
        if let Some(known) = self.of.get_mut(&(port, by)) {
            *known = (block, until);
            return true;
        }
        self.end(now, |_| {});
        let of_one = self.of.keys().filter(|(_, other)| other.cid == by.cid);
        if self.of.len() >= Blocks::MOST || of_one.count() >= Blocks::MOST_OF_ONE {
            return false;
        }
        self.of.insert((port, by), (block, until));
        self.next = Some(self.next.map_or(until, |next| next.min(until)));
        true
    }

    /// `by` has said START to our port `port`. True: it was blocked.
    pub fn start(&mut self, port: Port, by: Address) -> bool {
        self.of.remove(&(port, by)).is_some()
    }

    /// When the next block may end by itself.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.next.filter(|_| !self.of.is_empty())
    }

    /// Ends what has lasted long enough; names the ports of ours that may send again.
    pub fn end(&mut self, now: Instant, mut ended: impl FnMut(Port)) {
        if self.next.is_none_or(|at| at > now) {
            return;
        }
        let mut next: Option<Instant> = None;
        self.of.retain(|(port, _), (_, until)| {
            let over = *until <= now;
            if over {
                ended(*port);
            } else {
                next = Some(next.map_or(*until, |next| next.min(*until)));
            }
            !over
        });
        self.next = next;
    }

    /// Nobody of whom `gone` says so is blocked any more.
    pub fn forget(&mut self, gone: impl Fn(Port, Address) -> bool) {
        self.of.retain(|(port, by), _| !gone(*port, *by));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::Cid;

    fn at(cid: u32, port: u32) -> Address {
        Address::new(Cid::new(cid), Port::new(port))
    }

    const OURS: Port = Port::new(7);

    #[test]
    fn a_block_is_of_one_destination_and_ends_by_itself() {
        let mut blocks = Blocks::new();
        let now = Instant::ZERO;
        assert!(blocks.stop(now, OURS, at(3, 1), Block::Full));
        assert_eq!(blocks.of(now, OURS, at(3, 1)), Some(Block::Full));
        assert_eq!(blocks.of(now, OURS, at(3, 2)), None);
        assert_eq!(blocks.of(now, OURS, at(4, 1)), None);
        assert_eq!(blocks.of(now, Port::new(8), at(3, 1)), None);
        let end = now + STOP_HOLDS;
        assert_eq!(blocks.poll_timeout(), Some(end));
        assert_eq!(blocks.of(end, OURS, at(3, 1)), None, "whoever looks or not");
        let mut told = Vec::new();
        blocks.end(end, |port| told.push(port));
        assert_eq!((told, blocks.len()), (vec![OURS], 0));
    }

    #[test]
    fn a_repeated_stop_lasts_and_a_start_ends_it() {
        let mut blocks = Blocks::new();
        let (zero, later) = (Instant::ZERO, Instant::ZERO + STOP_HOLDS / 2);
        blocks.stop(zero, OURS, at(3, 1), Block::Full);
        blocks.stop(later, OURS, at(3, 1), Block::Full);
        blocks.end(zero + STOP_HOLDS, |_| panic!("too early"));
        assert!(blocks.start(OURS, at(3, 1)) && !blocks.start(OURS, at(3, 1)));
        assert!(blocks.is_empty() && blocks.poll_timeout().is_none());
    }

    #[test]
    fn a_flood_costs_its_sender_alone() {
        let mut blocks = Blocks::new();
        let now = Instant::ZERO;
        for port in 0..10_000 {
            blocks.stop(now, OURS, at(3, port), Block::Full);
        }
        assert_eq!(blocks.len(), Blocks::MOST_OF_ONE);
        assert!(blocks.stop(now, OURS, at(4, 1), Block::Full));
        for cid in 5..100 {
            (0..100).for_each(|port| {
                blocks.stop(now, OURS, at(cid, port), Block::Full);
            });
        }
        assert_eq!(blocks.len(), Blocks::MOST);
        assert!(blocks.stop(now + STOP_HOLDS, OURS, at(3, 70_000), Block::Full));
        assert_eq!(blocks.len(), 1, "those that are over make room");
    }
}
