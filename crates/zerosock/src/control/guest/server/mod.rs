//! The server of guest endpoints: a part of the control thread's extension. It speaks with the agents in guests,
//! decides which endpoints there may be, and adds and removes their devices.
//!
//! ```text
//!  stream:      New --Register--> Attached --> Closing
//!                └--Query-----------------------^  └- Delayed: pages without their values
//!  attachment:  Queued -> Checking -> Joining -> Accepted --Start--> Starting -> Running
//!               each of these --> Ending -> Removing, which answers the stream
//! ```
//!
//! A stream is one end of a socket pair. The VM's device joins the other end to the connection of the agent, and carries
//! out the orders of this server ([`guest_orders`](crate::device::guest_orders)). Its reports come through an inbox.
//!
//! `streams` reads requests and sends answers, `attachments` carries requests out, `state` has the data of both; this
//! file handles the events of the control thread and of the VMs.
//!
//! # Invariants
//! - No call blocks.
//! - An attachment keeps its CID, its name and its memory in the VM's limits until the VM's device does not touch the
//!   pages any more and every worker has removed the endpoint's device. Then `Ended` is sent.
//! - Behind `Known(false)` no request for the attachment is granted that was on its way when the query was.
//! - The pages of one VM are checked for one request at a time, so that failures are counted before the next check.

mod attachments;
mod state;
mod streams;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::epoll::{self, EventFlags};
use zerosock_proto::Cid;
use zerosock_sys::LogLimit;
use zerosock_sys::mailbox::Mailbox;

use super::options::GuestEndpoints;
use super::wire::{Answer, Reason};
use crate::control::attach::directory::Directory;
use crate::control::registry::DeviceRegistry;
use crate::device::guest_orders::{AttachmentKey, GuestEvent, GuestOrder, GuestReports};
use state::{GuestVm, MAX_FAILURES, Stage, StreamState};
use zerosock_vhost_user::FrontendRegistry;

pub(crate) use state::{ControlContext, FIRST_KEY, GuestServer, GuestShare, TimeLimits};

impl GuestServer {
    pub(crate) fn new(
        cids: RangeInclusive<u32>,
        limits: TimeLimits,
        directory: Arc<Directory>,
    ) -> io::Result<GuestServer> {
        let (reports, inbox) = Mailbox::new()?;
        Ok(GuestServer {
            inbox,
            reports,
            vms: BTreeMap::new(),
            streams: BTreeMap::new(),
            attachments: BTreeMap::new(),
            last_stream: FIRST_KEY,
            last_attachment: 0,
            next_cid: *cids.start(),
            cids,
            limits,
            directory,
        })
    }

    /// Where the devices of VMs report.
    pub(crate) fn reports(&self) -> &GuestReports {
        &self.reports
    }

    /// Adds a VM. Its device reports here if it may have endpoints.
    pub(crate) fn add_vm(&mut self, vm: Cid, share: GuestShare) {
        let vm_state = GuestVm {
            share,
            failures: 0,
            next_check: None,
            log: LogLimit::default(),
        };
        self.vms.insert(vm, vm_state);
    }

    /// Replaces the options of a VM. Attachments stay, unless there are no options any more. Streams without an
    /// attachment end: the key may be another one.
    pub(crate) fn set_options(
        &mut self,
        vm: Cid,
        options: Option<GuestEndpoints>,
        cx: &mut ControlContext<'_>,
    ) {
        let Some(state) = self.vms.get_mut(&vm) else {
            return;
        };
        let reports = options.as_ref().map(|_| self.reports.clone());
        let (before, now) = (state.share.options.is_some(), options.is_some());
        state.share.options = options;
        if before != now {
            let order = GuestOrder::Allow(reports);
            cx.registry.order(state.share.addr, order);
        }
        self.end_streams(vm, |state| state == StreamState::New);
        if !now {
            let attachments = self.attachments.iter().filter(|(_, it)| it.vm == vm);
            let keys: Vec<AttachmentKey> = attachments.map(|(&key, _)| key).collect();
            for key in keys {
                self.end(key, Reason::REMOVED, cx);
            }
        }
    }

    /// Replaces the groups of a VM's endpoints. Does not publish the routes.
    pub(crate) fn set_groups(&mut self, vm: Cid, groups: &[String], registry: &mut DeviceRegistry) {
        if let Some(state) = self.vms.get_mut(&vm) {
            state.share.groups = groups.to_vec();
        }
        for attachment in self.attachments.values().filter(|it| it.vm == vm) {
            registry.set_groups(attachment.cid, groups);
        }
    }

    /// Whether the device of a VM may still use pages of an endpoint.
    pub(crate) fn has_attachments(&self, vm: Cid) -> bool {
        self.attachments.values().any(|it| it.vm == vm)
    }

