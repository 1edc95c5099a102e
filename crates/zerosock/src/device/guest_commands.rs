//! The commands that the device of a VM sends to the devices of its guest endpoints, as a front-end, and their answers.
//!
//! Both go through the mailbox of the worker, so they keep their order, also with the devices that the control thread
//! adds.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use zerosock_ring::{DirtyLog, DriverLayout, QueueConfig};
use zerosock_sys::PeerFd;
use zerosock_sys::notify::{CallFd, CallThread, ThreadCount};
use zerosock_vhost_user::session::{F_EVENT_IDX, F_INDIRECT_DESC, F_LOG_ALL};
use zerosock_vhost_user::{DeviceCommand, DevicePort, DeviceReply, FrontendLink, Reply};
use zerosock_virtio::mailbox::Sender;
use zerosock_virtio::outbox::DeviceAddr;
use zerosock_virtio::worker::WorkerPort;

use super::guest_orders::{AnswerKind, AttachmentKey, GuestAnswer, GuestEvent};
use super::state::guests::{Answered, Attachment, End, Endpoint, PageCheck, Step};
use super::state::sibling_message::SiblingMessage;
use super::state::timers::Timer;
use super::{Context, Device, WorkerMessage};
use crate::registration::{Reason, Refusal, Start};

/// How often the memory of an attachment that ends is looked at.
const RECHECK: Duration = Duration::from_millis(10);

/// Where answers go: to the device of the VM.
#[derive(Clone)]
struct ReplyTo {
    key: AttachmentKey,
    vm: DeviceAddr,
    worker: Sender<WorkerMessage>,
}

impl ReplyTo {
    fn send(&self, answer: AnswerKind) {
        let key = self.key;
        let message = SiblingMessage::GuestAnswer(Box::new(GuestAnswer { key, answer }));
        let number = self.vm.number;
        // A worker that has ended has neither of the devices.
        let _ = self.worker.send(WorkerMessage::Device { number, message });
    }
}

impl Device {
    /// Sends what is to be sent next to the devices of all endpoints, and reports attachments that are over.
    pub(super) fn drive_guests(&mut self, cx: &mut Context<'_>) {
        self.drive_range(AttachmentKey(0)..=AttachmentKey(u64::MAX), cx);
    }

    /// As [`drive_guests`](Self::drive_guests), for one attachment.
    pub(super) fn drive_guest(&mut self, key: AttachmentKey, cx: &mut Context<'_>) {
        self.drive_range(key..=key, cx);
    }

    fn drive_range(&mut self, keys: RangeInclusive<AttachmentKey>, cx: &mut Context<'_>) {
        let (Some(guests), Some(worker)) = (&mut self.guests, &cx.shared.mailbox) else {
            return;
        };
        let may_run = guests.pause.allows();
        let mut over = Vec::new();
        for (&key, attachment) in guests.attachments.range_mut(keys.clone()) {
            while let Some(step) = attachment.next_step(may_run, guests.log.is_some()) {
                let reply = ReplyTo {
                    key,
                    vm: self.addr,
                    worker: worker.clone(),
                };
                let log = guests.log.as_ref();
                if let Err(reason) = attachment.send(step, reply, log, &guests.threads) {
                    attachment.end_for(reason);
                }
            }
            over.extend(
                attachment
                    .end
                    .filter(|_| attachment.is_over())
                    .map(|it| (key, it)),
            );
        }
        for (key, end) in over {
            self.remove_attachment(key, end.reason);
        }
        self.set_guest_timer(keys, cx);
    }

    /// Removes an attachment that is over, and reports that.
    fn remove_attachment(&mut self, key: AttachmentKey, reason: Reason) {
        let Some(guests) = &mut self.guests else {
            return;
        };
        let Some(attachment) = guests.attachments.remove(&key) else {
            return;
        };
        let event = match attachment.check {
            PageCheck::All(_) => GuestEvent::Checked {
                key,
                result: Err(Refusal::from(reason)),
            },
            _ => GuestEvent::Ended { key, reason },
        };
        guests.reports.send(self.cid, event);
    }

    /// Sets the timer for pages that are to be checked, and for attachments that end.
    fn set_guest_timer(&mut self, keys: RangeInclusive<AttachmentKey>, cx: &Context<'_>) {
        let Some(guests) = &mut self.guests else {
            return;
        };
        let mut attachments = guests.attachments.range(keys).map(|(_, it)| it);
        let checks = |it: &Attachment| it.check != PageCheck::Done && it.end.is_none();
        let wait = match guests.pause.allows() && attachments.clone().any(checks) {
            // In the next turn.
            true => Duration::from_nanos(1),
            false if attachments.any(|it| it.end.is_some()) => RECHECK,
            false => return,
        };
        let at = cx.now + wait;
        if guests.wakes_at.is_none_or(|current| current > at) {
            if let Some(later) = guests.wakes_at.replace(at) {
                self.timers.cancel(later, Timer::Guests);
            }
            self.timers.set(at, Timer::Guests);
        }
    }

