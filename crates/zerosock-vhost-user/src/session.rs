//! The vhost-user state of one front-end's connection. No I/O on sockets.
//!
//! [`Session::handle_message`] takes a whole message, [`Session::handle_reply`] the worker's
//! answer to a command; both return an [`Outcome`]. After [`Step::Command`] the session waits: the
//! caller handles no message before the answer. A [`Refusal`] is for the log and the counters; the
//! front-end has been answered as far as the protocol allows.
//!
//! # Invariants
//!
//! - A running queue is changed only by `SET_VRING_CALL`, `_ERR`, `_ENABLE` and `GET_VRING_BASE`.
//! - A command is complete, and valid as far as the control thread can tell.
//! - Every message is answered, refused, or ends the connection; none causes a panic.
//!
//! The table of requests, with their sizes, descriptors and handlers, is in `session/requests.rs`.

mod requests;

use std::sync::Arc;

use vhost::vhost_user::message::{
    VhostUserProtocolFeatures as Protocol, VhostUserU64, VhostUserVirtioFeatures,
    VhostUserVringState,
};
use vm_memory::ByteValued;
use zerosock_ring::{Memory, QueueConfig, RegionConfig};
use zerosock_sys::account::Account;
use zerosock_sys::notify::{CallFd, CallThread, ThreadCount};
use zerosock_sys::{PeerFd, memfd};

use super::codec::{Message, encode_reply, request_name};
use super::fds::MappedShare;
use super::model::DeviceModel;
use super::stats::Fault;
use super::{DeviceCommand, DeviceReply};
use requests::{Arguments, Rule};

/// VIRTIO_F_INDIRECT_DESC (virtio 1.3, 6).
pub const F_INDIRECT_DESC: u64 = 1 << 28;
/// VIRTIO_F_EVENT_IDX.
pub const F_EVENT_IDX: u64 = 1 << 29;
/// VIRTIO_F_VERSION_1.
pub const F_VERSION_1: u64 = 1 << 32;

/// The protocol features that are offered to every front-end.
pub const PROTOCOL_FEATURES: Protocol = Protocol::MQ
    .union(Protocol::REPLY_ACK)
    .union(Protocol::CONFIG)
    .union(Protocol::RESET_DEVICE)
    .union(Protocol::CONFIGURE_MEM_SLOTS);

/// What the caller does next.
#[derive(Debug)]
pub enum Step {
    /// Read the next message.
    Next,
    /// Write this reply, then read the next message.
    Reply(Vec<u8>),
    /// Submit this and read nothing until [`Session::handle_reply`] was called.
    Command(DeviceCommand),
    /// Close the connection: a request that has a reply of its own cannot be answered.
    Close,
}

/// Why a request was not carried out.
#[derive(Debug, Eq, PartialEq)]
pub struct Refusal {
    /// The kind of fault.
    pub fault: Fault,
    /// The request and the reason, for the log.
    pub text: String,
}

/// The result of handling a message or a worker's answer.
#[derive(Debug)]
pub struct Outcome {
    /// What the caller does next.
    pub step: Step,
    /// Set if the request was refused.
    pub refusal: Option<Refusal>,
}

/// Kind of fault and reason; the caller adds the request's name.
type Denied = (Fault, String);

/// A request that was accepted.
enum Accepted {
    /// Acknowledged if the front-end asked for that.
    Ack,
    /// The request's own reply.
    Answer(Vec<u8>),
    /// Carried out by the worker; the session changes as `OnDone` says after that.
    Command(DeviceCommand, OnDone),
}

/// How the session changes when the worker has carried out a command.
#[derive(Debug)]
enum OnDone {
    Features(u64),
    Memory(Vec<Slot>),
    Start(u16),
    Stop(u16),
    Enable(u16, bool),
    Config(Arc<[u8]>),
    Reset,
    Nothing,
}

/// The request that the worker is carrying out.
#[derive(Debug)]
struct Pending {
    request: u32,
    need_reply: bool,
    on_done: OnDone,
}

/// A region of the memory table. The file is kept so that the table can be mapped again when a region
/// is added or removed. Used with CONFIGURE_MEM_SLOTS only.
#[derive(Clone, Debug)]
struct Slot {
    file: Arc<PeerFd>,
    region: RegionConfig,
}

/// The state of a queue.
#[derive(Debug, Default)]
struct Queue {
    size: Option<u16>,
    /// User addresses of descriptor table, available ring, used ring.
    addresses: Option<(u64, u64, u64)>,
    base: u16,
    /// Kept after the queue stops: the front-end may start it again without sending the descriptor
    /// again.
    call: Option<CallFd>,
    err: Option<CallFd>,
    enabled: bool,
    started: bool,
}

