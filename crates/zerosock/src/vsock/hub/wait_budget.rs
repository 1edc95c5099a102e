//! How long a call may wait, and why a wait fails.

use std::io;
use std::time::Instant;

use crate::table::over::EndpointEnded;
use crate::vsock::waiting::Wait;

/// What a call does when its attempt finds nothing.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum WaitMode {
    /// It blocks.
    Block(Wait),
    /// It answers `WouldBlock`; the descriptor becomes readable when another try is worthwhile.
    Poll,
    /// It answers `WouldBlock`; its task is registered, or will be before it tries again.
    #[cfg(feature = "tokio")]
    Task,
}

/// How, and how long, a call waits.
#[derive(Copy, Clone, Debug)]
pub(crate) struct WaitBudget {
    pub(crate) mode: WaitMode,
    /// `None`: without limit.
    pub(crate) deadline: Option<Instant>,
}

impl WaitBudget {
    pub(super) fn wait(self) -> Option<Wait> {
        match self.mode {
            WaitMode::Block(wait) => Some(wait),
            _ => None,
        }
    }
}

/// Why a wait ended without what it waited for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WaitFault {
    #[error("the call would block")]
    WouldBlock,
    #[error("the call timed out")]
    TimedOut,
    #[error(transparent)]
    Fault(EndpointEnded),
}

impl From<WaitFault> for io::Error {
    fn from(fault: WaitFault) -> io::Error {
        let kind = match fault {
            WaitFault::WouldBlock => io::ErrorKind::WouldBlock,
            WaitFault::TimedOut => io::ErrorKind::TimedOut,
            WaitFault::Fault(over) => return over.into(),
        };
        io::Error::new(kind, fault)
    }
}
