//! Calls of [`super::calls`] on whole messages of a host's sockets: read, lease, send and loan.

use std::io::IoSlice;

use super::HostBackend;
use crate::device::state::loans::LoanOf;
use crate::table::sockets::{LeaseParts, MessageRead, NoLease, StreamId, read_shown};
use crate::table::transfers::{LoanParts, LoanedPart, Payload, RecvFault, SendFault};

impl HostBackend {
    pub(super) fn read_message(
        &mut self,
        id: StreamId,
        out: &mut [u8],
        peek: bool,
    ) -> Result<Option<MessageRead>, RecvFault> {
        if !peek {
            // Nothing, if the connection holds bytes.
            let show = |bounds, copy: &mut dyn FnMut(Payload<'_>) -> bool| {
                self.show_arrivals(id, bounds, copy)
            };
            if let Some(message) = read_shown(out, show) {
                if let Some(app) = self.worker.shared.app.as_deref_mut() {
                    app.sockets.count_read_message(&message);
                }
                return Ok(Some(message));
            }
        }
        let mut message = None;
        self.received(id, |sockets, store| {
            message = sockets.read_message(id, out, peek, store);
            message.is_some() && !peek
        });
        if message.is_none() {
            self.why_empty(id)?;
        }
        Ok(message)
    }

    pub(super) fn lease_message(
        &mut self,
        id: StreamId,
    ) -> Result<Option<(Vec<LeaseParts>, bool)>, RecvFault> {
        self.update_old_memory(id);
        let mut result = Err(NoLease::Empty);
        self.received(id, |sockets, store| {
            result = sockets.lease_message(id, store);
            result.is_ok()
        });
        match result {
            Ok(message) => Ok(Some(message)),
            Err(NoLease::TooMany) => Err(RecvFault::TooManyLeases),
            Err(NoLease::Empty) => self.why_empty(id).map(|()| None),
        }
    }

    pub(super) fn send_message(
        &mut self,
        id: StreamId,
        slices: &[IoSlice<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault> {
        let (vm, flow) = self.sender(id)?;
        self.with_device(vm, |device, cx| {
            device.app_send_message(id, flow, slices, ends_record, cx)
        })
        .ok_or(SendFault::Reset)?
    }

    pub(super) fn loan_message(
        &mut self,
        id: StreamId,
        len: usize,
    ) -> Result<Vec<LoanParts>, SendFault> {
        let (vm, flow) = self.sender(id)?;
        self.with_device(vm, |device, cx| device.app_loan_message(id, flow, len, cx))
            .ok_or(SendFault::Reset)?
    }

    pub(super) fn send_message_loan(
        &mut self,
        id: StreamId,
        parts: &[LoanedPart<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault> {
        let head = parts
            .first()
            .and_then(|part| self.app()?.loan_at(part.index));
        let Some((LoanOf::Message, vm)) = head else {
            return Err(SendFault::Unknown);
        };
        let fault = match self.sender(id) {
            Ok(_) if self.worker.devices.get_mut(vm).is_some() => None,
            Ok(_) => Some(SendFault::Reset),
            Err(fault) => Some(fault),
        };
        if let Some(fault) = fault {
            for part in parts {
                self.drop_loan(part.index, vm);
            }
            return Err(fault);
        }
        self.with_device(vm, |device, cx| {
            device.app_send_message_loan(id, parts, ends_record, cx)
        })
        .ok_or(SendFault::Reset)?
    }

    pub(super) fn is_sending(&self, id: StreamId) -> bool {
        let Some((vm, flow)) = self.flow_of(id) else {
            return false;
        };
        let device = self.worker.devices.get(vm);
        device.is_some_and(|device| device.is_sending(flow))
    }

    pub(super) fn may_send_message(&mut self, id: StreamId) -> bool {
        let (vm, flow) = match self.sender(id) {
            Ok(sender) => sender,
            Err(SendFault::NotConnected) => return false,
            Err(_) => return true,
        };
        let now = self.now;
        let (device, mut cx) = self.worker.lend(vm, now);
        device.is_none_or(|device| device.app_may_send(id, flow, &mut cx))
    }
}
