//! Configuration changes at run time: the extension of the control thread that owns the device
//! registry, the configured VMs, the attach server and the server of guest endpoints.
//!
//! # Invariants
//!
//! - An order is carried out completely or not at all.
//! - An order is answered when every worker uses the new routes.
//! - A VM keeps its CID and its device until nothing uses the pages of its guest endpoints: only its device finds that
//!   out, and its agents may ask for it when the VM is added again.
//! - Connections are not affected, except those of VMs that are removed.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use zerosock_proto::Cid;

use super::config::{Reload, ReloadError, StartError};
use super::new_vm::NewVm;
use super::pause::PauseOrder;
use super::rules::{CheckedRules, RuleSetError, WantedRules};
use crate::control::attach::server::Server;
use crate::control::guest::server::{ControlContext, FIRST_KEY, GuestServer};
use crate::control::registry::{DeviceRegistry, RouteEntry};
use crate::device::factory::Member;
use zerosock_vhost_user::{ControlExtension, FrontendRegistry, Notice};
use zerosock_virtio::outbox::DeviceAddr;

/// A configuration change, and where its result goes.
#[derive(Debug)]
pub(super) struct Order {
    /// Used instead of [`Reload::add`].
    pub(super) add: Vec<NewVm>,
    pub(super) reload: Reload,
    pub(super) answer: Sender<Result<(), ReloadError>>,
}

/// What another thread asks of the control thread.
#[derive(Debug)]
pub(super) enum ControlOrder {
    Reload(Box<Order>),
    Pause(PauseOrder),
}

/// A configured VM.
#[derive(Debug)]
pub(super) struct ConfiguredVm {
    /// Its number on the control thread.
    pub(super) vm: usize,
    pub(super) addr: DeviceAddr,
    pub(super) stage: VmStage,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum VmStage {
    Active,
    /// Its front-end is being disconnected.
    Leaving,
    /// It has no front-end. Its device stays until nothing uses the pages of its guest endpoints.
    Ending,
    /// The workers are removing it; the number of the notice.
    Removing(u64),
}

/// See the [module](self).
pub(super) struct ReloadHandler {
    registry: DeviceRegistry,
    /// Lets processes attach, if that is configured. Borrows the registry for each call.
    server: Option<Server>,
    /// Lets guests register endpoints. Borrows registry and front-ends for each call.
    guests: GuestServer,
    vms: BTreeMap<Cid, ConfiguredVm>,
    orders: Receiver<ControlOrder>,
    /// Orders with routes that some workers do not use yet, by the number of the notice.
    unpublished: Vec<(u64, Sender<Result<(), ReloadError>>)>,
    sealed_memory: bool,
}

impl ReloadHandler {
    /// Makes the handler and the sender of orders to it.
    pub(super) fn new(
        registry: DeviceRegistry,
        server: Option<Server>,
        guests: GuestServer,
        vms: BTreeMap<Cid, ConfiguredVm>,
        sealed_memory: bool,
    ) -> (ReloadHandler, Sender<ControlOrder>) {
        let (sender, orders) = channel();
        let reload_handler = ReloadHandler {
            registry,
            server,
            guests,
            vms,
            orders,
            unpublished: Vec::new(),
            sealed_memory,
        };
        (reload_handler, sender)
    }

    /// Whether an order can be carried out. Changes nothing.
    fn check(&self, add: &[NewVm], reload: &Reload) -> Result<(), ReloadError> {
        let known = |cid: &Cid| {
            self.vms
                .get(cid)
                .is_some_and(|vm| vm.stage == VmStage::Active)
        };
        let named = reload.remove.iter().chain(reload.groups.keys());
        let named = named.chain(reload.guest_endpoints.keys());
        if let Some(&cid) = named.clone().find(|cid| !known(cid)) {
            return Err(ReloadError::UnknownVm(cid));
        }
        let mut added = std::collections::BTreeSet::new();
        for vm in add {
            let cid = vm.cid;
            // A VM keeps its CID until it is removed.
            let taken = self.vms.contains_key(&cid) || self.registry.contains(cid);
            if taken || !added.insert(cid) {
                return Err(ReloadError::CidTaken(cid));
            }
        }
        if reload.attach.is_some() && self.server.is_none() {
            return Err(ReloadError::NoAttachSocket);
        }
        let checked = reload.access.check();
        checked.map_err(|same| ReloadError::Rules(same.into()))
    }

