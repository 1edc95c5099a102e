//! What a session knows of its front-end, and the results of handling a request.
//!
//! The handlers in `requests` read and change it before a request is answered,
//! [`Session::handle_message`] and [`Session::handle_reply`] after that.

use std::sync::{Arc, Weak};

use vhost::vhost_user::message::{VhostUserProtocolFeatures as Protocol, VhostUserVirtioFeatures};
use zerosock_ring::{DirtyLog, Memory, QueueConfig, RegionConfig};
use zerosock_sys::account::Account;
use zerosock_sys::notify::{CallFd, CallThread, ThreadCount};
use zerosock_sys::{PeerFd, memfd};

use super::super::DeviceCommand;
use super::super::fds::{MappedShare, SentFd};
use super::super::mailbox::ConfigChange;
use super::super::model::DeviceModel;
use super::super::stats::FrontendFault;

/// VIRTIO_F_INDIRECT_DESC (virtio 1.3, 6).
pub const F_INDIRECT_DESC: u64 = 1 << 28;
/// VIRTIO_F_EVENT_IDX.
pub const F_EVENT_IDX: u64 = 1 << 29;
/// VIRTIO_F_VERSION_1.
pub const F_VERSION_1: u64 = 1 << 32;
/// VHOST_F_LOG_ALL: the device marks what it writes in the log. For the front-end, not for the driver.
pub const F_LOG_ALL: u64 = 1 << 26;

/// The features of the front-end; all others are those of its driver.
pub(super) const OF_FRONT_END: u64 = F_LOG_ALL | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// The protocol features that every device has, but for CONFIGURE_MEM_SLOTS where the model says so.
pub const PROTOCOL_FEATURES: Protocol = Protocol::MQ
    .union(Protocol::LOG_SHMFD)
    .union(Protocol::REPLY_ACK)
    .union(Protocol::CONFIG)
    .union(Protocol::RESET_DEVICE)
    .union(Protocol::CONFIGURE_MEM_SLOTS);

/// Kind of fault and reason; the caller adds the request's name.
pub(super) type Denied = (FrontendFault, String);

/// A request that was accepted.
pub(super) enum Accepted {
    /// Acknowledged if the front-end asked for that.
    Ack,
    /// The request's own reply.
    Answer(Vec<u8>),
    /// Carried out by the worker; the session changes as `OnDone` says after that.
    Command(DeviceCommand, OnDone),
}

/// How the session changes when the worker has carried out a command.
#[derive(Debug)]
pub(super) enum OnDone {
    Features(u64),
    /// The log, and the request's own reply.
    Log(Arc<DirtyLog>, Vec<u8>),
    /// Where writes into the used ring of this queue are marked.
    UsedLog(u16, Option<u64>),
    /// The slots, the guest address behind the memory, and the memory.
    Memory(Vec<Slot>, u64, Weak<Memory>),
    Start(u16),
    Stop(u16),
    Enable(u16, bool),
    Config(Arc<[u8]>),
    /// The front-end's MTU, and the configuration space with it.
    Mtu(u16, Arc<[u8]>),
    Reset,
    Nothing,
}

/// The request that the worker is carrying out.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) request: u32,
    pub(super) need_reply: bool,
    pub(super) on_done: OnDone,
}

/// A region of the memory table. The file is kept so that the table can be mapped again when a
/// region is added or removed. Used with CONFIGURE_MEM_SLOTS only.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) file: Arc<PeerFd>,
    pub(super) region: RegionConfig,
}

/// The state of a queue.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) size: Option<u16>,
    /// User addresses of descriptor table, available ring, used ring.
    pub(super) addresses: Option<(u64, u64, u64)>,
    /// The guest address by which writes into the used ring are logged; `None`: they are not.
    pub(super) used_log: Option<u64>,
    pub(super) base: u16,
    /// Kept after the queue stops: the front-end may start it again without sending the descriptor
    /// again.
    pub(super) call: Option<CallFd>,
    pub(super) err: Option<CallFd>,
    pub(super) enabled: bool,
    pub(super) started: bool,
}

