//! Attachments: carries out the requests of agents, by orders to the devices of their VMs.
//!
//! # Invariants
//! - A request is checked against the limits of its VM, and takes its CID and its name, before its pages are looked at.
//! - Orders follow the answers of the device: `Start` only behind `Checked`, and nothing behind `End`.

use std::time::Instant;

use zerosock_proto::Cid;

use super::super::wire::{Answer, Reason, Refusal, Register, Start, Token};
use super::state::{Attachment, ControlContext, GuestServer, MAX_FAILURES, Stage, StreamState};
use super::streams::random;
use crate::control::attach::directory::RegisteredEndpoint;
use crate::control::registry::{DeviceRegistry, RouteEntry};
use crate::device::DriverKind;
use crate::device::factory::{Member, MemberState};
use crate::device::guest_orders::{AttachmentKey, GuestOrder};
use crate::routing::name::Name;

impl GuestServer {
    /// Carries out the first request of a stream.
    pub(super) fn register(&mut self, stream: u32, request: Register, cx: &mut ControlContext<'_>) {
        let Some((vm, nonce)) = self.streams.get(&stream).map(|it| (it.vm, it.nonce)) else {
            return;
        };
        let bytes = total(request.extents.iter().map(|it| it.len));
        let (cid, token) = match self.admit(vm, stream, &request, bytes, cx.registry) {
            Ok(admitted) => admitted,
            Err(reason) => return self.refuse(stream, reason.into()),
        };
        cx.registry.reserve(cid);
        if let Some(name) = &request.endpoint.name {
            cx.registry.take_name(name);
        }
        self.last_attachment += 1;
        let key = AttachmentKey(self.last_attachment);
        let attachment = Attachment {
            vm,
            id: request.attachment,
            cid,
            name: request.endpoint.name,
            ports: request.endpoint.ports,
            extents: request.extents,
            bytes,
            nonce,
            token,
            stream: Some(stream),
            addr: None,
            stage: Stage::Queued,
        };
        self.attachments.insert(key, attachment);
        if let Some(stream) = self.streams.get_mut(&stream) {
            (stream.state, stream.until) = (StreamState::Attached(key), None);
            stream.retired = Vec::new();
        }
        self.check_next(vm, cx);
    }

    /// Whether a VM may have this endpoint, with `bytes` of memory. Returns its CID, and what opens its doorbell.
    fn admit(
        &mut self,
        vm: Cid,
        stream: u32,
        request: &Register,
        bytes: u64,
        registry: &DeviceRegistry,
    ) -> Result<(Cid, Token), Reason> {
        let state = self.vms.get(&vm).ok_or(Reason::REMOVED)?;
        let options = state.share.options.as_ref().ok_or(Reason::REMOVED)?;
        if state.failures >= MAX_FAILURES {
            return Err(Reason::FAILED);
        }
        let attachments = self.attachments.values().filter(|it| it.vm == vm);
        let stream = self.streams.get(&stream);
        let is_retired = stream.is_some_and(|it| it.retired.contains(&request.attachment));
        if is_retired || attachments.clone().any(|it| it.id == request.attachment) {
            return Err(Reason::ATTACHMENT_IN_USE);
        }
        // Access rules name CIDs, so a guest is not to have that of a process which restarts.
        if request.endpoint.cid.is_some() {
            return Err(Reason::NOT_PERMITTED);
        }
        if let Some(name) = &request.endpoint.name {
            if !options.names.contains(name) {
                return Err(Reason::NOT_PERMITTED);
            }
            if registry.has_name(name) {
                return Err(Reason::NAME_TAKEN);
            }
        }
        let memory = total(attachments.clone().map(|it| it.bytes).chain([bytes]));
        if attachments.count() >= options.most || memory > options.memory {
            return Err(Reason::FULL);
        }
        let token = random().map_err(|_| Reason::SERVER_FAILED)?;
        let cid = registry.free_cid(&self.cids, &mut self.next_cid);
        Ok((cid.ok_or(Reason::FULL)?, Token(token)))
    }

