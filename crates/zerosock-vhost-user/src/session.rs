//! What one front-end has said so far, and what follows from its next message. No I/O on sockets.
//!
//! # How to drive it
//!
//! [`Session::handle_message`] takes a whole message, [`Session::handle_reply`] the worker's
//! answer to a command; both return a [`Turn`]. After [`Step::Command`] the session waits: no
//! message is to be handled before the answer. A [`Refusal`] is for the log and the counters; the
//! front-end has been told as far as the protocol allows.
//!
//! What must hold: a queue that runs is never changed but through `SET_VRING_CALL`, `_ERR`,
//! `_ENABLE` and `GET_VRING_BASE`; a command is whole and valid as far as this thread can tell;
//! whatever arrives is answered, refused or ends the connection, and never panics.
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

/// The protocol features that we offer to every front-end.
pub const PROTOCOL_FEATURES: Protocol = Protocol::MQ
    .union(Protocol::REPLY_ACK)
    .union(Protocol::CONFIG)
    .union(Protocol::RESET_DEVICE)
    .union(Protocol::CONFIGURE_MEM_SLOTS);

/// What is to be done next.
#[derive(Debug)]
pub enum Step {
    /// Read on.
    Next,
    /// Write this reply, then read on.
    Reply(Vec<u8>),
    /// Submit this and read no further until [`Session::handle_reply`] was called.
    Command(DeviceCommand),
    /// Close the connection: a request that must be answered cannot be.
    Close,
}

/// Why a request was not carried out.
#[derive(Debug, Eq, PartialEq)]
pub struct Refusal {
    /// Whose fault.
    pub fault: Fault,
    /// The request and the reason, for a log.
    pub text: String,
}

/// The outcome of a message or a reply.
#[derive(Debug)]
pub struct Turn {
    /// What is to be done.
    pub step: Step,
    /// Set when the request was refused.
    pub refusal: Option<Refusal>,
}

/// Fault and reason; the request's name is added by the caller.
type Denied = (Fault, String);

/// A request that was accepted.
enum Accepted {
    /// To be acknowledged if the front-end asked for that.
    Ack,
    /// The reply that belongs to this request.
    Answer(Vec<u8>),
    /// To be carried out by the worker; what follows when it has been.
    Command(DeviceCommand, Then),
}

/// What follows when the worker has carried out a command.
#[derive(Debug)]
enum Then {
    Features(u64),
    Memory(Vec<Slot>),
    Start(u16),
    Stop(u16),
    Enable(u16, bool),
    Config(Arc<[u8]>),
    Reset,
    Nothing,
}

/// The request whose command the worker has.
#[derive(Debug)]
struct Pending {
    request: u32,
    need_reply: bool,
    then: Then,
}

/// A region of the memory table; the file is kept so that the table can be mapped anew with
/// another region. Only with CONFIGURE_MEM_SLOTS.
#[derive(Clone, Debug)]
struct Slot {
    file: Arc<PeerFd>,
    region: RegionConfig,
}

/// What is known of a queue.
#[derive(Debug, Default)]
struct Queue {
    size: Option<u16>,
    /// User addresses of descriptor table, available ring, used ring.
    addresses: Option<(u64, u64, u64)>,
    base: u16,
    /// Kept while the queue runs and after, in case the front-end starts it without sending it
    /// again.
    call: Option<CallFd>,
    err: Option<CallFd>,
    enabled: bool,
    started: bool,
}

/// One front-end's side of the device, from connect to disconnect.
#[derive(Debug)]
pub struct Session {
    model: Arc<dyn DeviceModel>,
    /// The configuration space, with what the driver has written.
    config: Arc<[u8]>,
    max_queue_size: u16,
    /// Memory that can shrink is refused.
    sealed_memory: bool,
    features: u64,
    protocol: Protocol,
    has_memory: bool,
    slots: Vec<Slot>,
    /// As many as there can be.
    queues: Vec<Queue>,
    /// SET_OWNER has come.
    has_owner: bool,
    /// The back-end request channel of user-mode Linux: kept open, and not used. One that could have
    /// the front-end's own end of this connection in its queue is refused when it arrives.
    channel: Option<PeerFd>,
    account: Account,
    /// Writes to call descriptors that could make a worker wait.
    call_thread: CallThread,
    pending: Option<Pending>,
}

