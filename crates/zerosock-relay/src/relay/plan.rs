//! What a relay does, prepared: the same for all its workers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use zerosock_sys::LogLimit;
use zerosock_sys::bpf::BpfError;

use super::endpoint::KernelEndpoint;
use super::open::Destination;
use super::socket::SocketKind;
use super::way::{Mode, Way};
use crate::connector::{
    ATTEMPTS_AT_ONCE, ConnectCallback, ConnectRequest, Connector, PendingConnect,
};
use crate::networks::AddressPolicy;
use crate::sockmap::{Refusal, RelayMap};
use crate::target::Target;

/// What to relay, and within which limits.
#[derive(Clone, Debug)]
pub struct RelayConfig {
    /// The two ends. If both listen, the connections of one are joined to those of the other in the
    /// order in which they come. If neither does, one pair is relayed and the relay is over.
    pub ends: [KernelEndpoint; 2],
    /// How the bytes are moved.
    pub way: Way,
    /// The maps of way sockmap: see [`RelayConfig::make_map`]. Without them that way is as `Auto`.
    pub sockmap: Option<RelayMap>,
    /// Threads.
    pub workers: usize,
    /// Most connections, and associations of datagrams, at once. Associations are no more than there are
    /// descriptors for (RLIMIT_NOFILE at the start).
    pub max_connections: usize,
    /// Time for resolving and connecting.
    pub connect_timeout: Duration,
    /// Connections end when no byte moves for so long; `None`: never.
    pub idle_timeout: Option<Duration>,
    /// Interval of TCP keepalive probes; `None`: no probes.
    pub keepalive: Option<Duration>,
    /// Bytes that one call reads.
    pub buffer: usize,
    /// Most pipes of each worker.
    pub pipes: usize,
    /// Associations of datagrams end when none is relayed for so long.
    pub datagram_timeout: Duration,
    /// Begin each connection to the second end with a PROXY protocol header.
    pub proxy_protocol: bool,
    /// Permission bits of the Unix sockets at which it listens; `None`: 0600, or 0660 with a group.
    pub socket_mode: Option<u32>,
    /// The group of these sockets; `None`: chosen by the kernel.
    pub socket_group: Option<u32>,
}

impl RelayConfig {
    /// The usual limits.
    pub fn new(ends: [KernelEndpoint; 2]) -> RelayConfig {
        RelayConfig {
            ends,
            way: Way::Auto,
            sockmap: None,
            workers: 1,
            max_connections: 65536,
            connect_timeout: Duration::from_secs(10),
            idle_timeout: None,
            keepalive: Some(Duration::from_secs(60)),
            buffer: 256 << 10,
            pipes: 64,
            datagram_timeout: Duration::from_secs(60),
            proxy_protocol: false,
            socket_mode: None,
            socket_group: None,
        }
    }
}

/// Why a relay does not redirect inside of the kernel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoSockmap {
    /// The ends are not of the right kinds.
    #[error("{0}")]
    Ends(&'static str),
    /// The kernel refuses.
    #[error(transparent)]
    Bpf(#[from] BpfError),
}

/// Most pairs of sockets in the maps of a relay, which take some hundred bytes each of the kernel's memory
/// from the start.
const MOST_JOINED: usize = 65536;

impl RelayConfig {
    /// Makes the maps that [`Way::Sockmap`] needs. To be called while the process has CAP_BPF and
    /// CAP_NET_ADMIN, and before it starts threads if it drops them then.
    ///
    /// # Errors
    /// Why it cannot be; the relay then takes the ways of [`Way::Auto`].
    pub fn make_map(&mut self) -> Result<(), NoSockmap> {
        self.ends_can_join().map_err(NoSockmap::Ends)?;
        let pairs = self.max_connections.clamp(1, MOST_JOINED) as u32;
        self.sockmap = Some(RelayMap::new(pairs)?);
        if self.ends.iter().any(KernelEndpoint::receives_datagrams) {
            // The sockets of senders are beside one listener; the kernel moves what they receive.
            self.workers = 1;
        }
        Ok(())
    }

    /// Whether [`Way::Splice`] moves bytes in a direction.
    pub fn can_splice(&self) -> bool {
        let [one, two] = [0, 1].map(|end| self.ends[end].kind());
        one.can_splice() && two.can_splice()
    }

    fn ends_can_join(&self) -> Result<(), &'static str> {
        match [0, 1].map(|end| self.ends[end].kind()) {
            [SocketKind::Vsock, SocketKind::Tcp] | [SocketKind::Tcp, SocketKind::Vsock] => Ok(()),
            [SocketKind::Tcp, _] | [_, SocketKind::Tcp] => Err(
                "TCP can be no source, because bytes of overlapping segments would arrive twice; both ends \
                 have to be UDP, or vsock and TCP",
            ),
            [SocketKind::Udp, SocketKind::Udp] => {
                let any = |end: &KernelEndpoint| match end {
                    KernelEndpoint::UdpListen(address) => address.ip().is_unspecified(),
                    _ => false,
                };
                match self.ends.iter().any(any) {
                    true => Err("a UDP listener needs one address, not all of the host"),
                    false => Ok(()),
                }
            }
            _ => Err("both ends have to be UDP, or vsock and TCP"),
        }
    }
}

