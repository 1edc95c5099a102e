//! A list of the attached processes, and of guest endpoints, for threads other than the control thread. Their servers
//! write it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use zerosock_proto::{Cid, Port};

use crate::routing::name::Name;
use crate::stats::{Counter, Stats};

/// An attached process, or a host service.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Process {
    /// The CID; that of the host for a service.
    pub cid: Cid,
    /// The name, if it has one.
    pub name: Option<Name>,
    /// The user at the time of connect(2).
    pub uid: u32,
    /// The process id at the time of connect(2).
    pub pid: i32,
    /// The ports of the host that it has claimed; empty unless it is a service.
    pub claims: Vec<Port>,
}

impl Process {
    /// Whether it is a host service.
    pub fn is_service(&self) -> bool {
        self.cid == Cid::HOST
    }
}

/// An endpoint that a guest has registered, on pages of its memory.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct RegisteredEndpoint {
    /// The CID.
    pub cid: Cid,
    /// The name, if it has one.
    pub name: Option<Name>,
    /// The CID of the VM.
    pub vm: Cid,
    /// Bytes of its pages.
    pub memory: u64,
}

/// The guest endpoints of a [`Directory`], and the counters of their server. The control thread writes them.
#[derive(Debug, Default)]
pub(crate) struct GuestDirectory {
    /// By the number of the attachment.
    endpoints: Mutex<BTreeMap<u64, RegisteredEndpoint>>,
    registered: Counter,
    /// Pages that have not shown their values.
    pub(crate) page_failures: Counter,
    pub(crate) refused: Counter,
}

impl GuestDirectory {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, RegisteredEndpoint>> {
        // As in `Directory`.
        let endpoints = self.endpoints.lock();
        endpoints.unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn insert(&self, attachment: u64, endpoint: RegisteredEndpoint) {
        self.lock().insert(attachment, endpoint);
        self.registered.add(1);
    }

    pub(crate) fn remove(&self, attachment: u64) {
        self.lock().remove(&attachment);
    }

    pub(crate) fn endpoints(&self) -> Vec<RegisteredEndpoint> {
        self.lock().values().cloned().collect()
    }

    fn add_to(&self, sum: &mut Stats) {
        sum.guest_endpoints += self.lock().len() as u64;
        sum.guest_registered += self.registered.get();
        sum.guest_page_failures += self.page_failures.get();
        sum.guest_refused += self.refused.get();
    }
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Directory {
    /// By number on the control thread.
    processes: Mutex<BTreeMap<usize, Process>>,
    refused: AtomicU64,
    pub(crate) guests: GuestDirectory,
}

impl Directory {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Process>> {
        // Each change is one insert or remove, so a poisoned lock guards a consistent value.
        self.processes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn insert(&self, vm: usize, process: Process) {
        self.lock().insert(vm, process);
    }

    pub(super) fn remove(&self, vm: usize) {
        self.lock().remove(&vm);
    }

    pub(super) fn set_claims(&self, vm: usize, claims: Vec<Port>) {
        if let Some(process) = self.lock().get_mut(&vm) {
            process.claims = claims;
        }
    }

    pub(super) fn count_refusal(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn processes(&self) -> Vec<Process> {
        let mut processes: Vec<Process> = self.lock().values().cloned().collect();
        processes.sort_by_key(|process| (process.cid, process.pid));
        processes
    }

    pub(crate) fn resolve(&self, name: &Name) -> Option<Cid> {
        let processes = self.lock();
        let found = processes.values().find(|p| p.name.as_ref() == Some(name));
        if let Some(process) = found {
            return Some(process.cid);
        }
        let guests = self.guests.lock();
        let found = guests.values().find(|it| it.name.as_ref() == Some(name));
        found.map(|endpoint| endpoint.cid)
    }

    pub(crate) fn add_to(&self, sum: &mut Stats) {
        let processes = self.lock();
        let services = processes.values().filter(|p| p.is_service());
        let claims = services.clone().map(|service| service.claims.len() as u64);
        sum.claimed_ports += claims.sum::<u64>();
        let services = services.count() as u64;
        sum.services += services;
        sum.attached += processes.len() as u64 - services;
        sum.attach_refused += self.refused.load(Ordering::Relaxed);
        self.guests.add_to(sum);
    }
}
