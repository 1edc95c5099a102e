//! Payload that has arrived and is shown to a reader, or held.

use zerosock_proto::vsock::FlowId;

use super::message_end::MessageEnd;
use crate::table::transfers::ShowBounds;

/// The payload of a packet.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Arrival {
    pub(crate) flow: FlowId,
    /// Bytes. A stream has no empty packet.
    pub(crate) len: u32,
    /// What ends with it; `None`: it belongs to a stream.
    pub(crate) ends: Option<MessageEnd>,
}

/// Packets that were shown to a reader without having been held.
#[derive(Copy, Clone, Debug, Default)]
pub(crate) struct Shown {
    pub(crate) packets: u32,
    pub(crate) bytes: usize,
    /// What ended with the last one, of messages.
    pub(crate) ends: Option<MessageEnd>,
}

// Returned in registers.
const _: () = assert!(size_of::<Shown>() <= 16);

impl Arrival {
    /// Bytes of a stream.
    #[inline]
    pub(crate) fn of_stream(flow: FlowId, len: u32) -> Arrival {
        let ends = None;
        Arrival { flow, len, ends }
    }

    /// A part of a message, from a packet with these flags.
    #[inline]
    pub(crate) fn of_message(flow: FlowId, len: u32, flags: u32) -> Arrival {
        let ends = Some(MessageEnd::from_flags(flags));
        Arrival { flow, len, ends }
    }
}

impl Shown {
    /// Whether `arrival` may be shown next to a reader of `flow` that holds nothing: the bytes of a
    /// stream, or all of a message.
    #[inline]
    pub(crate) fn takes(&self, arrival: &Arrival, flow: FlowId, bounds: ShowBounds) -> bool {
        arrival.flow == flow
            && arrival.len as usize <= bounds.bytes - self.bytes
            && (arrival.ends.is_none()
                || (arrival.len > 0 && arrival.ends != Some(MessageEnd::Nothing)))
    }

    /// Counts `arrival`, which is shown now.
    #[inline]
    pub(crate) fn count(&mut self, arrival: &Arrival) {
        self.packets += 1;
        self.bytes += arrival.len as usize;
        if arrival.ends.is_some() {
            self.ends = arrival.ends;
        }
    }
}
