//! A running virtqueue of a device: the ring, its kick, call and error descriptors, and the
//! completion of chains.
//!
//! # Invariants
//! - Every popped chain is completed once, by [`Ring::complete`].
//! - Every publish notifies the driver if it asked for a notification.
//! - [`Ring::publish_late`] puts a publish off for [`PUBLISH_DELAY`] at most. A driver has a descriptor for
//!   each queue to be notified on, so two notifications cannot be merged, but the less urgent one can wait
//!   for others of its queue.
//! - No chain is popped from a broken ring, but chains popped before are still completed.
//! - From one [`Ring::publish`] to the next, popping takes about a millisecond at most, whatever
//!   the driver posts.

mod single;

use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::Instant;
use zerosock_ring::{Chain, DeviceQueue, FrontChain, FrontToken, LostChains, PopError};
use zerosock_sys::notify::{CallFd, Notifier};
use zerosock_sys::{LogLimit, PeerFd};

/// Unusable chains completed per call: a driver can post them as fast as they are returned.
const MAX_UNUSABLE: usize = 64;
/// Unusable chains completed from one publish to the next.
const MAX_UNUSABLE_PER_PUBLISH: u32 = 4096;
/// Work on long chains from one publish to the next ([`DeviceQueue::walked`]): more than the
/// packets of a turn need, and little enough for the other devices of the worker.
const MAX_WALKED: u32 = 1 << 17;
/// How long [`Ring::publish_late`] may put off a publish.
pub const PUBLISH_DELAY: Duration = Duration::from_micros(200);
/// A publish is put off for at most one chain in so many entries of the ring: the driver has the others.
const ENTRIES_PER_LATE: u16 = 32;

/// A started virtqueue of a device.
#[derive(Debug)]
pub struct Ring {
    /// The queue in guest memory.
    pub queue: DeviceQueue,
    /// Where the driver kicks.
    pub kick: PeerFd,
    call: Option<CallFd>,
    err: Option<CallFd>,
    /// The front-end lets the device process the ring.
    pub enabled: bool,
    broken: bool,
    /// The ring has broken and the front-end has not been notified.
    err_pending: bool,
    /// The ring has broken and the device has not reset its connections.
    pub reset_pending: bool,
    /// Chains completed since the last publish.
    pub unpublished: u16,
    /// Until when the publish of completed chains is put off.
    publish_at: Option<Instant>,
    /// Number of the queue start; a chain that returns late carries the epoch of its queue.
    pub epoch: u32,
    /// Unusable chains since the counter was last read (see [`PopError::Malformed`]).
    pub malformed: u64,
    /// Unusable chains since the last publish.
    unusable: u32,
    /// Chains popped so far, un-popped ones included; wraps around.
    pub taken: u32,
    /// For the lines that a driver can cause. One for all queue starts of the device.
    pub(crate) log: Arc<LogLimit>,
}

impl Ring {
    /// A ring that runs. `call` notifies the driver, `err` the front-end of a broken ring.
    pub fn new(
        queue: DeviceQueue,
        kick: PeerFd,
        call: Option<CallFd>,
        err: Option<CallFd>,
        enabled: bool,
        epoch: u32,
    ) -> Ring {
        Ring {
            queue,
            kick,
            call,
            err,
            enabled,
            broken: false,
            err_pending: false,
            reset_pending: false,
            unpublished: 0,
            publish_at: None,
            epoch,
            malformed: 0,
            unusable: 0,
            taken: 0,
            log: Arc::default(),
        }
    }

    /// Whether the device may process this ring.
    pub fn live(&self) -> bool {
        self.enabled && !self.broken
    }

    /// The next usable chain; `None` if there is none or the ring is broken. Also `None` if
    /// unusable or long chains have taken much time since the last publish: more may be posted
    /// then.
    #[inline(always)] // as `pop_if`
    pub fn pop(&mut self) -> Option<Chain> {
        self.pop_if(0, true)
    }

    /// The next chain with at least `room` writable bytes. An unusable chain is counted and
    /// completed, unless `skip` is false: then it stays posted and `None` is returned, so that
    /// chains popped before can still be un-popped.
    #[inline(always)] // saves a copy of the chain
    pub fn pop_if(&mut self, room: usize, skip: bool) -> Option<Chain> {
        if !self.live() || self.queue.walked() >= MAX_WALKED {
            return None;
        }
        // No caller asks for more than a packet.
        if let Some(chain) = self.queue.pop_plain(room as u32) {
            self.taken = self.taken.wrapping_add(1);
            return Some(chain);
        }
        self.pop_any(room, skip)
    }