/// The session of one front-end, from connect to disconnect.
#[derive(Debug)]
pub struct Session {
    model: Arc<dyn DeviceModel>,
    /// The configuration space, with the driver's writes.
    config: Arc<[u8]>,
    max_queue_size: u16,
    /// Refuse memory without F_SEAL_SHRINK.
    sealed_memory: bool,
    features: u64,
    protocol: Protocol,
    has_memory: bool,
    slots: Vec<Slot>,
    /// One for each queue that the model allows.
    queues: Vec<Queue>,
    /// SET_OWNER was received.
    has_owner: bool,
    /// The back-end request channel of user-mode Linux: kept open and not used. A channel with
    /// a queue that could hold the front-end's own end of this connection is refused on arrival.
    backend_channel: Option<PeerFd>,
    account: Account,
    /// Writes to call descriptors that could block a worker.
    call_thread: CallThread,
    pending: Option<Pending>,
}

impl Session {
    /// The session of a front-end that has sent nothing yet, for a device of this model.
    ///
    /// Descriptors and memory count against `account`. `threads` counts the threads that write to call
    /// descriptors of this VM, including those of its earlier front-ends.
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
            slots: Vec::new(),
            queues,
            has_owner: false,
            backend_channel: None,
            account,
            call_thread: CallThread::new(threads),
            pending: None,
        }
    }

    /// Refuses memory without F_SEAL_SHRINK (fcntl(2)) from now on: its owner could truncate it while
    /// it is read.
    pub fn require_sealed_memory(&mut self) {
        self.sealed_memory = true;
    }

    /// Whether a command awaits the worker's answer.
    pub fn is_waiting(&self) -> bool {
        self.pending.is_some()
    }

    /// Handles a message. Descriptors that do not go into the session or a command are dropped.
    pub fn handle_message(&mut self, message: Message) -> Outcome {
        let Message {
            request,
            need_reply,
            payload,
            fds,
        } = message;
        let rule = Rule::of(request);
        // A command is with the worker: the caller broke the protocol of this type.
        debug_assert!(self.pending.is_none());
        let result = match rule {
            None => Err((Fault::Unsupported, "not supported".into())),
            Some(rule) if !self.protocol.contains(rule.feature) => {
                let text = format!("needs protocol feature {:?}", rule.feature);
                return self.refuse(request, need_reply, false, (Fault::Unsupported, text));
            }
            Some(rule) => rule.check(&payload, &fds).and_then(|()| {
                (rule.handler)(
                    self,
                    Arguments {
                        payload: &payload,
                        fds,
                    },
                )
            }),
        };
        match result {
            Ok(Accepted::Ack) => self.acknowledge(request, need_reply),
            Ok(Accepted::Answer(payload)) => Outcome {
                step: Step::Reply(encode_reply(request, &payload)),
                refusal: None,
            },
            Ok(Accepted::Command(command, on_done)) => {
                self.pending = Some(Pending {
                    request,
                    need_reply,
                    on_done,
                });
                Outcome {
                    step: Step::Command(command),
                    refusal: None,
                }
            }
            Err(denied) => {
                let answered = rule.is_some_and(|rule| rule.answered);
                self.refuse(request, need_reply, answered, denied)
            }
        }
    }

    /// Handles the worker's answer to the last [`Step::Command`].
    pub fn handle_reply(&mut self, reply: DeviceReply) -> Outcome {
        let Some(Pending {
            request,
            need_reply,
            on_done,
        }) = self.pending.take()
        else {
            return Outcome {
                step: Step::Next,
                refusal: None,
            };
        };
        let stop = match &on_done {
            OnDone::Stop(index) => Some(*index),
            _ => None,
        };
        match (reply, stop) {
            (DeviceReply::Base(base), Some(index)) => {
                if let Some(queue) = self.queues.get_mut(usize::from(index)) {
                    queue.started = false;
                    queue.base = base;
                }
                let state = VhostUserVringState::new(index.into(), base.into());
                let bytes = encode_reply(request, state.as_slice());
                Outcome {
                    step: Step::Reply(bytes),
                    refusal: None,
                }
            }
            (DeviceReply::Failed(reason), _) => {
                self.refuse(request, need_reply, stop.is_some(), (Fault::Worker, reason))
            }
            (DeviceReply::Done, None) => {
                self.apply_change(on_done);
                self.acknowledge(request, need_reply)
            }
            (reply @ (DeviceReply::Done | DeviceReply::Base(_)), _) => {
                let reason = format!("the worker answered {reply:?}");
                self.refuse(request, need_reply, stop.is_some(), (Fault::Worker, reason))
            }
        }
    }

    /// Applies the change that the worker has carried out.
    fn apply_change(&mut self, on_done: OnDone) {
        match on_done {
            OnDone::Features(features) => {
                if self.features != features {
                    self.config = self.model.config().into();
                }
                self.features = features;
            }
            OnDone::Config(config) => self.config = config,
            OnDone::Memory(slots) => {
                self.has_memory = true;
                self.slots = slots;
            }
            OnDone::Start(index) => {
                if let Some(queue) = self.queues.get_mut(usize::from(index)) {
                    queue.started = true;
                }
            }
            OnDone::Enable(index, enabled) => {
                if let Some(queue) = self.queues.get_mut(usize::from(index)) {
                    queue.enabled = enabled;
                }
            }
            OnDone::Reset => {
                self.config = self.model.config().into();
                for queue in &mut self.queues {
                    let (call, err) = (queue.call.take(), queue.err.take());
                    *queue = Queue {
                        call,
                        err,
                        ..Queue::default()
                    };
                }
            }
            OnDone::Stop(_) | OnDone::Nothing => {}
        }
    }

    /// "REPLY_ACK": a u64 of zero, if that was negotiated and the front-end asked for it.
    fn acknowledge(&self, request: u32, need_reply: bool) -> Outcome {
        let step = self.status(request, need_reply, 0);
        Outcome {
            step,
            refusal: None,
        }
    }

    /// Answers a refused request as far as the protocol allows. `answered`: the request has a reply of
    /// its own, which cannot express failure.
    fn refuse(&self, request: u32, need_reply: bool, answered: bool, denied: Denied) -> Outcome {
        let (fault, reason) = denied;
        let step = match answered {
            true => Step::Close,
            false => self.status(request, need_reply, 1),
        };
        let text = format!("{}: {reason}", request_name(request));
        Outcome {
            step,
            refusal: Some(Refusal { fault, text }),
        }
    }

    fn status(&self, request: u32, need_reply: bool, value: u64) -> Step {
        match need_reply && self.protocol.contains(Protocol::REPLY_ACK) {
            true => Step::Reply(encode_reply(request, VhostUserU64::new(value).as_slice())),
            false => Step::Next,
        }
    }

    /// The protocol features that are offered to this front-end.
    ///
    /// The driver of user-mode Linux (arch/um/drivers/virtio_uml.c) has no interrupt without a back-end
    /// request channel. It sends SET_OWNER before it asks for the features; QEMU sends it after. QEMU
    /// does not need the channel, and would log that the back-end closed it.
    fn offered_protocol(&self) -> Protocol {
        match self.has_owner {
            true => PROTOCOL_FEATURES | Protocol::BACKEND_REQ,
            false => PROTOCOL_FEATURES,
        }
    }

    /// The virtio features that are offered to this front-end's driver.
    fn offered(&self) -> u64 {
        self.model.features() | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn queue(&mut self, index: u32) -> Result<(u16, &mut Queue), Denied> {
        let count = self.model.queues(self.features, &self.config);
        u16::try_from(index)
            .ok()
            .filter(|&index| index < count)
            .and_then(|index| Some((index, self.queues.get_mut(usize::from(index))?)))
            .ok_or_else(|| {
                (
                    Fault::Payload,
                    format!("queue {index}, but there are {count}"),
                )
            })
    }

    fn stopped_queue(&mut self, index: u32) -> Result<&mut Queue, Denied> {
        match self.queue(index)? {
            (_, queue) if queue.started => Err((
                Fault::Order,
                format!("queue {index} runs and cannot be changed"),
            )),
            (_, queue) => Ok(queue),
        }
    }

    /// The first running queue that overlaps with queue `index`, started with `config`, in its rings.
    fn started_over(&self, index: u16, config: &QueueConfig) -> Option<u16> {
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

    fn any_started(&self) -> bool {
        self.queues.iter().any(|queue| queue.started)
    }

    /// Maps a table of regions; the command hands it to the worker.
    fn map(&self, slots: Vec<Slot>) -> Result<Accepted, Denied> {
        let mut regions = Vec::with_capacity(slots.len());
        let mut kept = Vec::new();
        let keep = self.protocol.contains(Protocol::CONFIGURE_MEM_SLOTS);
        for Slot { file, region } in slots {
            if self.sealed_memory && !memfd::is_shrink_sealed(&file) {
                let text = format!(
                    "the memory region at guest address {:#x} ({} bytes) has no F_SEAL_SHRINK, and \
                     memory that can shrink is not accepted here: give the guest a sealed memfd",
                    region.guest_addr, region.len
                );
                return Err((Fault::Unsealed, text));
            }
            if keep {
                let file = Arc::clone(&file);
                kept.push(Slot { file, region });
            }
            regions.push((file, region));
        }
        let mut bytes = 0u64;
        for (index, (file, region)) in regions.iter().enumerate() {
            let mapped = region.mapped_len(index, file);
            let mapped = mapped.map_err(|error| (Fault::Memory, error.to_string()))?;
            bytes = bytes.saturating_add(mapped);
        }
        let share = MappedShare::take(&self.account, bytes).map_err(|e| (Fault::Memory, e))?;
        let memory = Memory::map_with(regions, Some(share))
            .map_err(|error| (Fault::Memory, error.to_string()))?;
        Ok(Accepted::Command(
            DeviceCommand::SetMemory(Arc::new(memory)),
            OnDone::Memory(kept),
        ))
    }
}
