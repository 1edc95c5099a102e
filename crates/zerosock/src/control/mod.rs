//! The control plane of a set of devices: one thread for the control sockets of VMs and of processes
//! that attach.
//!
//! [`prepare`] makes workers with their devices and a [`PreparedControlPlane`]. The daemon then gives
//! each worker a thread; an embedding program drives its only worker itself.
//! [`PreparedControlPlane::start`] lets front-ends connect.
//!
//! # Invariants
//!
//! - No code here is on the packet path.
//! - The control thread never waits for a worker, but for the end of a [pause].

pub mod attach;
pub(crate) mod config;
pub mod guest;
mod listeners;
mod new_vm;
pub(crate) mod pause;
pub(crate) mod registry;
mod reload;
mod rules;
pub(crate) mod shares;
pub(crate) mod socket_file;

use crate::control::attach::directory::Directory;
use crate::control::attach::server::Server;
use crate::control::attach::{AttachConfig, AttachHost, DEFAULT_CIDS};
use crate::control::guest::server::{GuestServer, TimeLimits};
use crate::device::factory::Terms;
use crate::device::traffic::TrafficBoard;
use crate::device::{Limits, Shared, Worker, WorkerMessage};
use crate::routing::access::AccessList;
use crate::routing::forward::RuleBoard;
use crate::stats::{Counters, Stats};
use config::{HostSide, Reload, ReloadError, StartError, VmConfig, system};
use new_vm::NewVm;
use pause::{Keep, PauseError, Paused};
use registry::{DeviceRegistry, RouteEntry};
use reload::{ConfiguredVm, ControlOrder, Order, ReloadHandler, VmStage};
use rules::RuleSetError;
pub(crate) use rules::WantedRules;
use shares::{MemoryLimits, Shares, Wanted};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, channel};
use zerosock_proto::Cid;
use zerosock_proto::vsock::QueuePairs;
use zerosock_sys::account::Budget;
use zerosock_sys::{reaper, socket_path};
use zerosock_vhost_user::liveness::LivenessQuery;
use zerosock_vhost_user::{Control, FaultCounts, FrontendFault, VmSpec};
use zerosock_virtio::device::WorkerDevice;
use zerosock_virtio::mailbox::{Mailbox, Sender};

/// The configuration of a set of devices.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) vms: Vec<VmConfig>,
    pub(crate) workers: usize,
    pub(crate) limits: Limits,
    /// `None`: as [`Shares`] computes it.
    pub(crate) max_connections: Option<usize>,
    pub(crate) queue_pairs: QueuePairs,
    pub(crate) attach: Option<AttachConfig>,
    pub(crate) access: AccessList,
    /// Refuse memory of VMs that can shrink. Memory of processes that can shrink is always refused.
    pub(crate) sealed_memory: bool,
    pub(crate) memory: MemoryLimits,
    pub(crate) rules: WantedRules,
    /// Name servers to ask instead of those of the system.
    pub(crate) name_servers: Vec<SocketAddr>,
}

/// The result of [`prepare`].
pub(crate) struct Prepared {
    /// The caller drives each.
    pub(crate) workers: Vec<Worker>,
    /// A sender to each worker.
    pub(crate) senders: Vec<Sender<WorkerMessage>>,
    /// The counters of each worker.
    pub(crate) counters: Vec<Arc<Counters>>,
    pub(crate) control_plane: PreparedControlPlane,
}

/// A control plane before its thread is started.
pub(crate) struct PreparedControlPlane {
    specs: Vec<VmSpec>,
    registry: DeviceRegistry,
    attach: Option<AttachConfig>,
    guests: GuestServer,
    directory: Arc<Directory>,
    vms: BTreeMap<Cid, ConfiguredVm>,
    sealed_memory: bool,
    shares: Shares,
}

