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
use zerosock_proto::{Cid, Instant};
use zerosock_ring::{DirtyLog, Extent, Memory};
use zerosock_sys::account::Permit;
use zerosock_sys::notify::ThreadCount;
use zerosock_vhost_user::DeviceReply;
use zerosock_virtio::command::QueueStarted;
use zerosock_virtio::outbox::DeviceAddr;
use zerosock_virtio::poller::Poller;

use super::queue_index::{EVENT, RX, TX};
use crate::device::guest_orders::{AttachmentKey, GuestEvent, GuestReports};
use crate::registration::key::Nonce;
use crate::registration::page_value::{PAGE, find_wrong_page};
use crate::registration::{Reason, Refusal, Start, Token};

/// The queues of an endpoint, in the order in which they stop: that with the buffers that are written first.
const QUEUES: [u16; 3] = [RX, TX, EVENT];

/// The guest endpoints of a VM. Its first queue pair has them.
pub(crate) struct Guests {
    pub(in crate::device) reports: GuestReports,
    /// Whether the guest may register endpoints.
    pub(in crate::device) is_open: bool,
    /// What was reported last of the VM.
    phase: Phase,
    pub(in crate::device) attachments: BTreeMap<AttachmentKey, Attachment>,
    pub(in crate::device) pause: Pause,
    /// The VM's log of written pages, while it is on.
    pub(in crate::device) log: Option<Arc<DirtyLog>>,
    /// What the devices of the endpoints watch for kicks. Nothing writes to it: kicks are messages.
    kick: Option<Arc<OwnedFd>>,
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
            phase: Phase::Reset,
            attachments: BTreeMap::new(),
            pause: Pause::default(),
            log: None,
            kick: None,
            threads: ThreadCount::default(),
            new_doorbells: VecDeque::new(),
            wakes_at: None,
        }
    }

    /// The kick of the endpoints' queues, which is made for the first of them.
    pub(in crate::device) fn kick(&mut self) -> rustix::io::Result<Arc<OwnedFd>> {
        let kick = match self.kick.take() {
            Some(kick) => kick,
            None => Arc::new(new_eventfd()?),
        };
        Ok(Arc::clone(self.kick.insert(kick)))
    }

    /// Reports what the VM does now, if that is something else than before. Queues that stop behind a reset are no pause.
    pub(in crate::device) fn set_phase(&mut self, cid: Cid, phase: Phase) {
        if phase == self.phase || (self.phase, phase) == (Phase::Reset, Phase::Stopped) {
            return;
        }
        self.phase = phase;
        let event = match phase {
            Phase::Running => GuestEvent::Running,
            Phase::Stopped => GuestEvent::Stopped,
            Phase::Reset => GuestEvent::Reset,
        };
        self.reports.send(cid, event);
    }

    /// The position of the first of these extents that has bytes of an attachment. They do not overlap each other.
    pub(in crate::device) fn find_used(&self, extents: &[Extent]) -> Option<usize> {
        let mut order: Vec<(Range<u64>, usize)> = (0..)
            .zip(extents)
            .map(|(index, extent)| (extent.addr..extent.addr + extent.len, index))
            .collect();
        order.sort_unstable_by_key(|(range, _)| range.start);
        let used = self.attachments.values().flat_map(|it| &it.extents);
        let overlapped = used.flat_map(|used| {
            let first = order.partition_point(|(range, _)| range.end <= used.addr);
            let rest = order.get(first..).unwrap_or_default();
            rest.iter()
                .take_while(|(range, _)| range.start < used.addr + used.len)
        });
        overlapped.map(|(_, index)| *index).min()
    }

    /// Whether the queues of the VM may stop, or its memory be replaced.
    pub(in crate::device) fn rest(&self) -> Rest {
        let endpoints = || self.attachments.values();
        if endpoints().any(|it| !it.is_at_rest()) {
            return Rest::Busy;
        }
        match endpoints().any(|it| it.may_be_written()) {
            true => Rest::Written,
            false => Rest::Done,
        }
    }

    /// Whether a device of an endpoint has queues, or the memory.
    pub(in crate::device) fn are_connected(&self) -> bool {
        let mut endpoints = self.attachments.values();
        endpoints.any(|it| it.endpoint.as_ref().is_some_and(|it| it.is_connected))
    }
}

