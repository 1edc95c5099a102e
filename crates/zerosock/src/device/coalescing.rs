//! Coalesces small writes of the embedding program into larger packets while the guest has many
//! packets unread.
//!
//! # Invariants
//! - Coalesced bytes are sent in order, after earlier packets and before the end of the stream.
//! - Coalesced bytes for which there is no buffer are sent when the guest has posted one.

use zerosock_proto::vsock::{FlowId, ReserveError};
use zerosock_proto::wire::vsock::{HEADER_LEN, MAX_PAYLOAD};

use super::app::send_fault;
use super::events::emit;
use super::{Context, Device};
use crate::table::transfers::SendFault;

impl Device {
    /// Coalesces the first of `bytes` with later writes; returns how many.
    #[cold]
    pub(super) fn app_coalesce(
        &mut self,
        flow: FlowId,
        bytes: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<usize, SendFault> {
        let Some(taken) = self.coalesced.push(&mut self.shard, flow, bytes) else {
            return self.send_alone(flow, bytes, cx);
        };
        if self.shard.poll_timeout().is_some_and(|at| at <= cx.now) {
            // The coalescing delay has expired and no turn ran since.
            self.shard.handle_timeout(cx.now);
        }
        self.send_coalesced(cx);
        match taken {
            0 => Err(SendFault::WouldBlock),
            taken => Ok(taken),
        }
    }

    /// Sends one packet with as many of `bytes` as fit.
    fn send_alone(
        &mut self,
        flow: FlowId,
        bytes: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<usize, SendFault> {
        let popped = self
            .queues
            .rings
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
            // Cannot fail: nothing ran since the reservation.
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
        if let Some(app) = cx.shared.app.as_deref_mut() {
            // The caller adds these bytes to `coalesced`, which it subtracts from `sent`.
            app.tally.sent += payload.len() as u64;
            app.tally.packets_sent += 1;
        }
        Ok(payload.len())
    }

    /// Sends coalesced bytes after their delay, as far as there are buffers.
    #[inline]
    pub(super) fn send_coalesced(&mut self, cx: &mut Context<'_>) {
        if self.shard.has_data() {
            self.send_coalesced_now(cx);
        }
    }

    #[cold]
    fn send_coalesced_now(&mut self, cx: &mut Context<'_>) {
        let Some(rx) = self.queues.rings.rx.as_mut() else {
            return;
        };
        let (mut sent, mut packets) = (0, 0);
        // Later packets of the connection, such as SHUTDOWN, follow at once.
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
                self.coalesced.pop(span.flow, span.len, |bytes| {
                    memory.write(chain.writable(), HEADER_LEN, bytes);
                });
                self.shard.handle_released(span);
            }
            emit(rx, chain, &packet.header, packet.header.len as usize);
            sent += u64::from(packet.header.len);
            packets += 1;
        }
        if let Some(app) = cx.shared.app.as_deref_mut() {
            app.tally.sent += sent;
            app.tally.packets_sent += packets;
        }
    }

    /// Sends the coalesced bytes of a connection as far as there are credit and buffers.
    pub(super) fn flush_coalesced(&mut self, flow: FlowId, cx: &mut Context<'_>) {
        if self.coalesced.has(flow) {
            self.shard.flush_coalesced(flow);
            self.send_coalesced(cx);
        }
    }
}
