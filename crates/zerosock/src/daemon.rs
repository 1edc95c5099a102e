//! The daemon: VMs distributed over worker threads, and one control thread.
//!
//! `zerosock serve` runs it; a program can also run it in its own process. No code here is on the packet
//! path.

pub use crate::control::attach::directory::RegisteredEndpoint;
use crate::control::attach::{AttachConfig, Process};
use crate::control::config::system;
pub use crate::control::config::{
    CONNECT_TIMEOUT, HostSide, HybridMessages, Reload, ReloadError, STOPPED_TIMEOUT,
    SavedQueuePair, StartError, Succession, VmConfig,
};
pub use crate::control::guest::key::{GuestKey, KeyError};
pub use crate::control::guest::options::GuestEndpoints;
pub use crate::control::pause::{Keep, PauseError, Paused};
use crate::control::shares::MemoryLimits;
pub use crate::control::shares::Shares;
use crate::control::{self, ControlPlane, Setup, WantedRules};
pub use crate::device::host_sockets::hybrid::OkConvention;
pub use crate::device::traffic::EndpointTraffic;
use crate::device::{Limits, Worker, WorkerMessage};
use crate::routing::access::AccessList;
use crate::routing::forward::{ForwardRule, ListenRule, RuleStats};
use crate::routing::name::Name;
use crate::stats::Counters;
pub use crate::stats::Stats;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use zerosock_proto::Cid;
use zerosock_proto::vsock::QueuePairs;
use zerosock_sys::reaper;
use zerosock_vhost_user::liveness::LivenessProbe;
use zerosock_virtio::mailbox::Sender;

/// The configuration of a daemon.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// use std::os::unix::net::UnixListener;
/// use zerosock::Cid;
/// use zerosock::daemon::{Daemon, DaemonConfig, HostSide, STOPPED_TIMEOUT, VmConfig};
///
/// let vm = VmConfig {
///     cid: Cid::new(3),
///     listener: UnixListener::bind(dir.path().join("vm3.sock"))?,
///     host: HostSide::None,
///     buf_alloc: 1 << 20,
///     queue_size: 1024,
///     groups: vec!["default".into()],
///     require_sealed_memory: false,
///     stopped_timeout: Some(STOPPED_TIMEOUT),
///     guest_endpoints: None,
///     succession: None,
/// };
/// let daemon = Daemon::start(DaemonConfig { vms: vec![vm], ..DaemonConfig::default() })?;
/// daemon.shutdown();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DaemonConfig {
    /// The VMs.
    pub vms: Vec<VmConfig>,
    /// Number of worker threads, at least one.
    pub workers: usize,
    /// CPUs that the workers are pinned to, in order and repeating; empty: no pinning.
    pub cpus: Vec<usize>,
    /// Limit of connections of one VM or process. Further requests get a reset.
    ///
    /// `None`: 131072. If VMs or processes have host sockets, which take a descriptor for each
    /// connection: the number of descriptors that one VM can have, if that is less, but at least 64.
    /// [`Daemon::shares`] reports it.
    pub max_connections: Option<usize>,
    /// Limit of mapped memory in bytes of one VM, or of all processes of one user together. While a
    /// memory table is replaced, the old one counts too. A memory table beyond the limit is refused.
    pub max_memory: u64,
    /// Limit of mapped memory in bytes of all VMs and processes together.
    pub max_memory_total: u64,
    /// Limit of copied bytes of all stalled connections of a VM together; beyond it, the connection
    /// with the most is reset.
    pub max_overflow: usize,
    /// How long a stalled connection may hold descriptor chains before they are copied out.
    pub hold: Duration,
    /// How long a worker polls for work before it sleeps, while that pays. Polling finds packets
    /// sooner and without a kick, but uses the worker's processor. Zero: no polling.
    pub spin: Duration,
    /// The port in the OK line.
    pub ok: OkConvention,
    /// Time-out of a connect, and of the CONNECT line of a host program. Below the 2 s after which a
    /// Linux guest gives up by itself, so that the guest gets an answer.
    pub connect_timeout: Duration,
    /// How long a host program may leave the last bytes of an ended connection unread. After that its
    /// socket is closed and the bytes are lost.
    pub linger: Duration,
    /// Largest number of queue pairs of a device, 1 to 16, for drivers that support several
    /// (docs/queue-pairs.md). Each pair runs on the next worker.
    pub queue_pairs: u16,
    /// The attach server; `None`: processes cannot attach.
    pub attach: Option<AttachConfig>,
    /// Which endpoints may connect to which, beyond groups.
    pub access: AccessList,
    /// Rules that forward connections of VMs and processes to the outside.
    pub forward: Vec<ForwardRule>,
    /// Rules that connect clients outside to VMs, processes and services.
    pub listen: Vec<ListenRule>,
    /// Name servers that resolve the names of [`forward`](DaemonConfig::forward); empty: those of
    /// /etc/resolv.conf.
    pub name_servers: Vec<SocketAddr>,
}

