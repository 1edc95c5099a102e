//! Where messages end in the parts of a connection.

use zerosock_proto::wire::vsock::{SEQ_EOM, SEQ_EOR};

/// What a copied message counts for in addition to its bytes.
pub(super) const COST: usize = 64;

/// Whether a part ends a message. Parts of a stream never do.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(crate) enum Ends {
    #[default]
    Nothing,
    /// Ends a message.
    Message,
    /// Ends a message and a record (MSG_EOR).
    Record,
}

impl Ends {
    /// Reads the flags of a packet header.
    pub(crate) fn from_flags(flags: u32) -> Ends {
        match flags {
            _ if flags & SEQ_EOM == 0 => Ends::Nothing,
            _ if flags & SEQ_EOR == 0 => Ends::Message,
            _ => Ends::Record,
        }
    }

    pub(crate) fn any(self) -> bool {
        self != Ends::Nothing
    }
}

/// What a copy with this end counts for in addition to its bytes.
pub(super) fn cost(ends: Ends) -> usize {
    if ends.any() { COST } else { 0 }
}
