//! The maps of a relay, and what a pair has in them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use zerosock_sys::bpf::{
    ArrivalSocket, BpfError, NumberByCookie, Program, Slot, Slots, SockMap, Sources, VerdictMaps,
};

/// The maps of a relay. Their numbers are those of sockets, two for each pair.
#[derive(Debug)]
pub(super) struct Maps {
    /// Sockets for which the program runs.
    pub(super) sources: Sources,
    /// Where their packets go.
    pub(super) targets: SockMap,
    pub(super) numbers: NumberByCookie,
    pub(super) slots: Slots,
    /// Numbers without a socket. The one that was released first is used first, so that a program that
    /// still runs for a former socket does not count for the next.
    pub(super) free: Mutex<VecDeque<u32>>,
}

/// One of the two sockets of a pair, also as the source of a direction.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Side {
    /// The first.
    A,
    /// The second.
    B,
}

impl Side {
    /// The other socket.
    pub fn other(self) -> Side {
        match self {
            Side::A => Side::B,
            Side::B => Side::A,
        }
    }

    pub(super) fn index(self) -> usize {
        self as usize
    }
}

impl Maps {
    /// Maps for so many pairs.
    pub(super) fn new(pairs: u32) -> Result<Maps, BpfError> {
        let entries = pairs.saturating_mul(2).max(2);
        let targets = SockMap::create(entries)?;
        let numbers = NumberByCookie::create(entries)?;
        let slots = Slots::create(entries)?;
        let maps = VerdictMaps {
            numbers: &numbers,
            slots: &slots,
            targets: &targets,
        };
        let program = Program::load(maps, ArrivalSocket::Any)?;
        let sources = Sources::create(entries, program)?;
        Ok(Maps {
            sources,
            targets,
            numbers,
            slots,
            free: Mutex::new((0..entries).collect()),
        })
    }

    /// A number with a slot that is all zero.
    pub(super) fn allocate(&self, cookie: u64) -> Option<MapEntry> {
        let free = &mut self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let number = free.pop_front()?;
        let slot = self.slot(number);
        for word in [
            &slot.allowance,
            &slot.handled,
            &slot.bytes,
            &slot.packets,
            &slot.passed,
            &slot.dropped,
        ] {
            word.store(0, Relaxed);
        }
        Some(MapEntry {
            number,
            cookie,
            own: None,
        })
    }

    pub(super) fn slot(&self, number: u32) -> &Slot {
        self.slots
            .get(number)
            .expect("numbers are below the number of slots")
    }

    /// A map of sources with a program that need not ask for the cookie.
    pub(super) fn program_for(&self, cookie: u64) -> Result<Sources, BpfError> {
        let maps = VerdictMaps {
            numbers: &self.numbers,
            slots: &self.slots,
            targets: &self.targets,
        };
        Sources::create(1, Program::load(maps, ArrivalSocket::Only(cookie))?)
    }
}

/// What a pair has in the maps; removed when dropped.
#[derive(Debug)]
pub(super) struct MapEntries {
    pub(super) maps: Arc<Maps>,
    /// Of the direction that begins at each side, if it is redirected.
    pub(super) ends: [Option<MapEntry>; 2],
}

/// What the direction from one socket has in the maps.
#[derive(Debug)]
pub(super) struct MapEntry {
    pub(super) number: u32,
    pub(super) cookie: u64,
    /// Where a Unix socket is a source, instead of the common map.
    pub(super) own: Option<Sources>,
}

impl MapEntries {
    /// Inserts a socket once more, as target and as source. After an error of a send the kernel drops
    /// all later packets for a target, until it is inserted again. Datagrams that the kernel holds for
    /// it are lost.
    pub(super) fn insert_again(&self, side: Side, socket: impl AsFd) -> io::Result<()> {
        let maps = &self.maps;
        let own = self.ends[side.index()].as_ref();
        let source = own.map(|end| match &end.own {
            Some(own) => (own.map(), 0),
            None => (maps.sources.map(), end.number),
        });
        let feeding = self.ends[side.other().index()].as_ref();
        let target = feeding.map(|end| (&maps.targets, end.number));
        // First out of all maps, then as at the beginning.
        for (map, number) in source.iter().chain(&target) {
            let _ = map.remove(*number);
        }
        for (map, number) in target.iter().chain(&source) {
            map.insert(*number, &socket)?;
        }
        Ok(())
    }

    pub(super) fn slot(&self, from: Side) -> Option<&Slot> {
        let end = self.ends[from.index()].as_ref()?;
        Some(self.maps.slot(end.number))
    }
}

impl Drop for MapEntries {
    fn drop(&mut self) {
        let maps = &self.maps;
        for end in self.ends.iter_mut().filter_map(Option::take) {
            // Each fails if the socket was closed, or the insertion had not come so far.
            let _ = match &end.own {
                Some(own) => own.map().remove(0),
                None => maps.sources.map().remove(end.number),
            };
            let _ = maps.targets.remove(end.number);
            let _ = maps.numbers.remove(end.cookie);
            maps.slot(end.number).cookie.store(0, Relaxed);
            let free = &mut maps.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.push_back(end.number);
        }
    }
}
