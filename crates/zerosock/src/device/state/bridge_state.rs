//! The states of the two directions of a bridge, as one table.
//!
//! [`transition`] gives the next state and the action for every state and event. Nothing else decides: the
//! device turns shutdowns of the guest and of the host into [`BridgeEvent`]s and performs
//! [`BridgeAction`]s. The test beside the table has every cell, written by hand.
//!
//! The host is the other end of the bridge: a host socket, or a sibling.

use serde::{Deserialize, Serialize};
use zerosock_proto::vsock::Directions;

/// The direction from the guest to the host.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum ToHost {
    /// One of the two sides has not accepted the connection yet.
    Connecting,
    /// The guest may send.
    Open,
    /// The host takes no more bytes: those of the guest are dropped.
    Refused,
    /// The guest sends no more: its end of stream follows the bytes that the host has not taken.
    Ending,
    /// The end of stream was passed on to the host.
    Ended,
}

/// The direction from the host to the guest.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum ToGuest {
    /// The host may send.
    Open,
    /// The host sends no more: end of file follows the unread bytes.
    Ending {
        /// The host has closed both directions.
        gone: bool,
    },
    /// We do not read from the host any more: end of file was read, or the guest has shut down
    /// receiving.
    Ended {
        /// The host has closed both directions.
        gone: bool,
    },
}

/// The states of the two directions: see the module.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct BridgeState {
    to_host: ToHost,
    to_guest: ToGuest,
}

/// What can happen to a bridge.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum BridgeEvent {
    /// Both sides have accepted the connection.
    Connected,
    /// The guest has shut down sending.
    GuestFinished,
    /// The guest has shut down receiving.
    GuestStopped,
    /// The flow of the guest has ended. The host may still take its last bytes.
    FlowEnded,
    /// The host has taken all bytes of the guest.
    Delivered,
    /// The host takes no more bytes.
    HostStopped,
    /// The host has shut down sending.
    HostFinished,
    /// The host has closed both directions.
    HostGone,
    /// The end of the host's stream was read.
    EndRead,
}

/// An action for the device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum BridgeAction {
    /// Nothing.
    Nothing,
    /// Pass the bytes of the guest on, before its end of stream.
    Flush,
    /// Pass on the guest's end of stream.
    EndHost,
    /// Inform the host that the guest receives no more, and drop the host's bytes.
    StopHost,
    /// Shut down the guest's flow in these directions.
    ShutDownFlow(Directions),
}

/// The table: the next state and what to do.
pub(crate) const fn transition(
    state: BridgeState,
    event: BridgeEvent,
) -> (BridgeState, BridgeAction) {
    use BridgeAction as A;
    use BridgeEvent as E;
    use ToGuest as G;
    use ToHost as H;

    let BridgeState { to_host, to_guest } = state;
    let gone = matches!(to_guest, G::Ending { gone } | G::Ended { gone } if gone);
    let (to_host, to_guest, action) = match (event, to_host, to_guest) {
        // The protocol core reports no shutdown before both sides have accepted.
        (E::Connected, H::Connecting, _) => (H::Open, to_guest, A::Nothing),
        (E::GuestFinished, H::Open | H::Refused, _) => (H::Ending, to_guest, A::Flush),
        (E::Delivered, H::Ending, _) => (H::Ended, to_guest, A::EndHost),
        (E::HostStopped, H::Open, _) => {
            (H::Refused, to_guest, A::ShutDownFlow(Directions::RECEIVE))
        }
        (E::HostStopped, H::Ending | H::Ended, _) => {
            (to_host, to_guest, A::ShutDownFlow(Directions::RECEIVE))
        }
        (E::FlowEnded, H::Open | H::Refused, _) => (H::Ending, G::Ended { gone }, A::Nothing),
        (E::FlowEnded, _, _) => (to_host, G::Ended { gone }, A::Nothing),

        (E::HostFinished, _, G::Open) => (to_host, G::Ending { gone }, A::Nothing),
        (E::HostGone, _, G::Open | G::Ending { .. }) => {
            (to_host, G::Ending { gone: true }, A::Nothing)
        }
        // The host had ended its stream or was told to; now it has also stopped reading.
        (E::HostGone, _, G::Ended { .. }) => (
            to_host,
            G::Ended { gone: true },
            A::ShutDownFlow(Directions::BOTH),
        ),
        (E::GuestStopped, _, G::Open | G::Ending { .. }) => {
            (to_host, G::Ended { gone }, A::StopHost)
        }
        (E::EndRead, _, G::Open | G::Ending { .. }) => {
            let (receive, send) = (gone, true);
            (
                to_host,
                G::Ended { gone },
                A::ShutDownFlow(Directions { receive, send }),
            )
        }
        _ => (to_host, to_guest, A::Nothing),
    };
    (BridgeState { to_host, to_guest }, action)
}

impl BridgeState {
    /// The state of a bridge that begins.
    pub(crate) const CONNECTING: BridgeState = BridgeState {
        to_host: ToHost::Connecting,
        to_guest: ToGuest::Open,
    };

    /// Changes the state, and returns what is to be done.
    #[inline]
    pub(crate) fn apply(&mut self, event: BridgeEvent) -> BridgeAction {
        let (next, action) = transition(*self, event);
        *self = next;
        action
    }

    /// Whether both sides have accepted the connection.
    #[inline]
    pub(crate) fn is_open(self) -> bool {
        self.to_host != ToHost::Connecting
    }

    /// Whether bytes of the guest are dropped.
    #[inline]
    pub(crate) fn drops_bytes(self) -> bool {
        self.to_host == ToHost::Refused
    }

    /// Whether the guest sends no more.
    pub(crate) fn has_guest_finished(self) -> bool {
        matches!(self.to_host, ToHost::Ending | ToHost::Ended)
    }

    /// Whether we read from the host.
    #[inline]
    pub(crate) fn reads(self) -> bool {
        !matches!(self.to_guest, ToGuest::Ended { .. })
    }

    /// Whether end of file follows the unread bytes of the host.
    #[inline]
    pub(crate) fn has_host_finished(self) -> bool {
        matches!(self.to_guest, ToGuest::Ending { .. })
    }
}

#[cfg(test)]
#[path = "bridge_state_tests.rs"]
mod tests;
