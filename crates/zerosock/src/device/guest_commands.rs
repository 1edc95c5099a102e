//! The commands that the device of a VM sends to the devices of its guest endpoints, as a front-end, and their answers.
//!
//! Both go through the mailbox of the worker, so they keep their order, also with the devices that the control thread
//! adds.

use std::sync::Arc;
use std::time::Duration;

use zerosock_ring::{DriverLayout, QueueConfig};
use zerosock_sys::PeerFd;
use zerosock_sys::notify::{CallFd, CallThread, ThreadCount};
use zerosock_vhost_user::session::{F_EVENT_IDX, F_INDIRECT_DESC};
use zerosock_vhost_user::{DeviceCommand, DevicePort, DeviceReply, Reply};
use zerosock_virtio::outbox::DeviceAddr;
use zerosock_virtio::worker::WorkerPort;

use super::guest_orders::{AttachmentKey, GuestAnswer, GuestEvent, Step};
use super::state::guests::{Attachment, new_eventfd};
use super::state::sibling_message::SiblingMessage;
use super::state::timers::Timer;
use super::{Context, Device, WorkerMessage};
use crate::registration::{Reason, Refusal, Start};

/// How often the memory of an attachment that ends is looked at.
const RECHECK: Duration = Duration::from_millis(10);

impl Device {
    /// Sends what is to be sent next to the devices of all endpoints, and reports attachments that are over.
    pub(super) fn drive_guests(&mut self, cx: &mut Context<'_>) {
        let (Some(guests), Some(worker)) = (&mut self.guests, &cx.shared.mailbox) else {
            return;
        };
        let may_run = guests.pause.allows();
        let number = self.addr.number;
        let mut over = Vec::new();
        for (&key, attachment) in &mut guests.attachments {
            while let Some(step) = attachment.next_step(may_run) {
                let Some((device, command)) = attachment.command(step, &guests.threads) else {
                    attachment.end.get_or_insert(Reason::SERVER_FAILED);
                    continue;
                };
                attachment.begin(step);
                let to = worker.clone();
                let answer = move |reply| {
                    let answer = GuestAnswer { key, step, reply };
                    let message = SiblingMessage::GuestAnswer(Box::new(answer));
                    // A worker that has ended has neither of the devices.
                    let _ = to.send(WorkerMessage::Device { number, message });
                };
                let mut port = WorkerPort {
                    number: device.number,
                    worker: worker.clone(),
                };
                port.submit(command, Reply::to(answer));
            }
            let end = attachment.end.filter(|_| attachment.is_over());
            over.extend(end.map(|reason| (key, reason)));
        }
        for (key, reason) in over {
            self.remove_attachment(key, reason);
        }
        self.set_guest_timer(cx);
    }

    /// Removes an attachment that is over, and reports that.
    fn remove_attachment(&mut self, key: AttachmentKey, reason: Reason) {
        let guests = self.guests.as_mut();
        let Some(attachment) = guests.and_then(|it| it.attachments.remove(&key)) else {
            return;
        };
        let result = Err(Refusal::from(reason));
        self.report_guest(match attachment.is_accepted {
            true => GuestEvent::Ended { key, reason },
            false => GuestEvent::Checked { key, result },
        });
    }

    /// Sets the timer for pages that are to be checked, and for attachments that end.
    fn set_guest_timer(&mut self, cx: &Context<'_>) {
        let Some(guests) = &mut self.guests else {
            return;
        };
        let mut attachments = guests.attachments.values();
        let wait = match guests.pause.allows() && attachments.clone().any(Attachment::has_unchecked)
        {
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
        let GuestAnswer { key, step, reply } = answer;
        if let DeviceReply::Failed(reason) = &reply {
            tracing::debug!(cid = %self.cid, reason, "a guest endpoint's device has failed");
        }
        let guests = self.guests.as_mut();
        let Some(attachment) = guests.and_then(|it| it.attachments.get_mut(&key)) else {
            return;
        };
        let answered = attachment.answered(step, &reply);
        if matches!(step, Step::Stop(_) | Step::Disconnect)
            && let Some(log) = self.queues.log()
        {
            // The endpoint's device does not mark what it writes.
            let extents = attachment.extents.iter();
            extents.for_each(|extent| log.mark(extent.addr, extent.len));
        }
        match answered {
            Ok(true) => self.report_guest(GuestEvent::Started { key }),
            Ok(false) => {}
            Err(reason) => return self.end_guest(key, reason, cx),
        }
        self.drive_guests(cx);
    }
}

impl Attachment {
    /// The device, and the command that carries out a step. `None`: a system call has failed.
    fn command(&self, step: Step, threads: &ThreadCount) -> Option<(DeviceAddr, DeviceCommand)> {
        let (device, start) = self.start.as_ref()?;
        let command = match step {
            Step::SetFeatures => DeviceCommand::SetFeatures(start.features),
            Step::SetMemory => DeviceCommand::SetMemory(Arc::clone(&self.view)),
            Step::Start { index, base } => {
                let call = PeerFd::from(self.call.try_clone().ok()?);
                DeviceCommand::StartQueue {
                    index,
                    config: queue_config(start, index, base)?,
                    // Nothing writes to it: kicks are messages.
                    kick: PeerFd::from(new_eventfd().ok()?),
                    call: Some(CallFd::new(call, CallThread::new(threads)).ok()?),
                    err: None,
                    used_log: None,
                    enabled: true,
                    start: 0,
                }
            }
            Step::Stop(index) => DeviceCommand::StopQueue { index },
            Step::Disconnect => DeviceCommand::Disconnected,
        };
        Some((*device, command))
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