impl Default for DaemonConfig {
    fn default() -> Self {
        DaemonConfig {
            vms: Vec::new(),
            workers: 1,
            cpus: Vec::new(),
            max_connections: None,
            max_memory: MemoryLimits::default().each,
            max_memory_total: MemoryLimits::default().total,
            max_overflow: 64 << 20,
            hold: HOLD,
            spin: Duration::ZERO,
            ok: OkConvention::default(),
            connect_timeout: CONNECT_TIMEOUT,
            linger: LINGER,
            queue_pairs: 1,
            attach: None,
            access: AccessList::default(),
            forward: Vec::new(),
            listen: Vec::new(),
            name_servers: Vec::new(),
        }
    }
}

/// How long shutdown waits for the reaper to close descriptors of peers.
const REAPER_LIMIT: Duration = Duration::from_secs(1);
const HOLD: Duration = Duration::from_millis(20);
const LINGER: Duration = Duration::from_secs(60);
/// Limit of host programs of one VM that have connected and not sent CONNECT yet.
const MAX_HANDSHAKES: usize = 1024;
/// Limit of ended connections of one VM with unread bytes.
const MAX_LINGERING: usize = 1024;

/// A running daemon. Dropping it does not stop it: [`shutdown`](Daemon::shutdown) does.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("attach.sock");
/// use zerosock::attach::{self, AttachConfig};
/// use zerosock::daemon::{Daemon, DaemonConfig};
/// use zerosock::vsock::Endpoint;
///
/// let daemon = Daemon::start(DaemonConfig {
///     workers: 2,
///     attach: Some(AttachConfig::new(attach::listen(&path)?)),
///     ..DaemonConfig::default()
/// })?;
/// let db = Endpoint::builder().name("db").attach(&path)?;
/// let web = Endpoint::attach(&path)?;
/// assert_eq!(web.resolve("db")?, db.cid());
/// assert_eq!(daemon.processes().len(), 2);
/// daemon.shutdown();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A forked child has no copy of the threads, and must neither use nor drop its copy of the value:
/// see [forks](crate::vsock#forks).
#[derive(Debug)]
pub struct Daemon {
    control_plane: ControlPlane,
    workers: Vec<(Sender<WorkerMessage>, JoinHandle<()>)>,
    /// The control thread's, then one for each worker.
    probes: Vec<LivenessProbe>,
    counters: Vec<Arc<Counters>>,
    ended: Arc<OwnedFd>,
}