/// Makes workers and their devices. Starts the threads of forwarding rules and of host programs' paths, if
/// there are any, and no other.
pub(crate) fn prepare(setup: Setup) -> Result<Prepared, StartError> {
    if setup.limits.connect.is_zero() {
        return Err(StartError::NoConnectTime);
    }
    let checked = setup.access.check();
    checked.map_err(|same| StartError::Rules(same.into()))?;
    let windows = setup.vms.iter().map(|vm| vm.buf_alloc);
    let of_processes = setup.attach.iter().map(|attach| attach.buf_alloc);
    if windows.chain(of_processes).any(|bytes| bytes == 0) {
        return Err(StartError::EmptyWindow);
    }
    // Else the first connection to a host program goes by way of the connector, which reads them.
    let _ = socket_path::learn_mounts();
    let mut senders = Vec::new();
    let mut mailboxes = Vec::new();
    for _ in 0..setup.workers.max(1) {
        let (sender, mailbox) = Mailbox::new().map_err(system("make a mailbox"))?;
        senders.push(sender);
        mailboxes.push(mailbox);
    }
    let users = setup.attach.as_ref().map_or(0, |attach| {
        let allowed = attach.allowed_uids.iter().chain(&attach.service_uids);
        allowed.collect::<BTreeSet<_>>().len()
    });
    let of_processes = setup.attach.iter().map(|it| &it.host);
    let has_paths = setup
        .vms
        .iter()
        .any(|vm| matches!(vm.host, HostSide::Hybrid { .. }))
        || of_processes
            .clone()
            .any(|host| !matches!(host, AttachHost::None));
    let has_rules = !setup.rules.forward.is_empty() || !setup.rules.listen.is_empty();
    // The clients of listening rules have an account of their own until a device has them.
    let listeners = usize::from(!setup.rules.listen.is_empty());
    let (budget, shares) = shares::budget(Wanted {
        memory: setup.memory,
        vms: setup.vms.len(),
        users: users + listeners,
        host_sockets: setup
            .vms
            .iter()
            .any(|vm| !matches!(vm.host, HostSide::None))
            || has_paths
            || has_rules,
        max_connections: setup.max_connections,
    });
    let terms = Terms {
        max_connections: shares.max_connections,
        connect_timeout: setup.limits.connect,
        queue_pairs: setup.queue_pairs,
        traffic: TrafficBoard::default(),
    };
    let mut registry = DeviceRegistry::new(senders.clone(), terms, budget);
    registry.set_access(setup.access);
    registry.rules().set_name_servers(setup.name_servers);
    let rules = registry
        .check_rules(setup.rules, has_paths)
        .map_err(|error| match error {
            RuleSetError::Rules(error) => StartError::Rules(error),
            RuleSetError::System(error) => system("serve forwarding rules")(error),
        })?;
    registry.set_rules(rules);
    let mut addrs = Vec::new();
    for vm in &setup.vms {
        vm.cid.for_guest()?;
        if registry.contains(vm.cid) {
            return Err(StartError::DuplicateCid(vm.cid));
        }
        let entry = RouteEntry {
            groups: &vm.groups,
            ..RouteEntry::default()
        };
        let addr = registry.assign(vm.cid, entry);
        addrs.push(addr.ok_or(StartError::TooManyVms)?);
    }
    let mut workers = Vec::new();
    let mut counters = Vec::new();
    for (index, mailbox) in mailboxes.into_iter().enumerate() {
        let count = Arc::new(Counters::default());
        counters.push(count.clone());
        let shared = Shared {
            routes: registry.routes().clone(),
            counters: count,
            limits: setup.limits,
            connector: registry.rules().connector().cloned(),
            mailbox: senders.get(index).cloned(),
            app: None,
        };
        let worker = Worker::new(index as u32, senders.clone(), mailbox, shared);
        let worker = worker.map_err(system("make an event loop"))?;
        workers.push(worker);
    }
    let directory: Arc<Directory> = Arc::default();
    let cids = setup
        .attach
        .as_ref()
        .map_or(DEFAULT_CIDS, |it| it.cids.clone());
    let guests = GuestServer::new(cids, TimeLimits::default(), Arc::clone(&directory));
    let mut guests = guests.map_err(system("make a mailbox"))?;
    let mut specs = Vec::new();
    let mut vms = BTreeMap::new();
    for (n, (vm, addr)) in setup.vms.into_iter().zip(addrs).enumerate() {
        let cid = vm.cid;
        let Some(port) = registry.port(addr) else {
            continue;
        };
        let mut vm = NewVm::new(vm, registry.budget().account());
        let member = vm.take_member(
            guests.reports(),
            registry.state_len(),
            registry.rules().board(),
        )?;
        guests.add_vm(cid, vm.guest_share(addr));
        let configured = ConfiguredVm {
            vm: n,
            addr,
            stage: VmStage::Active,
        };
        vms.insert(cid, configured);
        for device in registry.devices(addr, member) {
            if let Some(worker) = workers.get_mut(device.addr().worker as usize) {
                worker.add(device);
            }
        }
        let name = format!("vm{n} (cid {cid})");
        specs.push(vm.into_spec(name, setup.sealed_memory, &registry, port));
    }
    Ok(Prepared {
        workers,
        senders,
        counters,
        control_plane: PreparedControlPlane {
            specs,
            registry,
            attach: setup.attach,
            guests,
            directory,
            vms,
            sealed_memory: setup.sealed_memory,
            shares,
        },
    })
}

