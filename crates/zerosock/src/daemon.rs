//! The daemon: VMs shared out over workers, and one thread for their control sockets.
//!
//! This is what `zerosock serve` runs, and what a program embeds that wants the device in its own
//! process. Nothing here is on the way of a packet.

use crate::control::attach::{AttachConfig, Process};
use crate::control::config::system;
pub use crate::control::config::{
    HostSide, HybridMessages, Reload, ReloadError, StartError, VmConfig,
};
use crate::control::shares::MemoryLimits;
pub use crate::control::shares::Shares;
use crate::control::{self, ControlPlane, Setup};
use crate::device::Limits;
pub use crate::device::host_sockets::hybrid::OkConvention;
use crate::io::mailbox::Sender;
use crate::routing::access::AccessList;
use crate::routing::name::Name;
use crate::stats::Counters;
pub use crate::stats::Stats;
use crate::worker::Worker;
use crate::worker::messages::WorkerMessage;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use zerosock_proto::Cid;
use zerosock_proto::vsock::QueuePairs;
use zerosock_sys::reaper;
use zerosock_vhost_user::liveness::LivenessProbe;

/// What a daemon is made of.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// use std::os::unix::net::UnixListener;
/// use zerosock::Cid;
/// use zerosock::daemon::{Daemon, DaemonConfig, HostSide, VmConfig};
///
/// let vm = VmConfig {
///     cid: Cid::guest(3)?,
///     listener: UnixListener::bind(dir.path().join("vm3.sock"))?,
///     host: HostSide::None,
///     buf_alloc: 1 << 20,
///     queue_size: 1024,
///     groups: vec!["default".into()],
///     require_sealed_memory: false,
/// };
/// let daemon = Daemon::start(DaemonConfig { vms: vec![vm], ..DaemonConfig::default() })?;
/// daemon.shutdown();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DaemonConfig {
    /// The VMs.
    pub vms: Vec<VmConfig>,
    /// Threads that own the VMs; at least one.
    pub workers: usize,
    /// CPUs that the workers are pinned to, in turn; empty: they are not pinned.
    pub cpus: Vec<usize>,
    /// Connections that one VM or process may have; its further requests are answered with a reset.
    ///
    /// None: 131072. Where VMs or processes have sockets of the host, which take a descriptor for each
    /// connection: as many as the descriptors that one VM can have, if that is less, but 64 at least.
    /// [`Daemon::shares`] says how many.
    pub max_connections: Option<usize>,
    /// Bytes of memory that one VM, or all processes of one user together, may have mapped here;
    /// while a memory table is replaced, the old one counts too. A front-end that asks for more is
    /// refused.
    pub max_memory: u64,
    /// Bytes of memory that all VMs and processes together may have mapped here.
    pub max_memory_total: u64,
    /// Bytes that all stalled connections of a VM together may have copied; beyond, the one with
    /// most of them is reset.
    pub max_overflow: usize,
    /// How long a stalled connection may hold chains of the guest before they are copied out.
    pub hold: Duration,
    /// How long a worker looks for more work before it sleeps, while that pays: packets are then
    /// taken sooner and without a kick, and the worker's processor does nothing else meanwhile. Zero:
    /// not at all.
    pub spin: Duration,
    /// Which port the OK line names.
    pub ok: OkConvention,
    /// How long a connect may take, and a CONNECT line.
    pub connect_timeout: Duration,
    /// How long a host program may take none of the bytes that a connection which has ended left
    /// for it. Then its socket is closed, and the bytes are lost.
    pub linger: Duration,
    /// Most queue pairs that a driver may use which knows of them (docs/queue-pairs.md), each on the
    /// next worker: 1 to 16.
    pub queue_pairs: u16,
    /// Whether processes may attach without a VM, and on what terms.
    pub attach: Option<AttachConfig>,
    /// Who may reach whom, beyond what groups say.
    pub access: AccessList,
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
            connect_timeout: Duration::from_secs(2),
            linger: LINGER,
            queue_pairs: 1,
            attach: None,
            access: AccessList::default(),
        }
    }
}

/// How long the end of a daemon waits for the reaper to close what peers have sent.
const REAPER_LIMIT: Duration = Duration::from_secs(1);
const HOLD: Duration = Duration::from_millis(20);
const LINGER: Duration = Duration::from_secs(60);
/// Host programs of one VM that may be connected without having said CONNECT.
const MAX_HANDSHAKES: usize = 1024;
/// Ended connections of one VM whose last bytes the host is still taking.
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
/// A forked child has no copy of its threads, and must neither use nor drop its value: see
/// [forks](crate::vsock#forks).
#[derive(Debug)]
pub struct Daemon {
    control_plane: ControlPlane,
    workers: Vec<(Sender<WorkerMessage>, JoinHandle<()>)>,
    /// The control thread's, then those of the workers.
    probes: Vec<LivenessProbe>,
    counters: Vec<Arc<Counters>>,
    ended: Arc<OwnedFd>,
}