/// What the queues of a VM do.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(in crate::device) enum Phase {
    Running,
    /// They may go on where they were stopped.
    Stopped,
    /// They have not run since a reset, or since the front-end has connected.
    Reset,
}

/// How far the endpoints have come with stopping.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(in crate::device) enum Rest {
    /// A device of theirs answers soon.
    Busy,
    /// A program may still write into a loan of their pages.
    Written,
    /// Their pages do not change.
    Done,
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

    /// Whether all queues that have run do run.
    pub(in crate::device) fn is_over(&self) -> bool {
        self.stopped == 0
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

/// The pages that are to show their values, and how far they have been checked.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(in crate::device) enum PageCheck {
    /// All pages, for the order to check them; the number of the next one.
    All(u64),
    /// The last page of each huge page, after the VM was stopped; the number of the next huge page.
    Last(u64),
    /// None.
    Done,
}

/// What the check of some pages has found.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(in crate::device) enum Checked {
    /// There are more.
    More,
    /// The last ones were right.
    All,
    /// This page, counted through all extents, has another value.
    Wrong(u64),
}

/// The end of an attachment.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(in crate::device) struct End {
    pub(in crate::device) reason: Reason,
    /// The device is disconnected at once, not after its queues were stopped one by one.
    pub(in crate::device) at_once: bool,
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
    pub(in crate::device) check: PageCheck,
    /// Opens the doorbell.
    pub(in crate::device) token: Option<Token>,
    /// The bridge of the doorbell.
    pub(in crate::device) doorbell: Option<u32>,
    pub(in crate::device) endpoint: Option<Endpoint>,
    pub(in crate::device) end: Option<End>,
}

impl Attachment {
    pub(in crate::device) fn new(extents: Vec<Extent>, nonce: Nonce, view: Memory) -> Attachment {
        Attachment {
            extents,
            nonce,
            view: Arc::new(view),
            old_views: Vec::new(),
            check: PageCheck::All(0),
            token: None,
            doorbell: None,
            endpoint: None,
            end: None,
        }
    }

    /// Checks the next pages, at most `budget`, which is reduced by them.
    pub(in crate::device) fn check_pages(&mut self, budget: &mut u64) -> Checked {
        const HUGE: u64 = Extent::HUGE_PAGE / PAGE;
        let pages = self.view.size() / PAGE;
        let (count, from) = match self.check {
            PageCheck::All(next) => (pages, next),
            PageCheck::Last(next) => (pages / HUGE, next),
            PageCheck::Done => return Checked::All,
        };
        let to = count.min(from.saturating_add(*budget));
        *budget -= to - from;
        let (wrong, next) = match self.check {
            PageCheck::Last(_) => {
                let page = |huge| HUGE * huge + HUGE - 1;
                let check = |page| find_wrong_page(&self.view, &self.nonce, page..page + 1);
                let wrong = (from..to).find_map(|huge| check(page(huge)));
                (wrong, PageCheck::Last(to))
            }
            _ => {
                let wrong = find_wrong_page(&self.view, &self.nonce, from..to);
                (wrong, PageCheck::All(to))
            }
        };
        self.check = next;
        match wrong {
            Some(page) => Checked::Wrong(page),
            None if to < count => Checked::More,
            None => {
                self.check = PageCheck::Done;
                Checked::All
            }
        }
    }

    /// Separates it from its doorbell. Returns the bridge.
    pub(in crate::device) fn take_doorbell(&mut self, poller: &Poller) -> Option<u32> {
        let doorbell = self.doorbell.take()?;
        if let Some(endpoint) = &self.endpoint {
            poller.remove(&endpoint.call);
        }
        Some(doorbell)
    }

    /// Begins the check of its pages anew, before it goes on after a stop.
    pub(in crate::device) fn check_again(&mut self) {
        self.check = match self.check {
            PageCheck::All(_) => PageCheck::All(0),
            _ => PageCheck::Last(0),
        };
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
        if let Some(endpoint) = &mut self.endpoint {
            endpoint.has_memory = false;
        }
        Ok(())
    }

