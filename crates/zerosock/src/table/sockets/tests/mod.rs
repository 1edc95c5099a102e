//! Unit tests of the limits; `model` compares the table with plain queues of bytes.

mod messages;
mod model;
mod room;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::vsock::{FlowId, PortTable, Shard, ShardConfig};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_ring::{Memory, Piece, RegionConfig};
use zerosock_sys::memfd;

use super::*;
use crate::table::leases::Entered;
use crate::table::transfers::Payload;

const HOLD: Duration = Duration::from_millis(20);
/// Size of a buffer in bytes.
const LEN: u32 = 64;
/// Buffers of the pool.
const SIZE: u32 = 32;
/// Limit on copied bytes; above what tests of other limits use.
const MAX_COPIED: usize = 16 << 10;

/// The buffers of a memory and which of them the table holds.
struct Slots {
    memory: Arc<Memory>,
    pieces: Vec<Piece>,
    /// Held by the table.
    out: Vec<bool>,
    consumed: BTreeMap<usize, u64>,
    /// The peer waits for nothing.
    patient: bool,
}

impl Slots {
    fn new() -> Slots {
        let len = u64::from(SIZE * LEN).next_multiple_of(4096);
        let fd = memfd::create("sockets-test", len, true).unwrap();
        let region = RegionConfig {
            guest_addr: 0,
            user_addr: 0,
            len,
            fd_offset: 0,
        };
        let memory = Memory::map(vec![(fd, region)]).unwrap();
        let mut pieces = Vec::new();
        for slot in 0..SIZE {
            let addr = u64::from(slot * LEN);
            memory.translate(addr, LEN, &mut pieces).unwrap();
        }
        Slots {
            memory: Arc::new(memory),
            pieces,
            out: vec![false; SIZE as usize],
            consumed: BTreeMap::new(),
            patient: false,
        }
    }

    fn out(&self) -> usize {
        self.out.iter().filter(|out| **out).count()
    }
}

impl Store for Slots {
    type Token = u32;

    fn memory(&self, _: &u32) -> Option<&Arc<Memory>> {
        Some(&self.memory)
    }

    fn pieces<'a>(&'a self, token: &'a u32) -> &'a [Piece] {
        std::slice::from_ref(&self.pieces[*token as usize])
    }

    fn may_return_later(&self, _: u32, _: FlowId) -> bool {
        self.patient
    }

    fn release(&mut self, token: u32) {
        let out = &mut self.out[token as usize];
        assert!(std::mem::take(out), "{token} was released twice");
        // The peer overwrites a returned buffer at once.
        let piece = self.pieces[token as usize];
        self.memory.write(&[piece], 0, &[0xee; LEN as usize]);
    }

    fn consumed(&mut self, _: u32, flow: FlowId, bytes: u32) {
        *self.consumed.entry(flow.index()).or_default() += u64::from(bytes);
    }

    fn consumed_empty(&mut self, _: u32, _: FlowId, _: u16) {}
}

struct Table {
    sockets: Sockets<u32>,
    slots: Slots,
    shard: Shard,
    now: Instant,
}

impl Table {
    fn new() -> Table {
        let mut sockets = Sockets::new(Arc::new(Leases::new(64)), HOLD, MAX_COPIED);
        assert_eq!(sockets.add_pool(SIZE), 0);
        let ports = PortTable::new().into();
        Table {
            sockets,
            slots: Slots::new(),
            shard: Shard::new(ShardConfig::driver(Cid::new(3)), ports),
            now: Instant::ZERO + Duration::from_secs(1),
        }
    }

    /// Only a shard creates flow ids.
    fn flow(&mut self) -> FlowId {
        let local = Address::new(Cid::new(3), Port::ANY);
        let peer = Address::new(Cid::HOST, Port::new(1));
        self.shard
            .connect(self.now, local, peer, SocketType::Stream)
            .unwrap()
    }