    /// Checks the forwarding rules of an order, and starts the threads that it needs.
    fn check_rules(
        &mut self,
        add: &[NewVm],
        reload: &mut Reload,
    ) -> Result<CheckedRules, ReloadError> {
        let wanted = WantedRules {
            forward: std::mem::take(&mut reload.forward),
            listen: std::mem::take(&mut reload.listen),
        };
        self.registry
            .check_rules(wanted, add.iter().any(NewVm::has_paths))
            .map_err(|error| match error {
                RuleSetError::Rules(error) => ReloadError::Rules(error),
                RuleSetError::System(error) => ReloadError::RuleThreads(error),
            })
    }

    fn apply(&mut self, order: Order, frontends: &mut FrontendRegistry) {
        let Order {
            add,
            mut reload,
            answer,
        } = order;
        let checked = self.check(&add, &reload);
        let rules = match checked.and_then(|()| self.check_rules(&add, &mut reload)) {
            Ok(rules) => rules,
            Err(error) => {
                // The receiver may be gone.
                let _ = answer.send(Err(error));
                return;
            }
        };
        // Everything that can fail comes before the first change, as far as possible.
        let mut ready = Vec::new();
        for vm in add {
            match self.prepare(vm) {
                Ok(prepared) => ready.push(prepared),
                Err(error) => {
                    let _ = answer.send(Err(error));
                    return;
                }
            }
        }
        let (number, notice) = frontends.notice();
        let mut added = Vec::new();
        for (vm, member) in ready {
            let cid = member.cid;
            match self.add(vm, member, &notice, frontends) {
                Ok(()) => added.push(cid),
                Err(error) => {
                    // Undo: remove those that were added.
                    for cid in added {
                        self.begin_removal(cid, frontends);
                    }
                    let _ = answer.send(Err(error));
                    return;
                }
            }
        }
        for cid in &reload.remove {
            self.begin_removal(*cid, frontends);
        }
        for (cid, groups) in &reload.groups {
            self.registry.set_groups(*cid, groups);
            self.guests.set_groups(*cid, groups, &mut self.registry);
        }
        for (cid, options) in std::mem::take(&mut reload.guest_endpoints) {
            self.with_guests(frontends, |guests, cx| {
                guests.set_options(cid, options, cx);
            });
        }
        if let (Some(terms), Some(server)) = (reload.attach, &mut self.server) {
            server.set_terms(terms, &mut self.registry);
        }
        self.registry.set_access(reload.access);
        self.registry.set_rules(rules);
        self.registry.publish_routes(&notice);
        self.unpublished.push((number, answer));
    }

    fn add(
        &mut self,
        vm: NewVm,
        member: Member,
        notice: &Arc<Notice>,
        frontends: &mut FrontendRegistry,
    ) -> Result<(), ReloadError> {
        let cid = member.cid;
        let entry = RouteEntry {
            groups: &vm.groups,
            ..RouteEntry::default()
        };
        let added = self.registry.add(member, entry, notice);
        let addr = added.ok_or(ReloadError::Full(cid))?;
        let port = self.registry.port(addr).ok_or(ReloadError::Full(cid))?;
        let share = vm.guest_share(addr);
        let name = format!("vm (cid {cid})");
        match frontends.add(vm.into_spec(name, self.sealed_memory, &self.registry, port)) {
            Ok(vm) => {
                let stage = VmStage::Active;
                self.vms.insert(cid, ConfiguredVm { vm, addr, stage });
                self.guests.add_vm(cid, share);
                Ok(())
            }
            Err(source) => {
                // The address is not reused: this happens only when the system is out of memory.
                let (_, notice) = frontends.notice();
                self.registry.remove(cid, addr, &notice);
                Err(ReloadError::Socket { cid, source })
            }
        }
    }

    /// Begins the removal of a VM: disconnects its front-end. The CID stays reserved until then.
    fn begin_removal(&mut self, cid: Cid, frontends: &mut FrontendRegistry) {
        if let Some(configured) = self.vms.get_mut(&cid) {
            configured.stage = VmStage::Leaving;
            let vm = configured.vm;
            self.registry.reserve(cid);
            self.with_guests(frontends, |guests, cx| guests.set_options(cid, None, cx));
            frontends.close(vm, "it is not configured any more");
        }
    }

    /// The fallible part of adding a VM.
    fn prepare(&mut self, mut vm: NewVm) -> Result<(NewVm, Member), ReloadError> {
        let cid = vm.cid;
        let refuse = |source| ReloadError::Host {
            cid,
            source: Box::new(source),
        };
        cid.for_guest().map_err(|error| refuse(error.into()))?;
        if vm.buf_alloc == 0 {
            return Err(refuse(StartError::EmptyWindow));
        }
        let state_len = self.registry.state_len();
        let rules = Arc::clone(self.registry.rules().board());
        let member = vm.take_member(self.guests.reports(), state_len, &rules);
        let member = member.map_err(refuse)?;
        let socket = |errno: Errno| ReloadError::Socket {
            cid,
            source: errno.into(),
        };
        rustix::io::ioctl_fionbio(&vm.listener, true).map_err(socket)?;
        Ok((vm, member))
    }

