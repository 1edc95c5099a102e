//! The flow log of a device in memory that outlives the process: what a successor resets.
//!
//! # Format
//! Words of 64 bits in the byte order of the machine. The first is the number of entries that were ever
//! used, the second is reserved. An entry is two words: the ports (ours above, the guest's below), and our
//! CID (above) with the type (below: 0 the entry is free, 1 STREAM, 2 SEQPACKET). The guest's CID is that of
//! the device.
//!
//! # Invariants
//! - The second word of an entry makes it valid: it is written after all others, and cleared alone. So the
//!   process may be killed between any two stores.
//! - What the range has at first is hostile input. Each word is read once; no entry makes more than a reset
//!   sent to the guest itself.

use std::sync::atomic::{AtomicU64, Ordering};

use zerosock_proto::vsock::{FlowLog, LoggedFlow};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Cid, Port};
use zerosock_ring::{StateArray, StateMap};

/// Words before the first entry.
const HEADER: usize = 2;
/// Words of an entry.
const ENTRY: usize = 2;

/// Bytes that a table for so many connections takes.
pub(crate) const fn table_len(connections: usize) -> usize {
    (HEADER + ENTRY * connections) * size_of::<AtomicU64>()
}

/// See the module.
#[derive(Debug)]
pub(crate) struct FlowTable {
    words: StateArray<AtomicU64>,
    capacity: u32,
    /// Entries that were ever used: those behind take no memory.
    used: u32,
    /// Entries among them that are free. There is memory for all.
    free: Vec<u32>,
}

impl FlowTable {
    /// The table in this range, and the entries that a former process has left in it, which are not free.
    /// `None`: the range has no room for an entry.
    pub(crate) fn open(range: StateMap, guest: Cid) -> Option<(FlowTable, Vec<(u32, LoggedFlow)>)> {
        let words = range.into_array::<AtomicU64>();
        let capacity = words.len().checked_sub(HEADER)? / ENTRY;
        let capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
        let used = words.first()?.load(Ordering::Acquire);
        let mut table = FlowTable {
            words,
            capacity,
            used: u32::try_from(used).map_or(capacity, |used| used.min(capacity)),
            free: Vec::with_capacity(capacity as usize),
        };
        let mut stale = Vec::new();
        for entry in 0..table.used {
            match table.read(entry, guest) {
                Some(flow) => stale.push((entry, flow)),
                None => table.clear(entry),
            }
        }
        (capacity > 0).then_some((table, stale))
    }

    fn read(&self, entry: u32, guest: Cid) -> Option<LoggedFlow> {
        let [ports, state] = self.entry(entry)?;
        let state = state.load(Ordering::Acquire);
        let ports = ports.load(Ordering::Relaxed);
        let socket_type = match state as u32 {
            1 => SocketType::Stream,
            2 => SocketType::SeqPacket,
            _ => return None,
        };
        let local = Cid::new((state >> 32) as u32);
        Some(LoggedFlow {
            local: Address::new(local, Port::new((ports >> 32) as u32)),
            peer: Address::new(guest, Port::new(ports as u32)),
            socket_type,
        })
    }

    /// The words of an entry. There are as many as `capacity` says.
    fn entry(&self, entry: u32) -> Option<&[AtomicU64; ENTRY]> {
        self.words
            .get(HEADER + ENTRY * entry as usize..)?
            .first_chunk()
    }
}

impl FlowLog for FlowTable {
    fn is_full(&self) -> bool {
        self.free.is_empty() && self.used == self.capacity
    }

    fn enter(&mut self, flow: LoggedFlow) -> u32 {
        let entry = self.free.pop().unwrap_or_else(|| {
            self.used += 1;
            self.used - 1
        });
        let socket_type = match flow.socket_type {
            SocketType::SeqPacket => 2,
            // Datagrams are no connections.
            SocketType::Stream | SocketType::Datagram => 1,
        };
        let pair = |above: u32, below: u32| u64::from(above) << 32 | u64::from(below);
        if let (Some([ports, state]), Some(used)) = (self.entry(entry), self.words.first()) {
            let value = pair(flow.local.port.get(), flow.peer.port.get());
            ports.store(value, Ordering::Relaxed);
            // Each store comes after those before it: a successor that sees it sees these.
            used.store(self.used.into(), Ordering::Release);
            let value = pair(flow.local.cid.get(), socket_type);
            state.store(value, Ordering::Release);
        }
        entry
    }

    fn clear(&mut self, entry: u32) {
        if let Some([_, state]) = self.entry(entry) {
            state.store(0, Ordering::Release);
        }
        self.free.push(entry);
    }
}

#[cfg(test)]
#[path = "flow_table_tests.rs"]
mod tests;
