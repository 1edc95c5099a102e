//! states (placeholder, replaced by the table)
/// Which directions.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, Default)]
pub struct How {
    /// Receiving.
    pub receive: bool,
    /// Sending.
    pub send: bool,
}
impl How {
    /// Neither direction.
    pub const NONE: How = How {
        receive: false,
        send: false,
    };
    /// Receiving.
    pub const RECEIVE: How = How {
        receive: true,
        send: false,
    };
    /// Sending.
    pub const SEND: How = How {
        receive: false,
        send: true,
    };
    /// Both directions.
    pub const BOTH: How = How {
        receive: true,
        send: true,
    };
}
/// The state of a connection.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum State {
    /// Pseudo state of a REQUEST's listener.
    Listen,
    /// REQUEST sent.
    Connecting,
    /// REQUEST received.
    Incoming,
    /// Open, apart from the directions shut.
    Established {
        /// Directions that we have shut.
        local: How,
        /// Directions that the peer has shut.
        peer: How,
    },
    /// SHUTDOWN of both directions sent.
    Closing {
        /// Directions that the peer has shut.
        peer: How,
    },
    /// No connection.
    Closed,
}