    /// Handles an answer of the device of an endpoint.
    pub(super) fn guest_answered(&mut self, answer: GuestAnswer, cx: &mut Context<'_>) {
        let GuestAnswer { key, answer } = answer;
        let Some(guests) = &mut self.guests else {
            return;
        };
        let Some(attachment) = guests.attachments.get_mut(&key) else {
            return;
        };
        let Some(endpoint) = &mut attachment.endpoint else {
            return;
        };
        if let AnswerKind::Command(_, DeviceReply::Failed(reason)) = &answer {
            tracing::debug!(cid = %self.cid, reason, "a guest endpoint's device has failed");
        }
        let next = match answer {
            AnswerKind::Command(serial, reply) => endpoint.answered(serial, &reply),
            AnswerKind::Closed if attachment.view.is_lost() => {
                Answered::Failed(Reason::MEMORY_LOST)
            }
            AnswerKind::Closed => Answered::Failed(Reason::NOT_STOPPED),
        };
        match next {
            Answered::Next => {}
            Answered::Started => guests.reports.send(self.cid, GuestEvent::Started { key }),
            Answered::Unmarked => {
                if let Some(log) = &guests.log {
                    log.mark_all(&attachment.view);
                }
            }
            Answered::Failed(reason) => return self.end_guest(key, reason, false, cx),
        }
        self.drive_guest(key, cx);
    }
}

impl Attachment {
    fn end_for(&mut self, reason: Reason) {
        let at_once = false;
        self.end.get_or_insert(End { reason, at_once });
    }

    /// Sends a command to the device.
    fn send(
        &mut self,
        step: Step,
        reply: ReplyTo,
        log: Option<&Arc<DirtyLog>>,
        threads: &ThreadCount,
    ) -> Result<(), Reason> {
        let endpoint = self.endpoint.as_mut().ok_or(Reason::SERVER_FAILED)?;
        let start = endpoint.start.as_ref();
        let features = start.map_or(0, |start| start.features);
        let command = match step {
            Step::Connect => {
                let reply = reply.clone();
                let link = FrontendLink::to(move |_| reply.send(AnswerKind::Closed));
                DeviceCommand::Connected { link }
            }
            Step::SetLog => DeviceCommand::SetLog(log.cloned().ok_or(Reason::SERVER_FAILED)?),
            Step::SetFeatures { logs: true } => DeviceCommand::SetFeatures(features | F_LOG_ALL),
            Step::SetFeatures { logs: false } => DeviceCommand::SetFeatures(features),
            Step::SetMemory => DeviceCommand::SetMemory(Arc::clone(&self.view)),
            Step::Start { index, base } => endpoint
                .start_command(index, base, threads)
                .ok_or(Reason::SERVER_FAILED)?,
            Step::Stop(index) => DeviceCommand::StopQueue { index },
            Step::Disconnect => DeviceCommand::Disconnected,
        };
        let serial = endpoint.begin(step);
        let mut port = WorkerPort {
            number: endpoint.device.number,
            worker: reply.worker.clone(),
        };
        let answer = move |answer| reply.send(AnswerKind::Command(serial, answer));
        port.submit(command, Reply::to(answer));
        Ok(())
    }
}

impl Endpoint {
    /// `None`: a system call has failed.
    fn start_command(&self, index: u16, base: u16, threads: &ThreadCount) -> Option<DeviceCommand> {
        let start = self.start.as_ref()?;
        let kick = PeerFd::from(self.kick.try_clone().ok()?);
        let call = PeerFd::from(self.call.try_clone().ok()?);
        let call = CallFd::new(call, CallThread::new(threads)).ok()?;
        Some(DeviceCommand::StartQueue {
            index,
            config: queue_config(start, index, base)?,
            kick,
            call: Some(call),
            err: None,
            used_log: None,
            enabled: true,
        })
    }
}

/// The configuration of a queue of an endpoint. `None`: there is no such queue, or its addresses are none.
pub(super) fn queue_config(start: &Start, index: u16, base: u16) -> Option<QueueConfig> {
    let &ring = start.rings.get(usize::from(index))?;
    // Else the addresses could wrap.
    ring.checked_add(DriverLayout::bytes_needed(start.queue_size))?;
    let layout = DriverLayout::at(ring, start.queue_size);
    Some(QueueConfig {
        size: layout.size,
        desc: layout.desc,
        avail: layout.avail,
        used: layout.used,
        base,
        event_idx: start.features & F_EVENT_IDX != 0,
        indirect: start.features & F_INDIRECT_DESC != 0,
    })
}
