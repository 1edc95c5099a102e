//! Who is a device of which worker: places are given out here, and devices sent to their workers.
//!
//! All that a registry needs of the workers is a way to send them messages, so it is the same for
//! workers with threads of their own and for one that a program steps itself. What must hold: the
//! workers' tables of routes are snapshots of the one here, sent in the order of the changes; a
//! place is given out again only after the device has left.

use crate::device::model::VsockModel;
use crate::device::queue_pair_ports::QueuePairPorts;
use crate::device::{Device, HostEnd};
use crate::io::mailbox::Sender;
use crate::io::numbers::Numbers;
use crate::routing::access::AccessList;
use crate::routing::name::Name;
use crate::routing::{DeviceAddr, Routes};
use crate::worker::messages::WorkerMessage;
use std::collections::BTreeSet;
use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use zerosock_proto::vsock::{LocalCids, PortTable, QueuePairs, Shard, ShardConfig};
use zerosock_proto::{Cid, Port};
use zerosock_sys::account::{Account, Budget};
use zerosock_vhost_user::{DeviceCommand, DeviceModel, DevicePort, Notice, Reply};

/// Resets that may wait for a buffer of the guest before its packets must wait.
const MAX_PENDING_RESETS: usize = 1024;

/// What holds for the connections of every device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) max_connections: usize,
    pub(crate) connect_timeout: Duration,
    /// Most queue pairs of a device.
    pub(crate) queue_pairs: QueuePairs,
}

/// What a device is to be.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) cid: Cid,
    pub(crate) host: HostEnd,
    pub(crate) buf_alloc: u32,
    /// A host service, and from which ports it may connect beside those that it has claimed.
    pub(crate) service: Option<RangeInclusive<Port>>,
    /// It has no VM.
    pub(crate) process: bool,
    pub(crate) account: Account,
}

/// How a device is entered in the table of routes.
#[derive(Copy, Clone, Debug, Default)]
pub(crate) struct Entry<'a> {
    pub(crate) groups: &'a [String],
    /// Empty: all.
    pub(crate) ports: &'a [Port],
    pub(crate) name: Option<&'a Name>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct DeviceRegistry {
    workers: Vec<Sender<WorkerMessage>>,
    numbers: Vec<Numbers>,
    routes: Arc<Routes>,
    /// CIDs of those that leave.
    reserved: BTreeSet<Cid>,
    terms: Terms,
    budget: Budget,
    /// The places of all queue pairs of a device, by that of its first.
    queue_pairs: HashMap<DeviceAddr, Arc<[DeviceAddr]>>,
}

impl DeviceRegistry {
    pub(crate) fn new(
        workers: Vec<Sender<WorkerMessage>>,
        terms: Terms,
        budget: Budget,
    ) -> DeviceRegistry {
        let mut numbers = Vec::new();
        numbers.resize_with(workers.len(), Numbers::default);
        DeviceRegistry {
            workers,
            numbers,
            routes: Arc::default(),
            reserved: BTreeSet::new(),
            terms,
            budget,
            queue_pairs: HashMap::new(),
        }
    }

    /// Whether a device has this CID, or it is reserved.
    pub(crate) fn contains(&self, cid: Cid) -> bool {
        self.routes.contains(cid) || self.reserved.contains(&cid)
    }

    /// What all devices share.
    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// What the front-end of the device with this CID is told of it.
    pub(crate) fn model(&self, cid: Cid) -> Arc<dyn DeviceModel> {
        Arc::new(VsockModel {
            cid,
            max_pairs: self.terms.queue_pairs,
        })
    }

    /// Devices that have a route, and CIDs that are reserved.
    pub(crate) fn len(&self) -> usize {
        self.routes.len() + self.reserved.len()
    }

    /// The table as it is now.
    pub(crate) fn routes(&self) -> &Arc<Routes> {
        &self.routes
    }

    /// The rules of the table. The workers are not told, as by [`enrol`](DeviceRegistry::enrol).
    pub(crate) fn set_access(&mut self, access: AccessList) {
        Arc::make_mut(&mut self.routes).set_access(access);
    }

    /// From now on the endpoint is in these groups. The workers are not told, as by
    /// [`enrol`](DeviceRegistry::enrol).
    pub(crate) fn set_groups(&mut self, cid: Cid, groups: &[String]) {
        Arc::make_mut(&mut self.routes).set_groups(cid, groups);
    }

    /// Nobody gets this CID until it is given back, with or without a route.
    pub(crate) fn reserve(&mut self, cid: Cid) {
        self.reserved.insert(cid);
    }

