//! The vhost-user state of one front-end's connection. No I/O on sockets.
//!
//! [`Session::handle_message`] takes a whole message, [`Session::handle_reply`] the worker's
//! answer to a command; both return an [`Outcome`]. After [`Step::Command`] the session waits: the
//! caller handles no message before the answer. A [`Refusal`] is for the log and the counters; the
//! front-end has been answered as far as the protocol allows.
//!
//! # Invariants
//!
//! - A running queue is changed only by `SET_VRING_CALL`, `_ERR`, `_ENABLE` and `GET_VRING_BASE`. How
//!   its writes are logged is changed by `SET_LOG_BASE`, `SET_FEATURES` and `SET_VRING_ADDR` too.
//! - A command is complete, and valid as far as the control thread can tell.
//! - Every message is answered, refused, or ends the connection; none causes a panic.
//!
//! The table of requests, with their sizes, descriptors and handlers, is in `session/requests.rs`, the
//! log of written pages in `session/log.rs`, the requests of network devices in `session/network.rs`,
//! and the device status in `session/status.rs`; what a session knows of its front-end in
//! `session/state.rs`, and what the log says about the driver in `session/driver.rs`.

mod arguments;
mod driver;
mod log;
mod network;
pub(crate) mod record;
mod requests;
mod state;
mod status;

use vhost::vhost_user::message::{
    VhostUserProtocolFeatures as Protocol, VhostUserU64, VhostUserVringState,
};
use vm_memory::ByteValued;

use super::codec::{Message, encode_reply, request_name};
use super::stats::FrontendFault;
use super::{DeviceCommand, DeviceReply};
use arguments::Arguments;
use requests::Rule;
use state::{Accepted, Denied, OnDone, Pending, Queue};

pub use state::{F_EVENT_IDX, F_INDIRECT_DESC, F_LOG_ALL, F_VERSION_1, PROTOCOL_FEATURES, Session};

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
    pub fault: FrontendFault,
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

impl Session {
    /// Handles a message. Descriptors that do not go into the session or a command are dropped.
    pub fn handle_message(&mut self, message: Message) -> Outcome {
        let Message {
            request,
            need_reply,
            payload,
            fds,
            number,
        } = message;
        self.number = number;
        let rule = Rule::of(request);
        // A command is with the worker: the caller broke the protocol of this type.
        debug_assert!(self.pending.is_none());
        let result = match rule {
            None => Err((FrontendFault::Unsupported, "not supported".into())),
            Some(rule) if !self.protocol.contains(rule.feature) => {
                let text = format!("needs protocol feature {:?}", rule.feature);
                return self.refuse(
                    request,
                    need_reply,
                    false,
                    (FrontendFault::Unsupported, text),
                );
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
                let is_told = need_reply && self.protocol.contains(Protocol::REPLY_ACK);
                let must_close =
                    rule.is_some_and(|rule| rule.answered || rule.must_hold && !is_told);
                self.refuse(request, need_reply, must_close, denied)
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
                let answered = matches!(on_done, OnDone::Stop(_) | OnDone::Log(..));
                self.refuse(
                    request,
                    need_reply,
                    answered,
                    (FrontendFault::Worker, reason),
                )
            }
            (DeviceReply::Done, None) => match self.apply_change(on_done) {
                Some(answer) => Outcome {
                    step: Step::Reply(encode_reply(request, &answer)),
                    refusal: None,
                },
                None => self.acknowledge(request, need_reply),
            },
            (reply @ (DeviceReply::Done | DeviceReply::Base(_)), _) => {
                let reason = format!("the worker answered {reply:?}");
                self.refuse(
                    request,
                    need_reply,
                    stop.is_some(),
                    (FrontendFault::Worker, reason),
                )
            }
        }
    }

    /// Applies the change that the worker has carried out. Returns the request's own reply, if it has
    /// one.
    fn apply_change(&mut self, on_done: OnDone) -> Option<Vec<u8>> {
        match on_done {
            OnDone::Features(features) => {
                if (self.features ^ features) & !F_LOG_ALL != 0 {
                    self.config = self.initial_config();
                }
                self.features = features;
            }
            OnDone::Config(config) => self.config = config,
            OnDone::Mtu(mtu, config) => {
                self.mtu = Some(mtu);
                self.config = config;
            }
            OnDone::Memory(slots, end, memory) => {
                self.has_memory = true;
                self.memory = memory;
                self.slots = slots;
                self.memory_end = end;
            }
            OnDone::Log(log, answer) => {
                self.log = Some(log);
                return Some(answer);
            }
            OnDone::UsedLog(index, used_log) => {
                if let Some(queue) = self.queues.get_mut(usize::from(index)) {
                    queue.used_log = used_log;
                }
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
                self.status = 0;
                self.config = self.initial_config();
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
        None
    }

    /// "REPLY_ACK": a u64 of zero, if that was negotiated and the front-end asked for it.
    fn acknowledge(&self, request: u32, need_reply: bool) -> Outcome {
        let step = self.status(request, need_reply, 0);
        Outcome {
            step,
            refusal: None,
        }
    }

    /// Answers a refused request as far as the protocol allows. `must_close`: the request has a reply
    /// of its own, which cannot express failure, or the front-end must not go on without it.
    fn refuse(&self, request: u32, need_reply: bool, must_close: bool, denied: Denied) -> Outcome {
        let (fault, reason) = denied;
        let step = match must_close {
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
}
