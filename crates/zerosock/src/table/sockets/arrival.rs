//! Payload that has arrived and is shown to a reader, or held.

use zerosock_proto::vsock::FlowId;

use super::message_end::MessageEnd;
use super::messages::MessageRead;
use crate::table::transfers::{Payload, ShowBounds};

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

/// Copies the message that `show` passes to its callback to `out`; `None` if there is none.
#[inline]
pub(crate) fn read_shown(
    out: &mut [u8],
    show: impl FnOnce(ShowBounds, &mut dyn FnMut(Payload<'_>) -> bool) -> Shown,
) -> Option<MessageRead> {
    let bounds = ShowBounds {
        packets: 1,
        bytes: usize::MAX,
    };
    let mut copied = 0;
    let shown = show(bounds, &mut |payload| {
        copied = payload.copy_to(0, out);
        false
    });
    (shown.packets > 0).then_some(MessageRead {
        len: shown.bytes,
        copied,
        ends_record: shown.ends == Some(MessageEnd::Record),
    })
}

/// Copies the parts that `show` passes to its callback to `out`. Returns the bytes copied.
#[inline]
pub(crate) fn copy_shown(
    out: &mut [u8],
    show: impl FnOnce(ShowBounds, &mut dyn FnMut(Payload<'_>) -> bool) -> Shown,
) -> usize {
    let bounds = ShowBounds {
        packets: usize::MAX,
        bytes: out.len(),
    };
    let mut at = 0;
    let mut copy = |payload: Payload<'_>| {
        at += payload.copy_to(0, out.get_mut(at..).unwrap_or(&mut []));
        at < out.len()
    };
    show(bounds, &mut copy).bytes
}
