//! The message boundaries of a bridge.

use std::collections::VecDeque;

use zerosock_proto::vsock::MessageReservation;

use crate::table::sockets::MessageEnd;

/// The message boundaries of a bridge.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    /// Lengths of complete messages from the guest in `outbound`, oldest first.
    pub(in crate::device) outbound: VecDeque<(u32, MessageEnd)>,
    /// Bytes of the incomplete message that follows them in `outbound`.
    pub(in crate::device) incomplete: u32,
    /// Lengths of complete messages from a sibling.
    pub(in crate::device) inbound: VecDeque<(u32, MessageEnd)>,
    /// The message that is being sent to the guest.
    pub(in crate::device) sending: Option<Sending>,
}

/// A message of which a part was sent.
#[derive(Debug)]
pub(in crate::device) struct Sending {
    pub(in crate::device) reservation: MessageReservation,
    pub(in crate::device) left: u32,
    pub(in crate::device) ends: MessageEnd,
}

impl Messages {
    /// Bytes that the lists occupy.
    pub(in crate::device) fn cost(&self) -> usize {
        (self.outbound.len() + self.inbound.len()) * size_of::<(u32, MessageEnd)>()
    }
}
