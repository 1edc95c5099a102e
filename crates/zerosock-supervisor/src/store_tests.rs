//! Unit tests of `store`, with numbers as descriptors.

use super::*;
use crate::message::Operation::{Alive, Put, Remove, Rename, Write};
use proptest::prelude::*;

const LIMITS: Limits = Limits {
    entries: 6,
    bytes: 40,
    descriptors: 5,
};

fn apply(store: &mut Store<u32>, batch: &[Operation<'_>], fds: &[u32]) -> Result<(), Error> {
    store.apply(batch, fds.to_vec(), |_| Ok(()))
}

/// Key, bytes and descriptors of an entry.
type Content = (String, Vec<u8>, Vec<u32>);

/// All entries in order.
fn contents(store: &Store<u32>) -> Vec<Content> {
    let entries = store.entries();
    entries
        .map(|(key, value)| (key, value.bytes.clone(), value.fds.clone()))
        .collect()
}

fn keys(store: &Store<u32>) -> String {
    store
        .entries()
        .map(|(key, _)| key)
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn entries_keep_their_order_and_changed_ones_go_to_the_end() {
    let mut store = Store::new(LIMITS);
    apply(
        &mut store,
        &[Put("b", b"1", 1), Put("a", b"2", 2), Put("c", b"3", 0)],
        &[1, 2, 3],
    )
    .unwrap();
    assert_eq!(keys(&store), "b a c");
    assert_eq!(contents(&store)[1], ("a".into(), b"2".to_vec(), vec![2, 3]));
    apply(&mut store, &[Put("b", b"4", 0)], &[]).unwrap();
    assert_eq!(keys(&store), "a c b");
    assert_eq!(store.take_removed(), [1]);
    apply(&mut store, &[Rename("a", "b")], &[]).unwrap();
    assert_eq!(contents(&store)[1], ("b".into(), b"2".to_vec(), vec![2, 3]));
    assert_eq!(keys(&store), "c b");
    apply(&mut store, &[Rename("c", "c")], &[]).unwrap();
    assert_eq!(keys(&store), "b c");
    assert_eq!(store.take_removed(), []);
    apply(
        &mut store,
        &[Put("b/1", b"", 0), Put("b0", b"", 0), Remove("b")],
        &[],
    )
    .unwrap();
    assert_eq!(keys(&store), "c b0");
    assert_eq!(store.take_removed(), [2, 3]);
    store.retain("c");
    assert_eq!(keys(&store), "c");
}

#[test]
fn batch_that_fails_changes_nothing_and_returns_its_descriptors() {
    let mut store = Store::new(LIMITS);
    apply(&mut store, &[Put("a", b"1", 1), Put("b", b"2", 1)], &[1, 2]).unwrap();
    let before = contents(&store);
    let prefix = [
        Put("a", b"9", 1),
        Rename("b", "c"),
        Remove("a"),
        Put("d", b"", 0),
    ];
    for last in [
        Rename("b", "x"),
        Write("a", b""),
        Alive,
        Put("e", &[0; 60], 0),
        Put("e", b"", 1),
    ] {
        let batch = [&prefix[..], &[last]].concat();
        apply(&mut store, &batch, &[9]).unwrap_err();
        assert_eq!(contents(&store), before);
        assert_eq!(store.take_removed(), [9], "{last:?}");
    }
    store
        .apply(&prefix, vec![9], |_| Err(Error::Full))
        .unwrap_err();
    assert_eq!((contents(&store), store.take_removed()), (before, vec![9]));
    // All limits count as before: exactly what is left still fits.
    let rest = [Put("c", b"", 3), Put("d", &[0; 34], 0), Remove("none")];
    apply(&mut store, &rest, &[3, 4, 5]).unwrap();
    apply(&mut store, &[Put("e", b"", 0)], &[]).unwrap_err();
}

#[test]
fn writes_name_the_entries_of_their_place_in_the_batch() {
    let mut store = Store::new(LIMITS);
    let batch = [
        Put("a", b"", 1),
        Write("a", b"x"),
        Put("a", b"", 1),
        Rename("a", "b"),
        Write("b", b"y"),
        Remove("b"),
    ];
    let mut written = Vec::new();
    let commit = |writes: &[PendingWrite<'_, u32>]| {
        written.extend(writes.iter().map(|(value, bytes)| (value.fds[0], bytes[0])));
        Ok(())
    };
    store.apply(&batch, vec![1, 2], commit).unwrap();
    assert_eq!(written, [(1, b'x'), (2, b'y')]);
    let mut removed = store.take_removed();
    removed.sort_unstable();
    assert_eq!((keys(&store), removed), (String::new(), vec![1, 2]));
}

/// The store as a list, copied for each batch.
#[derive(Clone, Default)]
struct Model(Vec<Content>);

impl Model {
    fn take(&mut self, key: &str) -> Option<Content> {
        let at = self.0.iter().position(|entry| entry.0 == key)?;
        Some(self.0.remove(at))
    }

    fn apply(&self, batch: &[Operation<'_>], mut fds: &[u32]) -> Option<Model> {
        let mut model = self.clone();
        for operation in batch {
            match *operation {
                Put(key, bytes, count) => {
                    model.take(key);
                    let (taken, rest) = fds.split_at(count);
                    fds = rest;
                    model.0.push((key.into(), bytes.into(), taken.into()));
                }
                Remove(prefix) => model.0.retain(|(key, ..)| !is_below(key, prefix)),
                Rename(from, to) => {
                    let (_, bytes, fds) = model.take(from)?;
                    model.take(to);
                    model.0.push((to.into(), bytes, fds));
                }
                Write(key, _) => drop(model.0.iter().find(|entry| entry.0 == key)?),
                _ => return None,
            }
        }
        let sum = |size: fn(&Content) -> usize| model.0.iter().map(size).sum();
        let sums: [usize; 3] = [
            sum(|_| 1),
            sum(|e| e.0.len() + e.1.len()),
            sum(|e| e.2.len()),
        ];
        let limits = [LIMITS.entries, LIMITS.bytes, LIMITS.descriptors];
        let fits = sums
            .iter()
            .zip(limits)
            .all(|(sum, limit)| *sum as u64 <= limit);
        fits.then_some(model)
    }
}

fn operation() -> impl Strategy<Value = Operation<'static>> {
    let key = || prop::sample::select(&["a", "b", "a/1", "a/2", "a0", "c", "d", "e"][..]);
    let bytes = || (0..9_usize).prop_map(|length| &b"01234567"[..length]);
    prop_oneof![
        5 => (key(), bytes(), 0..3_usize).prop_map(|(key, bytes, fds)| Put(key, bytes, fds)),
        1 => key().prop_map(Remove),
        3 => (key(), key()).prop_map(|(from, to)| Rename(from, to)),
        1 => (key(), bytes()).prop_map(|(key, bytes)| Write(key, bytes)),
    ]
}

proptest! {
    #[test]
    fn store_equals_its_model_and_loses_no_descriptor(
        batches in prop::collection::vec(prop::collection::vec(operation(), 0..6), 0..30)
    ) {
        let (mut store, mut model) = (Store::new(LIMITS), Model::default());
        let (mut next, mut removed) = (0, Vec::new());
        for batch in batches {
            let fds: Vec<u32> = (next..).take(descriptors(&batch)).collect();
            next += fds.len() as u32;
            let result = apply(&mut store, &batch, &fds);
            let expected = model.apply(&batch, &fds);
            prop_assert_eq!(result.is_ok(), expected.is_some());
            model = expected.unwrap_or(model);
            prop_assert_eq!(contents(&store), model.0.clone());
            removed.extend(store.take_removed());
            let mut all = removed.clone();
            all.extend(model.0.iter().flat_map(|entry| &entry.2));
            all.sort_unstable();
            prop_assert_eq!(all, (0..next).collect::<Vec<_>>());
        }
    }
}