/// The session of one front-end, from connect to disconnect.
#[derive(Debug)]
pub struct Session {
    pub(super) model: Arc<dyn DeviceModel>,
    /// The configuration space, with the driver's writes.
    pub(super) config: Arc<[u8]>,
    pub(super) max_queue_size: u16,
    /// Refuse memory without F_SEAL_SHRINK.
    pub(super) sealed_memory: bool,
    pub(super) features: u64,
    pub(super) protocol: Protocol,
    pub(super) has_memory: bool,
    /// The memory that the worker has. It is not kept mapped by this.
    pub(super) memory: Weak<Memory>,
    pub(super) slots: Vec<Slot>,
    /// The guest address behind the memory.
    pub(super) memory_end: u64,
    /// The last log that was sent. It is in use while the features have F_LOG_ALL.
    pub(super) log: Option<Arc<DirtyLog>>,
    /// One for each queue that the model allows.
    pub(super) queues: Vec<Queue>,
    /// The MTU that the front-end has set, in bytes.
    pub(super) mtu: Option<u16>,
    /// The device status that the front-end has set (virtio 1.3, 2.1).
    pub(super) status: u8,
    /// The last SET_FEATURES was refused.
    pub(super) features_refused: bool,
    /// SET_OWNER was received.
    pub(super) has_owner: bool,
    /// The back-end request channel of user-mode Linux. A channel with a queue that could hold the
    /// front-end's own end of this connection is refused on arrival. A pipe is kept open and not
    /// used, because a write could wait.
    pub(super) backend_channel: Option<SentFd>,
    pub(super) account: Account,
    /// Writes to call descriptors that could block a worker.
    pub(super) call_thread: CallThread,
    pub(super) pending: Option<Pending>,
    /// The number of the last request ([`Message::number`](crate::codec::Message::number)).
    pub(super) number: u64,
}

impl Session {
    /// The session of a front-end that has sent nothing yet, for a device of this model.
    ///
    /// Descriptors and memory count against `account`. `threads` counts the threads that write to
    /// call descriptors of this VM, including those of its earlier front-ends.
    pub fn new(
        model: Arc<dyn DeviceModel>,
        max_queue_size: u16,
        account: Account,
        threads: &ThreadCount,
    ) -> Session {
        let mut queues = Vec::new();
        queues.resize_with(usize::from(model.max_queues()), Queue::default);
        Session {
            config: model.config().into(),
            model,
            max_queue_size,
            sealed_memory: false,
            features: 0,
            protocol: Protocol::empty(),
            has_memory: false,
            memory: Weak::new(),
            slots: Vec::new(),
            memory_end: 0,
            log: None,
            queues,
            mtu: None,
            status: 0,
            features_refused: false,
            has_owner: false,
            backend_channel: None,
            account,
            call_thread: CallThread::new(threads),
            pending: None,
            number: 0,
        }
    }

    /// Refuses memory without F_SEAL_SHRINK (fcntl(2)) from now on: its owner could truncate it
    /// while it is read.
    pub fn require_sealed_memory(&mut self) {
        self.sealed_memory = true;
    }

    /// The configuration space of a driver that begins.
    pub(super) fn initial_config(&self) -> Arc<[u8]> {
        let mut config = self.model.config();
        if let Some(mtu) = self.mtu {
            // The model has accepted it before.
            let _ = self.model.set_mtu(&mut config, mtu);
        }
        config.into()
    }

    /// Applies a change of the device to the configuration space; bytes beyond it are left out.
    /// Returns the channel on which the front-end is to be notified, if it has one.
    pub(crate) fn change_config(&mut self, change: &ConfigChange) -> Option<&PeerFd> {
        let mut config = self.config.to_vec();
        let places = config.iter_mut().skip(change.offset);
        places.zip(&change.bytes).for_each(|(old, new)| *old = *new);
        self.config = config.into();
        let is_wanted = change.notify && self.protocol.contains(Protocol::CONFIG);
        match &self.backend_channel {
            Some(SentFd::Socket(channel)) if is_wanted => Some(channel),
            _ => None,
        }
    }

    /// Whether a command awaits the worker's answer.
    pub fn is_waiting(&self) -> bool {
        self.pending.is_some()
    }

