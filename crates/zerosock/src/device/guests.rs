//! The device of a VM as the front-end of its guest endpoints: orders of the control thread, and what happens to the VM.
//!
//! # Invariants
//! - From the first GET_VRING_BASE of the VM on, no page of an endpoint is written until all queues of the VM have
//!   started where they were stopped and the pages have shown their values. A VM that starts elsewhere, or at 0, is
//!   another one.
//! - No page is written before all of them have shown their values, nor after `Ended`.
//! - Before a reset of the VM is answered, the queues of all its endpoints have stopped for good.
//! - The pages that are checked in a turn have a budget.

use zerosock_proto::Cid;
use zerosock_proto::vsock::QueuePairs;
use zerosock_ring::{DriverLayout, Extent, Memory};
use zerosock_vhost_user::session::F_VERSION_1;
use zerosock_vhost_user::{DeviceCommand, DeviceModel, DevicePort, Reply};
use zerosock_virtio::command::QueueStarted;
use zerosock_virtio::queues::Scope;
use zerosock_virtio::worker::WorkerPort;

use super::guest_commands::queue_config;
use super::guest_orders::{AttachmentKey, GuestEvent, GuestOrder};
use super::model::VsockModel;
use super::state::guests::{Attachment, Guests};
use super::state::queue_index::EVENT;
use super::{Context, Device};
use crate::registration::key::Nonce;
use crate::registration::page_value::PAGE;
use crate::registration::{Reason, Refusal, Start, Token};

/// Pages that are checked in a turn, in about a tenth of a millisecond.
const PAGES_PER_TURN: u64 = 256;

impl Device {
    /// Carries out an order of the control thread.
    pub(super) fn guest_order(&mut self, order: GuestOrder, cx: &mut Context<'_>) {
        match order {
            GuestOrder::Check {
                key,
                extents,
                nonce,
                token,
            } => match (self.begin_check(extents, nonce, token), &mut self.guests) {
                (Ok(attachment), Some(guests)) => {
                    guests.attachments.insert(key, attachment);
                    self.drive_guests(cx);
                }
                (result, _) => {
                    let result = result.map(|_| ());
                    self.report_guest(GuestEvent::Checked { key, result });
                }
            },
            GuestOrder::Start { key, device, start } => {
                let cid = self.cid;
                let Some(attachment) = self.attachment(key) else {
                    return;
                };
                if let Err(reason) = check_start(&start, attachment.view.size(), cid) {
                    return self.end_guest(key, reason, cx);
                }
                attachment.start = Some((device, start));
                self.drive_guests(cx);
            }
            GuestOrder::End { key, reason } => self.end_guest(key, reason, cx),
            GuestOrder::Allow(reports) => match (&mut self.guests, reports) {
                (Some(guests), reports) => guests.is_open = reports.is_some(),
                (None, Some(reports)) => self.guests = Some(Box::new(Guests::new(reports))),
                (None, None) => {}
            },
        }
    }

    /// Reports an event to the control thread.
    pub(super) fn report_guest(&self, event: GuestEvent) {
        if let Some(guests) = &self.guests {
            // The control thread has ended otherwise.
            let _ = guests.reports.send((self.cid, event));
        }
    }

    /// The attachment on these extents, of which the pages are still to be checked.
    fn begin_check(
        &self,
        extents: Vec<Extent>,
        nonce: Nonce,
        token: Token,
    ) -> Result<Attachment, Refusal> {
        let view = self.view_of(&extents)?;
        let permit = self.account.take_descriptors(Attachment::DESCRIPTORS);
        let permit = permit.map_err(|_| Reason::FULL)?;
        Attachment::new(extents, nonce, token, view, permit)
            .map_err(|_| Reason::SERVER_FAILED.into())
    }

    fn attachment(&mut self, key: AttachmentKey) -> Option<&mut Attachment> {
        self.guests.as_mut()?.attachments.get_mut(&key)
    }

