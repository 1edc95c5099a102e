//! The guest endpoints of a VM, as the VM's device has them: their pages, their devices, and what is to be done with
//! them next.
//!
//! # Invariants
//! - No queue of an endpoint is started while a queue of the VM is stopped, while the VM's memory is being replaced, or
//!   before the pages have shown their values after that.
//! - One command at a time is with the device of an endpoint, but for `Disconnect`, which any other may precede.
//! - An attachment is removed when its device has answered `Disconnected` and nothing else has its memory.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Weak};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use zerosock_proto::Instant;
use zerosock_ring::{Extent, Memory};
use zerosock_sys::account::Permit;
use zerosock_sys::notify::ThreadCount;
use zerosock_vhost_user::DeviceReply;
use zerosock_virtio::command::QueueStarted;
use zerosock_virtio::outbox::DeviceAddr;
use zerosock_virtio::poller::Poller;
use zerosock_virtio::queues::Quiesced;

use super::queue_index::{EVENT, RX};
use crate::device::guest_orders::{AttachmentKey, GuestReports, Step};
use crate::registration::key::Nonce;
use crate::registration::page_value::{PAGE, find_wrong_page};
use crate::registration::{Reason, Refusal, Start, Token};

/// The queues of an endpoint. They stop in the order of their numbers: first that with the buffers that are written.
const QUEUES: usize = 3;
/// Pages of a huge page.
const PAGES_OF_HUGE: u64 = Extent::HUGE_PAGE / PAGE;

/// The guest endpoints of a VM. Its first queue pair has them.
pub(crate) struct Guests {
    pub(in crate::device) reports: GuestReports,
    /// Whether the guest may register endpoints.
    pub(in crate::device) is_open: bool,
    pub(in crate::device) attachments: BTreeMap<AttachmentKey, Attachment>,
    pub(in crate::device) pause: Pause,
    /// Counts the threads that write to descriptors of the endpoints.
    pub(in crate::device) threads: ThreadCount,
    /// The bridges of doorbells without a token, oldest first.
    pub(in crate::device) new_doorbells: VecDeque<u32>,
    /// When the timer fires; `None`: it is not set.
    pub(in crate::device) wakes_at: Option<Instant>,
}

impl Guests {
    pub(in crate::device) fn new(reports: GuestReports) -> Guests {
        Guests {
            reports,
            is_open: true,
            attachments: BTreeMap::new(),
            pause: Pause::default(),
            threads: ThreadCount::default(),
            new_doorbells: VecDeque::new(),
            wakes_at: None,
        }
    }

    /// The position of one of these extents that has bytes of an attachment. They do not overlap each other.
    pub(in crate::device) fn find_used(&self, extents: &[Extent]) -> Option<usize> {
        let used = self.attachments.values().flat_map(|it| &it.extents);
        let mut all: Vec<Extent> = used.copied().collect();
        let others = all.len();
        all.extend(extents);
        Extent::find_overlap(&all)?.checked_sub(others)
    }

    /// Whether the pages of the endpoints are not used any more, as far as a command of the VMM needs it.
    pub(in crate::device) fn quiesced(&self) -> Quiesced {
        let mut attachments = self.attachments.values();
        // Their devices have a limit themselves.
        if attachments.clone().any(|it| !it.is_at_rest()) {
            return Quiesced::Waits;
        }
        match attachments.any(|it| it.may_be_written && !it.is_unused()) {
            true => Quiesced::Unknown(
                "the embedding program kept a buffer of a guest endpoint in use for too long",
            ),
            false => Quiesced::Done,
        }
    }
}

/// The stop of the VM's queues, and the replacement of its memory.
#[derive(Debug, Default)]
pub(in crate::device) struct Pause {
    /// Queues that were stopped and have not started again, as bits.
    stopped: u8,
    pub(in crate::device) replaces_memory: bool,
}

impl Pause {
    /// Whether endpoints may run.
    pub(in crate::device) fn allows(&self) -> bool {
        self.stopped == 0 && !self.replaces_memory
    }

    pub(in crate::device) fn queue_stops(&mut self, index: u16) {
        self.stopped |= 1 << index;
    }

    /// A queue of the VM has started. Returns false if it does not show that the VM goes on where it was stopped.
    pub(in crate::device) fn queue_started(&mut self, index: u16, started: QueueStarted) -> bool {
        let was_stopped = self.stopped & (1 << index) != 0;
        self.stopped &= !(1 << index);
        // No event was sent as a rule, so the event queue begins at 0 after a pause too.
        let is_known = started.base != 0 || index == EVENT;
        !was_stopped || is_known && started.stopped_at == Some(started.base)
    }
}

