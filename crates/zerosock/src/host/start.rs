//! The configuration of a host, and the start of its devices.

use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::Instant;

use super::HostBackend;
use crate::control::attach::AttachConfig;
use crate::control::attach::directory::Directory;
use crate::control::config::{CONNECT_TIMEOUT, StartError, VmConfig, system};
use crate::control::shares::MemoryLimits;
use crate::control::{self, Setup, WantedRules};
use crate::device::Limits;
use crate::device::host_sockets::hybrid::OkConvention;
use crate::device::state::program::App;
use crate::routing::access::AccessList;
use crate::table::leases::Leases;
use zerosock_proto::vsock::QueuePairs;
use zerosock_vhost_user::FaultCounts;

/// Limit of host programs of one VM that have connected and not sent CONNECT yet; also of ended
/// connections with bytes that a host program has not read.
const MAX_PROGRAMS: usize = 1024;
/// How long a host program may leave the last bytes of an ended connection unread.
const LINGER: Duration = Duration::from_secs(60);

/// The configuration of a host.
#[derive(Debug)]
pub(crate) struct HostConfig {
    /// The VMs. A guest's connection to the host goes to the program if it listens on the port, else
    /// to the VM's [`HostSide`](crate::daemon::HostSide).
    pub(crate) vms: Vec<VmConfig>,
    /// The attach server; `None`: processes cannot attach.
    pub(crate) attach: Option<AttachConfig>,
    /// Which endpoints may connect to which, beyond groups.
    pub(crate) access: AccessList,
    /// Limit of connections of one VM; see [`DaemonConfig`](crate::daemon::DaemonConfig).
    pub(crate) max_connections: Option<usize>,
    pub(crate) queue_pairs: u16,
    pub(crate) memory: MemoryLimits,
    /// Limit of copied bytes of a VM's connections to stalled host programs, together; and of those
    /// that the embedding program does not read.
    pub(crate) max_overflow: usize,
    /// See [`Limits::old_memory`].
    pub(crate) old_memory: u64,
    /// How long unread and leased buffers may stay in place.
    pub(crate) hold: Duration,
    pub(crate) ok: OkConvention,
    /// Time-out of a connect.
    pub(crate) connect_timeout: Duration,
    /// Limit of leases and loans that exist at once.
    pub(crate) leases: usize,
    /// Accept memory of VMs that can shrink.
    pub(crate) unsealed_memory: bool,
    /// Attached processes are trusted not to write to memory that is leased.
    pub(crate) trust_processes: bool,
}

impl Default for HostConfig {
    fn default() -> HostConfig {
        HostConfig {
            vms: Vec::new(),
            attach: None,
            access: AccessList::default(),
            max_connections: None,
            queue_pairs: 1,
            memory: MemoryLimits::default(),
            max_overflow: 64 << 20,
            old_memory: 1 << 30,
            hold: Duration::from_millis(20),
            ok: OkConvention::default(),
            connect_timeout: CONNECT_TIMEOUT,
            leases: 4096,
            unsealed_memory: false,
            trust_processes: false,
        }
    }
}

impl HostBackend {
    /// Makes the devices and starts the control thread. When this returns, VMMs and processes may
    /// connect; they are answered while the backend is driven.
    ///
    /// # Errors
    /// [`StartError`].
    pub(crate) fn start(config: HostConfig) -> Result<HostBackend, StartError> {
        zerosock_sys::sigbus::install().map_err(system("guard against vanishing memory"))?;
        let limits = Limits {
            handshake: config.connect_timeout,
            connect: config.connect_timeout,
            // A hold of zero would expire as soon as it begins, over and over.
            hold: config.hold.max(Duration::from_millis(1)),
            overflow: config.max_overflow,
            old_memory: config.old_memory,
            handshakes: MAX_PROGRAMS,
            lingering: MAX_PROGRAMS,
            linger: LINGER,
            ok: config.ok,
        };
        let prepared = control::prepare(Setup {
            vms: config.vms,
            workers: 1,
            limits,
            max_connections: config.max_connections,
            queue_pairs: QueuePairs::new(config.queue_pairs)
                .map_err(|error| StartError::QueuePairs(error.0))?,
            attach: config.attach,
            access: config.access,
            sealed_memory: !config.unsealed_memory,
            memory: config.memory,
            rules: WantedRules::default(),
            name_servers: Vec::new(),
        })?;
        let Some(mut worker) = prepared.workers.into_iter().next() else {
            let none = std::io::ErrorKind::NotFound.into();
            return Err(system("make a worker")(none));
        };
        let leases = Arc::new(Leases::new(config.leases));
        let app = App::new(
            leases.clone(),
            limits.hold,
            limits.overflow,
            config.trust_processes,
        );
        worker.shared.app = Some(Box::new(app));
        worker.start().map_err(system("watch host sockets"))?;
        let mut backend = HostBackend {
            worker,
            leases,
            touched: Vec::new(),
            now: Instant::ZERO,
            checks: 0,
            next_poll: Instant::ZERO,
            watches_host_sockets: false,
            armed: false,
            full_devices: 0,
            trust_processes: config.trust_processes,
            next_datagram: 0,
            control_plane: prepared.control_plane.start()?,
        };
        backend.poll_events().map_err(system("wait for events"))?;
        Ok(backend)
    }

    /// A live view of the faults of all front-ends.
    pub(crate) fn faults(&self) -> FaultCounts {
        self.control_plane.faults()
    }

    /// The attached processes.
    pub(crate) fn directory(&self) -> Arc<Directory> {
        self.control_plane.directory()
    }
}
