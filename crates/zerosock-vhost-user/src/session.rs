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
//! The table of requests, with their sizes, descriptors and handlers, is in `session/requests.rs`;
//! what a session knows of its front-end in `session/state.rs`.

mod requests;
mod state;

use vhost::vhost_user::message::{
    VhostUserProtocolFeatures as Protocol, VhostUserU64, VhostUserVringState,
};
use vm_memory::ByteValued;

use super::codec::{Message, encode_reply, request_name};
use super::stats::Fault;
use super::{DeviceCommand, DeviceReply};
use requests::{Arguments, Rule};
use state::{Accepted, Denied, OnDone, Pending, Queue};

pub use state::{F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1, PROTOCOL_FEATURES, Session};

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

impl Session {
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

    /// Answers a refused request as far as the protocol allows. `answered`: the request has a reply
    /// of its own, which cannot express failure.
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
}
