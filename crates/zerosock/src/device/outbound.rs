//! Bytes of one connection on their way from the guest to the host, not yet taken.
//!
//! They lie where the guest put them (a held chain each) for as long as the hold is bounded:
//! at most `share` chains per connection once the other end has stalled, the rest in a private
//! overflow no larger than the `buf_alloc` that we advertised, because credit lets no more in.
//! Order is by construction: held chains first, then the overflow; while there is overflow,
//! nothing new is held.

use std::collections::VecDeque;
use zerosock_ring::{Chain, Memory, SliceBuf};

/// Part of a chain's readable bytes.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) chain: Chain,
    pub(crate) offset: u32,
    pub(crate) len: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Outbound {
    held: VecDeque<Held>,
    held_bytes: usize,
    overflow: Vec<u8>,
    /// Bytes at the front of `overflow` that have been taken.
    taken: usize,
}

impl Outbound {
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes waiting, held and copied.
    pub(crate) fn len(&self) -> usize {
        self.held_bytes + self.overflow.len() - self.taken
    }

    pub(crate) fn held_chains(&self) -> usize {
        self.held.len()
    }

    /// Bytes in the private overflow.
    pub(crate) fn overflow_len(&self) -> usize {
        self.overflow.len() - self.taken
    }

    /// Appends `len` bytes of `chain`'s readable part. Held if fewer than `share` chains are and
    /// nothing was copied before; else copied, and the chain comes back to be completed.
    #[inline]
    pub(crate) fn push(&mut self, mem: &Memory, held: Held, share: usize) -> Option<Chain> {
        if self.overflow.is_empty() && self.held.len() < share {
            self.held_bytes += held.len as usize;
            self.held.push_back(held);
            return None;
        }
        copy_out(mem, &held, &mut self.overflow);
        Some(held.chain)
    }

    /// Lists the held bytes from the front, as much as `out` takes; returns how many.
    pub(crate) fn gather<'m, const N: usize>(
        &self,
        mem: &'m Memory,
        out: &mut SliceBuf<'m, N>,
    ) -> usize {
        let mut total = 0;
        for held in &self.held {
            let covered = mem.slices(
                held.chain.readable(),
                held.offset as usize,
                held.len as usize,
                out,
            );
            total += covered;
            if covered < held.len as usize {
                break;
            }
        }
        total
    }

    /// The copied bytes; to be sent once nothing is held.
    pub(crate) fn overflow(&self) -> &[u8] {
        &self.overflow[self.taken..]
    }

    /// `n` held bytes were taken from the front; each chain that is used up goes to `done`.
    #[inline]
    pub(crate) fn advance_held(&mut self, mut n: usize, mut done: impl FnMut(Chain)) {
        self.held_bytes -= n;
        while n > 0 {
            let Some(front) = self.held.front_mut() else {
                break;
            };
            let take = n.min(front.len as usize);
            front.offset += take as u32;
            front.len -= take as u32;
            n -= take;
            if front.len == 0
                && let Some(held) = self.held.pop_front()
            {
                done(held.chain);
            }
        }
    }

    /// `n` copied bytes were taken. An empty overflow gives its memory back: a connection at
    /// rest owns none. One that never empties is moved down when half of it is taken, so that it
    /// stays below twice the bytes that wait and each byte is moved once at most.
    pub(crate) fn advance_overflow(&mut self, n: usize) {
        self.taken += n;
        if self.taken >= self.overflow.len() {
            self.overflow = Vec::new();
            self.taken = 0;
        } else if self.taken >= self.overflow.len() / 2 {
            self.overflow.drain(..self.taken);
            self.taken = 0;
        }
    }

    /// Copies out all held chains but the first `keep`; each goes to `done`. Returns the bytes
    /// copied.
    pub(crate) fn spill(
        &mut self,
        mem: &Memory,
        keep: usize,
        mut done: impl FnMut(Chain),
    ) -> usize {
        if self.held.len() <= keep {
            return 0;
        }
        let tail = self.held.split_off(keep);
        let bytes: usize = tail.iter().map(|h| h.len as usize).sum();
        let mut overflow = Vec::with_capacity(bytes + self.overflow_len());
        for held in tail {
            copy_out(mem, &held, &mut overflow);
            done(held.chain);
        }
        overflow.extend_from_slice(self.overflow());
        self.overflow = overflow;
        self.taken = 0;
        self.held_bytes -= bytes;
        bytes
    }

    /// Gives up everything: the bytes are lost, the chains come back.
    pub(crate) fn clear(&mut self, mut done: impl FnMut(Chain)) {
        for held in self.held.drain(..) {
            done(held.chain);
        }
        *self = Outbound::default();
    }

    /// Takes the first held part out (a sibling reads it in place).
    pub(crate) fn pop_held(&mut self) -> Option<Held> {
        let held = self.held.pop_front()?;
        self.held_bytes -= held.len as usize;
        Some(held)
    }

    /// Takes the copied bytes out. To be called once nothing is held.
    pub(crate) fn take_overflow(&mut self) -> Vec<u8> {
        let taken = std::mem::take(&mut self.taken);
        let mut bytes = std::mem::take(&mut self.overflow);
        bytes.drain(..taken);
        bytes
    }
}

