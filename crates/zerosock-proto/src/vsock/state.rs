//! The states of a connection, as one table.
//!
//! [`transition`] gives the next state and the action for every state and input. Nothing else
//! decides: the shard turns packets, commands and timers into [`Input`]s and performs [`Action`]s.
//! The rules are Linux's; the test beside the table has every cell, written by hand.

use super::event::{CloseReason, DropReason, RefuseReason};
use super::snapshot::{Reader, RestoreError, Writer};

/// Directions of a connection, seen from the side that shuts them down.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, Default)]
pub struct Directions {
    /// Receiving.
    pub receive: bool,
    /// Sending.
    pub send: bool,
}

impl Directions {
    /// Neither direction.
    pub const NONE: Directions = Directions {
        receive: false,
        send: false,
    };
    /// Receiving: `SHUT_RD`.
    pub const RECEIVE: Directions = Directions {
        receive: true,
        send: false,
    };
    /// Sending: `SHUT_WR`.
    pub const SEND: Directions = Directions {
        receive: false,
        send: true,
    };
    /// Both directions: `SHUT_RDWR`.
    pub const BOTH: Directions = Directions {
        receive: true,
        send: true,
    };

    /// Shutting down is permanent and cumulative.
    #[must_use]
    #[inline]
    pub const fn and(self, other: Directions) -> Directions {
        Directions {
            receive: self.receive || other.receive,
            send: self.send || other.send,
        }
    }

    /// Whether both directions are meant.
    #[inline]
    pub const fn is_both(self) -> bool {
        self.receive && self.send
    }

    /// Whether neither direction is meant.
    #[inline]
    pub const fn is_none(self) -> bool {
        !self.receive && !self.send
    }

    const fn is(self, other: Directions) -> bool {
        self.receive == other.receive && self.send == other.send
    }
}

/// The state of a connection.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum State {
    /// A REQUEST's listener; no connection is ever in it.
    Listen,
    /// REQUEST queued or sent, no answer yet.
    Connecting,
    /// REQUEST received, the caller has not decided.
    Incoming,
    /// Connected, with some directions shut down. Local BOTH: SHUTDOWN is queued behind data. Peer
    /// BOTH: received bytes are unread.
    Established {
        /// Directions that we have shut down.
        local: Directions,
        /// Directions that the peer has shut down.
        peer: Directions,
    },
    /// SHUTDOWN of both directions sent.
    Closing {
        /// Directions that the peer has shut down.
        peer: Directions,
    },
    /// No connection.
    Closed,
}

impl State {
    /// Connected, both directions open.
    pub const ESTABLISHED: State = State::Established {
        local: Directions::NONE,
        peer: Directions::NONE,
    };

    pub(crate) fn save(self, to: &mut Writer) {
        let (state, local, peer) = match self {
            State::Listen | State::Closed => (0, Directions::NONE, Directions::NONE),
            State::Connecting => (1, Directions::NONE, Directions::NONE),
            State::Incoming => (2, Directions::NONE, Directions::NONE),
            State::Established { local, peer } => (3, local, peer),
            State::Closing { peer } => (4, Directions::BOTH, peer),
        };
        to.u8(state);
        to.bits([local.receive, local.send, peer.receive, peer.send]);
    }

    pub(crate) fn load(from: &mut Reader<'_>) -> Result<State, RestoreError> {
        let state = from.u8()?;
        let [receive, send, peer_receive, peer_send] = from.bits()?;
        let local = Directions { receive, send };
        let peer = Directions {
            receive: peer_receive,
            send: peer_send,
        };
        Ok(match state {
            0 => State::Closed,
            1 => State::Connecting,
            2 => State::Incoming,
            3 => State::Established { local, peer },
            4 => State::Closing { peer },
            _ => return Err(RestoreError::Invalid("state")),
        })
    }
}

/// What can happen to a connection.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum Input {
    /// REQUEST.
    Request,
    /// REQUEST when a limit is reached.
    RequestOverCap,
    /// RESPONSE.
    Response,
    /// RST.
    Rst,
    /// SHUTDOWN.
    Shutdown {
        /// Its flags.
        how: Directions,
        /// Whether received bytes have not been consumed yet.
        unread: bool,
    },
    /// RW within the credit.
    Rw,
    /// RW above the credit.
    RwOverCredit,
    /// RW that makes a message longer than our buffer.
    RwTooLong,
    /// RW with an empty message when too many are unread.
    RwFlood,
    /// CREDIT_UPDATE.
    CreditUpdate,
    /// CREDIT_REQUEST.
    CreditRequest,
    /// INVALID.
    Invalid,
    /// An operation without a name.
    Unknown,
    /// Any packet but RST of another type than the connection's.
    TypeMismatch,
    /// The caller connects.
    Connect,
    /// The caller accepts.
    Accept,
    /// The caller rejects.
    Reject,
    /// The caller shuts down.
    Close(Directions),
    /// The caller resets.
    Reset,
    /// A SHUTDOWN with all directions that the caller has shut down was sent.
    ShutdownSent,
    /// The last received byte has been consumed.
    Drained,
    /// The connect or close timer ran out.
    TimedOut,
    /// The transport was reset.
    TransportReset,
}

