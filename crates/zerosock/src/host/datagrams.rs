//! The datagram sockets of a host: CID 2 to every device. Each call finds the device of the
//! destination, or that of a received datagram, and acts on its queues immediately.

use zerosock_proto::vsock::datagram::DatagramId;
use zerosock_proto::{Address, Cid, Instant};

use super::HostBackend;
use crate::device::datagrams::NotPut;
use crate::device::state::program::App;
use crate::table::datagrams::{DatagramBackend, DatagramFault};
use crate::table::loan_calls::LoanCalls;
use crate::table::loans::LoanOf;
use crate::table::sending::SendAccess;
use crate::table::transfers::LoanParts;
use zerosock_virtio::device::WorkerDevice;

impl HostBackend {
    /// Checks whether a datagram may be sent to `to`. Returns the source address and the device.
    #[inline]
    fn may_send_datagram(
        &mut self,
        id: DatagramId,
        to: Address,
        len: usize,
    ) -> Result<(Address, u32), DatagramFault> {
        let routes = &self.worker.shared.routes;
        let vm = match routes.device(to.cid) {
            Some(device) if routes.admit(Cid::HOST, to).is_ok() => device.number,
            _ => return Err(DatagramFault::Unreachable),
        };
        let device = self.worker.devices.get_mut(vm);
        match device.and_then(|device| device.takes_datagrams()) {
            Some(true) => {}
            Some(false) => return Err(DatagramFault::PeerUnsupported),
            None => return Err(DatagramFault::Unreachable),
        }
        let clock = self.worker.clock();
        let app = self.worker.shared.app.as_deref_mut();
        let app = app.ok_or(DatagramFault::Unknown)?;
        let from = app.inboxes.table.may_send(id, to, len, || clock.now())?;
        Ok((from, vm))
    }

    /// Registers a socket that found no buffer, to be notified when there is one. Does not give the device a turn:
    /// the caller may sleep next.
    #[cold]
    fn wait_for_datagram_room(&mut self, id: DatagramId, vm: u32) -> DatagramFault {
        self.worker.note_deadline(vm);
        if let Some(app) = self.worker.shared.app.as_deref_mut() {
            app.inboxes.table.wait_for_buffer(id);
        }
        DatagramFault::WouldBlock
    }

    fn count_sent(&mut self, id: DatagramId, len: usize) {
        if let Some(app) = self.worker.shared.app.as_deref_mut() {
            // The datagram is in the receiver's buffers already, so nothing is in flight.
            app.inboxes.table.sent(id, len as u32, false);
        }
    }

    /// Sends due flow-control messages of datagram sockets.
    #[inline]
    pub(super) fn send_flow_control(&mut self) {
        if self
            .app()
            .is_some_and(|app| app.inboxes.table.has_control())
        {
            self.put_flow_control();
        }
    }

    #[cold]
    fn put_flow_control(&mut self) {
        let now = self.worker.clock().now();
        loop {
            let app = self.worker.shared.app.as_deref_mut();
            let poll = |app: &mut App| app.inboxes.table.poll_control(now, |_| true);
            let Some(message) = app.and_then(poll) else {
                return;
            };
            // The endpoint is gone and needs no message.
            let Some(device) = self.worker.shared.routes.device(message.dst.cid) else {
                continue;
            };
            let (device, mut cx) = self.worker.lend(device.number, now);
            let Some(device) = device else { continue };
            let vm = device.addr().number;
            if device.datagrams_with(&mut cx).put_control(&message) {
                self.mark_changed(vm);
            } else if let Some(app) = self.worker.shared.app.as_deref_mut() {
                let same = |to: Address| to.cid == message.dst.cid;
                app.inboxes.table.retry_control(now, same);
            }
        }
    }

    /// Ends blocks that have expired, and repeats flow-control messages that are due.
    #[inline]
    pub(super) fn end_blocks(&mut self, now: Instant) {
        if let Some(app) = self.worker.shared.app.as_deref_mut()
            && app.inboxes.table.poll_timeout().is_some_and(|at| at <= now)
        {
            app.inboxes.table.handle_timeout(now);
            self.put_flow_control();
        }
    }
}

impl DatagramBackend for HostBackend {
    #[inline]
    fn send(&mut self, id: DatagramId, to: Address, bytes: &[u8]) -> Result<(), DatagramFault> {
        let (from, vm) = self.may_send_datagram(id, to, bytes.len())?;
        let put = self.with_half(vm, |half| half.send_datagram(from, to, bytes));
        match put.ok_or(DatagramFault::Unreachable)? {
            Ok(()) => {
                self.count_sent(id, bytes.len());
                Ok(())
            }
            Err(NotPut::NoRoom) => Err(self.wait_for_datagram_room(id, vm)),
            Err(NotPut::TooLong | NotPut::NotReceived(_)) => {
                Err(DatagramFault::TooLong(bytes.len()))
            }
        }
    }

    fn loan(
        &mut self,
        id: DatagramId,
        to: Address,
        len: usize,
    ) -> Result<LoanParts, DatagramFault> {
        let (_, vm) = self.may_send_datagram(id, to, len)?;
        let parts = self.with_half(vm, |half| {
            let parts = half.lend_datagram(id, to, len);
            if matches!(parts, Err(DatagramFault::WouldBlock)) {
                half.device.want_datagram_room();
            }
            parts
        });
        let parts = parts.ok_or(DatagramFault::Unreachable)?;
        if matches!(parts, Err(DatagramFault::WouldBlock)) {
            self.wait_for_datagram_room(id, vm);
        }
        parts
    }

    fn send_loan(
        &mut self,
        index: u32,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<(), DatagramFault> {
        let Some((LoanOf::Datagram(id, to), vm)) = self.loan_at(index) else {
            return Err(DatagramFault::Unknown);
        };
        let (from, vm) = match self.may_send_datagram(id, to, len) {
            // The CID now belongs to another device.
            Ok((_, other)) if other != vm => {
                self.drop_loan(index);
                return Err(DatagramFault::Unreachable);
            }
            Ok(may) => may,
            Err(DatagramFault::WouldBlock) => return Err(DatagramFault::WouldBlock),
            Err(fault) => {
                self.drop_loan(index);
                return Err(fault);
            }
        };
        let sent = self
            .with_half(vm, |half| {
                half.send_datagram_loan(index, from, len, private)
            })
            .ok_or(DatagramFault::Unreachable)?;
        match sent {
            Ok(()) => self.count_sent(id, len),
            Err(DatagramFault::WouldBlock) => {
                self.wait_for_datagram_room(id, vm);
            }
            Err(_) => {}
        }
        sent
    }

    fn may_send(&mut self, id: DatagramId, to: Option<Address>) -> bool {
        let Some(to) = to else {
            // Without a destination only the table could say that a send would block.
            return true;
        };
        match self.may_send_datagram(id, to, 0) {
            Ok((_, vm)) => {
                let device = self.worker.devices.get_mut(vm);
                let room = device.is_none_or(|device| {
                    let room = device.has_datagram_room();
                    if !room {
                        device.want_datagram_room();
                    }
                    room
                });
                if !room {
                    self.wait_for_datagram_room(id, vm);
                }
                room
            }
            Err(fault) => fault != DatagramFault::WouldBlock,
        }
    }
}