    /// Calls the server of guest endpoints.
    fn with_guests(
        &mut self,
        frontends: &mut FrontendRegistry,
        call: impl FnOnce(&mut GuestServer, &mut ControlContext<'_>),
    ) {
        let registry = &mut self.registry;
        call(
            &mut self.guests,
            &mut ControlContext {
                registry,
                frontends,
            },
        );
    }

    /// The configured VM with this number of a front-end. A VM without one has none any more.
    fn cid_of(&self, vm: usize) -> Option<Cid> {
        let mut vms = self.vms.iter().filter(|(_, configured)| {
            matches!(configured.stage, VmStage::Active | VmStage::Leaving)
        });
        vms.find(|(_, configured)| configured.vm == vm)
            .map(|(&cid, _)| cid)
    }

    /// Removes the devices of VMs that have no front-end and no guest endpoints any more.
    fn remove_ended(&mut self, frontends: &mut FrontendRegistry) {
        for (&cid, configured) in &mut self.vms {
            if configured.stage == VmStage::Ending && !self.guests.has_attachments(cid) {
                let (number, notice) = frontends.notice();
                configured.stage = VmStage::Removing(number);
                self.registry.remove(cid, configured.addr, &notice);
            }
        }
    }
}

impl ControlExtension for ReloadHandler {
    fn begin(&mut self, frontends: &mut FrontendRegistry) -> io::Result<()> {
        self.guests.watch(frontends)?;
        match &mut self.server {
            Some(server) => server.begin(frontends),
            None => Ok(()),
        }
    }

    fn end(&mut self, frontends: &mut FrontendRegistry) {
        self.guests.unwatch(frontends);
        if let Some(server) = &mut self.server {
            server.end(frontends);
        }
    }

    fn ready(&mut self, key: u32, flags: EventFlags, frontends: &mut FrontendRegistry) {
        if key >= FIRST_KEY {
            self.with_guests(frontends, |guests, cx| guests.ready(key, cx));
            self.remove_ended(frontends);
        } else if let Some(server) = &mut self.server {
            server.ready(key, flags, &mut self.registry, frontends);
        }
    }

    fn woken(&mut self, frontends: &mut FrontendRegistry) {
        while let Ok(order) = self.orders.try_recv() {
            match order {
                ControlOrder::Reload(order) => self.apply(*order, frontends),
                ControlOrder::Pause(order) => order.wait(),
            }
        }
    }

    fn vm_removed(&mut self, vm: usize, frontends: &mut FrontendRegistry) {
        let Some(cid) = self.cid_of(vm) else {
            if let Some(server) = &mut self.server {
                server.vm_removed(vm, &mut self.registry, frontends);
            }
            return;
        };
        if let Some(configured) = self.vms.get_mut(&cid) {
            configured.stage = VmStage::Ending;
        }
        self.remove_ended(frontends);
    }

    fn notice_dropped(&mut self, number: u64, frontends: &mut FrontendRegistry) {
        if let Some(at) = self
            .unpublished
            .iter()
            .position(|&(notice, _)| notice == number)
        {
            let (_, answer) = self.unpublished.swap_remove(at);
            let _ = answer.send(Ok(()));
        }
        let gone = VmStage::Removing(number);
        let gone = self
            .vms
            .iter()
            .find(|(_, configured)| configured.stage == gone);
        if let Some((&cid, _)) = gone
            && let Some(configured) = self.vms.remove(&cid)
        {
            self.registry.release(configured.addr);
            self.registry.release_cid(cid);
            self.with_guests(frontends, |guests, cx| guests.vm_removed(cid, cx));
            tracing::info!(%cid, "VM gone");
        }
        self.with_guests(frontends, |guests, cx| guests.notice_dropped(number, cx));
        self.remove_ended(frontends);
        if let Some(server) = &mut self.server {
            server.notice_dropped(number, &mut self.registry, frontends);
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let server = self.server.as_ref().and_then(Server::deadline);
        server.into_iter().chain(self.guests.deadline()).min()
    }

    fn time_passed(&mut self, now: Instant, frontends: &mut FrontendRegistry) {
        self.with_guests(frontends, |guests, cx| guests.time_passed(now, cx));
        if let Some(server) = &mut self.server {
            server.time_passed(now, &mut self.registry, frontends);
        }
    }
}
