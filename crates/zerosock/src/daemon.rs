//! The daemon: VMs shared out over workers, and one thread for their control sockets.
//!
//! This is what `zerosock serve` runs, and what a program embeds that wants the device in its own
//! process. Nothing here is on the way of a packet.

use crate::device::control::{Control, DeviceCommand, DevicePort, Fault, Reply, VmSpec};
use crate::device::{Device, HostEnd, Limits};
use crate::engine::mailbox::{Mailbox, Sender};
use crate::engine::numbers::{MAX_DEVICES, Numbers};
use crate::engine::worker::{Worker, WorkerMessage};
use crate::relay::forward;
pub use crate::relay::hybrid::OkConvention;
use crate::stats::Counters;
pub use crate::stats::Stats;
use crate::switch::{DeviceAddr, Outbox, Routes};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::io;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use zerosock_proto::Cid;
use zerosock_proto::vsock::{LocalCids, PortTable, Shard, ShardConfig};

/// How a guest meets the host.
#[derive(Debug)]
pub enum HostSide {
    /// Hybrid vsock over Unix sockets.
    Hybrid {
        /// Programs that serve the guest's port P listen on `path_P`.
        path: PathBuf,
        /// The bound socket on which programs say `CONNECT <port>`.
        listener: UnixListener,
    },
    /// The machine's own AF_VSOCK.
    Forward {
        /// Connections of the guest to CID 2 go to this CID.
        cid: u32,
        /// Connections to these ports of the machine go to the same ports of the guest.
        listen: Vec<u32>,
    },
    /// The guest reaches siblings only.
    None,
}

/// One VM.
#[derive(Debug)]
pub struct VmConfig {
    /// The guest's CID; two VMs of a daemon never have the same.
    pub cid: Cid,
    /// The bound socket to which the VMM connects.
    pub listener: UnixListener,
    /// How the guest meets the host.
    pub host: HostSide,
    /// Bytes that a connection's sender may have under way to the host: the `buf_alloc` that the
    /// guest is told, and the most that a stalled connection copies.
    pub buf_alloc: u32,
    /// The largest queue that the VMM may set up: a power of two, at most 32768.
    pub queue_size: u16,
    /// Guests with a common group reach each other.
    pub groups: Vec<String>,
}

/// What a daemon is made of.
#[derive(Debug)]
pub struct DaemonConfig {
    /// The VMs.
    pub vms: Vec<VmConfig>,
    /// Threads that own the VMs; at least one.
    pub workers: usize,
    /// CPUs that the workers are pinned to, in turn; empty: they are not pinned.
    pub cpus: Vec<usize>,
    /// Connections that one VM may have.
    pub max_connections: usize,
    /// Bytes that all stalled connections of a VM together may have copied; beyond, the one with
    /// most of them is reset.
    pub max_overflow: usize,
    /// How long a stalled connection may hold chains of the guest before they are copied out.
    pub hold: Duration,
    /// Which port the OK line names.
    pub ok: OkConvention,
    /// How long a connect may take, and a CONNECT line.
    pub connect_timeout: Duration,
}

impl Default for DaemonConfig {
    fn default() -> Self {
        DaemonConfig {
            vms: Vec::new(),
            workers: 1,
            cpus: Vec::new(),
            max_connections: 65_536,
            max_overflow: 64 << 20,
            hold: HOLD,
            ok: OkConvention::default(),
            connect_timeout: Duration::from_secs(2),
        }
    }
}

/// Why a daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Two VMs have the same CID.
    #[error("CID {0} is given to two VMs")]
    DuplicateCid(Cid),
    /// More VMs than can be told apart.
    #[error("more than {MAX_DEVICES} VMs for each worker")]
    TooManyVms,
    /// A port of the machine's AF_VSOCK cannot be listened on.
    #[error("cannot listen on vsock port {port}: {source}")]
    Forward {
        /// The port.
        port: u32,
        /// Why.
        source: io::Error,
    },
    /// The system refused something that every daemon needs.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::System { what, source }
}

const HOLD: Duration = Duration::from_millis(20);
/// Host programs of one VM that may be connected without having said CONNECT.
const MAX_HANDSHAKES: usize = 1024;
/// Ended connections of one VM whose last bytes the host is still taking.
const MAX_LINGERING: usize = 1024;
/// Resets that may wait for a buffer of the guest before its packets must wait.
const MAX_PENDING_RESETS: usize = 1024;

/// A running daemon. Dropping it does not stop it: [`shutdown`](Daemon::shutdown) does.
#[derive(Debug)]
pub struct Daemon {
    control: Control,
    workers: Vec<(Sender<WorkerMessage>, JoinHandle<()>)>,
    counters: Vec<Arc<Counters>>,
    ended: Arc<OwnedFd>,
}

struct Port {
    vm: u32,
    worker: Sender<WorkerMessage>,
}

impl DevicePort for Port {
    fn submit(&mut self, command: DeviceCommand, reply: Reply) {
        // A worker that is gone drops the token, and that answers.
        let _ = self.worker.send(WorkerMessage::Command {
            vm: self.vm,
            command,
            reply,
        });
    }
}

