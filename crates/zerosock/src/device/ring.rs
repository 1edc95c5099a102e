//! A running virtqueue of a device: the ring, the descriptors that wake, and how chains are
//! ended.
//!
//! What must hold: every chain popped is completed once, here; nothing is published without the
//! front-end being told when it asked to be told; from a ring that broke nothing is taken any more,
//! but what was taken before is given back.

use zerosock_ring::{Chain, DeviceQueue, PopError};
use zerosock_sys::PeerFd;
use zerosock_sys::notify::{CallFd, Notifier};

/// Useless chains turned back before others get their turn: a driver can post them as fast as
/// they come back.
const MOST_USELESS: usize = 64;

/// A virtqueue in the worker's hands.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) queue: DeviceQueue,
    pub(crate) kick: PeerFd,
    call: Option<CallFd>,
    err: Option<CallFd>,
    pub(crate) enabled: bool,
    broken: bool,
    /// The front-end has not been told yet that the ring broke.
    err_pending: bool,
    /// The device has not yet ended its connections since the ring broke.
    pub(crate) reset_pending: bool,
    /// Chains completed since the last publish.
    pub(crate) unseen: u16,
    /// Which start of this queue this is; a chain that comes back late names the one it is from.
    pub(crate) epoch: u32,
    /// Chains that could not be used (see [`PopError::Malformed`]).
    pub(crate) malformed: u64,
    /// Chains taken so far, those included that were un-popped; goes round.
    pub(crate) taken: u32,
}

impl Ring {
    pub(crate) fn new(
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
            unseen: 0,
            epoch,
            malformed: 0,
            taken: 0,
        }
    }

    /// Whether the device may work on this ring.
    pub(crate) fn live(&self) -> bool {
        self.enabled && !self.broken
    }

    /// The next chain that can be used, or `None` when there is none (or the ring is broken).
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Chain> {
        self.pop_if(0, true)
    }

    /// The next chain with at least `room` writable bytes. One that is of no use goes back to the
    /// driver, which is counted; but if `skip` is false it stays posted and there is none for now:
    /// so that chains popped before can still be un-popped.
    #[inline]
    pub(crate) fn pop_if(&mut self, room: usize, skip: bool) -> Option<Chain> {
        if !self.live() {
            return None;
        }
        for _ in 0..MOST_USELESS {
            let useless = match self.queue.pop() {
                Ok(Some(chain)) if chain.writable_len() as usize >= room => {
                    self.taken = self.taken.wrapping_add(1);
                    return Some(chain);
                }
                Ok(Some(chain)) => chain,
                Ok(None) => return None,
                Err(PopError::Malformed(chain)) => chain,
                Err(PopError::Broken(reason)) => {
                    tracing::warn!(?reason, "the driver broke its ring; the queue stops");
                    self.fail();
                    return None;
                }
            };
            if !skip {
                self.queue.unpop(useless);
                return None;
            }
            self.malformed += 1;
            self.complete(useless, 0);
        }
        // There may be more, and what there is will be found when kicks are asked for.
        None
    }

    /// Gives `chain` back to the driver with `written` bytes in it.
    #[inline]
    pub(crate) fn complete(&mut self, chain: Chain, written: u32) {
        self.queue.complete(chain, written);
        self.unseen = self.unseen.saturating_add(1);
    }

    /// Shows the driver what was completed, and tells it if it wants to be told; tells the
    /// front-end if the ring has broken. True: the driver was told.
    #[inline]
    pub(crate) fn publish(&mut self, notifier: &Notifier) -> bool {
        if std::mem::take(&mut self.err_pending)
            && let Some(err) = &self.err
        {
            notifier.notify(err);
        }
        if std::mem::take(&mut self.unseen) > 0
            && self.queue.publish()
            && let Some(call) = &self.call
        {
            notifier.notify(call);
            return true;
        }
        false
    }

    /// Stops the ring for good; the next publish says so to the front-end.
    pub(crate) fn fail(&mut self) {
        self.err_pending |= !self.broken;
        self.reset_pending |= !self.broken;
        self.broken = true;
    }

    pub(crate) fn set_call(&mut self, call: Option<CallFd>, notifier: &Notifier) {
        // The driver may have been promised a notification on the old descriptor.
        if let Some(call) = &call {
            notifier.notify(call);
        }
        self.call = call;
    }

    pub(crate) fn set_err(&mut self, err: Option<CallFd>) {
        self.err = err;
    }
}