    fn conn(&mut self) -> StreamId {
        self.conn_of(SocketType::Stream)
    }

    fn conn_of(&mut self, socket_type: SocketType) -> StreamId {
        let flow = self.flow();
        let address: Address = "3:1".parse().unwrap();
        let state = StreamState::Connected;
        self.sockets
            .insert(0, flow, state, address, address, socket_type)
    }

    /// Stores `bytes` if the limits allow.
    fn deliver(&mut self, id: StreamId, offset: u32, bytes: &[u8]) -> bool {
        let free = self.slots.out.iter().position(|out| !out);
        let Some(slot) = free.filter(|_| self.sockets.has_room(0)) else {
            return false;
        };
        self.slots.out[slot] = true;
        let piece = self.slots.pieces[slot];
        self.slots.memory.write(&[piece], offset as usize, bytes);
        let held = HeldBuffer {
            token: slot as u32,
            offset,
            len: bytes.len() as u32,
            since: Some(self.now),
            ends: MessageEnd::Nothing,
        };
        self.sockets.deliver(id, held, &mut self.slots);
        true
    }

    fn read(&mut self, id: StreamId, len: usize, peek: bool) -> Vec<u8> {
        let mut out = vec![0; len];
        let read = self.sockets.read(id, &mut out, peek, &mut self.slots);
        out.truncate(read);
        out
    }

    fn lease(&mut self, id: StreamId) -> LeaseParts {
        self.sockets.lease(id, &mut self.slots).unwrap()
    }

    fn pass(&mut self, span: Duration) {
        self.now += span;
        self.sockets.handle_timeout(self.now, &mut self.slots);
    }

    /// A reader leaves, as `Core` does it.
    fn leave(&mut self, index: u32) {
        if self.sockets.lease_table().leave(index) {
            let mut index = self.sockets.lease_table().take_dropped();
            while index != NONE {
                let next = self.sockets.lease_table().next_dropped(index);
                assert!(self.sockets.end_lease(index, &mut self.slots));
                index = next;
            }
        }
    }

    /// The bytes that the holder of a lease reads.
    fn look(&mut self, index: u32, len: usize, place: &BufferPlace) -> Vec<u8> {
        let lease_table = self.sockets.lease_table().clone();
        let copied = |(bytes, from): Copied| bytes[from..from + len].to_vec();
        match place {
            BufferPlace::Copied(copy) => copied(copy.clone()),
            BufferPlace::InPlace { memory, pieces } => match lease_table.enter(index) {
                Entered::InPlace => {
                    let mut out = vec![0; len];
                    assert_eq!(memory.read(pieces, 0, &mut out), len);
                    self.leave(index);
                    out
                }
                Entered::Moved => copied(self.sockets.copy_of(index).unwrap()),
            },
        }
    }

    fn is_in_place(&self, parts: &LeaseParts) -> bool {
        matches!(parts.place, BufferPlace::InPlace { .. })
            && self.sockets.copy_of(parts.index).is_none()
    }
}

#[test]
fn a_connection_becomes_readable_when_unread_bytes_reach_the_low_water_mark() {
    let mut table = Table::new();
    let id = table.conn();
    let is_news = |table: &mut Table| table.sockets.next_ready() == Some(id);
    assert!(table.deliver(id, 0, b"123") && is_news(&mut table));
    assert!(table.deliver(id, 0, b"4") && !is_news(&mut table));
    table.sockets.set_low_water(id, 6);
    assert!(table.deliver(id, 0, b"56") && is_news(&mut table));
    assert!(table.deliver(id, 0, b"7") && !is_news(&mut table));
    // Consumes what a peek returned without reading it.
    assert_eq!(table.sockets.skip(id, 5, &mut table.slots), 5);
    let conn = table.sockets.get(id).unwrap();
    assert_eq!((conn.taken(), conn.unread()), (5, 2));
    assert_eq!(table.read(id, 8, false), b"67");
    assert_eq!(table.slots.out(), 0);
}