impl Daemon {
    /// Starts the workers and the control thread. When this returns, VMMs and host programs may
    /// connect.
    pub fn start(config: DaemonConfig) -> Result<Daemon, StartError> {
        zerosock_sys::sigbus::install().map_err(system("guard against vanishing memory"))?;
        let workers = config.workers.max(1);
        let (routes, cids) = routes(&config.vms, workers)?;
        let limits = Limits {
            handshake: config.connect_timeout,
            connect: config.connect_timeout,
            // A hold of no time would be over before it began, again and again.
            hold: config.hold.max(Duration::from_millis(1)),
            overflow: config.max_overflow,
            handshakes: MAX_HANDSHAKES,
            lingering: MAX_LINGERING,
            ok: config.ok,
        };
        let mut senders = Vec::new();
        let mut mailboxes = Vec::new();
        for _ in 0..workers {
            let (sender, mailbox) = Mailbox::new().map_err(system("make a mailbox"))?;
            senders.push(sender);
            mailboxes.push(mailbox);
        }
        let mut pool = Vec::new();
        let mut counters = Vec::new();
        for (index, mailbox) in mailboxes.into_iter().enumerate() {
            let outbox = Outbox::new(index as u32, senders.clone());
            let count = Arc::new(Counters::default());
            counters.push(count.clone());
            let worker = Worker::new(mailbox, outbox, routes.clone(), count, limits)
                .map_err(system("make an event loop"))?;
            pool.push(worker);
        }
        let mut specs = Vec::new();
        for (vm, (config_vm, addr)) in config.vms.into_iter().zip(cids).enumerate() {
            let VmConfig {
                cid,
                listener,
                host,
                buf_alloc,
                queue_size,
                ..
            } = config_vm;
            let shard = Shard::new(
                ShardConfig {
                    buf_alloc,
                    max_connections: config.max_connections,
                    connect_timeout: config.connect_timeout,
                    max_pending_resets: MAX_PENDING_RESETS,
                    accept_all: true,
                    local: LocalCids::host_and(routes.siblings(cid)),
                    // The guest's own buffer is the only bound on what goes to it.
                    send_limit: Some(u32::MAX),
                    ..ShardConfig::device(cid)
                },
                Arc::new(PortTable::new()),
            );
            let device = Device::new(addr, cid, shard, host_end(host)?);
            pool[addr.worker as usize].add(device);
            specs.push(VmSpec {
                name: format!("vm{vm}"),
                cid,
                listener,
                max_queue_size: queue_size,
                port: Box::new(Port {
                    vm: addr.vm,
                    worker: senders[addr.worker as usize].clone(),
                }),
            });
        }
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let ended = Arc::new(eventfd(0, flags).map_err(|e| system("make an eventfd")(e.into()))?);
        let mut running = Vec::new();
        for (index, (worker, sender)) in pool.into_iter().zip(senders).enumerate() {
            let cpu = (!config.cpus.is_empty()).then(|| config.cpus[index % config.cpus.len()]);
            let thread = std::thread::Builder::new()
                .name(format!("zerosock-{index}"))
                .spawn({
                    let bell = Deathbell(ended.clone());
                    move || run_worker(worker, cpu, bell)
                })
                .map_err(system("start a worker"))?;
            running.push((sender, thread));
        }
        let control = Control::spawn(specs).map_err(system("start the control thread"))?;
        Ok(Daemon {
            control,
            workers: running,
            counters,
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
        self.control.shutdown();
    }

    /// Becomes readable when a worker has ended although nobody asked it to: its VMs have no
    /// device any more, and the daemon is best started anew.
    pub fn worker_ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// What was counted since the start, summed over all workers and VMs.
    pub fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        let controls = (0..).map_while(|vm| self.control.stats(vm));
        for control in controls {
            sum.control_faults += Fault::ALL.iter().map(|&f| control.faults(f)).sum::<u64>();
        }
        for counters in &self.counters {
            counters.add_to(&mut sum);
        }
        sum
    }
}

fn run_worker(worker: Worker, cpu: Option<usize>, _bell: Deathbell) {
    if let Some(cpu) = cpu
        && let Err(error) = zerosock_sys::affinity::pin_current_thread(cpu)
    {
        tracing::warn!(cpu, %error, "cannot pin a worker; it runs anywhere");
    }
    if let Err(error) = worker.run() {
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

/// Places VM after VM on worker after worker.
fn routes(vms: &[VmConfig], workers: usize) -> Result<(Arc<Routes>, Vec<DeviceAddr>), StartError> {
    let mut numbers: Vec<Numbers> = Vec::new();
    numbers.resize_with(workers, Numbers::default);
    let mut routes = Routes::default();
    let mut addrs = Vec::new();
    for (n, vm) in vms.iter().enumerate() {
        if vms[..n].iter().any(|other| other.cid == vm.cid) {
            return Err(StartError::DuplicateCid(vm.cid));
        }
        let addr = DeviceAddr {
            worker: (n % workers) as u32,
            vm: numbers[n % workers].take().ok_or(StartError::TooManyVms)?,
        };
        routes.add(vm.cid, addr, &vm.groups);
        addrs.push(addr);
    }
    Ok((Arc::new(routes), addrs))
}

fn host_end(host: HostSide) -> Result<HostEnd, StartError> {
    Ok(match host {
        HostSide::Hybrid { path, listener } => {
            listener
                .set_nonblocking(true)
                .map_err(system("prepare a host socket"))?;
            HostEnd::Hybrid {
                path,
                listener: OwnedFd::from(listener),
            }
        }
        HostSide::Forward { cid, listen } => {
            let mut listeners = Vec::new();
            for port in listen {
                let listener =
                    forward::listen(port).map_err(|source| StartError::Forward { port, source })?;
                listeners.push((port, listener));
            }
            HostEnd::Forward { cid, listeners }
        }
        HostSide::None => HostEnd::None,
    })
}