    /// Every worker has removed the device of a VM without attachments.
    pub(crate) fn vm_removed(&mut self, vm: Cid, cx: &mut ControlContext<'_>) {
        // Another VM with this CID is not to get them.
        self.take_reports(cx);
        self.vms.remove(&vm);
        let is_unattached = |state| matches!(state, StreamState::New | StreamState::Delayed(_));
        self.end_streams(vm, is_unattached);
    }

    /// Ends streams of a VM in states of this kind.
    fn end_streams(&mut self, vm: Cid, is_ended: impl Fn(StreamState) -> bool) {
        let streams = self.streams.iter();
        let streams = streams.filter(|(_, it)| it.vm == vm && is_ended(it.state));
        let keys: Vec<u32> = streams.map(|(&key, _)| key).collect();
        for key in keys {
            self.refuse(key, Reason::REMOVED.into());
        }
    }

    pub(crate) fn watch(&self, frontends: &FrontendRegistry) -> io::Result<()> {
        frontends.watch(self.inbox.fd(), FIRST_KEY, EventFlags::IN | EventFlags::ET)
    }

    pub(crate) fn unwatch(&self, frontends: &FrontendRegistry) {
        // Devices keep the eventfd open.
        let _ = epoll::delete(&*frontends.epoll(), self.inbox.fd());
    }

    pub(crate) fn ready(&mut self, key: u32, cx: &mut ControlContext<'_>) {
        match key {
            FIRST_KEY => self.take_reports(cx),
            key => self.serve(key, cx),
        }
    }

    fn take_reports(&mut self, cx: &mut ControlContext<'_>) {
        let reports: Vec<_> = self.inbox.drain().collect();
        for (vm, event) in reports {
            self.take_report(vm, event, cx);
        }
    }

    fn take_report(&mut self, vm: Cid, event: GuestEvent, cx: &mut ControlContext<'_>) {
        match event {
            GuestEvent::Stream(socket) => self.open(vm, socket, cx),
            GuestEvent::Checked { key, result } => self.checked(key, result, cx),
            GuestEvent::Started { key } => self.started(key, cx),
            GuestEvent::Ended { key, reason } => self.ended(key, reason, cx),
            GuestEvent::Reset => {
                let Some(state) = self.vms.get_mut(&vm) else {
                    return;
                };
                let failures = std::mem::take(&mut state.failures);
                state.next_check = None;
                if failures >= MAX_FAILURES
                    && let Some(suppressed) = self.admit_log(vm)
                {
                    tracing::info!(%vm, suppressed, "guest endpoints: the port is open again after a reset");
                }
                self.check_next(vm, cx);
            }
        }
    }

    pub(crate) fn notice_dropped(&mut self, number: u64, cx: &mut ControlContext<'_>) {
        let found = self
            .attachments
            .iter()
            .find_map(|(&key, it)| match it.stage {
                Stage::Joining(notice) if notice == number => Some((key, None)),
                Stage::Removing(notice, reason) if notice == number => Some((key, Some(reason))),
                _ => None,
            });
        match found {
            Some((key, None)) => self.joined(key, cx),
            Some((key, Some(reason))) => self.forget(key, &Answer::Ended(reason), cx),
            None => {}
        }
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        let checks = self.vms.values().filter_map(|it| it.next_check);
        let streams = self.streams.values().filter_map(|it| it.until);
        streams.chain(checks).min()
    }

    pub(crate) fn time_passed(&mut self, now: Instant, cx: &mut ControlContext<'_>) {
        let mut due = Vec::new();
        for (&vm, state) in &mut self.vms {
            due.extend(state.next_check.take_if(|at| now >= *at).map(|_| vm));
        }
        for vm in due {
            self.check_next(vm, cx);
        }
        let streams = self.streams.iter();
        let streams = streams.filter(|(_, it)| it.until.is_some_and(|until| now >= until));
        let late: Vec<u32> = streams.map(|(&key, _)| key).collect();
        for key in late {
            let Some(stream) = self.streams.get(&key) else {
                continue;
            };
            match stream.state {
                StreamState::Delayed(refusal) => self.refuse(key, refusal),
                StreamState::New | StreamState::Attached(_) => {
                    self.warn(stream.vm, "an agent sent no request in time");
                    self.lose(key, cx);
                }
                StreamState::Closing => self.lose(key, cx),
            }
        }
    }

    /// Whether to log what a VM has caused: as [`LogLimit::admit`], with the limit of the VM.
    fn admit_log(&self, vm: Cid) -> Option<Option<u64>> {
        self.vms.get(&vm)?.log.admit(Instant::now())
    }

    /// Logs a fault of the guest of a VM, subject to the limit.
    fn warn(&self, vm: Cid, text: &str) {
        if let Some(suppressed) = self.admit_log(vm) {
            tracing::warn!(%vm, suppressed, "guest endpoints: {text}");
        }
    }
}
