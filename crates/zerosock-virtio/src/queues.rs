//! The virtqueues of a device and what belongs to all of them: memory, epoch, and the command of
//! the VMM that waits for buffers.
//!
//! # Invariants
//! - The rings lie in `memory`, if they run.
//! - Chains that a device has popped belong to the queue start whose epoch they were popped in.

use std::sync::Arc;

use zerosock_proto::Instant;
use zerosock_ring::{DirtyLog, InflightRecord, Memory, QueueConfig, StateMap};
use zerosock_sys::notify::{CallFd, Notifier};
use zerosock_sys::{LogLimit, PeerFd};
use zerosock_vhost_user::{DeviceCommand, FrontendLink, Reply};

use crate::ring::Ring;

/// The rings of a device, by queue index: an array, or a struct with a name for each ring.
pub trait Rings: Default {
    /// The slot of ring `index`; `None` if the device has no such queue.
    fn slot(&mut self, index: u16) -> Option<&mut Option<Ring>>;

    /// All slots, in the order of the queues.
    fn slots(&mut self) -> impl Iterator<Item = &mut Option<Ring>>;

    /// The rings that run.
    fn running(&mut self) -> impl Iterator<Item = &mut Ring> {
        self.slots().flatten()
    }
}

impl<const N: usize> Rings for [Option<Ring>; N]
where
    [Option<Ring>; N]: Default,
{
    fn slot(&mut self, index: u16) -> Option<&mut Option<Ring>> {
        self.get_mut(usize::from(index))
    }

    fn slots(&mut self) -> impl Iterator<Item = &mut Option<Ring>> {
        self.iter_mut()
    }
}

/// The virtqueues of a device, and what belongs to all of them. The device owns it; [`command`]
/// changes it.
///
/// [`command`]: crate::command
#[derive(Debug)]
pub struct QueueSet<R> {
    /// The rings that run.
    pub rings: R,
    /// The guest's memory, if the front-end has sent a memory table.
    pub memory: Option<Arc<Memory>>,
    /// What the front-end has set for the log of written pages.
    pub(crate) logging: Logging,
    /// The record of chains in flight of each queue; empty: there is none.
    pub(crate) records: Vec<InflightRecord>,
    /// The connection of the front-end, if there is one.
    pub link: Option<FrontendLink>,
    /// Number of the last queue start. A chain that returns late carries the epoch of its queue.
    pub epoch: u32,
    /// The front-end has continued a queue of an earlier device since it connected.
    pub(crate) has_resumed: bool,
    /// Where each queue was stopped.
    pub(crate) stopped_at: Vec<Option<u16>>,
    /// The command that waits until the device has returned buffers, or has ended all connections.
    pub pending: Option<PendingCommand>,
    /// The device ends the connections of its driver for the pending command, a part in each turn.
    pub(crate) is_resetting: bool,
    /// When the device stops waiting for buffers that the command needs, and drops the front-end.
    pub(crate) deadline: Option<Instant>,
    /// When to query the device for these buffers again.
    pub(crate) recheck_at: Option<Instant>,
    /// Limits the log lines that the driver can cause.
    pub(crate) log: Arc<LogLimit>,
}

/// What the front-end has set for the log of written pages.
#[derive(Debug, Default)]
pub(crate) struct Logging {
    /// The last log that was sent.
    log: Option<Arc<DirtyLog>>,
    /// The device marks in it what it writes (VHOST_F_LOG_ALL).
    is_on: bool,
    /// Queues have run, with logging on, before the log was sent: the next log gets all pages marked.
    has_missed: bool,
}

impl Logging {
    /// The log of the rings.
    fn active(&self) -> Option<Arc<DirtyLog>> {
        self.log.clone().filter(|_| self.is_on)
    }
}

/// A command that waits until the device has returned buffers, or has ended all connections.
#[derive(Debug)]
pub enum PendingCommand {
    /// Stop the queue with this index.
    Stop(u16, Reply),
    /// Use another memory.
    Memory(Arc<Memory>, Reply),
    /// Reset the device.
    Reset(Reply),
    /// Forget the driver before, then start a queue for the next one.
    Restart(Box<QueueStart>, Reply),
    /// End the connections of a driver: its queues have been stopped for too long. A command that arrives
    /// meanwhile is carried out afterwards.
    Forget(Option<Box<(DeviceCommand, Reply)>>),
    /// Stop all queues: the front-end has gone, or the device has given it up.
    Disconnect {
        /// The answer to the control thread; `None`: it does not wait.
        reply: Option<Reply>,
        /// The command that was pending before. It fails when this one is done.
        failed: Option<Box<PendingCommand>>,
    },
}

/// A request to start a queue.
#[derive(Debug)]
pub struct QueueStart {
    pub(crate) index: u16,
    pub(crate) config: QueueConfig,
    pub(crate) kick: PeerFd,
    pub(crate) call: Option<CallFd>,
    pub(crate) err: Option<CallFd>,
    pub(crate) used_log: Option<u64>,
    pub(crate) enabled: bool,
    pub(crate) number: u64,
}

impl PendingCommand {
    /// The buffers that it needs back; `None`: it does not wait for any.
    pub(crate) fn scope(&self) -> Option<Scope> {
        match self {
            PendingCommand::Stop(index, _) => Some(Scope::Queue(*index)),
            PendingCommand::Memory(..) => Some(Scope::Memory),
            PendingCommand::Reset(_) => Some(Scope::Reset),
            PendingCommand::Restart(..)
            | PendingCommand::Forget(_)
            | PendingCommand::Disconnect { .. } => None,
        }
    }

