//! The configuration of a [`Shard`](super::Shard).

use crate::addr::Cid;
use crate::time::Duration;

/// Which half of the queue pair a shard serves.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum Role {
    /// The device half. Every packet must come from `peer`, the guest; others are dropped without
    /// RST. Our own CIDs are the host's and those in [`ShardConfig::local`].
    Device {
        /// The guest's CID.
        peer: Cid,
    },
    /// The driver half: the guest itself. It accepts packets from any CID.
    Driver {
        /// Our own CID, as read from the device's configuration space.
        local: Cid,
    },
}

/// The destination CIDs for which a device answers.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub enum LocalCids {
    /// The host's only.
    #[default]
    HostOnly,
    /// All: the caller decides by the events, and rejects connections to CIDs that do not exist.
    All,
}

impl LocalCids {
    /// Whether the device accepts packets to `cid`.
    pub fn contains(self, cid: Cid) -> bool {
        self == LocalCids::All || cid == Cid::HOST
    }
}

/// Settings of a [`Shard`](super::Shard). Start with [`ShardConfig::device`] or
/// [`ShardConfig::driver`] and change fields.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// Which half we are.
    pub role: Role,
    /// A device's own CIDs. A driver has the one in its [`Role`].
    pub local: LocalCids,
    /// Receive buffer advertised for each connection, in bytes.
    pub buf_alloc: u32,
    /// Most bytes in flight towards a peer, whatever it advertises. `None`: the connection's own
    /// `buf_alloc`, as in Linux.
    pub send_limit: Option<u32>,
    /// Most connections at once in all shards that share a port table. Connections count until
    /// their RST has been sent and their end has been polled. Above the limit REQUESTs are reset.
    pub max_connections: usize,
    /// Most undecided incoming connections when `accept_all` is set; a listener has its own limit.
    pub backlog: usize,
    /// Every REQUEST to one of our CIDs becomes an
    /// [`Event::Incoming`](super::Event::Incoming), listener or not.
    pub accept_all: bool,
    /// Time after which an unanswered REQUEST fails.
    pub connect_timeout: Duration,
    /// Time after which a closing connection that makes no progress is reset.
    pub close_timeout: Duration,
    /// Most queued RSTs that belong to no connection; see
    /// [`Shard::is_backlogged`](super::Shard::is_backlogged).
    pub max_pending_resets: usize,
    /// Most queued sends of one connection; above it
    /// [`SendError::QueueFull`](super::SendError::QueueFull).
    pub max_queued_sends: usize,
    /// Start of the free-running counters, so that tests can start them near the wrap. Peers on the
    /// wire expect 0.
    #[doc(hidden)]
    pub first_count: u32,
}

impl ShardConfig {
    /// The default receive buffer: Linux's.
    pub const DEFAULT_BUF_ALLOC: u32 = 262144;

    /// A device half for the guest `peer`.
    pub fn device(peer: Cid) -> ShardConfig {
        ShardConfig::new(Role::Device { peer })
    }

    /// A driver half with the CID `local`.
    pub fn driver(local: Cid) -> ShardConfig {
        ShardConfig::new(Role::Driver { local })
    }

    fn new(role: Role) -> ShardConfig {
        ShardConfig {
            role,
            local: LocalCids::HostOnly,
            buf_alloc: Self::DEFAULT_BUF_ALLOC,
            send_limit: None,
            max_connections: 65536,
            backlog: 1024,
            accept_all: false,
            connect_timeout: Duration::from_secs(2),
            close_timeout: Duration::from_secs(8),
            max_pending_resets: 256,
            max_queued_sends: 1024,
            first_count: 0,
        }
    }
}
