//! Checks the index protocol with loom: every interleaving and every reordering that the memory
//! model allows, in small models.
//!
//! An entry is a cell without synchronisation, so that loom reports a race if an index announces it
//! too early. A half that waits without a wake-up is a deadlock, which loom reports as well: that
//! is what a lost kick or call would be.

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU16;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::index::{Consumer, IndexWords, Producer};

/// Slots per ring: 1, so that every entry reuses the slot of the one before.
const SLOTS: u16 = 1;

/// Indices start here so that they wrap inside the models.
const BASE: u16 = 65535;

/// An eventfd: keeps a signal until a thread waits for it.
#[derive(Default)]
struct Signal {
    pending: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
    fn send(&self) {
        *self.pending.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut pending = self.pending.lock().unwrap();
        while !*pending {
            pending = self.changed.wait(pending).unwrap();
        }
        *pending = false;
    }
}

/// One direction: a ring of entries and the words of its protocol.
struct Ring {
    index: AtomicU16,
    flags: AtomicU16,
    event: AtomicU16,
    entries: Vec<UnsafeCell<u16>>,
    signal: Signal,
}

// SAFETY: loom's cells check at run time that accesses do not overlap.
unsafe impl Sync for Ring {}

impl Ring {
    fn new(slots: u16) -> Ring {
        Ring {
            index: AtomicU16::new(BASE.to_le()),
            flags: AtomicU16::new(0),
            event: AtomicU16::new(BASE.to_le()),
            entries: (0..slots).map(|_| UnsafeCell::new(0)).collect(),
            signal: Signal::default(),
        }
    }

    fn words(&self) -> IndexWords<'_> {
        IndexWords {
            index: &self.index,
            flags: &self.flags,
            event: &self.event,
        }
    }

    fn entry(&self, position: u16) -> &UnsafeCell<u16> {
        &self.entries[usize::from(position) % self.entries.len()]
    }

    fn put(&self, producer: &mut Producer, value: u16) {
        // SAFETY: loom checks that no other thread accesses the cell.
        self.entry(producer.next())
            .with_mut(|cell| unsafe { *cell = value });
        producer.advance();
    }

    fn take(&self, consumer: &mut Consumer) -> u16 {
        // SAFETY: as in `put`.
        let value = self.entry(consumer.next()).with(|cell| unsafe { *cell });
        consumer.advance();
        value
    }

    fn publish(&self, producer: &mut Producer, event_idx: bool) {
        if producer.publish(self.words(), event_idx) {
            self.signal.send();
        }
    }

    /// Waits as a driver or device does: drain, request notifications, read the index again, sleep.
    fn take_or_wait(&self, consumer: &mut Consumer, event_idx: bool) -> u16 {
        loop {
            let limit = self.entries.len() as u16;
            if consumer.available(self.words(), limit).unwrap() > 0 {
                consumer.disable(self.words(), event_idx);
                return self.take(consumer);
            }
            if !consumer.enable(self.words(), event_idx) {
                self.signal.wait();
            }
        }
    }
}

fn model(scene: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    if builder.preemption_bound.is_none() {
        builder.preemption_bound = Some(3);
    }
    builder.check(scene);
}

/// One direction, two batches: all entries arrive in order and untorn, and no thread waits for
/// ever.
fn one_way(event_idx: bool) {
    model(move || {
        let ring = Arc::new(Ring::new(4));
        let producing = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                let mut producer = Producer::new(BASE);
                ring.put(&mut producer, 10);
                ring.publish(&mut producer, event_idx);
                ring.put(&mut producer, 11);
                ring.put(&mut producer, 12);
                ring.publish(&mut producer, event_idx);
            })
        };
        let mut consumer = Consumer::new(BASE);
        for expected in 10..13 {
            assert_eq!(ring.take_or_wait(&mut consumer, event_idx), expected);
        }
        producing.join().unwrap();
    });
}

#[test]
fn no_entry_and_no_notification_is_lost_with_event_index() {
    one_way(true);
}

#[test]
fn no_entry_and_no_notification_is_lost_with_flags() {
    one_way(false);
}

