//! The state of the attach server: its clients, members and claims. The files beside this one
//! change it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};
use rustix::net::{Shutdown, shutdown};
use zerosock_proto::{Cid, Port};
use zerosock_sys::account::{Account, Limits, Permit};
use zerosock_sys::{LogLimit, PeerFd, fd_passing};

use super::super::codec::{ANSWER_LEN, Answer, AttachRequest, ServiceRequest, Status, VERSION};
use super::super::directory::Directory;
use super::super::{AttachConfig, HOST};
use crate::control::registry::DeviceRegistry;
use crate::control::socket_file::SocketFile;
use crate::routing::name::Name;
use zerosock_virtio::outbox::DeviceAddr;

/// Time-out for the first request, and for a request that waits for something to become free.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may leave an answer unread. It may have exited and have left its own end of
/// the connection in a message that is not read before the answer.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Limit of clients of one user that are not members.
pub(super) const MAX_CLIENTS: usize = 64;
/// Limit of connections, of all users together, that are being turned away and are not closed yet.
pub(crate) const MAX_TURNED_AWAY: u64 = 64;
/// Connections accepted, or messages of one client handled, before other descriptors are polled.
pub(super) const BUDGET: usize = 16;
/// How long accepting pauses when there is no descriptor for a connection.
pub(super) const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// The listener's epoll key. No client has it.
pub(super) const LISTENER: u32 = 0;

/// The attach server; see the [module](super).
pub(crate) struct Server {
    pub(super) config: AttachConfig,
    pub(super) directory: Arc<Directory>,
    pub(super) clients: BTreeMap<u32, AttachedClient>,
    pub(super) last_key: u32,
    pub(super) members: BTreeMap<usize, AttachedMember>,
    pub(super) by_cid: BTreeMap<Cid, usize>,
    pub(super) by_name: BTreeMap<Name, usize>,
    /// Ports of the host that belong to services, including those being released.
    pub(super) claims: BTreeMap<Port, Claim>,
    /// The CID to try first for a process that requests any: the one after the last assigned, so
    /// that CIDs are reused as late as possible.
    pub(super) next_cid: u32,
    /// The block of source ports to try first for a service, likewise.
    pub(super) next_block: u32,
    /// Until then the listener is not watched.
    pub(super) accept_paused_until: Option<Instant>,
    pub(super) log: LogLimit,
    /// The limits of descriptors and memory for all processes of each user.
    pub(super) accounts: BTreeMap<u32, Account>,
    /// For connections of a user not known yet, and for those that are turned away. They cannot
    /// use up the guaranteed descriptors of VMs and users. `None` before the first connection.
    pub(super) turned_away: Option<Account>,
}

impl Server {
    pub(crate) fn new(config: AttachConfig, directory: Arc<Directory>) -> io::Result<Server> {
        rustix::io::ioctl_fionbio(&config.listener, true)?;
        // Requests carry no descriptors. Where the kernel cannot refuse them, they are closed
        // below.
        fd_passing::refuse_rights(&config.listener)?;
        let next_cid = *config.cids.start();
        Ok(Server {
            config,
            directory,
            clients: BTreeMap::new(),
            last_key: LISTENER,
            members: BTreeMap::new(),
            by_cid: BTreeMap::new(),
            by_name: BTreeMap::new(),
            claims: BTreeMap::new(),
            next_cid,
            next_block: 0,
            accept_paused_until: None,
            log: LogLimit::default(),
            accounts: BTreeMap::new(),
            turned_away: None,
        })
    }

    /// The account of connections of a user not known yet, and of those that are turned away.
    pub(super) fn turned_away(&mut self, registry: &DeviceRegistry) -> &Account {
        self.turned_away.get_or_insert_with(|| {
            let budget = registry.budget();
            let limits = Limits {
                descriptors: MAX_TURNED_AWAY,
                mapped: 0,
                mapped_each: 0,
                ..budget.limits()
            };
            budget.beside(limits, 1).account()
        })
    }

    /// The account of a user's processes.
    pub(super) fn account(&mut self, uid: u32, registry: &DeviceRegistry) -> Account {
        let budget = registry.budget();
        let account = self.accounts.entry(uid);
        account.or_insert_with(|| budget.account()).clone()
    }

    /// Logs a fault of a process, subject to the limit.
    pub(super) fn warn(&self, text: &str) {
        if let Some(suppressed) = self.log.admit(Instant::now()) {
            tracing::warn!(suppressed, "{text}");
        }
    }
}

