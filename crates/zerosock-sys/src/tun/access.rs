//! Which programs have queues of a TAP open, and which may open further ones.
//!
//! The kernel lets any local user attach a queue to a TAP with IFF_MULTI_QUEUE that has neither an owner nor a
//! group. That user receives a part of the guest's frames, sends others, and may change headers, offloads and the
//! owner. A TAP of one queue cannot be opened a second time.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::rtnetlink::{self, Attributes};
use crate::socket_option::check;

const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
/// Of `linux/if_link.h`, in the data of the kind "tun".
const IFLA_TUN_OWNER: u16 = 1;
const IFLA_TUN_GROUP: u16 = 2;
const IFLA_TUN_MULTI_QUEUE: u16 = 7;
const IFLA_TUN_NUM_QUEUES: u16 = 8;
const IFLA_TUN_NUM_DISABLED_QUEUES: u16 = 9;

/// The user and the group of a TAP: with both, a program needs both to open it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct TapOwner {
    /// The number of the user.
    pub user: Option<u32>,
    /// The number of the group.
    pub group: Option<u32>,
}

impl fmt::Display for TapOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.user, self.group) {
            (Some(user), _) => write!(f, "uid {user}"),
            (None, Some(group)) => write!(f, "gid {group}"),
            (None, None) => f.write_str("none"),
        }
    }
}

/// Whether other programs may have queues of a TAP, too.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Sharing {
    /// A TAP that is open elsewhere, or that other users may open, is refused.
    Exclusive,
    /// The TAP may have queues elsewhere. Each program gets a part of the frames.
    Shared,
}

/// Why a TAP that may have several queues is not used.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// It is none, or has one queue only.
    #[error("it is no TAP of several queues")]
    NoSuchTap,
    /// Other processes have queues of it.
    #[error("another process has it open, with {others} of its queues (owner: {owner})")]
    Shared {
        /// Queues that are open elsewhere.
        others: u32,
        /// The owner of the TAP.
        owner: TapOwner,
    },
    /// Programs of other users may open queues of it.
    #[error(
        "programs of {owner} may open further queues of it, and get frames of the guest; make it with \
         `ip tuntap add mode tap multi_queue user {uid}`"
    )]
    Owner {
        /// The owner of the TAP.
        owner: TapOwner,
        /// The user of this process.
        uid: u32,
    },
    /// The kernel does not tell which processes may open it.
    #[error(
        "cannot find out its owner and its open queues by rtnetlink (Linux 4.17, AF_NETLINK): {0}"
    )]
    State(io::Error),
    /// It has no owner, and none can be set.
    #[error("cannot set its owner: {0}")]
    SetOwner(io::Error),
}

/// The state of a TAP with several queues.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct QueueState {
    owner: TapOwner,
    /// Queues that are open in any process, attached or not.
    open: u32,
}

impl QueueState {
    /// `None` without an interface of this name.
    fn read(name: &str) -> Result<Option<QueueState>, AccessError> {
        let attributes = match rtnetlink::get_link(name) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(None),
            result => result.map_err(AccessError::State)?,
        };
        let unknown = || AccessError::State(io::ErrorKind::Unsupported.into());
        let info = Attributes::find(&attributes, IFLA_LINKINFO).unwrap_or_default();
        let kind = Attributes::find(info, IFLA_INFO_KIND).unwrap_or_default();
        if kind.strip_suffix(b"\0") != Some(b"tun") {
            return Err(AccessError::NoSuchTap);
        }
        let data = Attributes::find(info, IFLA_INFO_DATA).unwrap_or_default();
        match Attributes::find(data, IFLA_TUN_MULTI_QUEUE) {
            Some([0]) => return Err(AccessError::NoSuchTap),
            Some([_]) => {}
            // Before Linux 4.17.
            _ => return Err(unknown()),
        }
        let number = |kind| {
            let value = Attributes::find(data, kind)?.first_chunk()?;
            Some(u32::from_ne_bytes(*value))
        };
        let attached = number(IFLA_TUN_NUM_QUEUES).ok_or_else(unknown)?;
        let detached = number(IFLA_TUN_NUM_DISABLED_QUEUES).ok_or_else(unknown)?;
        Ok(Some(QueueState {
            owner: TapOwner {
                user: number(IFLA_TUN_OWNER),
                group: number(IFLA_TUN_GROUP),
            },
            open: attached.saturating_add(detached),
        }))
    }

    /// Refuses a TAP of which more queues are open than `ours`, or that has an owner other than `uid`.
    fn check(self, ours: u32, uid: u32) -> Result<(), AccessError> {
        let QueueState { owner, open } = self;
        if open > ours {
            let others = open - ours;
            return Err(AccessError::Shared { others, owner });
        }
        if owner != TapOwner::default() && owner.user != Some(uid) {
            return Err(AccessError::Owner { owner, uid });
        }
        Ok(())
    }
}

/// Checks a TAP before this process opens its first queue, so that one that is refused is not touched.
pub(super) fn check_before(name: &str, sharing: Sharing) -> Result<(), AccessError> {
    match (QueueState::read(name)?, sharing) {
        (Some(state), Sharing::Exclusive) => state.check(0, effective_uid()),
        _ => Ok(()),
    }
}

/// Makes the user of this process the owner, if there is no owner. Then refuses a TAP of which another process
/// has opened a queue in the meantime: from here on, no other user can. `queue` is the first of this process.
pub(super) fn take_ownership(
    name: &str,
    queue: BorrowedFd<'_>,
    sharing: Sharing,
) -> Result<(), AccessError> {
    let uid = effective_uid();
    let read = || QueueState::read(name)?.ok_or(AccessError::NoSuchTap);
    if read()?.owner == TapOwner::default() {
        // SAFETY: TUNSETOWNER takes a number and touches no memory of the caller.
        let done = unsafe {
            libc::ioctl(
                queue.as_raw_fd(),
                libc::TUNSETOWNER as _,
                libc::c_ulong::from(uid),
            )
        };
        check(done).map_err(AccessError::SetOwner)?;
    }
    match sharing {
        Sharing::Exclusive => read()?.check(1, uid),
        Sharing::Shared => Ok(()),
    }
}

fn effective_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}