    /// Whether it ends the connections of the driver: with the queues (true), or without (false).
    pub(crate) fn resets(&self) -> Option<bool> {
        match self {
            PendingCommand::Stop(..) | PendingCommand::Memory(..) => None,
            PendingCommand::Restart(..) | PendingCommand::Forget(_) => Some(false),
            PendingCommand::Reset(_) | PendingCommand::Disconnect { .. } => Some(true),
        }
    }
}

/// The buffers that a command needs back: see
/// [`VirtioDevice::quiesce`](crate::command::VirtioDevice::quiesce).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scope {
    /// Queue `index` stops: all its chains are completed or un-popped.
    Queue(u16),
    /// The memory is replaced: nothing reads or writes it, and all chains are completed.
    Memory,
    /// The driver resets the device: nothing reads or writes its buffers.
    Reset,
}

/// Whether a command can be carried out.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Quiesced {
    /// Yes.
    Done,
    /// Not yet: the device calls [`finish`](crate::command::finish) when buffers have been
    /// returned.
    Waits,
    /// Not yet, and no event reports when. The device is queried again every millisecond; after a
    /// second the front-end is disconnected, with this reason in the log.
    Unknown(&'static str),
}

impl<R: Rings> QueueSet<R> {
    /// No queue runs. `epoch`: the number of the first queue start is one above.
    pub fn new(epoch: u32) -> QueueSet<R> {
        QueueSet {
            rings: R::default(),
            memory: None,
            logging: Logging::default(),
            records: Vec::new(),
            link: None,
            epoch,
            has_resumed: false,
            stopped_at: Vec::new(),
            pending: None,
            is_resetting: false,
            deadline: None,
            recheck_at: None,
            log: Arc::default(),
        }
    }

    /// Keeps the records of chains in flight in this part of a state file: one of [`InflightRecord::LEN`]
    /// bytes for each queue, in the order of the queues; queues without a whole one have no record. To be
    /// called before a queue starts. The same file given to the device of a successor lets its queues
    /// continue: see `start` of [`DeviceCommand::StartQueue`].
    pub fn set_state(&mut self, mut map: StateMap) {
        self.records.clear();
        while let Some(rest) = map.split_off(InflightRecord::LEN) {
            self.records.extend(InflightRecord::new(map));
            map = rest;
        }
    }

    /// Whether a command waits for buffers.
    #[inline]
    pub fn is_command_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Whether the device ends the connections of its driver for the pending command, a part in each
    /// turn ([`VirtioDevice::reset_part`](crate::command::VirtioDevice::reset_part)).
    #[inline]
    pub fn is_resetting(&self) -> bool {
        self.is_resetting
    }

    /// The log of written pages in which the device marks what it writes; `None`: logging is off.
    pub fn log(&self) -> Option<Arc<DirtyLog>> {
        self.logging.active()
    }

    /// When [`finish`](crate::command::finish) is to be called, if a command waits.
    #[inline]
    pub fn next_timeout(&self) -> Option<Instant> {
        self.recheck_at
    }

    /// Whether the memory, or the log of what is written to it, has vanished under the device.
    pub fn is_memory_lost(&self) -> bool {
        let log = self.logging.log.as_ref().filter(|_| self.logging.is_on);
        self.memory.as_ref().is_some_and(|memory| memory.is_lost())
            || log.is_some_and(|log| log.is_lost())
    }

    /// Turns logging on or off, also for rings that run. Returns whether it has changed.
    pub(crate) fn set_logging(&mut self, is_on: bool) -> bool {
        let changed = self.logging.is_on != is_on;
        self.logging.is_on = is_on;
        if !is_on {
            self.logging.has_missed = false;
        } else if changed && self.logging.log.is_none() {
            self.logging.has_missed |= self.rings.running().next().is_some();
        }
        self.apply_log();
        changed
    }

    /// Replaces the log, also of rings that run.
    pub(crate) fn set_log(&mut self, log: Arc<DirtyLog>) {
        if std::mem::take(&mut self.logging.has_missed)
            && let Some(memory) = &self.memory
        {
            log.mark_all(memory);
        }
        self.logging.log = Some(log);
        self.apply_log();
    }

    fn apply_log(&mut self) {
        let log = self.logging.active();
        for ring in self.rings.running() {
            ring.queue.set_log(log.clone());
        }
    }

    /// Gives a ring that starts its log. The front-end may have given up the current log when it
    /// stopped the rings, and sends another one after it has started them.
    pub(crate) fn log_ring(&mut self, ring: &mut Ring) {
        if self.rings.running().next().is_none() {
            self.logging.has_missed |= self.logging.is_on;
        }
        ring.queue.set_log(self.logging.active());
    }

    /// Stops all rings for good, because the memory or a ring is unusable, and tells the front-end.
    pub fn fail(&mut self, notifier: &Notifier) {
        for ring in self.rings.running() {
            ring.fail();
            ring.publish(notifier);
        }
    }

    /// Where each queue was stopped; `None`, or less entries: the device has not stopped it.
    pub fn stops(&self) -> &[Option<u16>] {
        &self.stopped_at
    }

    /// Sets where another process has stopped each queue.
    pub fn set_stops(&mut self, stops: Vec<Option<u16>>) {
        self.stopped_at = stops;
    }

    pub(crate) fn stopped_at(&mut self, index: u16) -> &mut Option<u16> {
        let index = usize::from(index);
        if self.stopped_at.len() <= index {
            self.stopped_at.resize(index + 1, None);
        }
        &mut self.stopped_at[index]
    }
}