impl PreparedControlPlane {
    /// Starts the control thread, which accepts front-ends and processes from now on.
    pub(crate) fn start(mut self) -> Result<ControlPlane, StartError> {
        self.registry.publish_listeners();
        let board = Arc::clone(self.registry.rules().board());
        let traffic = self.registry.traffic().clone();
        let directory = self.directory;
        let budget = self.registry.budget().clone();
        let list = Arc::clone(&directory);
        let server = self.attach.map(|config| Server::new(config, list));
        let server = server
            .transpose()
            .map_err(system("prepare the attach socket"))?;
        let (reload_handler, orders) = ReloadHandler::new(
            self.registry,
            server,
            self.guests,
            self.vms,
            self.sealed_memory,
        );
        let extension = Some(Box::new(reload_handler) as _);
        let control = Control::spawn_with(self.specs, extension)
            .map_err(system("start the control thread"))?;
        Ok(ControlPlane {
            control,
            directory,
            board,
            traffic,
            orders,
            budget,
            shares: Box::new(self.shares),
        })
    }
}

/// See the [module](self). Dropping it ends the control thread as [`ControlPlane::shutdown`] does.
#[derive(Debug)]
pub(crate) struct ControlPlane {
    control: Control,
    /// The attached processes.
    pub(crate) directory: Arc<Directory>,
    /// The counters of forwarding rules.
    pub(crate) board: Arc<RuleBoard>,
    /// The counters of the devices.
    pub(crate) traffic: TrafficBoard,
    orders: mpsc::Sender<ControlOrder>,
    budget: Budget,
    /// How descriptors are divided among peers.
    pub(crate) shares: Box<Shares>,
}

impl ControlPlane {
    /// Adds the counters of the control thread to `sum`.
    pub(crate) fn add_to(&self, sum: &mut Stats) {
        let vms = (0..).map_while(|vm| self.control.stats(vm));
        for control in vms.chain([self.control.dynamic_stats()]) {
            sum.control_faults += FrontendFault::ALL
                .iter()
                .map(|&f| control.faults(f))
                .sum::<u64>();
        }
        self.directory.add_to(sum);
        sum.descriptors_refused = self.budget.refused();
        let reaper = reaper::stats();
        sum.reaper_finished = reaper.finished;
        sum.reaper_stuck = reaper.stuck;
        sum.reaper_threads = reaper.threads as u64;
        sum.reaper_pending = reaper.pending as u64;
        sum.reaper_longest_ms = reaper.longest.as_millis() as u64;
    }

    /// Changes the configuration, and blocks until every worker uses it. Must not be called by a thread
    /// that drives a worker.
    pub(crate) fn reload(&self, reload: Reload) -> Result<(), ReloadError> {
        let (answer, answered) = channel();
        let mut reload = reload;
        let add = std::mem::take(&mut reload.add).into_iter();
        let add = add.map(|vm| NewVm::new(vm, self.budget.account()));
        let order = Order {
            add: add.collect(),
            reload,
            answer,
        };
        let order = ControlOrder::Reload(Box::new(order));
        self.orders.send(order).map_err(|_| ReloadError::Ending)?;
        self.control.wake_extension();
        answered.recv().map_err(|_| ReloadError::Ending)?
    }

    /// Pauses the control thread and the workers: see [`pause`].
    pub(crate) fn pause(
        &self,
        workers: Vec<Sender<WorkerMessage>>,
        keep: &Keep,
    ) -> Result<Paused, PauseError> {
        let order = |order| {
            let sent = self.orders.send(ControlOrder::Pause(order)).is_ok();
            self.control.wake_extension();
            sent
        };
        pause::pause(workers, order, keep)
    }

    /// Sends a liveness query to the control thread.
    pub(crate) fn send_liveness_query(&self, query: LivenessQuery) {
        self.control.send_liveness_query(query);
    }

    /// A live view of the faults of all front-ends.
    pub(crate) fn faults(&self) -> FaultCounts {
        self.control.fault_counts()
    }

    /// The attached processes, for other threads.
    pub(crate) fn directory(&self) -> Arc<Directory> {
        Arc::clone(&self.directory)
    }

    /// Disconnects all front-ends and ends the thread. Blocks until the workers have answered; a worker
    /// that runs must be driven meanwhile on another thread. Workers that have ended are skipped.
    pub(crate) fn shutdown(self) {
        self.control.shutdown();
    }
}