/// A connection to the attach socket.
pub(super) struct AttachedClient {
    pub(super) socket: PeerFd,
    pub(super) uid: u32,
    pub(super) pid: i32,
    pub(super) state: ClientState,
    /// An answer that the socket had no room for. Nothing is read until it is sent.
    pub(super) answer: Option<[u8; ANSWER_LEN]>,
    /// The request of a service that is not answered yet. Nothing is read until it is.
    pub(super) pending_claim: Option<PendingClaim>,
    pub(super) watched: EventFlags,
    /// When the client is dropped for not reading its answer.
    pub(super) stalled_until: Option<Instant>,
    /// The epoll instance that watches the socket.
    pub(super) epoll: Arc<OwnedFd>,
}

impl Drop for AttachedClient {
    fn drop(&mut self) {
        // The reaper closes the socket later, perhaps after descriptors that do not close. Without
        // this, epoll would report it until then, and the client would not see the end.
        let _ = epoll::delete(&self.epoll, &self.socket);
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

/// The state of a client; the time until which it may last.
pub(super) enum ClientState {
    AwaitingRequest {
        until: Instant,
    },
    Waiting {
        until: Instant,
        request: JoinRequest,
    },
    Joining {
        vm: usize,
        theirs: UnixStream,
    },
    Attached {
        vm: usize,
    },
}

impl ClientState {
    /// The deadline of the state.
    pub(super) fn until(&self) -> Option<Instant> {
        match self {
            ClientState::AwaitingRequest { until } | ClientState::Waiting { until, .. } => {
                Some(*until)
            }
            ClientState::Joining { .. } | ClientState::Attached { .. } => None,
        }
    }
}

/// A port that belongs to a service.
#[derive(Debug)]
pub(super) struct Claim {
    /// The service's number on the control thread.
    pub(super) vm: usize,
    /// Set while the workers remove the route; the number of the notice.
    pub(super) releasing: Option<u64>,
}

/// A request of a service that is not answered yet.
#[derive(Debug)]
pub(super) enum PendingClaim {
    /// Some of the ports are about to become free.
    Waiting { until: Instant, ports: Vec<Port> },
    /// The workers are getting the new routes; the number of the notice.
    Publishing(u64),
}

/// A request to attach.
#[derive(Debug)]
pub(super) enum JoinRequest {
    Process(AttachRequest),
    Service(ServiceRequest),
}

impl JoinRequest {
    pub(super) fn name(&self) -> Option<&Name> {
        match self {
            JoinRequest::Process(request) => request.name.as_ref(),
            JoinRequest::Service(request) => request.name.as_ref(),
        }
    }
}

/// A device that was made for a client.
pub(super) struct AttachedMember {
    pub(super) cid: Cid,
    /// The user of its client.
    pub(super) uid: u32,
    /// For a service: the number of its block of source ports.
    pub(super) service: Option<u32>,
    pub(super) name: Option<Name>,
    pub(super) addr: DeviceAddr,
    /// The key of its client, as long as that is connected.
    pub(super) client: Option<u32>,
    pub(super) stage: MemberStage,
    /// The file of its hybrid socket; removed when the workers have removed the member.
    pub(super) _file: Option<SocketFile>,
    /// Holds its share of descriptors.
    pub(super) _permit: Permit,
}

/// The stage of a member, from its request to its removal.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum MemberStage {
    /// The workers are getting the new routes; the number of the notice.
    Joining(u64),
    Active,
    /// Its front-end is being disconnected.
    Leaving,
    /// The workers are removing it; the number of the notice.
    Removing(u64),
}

impl MemberStage {
    pub(super) fn is_leaving(self) -> bool {
        matches!(self, MemberStage::Leaving | MemberStage::Removing(_))
    }
}

/// Why a request to attach or to claim cannot be granted now.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Conflict {
    /// Permanently.
    Refused(Answer),
    /// Until a member that is leaving is removed.
    Temporary(Answer),
}

impl Conflict {
    pub(super) fn refused(status: Status) -> Conflict {
        Conflict::Refused(Answer::refusal(status, VERSION))
    }

    pub(super) fn temporary(status: Status) -> Conflict {
        Conflict::Temporary(Answer::refusal(status, VERSION))
    }
}

/// The answer to a request that is granted, of a client with this CID.
pub(super) fn granted(cid: Cid) -> Answer {
    Answer {
        cid,
        host: HOST,
        ..Answer::refusal(Status::Ok, VERSION)
    }
}