    /// The memory of these extents, if no attachment has part of it.
    fn view_of(&self, extents: &[Extent]) -> Result<Memory, Refusal> {
        let rings = &self.queues.rings;
        let (Some(guests), Some(memory)) = (&self.guests, &self.queues.memory) else {
            return Err(Refusal::from(Reason::NOT_READY));
        };
        let runs = rings.rx.is_some() && rings.tx.is_some() || !guests.pause.allows();
        if !runs || self.queues.is_resetting() || self.queue_pairs.used != QueuePairs::ONE {
            return Err(Refusal::from(Reason::NOT_READY));
        }
        let view = Memory::of_extents(memory, extents)?;
        match guests.find_used(extents) {
            Some(index) => Err(Refusal {
                reason: Reason::IN_USE,
                index: u32::try_from(index).unwrap_or(u32::MAX),
            }),
            None => Ok(view),
        }
    }

    /// Ends an attachment, after its queues were stopped one by one.
    pub(super) fn end_guest(&mut self, key: AttachmentKey, reason: Reason, cx: &mut Context<'_>) {
        self.begin_end(key, reason, cx);
        self.drive_guests(cx);
    }

    /// Ends an attachment, for which the next command is still to be sent.
    fn begin_end(&mut self, key: AttachmentKey, reason: Reason, cx: &mut Context<'_>) {
        let Some(attachment) = self.attachment(key) else {
            return;
        };
        attachment.end.get_or_insert(reason);
        attachment.token = None;
        if let Some(doorbell) = attachment.take_doorbell(cx.poller) {
            self.bridges_with(cx).reset_bridge(doorbell);
        }
    }

    /// The bridge of the doorbell has been removed.
    pub(super) fn doorbell_closed(&mut self, key: AttachmentKey, cx: &mut Context<'_>) {
        if let Some(attachment) = self.attachment(key)
            && attachment.take_doorbell(cx.poller).is_some()
        {
            self.end_guest(key, Reason::DOORBELL_CLOSED, cx);
        }
    }

    /// A command of the VMM needs buffers back: those of the endpoints as well.
    pub(super) fn stop_guests(&mut self, scope: Scope, cx: &mut Context<'_>) {
        let Some(guests) = &mut self.guests else {
            return;
        };
        match scope {
            Scope::Queue(index) => guests.pause.queue_stops(index),
            Scope::Memory => guests.pause.replaces_memory = true,
            Scope::Reset => return self.end_all_guests(Reason::DEVICE_RESET, cx),
        }
        self.drive_guests(cx);
    }

    /// A queue of the VM has started.
    pub(super) fn guests_queue_started(
        &mut self,
        index: u16,
        started: QueueStarted,
        cx: &mut Context<'_>,
    ) {
        let Some(guests) = &mut self.guests else {
            return;
        };
        let was_stopped = !guests.pause.allows();
        let goes_on = guests.pause.queue_started(index, started);
        if !goes_on || started.base == 0 && index != EVENT {
            self.report_guest(GuestEvent::Reset);
        }
        if !goes_on {
            return self.end_all_guests(Reason::DEVICE_RESET, cx);
        }
        if was_stopped {
            self.continue_guests(cx);
        }
    }

    /// Lets the endpoints go on, once their pages have shown their values, if nothing else keeps them stopped.
    fn continue_guests(&mut self, cx: &mut Context<'_>) {
        if let Some(guests) = self.guests.as_mut().filter(|it| it.pause.allows()) {
            let attachments = guests.attachments.values_mut();
            attachments.for_each(Attachment::check_again);
        }
        self.drive_guests(cx);
    }

    /// Other memory, or none, has replaced that of the VM.
    pub(super) fn guests_memory_replaced(&mut self, cx: &mut Context<'_>) {
        let Some(guests) = &mut self.guests else {
            return;
        };
        guests.pause.replaces_memory = false;
        // A front-end that has gone leaves none.
        let Some(memory) = &self.queues.memory else {
            return;
        };
        let replaced = guests.attachments.iter_mut().filter_map(|(key, it)| {
            let is_elsewhere = it.end.is_none() && it.replace_memory(memory).is_err();
            is_elsewhere.then_some(*key)
        });
        for key in replaced.collect::<Vec<_>>() {
            self.begin_end(key, Reason::MEMORY_CHANGED, cx);
        }
        self.continue_guests(cx);
    }