/// Batches made visible one by one and checked for a notification once: none is lost.
#[test]
fn a_deferred_notification_check_loses_no_notification() {
    for event_idx in [false, true] {
        model(move || {
            let ring = Arc::new(Ring::new(4));
            let producing = {
                let ring = Arc::clone(&ring);
                thread::spawn(move || {
                    let mut producer = Producer::new(BASE);
                    ring.put(&mut producer, 10);
                    producer.make_visible(ring.words());
                    ring.put(&mut producer, 11);
                    producer.make_visible(ring.words());
                    if producer.needs_notification(ring.words(), event_idx) {
                        ring.signal.send();
                    }
                })
            };
            let mut consumer = Consumer::new(BASE);
            for expected in 10..12 {
                assert_eq!(ring.take_or_wait(&mut consumer, event_idx), expected);
            }
            producing.join().unwrap();
        });
    }
}

/// A consumer that sleeps until several entries are there finds all of them when it is woken, or
/// before it sleeps.
#[test]
fn a_notification_for_several_entries_is_not_lost() {
    for event_idx in [false, true] {
        model(move || {
            let ring = Arc::new(Ring::new(4));
            let producing = {
                let ring = Arc::clone(&ring);
                thread::spawn(move || {
                    let mut producer = Producer::new(BASE);
                    for value in [10, 11] {
                        ring.put(&mut producer, value);
                        ring.publish(&mut producer, event_idx);
                    }
                })
            };
            let mut consumer = Consumer::new(BASE);
            let mut values = vec![];
            while values.len() < 2 {
                let limit = ring.entries.len() as u16;
                for _ in 0..consumer.available(ring.words(), limit).unwrap() {
                    values.push(ring.take(&mut consumer));
                }
                let more = 1u16.wrapping_sub(values.len() as u16);
                if more < 2 && !consumer.enable_after(ring.words(), event_idx, more) {
                    ring.signal.wait();
                }
            }
            assert_eq!(values, [10, 11]);
            producing.join().unwrap();
        });
    }
}

/// A consumer that spins on the index and then takes an entry reads it untorn.
#[test]
fn an_entry_seen_by_has_entries_is_complete() {
    model(|| {
        let ring = Arc::new(Ring::new(2));
        let producing = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                let mut producer = Producer::new(BASE);
                for value in [10, 11] {
                    ring.put(&mut producer, value);
                    producer.make_visible(ring.words());
                }
            })
        };
        let mut consumer = Consumer::new(BASE);
        for expected in [10, 11] {
            while !consumer.has_entries(ring.words()) {
                thread::yield_now();
            }
            assert_ne!(consumer.available(ring.words(), 2), Ok(0));
            assert_eq!(ring.take(&mut consumer), expected);
        }
        producing.join().unwrap();
    });
}

/// Both directions: a driver half posts and a device half returns, on rings of one slot, so that a
/// slot is written again as soon as the index of the other ring allows it.
fn both_ways(event_idx: bool) {
    model(move || {
        let rings = Arc::new((Ring::new(SLOTS), Ring::new(SLOTS)));
        let device = {
            let rings = Arc::clone(&rings);
            thread::spawn(move || {
                let (avail, used) = &*rings;
                let (mut consumer, mut producer) = (Consumer::new(BASE), Producer::new(BASE));
                for _ in 0..2 {
                    let value = avail.take_or_wait(&mut consumer, event_idx);
                    used.put(&mut producer, value + 100);
                    used.publish(&mut producer, event_idx);
                }
            })
        };
        let (avail, used) = &*rings;
        let (mut producer, mut consumer) = (Producer::new(BASE), Consumer::new(BASE));
        for value in [1, 2] {
            avail.put(&mut producer, value);
            avail.publish(&mut producer, event_idx);
            assert_eq!(used.take_or_wait(&mut consumer, event_idx), value + 100);
        }
        device.join().unwrap();
    });
}

#[test]
fn both_halves_exchange_entries_with_event_index() {
    both_ways(true);
}

#[test]
fn both_halves_exchange_entries_with_flags() {
    both_ways(false);
}

/// A consumer that retreats takes the last entry again, and waits for the next correctly.
#[test]
fn a_retreated_entry_is_taken_again() {
    model(|| {
        let ring = Arc::new(Ring::new(2));
        let producing = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                let mut producer = Producer::new(BASE);
                for value in [10, 11] {
                    ring.put(&mut producer, value);
                    ring.publish(&mut producer, true);
                }
            })
        };
        let mut consumer = Consumer::new(BASE);
        assert_eq!(ring.take_or_wait(&mut consumer, true), 10);
        consumer.retreat();
        assert!(consumer.enable(ring.words(), true), "it is there again");
        assert_eq!(ring.take_or_wait(&mut consumer, true), 10);
        assert_eq!(ring.take_or_wait(&mut consumer, true), 11);
        producing.join().unwrap();
    });
}