/// An action for the shard.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum Action {
    /// Nothing.
    Handled,
    /// Drop the packet, no RST.
    Ignore(DropReason),
    /// Answer the packet with RST; the connection, if there is one, is unaffected.
    ResetPacket(DropReason),
    /// Make a connection and report it to the caller.
    Incoming,
    /// Queue REQUEST, start the connect timer.
    SendRequest,
    /// Queue RESPONSE.
    SendResponse,
    /// Report the connection to the caller; stop the timer.
    Connected,
    /// Deliver the payload.
    Deliver,
    /// Discard the payload and return its credit.
    Discard,
    /// Queue CREDIT_UPDATE.
    CreditUpdate,
    /// Report the directions that the peer has shut down.
    PeerShutdown,
    /// Queue SHUTDOWN behind data; when both directions are shut, start the
    /// close timer.
    SendShutdown,
    /// End without RST and handle the REQUEST as if there had been no connection.
    Supersede,
    /// The connection attempt failed: end, with RST or without.
    Refuse {
        /// Whether to send RST.
        rst: bool,
        /// Why.
        reason: RefuseReason,
    },
    /// End, with RST or without.
    End {
        /// Whether to send RST.
        rst: bool,
        /// Why.
        reason: CloseReason,
    },
    /// The command is not allowed in this state.
    WrongState,
}

const fn end(rst: bool, reason: CloseReason) -> (State, Action) {
    (State::Closed, Action::End { rst, reason })
}

const fn refuse(rst: bool, reason: RefuseReason) -> (State, Action) {
    (State::Closed, Action::Refuse { rst, reason })
}