    /// Ends all attachments before the VM forgets its connections. Returns true when their devices have no queues and
    /// no memory any more.
    pub(super) fn end_guests(&mut self, cx: &mut Context<'_>) -> bool {
        let reason = match self.queues.link {
            _ if self.has_lost_memory() => Reason::MEMORY_LOST,
            None => Reason::FRONTEND_GONE,
            Some(_) => Reason::DEVICE_RESET,
        };
        let attachments = self.guests.iter_mut();
        let attachments = attachments.flat_map(|it| it.attachments.values_mut());
        attachments.for_each(|it| it.ends_at_once = true);
        self.end_all_guests(reason, cx);
        let mut attachments = self.guests.iter().flat_map(|it| it.attachments.values());
        !attachments.any(|it| it.is_connected)
    }

    fn end_all_guests(&mut self, reason: Reason, cx: &mut Context<'_>) {
        let attachments = self.guests.iter().flat_map(|it| &it.attachments);
        let keys = attachments.filter_map(|(&key, it)| it.end.is_none().then_some(key));
        for key in keys.collect::<Vec<_>>() {
            self.begin_end(key, reason, cx);
        }
        self.drive_guests(cx);
    }

    /// The device is removed: its endpoints are disconnected, and nothing is reported.
    pub(super) fn detach_guests(&mut self, cx: &mut Context<'_>) {
        let (Some(guests), Some(worker)) = (self.guests.take(), &cx.shared.mailbox) else {
            return;
        };
        let Guests { attachments, .. } = *guests;
        for (device, _) in attachments.into_values().filter_map(|it| it.start) {
            let mut port = WorkerPort {
                number: device.number,
                worker: worker.clone(),
            };
            port.submit(DeviceCommand::Disconnected, Reply::to(drop));
        }
    }

    /// Checks the next pages, and looks at attachments that end.
    pub(super) fn guests_timed_out(&mut self, cx: &mut Context<'_>) {
        let Some(guests) = &mut self.guests else {
            return;
        };
        if guests.wakes_at.take_if(|at| *at <= cx.now).is_none() {
            return;
        }
        let mut budget = PAGES_PER_TURN;
        let keys: Vec<AttachmentKey> = match guests.pause.allows() {
            true => guests.attachments.keys().copied().collect(),
            false => Vec::new(),
        };
        for key in keys {
            let attachment = self.attachment(key).filter(|it| it.has_unchecked());
            let Some(attachment) = attachment else {
                continue;
            };
            let was_accepted = attachment.is_accepted;
            match attachment.check_pages(&mut budget) {
                Ok(is_done) => {
                    attachment.is_accepted |= is_done;
                    if is_done && !was_accepted {
                        let result = Ok(());
                        self.report_guest(GuestEvent::Checked { key, result });
                    }
                }
                Err(page) => {
                    let reason = self.page_is_wrong(was_accepted, page);
                    self.begin_end(key, reason, cx);
                }
            }
        }
        self.drive_guests(cx);
    }

    /// Warns of a page without its value. Returns why the attachment ends.
    fn page_is_wrong(&mut self, is_accepted: bool, page: u64) -> Reason {
        self.warn(&format!(
            "a page of a guest endpoint, at {:#x} of its memory, has not shown its value",
            page * PAGE
        ));
        match (self.queues.is_memory_lost(), is_accepted) {
            (true, _) => Reason::MEMORY_LOST,
            (false, true) => Reason::MEMORY_CHANGED,
            (false, false) => Reason::FAILED,
        }
    }
}

/// Checks what an agent has sent: the queues lie in the memory and do not overlap.
fn check_start(start: &Start, size: u64, cid: Cid) -> Result<(), Reason> {
    let model = VsockModel {
        cid,
        max_pairs: QueuePairs::ONE,
    };
    let features = start.features;
    if features & !model.features() != 0
        || features & F_VERSION_1 == 0
        || model.check_features(features).is_err()
    {
        return Err(Reason::BAD_REQUEST);
    }
    let mut configs = Vec::new();
    for index in 0..3 {
        let config = queue_config(start, index, 0).ok_or(Reason::RINGS)?;
        let end = config.desc + DriverLayout::bytes_needed(start.queue_size);
        if end > size || configs.iter().any(|other| config.overlaps(other)) {
            return Err(Reason::RINGS);
        }
        configs.push(config);
    }
    Ok(())
}
