//! Counts the entries that each endpoint has in a bounded table.
//!
//! # Invariants
//! A removed entry is not counted, and an empty table leaves no counter behind.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use crate::addr::Cid;

/// Entries of each endpoint. Counting takes constant time.
#[derive(Debug, Default)]
pub(super) struct EndpointQuota {
    taken: HashMap<Cid, usize>,
}

impl EndpointQuota {
    /// Counts one more entry of `cid`. False, and nothing counted: it has `most` already.
    pub(super) fn take(&mut self, cid: Cid, most: usize) -> bool {
        let taken = self.taken.entry(cid).or_default();
        let may = *taken < most;
        *taken += usize::from(may);
        may
    }

    /// Counts one entry of `cid` less.
    pub(super) fn release(&mut self, cid: Cid) {
        if let Entry::Occupied(mut taken) = self.taken.entry(cid) {
            *taken.get_mut() = taken.get().saturating_sub(1);
            if *taken.get() == 0 {
                taken.remove();
            }
        }
    }

    /// Endpoints that have entries.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.taken.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_are_per_endpoint_and_released_entries_count_again() {
        let mut quota = EndpointQuota::default();
        let (one, other) = (Cid::new(3), Cid::new(4));
        assert!(quota.take(one, 2) && quota.take(one, 2));
        assert!(!quota.take(one, 2) && quota.take(other, 2));
        quota.release(one);
        assert!(quota.take(one, 2) && !quota.take(one, 2));
        for cid in [one, one, one, other] {
            quota.release(cid);
        }
        assert_eq!(quota.len(), 0);
    }
}