    /// The CID that was reserved is anybody's.
    pub(crate) fn give_back(&mut self, cid: Cid) {
        self.reserved.remove(&cid);
    }

    /// Tells the workers of what they have not been told. When `taken` comes back, every worker
    /// goes by it.
    pub(crate) fn tell(&self, taken: &Arc<Notice>) {
        self.tell_routes(taken);
    }

    /// Gives `cid` a place on the worker that has the fewest devices, and a route. The workers are
    /// not told: for those who are there before a worker starts. `None`: all places are taken.
    pub(crate) fn enrol(&mut self, cid: Cid, entry: Entry<'_>) -> Option<DeviceAddr> {
        let addr = self.take_places()?;
        let routes = Arc::make_mut(&mut self.routes);
        routes.add(cid, addr, entry.groups);
        if !entry.ports.is_empty() {
            routes.limit_ports(cid, entry.ports.iter().copied());
        }
        if let Some(name) = entry.name {
            routes.call(cid, name);
        }
        Some(addr)
    }

    /// A place for each queue pair, on one worker after the other; that of the first.
    fn take_places(&mut self) -> Option<DeviceAddr> {
        let workers = self.numbers.iter().enumerate();
        let (least, _) = workers.min_by_key(|(_, numbers)| numbers.taken())?;
        let mut queue_pairs = Vec::new();
        for pair in 0..usize::from(self.terms.queue_pairs.get()) {
            let worker = (least + pair) % self.numbers.len();
            let Some(vm) = self.numbers.get_mut(worker).and_then(Numbers::take) else {
                for queue_pair in queue_pairs {
                    self.release_one(queue_pair);
                }
                return None;
            };
            queue_pairs.push(DeviceAddr {
                worker: worker as u32,
                vm,
            });
        }
        let addr = *queue_pairs.first()?;
        self.queue_pairs.insert(addr, queue_pairs.into());
        Some(addr)
    }

    /// The places of a device's queue pairs.
    fn queue_pairs(&self, addr: DeviceAddr) -> Arc<[DeviceAddr]> {
        let queue_pairs = self.queue_pairs.get(&addr).cloned();
        queue_pairs.unwrap_or_else(|| Arc::new([addr]))
    }

    /// The devices for a place: one for each queue pair, the first first.
    pub(crate) fn devices(&self, addr: DeviceAddr, member: Member) -> Vec<Device> {
        let Member {
            cid,
            host,
            buf_alloc,
            service,
            process,
            account,
        } = member;
        let ports = Arc::new(PortTable::new());
        let queue_pairs = self.queue_pairs(addr);
        // Host programs come to the first; from each the guest goes to them.
        let outward = host.outward();
        let hosts = std::iter::once(host).chain(std::iter::repeat_with(|| outward.outward()));
        let devices = (0..).zip(queue_pairs.iter()).zip(hosts);
        devices
            .map(|((pair, &queue_pair), host)| {
                let shard = self.shard(cid, buf_alloc, &ports);
                let mut device = Device::new(queue_pair, cid, shard, host, service.clone());
                device.process = process;
                device.set_queue_pair(pair, queue_pairs.clone());
                device.set_account(account.clone());
                device
            })
            .collect()
    }

    fn shard(&self, cid: Cid, buf_alloc: u32, ports: &Arc<PortTable>) -> Shard {
        let config = ShardConfig {
            buf_alloc,
            max_connections: self.terms.max_connections,
            connect_timeout: self.terms.connect_timeout,
            max_pending_resets: MAX_PENDING_RESETS,
            accept_all: true,
            // Who is there, and may be reached, the switch knows when it is asked.
            local: LocalCids::All,
            // The guest's own buffer is the only bound on what goes to it.
            send_limit: Some(u32::MAX),
            ..ShardConfig::device(cid)
        };
        Shard::new(config, ports.clone())
    }

    /// The way to the worker of a device.
    pub(crate) fn port(&self, addr: DeviceAddr) -> Option<Box<dyn DevicePort>> {
        let queue_pairs = self.queue_pairs(addr);
        let mut ports = Vec::new();
        for queue_pair in queue_pairs.iter() {
            let worker = self.workers.get(queue_pair.worker as usize)?.clone();
            let port: Box<dyn DevicePort> = Box::new(WorkerPort {
                vm: queue_pair.vm,
                worker,
            });
            ports.push(port);
        }
        match ports.len() {
            1 => ports.pop(),
            _ => Some(Box::new(QueuePairPorts::new(self.terms.queue_pairs, ports))),
        }
    }