#[derive(Copy, Clone, Debug, Default)]
struct QueueState {
    runs: bool,
    /// Where it starts.
    base: u16,
}

/// Pages that a guest has named, and the endpoint on them.
#[derive(Debug)]
pub(crate) struct Attachment {
    pub(in crate::device) extents: Vec<Extent>,
    nonce: Nonce,
    /// The memory that consists of the extents.
    pub(in crate::device) view: Arc<Memory>,
    /// The same in earlier memory of the VM, as long as something has it.
    old_views: Vec<Weak<Memory>>,
    /// Which of its [groups](Self::group) of pages are still to show their values.
    unchecked: Range<u64>,
    /// All pages have shown their values, which was reported.
    pub(in crate::device) is_accepted: bool,
    /// Opens the doorbell.
    pub(in crate::device) token: Option<Token>,
    /// The bridge of the doorbell.
    pub(in crate::device) doorbell: Option<u32>,
    /// Where the endpoint's device notifies its driver, for all queues.
    pub(in crate::device) call: OwnedFd,
    /// For its descriptors.
    _permit: Permit,
    /// The endpoint's device, and how its queues start; `None`: they are not to be started yet.
    pub(in crate::device) start: Option<(DeviceAddr, Start)>,
    /// Whether the device has features, and possibly queues and the memory.
    pub(in crate::device) is_connected: bool,
    has_memory: bool,
    queues: [QueueState; QUEUES],
    /// The queues have run, which was reported.
    has_started: bool,
    /// Its receive queue could not be stopped in order: a program may still write into a buffer of it.
    may_be_written: bool,
    pending: Option<Step>,
    /// Why it ends.
    pub(in crate::device) end: Option<Reason>,
    /// It ends, and its device is disconnected before its queues have stopped one by one.
    pub(in crate::device) ends_at_once: bool,
}

impl Attachment {
    /// Descriptors that it has: where it notifies, a duplicate of that for each queue, and the kick of each queue.
    pub(in crate::device) const DESCRIPTORS: u64 = 1 + 2 * QUEUES as u64;

    /// `permit`: for [`Self::DESCRIPTORS`].
    pub(in crate::device) fn new(
        extents: Vec<Extent>,
        nonce: Nonce,
        token: Token,
        view: Memory,
        permit: Permit,
    ) -> rustix::io::Result<Attachment> {
        Ok(Attachment {
            extents,
            nonce,
            unchecked: 0..view.size() / PAGE,
            view: Arc::new(view),
            old_views: Vec::new(),
            is_accepted: false,
            token: Some(token),
            doorbell: None,
            call: new_eventfd()?,
            _permit: permit,
            start: None,
            is_connected: false,
            has_memory: false,
            queues: Default::default(),
            has_started: false,
            may_be_written: false,
            pending: None,
            end: None,
            ends_at_once: false,
        })
    }

    /// Whether pages are to be checked, if it goes on.
    pub(in crate::device) fn has_unchecked(&self) -> bool {
        !self.unchecked.is_empty() && self.end.is_none()
    }

    /// Checks the next pages, at most `budget`, which is reduced by them. Returns whether they were the last ones.
    ///
    /// # Errors
    /// This page, counted through all extents, has another value.
    pub(in crate::device) fn check_pages(&mut self, budget: &mut u64) -> Result<bool, u64> {
        let (group, from) = (self.group(), self.unchecked.start);
        let to = self.unchecked.end.min(from.saturating_add(*budget));
        *budget -= to - from;
        self.unchecked.start = to;
        let pages = (from..to).map(|number| (number + 1) * group - 1);
        match find_wrong_page(&self.view, &self.nonce, pages) {
            Some(page) => Err(page),
            None => Ok(self.unchecked.is_empty()),
        }
    }

    /// Pages of which the last one is to show its value: all are before it is accepted, then those of huge pages.
    fn group(&self) -> u64 {
        match self.is_accepted {
            true => PAGES_OF_HUGE,
            false => 1,
        }
    }

    /// Begins the check of its pages anew, before it goes on after a stop.
    pub(in crate::device) fn check_again(&mut self) {
        self.unchecked = 0..self.view.size() / PAGE / self.group();
    }

    /// Separates it from its doorbell. Returns the bridge.
    pub(in crate::device) fn take_doorbell(&mut self, poller: &Poller) -> Option<u32> {
        let doorbell = self.doorbell.take()?;
        poller.remove(&self.call);
        Some(doorbell)
    }