    /// Lets a VM's device check the pages of the oldest request that waits for it.
    pub(super) fn check_next(&mut self, vm: Cid, cx: &mut ControlContext<'_>) {
        let Some(state) = self.vms.get(&vm).filter(|it| it.next_check.is_none()) else {
            return;
        };
        let is_shut = state.failures >= MAX_FAILURES;
        let mut attachments = self.attachments.iter_mut().filter(|(_, it)| it.vm == vm);
        if is_shut {
            let queued = attachments.filter(|(_, it)| it.stage == Stage::Queued);
            let queued: Vec<AttachmentKey> = queued.map(|(&key, _)| key).collect();
            for key in queued {
                self.forget(key, &Answer::Refused(Reason::FAILED.into()), cx);
            }
            return;
        }
        let order = attachments.find(|(_, it)| matches!(it.stage, Stage::Queued | Stage::Checking));
        if let Some((&key, attachment)) = order
            && attachment.stage == Stage::Queued
        {
            attachment.stage = Stage::Checking;
            let extents = std::mem::take(&mut attachment.extents);
            let order = GuestOrder::Check {
                key,
                extents,
                nonce: attachment.nonce,
                token: attachment.token,
            };
            cx.registry.order(state.share.addr, order);
        }
    }

    /// The VM's device has checked the pages of an attachment.
    pub(super) fn checked(
        &mut self,
        key: AttachmentKey,
        result: Result<(), Refusal>,
        cx: &mut ControlContext<'_>,
    ) {
        let Some(attachment) = self.attachments.get(&key) else {
            return;
        };
        let vm = attachment.vm;
        match (attachment.stage, result) {
            (Stage::Checking, Ok(())) => {
                if let Err(reason) = self.join(key, cx) {
                    self.end(key, reason, cx);
                }
            }
            // Behind a refusal the device does not know the attachment.
            (Stage::Checking | Stage::Ending(_), Err(refusal)) => {
                self.check_failed(key, refusal, cx);
            }
            _ => {}
        }
        self.check_next(vm, cx);
    }

    fn check_failed(&mut self, key: AttachmentKey, refusal: Refusal, cx: &mut ControlContext<'_>) {
        let Some(attachment) = self.attachments.get(&key) else {
            return;
        };
        let (vm, stage) = (attachment.vm, attachment.stage);
        let is_failure = refusal.reason == Reason::FAILED;
        let until = Instant::now() + self.limits.failure;
        if is_failure && let Some(state) = self.vms.get_mut(&vm) {
            state.failures += 1;
            state.next_check = Some(until);
            self.directory.guests.page_failures.add(1);
            let failures = state.failures;
            self.warn(
                vm,
                &format!(
                    "a page has not shown its value, {failures} times by now; after {MAX_FAILURES} the port is shut until \
                     the VM is reset"
                ),
            );
        }
        let Some(stream) = self.remove(key, cx) else {
            return;
        };
        match (stage, self.streams.get_mut(&stream)) {
            (Stage::Ending(reason), _) => self.finish(stream, &Answer::Ended(reason)),
            (_, Some(stream)) if is_failure => {
                stream.state = StreamState::Delayed(Reason::FAILED.into());
                stream.until = Some(until);
            }
            _ => self.refuse(stream, refusal),
        }
    }

    /// Makes the endpoint's device and sends it to the workers.
    fn join(&mut self, key: AttachmentKey, cx: &mut ControlContext<'_>) -> Result<(), Reason> {
        let found = self.attachments.get_mut(&key);
        let found = found.and_then(|it| Some((self.vms.get(&it.vm)?, it)));
        let (vm, attachment) = found.ok_or(Reason::REMOVED)?;
        let share = &vm.share;
        let member = Member {
            cid: attachment.cid,
            host: share.host.outward(),
            buf_alloc: share.buf_alloc,
            service: None,
            driver: DriverKind::GuestEndpoint { vm: share.addr },
            account: share.account.clone(),
            stopped_timeout: share.stopped_timeout,
            guests: None,
            state: MemberState::default(),
        };
        let entry = RouteEntry {
            groups: &share.groups,
            ports: &attachment.ports,
            name: attachment.name.as_ref(),
        };
        let (number, notice) = cx.frontends.notice();
        let device = cx.registry.add_beside(share.addr, member, entry, &notice);
        let device = device.ok_or(Reason::SERVER_FAILED)?;
        attachment.addr = Some(device);
        attachment.stage = Stage::Joining(number);
        Ok(())
    }

    /// Every worker knows the endpoint.
    pub(super) fn joined(&mut self, key: AttachmentKey, cx: &mut ControlContext<'_>) {
        let Some(attachment) = self.attachments.get_mut(&key) else {
            return;
        };
        attachment.stage = Stage::Accepted;
        let (vm, cid, stream) = (attachment.vm, attachment.cid, attachment.stream);
        let (token, memory) = (attachment.token, attachment.bytes);
        let name = attachment.name.clone();
        if let Some(suppressed) = self.admit_log(vm) {
            let name = name.as_ref().map_or("", Name::as_str);
            tracing::info!(%cid, name, %vm, memory, suppressed, "guest endpoint attached");
        }
        let endpoint = RegisteredEndpoint {
            cid,
            name,
            vm,
            memory,
        };
        self.directory.guests.insert(key.0, endpoint);
        self.set_limit(stream, Some(Instant::now() + self.limits.start));
        if let Some(key) = stream {
            self.answer(key, &Answer::Accepted { cid, token }, cx);
        }
    }