impl Session {
    /// A front-end that has sent nothing yet, and gets a device of this model.
    ///
    /// Descriptors and memory count against `account`, and `threads` are those that write to call
    /// descriptors of this VM, also of its earlier front-ends.
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
            channel: None,
            account,
            call_thread: CallThread::new(threads),
            pending: None,
        }
    }

    /// From now on refuses memory without F_SEAL_SHRINK (fcntl(2)), which its owner could cut off
    /// under whoever reads it.
    pub fn require_sealed_memory(&mut self) {
        self.sealed_memory = true;
    }

    /// Whether a command waits for the worker's answer.
    pub fn is_waiting(&self) -> bool {
        self.pending.is_some()
    }

    /// Handles a message. Descriptors that do not go into the session or a command are dropped.
    pub fn handle_message(&mut self, message: Message) -> Turn {
        let Message {
            request,
            need_reply,
            payload,
            fds,
        } = message;
        let rule = Rule::of(request);
        // A command is being carried out: the caller does not keep to the order.
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
            Ok(Accepted::Answer(payload)) => Turn {
                step: Step::Reply(encode_reply(request, &payload)),
                refusal: None,
            },
            Ok(Accepted::Command(command, then)) => {
                self.pending = Some(Pending {
                    request,
                    need_reply,
                    then,
                });
                Turn {
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
    pub fn handle_reply(&mut self, reply: DeviceReply) -> Turn {
        let Some(Pending {
            request,
            need_reply,
            then,
        }) = self.pending.take()
        else {
            return Turn {
                step: Step::Next,
                refusal: None,
            };
        };
        let stop = match &then {
            Then::Stop(index) => Some(*index),
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
                Turn {
                    step: Step::Reply(bytes),
                    refusal: None,
                }
            }
            (DeviceReply::Failed(reason), _) => {
                self.refuse(request, need_reply, stop.is_some(), (Fault::Worker, reason))
            }
            (DeviceReply::Done, None) => {
                self.carry_out(then);
                self.acknowledge(request, need_reply)
            }
            (reply @ (DeviceReply::Done | DeviceReply::Base(_)), _) => {
                let reason = format!("the worker answered {reply:?}");
                self.refuse(request, need_reply, stop.is_some(), (Fault::Worker, reason))
            }
        }
    }

    /// Notes what the worker has carried out.
    fn carry_out(&mut self, then: Then) {
        match then {
            Then::Features(features) => {
                if self.features != features {
                    self.config = self.model.config().into();
                }
                self.features = features;
            }
            Then::Config(config) => self.config = config,
            Then::Memory(slots) => {
                self.has_memory = true;
                self.slots = slots;
            }
            Then::Start(index) => {
                if let Some(queue) = self.queues.get_mut(usize::from(index)) {
                    queue.started = true;
                }
            }
            Then::Enable(index, enabled) => {
                if let Some(queue) = self.queues.get_mut(usize::from(index)) {
                    queue.enabled = enabled;
                }
            }
            Then::Reset => {
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
            Then::Stop(_) | Then::Nothing => {}
        }
    }

    /// "REPLY_ACK": a u64 of zero, if that was negotiated and the front-end asked for it.
    fn acknowledge(&self, request: u32, need_reply: bool) -> Turn {
        let step = self.status(request, need_reply, 0);
        Turn {
            step,
            refusal: None,
        }
    }

    /// Tells the front-end as far as it can be told. `answered`: the request has a reply of its
    /// own for which the front-end waits, and which cannot express failure.
    fn refuse(&self, request: u32, need_reply: bool, answered: bool, denied: Denied) -> Turn {
        let (fault, reason) = denied;
        let step = match answered {
            true => Step::Close,
            false => self.status(request, need_reply, 1),
        };
        let text = format!("{}: {reason}", request_name(request));
        Turn {
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
    /// channel. It sends SET_OWNER first. QEMU asks before that; it works without the channel, and
    /// would log that it was closed.
    fn offered_protocol(&self) -> Protocol {
        match self.has_owner {
            true => PROTOCOL_FEATURES | Protocol::BACKEND_REQ,
            false => PROTOCOL_FEATURES,
        }
    }

    /// What is offered to this front-end's driver.
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

    /// The first queue that runs and has bytes in common with queue `index`, started with `config`.
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

    /// Maps a table of regions; a command that hands it to the worker.
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
            Then::Memory(kept),
        ))
    }
}