#[test]
fn reception_stops_when_three_quarters_of_the_pool_are_held() {
    let mut table = Table::new();
    let id = table.conn();
    for _ in 0..24 {
        assert!(table.deliver(id, 0, b"x"));
    }
    assert!(!table.sockets.has_room(0));
    assert_eq!(table.read(id, 1, false), b"x");
    assert!(table.sockets.has_room(0));
}

#[test]
fn leases_of_a_connection_beyond_an_eighth_of_the_pool_are_copies() {
    let mut table = Table::new();
    let id = table.conn();
    for _ in 0..6 {
        assert!(table.deliver(id, 4, b"lease"));
    }
    let leases: Vec<_> = (0..6).map(|_| table.lease(id)).collect();
    let in_place = leases.iter().filter(|parts| table.is_in_place(parts));
    assert_eq!(in_place.count(), 4, "an eighth of 32");
    assert_eq!(table.slots.out(), 4, "buffers of copies are returned");
    for parts in &leases {
        assert_eq!(table.look(parts.index, parts.len, &parts.place), b"lease");
    }
    assert_eq!(table.sockets.counted().leased, 20);
    assert_eq!(table.sockets.counted().copied_aside, 10);
    assert!(table.slots.consumed.is_empty(), "no reader is done");
    for parts in leases {
        assert!(table.sockets.end_lease(parts.index, &mut table.slots));
    }
    assert_eq!(table.slots.out(), 0);
}

#[test]
fn lease_may_return_later_while_the_peer_waits_for_nothing() {
    let mut table = Table::new();
    let id = table.conn();
    let later = |table: &Table, parts: &LeaseParts| {
        parts.round == Some(table.sockets.lease_table().round())
    };
    for _ in 0..5 {
        assert!(table.deliver(id, 0, b"bytes"));
    }
    let first = table.lease(id);
    assert!(!later(&table, &first), "the peer waits for credit");
    table.slots.patient = true;
    let (second, third) = (table.lease(id), table.lease(id));
    assert!(later(&table, &second) && later(&table, &third));
    // Bytes that are read free more than the leases alone.
    assert_eq!(table.read(id, 5, false), b"bytes");
    assert!(!later(&table, &second) && !later(&table, &third));
    let fourth = table.lease(id);
    assert!(later(&table, &fourth));
    // So does a lease of another connection that cannot wait: its buffer is of the same pool.
    table.slots.patient = false;
    let other = table.conn();
    assert!(table.deliver(other, 0, b"bytes"));
    let fifth = table.lease(other);
    assert!(!later(&table, &fourth) && !later(&table, &fifth));
    for parts in [first, second, third, fourth, fifth] {
        assert!(table.sockets.end_lease(parts.index, &mut table.slots));
    }
    assert_eq!((table.slots.out(), table.sockets.lent_out()), (0, 0));
    assert_eq!(
        (table.slots.consumed[&0], table.slots.consumed[&1]),
        (25, 5)
    );
}

#[test]
fn arrived_buffer_is_leased_without_being_listed() {
    let mut table = Table::new();
    let id = table.conn();
    let arrival = |table: &mut Table| {
        table.slots.out[7] = true;
        HeldBuffer {
            token: 7,
            offset: 2,
            len: 3,
            since: None,
            ends: MessageEnd::Nothing,
        }
    };
    let held = arrival(&mut table);
    let parts = table
        .sockets
        .lease_arrived(id, held, &mut table.slots)
        .unwrap();
    assert!(table.is_in_place(&parts) && parts.len == 3);
    assert_eq!((table.sockets.held(0), table.sockets.unread(id)), (1, 0));
    // The next turn sets since when it is held.
    assert_eq!(table.sockets.next_timeout(), Some(Instant::ZERO));
    table.pass(Duration::ZERO);
    assert_eq!(table.sockets.next_timeout(), Some(table.now + HOLD));
    table.pass(HOLD);
    assert_eq!(table.slots.out(), 0, "held too long: copied");
    assert!(table.sockets.end_lease(parts.index, &mut table.slots));
    // Without a free entry, it is unread.
    while table.sockets.begin_loan().is_some() {}
    let held = arrival(&mut table);
    let refused = table.sockets.lease_arrived(id, held, &mut table.slots);
    assert_eq!(refused.err(), Some(NoLease::TooMany));
    assert_eq!(table.sockets.unread(id), 3);
}