    /// Carries out the second request of a stream.
    pub(super) fn start(&mut self, key: AttachmentKey, start: Start, cx: &mut ControlContext<'_>) {
        let Some(attachment) = self.attachments.get_mut(&key) else {
            return;
        };
        let vm = self.vms.get(&attachment.vm);
        let (Stage::Accepted, Some(device), Some(vm)) = (attachment.stage, attachment.addr, vm)
        else {
            return self.end(key, Reason::BAD_REQUEST, cx);
        };
        attachment.stage = Stage::Starting(start.features);
        let order = GuestOrder::Start { key, device, start };
        cx.registry.order(vm.share.addr, order);
        let stream = attachment.stream;
        self.set_limit(stream, None);
    }

    pub(super) fn started(&mut self, key: AttachmentKey, cx: &mut ControlContext<'_>) {
        if let Some(attachment) = self.attachments.get_mut(&key)
            && let Stage::Starting(features) = attachment.stage
        {
            attachment.stage = Stage::Running;
            if let Some(stream) = attachment.stream {
                self.answer(stream, &Answer::Started { features }, cx);
            }
        }
    }

    /// Begins the end of an attachment.
    pub(super) fn end(&mut self, key: AttachmentKey, reason: Reason, cx: &mut ControlContext<'_>) {
        let Some(attachment) = self.attachments.get_mut(&key) else {
            return;
        };
        match attachment.stage {
            Stage::Ending(_) | Stage::Removing(..) => return,
            Stage::Queued => return self.forget(key, &Answer::Ended(reason), cx),
            _ => attachment.stage = Stage::Ending(reason),
        }
        let (vm, stream) = (attachment.vm, attachment.stream);
        self.set_limit(stream, None);
        if let Some(vm) = self.vms.get(&vm) {
            let order = GuestOrder::End { key, reason };
            cx.registry.order(vm.share.addr, order);
        }
    }

    /// The VM's device does not touch the pages any more.
    pub(super) fn ended(
        &mut self,
        key: AttachmentKey,
        reason: Reason,
        cx: &mut ControlContext<'_>,
    ) {
        let Some(attachment) = self.attachments.get_mut(&key) else {
            return;
        };
        let (vm, cid) = (attachment.vm, attachment.cid);
        let Some(addr) = attachment.addr else {
            self.forget(key, &Answer::Ended(reason), cx);
            return self.check_next(vm, cx);
        };
        if matches!(attachment.stage, Stage::Removing(..)) {
            return;
        }
        let (number, notice) = cx.frontends.notice();
        attachment.stage = Stage::Removing(number, reason);
        let stream = attachment.stream;
        self.set_limit(stream, None);
        self.directory.guests.remove(key.0);
        cx.registry.remove(cid, addr, &notice);
        if let Some(suppressed) = self.admit_log(vm) {
            tracing::info!(%cid, %vm, suppressed, "guest endpoint gone: {reason}");
        }
    }

    fn set_limit(&mut self, stream: Option<u32>, until: Option<Instant>) {
        if let Some(stream) = stream.and_then(|key| self.streams.get_mut(&key)) {
            stream.until = until;
        }
    }

    /// Frees what an attachment has, and sends its stream the last answer.
    pub(super) fn forget(
        &mut self,
        key: AttachmentKey,
        answer: &Answer,
        cx: &mut ControlContext<'_>,
    ) {
        match (self.remove(key, cx), *answer) {
            (Some(stream), Answer::Refused(refusal)) => self.refuse(stream, refusal),
            (Some(stream), _) => self.finish(stream, answer),
            (None, _) => {}
        }
    }

    /// Frees what an attachment has. Returns its stream.
    fn remove(&mut self, key: AttachmentKey, cx: &mut ControlContext<'_>) -> Option<u32> {
        let attachment = self.attachments.remove(&key)?;
        cx.registry.release_cid(attachment.cid);
        if let Some(name) = &attachment.name {
            cx.registry.release_name(name);
        }
        if let Some(addr) = attachment.addr {
            cx.registry.release(addr);
        }
        attachment.stream
    }
}

/// A sum that an agent cannot make wrap.
fn total(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}
