//! What may be done for a bridge, what it waits for, and where it is listed.

/// Flags of a bridge: see the module.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Flags(u16);

impl Flags {
    /// The host may have bytes or an end of file (an edge was seen and not used up).
    pub(crate) const READABLE: Flags = Flags(1 << 0);
    /// The host may take bytes.
    pub(crate) const WRITABLE: Flags = Flags(1 << 1);
    /// The poller reports when the socket can take bytes again.
    pub(crate) const WATCHES_ROOM: Flags = Flags(1 << 2);
    /// Reads go on until the socket is empty: the host sends urgent bytes, at which a read returns
    /// early.
    pub(crate) const URGENT: Flags = Flags(1 << 3);
    /// Waits for credit, which a `Writable` event of the shard reports.
    pub(crate) const NO_CREDIT: Flags = Flags(1 << 4);
    /// Few bytes wait, which would make a small packet: waits for more of them, or for the same event.
    pub(crate) const FEW_BYTES: Flags = Flags(1 << 5);
    /// A send failed with ENOBUFS or ENOMEM; no edge reports when memory is available.
    pub(crate) const NO_MEMORY: Flags = Flags(1 << 6);
    /// A hold timer is set. It may expire after the chains that it was set for were returned.
    pub(crate) const HOLD_TIMER: Flags = Flags(1 << 7);
    /// On the list of ready bridges. Only the list changes it.
    pub(super) const IN_READY: Flags = Flags(1 << 8);
    /// On the list of dirty bridges. Only the list changes it.
    pub(super) const IN_DIRTY: Flags = Flags(1 << 9);

    /// The reasons to wait that a `Writable` event ends.
    pub(crate) const WAITS: Flags = Flags::NO_CREDIT.union(Flags::FEW_BYTES);

    /// The flags of both sets.
    pub(crate) const fn union(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }

    /// Whether one of these flags is set.
    #[inline]
    pub(crate) const fn has(self, flags: Flags) -> bool {
        self.0 & flags.0 != 0
    }

    /// Sets flags. Returns whether one of them was not set before.
    #[inline]
    pub(crate) fn insert(&mut self, flags: Flags) -> bool {
        let before = *self;
        *self = self.union(flags);
        *self != before
    }

    /// Clears flags. Returns whether one of them was set before.
    #[inline]
    pub(crate) fn remove(&mut self, flags: Flags) -> bool {
        let before = *self;
        self.0 &= !flags.0;
        *self != before
    }

    /// Sets or clears flags.
    #[inline]
    pub(crate) fn set(&mut self, flags: Flags, on: bool) {
        match on {
            true => self.insert(flags),
            false => self.remove(flags),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_flag_is_its_own_and_changes_are_reported_once() {
        let all = [
            Flags::READABLE,
            Flags::WRITABLE,
            Flags::WATCHES_ROOM,
            Flags::URGENT,
            Flags::NO_CREDIT,
            Flags::FEW_BYTES,
            Flags::NO_MEMORY,
            Flags::HOLD_TIMER,
            Flags::IN_READY,
            Flags::IN_DIRTY,
        ];
        let mut set = Flags::default();
        for (index, &flag) in all.iter().enumerate() {
            assert!(!set.has(flag) && set.insert(flag) && !set.insert(flag));
            assert_eq!(set.0.count_ones() as usize, index + 1);
        }
        for flag in all {
            assert!(set.has(flag) && set.remove(flag) && !set.remove(flag));
        }
        assert_eq!(set, Flags::default());
    }
}
