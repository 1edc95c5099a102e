//! Descriptors on which close(2) may wait for a peer.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use crate::account::{Account, Permit};
use crate::reaper;

/// A descriptor that came from a peer, or a socket that a peer can reach. Dropping it hands it to
/// the [`reaper`], so that the dropping thread never waits.
///
/// Every descriptor of this kind is kept as a `PeerFd` from the call that made it until it is
/// dropped. `OwnedFd` is for descriptors that only this process has.
///
/// A descriptor without an account may block a thread of the reaper beyond the shares of all
/// accounts. So every descriptor that a peer has sent, or into which a peer can queue descriptors,
/// has one.
#[derive(Debug)]
pub struct PeerFd {
    /// `None` only during drop.
    fd: Option<OwnedFd>,
    /// Counts the descriptor against the share of the peer that sent it.
    permit: Option<Permit>,
}

impl PeerFd {
    /// Counts the descriptor against the permit's account until it is closed.
    pub fn with_permit(self, permit: Permit) -> PeerFd {
        let mut fd = self;
        fd.permit = Some(permit);
        fd
    }

    /// Attributes the close to this account without counting the descriptor: for one that is closed
    /// at once, or that is part of the process's reserve.
    pub fn owned_by(self, account: &Account) -> PeerFd {
        self.with_permit(account.take_nothing())
    }

    /// The account of its permit.
    pub fn account(&self) -> Option<&Account> {
        self.permit.as_ref().map(Permit::account)
    }

    /// The bare descriptor, for one received from a trusted party, or for an owner that hands it to the
    /// reaper where needed.
    pub fn into_trusted(mut self) -> OwnedFd {
        self.fd.take().expect("there until drop")
    }
}

impl From<OwnedFd> for PeerFd {
    fn from(fd: OwnedFd) -> PeerFd {
        PeerFd {
            fd: Some(fd),
            permit: None,
        }
    }
}

impl AsFd for PeerFd {
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("there until drop").as_fd()
    }
}

impl AsRawFd for PeerFd {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            reaper::close(fd, self.permit.take());
        }
    }
}
