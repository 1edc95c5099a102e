//! The registry of devices: assigns each queue pair of a device an address on a worker, keeps the
//! routes, and sends devices and routes to the workers.
//!
//! # Invariants
//!
//! - The workers' routes are snapshots of the registry's, sent in the order of the changes.
//! - An address is reused only after the workers have removed the device. It has a generation, so that
//!   a late message reaches no successor.
//!
//! The registry only sends messages to workers, so it serves workers with threads of their own and a
//! worker that the embedding program drives.

use std::collections::{BTreeSet, HashMap};
use std::ops::RangeInclusive;
use std::sync::Arc;
use zerosock_proto::{Cid, Port};
use zerosock_sys::account::Budget;
use zerosock_vhost_user::{DeviceModel, DevicePort, Notice};
use zerosock_virtio::device::WorkerDevice;
use zerosock_virtio::mailbox::Sender;
use zerosock_virtio::numbers::Numbers;
use zerosock_virtio::outbox::DeviceAddr;
use zerosock_virtio::worker::WorkerPort;

use super::rules::{CheckedRules, RuleSet, RuleSetError, WantedRules};
use crate::device::factory::{Member, Terms};
use crate::device::guest_orders::GuestOrder;
use crate::device::state::sibling_message::SiblingMessage;
use crate::device::traffic::TrafficBoard;
use crate::device::{Device, Shared, WorkerMessage};
use crate::routing::Routes;
use crate::routing::access::AccessList;
use crate::routing::name::Name;