    /// Whether nothing but this has its memory.
    fn is_unused(&self) -> bool {
        let is_mapped = |view: &Weak<Memory>| view.strong_count() > 0;
        Arc::strong_count(&self.view) == 1 && !self.old_views.iter().any(is_mapped)
    }

    fn is_at_rest(&self) -> bool {
        let ends = self.end.is_some();
        self.endpoint.as_ref().is_none_or(|endpoint| {
            endpoint.pending.is_none()
                && !endpoint.queues.iter().any(|queue| queue.runs)
                && !(ends && endpoint.is_connected)
        })
    }

    fn may_be_written(&self) -> bool {
        let endpoint = self.endpoint.as_ref();
        endpoint.is_some_and(|endpoint| endpoint.may_be_written) && !self.is_unused()
    }

    /// Whether it has ended, and nothing is left of it.
    pub(in crate::device) fn is_over(&self) -> bool {
        self.end.is_some() && self.is_at_rest() && self.is_unused()
    }

    /// The next command for its device. `may_run`: see [`Pause::allows`].
    pub(in crate::device) fn next_step(&mut self, may_run: bool, logs: bool) -> Option<Step> {
        let may_run = may_run && self.check == PageCheck::Done && self.end.is_none();
        let endpoint = self.endpoint.as_mut()?;
        match self.end {
            Some(End { at_once: true, .. }) => {
                let is_sent = matches!(endpoint.pending, Some(Step::Disconnect));
                return (endpoint.is_connected && !is_sent).then_some(Step::Disconnect);
            }
            _ if endpoint.pending.is_some() => return None,
            _ => {}
        }
        if !may_run {
            let mut queues = QUEUES.into_iter().zip(&endpoint.queues);
            if let Some((index, _)) = queues.find(|(_, queue)| queue.runs) {
                return Some(Step::Stop(index));
            }
            return match (endpoint.is_connected, self.end) {
                (true, Some(_)) => Some(Step::Disconnect),
                // So that it does not keep replaced memory mapped.
                (true, None) if !endpoint.has_memory => Some(Step::SetMemory),
                _ => None,
            };
        }
        endpoint.next_start(logs)
    }
}

fn new_eventfd() -> rustix::io::Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// The device of an endpoint, and what it was told.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(in crate::device) device: DeviceAddr,
    pub(in crate::device) start: Option<Start>,
    /// Where it notifies its driver, for all queues.
    pub(in crate::device) call: OwnedFd,
    /// See [`Guests::kick`].
    pub(in crate::device) kick: Arc<OwnedFd>,
    /// For its descriptors.
    _permit: Permit,
    is_connected: bool,
    has_memory: bool,
    has_log: bool,
    /// Whether its features say that it logs; `None`: it has none yet.
    logs: Option<bool>,
    /// In the order of [`QUEUES`].
    queues: [QueueState; 3],
    /// The queues have run, which was reported.
    pub(in crate::device) has_started: bool,
    /// Its receive queue could not be stopped in order: a program may still write into a buffer of it.
    may_be_written: bool,
    pending: Option<Step>,
    /// The number of the command that was sent last.
    pub(in crate::device) serial: u32,
}

#[derive(Copy, Clone, Debug, Default)]
struct QueueState {
    runs: bool,
    /// Where it starts.
    base: u16,
}

/// A command for the device of an endpoint.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(in crate::device) enum Step {
    Connect,
    SetLog,
    SetFeatures { logs: bool },
    SetMemory,
    Start { index: u16, base: u16 },
    Stop(u16),
    Disconnect,
}

/// What follows from an answer.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(in crate::device) enum Answered {
    /// The next command.
    Next,
    /// All queues run for the first time.
    Started,
    /// What the device has written until now may be in no log of the VM, or in an earlier one.
    Unmarked,
    /// The attachment ends, for this reason.
    Failed(Reason),
}

impl Endpoint {
    /// Descriptors that it has: where it notifies, and for each queue a duplicate of that and of the kick.
    pub(in crate::device) const DESCRIPTORS: u64 = 1 + 2 * QUEUES.len() as u64;

