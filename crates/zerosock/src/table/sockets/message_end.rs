//! Marks the ends of messages in the received parts of a connection.

use serde::{Deserialize, Serialize};
use zerosock_proto::wire::vsock::{SEQ_EOM, SEQ_EOR};

/// What the copy of a message counts for, in bytes, in addition to its length.
pub(super) const COST: usize = 64;

/// Whether a message ends with a part. Parts of a stream end none.
#[derive(Copy, Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum MessageEnd {
    #[default]
    Nothing,
    /// Ends a message.
    Message,
    /// Ends a message and a record (MSG_EOR).
    Record,
}

impl MessageEnd {
    /// Reads the flags of a packet header.
    pub(crate) fn from_flags(flags: u32) -> MessageEnd {
        match flags {
            _ if flags & SEQ_EOM == 0 => MessageEnd::Nothing,
            _ if flags & SEQ_EOR == 0 => MessageEnd::Message,
            _ => MessageEnd::Record,
        }
    }

    /// Whether a message ends here.
    pub(crate) fn any(self) -> bool {
        self != MessageEnd::Nothing
    }
}

/// What a copy with this end counts for, in bytes, in addition to its length.
pub(super) fn cost(ends: MessageEnd) -> usize {
    if ends.any() { COST } else { 0 }
}