    /// The protocol features that are offered to this front-end.
    ///
    /// The driver of user-mode Linux (arch/um/drivers/virtio_uml.c) has no interrupt without a
    /// back-end request channel. It sends SET_OWNER before it asks for the features; QEMU sends it
    /// after. QEMU does not need the channel, and would log that the back-end closed it.
    pub(super) fn offered_protocol(&self) -> Protocol {
        let mut offered = PROTOCOL_FEATURES | self.model.protocol_features();
        offered.set(Protocol::CONFIGURE_MEM_SLOTS, self.model.has_memory_slots());
        match self.has_owner {
            true => offered | Protocol::BACKEND_REQ,
            false => offered,
        }
    }

    /// The virtio features that are offered to this front-end's driver.
    pub(super) fn offered(&self) -> u64 {
        self.model.features() | OF_FRONT_END
    }

    pub(super) fn queue(&mut self, index: u32) -> Result<(u16, &mut Queue), Denied> {
        let count = self.model.queues(self.features, &self.config);
        u16::try_from(index)
            .ok()
            .filter(|&index| index < count)
            .and_then(|index| Some((index, self.queues.get_mut(usize::from(index))?)))
            .ok_or_else(|| {
                (
                    FrontendFault::Payload,
                    format!("queue {index}, but there are {count}"),
                )
            })
    }

    pub(super) fn stopped_queue(&mut self, index: u32) -> Result<&mut Queue, Denied> {
        match self.queue(index)? {
            (_, queue) if queue.started => Err((
                FrontendFault::Order,
                format!("queue {index} runs and cannot be changed"),
            )),
            (_, queue) => Ok(queue),
        }
    }

    /// The first running queue that overlaps with queue `index`, started with `config`, in its
    /// rings.
    pub(super) fn started_over(&self, index: u16, config: &QueueConfig) -> Option<u16> {
        let shares = |queue: &Queue| {
            let (Some(size), Some((desc, avail, used))) = (queue.size, queue.addresses) else {
                return false;
            };
            let other = QueueConfig {
                size,
                desc,
                avail,
                used,
                ..*config
            };
            queue.started && config.overlaps(&other)
        };
        (0..)
            .zip(&self.queues)
            .find(|&(number, queue)| number != index && shares(queue))
            .map(|(number, _)| number)
    }

    pub(super) fn any_started(&self) -> bool {
        self.queues.iter().any(|queue| queue.started)
    }

    /// Maps a table of regions; the command hands it to the worker.
    pub(super) fn map(&self, slots: Vec<Slot>) -> Result<Accepted, Denied> {
        let mut regions = Vec::with_capacity(slots.len());
        let mut kept = Vec::new();
        let keep = self.protocol.contains(Protocol::CONFIGURE_MEM_SLOTS);
        for Slot { file, region } in slots {
            self.check_seal(&file, || {
                let RegionConfig {
                    guest_addr, len, ..
                } = region;
                format!("the memory region at guest address {guest_addr:#x} ({len} bytes)")
            })?;
            if keep {
                let file = Arc::clone(&file);
                kept.push(Slot { file, region });
            }
            regions.push((file, region));
        }
        let mut bytes = 0u64;
        for (index, (file, region)) in regions.iter().enumerate() {
            let mapped = region.mapped_len(index, file);
            let mapped = mapped.map_err(|error| (FrontendFault::Memory, error.to_string()))?;
            bytes = bytes.saturating_add(mapped);
        }
        let share =
            MappedShare::take(&self.account, bytes).map_err(|e| (FrontendFault::Memory, e))?;
        let memory = Memory::map_with(regions, Some(share))
            .map_err(|error| (FrontendFault::Memory, error.to_string()))?;
        let end = memory.end();
        // A front-end that starts its queues anew during a migration sends the log after the memory.
        if self.is_logging() && self.any_started() {
            self.check_log(end)?;
        }
        let memory = Arc::new(memory);
        let on_done = OnDone::Memory(kept, end, Arc::downgrade(&memory));
        Ok(Accepted::Command(DeviceCommand::SetMemory(memory), on_done))
    }

    pub(super) fn check_seal(
        &self,
        file: &PeerFd,
        what: impl FnOnce() -> String,
    ) -> Result<(), Denied> {
        if !self.sealed_memory || memfd::is_shrink_sealed(file) {
            return Ok(());
        }
        let text = format!(
            "{} has no F_SEAL_SHRINK, and memory that can shrink is not accepted here: give the guest \
             a sealed memfd",
            what()
        );
        Err((FrontendFault::Unsealed, text))
    }
}