    /// Adds a device while the workers run. When `taken` comes back, every worker knows it, and
    /// everybody in its groups can reach it.
    pub(crate) fn add(
        &mut self,
        member: Member,
        entry: Entry<'_>,
        taken: &Arc<Notice>,
    ) -> Option<DeviceAddr> {
        let addr = self.enrol(member.cid, entry)?;
        self.start(addr, member);
        self.tell_routes(taken);
        Some(addr)
    }

    /// Adds a service's device, with its claims, while the workers run. When `taken` comes back,
    /// every worker sends to it what guests ask of these ports of the host.
    pub(crate) fn add_service(
        &mut self,
        member: Member,
        ports: &[Port],
        taken: &Arc<Notice>,
    ) -> Option<DeviceAddr> {
        let addr = self.take_places()?;
        self.start(addr, member);
        self.claim(addr, ports, taken);
        Some(addr)
    }

    fn start(&self, addr: DeviceAddr, member: Member) {
        for device in self.devices(addr, member) {
            let worker = device.addr().worker;
            self.send(worker, WorkerMessage::AddDevice(Box::new(device)));
        }
    }

    fn stop(&self, addr: DeviceAddr) {
        for &DeviceAddr { worker, vm } in self.queue_pairs(addr).iter() {
            self.send(worker, WorkerMessage::RemoveDevice { vm });
        }
    }

    /// From now on these ports of the host belong to a service. When `taken` comes back, every
    /// worker knows.
    pub(crate) fn claim(&mut self, addr: DeviceAddr, ports: &[Port], taken: &Arc<Notice>) {
        let routes = Arc::make_mut(&mut self.routes);
        for &port in ports {
            routes.claim(port, addr);
        }
        self.tell_routes(taken);
    }

    /// From now on these ports belong to nobody. When `taken` comes back, no worker sends
    /// anything to whose they were, and they can be claimed again.
    pub(crate) fn unclaim(&mut self, ports: impl IntoIterator<Item = Port>, taken: &Arc<Notice>) {
        let routes = Arc::make_mut(&mut self.routes);
        for port in ports {
            routes.unclaim(port);
        }
        self.tell_routes(taken);
    }

    /// Removes a service's device, and its claims, as [`remove`](DeviceRegistry::remove) does.
    pub(crate) fn remove_service(
        &mut self,
        addr: DeviceAddr,
        ports: impl IntoIterator<Item = Port>,
        taken: &Arc<Notice>,
    ) {
        self.stop(addr);
        self.unclaim(ports, taken);
    }

    /// Removes a device that was added. When `taken` comes back, no worker knows it any more, and
    /// its place can be [released](DeviceRegistry::release).
    pub(crate) fn remove(&mut self, cid: Cid, addr: DeviceAddr, taken: &Arc<Notice>) {
        Arc::make_mut(&mut self.routes).remove(cid);
        self.stop(addr);
        self.tell_routes(taken);
    }

    /// The device that had this place is gone, by word of its worker.
    pub(crate) fn release(&mut self, addr: DeviceAddr) {
        let queue_pairs = self.queue_pairs(addr);
        self.queue_pairs.remove(&addr);
        queue_pairs
            .iter()
            .for_each(|&queue_pair| self.release_one(queue_pair));
    }

    fn release_one(&mut self, addr: DeviceAddr) {
        if let Some(numbers) = self.numbers.get_mut(addr.worker as usize) {
            numbers.give_back(addr.vm);
        }
    }

    fn tell_routes(&self, taken: &Arc<Notice>) {
        for worker in 0..self.workers.len() as u32 {
            let message = WorkerMessage::Routes {
                routes: Arc::clone(&self.routes),
                taken: Arc::clone(taken),
            };
            self.send(worker, message);
        }
    }

    fn send(&self, worker: u32, message: WorkerMessage) {
        if let Some(worker) = self.workers.get(worker as usize) {
            // A worker that is gone has no device any more, and drops what it would answer with.
            let _ = worker.send(message);
        }
    }
}

struct WorkerPort {
    vm: u32,
    worker: Sender<WorkerMessage>,
}

impl DevicePort for WorkerPort {
    fn submit(&mut self, command: DeviceCommand, reply: Reply) {
        // A worker that is gone drops the token, and that answers.
        let _ = self.worker.send(WorkerMessage::Command {
            vm: self.vm,
            command,
            reply,
        });
    }
}
