//! How a host's devices are made.

use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::Instant;

use super::HostEngine;
use crate::control::attach::AttachConfig;
use crate::control::attach::directory::Directory;
use crate::control::config::{StartError, VmConfig, system};
use crate::control::shares::MemoryLimits;
use crate::control::{self, Setup};
use crate::device::Limits;
use crate::device::host_sockets::hybrid::OkConvention;
use crate::device::program::App;
use crate::routing::access::AccessList;
use crate::table::leases::Leases;
use zerosock_proto::vsock::QueuePairs;
use zerosock_vhost_user::FaultCounts;

/// Host programs of one VM that may be connected without having said CONNECT, and ended
/// connections of which a host program is still taking bytes.
const MAX_PROGRAMS: usize = 1024;
/// How long a host program may take none of the last bytes of an ended connection.
const LINGER: Duration = Duration::from_secs(60);

/// What a host is made of.
#[derive(Debug)]
pub(crate) struct HostConfig {
    /// The VMs. What a guest asks of the host goes to the program if it listens there, else to the
    /// VM's [`HostSide`](crate::daemon::HostSide).
    pub(crate) vms: Vec<VmConfig>,
    /// Whether processes may attach, and on what terms.
    pub(crate) attach: Option<AttachConfig>,
    /// Who may reach whom, beyond what groups say.
    pub(crate) access: AccessList,
    /// Connections that one VM may have; see [`DaemonConfig`](crate::daemon::DaemonConfig).
    pub(crate) max_connections: Option<usize>,
    pub(crate) queue_pairs: u16,
    pub(crate) memory: MemoryLimits,
    /// Bytes that the connections of a VM to stalled host programs together may have copied; and
    /// those with the program itself that it does not read.
    pub(crate) max_overflow: usize,
    /// See [`Limits::old_memory`].
    pub(crate) old_memory: u64,
    /// How long unread and leased buffers stay in place.
    pub(crate) hold: Duration,
    pub(crate) ok: OkConvention,
    /// How long a connect may take.
    pub(crate) connect_timeout: Duration,
    /// Leases and loans that may be out at once.
    pub(crate) leases: usize,
    /// Take memory of VMs that can shrink as well.
    pub(crate) unsealed_memory: bool,
    /// Processes that attach are trusted to write nothing that is on lease.
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
            connect_timeout: Duration::from_secs(2),
            leases: 4096,
            unsealed_memory: false,
            trust_processes: false,
        }
    }
}

impl HostEngine {
    /// Makes the devices and starts the control thread. When this returns, VMMs and processes may
    /// connect; they are answered when the engine is driven.
    ///
    /// # Errors
    /// [`StartError`].
    pub(crate) fn start(config: HostConfig) -> Result<HostEngine, StartError> {
        zerosock_sys::sigbus::install().map_err(system("guard against vanishing memory"))?;
        let limits = Limits {
            handshake: config.connect_timeout,
            connect: config.connect_timeout,
            // A hold of no time would be over before it began, again and again.
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
            queue_pairs: QueuePairs::new(config.queue_pairs).map_err(StartError::QueuePairs)?,
            attach: config.attach,
            access: config.access,
            sealed_memory: !config.unsealed_memory,
            memory: config.memory,
        })?;
        let Some(mut worker) = prepared.workers.into_iter().next() else {
            let none = std::io::ErrorKind::NotFound.into();
            return Err(system("make a worker")(none));
        };
        let words = Arc::new(Leases::new(config.leases));
        let app = App::new(
            words.clone(),
            limits.hold,
            limits.overflow,
            config.trust_processes,
        );
        worker.app = Some(Box::new(app));
        worker.start().map_err(system("watch host sockets"))?;
        let mut engine = HostEngine {
            worker,
            words,
            touched: Vec::new(),
            now: Instant::ZERO,
            looks: 0,
            look_at: Instant::ZERO,
            watches: false,
            armed: false,
            full: 0,
            trust_processes: config.trust_processes,
            next_datagram: 0,
            control_plane: prepared.control_plane.start()?,
        };
        engine.look().map_err(system("wait for events"))?;
        Ok(engine)
    }

    /// What front-ends have done wrong.
    pub(crate) fn faults(&self) -> FaultCounts {
        self.control_plane.faults()
    }

    /// The processes that are attached.
    pub(crate) fn places(&self) -> Arc<Directory> {
        self.control_plane.directory()
    }
}