    /// As `pop_if`, for a chain of any form in a queue that runs.
    #[inline(never)]
    fn pop_any(&mut self, room: usize, skip: bool) -> Option<Chain> {
        for _ in 0..MAX_UNUSABLE {
            let unusable = match self.queue.pop() {
                Ok(Some(chain)) if chain.writable_len() as usize >= room => {
                    self.taken = self.taken.wrapping_add(1);
                    return Some(chain);
                }
                Ok(Some(chain)) => chain,
                Ok(None) => return None,
                Err(PopError::Malformed(chain)) => chain,
                Err(PopError::Broken(reason)) => {
                    if let Some(suppressed) = self.log.admit(std::time::Instant::now()) {
                        tracing::warn!(
                            %reason,
                            suppressed,
                            "the queue stops: its ring cannot be used any more"
                        );
                    }
                    self.fail();
                    return None;
                }
            };
            if !skip {
                self.queue.unpop(unusable);
                return None;
            }
            self.malformed += 1;
            self.complete(unusable, 0);
            self.unusable += 1;
            if self.unusable >= MAX_UNUSABLE_PER_PUBLISH || self.queue.walked() >= MAX_WALKED {
                break;
            }
        }
        // Chains that remain are found when the device enables kicks.
        None
    }

    /// The next chain, still posted, if it is short and of one kind ([`DeviceQueue::front`]). `None`
    /// says nothing about the ring: ask [`pop_if`](Self::pop_if).
    #[inline(always)] // keeps the chain in registers
    pub fn front(&mut self, at: usize, writable: bool) -> Option<FrontChain<'_>> {
        if !self.live() {
            return None;
        }
        self.queue.front(at, writable)
    }

    /// Completes the chain at the front with `written` bytes.
    #[inline(always)] // as `front`
    pub fn complete_front(&mut self, token: FrontToken, written: u32) {
        self.queue.complete_front(token, written);
        self.taken = self.taken.wrapping_add(1);
        self.unpublished = self.unpublished.saturating_add(1);
    }

    /// Pops the chain at the front.
    #[inline]
    pub fn pop_front(&mut self, token: FrontToken) -> Chain {
        self.taken = self.taken.wrapping_add(1);
        self.queue.pop_front(token)
    }

    /// Completes `chain` with `written` bytes.
    #[inline]
    pub fn complete(&mut self, chain: Chain, written: u32) {
        self.queue.complete(chain, written);
        self.unpublished = self.unpublished.saturating_add(1);
    }

    /// Completes and publishes the chains that a predecessor was killed with. Returns how many it had in
    /// use. The caller notifies the driver.
    pub(crate) fn return_lost(&mut self, lost: LostChains) -> u16 {
        let recovered = self.queue.complete_lost(lost);
        let _is_awaited = self.queue.publish();
        recovered
    }

    /// Publishes completed chains and notifies the driver if it asked for that; notifies the
    /// front-end of a broken ring. Returns true if the driver was notified.
    #[inline]
    pub fn publish(&mut self, notifier: &Notifier) -> bool {
        self.queue.reset_walked();
        self.unusable = 0;
        (self.unpublished > 0 || self.err_pending) && self.publish_any(notifier)
    }

    /// As `publish`, for a ring with completed chains or that has broken.
    fn publish_any(&mut self, notifier: &Notifier) -> bool {
        self.publish_at = None;
        if self.err_pending {
            self.notify_front_end(notifier);
        }
        std::mem::take(&mut self.unpublished) > 0
            && self.queue.publish()
            && self.notify_driver(notifier)
    }

    /// Notifies the front-end of a broken ring.
    #[cold]
    fn notify_front_end(&mut self, notifier: &Notifier) {
        self.err_pending = false;
        if let Some(err) = &self.err {
            notifier.notify(err);
        }
    }

    /// As [`publish`](Self::publish), for a transmit queue whose driver does not wait for its buffers. The
    /// publish is put off while it would notify the driver of a few chains, and no others are in use: an
    /// answer often comes meanwhile, and then its notification is the only one. The caller publishes by
    /// [`publish_at`](Self::publish_at).
    #[inline]
    pub fn publish_late(&mut self, now: Instant, notifier: &Notifier) -> bool {
        if (1..=self.queue.size() / ENTRIES_PER_LATE).contains(&self.unpublished)
            && self.queue.outstanding() == 0
            && !self.err_pending
            && self.queue.would_notify(0)
            && now < *self.publish_at.get_or_insert(now + PUBLISH_DELAY)
        {
            return false;
        }
        self.publish(notifier)
    }

    /// When the ring has to be published, if that was put off.
    #[inline]
    pub fn publish_at(&self) -> Option<Instant> {
        self.publish_at
    }

    /// Stops the ring for good; the next publish notifies the front-end.
    pub fn fail(&mut self) {
        self.err_pending |= !self.broken;
        self.reset_pending |= !self.broken;
        self.broken = true;
    }

    /// Replaces the descriptor that notifies the driver.
    pub fn set_call(&mut self, call: Option<CallFd>, notifier: &Notifier) {
        self.call = call;
        // The driver may wait for a notification that was not sent on the old descriptor.
        self.notify_driver(notifier);
    }

    /// Notifies the driver, also if it has not asked for that. Returns whether it has a descriptor.
    #[inline(never)]
    pub(crate) fn notify_driver(&self, notifier: &Notifier) -> bool {
        if let Some(call) = &self.call {
            notifier.notify(call);
        }
        self.call.is_some()
    }

    /// Replaces the descriptor that notifies the front-end of a broken ring.
    pub fn set_err(&mut self, err: Option<CallFd>) {
        self.err = err;
    }
}

#[cfg(test)]
mod tests;
