//! Sending and receiving messages on a driver's connections.
//!
//! # Invariants
//! - A message is sent completely or not at all.
//! - Parts that find no slot are queued and sent before anything else of the connection, including
//!   its shutdown.

use std::io::IoSlice;

use zerosock_proto::vsock::{CommitError, FlowId, MessageReservation, ReserveError};

use super::Driver;
use super::errors::{DriverError, SendError};
use super::queue_pairs::QueuePairId;
use super::transfer::refused;
use crate::table::outgoing::{Outgoing, Slices, end};
use crate::table::sockets::StreamId;

impl Driver {
    /// Reserves credit for a message of `len` bytes.
    pub(super) fn reserve_message(
        &mut self,
        (queue_pair, flow): (QueuePairId, FlowId),
        len: u32,
    ) -> Result<MessageReservation, SendError> {
        let mut result = self.store.queue_pairs[queue_pair]
            .shard
            .reserve_message(flow, len);
        if matches!(result, Err(ReserveError::NoCredit))
            && self.store.queue_pairs[queue_pair].shard.has_transmit()
        {
            // A pending RESPONSE must precede the data.
            let now = self.now();
            self.transmit_control_of(queue_pair, now)?;
            result = self.store.queue_pairs[queue_pair]
                .shard
                .reserve_message(flow, len);
        }
        result.map_err(refused)
    }

    /// See [`Backend::send_message`](crate::table::backend::Backend::send_message).
    pub(super) fn put_message(
        &mut self,
        stream: StreamId,
        slices: &[IoSlice<'_>],
        ends_record: bool,
    ) -> Result<bool, SendError> {
        let (queue_pair, flow) = self.sendable(stream)?;
        let mut slices = Slices::new(slices);
        let total = u32::try_from(slices.left()).map_err(|_| SendError::TooLong)?;
        // A message starts only if there is a slot for its first part.
        let of = &mut self.store.queue_pairs[queue_pair];
        let most = of.slots.tx_data.len();
        let slot = of.tx.data_slot(total.min(most));
        let Some(mut slot) = slot.map_err(DriverError::from)? else {
            self.wait_for_slot(stream);
            return Err(SendError::WouldBlock);
        };
        let mut room = match self.reserve_message((queue_pair, flow), total) {
            Ok(room) => room,
            Err(error) => {
                self.store.queue_pairs[queue_pair].tx.put_back(slot);
                return Err(error);
            }
        };
        self.loans.copied_in += u64::from(total);
        loop {
            let len = slices.left().min(most as usize);
            let slots = &self.store.queue_pairs[queue_pair].slots;
            slices.take(len, |at, bytes| {
                slots.memory.write(slots.tx_data.pieces(slot), at, bytes);
            });
            let last = end(slices.left(), ends_record);
            self.send_part(queue_pair, slot, &mut room, len as u32, last)?;
            if last.is_some() {
                return Ok(true);
            }
            let want = most.min(u32::try_from(slices.left()).unwrap_or(most));
            match self.store.queue_pairs[queue_pair]
                .tx
                .data_slot(want)
                .map_err(DriverError::from)?
            {
                Some(next) => slot = next,
                None => {
                    let rest = Outgoing::from_slices(room, slices, ends_record);
                    self.queue_rest(queue_pair, stream, rest);
                    return Ok(false);
                }
            }
        }
    }

    /// Queues the part of a message for which there is no slot.
    pub(super) fn queue_rest(&mut self, queue_pair: QueuePairId, stream: StreamId, rest: Outgoing) {
        self.store.queue_pairs[queue_pair].outgoing.push_back(rest);
        self.wait_for_slot(stream);
    }

    /// Sends the first `len` bytes of a slot as a part of a message.
    fn send_part(
        &mut self,
        queue_pair: QueuePairId,
        slot: u16,
        room: &mut MessageReservation,
        len: u32,
        last: Option<u32>,
    ) -> Result<(), SendError> {
        match self.store.queue_pairs[queue_pair]
            .shard
            .commit_part(room, len, last)
        {
            Ok(header) => Ok(self.transmit(queue_pair, slot, &header)?),
            Err(error) => {
                self.store.queue_pairs[queue_pair].tx.put_back(slot);
                Err(match error {
                    CommitError::Shutdown | CommitError::PeerShutdown => SendError::ShutDown,
                    // A connection with a queued message sends nothing else.
                    _ => SendError::Reset,
                })
            }
        }
    }

    /// Sends queued messages while there are slots. Connections take turns by message.
    pub(super) fn send_outgoing(&mut self, queue_pair: QueuePairId) {
        while let Some(mut kept) = self.store.queue_pairs[queue_pair].outgoing.pop_front() {
            // The error recurs in the next turn, which reports it.
            let most = self.store.queue_pairs[queue_pair].slots.tx_data.len() as usize;
            let len = kept.left().len().min(most);
            let Ok(Some(slot)) = self.store.queue_pairs[queue_pair].tx.data_slot(len as u32) else {
                self.store.queue_pairs[queue_pair].outgoing.push_front(kept);
                return;
            };
            let slots = &self.store.queue_pairs[queue_pair].slots;
            let bytes = kept.left().get(..len).unwrap_or(&[]);
            slots.memory.write(slots.tx_data.pieces(slot), 0, bytes);
            let last = kept.end(len);
            let sent = self.send_part(queue_pair, slot, &mut kept.room, len as u32, last);
            kept.advance(len);
            // A connection that has ended needs the rest no more.
            if sent.is_ok() && last.is_none() {
                self.store.queue_pairs[queue_pair].outgoing.push_front(kept);
            }
        }
    }
}