#[test]
fn leases_of_all_connections_beyond_three_eighths_of_the_pool_are_copies() {
    let mut table = Table::new();
    let mut in_place = 0;
    for _ in 0..8 {
        let id = table.conn();
        for _ in 0..3 {
            assert!(table.deliver(id, 0, b"x"));
            let parts = table.lease(id);
            in_place += u32::from(table.is_in_place(&parts));
        }
    }
    assert!((12..=13).contains(&in_place), "{in_place} of 32");
}

#[test]
fn a_connection_that_keeps_its_leases_leaves_entries_to_others() {
    let mut table = Table::new();
    for left in [32, 16, 8] {
        let id = table.conn();
        let mut taken = 0;
        loop {
            assert!(table.deliver(id, 0, b"x"));
            match table.sockets.lease(id, &mut table.slots) {
                Ok(_) => taken += 1,
                Err(reason) => break assert_eq!(reason, NoLease::TooMany),
            }
        }
        assert_eq!(taken, left, "half of the free entries");
        assert_eq!(table.read(id, 1, false), b"x", "it can still be read");
        let other = table.conn();
        assert!(table.deliver(other, 0, b"y"));
        let parts = table.lease(other);
        assert!(table.sockets.end_lease(parts.index, &mut table.slots));
        let loan = table.sockets.begin_loan().expect("a loan");
        assert!(table.sockets.end_loan(loan));
    }
}

#[test]
fn buffers_past_the_hold_time_are_copied_unless_they_have_a_reader() {
    let mut table = Table::new();
    let id = table.conn();
    for _ in 0..3 {
        assert!(table.deliver(id, 0, b"bytes"));
    }
    let (read, unread) = (table.lease(id), table.lease(id));
    let lease_table = table.sockets.lease_table().clone();
    assert_eq!(lease_table.enter(read.index), Entered::InPlace);
    table.pass(HOLD - Duration::from_millis(1));
    assert_eq!(table.slots.out(), 3, "not yet");
    table.pass(Duration::from_millis(1));
    assert_eq!(table.slots.out(), 1, "but for the one under a reader");
    assert!(table.is_in_place(&read));
    assert!(!table.is_in_place(&unread));
    assert_eq!(table.look(unread.index, 5, &unread.place), b"bytes");
    assert_eq!(table.read(id, 9, true), b"bytes");
    // No timer runs for it; its buffer returns when its reader leaves.
    assert_eq!(table.sockets.next_timeout(), None);
    table.pass(HOLD);
    assert!(!lease_table.is_revoked(read.index));
    assert_eq!(table.slots.out(), 1);
    table.leave(read.index);
    assert_eq!(table.slots.out(), 0);
    assert_eq!(table.look(read.index, 5, &read.place), b"bytes");
    assert_eq!(table.sockets.next_timeout(), None);
}

#[test]
fn a_stalled_connection_receives_copies_until_it_is_drained() {
    let mut table = Table::new();
    let (id, other) = (table.conn(), table.conn());
    assert!(table.deliver(id, 0, b"one"));
    table.pass(HOLD);
    assert!(table.sockets.get(id).unwrap().is_stalled());
    assert!(table.deliver(id, 0, b"two"));
    assert!(table.deliver(other, 0, b"other"));
    assert_eq!(table.slots.out(), 1, "only the other's");
    assert_eq!(table.read(id, 4, false), b"onet");
    assert!(table.sockets.get(id).unwrap().is_stalled());
    assert_eq!(table.read(id, 4, false), b"wo");
    assert!(table.deliver(id, 0, b"three"));
    assert_eq!(table.slots.out(), 2, "in place again");
}