impl Daemon {
    /// Starts the workers and the control thread. When this returns, VMMs and host programs may
    /// connect.
    ///
    /// Memory of VMs that can shrink is accepted: this installs a process-wide handler for SIGBUS,
    /// described at [`Host`](crate::vsock::Host), so that only the VM that owned the memory is lost.
    /// Memory of processes must be sealed.
    pub fn start(config: DaemonConfig) -> Result<Daemon, StartError> {
        zerosock_sys::sigbus::install().map_err(system("guard against vanishing memory"))?;
        let limits = Limits {
            handshake: config.connect_timeout,
            connect: config.connect_timeout,
            // A hold of zero would expire as soon as it begins, over and over.
            hold: config.hold.max(Duration::from_millis(1)),
            overflow: config.max_overflow,
            // No program in this process holds leases.
            old_memory: 0,
            handshakes: MAX_HANDSHAKES,
            lingering: MAX_LINGERING,
            linger: config.linger,
            ok: config.ok,
        };
        let prepared = control::prepare(Setup {
            vms: config.vms,
            workers: config.workers,
            limits,
            max_connections: config.max_connections,
            queue_pairs: QueuePairs::new(config.queue_pairs)
                .map_err(|error| StartError::QueuePairs(error.0))?,
            attach: config.attach,
            access: config.access,
            // If memory vanishes, only its VM is lost.
            sealed_memory: false,
            memory: MemoryLimits {
                each: config.max_memory,
                total: config.max_memory_total,
            },
            rules: WantedRules {
                forward: config.forward,
                listen: config.listen,
            },
            name_servers: config.name_servers,
        })?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let ended = Arc::new(eventfd(0, flags).map_err(|e| system("make an eventfd")(e.into()))?);
        let mut running = Vec::new();
        let pool = prepared.workers.into_iter().zip(prepared.senders);
        for (index, (worker, sender)) in pool.enumerate() {
            let cpu = (!config.cpus.is_empty()).then(|| config.cpus[index % config.cpus.len()]);
            let thread = std::thread::Builder::new()
                .name(format!("zerosock-{index}"))
                .spawn({
                    let signal = EndSignal(ended.clone());
                    move || run_worker(worker, cpu, config.spin, signal)
                })
                .map_err(system("start a worker"))?;
            running.push((sender, thread));
        }
        let probes = (0..=running.len())
            .map(|_| LivenessProbe::default())
            .collect();
        Ok(Daemon {
            probes,
            control_plane: prepared.control_plane.start()?,
            workers: running,
            counters: prepared.counters,
            ended,
        })
    }

    /// Resets every connection, so that guests and host programs learn of the end, and ends all
    /// threads.
    pub fn shutdown(self) {
        for (sender, _) in &self.workers {
            let _ = sender.send(WorkerMessage::Shutdown);
        }
        for (_, thread) in self.workers {
            if thread.join().is_err() {
                tracing::error!(
                    "a worker has panicked: its VMs were not served since; report its message above"
                );
            }
        }
        self.control_plane.shutdown();
        // Closing a descriptor tells its peer that the daemon has ended. Descriptors that
        // are not closed by then are left to the exit of the process.
        reaper::drain(REAPER_LIMIT);
    }

    /// Applies [`Reload`] while the daemon runs, and returns when every worker uses the new
    /// configuration. Established connections stay, even if they would no longer be allowed, except
    /// those of VMs that are removed.
    ///
    /// ```
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("attach.sock");
    /// use std::io::ErrorKind;
    /// use zerosock::access::{AccessList, Party, Ports, Rule, Verdict};
    /// use zerosock::attach::{self, AttachConfig};
    /// use zerosock::daemon::{Daemon, DaemonConfig, Reload};
    /// use zerosock::vsock::Endpoint;
    /// use zerosock::{Address, Port};
    ///
    /// let daemon = Daemon::start(DaemonConfig {
    ///     attach: Some(AttachConfig::new(attach::listen(&path)?)),
    ///     ..DaemonConfig::default()
    /// })?;
    /// let db = Endpoint::attach(&path)?;
    /// let listener = db.listen(Port::new(5432), 4)?;
    /// let web = Endpoint::attach(&path)?;
    /// let there = Address::new(db.cid(), Port::new(5432));
    /// # let accepting = std::thread::spawn(move || listener.accept());
    /// let stream = web.connect(there)?;
    /// // From now on every new connection is denied.
    /// let deny_all = Rule {
    ///     name: None,
    ///     verdict: Verdict::Deny,
    ///     from: vec![Party::Any],
    ///     to: vec![Party::Any],
    ///     ports: Ports::all(),
    /// };
    /// daemon.reload(Reload { access: AccessList::new([deny_all]), ..Reload::default() })?;
    /// assert_eq!(web.connect(there).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    /// // The established connection still works.
    /// std::io::Write::write_all(&mut &stream, b"still here")?;
    /// # accepting.join().unwrap()?;
    /// daemon.shutdown();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ReloadError`]; the daemon is unchanged.
    pub fn reload(&self, reload: Reload) -> Result<(), ReloadError> {
        self.control_plane.reload(reload)
    }