/// The routes to a device.
#[derive(Copy, Clone, Debug, Default)]
pub(crate) struct RouteEntry<'a> {
    pub(crate) groups: &'a [String],
    /// The ports that others may connect to; empty: all.
    pub(crate) ports: &'a [Port],
    pub(crate) name: Option<&'a Name>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct DeviceRegistry {
    workers: Vec<Sender<WorkerMessage>>,
    numbers: Vec<Numbers>,
    routes: Arc<Routes>,
    rules: RuleSet,
    /// CIDs of VMs that are being removed, and of processes and guest endpoints until they are removed.
    reserved: BTreeSet<Cid>,
    /// Names of processes, services and guest endpoints, until they are removed.
    names: BTreeSet<Name>,
    terms: Terms,
    budget: Budget,
    /// The addresses of all queue pairs of a device, by the address of its first.
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
            rules: RuleSet::new(workers.clone(), budget.clone()),
            workers,
            numbers,
            routes: Arc::default(),
            reserved: BTreeSet::new(),
            names: BTreeSet::new(),
            terms,
            budget,
            queue_pairs: HashMap::new(),
        }
    }

    /// Whether a device has this CID, or the CID is reserved.
    pub(crate) fn contains(&self, cid: Cid) -> bool {
        self.routes.contains(cid) || self.reserved.contains(&cid)
    }

    /// A CID of `cids` that no device has and which is not reserved: `next` or the first behind it, so that CIDs are
    /// reused as late as possible.
    pub(crate) fn free_cid(&self, cids: &RangeInclusive<u32>, next: &mut u32) -> Option<Cid> {
        let later = (*next).max(*cids.start())..=*cids.end();
        let found = later.chain(cids.clone()).map(Cid::new);
        let is_free = |cid: &Cid| cid.is_guest() && !self.contains(*cid);
        // Bounds the search: four CIDs are reserved for ever.
        let most = 2 * (self.routes.len() + self.reserved.len()) + 8;
        let cid = found.take(most).find(is_free)?;
        *next = cid.get().wrapping_add(1);
        Some(cid)
    }

    /// Whether an endpoint or a service has this name.
    pub(crate) fn has_name(&self, name: &Name) -> bool {
        self.names.contains(name)
    }

    /// Keeps others from having this name.
    pub(crate) fn take_name(&mut self, name: &Name) {
        self.names.insert(name.clone());
    }

    /// Frees a name.
    pub(crate) fn release_name(&mut self, name: &Name) {
        self.names.remove(name);
    }

    /// The budget of descriptors and memory that all devices share.
    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// The counters of the devices.
    pub(crate) fn traffic(&self) -> &TrafficBoard {
        &self.terms.traffic
    }

    /// The current routes.
    pub(crate) fn routes(&self) -> &Arc<Routes> {
        &self.routes
    }

    /// Replaces the access rules. Call [`publish_routes`](DeviceRegistry::publish_routes) afterwards.
    pub(crate) fn set_access(&mut self, access: AccessList) {
        Arc::make_mut(&mut self.routes).set_access(access);
    }

    /// The forwarding rules and their threads.
    pub(super) fn rules(&mut self) -> &mut RuleSet {
        &mut self.rules
    }

    /// Checks forwarding rules: as [`RuleSet::check`].
    pub(super) fn check_rules(
        &mut self,
        wanted: WantedRules,
        has_paths: bool,
    ) -> Result<CheckedRules, RuleSetError> {
        self.rules.check(self.routes.forward(), wanted, has_paths)
    }

    /// Replaces the forwarding rules. Call [`publish_routes`](DeviceRegistry::publish_routes)
    /// afterwards.
    pub(super) fn set_rules(&mut self, checked: CheckedRules) {
        let forward = self.rules.set(checked);
        Arc::make_mut(&mut self.routes).set_forward(forward);
    }

    /// Sends routes and rules to the thread of the listeners, before the workers run.
    pub(super) fn publish_listeners(&mut self) {
        self.rules.publish(&self.routes, None);
    }

    /// Replaces the groups of an endpoint. Call [`publish_routes`](DeviceRegistry::publish_routes)
    /// afterwards.
    pub(crate) fn set_groups(&mut self, cid: Cid, groups: &[String]) {
        Arc::make_mut(&mut self.routes).set_groups(cid, groups);
    }

    /// Keeps other devices from using this CID, whether or not it has a route.
    pub(crate) fn reserve(&mut self, cid: Cid) {
        self.reserved.insert(cid);
    }

    /// Ends the reservation of a CID.
    pub(crate) fn release_cid(&mut self, cid: Cid) {
        self.reserved.remove(&cid);
    }

    /// Assigns `cid` an address on the worker with the fewest devices, and adds a route. Does not
    /// publish the routes: for devices that exist before a worker starts. `None`: no address is free.
    pub(crate) fn assign(&mut self, cid: Cid, entry: RouteEntry<'_>) -> Option<DeviceAddr> {
        let addr = self.allocate()?;
        self.route(addr, cid, entry);
        Some(addr)
    }

    fn route(&mut self, addr: DeviceAddr, cid: Cid, entry: RouteEntry<'_>) {
        let routes = Arc::make_mut(&mut self.routes);
        routes.add(cid, addr, entry.groups);
        if !entry.ports.is_empty() {
            routes.limit_ports(cid, entry.ports.iter().copied());
        }
        if let Some(name) = entry.name {
            routes.set_name(cid, name);
        }
    }

    /// Allocates an address for each queue pair, on consecutive workers. Returns the first.
    fn allocate(&mut self) -> Option<DeviceAddr> {
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
                number: vm,
            });
        }
        let addr = *queue_pairs.first()?;
        self.queue_pairs.insert(addr, queue_pairs.into());
        Some(addr)
    }

    /// Allocates an address for a device with one queue pair, on this worker.
    fn allocate_on(&mut self, worker: u32) -> Option<DeviceAddr> {
        let number = self.numbers.get_mut(worker as usize)?.take()?;
        let addr = DeviceAddr { worker, number };
        self.queue_pairs.insert(addr, Arc::new([addr]));
        Some(addr)
    }

    /// The addresses of a device's queue pairs.
    fn queue_pairs(&self, addr: DeviceAddr) -> Arc<[DeviceAddr]> {
        let queue_pairs = self.queue_pairs.get(&addr).cloned();
        queue_pairs.unwrap_or_else(|| Arc::new([addr]))
    }

    /// Makes the devices of an address: one for each queue pair, in their order.
    pub(crate) fn devices(&self, addr: DeviceAddr, member: Member) -> Vec<Device> {
        self.terms.devices(&self.queue_pairs(addr), member)
    }

    /// Bytes of the memory of a device that outlives the process.
    pub(super) fn state_len(&self) -> usize {
        self.terms.state_len()
    }

    /// The model for the front-end of the device with this CID.
    pub(crate) fn model(&self, cid: Cid) -> Arc<dyn DeviceModel> {
        self.terms.model(cid)
    }

    /// The port through which the control thread sends commands to a device.
    pub(crate) fn port(&self, addr: DeviceAddr) -> Option<Box<dyn DevicePort>> {
        let queue_pairs = self.queue_pairs(addr);
        let mut ports = Vec::new();
        for queue_pair in queue_pairs.iter() {
            let worker = self.workers.get(queue_pair.worker as usize)?.clone();
            let port: Box<dyn DevicePort> = Box::new(WorkerPort {
                number: queue_pair.number,
                worker,
            });
            ports.push(port);
        }
        self.terms.port(ports)
    }

    /// Adds a device while the workers run. When `taken` is dropped, every worker knows it, and the
    /// members of its groups can reach it. `None`: no address is free.
    pub(crate) fn add(
        &mut self,
        member: Member,
        entry: RouteEntry<'_>,
        taken: &Arc<Notice>,
    ) -> Option<DeviceAddr> {
        let addr = self.assign(member.cid, entry)?;
        self.start(addr, member);
        self.publish_routes(taken);
        Some(addr)
    }

    /// As [`add`](DeviceRegistry::add), with one queue pair, on the worker of the first queue pair of the device `other`.
    pub(crate) fn add_beside(
        &mut self,
        other: DeviceAddr,
        member: Member,
        entry: RouteEntry<'_>,
        taken: &Arc<Notice>,
    ) -> Option<DeviceAddr> {
        let addr = self.allocate_on(other.worker)?;
        self.route(addr, member.cid, entry);
        self.start(addr, member);
        self.publish_routes(taken);
        Some(addr)
    }

    /// Sends an order to the device of a VM. It comes behind the devices that were added to its worker before.
    pub(crate) fn order(&self, vm: DeviceAddr, order: GuestOrder) {
        let DeviceAddr { worker, number } = vm;
        let message = SiblingMessage::Guest(Box::new(order));
        self.send(worker, WorkerMessage::Device { number, message });
    }

    /// Adds a service's device and its claims while the workers run. When `taken` is dropped, every
    /// worker routes guests' connections to these ports of the host to it. `None`: no address is free.
    pub(crate) fn add_service(
        &mut self,
        member: Member,
        ports: &[Port],
        taken: &Arc<Notice>,
    ) -> Option<DeviceAddr> {
        let addr = self.allocate()?;
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
        for &DeviceAddr { worker, number: vm } in self.queue_pairs(addr).iter() {
            self.send(worker, WorkerMessage::RemoveDevice { number: vm });
        }
    }

    /// Routes these ports of the host to a service. Every worker does so when `taken` is dropped.
    pub(crate) fn claim(&mut self, addr: DeviceAddr, ports: &[Port], taken: &Arc<Notice>) {
        let routes = Arc::make_mut(&mut self.routes);
        for &port in ports {
            routes.claim(port, addr);
        }
        self.publish_routes(taken);
    }

    /// Removes the routes of these ports of the host. When `taken` is dropped, no worker routes to the
    /// service any more and the ports can be claimed again.
    pub(crate) fn unclaim(&mut self, ports: impl IntoIterator<Item = Port>, taken: &Arc<Notice>) {
        let routes = Arc::make_mut(&mut self.routes);
        for port in ports {
            routes.unclaim(port);
        }
        self.publish_routes(taken);
    }

    /// Removes a service's device and its claims; otherwise as [`remove`](DeviceRegistry::remove).
    pub(crate) fn remove_service(
        &mut self,
        addr: DeviceAddr,
        ports: impl IntoIterator<Item = Port>,
        taken: &Arc<Notice>,
    ) {
        self.stop(addr);
        self.unclaim(ports, taken);
    }

    /// Removes a device. When `taken` is dropped, no worker has it any more and its address can be
    /// [released](DeviceRegistry::release).
    pub(crate) fn remove(&mut self, cid: Cid, addr: DeviceAddr, taken: &Arc<Notice>) {
        Arc::make_mut(&mut self.routes).remove(cid);
        self.stop(addr);
        self.publish_routes(taken);
    }

    /// Frees the addresses of a device that the workers have removed.
    pub(crate) fn release(&mut self, addr: DeviceAddr) {
        let queue_pairs = self.queue_pairs(addr);
        self.queue_pairs.remove(&addr);
        queue_pairs
            .iter()
            .for_each(|&queue_pair| self.release_one(queue_pair));
    }

    fn release_one(&mut self, addr: DeviceAddr) {
        if let Some(numbers) = self.numbers.get_mut(addr.worker as usize) {
            numbers.release(addr.number);
        }
    }

    /// Sends the routes to the workers and to the thread of the listeners. Each uses them when `taken` is dropped.
    pub(crate) fn publish_routes(&mut self, taken: &Arc<Notice>) {
        for worker in 0..self.workers.len() as u32 {
            let (routes, taken) = (Arc::clone(&self.routes), Arc::clone(taken));
            let connector = self.rules.connector().cloned();
            let update = move |shared: &mut Shared| {
                shared.routes = routes;
                shared.connector = connector;
                drop(taken);
            };
            self.send(worker, WorkerMessage::Update(Box::new(update)));
        }
        self.rules.publish(&self.routes, Some(taken));
    }

    fn send(&self, worker: u32, message: WorkerMessage) {
        if let Some(worker) = self.workers.get(worker as usize) {
            // A worker that has ended has no devices; the message, with its reply or notice, is dropped.
            let _ = worker.send(message);
        }
    }
}
