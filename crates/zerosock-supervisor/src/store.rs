//! Ordered store of entries, changed by batches.
//!
//! # Invariants
//! - [`Store::apply`] executes a whole batch or changes nothing.
//! - The store drops no descriptor, which could take long: [`Store::take_removed`] has them.
//!
//! The worker process has a store without descriptors, `Store<()>`: it refuses, before
//! it is sent, a batch that the supervisor could not apply.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use crate::Error;
use crate::message::{Limits, Operation, descriptors, is_below};

/// What an entry holds. `F` is a descriptor, or nothing.
#[derive(Debug)]
pub(crate) struct Value<F> {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<F>,
}

/// An entry, with the number that orders it.
type Slot<F> = (u64, Arc<Value<F>>);

/// An entry, and what a batch writes to its first descriptor.
pub(crate) type PendingWrite<'a, F> = (Arc<Value<F>>, &'a [u8]);

#[derive(Debug)]
pub(crate) struct Store<F> {
    pub(crate) limits: Limits,
    slots: BTreeMap<String, Slot<F>>,
    /// Number of the next entry.
    next: u64,
    /// Sums over all entries.
    bytes: usize,
    fds: usize,
    removed: Vec<F>,
}

impl<F> Store<F> {
    pub(crate) fn new(limits: Limits) -> Store<F> {
        let (slots, removed) = (BTreeMap::new(), Vec::new());
        Store {
            limits,
            slots,
            next: 0,
            bytes: 0,
            fds: 0,
            removed,
        }
    }

    /// All entries in the order of their insertion.
    pub(crate) fn entries(&self) -> impl DoubleEndedIterator<Item = (String, Arc<Value<F>>)> {
        let mut slots: Vec<_> = self.slots.iter().collect();
        slots.sort_by_key(|(_, (number, _))| *number);
        slots
            .into_iter()
            .map(|(key, (_, value))| (key.clone(), value.clone()))
    }

    /// The descriptors of entries that no longer exist.
    pub(crate) fn take_removed(&mut self) -> Vec<F> {
        std::mem::take(&mut self.removed)
    }

    /// Executes a batch and calls `commit` with its writes. If an operation is not possible, or `commit`
    /// fails, all entries are again as they were.
    pub(crate) fn apply(
        &mut self,
        operations: &[Operation<'_>],
        fds: Vec<F>,
        commit: impl FnOnce(&[PendingWrite<'_, F>]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (mut fds, mut changed) = (fds.into_iter(), Vec::new());
        let result = self.change(operations, &mut fds, &mut changed);
        let result = result.and_then(|writes| commit(&writes));
        self.removed.extend(fds);
        for (key, before) in changed.into_iter().rev() {
            let dropped = if result.is_ok() {
                before
            } else {
                self.replace(&key, before)
            };
            self.discard(dropped);
        }
        result
    }

    /// Keeps only the entries below a prefix.
    pub(crate) fn retain(&mut self, prefix: &str) {
        let others = self.slots.keys().filter(|key| !is_below(key, prefix));
        for key in others.cloned().collect::<Vec<_>>() {
            let dropped = self.replace(&key, None);
            self.discard(dropped);
        }
    }

    /// Executes the operations and returns the writes. `changed` gets each key that changes, with the entry
    /// that it had.
    fn change<'a>(
        &mut self,
        operations: &[Operation<'a>],
        fds: &mut impl ExactSizeIterator<Item = F>,
        changed: &mut Vec<(String, Option<Slot<F>>)>,
    ) -> Result<Vec<PendingWrite<'a, F>>, Error> {
        const UNKNOWN: Error = Error::Invalid("there is no entry with the key");
        if fds.len() != descriptors(operations) {
            return Err(Error::Invalid("other descriptors than the operations say"));
        }
        let (mut writes, next) = (Vec::new(), self.next);
        for (number, operation) in (next..).zip(operations) {
            let sets = match *operation {
                Operation::Put(key, bytes, count) => {
                    let fds = fds.by_ref().take(count).collect();
                    let bytes = bytes.to_vec();
                    vec![(
                        key.to_owned(),
                        Some((number, Arc::new(Value { bytes, fds }))),
                    )]
                }
                Operation::Remove(prefix) => {
                    let from = (Bound::Included(prefix), Bound::Unbounded);
                    let keys = self.slots.range::<str, _>(from).map(|(key, _)| key);
                    let keys = keys.take_while(|key| key.starts_with(prefix));
                    let keys = keys.filter(|key| is_below(key, prefix));
                    keys.map(|key| (key.clone(), None)).collect()
                }
                Operation::Rename(from, to) => {
                    let value = self.slots.get(from).ok_or(UNKNOWN)?.1.clone();
                    vec![
                        (from.to_owned(), None),
                        (to.to_owned(), Some((number, value))),
                    ]
                }
                Operation::Write(key, bytes) => {
                    writes.push((self.slots.get(key).ok_or(UNKNOWN)?.1.clone(), bytes));
                    continue;
                }
                _ => return Err(Error::Invalid("not an operation of a batch")),
            };
            for (key, slot) in sets {
                let before = self.replace(&key, slot);
                changed.push((key, before));
            }
            self.next = number + 1;
        }
        let sums = [self.slots.len(), self.bytes, self.fds].map(|sum| sum as u64);
        let Limits {
            entries,
            bytes,
            descriptors,
        } = self.limits;
        let full = sums
            .iter()
            .zip([entries, bytes, descriptors])
            .any(|(sum, limit)| *sum > limit);
        if full { Err(Error::Full) } else { Ok(writes) }
    }

    /// Sets or removes the entry of a key, and returns the one it had.
    fn replace(&mut self, key: &str, slot: Option<Slot<F>>) -> Option<Slot<F>> {
        if let Some((_, value)) = &slot {
            self.bytes += key.len() + value.bytes.len();
            self.fds += value.fds.len();
        }
        let before = match slot {
            Some(slot) => self.slots.insert(key.to_owned(), slot),
            None => self.slots.remove(key),
        };
        if let Some((_, value)) = &before {
            self.bytes -= key.len() + value.bytes.len();
            self.fds -= value.fds.len();
        }
        before
    }

    /// Keeps the descriptors of an entry for [`Store::take_removed`] if it was the last with this value.
    fn discard(&mut self, slot: Option<Slot<F>>) {
        let value = slot.and_then(|(_, value)| Arc::into_inner(value));
        self.removed
            .extend(value.into_iter().flat_map(|value| value.fds));
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
