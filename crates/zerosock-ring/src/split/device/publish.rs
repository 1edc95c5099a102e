//! What the device half writes into the used ring beside its elements: the index, and its requests
//! for kicks. And the log of all that it writes.

use std::sync::Arc;

use super::{DeviceQueue, within};
use crate::dirty::DirtyLog;
use crate::slice::Piece;
use crate::split::chain::Chain;
use crate::split::stored;

/// Offset and length of the parts of the used ring (virtio 1.2, 2.7.8).
const FLAGS: (u64, u64) = (0, 2);
const INDEX: (u64, u64) = (2, 2);
const ELEMENTS: u64 = 4;
const ELEMENT_LEN: u64 = 8;

impl DeviceQueue {
    /// Makes all completed chains visible to the driver. True: notify it. With event index the
    /// first batch of a queue always needs a notification, because a predecessor may have died
    /// between publishing and notifying.
    #[must_use = "the driver may wait for a notification"]
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.publish_without_notify();
        self.used
            .needs_notification(self.rings.used_words(), self.config.event_idx)
    }

    /// Makes all completed chains visible without checking for a notification: for a driver that
    /// spins, or before a later [`publish`](Self::publish), which checks for all of them. It saves
    /// the fence, which waits until the other core has given up every cache line written before.
    #[inline]
    pub fn publish_without_notify(&mut self) {
        let published = self.used.make_visible(self.rings.used_words());
        stored();
        if published && let Some(log) = &self.log {
            self.log_used(log, INDEX);
        }
    }

    /// Informs the driver that kicks are not needed.
    #[inline]
    pub fn disable_notifications(&mut self) {
        self.avail
            .disable(self.rings.avail_words(), self.config.event_idx);
        // With event index nothing is written.
        if !self.config.event_idx
            && let Some(log) = &self.log
        {
            self.log_used(log, FLAGS);
        }
    }

    /// Requests kicks again. True: available chains were not popped, and no kick will follow for
    /// them. False for a broken queue.
    #[must_use = "no kick follows for chains that were made available before"]
    #[inline]
    pub fn enable_notifications(&mut self) -> bool {
        let more = self
            .avail
            .enable(self.rings.avail_words(), self.config.event_idx);
        self.log_request();
        more && self.broken.is_none()
    }

    /// Marks writes into the driver's memory in this log from now on, or nowhere.
    pub fn set_log(&mut self, log: Option<Arc<DirtyLog>>) {
        self.log = log;
    }

    /// Marks writes into the used ring as if it lay at this guest address, or not at all (VHOST_VRING_F_LOG
    /// and `log_guest_addr`).
    pub fn set_used_log(&mut self, guest_addr: Option<u64>) {
        self.used_log = guest_addr;
    }

    /// As `complete`, with a log: marks `written` bytes of the buffers, and the element of the used ring.
    /// Before both are published and written down, so that no front-end and no successor finds them and not
    /// the mark. Out of line,
    /// so that a chain without a log stays in registers.
    #[cold]
    #[inline(never)]
    pub(super) fn complete_logged(&mut self, chain: Chain, written: u32) {
        let written = within(&chain, written);
        let changed = self.add_used(chain.head, written);
        self.log_completed(chain.writable(), written, changed);
        self.record_completed(chain.head);
        self.release(chain);
    }

    /// Marks `written` bytes of the buffers, and the element of the used ring that has changed.
    #[cold]
    #[inline(never)]
    pub(super) fn log_completed(&self, pieces: &[Piece], written: u32, changed: Option<u16>) {
        if let Some(log) = &self.log {
            log.mark_pieces(self.memory(), pieces, written);
            if let Some(index) = changed {
                let offset = ELEMENTS + ELEMENT_LEN * u64::from(index);
                self.log_used(log, (offset, ELEMENT_LEN));
            }
        }
    }

    /// Marks the word by which the device requests kicks.
    #[inline]
    fn log_request(&self) {
        if let Some(log) = &self.log {
            let event = ELEMENTS + ELEMENT_LEN * u64::from(self.size());
            let word = if self.config.event_idx {
                (event, 2)
            } else {
                FLAGS
            };
            self.log_used(log, word);
        }
    }

    /// Marks `len` bytes at `offset` of the used ring.
    #[cold]
    #[inline(never)]
    fn log_used(&self, log: &DirtyLog, (offset, len): (u64, u64)) {
        if let Some(guest_addr) = self.used_log {
            log.mark(guest_addr.saturating_add(offset), len);
        }
    }
}
