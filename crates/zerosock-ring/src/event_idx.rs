//! The event-index test (virtio 1.2, 2.7.7.2 and 2.7.10): does a batch pass the index at which the
//! other half requested a notification?

/// Whether publishing the entries from `old` up to, not including, `new` passes `event`, the entry
/// for which the other half requested a notification. All three are free-running and wrap at 65536.
#[inline]
pub(crate) fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(all(test, not(loom)))]
#[path = "event_idx_tests.rs"]
mod tests;
