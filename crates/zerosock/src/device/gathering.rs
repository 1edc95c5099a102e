//! Small writes of the program to a guest that has many packets unread: they leave together.
//!
//! What must hold: the bytes of a connection leave in their order, behind what it has sent before and
//! in front of its end; a guest that has not posted buffers gets them when it has.

use zerosock_proto::vsock::{FlowId, ReserveError};
use zerosock_proto::wire::vsock::{HEADER_LEN, MAX_PAYLOAD};

use super::app::send_fault;
use super::events::emit;
use super::{Context, Device};
use crate::table::backend::SendFault;

impl Device {
    /// Takes the first of `bytes` to be sent with those that follow; how many.
    #[cold]
    pub(super) fn app_gather(
        &mut self,
        flow: FlowId,
        bytes: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<usize, SendFault> {
        let Some(taken) = self.gathered.push(&mut self.shard, flow, bytes) else {
            return self.send_alone(flow, bytes, cx);
        };
        if self.shard.poll_timeout().is_some_and(|at| at <= cx.now) {
            // No turn has been taken for as long as it was to wait.
            self.shard.handle_timeout(cx.now);
        }
        self.send_gathered(cx);
        match taken {
            0 => Err(SendFault::WouldBlock),
            taken => Ok(taken),
        }
    }

    /// See [`Backend::may_gather_more`](crate::table::backend::Backend::may_gather_more).
    pub(crate) fn may_gather_more(&mut self, flow: FlowId) -> Option<bool> {
        self.shard.can_coalesce_more(flow)
    }

    /// Sends one packet of as many of `bytes` as there is room for, however few.
    fn send_alone(
        &mut self,
        flow: FlowId,
        bytes: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<usize, SendFault> {
        let popped = self
            .rx
            .as_mut()
            .and_then(|rx| Some((rx.pop_if(HEADER_LEN + 1, true)?, rx)));
        let Some((chain, rx)) = popped else {
            return Err(SendFault::WouldBlock);
        };
        let room = (chain.writable_len() as usize - HEADER_LEN).min(MAX_PAYLOAD as usize);
        let max = bytes.len().min(room) as u32;
        let header = self.shard.reserve(flow, max).and_then(|reservation| {
            let len = reservation.len();
            // Nothing has happened since.
            let header = self.shard.commit(reservation, len, 0);
            header.map_err(|_| ReserveError::Stale)
        });
        let header = match header {
            Ok(header) => header,
            Err(error) => {
                rx.queue.unpop(chain);
                return Err(send_fault(error));
            }
        };
        let payload = bytes.get(..header.len as usize).unwrap_or(bytes);
        rx.queue
            .memory()
            .write(chain.writable(), HEADER_LEN, payload);
        emit(rx, chain, &header, payload.len());
        if let Some(app) = cx.app.as_deref_mut() {
            // Who asked counts it as gathered, which is counted when it is sent.
            app.tally.sent += payload.len() as u64;
            app.tally.packets_sent += 1;
        }
        Ok(payload.len())
    }

    /// Sends what was gathered of connections that wait no longer, while there are buffers.
    #[inline]
    pub(super) fn send_gathered(&mut self, cx: &mut Context<'_>) {
        if self.shard.has_data() {
            self.send_gathered_now(cx);
        }
    }

    #[cold]
    fn send_gathered_now(&mut self, cx: &mut Context<'_>) {
        let Some(rx) = self.rx.as_mut() else { return };
        let (mut sent, mut packets) = (0, 0);
        // What follows it, such as the end, goes with it.
        while self.shard.has_transmit() {
            let Some(chain) = rx.pop_if(HEADER_LEN + 1, true) else {
                self.starved = true;
                break;
            };
            let room = (chain.writable_len() as usize - HEADER_LEN).min(MAX_PAYLOAD as usize);
            let Some(packet) = self.shard.poll_transmit(cx.now, room as u32) else {
                rx.queue.unpop(chain);
                break;
            };
            if let Some(span) = packet.span {
                let memory = rx.queue.memory();
                self.gathered.pop(span.flow, span.len, |bytes| {
                    memory.write(chain.writable(), HEADER_LEN, bytes);
                });
                self.shard.handle_released(span);
            }
            emit(rx, chain, &packet.header, packet.header.len as usize);
            sent += u64::from(packet.header.len);
            packets += 1;
        }
        if let Some(app) = cx.app.as_deref_mut() {
            app.tally.sent += sent;
            app.tally.packets_sent += packets;
        }
    }

    /// Sends what was gathered of a connection, if there is credit and a buffer. Whether nothing is
    /// left.
    pub(super) fn hurry(&mut self, flow: FlowId, cx: &mut Context<'_>) -> bool {
        if self.gathered.has(flow) {
            self.shard.flush_coalesced(flow);
            self.send_gathered(cx);
        }
        !self.gathered.has(flow)
    }
}