    /// Stops all threads between two steps, and passes what another process needs to continue the VMs with a
    /// [`Succession`] on to `keep`: a [`SavedQueuePair`] each. That process may go on with them once this one
    /// is killed; otherwise, drop the value that is returned.
    ///
    /// Front-ends, guests and host programs wait meanwhile. Connections of attached processes, of guest
    /// endpoints and some others are not passed on: the other process resets them.
    ///
    /// # Errors
    /// [`PauseError`]; the daemon goes on.
    pub fn pause(&self, keep: &Keep) -> Result<Paused, PauseError> {
        let workers = self.workers.iter().map(|(sender, _)| sender.clone());
        self.control_plane.pause(workers.collect(), keep)
    }

    /// Readable if a worker has ended without [`shutdown`](Daemon::shutdown). Its VMs have lost their
    /// devices; restart the daemon.
    pub fn worker_ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// The names of threads that have not answered the query of an earlier call. Sends a query to
    /// the other threads. An idle thread wakes up to answer; a stuck one stays in the list until it
    /// continues. Call it at intervals long enough for every thread to answer, as a watchdog does.
    pub fn stalled_threads(&self) -> Vec<String> {
        let mut stalled = Vec::new();
        let mut probes = self.probes.iter();
        match probes.next().map(LivenessProbe::query) {
            Some(Some(query)) => self.control_plane.send_liveness_query(query),
            Some(None) => stalled.push("zerosock-control".to_owned()),
            None => {}
        }
        for ((sender, thread), probe) in self.workers.iter().zip(probes) {
            match probe.query() {
                // A worker that has ended leaves the query unanswered.
                Some(query) => drop(sender.send(WorkerMessage::Liveness(query))),
                None => stalled.push(thread.thread().name().unwrap_or("worker").to_owned()),
            }
        }
        stalled
    }

    /// The processes that are attached now.
    pub fn processes(&self) -> Vec<Process> {
        self.control_plane.directory.processes()
    }

    /// The endpoints that guests have registered now.
    pub fn guest_endpoints(&self) -> Vec<RegisteredEndpoint> {
        self.control_plane.directory.guests.endpoints()
    }

    /// The CID of the attached process or guest endpoint of this name.
    pub fn resolve(&self, name: &Name) -> Option<Cid> {
        self.control_plane.directory.resolve(name)
    }

    /// The counters of each forwarding rule in effect, and of removed ones that still have connections.
    pub fn forward_stats(&self) -> Vec<RuleStats> {
        self.control_plane.board.stats()
    }

    /// What each VM and process that exists has counted, by CID; services of the host are one sum, with the
    /// CID of the host.
    pub fn endpoint_traffic(&self) -> BTreeMap<Cid, EndpointTraffic> {
        self.control_plane.traffic.sums()
    }

    /// How descriptors are divided among VMs and processes.
    pub fn shares(&self) -> Shares {
        *self.control_plane.shares
    }

    /// The counters since the start, summed over all workers and VMs.
    pub fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        self.control_plane.add_to(&mut sum);
        for counters in &self.counters {
            counters.add_to(&mut sum);
        }
        sum
    }
}

fn run_worker(worker: Worker, cpu: Option<usize>, spin: Duration, _signal: EndSignal) {
    if let Some(cpu) = cpu
        && let Err(error) = zerosock_sys::affinity::pin_current_thread(cpu)
    {
        tracing::warn!(cpu, %error, "cannot pin a worker; it runs anywhere");
    }
    if let Err(error) = worker.run(spin) {
        tracing::error!(%error, "the event loop of a worker failed: its VMs are not served; restart the daemon");
    }
}

/// Signals the end of a worker when it is dropped, also by a panic.
struct EndSignal(Arc<OwnedFd>);

impl Drop for EndSignal {
    fn drop(&mut self) {
        // Fails only if the counter is full, and then the eventfd is readable.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}