impl Daemon {
    /// Starts the workers and the control thread. When this returns, VMMs and host programs may
    /// connect.
    ///
    /// Memory of VMs that can shrink is taken: the handler for SIGBUS that this installs for the
    /// whole process, as described at [`Host`](crate::vsock::Host), loses that VM alone. That of
    /// processes has to be sealed.
    pub fn start(config: DaemonConfig) -> Result<Daemon, StartError> {
        zerosock_sys::sigbus::install().map_err(system("guard against vanishing memory"))?;
        let limits = Limits {
            handshake: config.connect_timeout,
            connect: config.connect_timeout,
            // A hold of no time would be over before it began, again and again.
            hold: config.hold.max(Duration::from_millis(1)),
            overflow: config.max_overflow,
            // Nobody here holds leases.
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
            queue_pairs: QueuePairs::new(config.queue_pairs).map_err(StartError::QueuePairs)?,
            attach: config.attach,
            access: config.access,
            // The loss of one VM's memory is survived, and nobody else notices.
            sealed_memory: false,
            memory: MemoryLimits {
                each: config.max_memory,
                total: config.max_memory_total,
            },
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
                    let bell = Deathbell(ended.clone());
                    move || run_worker(worker, cpu, config.spin, bell)
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

    /// Ends every connection, so that guests and host programs know at once, and all threads.
    pub fn shutdown(self) {
        for (sender, _) in &self.workers {
            let _ = sender.send(WorkerMessage::Shutdown);
        }
        for (_, thread) in self.workers {
            if thread.join().is_err() {
                tracing::error!("a worker had panicked");
            }
        }
        self.control_plane.shutdown();
        // Those at the other end of a descriptor that waits to be closed learn of the end by it, also
        // if a stuck call keeps this process from ending. What is not closed by then is left.
        reaper::drain(REAPER_LIMIT);
    }

    /// Changes what [`Reload`] names while everything runs, and returns when every worker goes by
    /// it: VMs come and go, groups, access list and the terms of attaching are new. Connections
    /// that exist go on, also those that would not come about any more; only the ones of VMs that
    /// are removed are reset.
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
    /// // From now on nobody reaches anybody.
    /// let nobody = Rule {
    ///     verdict: Verdict::Deny,
    ///     from: vec![Party::Any],
    ///     to: vec![Party::Any],
    ///     ports: Ports::all(),
    /// };
    /// daemon.reload(Reload { access: AccessList::new([nobody]), ..Reload::default() })?;
    /// assert_eq!(web.connect(there).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    /// // What was connected is.
    /// std::io::Write::write_all(&mut &stream, b"still here")?;
    /// # accepting.join().unwrap()?;
    /// daemon.shutdown();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ReloadError`]; nothing has changed.
    pub fn reload(&self, reload: Reload) -> Result<(), ReloadError> {
        self.control_plane.reload(reload)
    }

    /// Becomes readable when a worker has ended although nobody asked it to: its VMs have no
    /// device any more, and the daemon is best started anew.
    pub fn worker_ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// The names of the threads that have not answered the query of an earlier call; the
    /// others are asked now. An idle thread is woken to answer; one that is stuck stays in the
    /// list until it goes on. To be called at intervals in which every thread can answer, for
    /// instance for a watchdog.
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
                // One that has ended leaves the query unanswered.
                Some(query) => drop(sender.send(WorkerMessage::Liveness(query))),
                None => stalled.push(thread.thread().name().unwrap_or("worker").to_owned()),
            }
        }
        stalled
    }

    /// The processes that are attached now.
    pub fn processes(&self) -> Vec<Process> {
        self.control_plane.processes()
    }

    /// The CID of the attached process of this name.
    pub fn resolve(&self, name: &Name) -> Option<Cid> {
        self.control_plane.resolve(name)
    }

    /// How descriptors are shared out among VMs and processes.
    pub fn shares(&self) -> Shares {
        self.control_plane.shares()
    }

    /// What was counted since the start, summed over all workers and VMs.
    pub fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        self.control_plane.add_to(&mut sum);
        for counters in &self.counters {
            counters.add_to(&mut sum);
        }
        sum
    }
}

fn run_worker(worker: Worker, cpu: Option<usize>, spin: Duration, _bell: Deathbell) {
    if let Some(cpu) = cpu
        && let Err(error) = zerosock_sys::affinity::pin_current_thread(cpu)
    {
        tracing::warn!(cpu, %error, "cannot pin a worker; it runs anywhere");
    }
    if let Err(error) = worker.run(spin) {
        tracing::error!(%error, "an event loop failed");
    }
}

/// Rings when a worker ends, also by a panic.
struct Deathbell(Arc<OwnedFd>);

impl Drop for Deathbell {
    fn drop(&mut self) {
        // Non-blocking; a full counter is as readable as any.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}