#[test]
fn a_lease_under_a_reader_is_revoked_when_the_queue_stops() {
    let mut table = Table::new();
    let id = table.conn();
    for _ in 0..3 {
        assert!(table.deliver(id, 0, b"bytes"));
    }
    let (read, unread) = (table.lease(id), table.lease(id));
    let lease_table = table.sockets.lease_table().clone();
    assert_eq!(lease_table.enter(read.index), Entered::InPlace);
    assert!(table.sockets.recall(0, false, &mut table.slots));
    assert_eq!((table.slots.out(), table.sockets.held(0)), (0, 0));
    table.leave(read.index);
    assert!(lease_table.is_revoked(read.index), "the reader sees it");
    assert!(!lease_table.is_revoked(unread.index));
    assert_eq!(table.look(unread.index, 5, &unread.place), b"bytes");
    assert_eq!(table.read(id, 9, false), b"bytes");
    assert!(table.sockets.end_lease(read.index, &mut table.slots));
    assert!(table.sockets.end_lease(unread.index, &mut table.slots));
    assert_eq!(table.slots.consumed.values().sum::<u64>(), 15);
}

#[test]
fn a_trusted_lease_under_a_reader_is_kept_unless_the_peer_is_gone() {
    let mut table = Table::new();
    let id = table.conn();
    table.sockets.trust_pool(0, true);
    for _ in 0..4 {
        assert!(table.deliver(id, 0, b"bytes"));
    }
    let leases: Vec<_> = (0..3).map(|_| table.lease(id)).collect();
    let lease_table = table.sockets.lease_table().clone();
    for lease in &leases[..2] {
        assert_eq!(lease_table.enter(lease.index), Entered::InPlace);
    }
    assert!(!table.sockets.recall(0, false, &mut table.slots));
    assert_eq!(table.slots.out(), 2, "but for those under readers");
    table.leave(leases[0].index);
    assert!(!table.sockets.recall(0, false, &mut table.slots));
    assert!(!lease_table.is_revoked(leases[0].index));
    assert_eq!(table.slots.out(), 1);
    assert!(table.sockets.recall(0, true, &mut table.slots));
    assert!(lease_table.is_revoked(leases[1].index));
    assert_eq!(table.sockets.held(0), 0);
    assert_eq!(table.slots.out(), 1, "its buffer is not returned");
    table.leave(leases[1].index);
    for lease in leases {
        assert!(table.sockets.end_lease(lease.index, &mut table.slots));
    }
}

#[test]
fn a_panicking_callback_consumes_the_part_it_was_shown() {
    let mut table = Table::new();
    let id = table.conn();
    for _ in 0..3 {
        assert!(table.deliver(id, 0, b"bytes"));
    }
    // The first part in place, then the rest, which has become a copy.
    for (left, consumed) in [(2, 5), (0, 15)] {
        let Table { sockets, slots, .. } = &mut table;
        let look = &mut |_: Payload<'_>| -> bool { panic!("in the middle") };
        let look = std::panic::AssertUnwindSafe(|| sockets.consume_in_place(id, 3, look, slots));
        std::panic::catch_unwind(look).unwrap_err();
        assert_eq!((slots.out(), sockets.held(0)), (left, left as u32));
        assert_eq!((sockets.unread(id), sockets.copies(0)), (5 * left, 0));
        assert_eq!(slots.consumed.values().sum::<u64>(), consumed);
        table.pass(HOLD);
        assert_eq!(table.slots.out(), 0);
    }
}