    /// `permit`: for [`Self::DESCRIPTORS`].
    pub(in crate::device) fn new(
        device: DeviceAddr,
        kick: Arc<OwnedFd>,
        permit: Permit,
    ) -> rustix::io::Result<Endpoint> {
        Ok(Endpoint {
            device,
            start: None,
            call: new_eventfd()?,
            kick,
            _permit: permit,
            is_connected: false,
            has_memory: false,
            has_log: false,
            logs: None,
            queues: Default::default(),
            has_started: false,
            may_be_written: false,
            pending: None,
            serial: 0,
        })
    }

    /// The VM's log is another one.
    pub(in crate::device) fn log_changed(&mut self) {
        self.has_log = false;
    }

    fn next_start(&self, logs: bool) -> Option<Step> {
        self.start?;
        if !self.is_connected {
            return Some(Step::Connect);
        }
        if logs && !self.has_log {
            return Some(Step::SetLog);
        }
        if self.logs != Some(logs) {
            return Some(Step::SetFeatures { logs });
        }
        if !self.has_memory {
            return Some(Step::SetMemory);
        }
        let mut queues = QUEUES.into_iter().zip(&self.queues);
        let (index, queue) = queues.find(|(_, queue)| !queue.runs)?;
        let base = queue.base;
        Some(Step::Start { index, base })
    }

    /// Notes that a command is sent. Returns its number.
    pub(in crate::device) fn begin(&mut self, step: Step) -> u32 {
        self.pending = Some(step);
        self.is_connected |= step == Step::Connect;
        self.serial = self.serial.wrapping_add(1);
        self.serial
    }

    /// Handles the answer to the command with this number.
    pub(in crate::device) fn answered(&mut self, serial: u32, reply: &DeviceReply) -> Answered {
        // A `Disconnect` has overtaken it.
        let Some(step) = self.pending.take_if(|_| serial == self.serial) else {
            return Answered::Next;
        };
        let is_done = !matches!(reply, DeviceReply::Failed(_));
        match step {
            // A device that fails to disconnect is not there.
            Step::Disconnect => {
                self.is_connected = false;
                self.queues = Default::default();
                self.next_or_unmarked()
            }
            Step::Stop(index) => self.stopped(index, reply),
            Step::Start { index, .. } if is_done => self.started(index),
            Step::Start { .. } => Answered::Failed(Reason::RINGS),
            _ if !is_done => Answered::Failed(Reason::SERVER_FAILED),
            Step::Connect => Answered::Next,
            Step::SetLog => {
                self.has_log = true;
                match self.logs {
                    Some(true) => Answered::Unmarked,
                    _ => Answered::Next,
                }
            }
            Step::SetFeatures { logs } => {
                self.logs = Some(logs);
                match logs {
                    true => Answered::Unmarked,
                    false => Answered::Next,
                }
            }
            Step::SetMemory => {
                self.has_memory = true;
                Answered::Next
            }
        }
    }

    fn queue(&mut self, index: u16) -> Option<&mut QueueState> {
        let mut queues = self.queues.iter_mut().zip(QUEUES);
        let found = queues.find(|(_, number)| *number == index);
        found.map(|(queue, _)| queue)
    }

    fn stopped(&mut self, index: u16, reply: &DeviceReply) -> Answered {
        if let Some(queue) = self.queue(index) {
            queue.runs = false;
            if let DeviceReply::Base(base) = *reply {
                queue.base = base;
                return self.next_or_unmarked();
            }
        }
        self.may_be_written |= index == RX;
        Answered::Failed(Reason::NOT_STOPPED)
    }

    /// After a stop. It may have overtaken the commands by which the device gets the VM's log: the VM is told at once
    /// that its device logs, and may stop before they are answered.
    fn next_or_unmarked(&self) -> Answered {
        match self.has_log && self.logs == Some(true) {
            true => Answered::Next,
            false => Answered::Unmarked,
        }
    }

    fn started(&mut self, index: u16) -> Answered {
        if let Some(queue) = self.queue(index) {
            queue.runs = true;
        }
        let is_first = !self.has_started && self.queues.iter().all(|queue| queue.runs);
        self.has_started |= is_first;
        match is_first {
            true => Answered::Started,
            false => Answered::Next,
        }
    }
}

#[cfg(test)]
#[path = "guests_tests.rs"]
mod tests;