    /// Uses the same extents of other memory of the VM.
    pub(in crate::device) fn replace_memory(
        &mut self,
        memory: &Arc<Memory>,
    ) -> Result<(), Refusal> {
        let view = Arc::new(Memory::of_extents(memory, &self.extents)?);
        let old = std::mem::replace(&mut self.view, view);
        self.old_views.retain(|view| view.strong_count() > 0);
        self.old_views.push(Arc::downgrade(&old));
        self.has_memory = false;
        Ok(())
    }

    /// Whether nothing but this has its memory.
    fn is_unused(&self) -> bool {
        let is_mapped = |view: &Weak<Memory>| view.strong_count() > 0;
        Arc::strong_count(&self.view) == 1 && !self.old_views.iter().any(is_mapped)
    }

    fn is_at_rest(&self) -> bool {
        self.pending.is_none()
            && !self.queues.iter().any(|queue| queue.runs)
            && !(self.end.is_some() && self.is_connected)
    }

    /// Whether it has ended, and nothing is left of it.
    pub(in crate::device) fn is_over(&self) -> bool {
        self.end.is_some() && self.is_at_rest() && self.is_unused()
    }

    /// The next command for its device. `may_run`: see [`Pause::allows`].
    pub(in crate::device) fn next_step(&self, may_run: bool) -> Option<Step> {
        if self.ends_at_once && self.is_connected && self.pending != Some(Step::Disconnect) {
            return Some(Step::Disconnect);
        }
        if self.start.is_none() || self.pending.is_some() {
            return None;
        }
        let may_run = may_run && self.unchecked.is_empty() && self.end.is_none();
        let mut queues = (0..).zip(&self.queues);
        if may_run {
            return match (self.is_connected, self.has_memory) {
                (false, _) => Some(Step::SetFeatures),
                (true, false) => Some(Step::SetMemory),
                (true, true) => {
                    let (index, queue) = queues.find(|(_, queue)| !queue.runs)?;
                    let base = queue.base;
                    Some(Step::Start { index, base })
                }
            };
        }
        if let Some((index, _)) = queues.find(|(_, queue)| queue.runs) {
            return Some(Step::Stop(index));
        }
        match (self.is_connected, self.end) {
            (true, Some(_)) => Some(Step::Disconnect),
            // So that it does not keep replaced memory mapped.
            (true, None) if !self.has_memory => Some(Step::SetMemory),
            _ => None,
        }
    }

    /// Notes that a command is sent.
    pub(in crate::device) fn begin(&mut self, step: Step) {
        self.pending = Some(step);
        self.is_connected |= step == Step::SetFeatures;
    }

    /// Handles the answer to a command. Returns whether all queues run for the first time.
    ///
    /// # Errors
    /// The attachment ends, for this reason.
    pub(in crate::device) fn answered(
        &mut self,
        step: Step,
        reply: &DeviceReply,
    ) -> Result<bool, Reason> {
        if self.pending.take_if(|it| *it == step).is_none() {
            // A `Disconnect` has overtaken it.
            return Ok(false);
        }
        let is_done = !matches!(reply, DeviceReply::Failed(_));
        match step {
            // A device that fails to disconnect is not there.
            Step::Disconnect => {
                self.is_connected = false;
                self.queues = Default::default();
            }
            Step::Stop(index) => {
                if let Some(queue) = self.queues.get_mut(usize::from(index)) {
                    queue.runs = false;
                    if let DeviceReply::Base(base) = *reply {
                        queue.base = base;
                        return Ok(false);
                    }
                }
                self.may_be_written |= index == RX;
                return Err(Reason::NOT_STOPPED);
            }
            Step::Start { index, .. } if is_done => {
                if let Some(queue) = self.queues.get_mut(usize::from(index)) {
                    queue.runs = true;
                }
                let is_first = !self.has_started && self.queues.iter().all(|queue| queue.runs);
                self.has_started |= is_first;
                return Ok(is_first);
            }
            Step::Start { .. } => return Err(Reason::RINGS),
            _ if !is_done => return Err(Reason::SERVER_FAILED),
            Step::SetFeatures => {}
            Step::SetMemory => self.has_memory = true,
        }
        Ok(false)
    }
}

pub(in crate::device) fn new_eventfd() -> rustix::io::Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

#[cfg(test)]
#[path = "guests_tests.rs"]
mod tests;
