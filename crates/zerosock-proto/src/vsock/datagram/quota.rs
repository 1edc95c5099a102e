//! How many places of a bounded table each endpoint has.
//!
//! What must hold: what has ended has no place, and a table that is empty keeps nothing here.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use crate::addr::Cid;

/// See the module. Counting costs the same however many places are taken.
#[derive(Debug, Default)]
pub(super) struct EndpointQuota {
    taken: HashMap<Cid, usize>,
}

impl EndpointQuota {
    /// Takes one more place for `cid`. False: it has `most` already.
    pub(super) fn take(&mut self, cid: Cid, most: usize) -> bool {
        let taken = self.taken.entry(cid).or_default();
        let may = *taken < most;
        *taken += usize::from(may);
        may
    }

    /// A place of `cid`'s is free again.
    pub(super) fn release(&mut self, cid: Cid) {
        if let Entry::Occupied(mut taken) = self.taken.entry(cid) {
            *taken.get_mut() = taken.get().saturating_sub(1);
            if *taken.get() == 0 {
                taken.remove();
            }
        }
    }

    /// Endpoints that have places.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.taken.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_its_own_and_gives_them_back() {
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