/// Lines of the access log in 10 s; further ones are counted.
pub const ACCESS_LINES: u32 = 10_000;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct RelayPlan {
    pub(super) config: RelayConfig,
    /// The ends that connect.
    pub(super) destinations: [Option<Destination>; 2],
    pub(super) connector: Option<Connector>,
    policy: Arc<AddressPolicy>,
    /// Connections and associations of all workers.
    open: AtomicUsize,
    /// It was said that sockets cannot be joined.
    refusal_said: AtomicBool,
    /// For warnings.
    pub(super) warnings: LogLimit,
    /// For the access log.
    pub(super) lines: LogLimit,
    /// Readable when the relay is over.
    pub(super) over: OwnedFd,
    /// The only pair of the relay has ended in order.
    pub(super) succeeded: AtomicBool,
}

impl RelayPlan {
    /// # Errors
    /// No eventfd is to be had.
    pub(super) fn new(
        config: RelayConfig,
        destinations: [Option<Destination>; 2],
        connector: Option<Connector>,
    ) -> std::io::Result<RelayPlan> {
        Ok(RelayPlan {
            config,
            destinations,
            connector,
            policy: Arc::new(AddressPolicy::unrestricted(Vec::new())),
            open: AtomicUsize::new(0),
            refusal_said: AtomicBool::new(false),
            warnings: LogLimit::default(),
            lines: LogLimit::new(ACCESS_LINES),
            over: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            succeeded: AtomicBool::new(false),
        })
    }

    /// Says why two sockets are not joined, the first time.
    pub(super) fn say_refusal(&self, refusal: &Refusal) {
        // Relaxed: a flag without relation to other memory.
        match self.refusal_said.swap(true, Ordering::Relaxed) {
            true => tracing::debug!("{refusal}"),
            false => tracing::info!("{refusal}: such connections move as with --way auto"),
        }
    }

    /// The kind of an end.
    pub(super) fn kind(&self, end: usize) -> SocketKind {
        self.config.ends[end & 1].kind()
    }

    /// How the bytes of a pair move.
    pub(super) fn modes(&self) -> [Mode; 2] {
        let (one, two) = (self.kind(0), self.kind(1));
        let way = self.config.way;
        [way.mode(one, two), way.mode(two, one)]
    }

    /// Pairs end when no byte moves for so long: those with datagrams, which have no end, in any case.
    pub(super) fn idle_timeout(&self) -> Option<Duration> {
        let endless = !(self.kind(0).has_end() && self.kind(1).has_end());
        let datagrams = (endless && !self.is_single()).then_some(self.config.datagram_timeout);
        self.config.idle_timeout.or(datagrams)
    }

    /// Counts one more connection; false if as many as are allowed exist.
    pub(super) fn admit(&self) -> bool {
        // Relaxed: a number without relation to other memory.
        let before = self.open.fetch_add(1, Ordering::Relaxed);
        if before < self.config.max_connections {
            return true;
        }
        self.open.fetch_sub(1, Ordering::Relaxed);
        false
    }

    /// A connection has ended.
    pub(super) fn dismiss(&self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether the relay is over when its one pair has ended.
    pub(super) fn is_single(&self) -> bool {
        !self.config.ends.iter().any(KernelEndpoint::listens)
    }

    /// The relay is over.
    pub(super) fn finish(&self, succeeded: bool) {
        // Relaxed: it is read after the eventfd, whose system calls order it.
        self.succeeded.store(succeeded, Ordering::Relaxed);
        let _ = rustix::io::write(&self.over, &1u64.to_ne_bytes());
    }

    /// Asks the connector for a connection. `None`: there is no connector.
    pub(super) fn ask(&self, target: Target, done: ConnectCallback) -> Option<PendingConnect> {
        let connector = self.connector.as_ref()?;
        let request = ConnectRequest {
            target,
            policy: Arc::clone(&self.policy),
            timeout: self.config.connect_timeout,
            keepalive: self.config.keepalive,
            first_bytes: Vec::new(),
            attempts: ATTEMPTS_AT_ONCE,
        };
        Some(connector.connect(request, done))
    }

    /// An address of the second end has refused a datagram: others of its name go before it.
    pub(super) fn refused(&self, address: SocketAddr) {
        if let (Some(connector), KernelEndpoint::Connect(target)) =
            (&self.connector, &self.config.ends[1])
        {
            connector.refused(target, address);
        }
    }
}
