//! Entry point of the fuzz target `supervisor` (docs/fuzzing.md): what a hostile worker process sends.

use crate::Limits;
use crate::message::{MAX_DATAGRAM, decode, encode};
use crate::store::Store;

/// The store of a supervisor, with numbers as descriptors.
#[derive(Debug)]
pub struct World {
    store: Store<u64>,
    next: u64,
}

/// Small, so that they are reached.
const LIMITS: Limits = Limits {
    entries: 8,
    bytes: 512,
    descriptors: 12,
};

/// Key, bytes and descriptors of an entry.
type Content = (String, Vec<u8>, Vec<u64>);

impl Default for World {
    fn default() -> World {
        World {
            store: Store::new(LIMITS),
            next: 0,
        }
    }
}

impl World {
    fn contents(&self) -> Vec<Content> {
        let entries = self.store.entries();
        entries
            .map(|(key, value)| (key, value.bytes.clone(), value.fds.clone()))
            .collect()
    }

    /// A datagram with so many descriptors arrives. It changes all that it says, or nothing, and each descriptor is
    /// in the store or returned. `commits`: its writes succeed.
    pub fn datagram(&mut self, bytes: &[u8], fds: usize, commits: bool) {
        let Ok(operations) = decode(bytes, fds) else {
            return;
        };
        assert!(bytes.len() <= MAX_DATAGRAM);
        assert_eq!(encode(&operations).expect("it was decoded"), bytes);
        let (before, first) = (self.contents(), self.next);
        self.next += fds as u64;
        let given: Vec<u64> = (first..self.next).collect();
        let held: Vec<u64> = before.iter().flat_map(|entry| entry.2.clone()).collect();
        let result = self
            .store
            .apply(&operations, given.clone(), |_| match commits {
                true => Ok(()),
                false => Err(crate::Error::Full),
            });
        let after = self.contents();
        if result.is_err() {
            assert_eq!(after, before, "half a batch");
        }
        let mut all = self.store.take_removed();
        all.extend(after.iter().flat_map(|entry| entry.2.clone()));
        all.sort_unstable();
        let mut wanted = [held, given].concat();
        wanted.sort_unstable();
        assert_eq!(all, wanted, "descriptors are lost or doubled");
        let bytes: usize = after
            .iter()
            .map(|(key, bytes, _)| key.len() + bytes.len())
            .sum();
        let fds: usize = after.iter().map(|entry| entry.2.len()).sum();
        let Limits {
            entries,
            bytes: most,
            descriptors,
        } = LIMITS;
        assert!(after.len() as u64 <= entries && bytes as u64 <= most && fds as u64 <= descriptors);
    }
}