#[test]
fn connections_with_most_copies_are_reset_above_the_limit() {
    let mut table = Table::new();
    let (small, large) = (table.conn(), table.conn());
    for id in [small, large] {
        assert!(table.deliver(id, 0, b"x"));
    }
    table.pass(HOLD);
    let mut sent = 2;
    while !table.sockets.is_over_copy_limit() {
        assert_eq!(table.sockets.copies(0), sent);
        let id = if sent % 7 == 0 { small } else { large };
        assert!(table.deliver(id, 0, &[7; 64]));
        sent += 64;
    }
    assert!(sent > MAX_COPIED && sent <= MAX_COPIED + 64);
    assert_eq!(table.sockets.connections_to_shed(), [large]);
    table.sockets.mark_reset(large, &mut table.slots);
    assert_eq!(table.sockets.get(large).unwrap().state, StreamState::Reset);
    assert_eq!(table.sockets.unread(large), 0);
    assert!(!table.sockets.is_over_copy_limit() && table.sockets.connections_to_shed().is_empty());
    let kept = table.sockets.unread(small);
    assert_eq!(table.sockets.copies(0), kept);
    assert_eq!(table.read(small, kept, false).len(), kept);
    assert_eq!(table.sockets.copies(0), 0);
}

#[test]
fn leases_outlive_their_connection() {
    let mut table = Table::new();
    let id = table.conn();
    for _ in 0..3 {
        assert!(table.deliver(id, 0, b"bytes"));
    }
    let (read, unread) = (table.lease(id), table.lease(id));
    let lease_table = table.sockets.lease_table().clone();
    assert_eq!(lease_table.enter(read.index), Entered::InPlace);
    table.sockets.remove(id, &mut table.slots);
    assert_eq!(table.slots.out(), 1, "the one under a reader");
    assert_eq!(
        table.slots.consumed.values().sum::<u64>(),
        15,
        "no later call gives this credit"
    );
    // A new connection at the same index does not own the orphans.
    let next = table.conn();
    assert_eq!(next.index(), id.index());
    assert_eq!(table.look(unread.index, 5, &unread.place), b"bytes");
    table.pass(HOLD);
    assert_eq!(table.slots.out(), 1);
    assert_eq!(table.sockets.next_timeout(), None);
    table.leave(read.index);
    assert_eq!(table.slots.out(), 0);
    assert_eq!(table.look(read.index, 5, &read.place), b"bytes");
    for index in [read.index, unread.index] {
        assert!(table.sockets.end_lease(index, &mut table.slots));
    }
    assert_eq!(table.sockets.lent_out(), 0);
    assert_eq!(table.slots.consumed.values().sum::<u64>(), 15);
}

#[test]
fn bytes_for_a_closed_connection_are_returned_at_once() {
    let mut table = Table::new();
    let id = table.conn();
    table.sockets.remove(id, &mut table.slots);
    assert!(table.deliver(id, 0, b"late"));
    assert_eq!((table.slots.out(), table.sockets.held(0)), (0, 0));
}

#[test]
fn a_connection_that_changed_twice_is_reported_once_and_listed_once() {
    let mut table = Table::new();
    let id = table.conn();
    let sockets = &mut table.sockets;
    sockets.set_ready(id);
    sockets.set_ready(id);
    assert_eq!(sockets.ready_list.len(), 1);
    assert_eq!(sockets.next_ready(), Some(id));
    assert_eq!(sockets.next_ready(), None);
    sockets.set_ready(id);
    sockets.remove(id, &mut table.slots);
    assert_eq!(
        sockets.next_ready(),
        None,
        "nothing about a removed connection"
    );
}

#[test]
fn a_closed_id_stays_invalid_when_its_index_is_reused() {
    let mut table = Table::new();
    let id = table.conn();
    table.sockets.remove(id, &mut table.slots);
    assert!(table.sockets.get(id).is_none());
    let again = table.conn();
    assert_eq!(again.index(), id.index());
    assert!(table.sockets.get(id).is_none());
    assert!(table.sockets.get(again).is_some());
}