/// Appends the bytes of `held` to `to`. A piece that lies outside the memory (it cannot: chains
/// are translated when popped) reads as zeros, so that the stream keeps its length.
pub(crate) fn copy_out(mem: &Memory, held: &Held, to: &mut Vec<u8>) {
    let start = to.len();
    to.resize(start + held.len as usize, 0);
    mem.read(
        held.chain.readable(),
        held.offset as usize,
        &mut to[start..],
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use zerosock_ring::{
        Buffer, DeviceQueue, DriverLayout, DriverQueue, QueueConfig, RegionConfig,
    };

    const DATA: u64 = 0x8000;

    /// A queue with `n` chains of 16 bytes, of which byte i of chain c is 16 * c + i.
    fn chains(n: usize) -> (Arc<Memory>, DeviceQueue, Vec<Chain>) {
        let len = 1 << 16;
        let fd = zerosock_sys::memfd::create("outbound", len, true).unwrap();
        let config = RegionConfig {
            guest_addr: 0,
            user_addr: 0,
            len,
            fd_offset: 0,
        };
        let memory = Arc::new(Memory::map(vec![(fd, config)]).unwrap());
        let layout = DriverLayout::at(0, 256);
        let mut driver = DriverQueue::new(memory.clone(), layout, false).unwrap();
        let mut pieces = Vec::new();
        for c in 0..n {
            let addr = DATA + 16 * c as u64;
            memory.translate(addr, 16, &mut pieces).unwrap();
            let bytes: Vec<u8> = (0..16).map(|i| (16 * c + i) as u8).collect();
            memory.write(&pieces[c..], 0, &bytes);
            driver
                .add(
                    &[Buffer {
                        addr,
                        len: 16,
                        writable: false,
                    }],
                    0,
                )
                .unwrap();
        }
        let _ = driver.publish();
        let (desc, avail, used) = (layout.desc, layout.avail, layout.used);
        let (event_idx, indirect) = (false, false);
        let config = QueueConfig {
            size: 256,
            desc,
            avail,
            used,
            base: 0,
            event_idx,
            indirect,
        };
        let mut device = DeviceQueue::new(memory.clone(), &config).unwrap();
        let chains = (0..n).map(|_| device.pop().unwrap().unwrap()).collect();
        (memory, device, chains)
    }

    /// Takes everything in steps of `step` bytes, as a socket would.
    fn drain(outbound: &mut Outbound, memory: &Memory, step: usize) -> (Vec<u8>, Vec<u16>) {
        let (mut bytes, mut heads) = (Vec::new(), Vec::new());
        while !outbound.is_empty() {
            if outbound.held_chains() > 0 {
                let front = outbound.held.front().unwrap();
                let n = step.min(front.len as usize);
                let mut part = vec![0; n];
                memory.read(front.chain.readable(), front.offset as usize, &mut part);
                bytes.extend(part);
                outbound.advance_held(n, |chain| heads.push(chain.head()));
            } else {
                let n = step.min(outbound.overflow().len());
                bytes.extend_from_slice(&outbound.overflow()[..n]);
                outbound.advance_overflow(n);
            }
        }
        (bytes, heads)
    }

    #[test]
    fn bytes_keep_their_order_however_many_are_held_copied_or_spilled() {
        for share in [0, 1, 3, 10] {
            for keep in [0, 1, 2, 10] {
                for step in [1, 5, 16, 100] {
                    let (memory, _queue, chains) = chains(8);
                    let mut outbound = Outbound::default();
                    let mut back = 0;
                    for (i, chain) in chains.into_iter().enumerate() {
                        let held = Held {
                            chain,
                            offset: 0,
                            len: 16,
                        };
                        back += outbound.push(&memory, held, share).is_some() as usize;
                        if i == 4 {
                            outbound.spill(&memory, keep, |_| back += 1);
                        }
                    }
                    assert_eq!(outbound.len(), 128);
                    let (bytes, heads) = drain(&mut outbound, &memory, step);
                    assert!(
                        bytes.iter().enumerate().all(|(i, &b)| i == b as usize),
                        "{bytes:?}"
                    );
                    assert_eq!(back + heads.len(), 8, "every chain comes back once");
                    assert_eq!(outbound.overflow.capacity(), 0, "no memory at rest");
                }
            }
        }
    }

    #[test]
    fn an_overflow_that_never_empties_stays_small() {
        let (memory, _queue, chains) = chains(64);
        let mut outbound = Outbound::default();
        for chain in chains {
            let held = Held {
                chain,
                offset: 0,
                len: 16,
            };
            assert!(outbound.push(&memory, held, 0).is_some());
            if outbound.overflow_len() > 16 {
                outbound.advance_overflow(16);
            }
            assert!(outbound.overflow.len() <= 64, "{}", outbound.overflow.len());
        }
    }
}