/// The table: the next state and what to do.
pub const fn transition(state: State, input: Input) -> (State, Action) {
    use Action as A;
    use Input as I;
    use State as S;

    match (state, input) {
        // A wrong type is answered before the state is looked at (rule 3), and the connection is
        // unaffected.
        (_, I::TypeMismatch) => (state, A::ResetPacket(DropReason::TypeMismatch)),

        (S::Listen, I::Request) => (S::Incoming, A::Incoming),
        (S::Listen, I::RequestOverCap) => (S::Listen, A::ResetPacket(DropReason::OverCap)),
        (S::Closed, I::Connect) => (S::Connecting, A::SendRequest),
        (S::Listen | S::Closed, I::Rst) => (state, A::Ignore(DropReason::StrayReset)),
        (
            S::Listen | S::Closed,
            I::Request
            | I::RequestOverCap
            | I::Response
            | I::Shutdown { .. }
            | I::Rw
            | I::RwOverCredit
            | I::RwTooLong
            | I::RwFlood
            | I::CreditUpdate
            | I::CreditRequest
            | I::Invalid
            | I::Unknown,
        ) => (state, A::ResetPacket(DropReason::NoSocket)),
        (S::Listen | S::Closed, I::ShutdownSent | I::Drained | I::TimedOut | I::TransportReset) => {
            (state, A::Handled)
        }
        (S::Listen | S::Closed, I::Connect | I::Accept | I::Reject | I::Close(_) | I::Reset) => {
            (state, A::WrongState)
        }

        (S::Connecting, I::Response) => (S::ESTABLISHED, A::Connected),
        (S::Connecting, I::Invalid) => (state, A::Ignore(DropReason::Unexpected)),
        (S::Connecting, I::Rst) => refuse(false, RefuseReason::Reset),
        (
            S::Connecting,
            I::Request
            | I::RequestOverCap
            | I::Shutdown { .. }
            | I::Rw
            | I::RwOverCredit
            | I::RwTooLong
            | I::RwFlood
            | I::CreditUpdate
            | I::CreditRequest
            | I::Unknown,
        ) => refuse(true, RefuseReason::ProtocolError),
        (S::Connecting, I::Reset) => refuse(true, RefuseReason::LocalReset),
        (S::Connecting, I::TimedOut) => refuse(true, RefuseReason::TimedOut),
        (S::Connecting, I::TransportReset) => refuse(false, RefuseReason::TransportReset),
        (S::Connecting, I::ShutdownSent | I::Drained) => (state, A::Handled),
        (S::Connecting, I::Connect | I::Accept | I::Reject | I::Close(_)) => (state, A::WrongState),

        (S::Incoming, I::Accept) => (S::ESTABLISHED, A::SendResponse),
        (S::Incoming, I::Reject) => end(true, CloseReason::Rejected),
        (S::Incoming, I::Rst) => end(false, CloseReason::PeerReset),
        (S::Incoming, I::Request | I::RequestOverCap) => (S::Closed, A::Supersede),
        (
            S::Incoming,
            I::Response
            | I::Shutdown { .. }
            | I::Rw
            | I::RwOverCredit
            | I::RwTooLong
            | I::RwFlood
            | I::CreditUpdate
            | I::CreditRequest
            | I::Invalid
            | I::Unknown,
        ) => end(true, CloseReason::ProtocolError),
        (S::Incoming, I::ShutdownSent | I::Drained | I::TimedOut) => (state, A::Handled),
        (S::Incoming, I::Connect | I::Close(_)) => (state, A::WrongState),

        (S::Established { peer, .. }, I::Request | I::RequestOverCap) => {
            // Linux removes a socket from its table once the peer has shut down both directions, so
            // that the peer can use the port again.
            if peer.is_both() {
                (S::Closed, A::Supersede)
            } else {
                (state, A::Ignore(DropReason::Unexpected))
            }
        }
        (S::Established { .. }, I::Response | I::Invalid | I::Unknown) => {
            (state, A::Ignore(DropReason::Unexpected))
        }
        (S::Established { peer, .. }, I::Rst) => end(
            false,
            if peer.is_both() {
                CloseReason::PeerClosed
            } else {
                CloseReason::PeerReset
            },
        ),
        (S::Established { local, peer }, I::Shutdown { how, unread }) => {
            let all = peer.and(how);
            if all.is_both() && (!unread || local.is_both()) {
                end(true, CloseReason::PeerClosed)
            } else if all.is(peer) {
                (state, A::Handled)
            } else {
                (S::Established { local, peer: all }, A::PeerShutdown)
            }
        }
        (S::Established { local, peer }, I::Rw) => {
            if peer.send {
                end(true, CloseReason::ProtocolError)
            } else if local.receive {
                (state, A::Discard)
            } else {
                (state, A::Deliver)
            }
        }
        (S::Established { .. }, I::RwOverCredit) => end(true, CloseReason::CreditExceeded),
        (S::Established { .. }, I::RwTooLong) => end(true, CloseReason::MessageTooLong),
        (S::Established { .. }, I::RwFlood) => end(true, CloseReason::MessageFlood),
        (S::Established { .. }, I::CreditUpdate) => (state, A::Handled),
        (S::Established { peer, .. }, I::CreditRequest) => (
            state,
            if peer.is_both() {
                A::Handled
            } else {
                A::CreditUpdate
            },
        ),
        (S::Established { local, peer }, I::Close(how)) => {
            let all = local.and(how);
            if all.is_both() && peer.is_both() {
                end(true, CloseReason::PeerClosed)
            } else if all.is(local) {
                (state, A::Handled)
            } else {
                (S::Established { local: all, peer }, A::SendShutdown)
            }
        }
        (S::Established { local, peer }, I::ShutdownSent) => (
            if local.is_both() {
                S::Closing { peer }
            } else {
                state
            },
            A::Handled,
        ),
        (S::Established { peer, .. }, I::Drained) => {
            if peer.is_both() {
                end(true, CloseReason::PeerClosed)
            } else {
                (state, A::Handled)
            }
        }
        (S::Established { local, .. }, I::TimedOut) => {
            if local.is_both() {
                end(true, CloseReason::TimedOut)
            } else {
                (state, A::Handled)
            }
        }

        (S::Closing { .. }, I::Rst) => end(false, CloseReason::Finished),
        (S::Closing { peer }, I::Shutdown { how, .. }) => {
            // Both sides closed at once. Linux stays in ESTABLISHED until it has answered our RST;
            // if neither side answered, both would wait 8 s.
            let all = peer.and(how);
            if all.is_both() {
                end(true, CloseReason::Finished)
            } else {
                (S::Closing { peer: all }, A::Handled)
            }
        }
        (
            S::Closing { .. },
            I::Request
            | I::RequestOverCap
            | I::Response
            | I::Rw
            | I::RwOverCredit
            | I::RwTooLong
            | I::RwFlood
            | I::CreditUpdate
            | I::CreditRequest
            | I::Invalid
            | I::Unknown,
        ) => (state, A::Ignore(DropReason::Unexpected)),
        (S::Closing { .. }, I::TimedOut) => end(true, CloseReason::TimedOut),
        (S::Closing { .. }, I::Close(_) | I::ShutdownSent | I::Drained) => (state, A::Handled),

        (S::Established { .. } | S::Closing { .. }, I::Connect | I::Accept | I::Reject) => {
            (state, A::WrongState)
        }
        (S::Incoming | S::Established { .. } | S::Closing { .. }, I::Reset) => {
            end(true, CloseReason::LocalReset)
        }
        (S::Incoming | S::Established { .. } | S::Closing { .. }, I::TransportReset) => {
            end(false, CloseReason::TransportReset)
        }
    }
}

#[cfg(test)]
#[path = "state_matrix_tests.rs"]
mod matrix;
